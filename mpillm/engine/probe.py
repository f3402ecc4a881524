"""What these ranks can do, measured: reading memory, multiplying in registers, sums over ranks.

All ranks measure at the same time, so that a node's figure is what its ranks get together. A repetition begins when
the last rank has come and lasts as long as the slowest; rates are decimal (1 GB/s = 1e9 bytes/s). The layout is
chosen by ``quick_figures``; `mpillm bench` takes longer over the same loops.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpillm import collectives
from mpillm.jit import measure
from mpillm.machine import memory
from mpillm.machine.topology import parse_cpu_list, read_text
from mpillm.quant.layout import allocate

LINE = 64
LEAST_BUFFER, MOST_BUFFER = 1 << 30, 8 << 30     # bytes that the ranks of a node read together
ROUNDS, READ = 1 << 21, 128 << 20                 # of a peak's loop, bytes: some milliseconds, at least
#: what an unknown or emulated tier's products are compared with, best first
BEST_TIERS = ("amx", "avx512", "avx2", "any")
# Of a quick look, as the layout needs it
QUICK_BUFFER = 128 << 20      # bytes that a node's ranks read together, at least; else twice the last-level cache
QUICK_SECONDS = 0.04          # of each measurement
SUM_SECONDS = 0.02            # of the sums of one size
SUM_ROWS = (1, 32)            # rows of the sums that are measured


@dataclass(frozen=True)
class Rate:
    """Units per second of all ranks together: the best and the median of the repetitions."""

    best: float
    median: float
    repetitions: int


@dataclass
class Ranks:
    """Who measures together: the job, and the exchange of all its ranks (None for one rank)."""

    world: collectives.World
    replica: collectives.Replica | None
    threads: int

    def meet(self) -> None:
        """Return on all ranks at about the same moment."""
        if self.replica is not None:
            self.replica.all_reduce(np.zeros(1, np.float32))

    def rate(self, work: Callable[[int], Any], units: float, seconds: float, least: int = 3,
             scale: int = 1) -> Rate:
        """The rate of ``work(amount)``, which does ``amount * units``; ``amount`` makes a repetition long enough.

        ``seconds`` for all repetitions, of which there are at least ``least``; ``scale``: the first amount tried.
        """
        amount = scale
        # The fastest of three: one that the system interrupts would make the amount far too small
        while (fastest := float(self._slowest(work, amount, 3).min())) < min(0.01, seconds / 4):
            amount *= 4
        slowest = self._slowest(work, amount, max(least, min(1000, int(seconds / fastest))))
        total = sum(self.world.allgather(amount * units))
        return Rate(total / float(slowest.min()), total / float(np.median(slowest)), len(slowest))

    def _slowest(self, work: Callable[[int], Any], amount: int, repetitions: int) -> np.ndarray:
        """Seconds of the slowest rank in each repetition."""
        taken = np.empty(repetitions)
        for i in range(repetitions):
            self.meet()
            began = time.perf_counter()
            work(amount)
            taken[i] = time.perf_counter() - began
        return np.max(self.world.allgather(taken), axis=0)


def cache_of(level: int, root: str = "/") -> tuple[int, int]:
    """(bytes, CPUs that share it) of the unified cache of a level that CPU 0 uses; (0, 1) when Linux names none."""
    folder = os.path.join(root, "sys/devices/system/cpu/cpu0/cache")
    for index in range(8):
        at = os.path.join(folder, f"index{index}")
        if read_text(os.path.join(at, "level")) == str(level) and read_text(os.path.join(at, "type")) == "Unified":
            size = read_text(os.path.join(at, "size")) or "0"
            digits, unit = size.rstrip("KMG"), size.lstrip("0123456789")
            sharers = parse_cpu_list(read_text(os.path.join(at, "shared_cpu_list")) or "0")
            return int(digits or 0) << {"K": 10, "M": 20, "G": 30}.get(unit, 0), max(1, len(sharers))
    return 0, 1


def buffer_nbytes(last_cache: int, free: int, node_ranks: int) -> int:
    """Bytes that a rank reads: with the node's other ranks 4 times the last-level cache, 1 to 8 GiB, a quarter of
    the free memory at most."""
    wanted = min(max(LEAST_BUFFER, 4 * last_cache), MOST_BUFFER)
    return max(1 << 20, min(wanted, free // 4) // node_ranks) // (1 << 20) << 20


class Reader:
    """Buffers of this rank and the compiled loop that reads them."""

    def __init__(self, ranks: Ranks, nbytes: int | None = None) -> None:
        """``nbytes``: of the buffer in memory, None = far more than the caches hold."""
        self.ranks, self._kernel = ranks, measure.read_kernel()
        self._out = np.zeros(8 * ranks.threads, np.int64)
        world = ranks.world
        if nbytes is None:
            nbytes = min(world.allgather(buffer_nbytes(cache_of(3)[0], memory.available_nbytes(), world.node_size)))
        self.nbytes = nbytes
        self._data = self._touched(nbytes)

    def _touched(self, nbytes: int) -> np.ndarray:
        data = allocate(nbytes, np.uint8)
        measure.touch_kernel()(data, nbytes // LINE, self.ranks.world.rank, self.ranks.threads)
        return data

    def memory(self, threads: int, seconds: float) -> Rate:
        """Bytes/s of all ranks from memory, each with so many threads."""
        return self._rate(self._data, threads, seconds)

    def cached(self, nbytes: int, threads: int, seconds: float) -> Rate:
        """The same from a buffer of ``nbytes`` for each rank that fits a cache."""
        return self._rate(self._touched(max(nbytes, 1 << 16)), threads, seconds)

    def _rate(self, data: np.ndarray, threads: int, seconds: float) -> Rate:
        lines = data.nbytes // LINE
        counted = lines // threads // 8 * 8 * threads * LINE
        return self.ranks.rate(lambda repeats: self._kernel(data, lines, repeats, self._out, threads), counted, seconds,
                               scale=max(1, READ // counted))


def peak(ranks: Ranks, key: tuple[str, str], threads: int, seconds: float) -> Rate:
    """Operations/s (a multiply and an add are two) of one of ``measure.PEAKS`` on all ranks."""
    kernel, operations = measure.peak_kernel(key), measure.PEAKS[key][1]
    config, out = measure.tile_config(), np.zeros(8 * threads, np.int64)
    return ranks.rate(lambda rounds: kernel(rounds, config, out, threads), operations * threads, seconds, scale=ROUNDS)


def common_peaks(world: collectives.World) -> list[tuple[str, str]]:
    """The peaks that every rank can measure, best tier first."""
    everywhere = set.intersection(*map(set, world.allgather(measure.available_peaks())))
    return sorted(everywhere, key=lambda key: (BEST_TIERS.index(key[0]), key[1]))


def peak_of_format(weights: str, tier: str | None, available: list[tuple[str, str]]) -> tuple[str, str]:
    """Which peak the products with such weights are held against: that of the tier that computes them.

    f32 and f16 multiply in float32; bf16 in bf16 where the tier can; quantised formats in int8. ``tier``: the kernels'
    tier, None = the best that the processor has.
    """
    kind = {"f32": "f32", "f16": "f32", "bf16": "bf16"}.get(weights, "int8")
    tiers = BEST_TIERS if tier not in BEST_TIERS else BEST_TIERS[BEST_TIERS.index(tier):]
    return next(((name, kind) for name in tiers if (name, kind) in available), ("any", "f32"))


def quick_buffer(last_cache: int, free: int, node_ranks: int) -> int:
    """Bytes that a rank reads for a quick look: with its node's others twice the cache, a quarter of memory at most."""
    return max(1 << 20, min(max(QUICK_BUFFER, 2 * last_cache), free // 4) // node_ranks) // (1 << 20) << 20


def quick_figures(world: collectives.World, threads: int, weights: str, sizes: list[int], row_bytes: int,
                  mode: str, wire: str) -> tuple[float, float, list[tuple[int, int, float]]]:
    """(bytes/s, operations/s) of one rank, and (ranks, bytes, seconds) of sums; the same on every rank.

    Well under a second once the loops are compiled. ``weights``: their format; ``sizes``: over how many ranks to
    sum, ``row_bytes`` a row. All ranks must call it, with their cores taken.
    """
    keys = common_peaks(world)
    key = peak_of_format(weights, None, keys)
    if world.node_rank == 0:                 # one rank of a node compiles, the others find it in the cache
        measure.read_kernel(), measure.touch_kernel(), measure.peak_kernel(key)
    world.barrier_quiet()
    whole = world.split(world.size, 1, mode, wire=wire)
    ranks = Ranks(world, whole, threads)
    nbytes = min(world.allgather(quick_buffer(cache_of(3)[0], memory.available_nbytes(), world.node_size)))
    read = Reader(ranks, nbytes).memory(threads, QUICK_SECONDS).best / world.size
    operations = peak(ranks, key, threads, QUICK_SECONDS).best / world.size
    sums: list[tuple[int, int, float]] = []
    for tp in sizes:
        replica = whole if tp == world.size else world.split(tp, world.size // tp, mode, wire=wire)
        for rows in SUM_ROWS:
            seconds = 0.0
            if replica is not None:
                seconds = _sum_seconds(replica, rows * row_bytes)
            sums.append((tp, rows * row_bytes, max(world.allgather(seconds))))
    return read, operations, sums


def _sum_seconds(replica: collectives.Replica, nbytes: int) -> float:
    """Median seconds of a sum, over as many as fit the time; their number is the root's."""
    count = np.array([SUM_SECONDS / max(measure_all_reduce(replica, nbytes, 3), 1e-7)])
    replica.bcast(count)
    return measure_all_reduce(replica, nbytes, int(min(max(count[0], 3), 1000)))


def measure_all_reduce(replica: collectives.Replica, nbytes: int, repeats: int = 1000) -> float:
    """Median seconds of a sum of ``nbytes`` bytes of float32 over the replica's ranks, which must all call this.

    In shared memory one after the other inside one kernel, in rows of at most 16 KiB, with the residual and the
    norm, as a decode step does it; otherwise ``all_reduce`` as Python calls it. On more than one rank.
    """
    elements = max(nbytes // 4, 1)
    n = min(elements, 4096)
    segment = replica._group.fused if replica.mode == "shm" else None
    if segment is not None:
        segment.time_reduce(elements // n, n, 3)         # whoever is late comes now
        return float(np.median(segment.time_reduce(elements // n, n, repeats)))
    x, times = np.zeros((elements // n, n), np.float32), []
    for _ in range(repeats + 3):
        began = time.perf_counter()
        replica.all_reduce(x)
        times.append(time.perf_counter() - began)
    return float(np.median(times[3:]))
