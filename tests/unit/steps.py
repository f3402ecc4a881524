"""A model split over several ranks within one process: a thread each, which meet at every exchange."""

from __future__ import annotations

import contextlib
import dataclasses
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
from mpillm.partition import Share, partition

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


class Gather:
    """One rank's side of the exchange of a latent's columns; it is the one exchange that it has."""

    def __init__(self, member: Member, shares: tuple[Share, ...], n: int) -> None:
        self._member, self._own, self._n = member, shares[member._rank], n
        self.gather, self.got = self, [n if self._own.kv_heads else 0]

    def run(self, arrays: list[np.ndarray], out: list[np.ndarray]) -> None:
        whole = np.zeros((len(arrays[0]), self._n), np.float32)         # one term of each sum is not zero
        whole[:, self._own.kv_columns.start:self._own.kv_columns.stop] = arrays[0]
        self._member.all_reduce(whole)
        out[0][:] = whole[:, :self.got[0]]

    def exchange_arguments(self) -> None:
        return None


def logits_of_splits(folder: Path, asked: str, counts: tuple[int, ...], tokens: np.ndarray = TOKENS, mla: int = 0,
                     kv_mode: str = "redundant") -> dict[int, np.ndarray]:
    """Logits float32 [tokens, vocab] of ``tokens``, cached in float32, for each count of ranks.

    Each rank must hold the bytes that were planned. Raises what a rank raises. The last ``tokens`` are taken as
    generated ones; they are fewer than a block.
    """
    config, checkpoint = open_model(str(folder))
    config = dataclasses.replace(config, mla=mla)
    with contextlib.closing(checkpoint), pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy._Threads, "count", 1)
        weights = Weights(checkpoint, config)
        return {tp: _logits(config, weights, asked, tp, tokens, kv_mode) for tp in counts}


def _logits(config, weights, asked, tp, tokens, kv_mode) -> np.ndarray:
    split, sums = partition(registry.sizes(config, weights, asked), tp, kv_mode), Sums(tp)
    generated = len(tokens) // 3 if config.mla == 3 else 0

    def rank_logits(rank: int) -> np.ndarray:
        try:
            member = Member(sums, rank)
            loader = Loader(config, weights, split.shares[rank], asked, member)
            gather = Gather(member, split.shares, split.sizes.head_dim) if kv_mode == "allgather" and tp > 1 else None
            model = registry.BUILDERS[config.architecture](config, loader, gather)
            assert loader.nbytes == registry.weight_bytes(config, weights, split, asked, rank), (tp, rank)
            heads, key, value = kvcache.form(config, split.shares[rank])
            cache = kvcache.allocate("f32", config.n_layers, 1, heads, key, value_dim=value)
            place = np.roll(np.arange(len(tokens), dtype=np.int32), generated)      # generated ones stand first
            rows = kernels.Rows(tokens[place], place, np.zeros_like(place), np.zeros((1, 1), np.int32),
                                *model.rope.rows(place, place + 1), generated=generated)
            return model(rows, cache, np.argsort(place)).copy()
        except BaseException:
            sums.barrier.abort()
            raise

    with ThreadPoolExecutor(tp) as pool:
        found = list(pool.map(rank_logits, range(tp)))
    return np.concatenate(found, axis=1)
