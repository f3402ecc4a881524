"""The limits of this machine: reading memory, multiplying in registers, sums over ranks.

All ranks measure at the same time, so that a node's figure is what its ranks get together. A repetition begins when
the last rank has come and lasts as long as the slowest; rates are decimal (1 GB/s = 1e9 bytes/s).
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
MESSAGES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
L2_DEFAULT = 512 << 10
ROUNDS, READ = 1 << 21, 128 << 20                 # of a peak's loop, bytes: some milliseconds, at least
#: what an unknown or emulated tier's products are compared with, best first
BEST_TIERS = ("amx", "avx512", "avx2", "any")


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


def exchanges(ranks: Ranks, sizes: tuple[int, ...], seconds: float) -> list[dict[str, Any]]:
    """Rows of the sums over all ranks, for each way and size; empty for one rank."""
    world = ranks.world
    rows: list[dict[str, Any]] = []
    if world.size == 1:
        return rows
    for mode in collectives.MODES:
        replica = world.split(world.size, 1, mode)
        assert replica is not None, "every rank is in the one replica"
        for nbytes in sizes:
            x = np.zeros(nbytes // 4, np.float32)
            latency = _latency(world, replica, x, seconds)
            rows.append({"test": f"all-reduce {mode}", "nbytes": nbytes, "n_ranks": world.size,
                         "n_threads": ranks.threads, "unit": "s", "best": float(latency.min()),
                         "median": float(np.median(latency)), "repetitions": len(latency),
                         "bytes_per_s": nbytes / float(np.median(latency))})
    return rows


def _latency(world: collectives.World, replica: collectives.Replica, x: np.ndarray, seconds: float) -> np.ndarray:
    """Seconds of all-reduces, called back to back; of each batch of calls the slowest rank's mean."""
    def batch(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            replica.all_reduce(x)
        return (time.perf_counter() - began) / count

    batch(3)
    first = max(world.allgather(batch(3)))
    count = max(1, min(200, int(seconds / 20 / first)))
    repetitions = max(3, min(20, int(seconds / first / count)))
    return np.max(world.allgather(np.array([batch(count) for _ in range(repetitions)])), axis=0)


def thread_counts(most: int) -> list[int]:
    """1, 2, 4 ... and the most."""
    return sorted({most, *(1 << i for i in range(most.bit_length()) if 1 << i <= most)})


def measure_machine(ranks: Ranks, seconds: float, nbytes: int | None = None) -> list[dict[str, Any]]:
    """All rows of ``mpillm bench machine``, the same on every rank; about ``seconds`` for each."""
    world = ranks.world
    rows: list[dict[str, Any]] = []
    most = min(world.allgather(ranks.threads))

    def add(test: str, threads: int, unit: str, rate: Rate, **more: Any) -> None:
        rows.append({"test": test, "n_ranks": world.size, "n_threads": threads, "unit": unit, "best": rate.best,
                     "median": rate.median, "repetitions": rate.repetitions, **more})

    reader = Reader(ranks, nbytes)
    (l2, _), (l3, sharers) = cache_of(2), cache_of(3)
    l2 = l2 or L2_DEFAULT
    for threads in thread_counts(most):
        add("read memory", threads, "bytes/s", reader.memory(threads, seconds), nbytes=reader.nbytes)
        if l3:
            held = max(l3 // 2 // sharers, 2 * l2) * threads      # a thread's share of it, and not its L2 alone
            add("read L3", threads, "bytes/s", reader.cached(held, threads, seconds), nbytes=held)
        add("read L2", threads, "bytes/s", reader.cached(l2 // 2 * threads, threads, seconds), nbytes=l2 // 2 * threads)
    for key in common_peaks(world):
        for threads in thread_counts(most):
            name = f"peak {key[1]}" + ("" if key[0] == "any" else f" {key[0]}")
            add(name, threads, "operations/s", peak(ranks, key, threads, seconds))
    return rows + exchanges(ranks, MESSAGES, seconds)
