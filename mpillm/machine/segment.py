"""Memory shared by the ranks of one node, and a rendezvous in it that gives its core away.

MPI's collectives poll; with more ranks than cores most of that polling happens on the cores that the
awaited ranks need. Here a rank that waits yields its core at once and sleeps soon after.

The file is reserved with ``posix_fallocate`` (a full /dev/shm is an error here, not a SIGBUS at the first
write) and its name is removed as soon as all have it open, so that a killed run leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import time
from collections.abc import Sequence

import numpy as np

FOLDER = "/dev/shm"
LINE = 64                       # bytes of a cache line: one flag each, or neighbours slow each other down
SLOT_LIMIT = 256 * 1024         # bytes a rank hands over at once: a few of them stay in the cache
TOTAL_LIMIT = 16 * 1024 * 1024  # bytes of a whole segment: containers often have 64 MiB of /dev/shm
SPINS = 100                     # polls before the core is offered to others, when every rank has its own
YIELDS = 4000                   # polls that offer it (some ms) before sleeping, when every rank has its own
CROWDED_YIELDS = 5              # the same with more ranks than cores: the awaited rank needs the core
NAP = 20e-6                     # seconds of the first sleep
NAP_GROWTH = 1.25               # of each next sleep: oversleeping stays below a quarter of the wait
NAP_LIMIT = 5e-4
DIRECT_LIMIT = 1 << 20          # bytes of all ranks' parts: up to here each adds all of them by itself


def supported() -> bool:
    """Whether plain loads and stores suffice: x86 keeps stores in order and loads in order."""
    ordered = platform.machine() in ("x86_64", "AMD64")
    return ordered and hasattr(os, "posix_fallocate") and os.path.isdir(FOLDER)


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


def slot_nbytes(ranks: int) -> int:
    """Bytes of one rank's slot, a multiple of a cache line, so that all fit in ``TOTAL_LIMIT``."""
    return max(4096, min(SLOT_LIMIT, TOTAL_LIMIT // (2 * (ranks + 1)) // LINE * LINE))


def segment_nbytes(ranks: int, slot: int) -> int:
    """Flags, then two halves of ``ranks`` slots and one slot for results each."""
    return ranks * LINE + 2 * (ranks + 1) * slot


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

    An operation is: ``flip``, write the own ``slot``, ``meet``, read others' slots. Two halves are used in
    turn: who writes into a half again has met everybody once since, and they had read it by then.
    """

    def __init__(self, descriptor: int, ranks: int, rank: int, crowded: bool) -> None:
        self.ranks, self.rank, self.crowded = ranks, rank, crowded
        self.slot_nbytes = slot_nbytes(ranks)
        self.waited = 0.0                     # seconds spent waiting for other ranks
        try:
            self._map = mmap.mmap(descriptor, segment_nbytes(ranks, self.slot_nbytes))
        finally:
            os.close(descriptor)
        self._flags = memoryview(self._map)[:ranks * LINE].cast("q")
        body = np.frombuffer(self._map, np.uint8, offset=ranks * LINE)
        self._halves = body.reshape(2, ranks + 1, self.slot_nbytes)
        self._half, self._meeting = 0, 0

    @classmethod
    def create(cls, ranks: int, crowded: bool, folder: str = FOLDER) -> tuple[Segment, str]:
        """Rank 0's end and the path for the others; OSError when there is no room."""
        path = os.path.join(folder, f"mpillm-{os.getpid()}-{secrets.token_hex(8)}")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, segment_nbytes(ranks, slot_nbytes(ranks)))
        except OSError:
            os.close(descriptor)
            os.unlink(path)
            raise
        return cls(descriptor, ranks, 0, crowded), path

    @classmethod
    def attach(cls, path: str, ranks: int, rank: int, crowded: bool) -> Segment:
        """Another rank's end; OSError when the path is not there (another container, say)."""
        return cls(os.open(path, os.O_RDWR), ranks, rank, crowded)

    def flip(self) -> np.ndarray:
        """Begin an operation; its slots as uint8 [ranks + 1, slot_nbytes], the last one for results."""
        self._half ^= 1
        return self._halves[self._half]

    def meet(self) -> None:
        """Say that this rank has come so far, and wait until all have."""
        self._meeting += 1
        meeting, flags, step = self._meeting, self._flags, LINE // 8
        flags[self.rank * step] = meeting
        for other in range(0, self.ranks * step, step):
            if flags[other] < meeting:
                self._wait(other, meeting)

    def _wait(self, flag: int, meeting: int) -> None:
        began = time.perf_counter()
        flags, polls, nap = self._flags, 0, NAP
        spins, yields = (0, CROWDED_YIELDS) if self.crowded else (SPINS, YIELDS)
        while flags[flag] < meeting:
            polls += 1
            if polls <= spins:
                continue
            if polls <= spins + yields:
                os.sched_yield()
            else:
                time.sleep(nap)
                nap = min(NAP_GROWTH * nap, NAP_LIMIT)
        self.waited += time.perf_counter() - began

    def all_reduce(self, flat: np.ndarray) -> None:
        """Sum ``flat`` (float32, 1-D, contiguous) over the ranks in rank order, in place."""
        step = self.slot_nbytes // 4
        for begin in range(0, flat.size, step):
            self._reduce(flat[begin:begin + step])

    def _reduce(self, x: np.ndarray) -> None:
        slots = self.flip()[:, :4 * x.size].view(np.float32)
        slots[self.rank] = x
        self.meet()
        if self.ranks * x.nbytes <= DIRECT_LIMIT:
            add_in_order(slots[:self.ranks], x)
            return
        counts, offsets = shares(x.size, self.ranks)
        mine = slots[:, offsets[self.rank]:offsets[self.rank] + counts[self.rank]]
        add_in_order(mine[:self.ranks], mine[self.ranks])
        self.meet()
        x[:] = slots[self.ranks]

    def gather(self, data: np.ndarray) -> np.ndarray | None:
        """Every rank's bytes (uint8, as many on all, within a slot) as [ranks, n] on rank 0; else None."""
        slots = self.flip()[:self.ranks, :data.size]
        slots[self.rank] = data
        self.meet()
        return slots.copy() if self.rank == 0 else None

    def bcast(self, data: np.ndarray) -> None:
        """Rank 0's bytes (uint8, 1-D, within a slot) into every rank's, in place."""
        slot = self.flip()[0, :data.size]
        if self.rank == 0:
            slot[:] = data
        self.meet()
        if self.rank:
            data[:] = slot
