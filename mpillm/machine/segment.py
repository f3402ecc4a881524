"""Memory shared by the ranks of one node; the kernels of jit/exchange.py meet and exchange in it.

The file is reserved with ``posix_fallocate`` (a full /dev/shm is an error here, not a SIGBUS at the first
write) and its name is removed as soon as all have it open, so that a killed run leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence

import numpy as np

from mpillm.errors import ExchangeError
from mpillm.jit import exchange, policy
from mpillm.jit.exchange import exchange_kernel

FOLDER = "/dev/shm"
LINE = 64                       # bytes of a cache line
SLOT_LIMIT = 256 * 1024         # bytes a rank hands over at once: a few of them stay in the cache
SLOT_LEAST = 4096
TOTAL_LIMIT = 16 * 1024 * 1024  # bytes of a whole segment: containers often have 64 MiB of /dev/shm
LANES_LIMIT = 64                # threads of a rank that exchange at once
SPINS = 1000                    # polls (some 20 us) before the core is offered, when every thread has its own
YIELDS = 4000                   # polls that offer it (some ms) before sleeping, when every thread has its own
CROWDED_YIELDS = 5              # the same with more threads than cores: the awaited rank needs the core
TIMEOUT = 600.0                 # seconds until a rank that does not come ends the job
NOTHING = np.zeros(0, np.float32)


def supported() -> bool:
    """Whether memory can be shared and reserved here."""
    return hasattr(os, "posix_fallocate") and os.path.isdir(FOLDER)


def drop_library_segments(maps: str = "/proc/self/maps") -> None:
    """Remove the names of MPICH's own segments mapped here: an abort would leave megabytes behind.

    Call only when the job ends; by then all ranks of the node have them open.
    """
    try:
        with open(maps, encoding="utf-8", errors="replace") as file:
            paths = {line.split(None, 5)[-1].strip() for line in file if "/mpich_" in line}
    except OSError:
        return
    for path in paths:
        if path.startswith(os.path.join(FOLDER, "mpich_")):
            try:
                os.unlink(path)
            except OSError:
                continue


def slot_nbytes(ranks: int, lanes: int = 1) -> int:
    """Bytes of one rank's slot in a lane, a multiple of a cache line, so that all fit in ``TOTAL_LIMIT``."""
    most = TOTAL_LIMIT // (2 * (ranks + 1) * lanes) // LINE * LINE
    return max(SLOT_LEAST, min(SLOT_LIMIT, most))


def segment_nbytes(ranks: int, lanes: int, slot: int) -> int:
    """Flags, then for each lane two halves of ``ranks`` slots and one slot for results each."""
    return lanes * (ranks * LINE + 2 * (ranks + 1) * slot)


def add_in_order(parts: Sequence[np.ndarray] | np.ndarray, out: np.ndarray) -> None:
    """out = ((parts[0] + parts[1]) + parts[2]) + ...; at least two parts. np.sum promises no order."""
    np.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        np.add(out, part, out=out)


def shares(n: int, parts: int) -> tuple[list[int], list[int]]:
    """Counts and offsets of n items over ``parts``, the remainder to the first."""
    each, extra = divmod(n, parts)
    return [each + (i < extra) for i in range(parts)], [i * each + min(i, extra) for i in range(parts)]


class Segment:
    """One mapping per rank of a common file; ``create`` on one rank, ``attach`` on the others.

    ``arguments`` (flags, slots, state) is what the cores of jit/exchange.py take. Its other methods are the
    exchanges as such; every rank of the segment has to call the same ones, with as many elements.
    ``names``: how a message calls each rank. Raises ExchangeError from any exchange once the deadline passed.
    """

    def __init__(self, memory: np.ndarray, ranks: int, rank: int, lanes: int, crowded: bool) -> None:
        self.ranks, self.rank, self.lanes, self.crowded = ranks, rank, lanes, crowded
        self.slot_nbytes = slot_nbytes(ranks, lanes)
        self.names: Sequence[str] = [f"rank {i}" for i in range(ranks)]
        flags = ranks * lanes * LINE
        self._flags, self._slots = memory[:flags].view(np.int64), memory[flags:].view(np.float32)
        self._state = _aligned_words(exchange.HEADER + exchange.LINE * lanes)
        for place, value in ((exchange.RANKS, ranks), (exchange.RANK, rank), (exchange.LANES, lanes),
                             (exchange.SLOT, self.slot_nbytes // 4), (exchange.SPINS, 0 if crowded else SPINS),
                             (exchange.YIELDS, CROWDED_YIELDS if crowded else YIELDS)):
            self._state[place] = value
        self.set_timeout(TIMEOUT)
        self.arguments = (self._flags, self._slots, self._state)

    def set_timeout(self, seconds: float) -> None:
        """How long an exchange waits for a rank."""
        self.timeout = seconds
        self._state[exchange.DEADLINE] = int(seconds * 1e9)

    @classmethod
    def create(cls, ranks: int, lanes: int, crowded: bool, folder: str = FOLDER) -> tuple[Segment, str]:
        """Rank 0's end and the path for the others; OSError when there is no room."""
        path = os.path.join(folder, f"mpillm-{os.getpid()}-{secrets.token_hex(8)}")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, segment_nbytes(ranks, lanes, slot_nbytes(ranks, lanes)))
        except OSError:
            os.close(descriptor)
            os.unlink(path)
            raise
        return cls(_mapped(descriptor, ranks, lanes), ranks, 0, lanes, crowded), path

    @classmethod
    def attach(cls, path: str, ranks: int, rank: int, lanes: int, crowded: bool) -> Segment:
        """Another rank's end; OSError when the path is not there (another container, say)."""
        return cls(_mapped(os.open(path, os.O_RDWR), ranks, lanes), ranks, rank, lanes, crowded)

    @classmethod
    def alone(cls, lanes: int = 1) -> Segment:
        """Of one rank that shares with nobody: its sums are its own parts."""
        return cls(np.zeros(segment_nbytes(1, lanes, slot_nbytes(1, lanes)), np.uint8), 1, 0, lanes, False)

    @property
    def waited(self) -> float:
        """Seconds since the start spent waiting for other ranks: those of the thread that waited most."""
        return self._longest(exchange.WAITED)

    @property
    def spent(self) -> float:
        """Seconds since the start spent in exchanges, waiting included."""
        return self._longest(exchange.SPENT)

    def _longest(self, place: int) -> float:
        return float(self._state[exchange.HEADER + place::exchange.LINE].max()) * 1e-9

    def check(self) -> None:
        """ExchangeError if an exchange, a tape's too, gave up waiting for a rank."""
        if not self._state[exchange.STATUS]:
            return
        missing, doing = (int(self._state[place]) for place in (exchange.MISSING, exchange.DOING))
        raise ExchangeError(
            f"{self.names[self.rank].split(' (')[0]} waited {self.timeout:g} s for {self.names[missing]} in "
            f"{exchange.DOINGS[doing]}: it is stuck or was killed; --exchange-timeout sets the time")

    def _threads(self) -> int:
        return min(policy.threads(), self.lanes)

    def all_reduce(self, flat: np.ndarray) -> None:
        """Sum ``flat`` (float32, 1-D, contiguous) over the ranks in rank order, in place."""
        threads = self._threads() if flat.size > exchange.LANE_LIMIT else 1
        exchange_kernel(exchange.run_all_reduce)(*self.arguments, flat, threads)
        self.check()

    def reduce_rows(self, y: np.ndarray, x: np.ndarray, bias: np.ndarray, weight: np.ndarray,
                    normed: np.ndarray, eps: float) -> None:
        """x += sum of y + bias; normed = rms_norm(x) * weight: exchange.reduce_rows with its shapes."""
        threads = min(self._threads(), len(x))
        exchange_kernel(exchange.run_reduce_rows)(*self.arguments, y, x, bias, weight, normed, eps, threads)
        self.check()

    def gather(self, data: np.ndarray) -> np.ndarray | None:
        """Every rank's bytes (uint8, 1-D, as many on all) as [ranks, n] on rank 0; else None."""
        out = np.empty(self.ranks * data.size if self.rank == 0 else 0, np.uint8)
        exchange_kernel(exchange.run_gather)(*self.arguments, data, out, data.size)
        self.check()
        return out.reshape(self.ranks, data.size) if self.rank == 0 else None

    def bcast(self, data: np.ndarray) -> None:
        """Rank 0's bytes (uint8, 1-D) into every rank's, in place."""
        exchange_kernel(exchange.run_broadcast)(*self.arguments, data, data.size)
        self.check()

    def swap_columns(self, plan: np.ndarray, arrays: Sequence[np.ndarray], out: Sequence[np.ndarray]) -> None:
        """exchange.swap_columns of up to three arrays [M, own columns] into as many [M, wanted columns]."""
        rows = len(arrays[0])
        given, got = ([*own, *[np.zeros((0, 0), np.float32)] * (exchange.ARRAYS - len(own))] for own in (arrays, out))
        whole = [np.ascontiguousarray(x) for x in got]
        exchange_kernel(exchange.run_swap_columns)(*self.arguments, plan, *map(np.ascontiguousarray, given), *whole,
                                                   rows, min(self._threads(), max(rows, 1)))
        self.check()
        for target, filled in zip(got, whole, strict=True):
            if target is not filled:
                target[:] = filled

    def time_reduce(self, rows: int, n: int, repeats: int) -> np.ndarray:
        """Seconds of each of ``repeats`` reduce_rows of [rows, n], residual and norm included, back to back."""
        x, y = np.zeros((2, rows, n), np.float32)
        ones, times = np.ones(n, np.float32), np.zeros(repeats, np.int64)
        exchange_kernel(exchange.time_reduce_rows)(*self.arguments, y, x, NOTHING, ones, np.empty_like(x), 1e-5,
                                                   times, min(self._threads(), rows))
        self.check()
        return times * 1e-9

    def flip(self) -> np.ndarray:
        """Begin an exchange of one's own: uint8 [ranks + 1, slot_nbytes], the last one for results."""
        place = exchange.HEADER + exchange.TURNS
        self._state[place] += 1
        n = (self.ranks + 1) * self.slot_nbytes // 4
        half = int(self._state[place] & 1) * n
        return self._slots[half:half + n].view(np.uint8).reshape(self.ranks + 1, self.slot_nbytes)

    def meet(self) -> None:
        """Say that this rank has written, and wait until all have."""
        exchange_kernel(exchange.run_meet)(self._flags, self._state, exchange.ALL_REDUCE)
        self.check()


def _aligned_words(n: int) -> np.ndarray:
    """n zeros int64 from the start of a cache line on: threads write to neighbouring lines."""
    words = np.zeros(n + LINE // 8, np.int64)
    first = -words.ctypes.data % LINE // 8
    return words[first:first + n]


def _mapped(descriptor: int, ranks: int, lanes: int) -> np.ndarray:
    try:
        return np.frombuffer(mmap.mmap(descriptor, segment_nbytes(ranks, lanes, slot_nbytes(ranks, lanes))), np.uint8)
    finally:
        os.close(descriptor)
