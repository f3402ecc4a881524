"""A model split over several ranks within one process: a thread each, which meet at every exchange."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mpillm import kernels
from mpillm.engine import kvcache
from mpillm.jit import policy
from mpillm.models import registry
from mpillm.models.load import Loader
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import partition

TOKENS = np.array([1, 17, 260, 5, 88, 301, 42], np.int64)


class Sums:
    """Sums of the threads' arrays in rank order."""

    def __init__(self, tp: int) -> None:
        self.parts: list[np.ndarray | None] = [None] * tp
        self.barrier = threading.Barrier(tp, timeout=60)

    def reduce(self, rank: int, array: np.ndarray) -> None:
        self.parts[rank] = array.copy()
        self.barrier.wait()
        total = self.parts[0].copy()
        for part in self.parts[1:]:
            total += part
        self.barrier.wait()
        array[:] = total


class Member:
    """One rank's side of the sums."""

    def __init__(self, sums: Sums, rank: int) -> None:
        self.tp, self._sums, self._rank = len(sums.parts), sums, rank

    def all_reduce(self, array: np.ndarray) -> None:
        if self.tp > 1:
            self._sums.reduce(self._rank, array)

    def exchange_arguments(self) -> None:
        return None

    def check(self) -> None:
        pass


def logits_of_splits(folder: Path, asked: str, counts: tuple[int, ...]) -> dict[int, np.ndarray]:
    """Logits float32 [tokens, vocab] of TOKENS, cached in float32, for each count of ranks.

    Each rank must hold the bytes that were planned. Raises what a rank raises.
    """
    config, checkpoint = open_model(str(folder))
    with contextlib.closing(checkpoint), pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy._Threads, "count", 1)
        weights = Weights(checkpoint, config)
        return {tp: _logits(config, weights, asked, tp) for tp in counts}


def _logits(config, weights, asked, tp) -> np.ndarray:
    split, sums = partition(registry.sizes(config, weights, asked), tp), Sums(tp)

    def rank_logits(rank: int) -> np.ndarray:
        try:
            loader = Loader(config, weights, split.shares[rank], asked, Member(sums, rank))
            model = registry.BUILDERS[config.architecture](config, loader, None)
            assert loader.nbytes == registry.weight_bytes(config, weights, split, asked, rank), (tp, rank)
            heads, key, value = kvcache.form(config, split.shares[rank])
            cache = kvcache.allocate("f32", config.n_layers, 1, heads, key, value_dim=value)
            positions = np.arange(len(TOKENS), dtype=np.int32)
            rows = kernels.Rows(TOKENS, positions, np.zeros_like(positions), np.zeros((1, 1), np.int32),
                                *model.rope.rows(positions, positions + 1))
            return model(rows, cache, np.arange(len(TOKENS))).copy()
        except BaseException:
            sums.barrier.abort()
            raise

    with ThreadPoolExecutor(tp) as pool:
        found = list(pool.map(rank_logits, range(tp)))
    return np.concatenate(found, axis=1)
