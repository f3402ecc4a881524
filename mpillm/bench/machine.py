"""The limits of this machine: reading memory, multiplying in registers, sums over ranks.

All ranks measure at the same time, so that a node's figure is what its ranks get together. A repetition begins when
the last rank has come and lasts as long as the slowest; rates are decimal (1 GB/s = 1e9 bytes/s).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpillm import collectives
from mpillm.engine.probe import Ranks, Rate, Reader, cache_of, common_peaks, peak

MESSAGES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
L2_DEFAULT = 512 << 10


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
