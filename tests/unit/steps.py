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
from mpillm.collectives import row_parts
from mpillm.engine import kvcache
from mpillm.jit import policy
from mpillm.machine.swap import Part
from mpillm.models import registry
from mpillm.models.load import Loader
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import Partition, partition

TOKENS = np.array([1, 17, 260, 5, 88, 301, 42], np.int64)


class Sums:
    """Sums of the threads' arrays in rank order."""

    def __init__(self, tp: int) -> None:
        self.parts: list[np.ndarray | None] = [None] * tp
        self.barrier = threading.Barrier(tp, timeout=60)

    def reduce(self, rank: int, array: np.ndarray) -> None:
        first, *others = self.everyones(rank, array)
        total = first.copy()
        for part in others:
            total += part
        array[:] = total

    def everyones(self, rank: int, array: np.ndarray) -> list[np.ndarray]:
        self.parts[rank] = array.copy()
        self.barrier.wait()
        found = list(self.parts)
        self.barrier.wait()
        return found


class Member:
    """One rank's side of the sums."""

    def __init__(self, sums: Sums, rank: int) -> None:
        self.tp, self._sums, self._rank = len(sums.parts), sums, rank

    def all_reduce(self, array: np.ndarray) -> None:
        if self.tp > 1:
            self._sums.reduce(self._rank, array)

    def everyones(self, array: np.ndarray) -> list[np.ndarray]:
        return self._sums.everyones(self._rank, array)

    def exchange_arguments(self) -> None:
        return None

    def check(self) -> None:
        pass


class Row:
    """One rank's side of the exchanges of a KV row that is all of the ranks."""

    def __init__(self, member: Member, split: Partition) -> None:
        place = split.shares[member._rank].row_rank
        self.place, self.width, self.heads = place % split.places, split.places, split.sizes.n_heads
        self.gather, self.queries, self.merge = (Exchange(member, parts) if parts else None
                                                 for parts in row_parts(split, 0))


class Exchange:
    """One rank's side of an exchange of columns."""

    def __init__(self, member: Member, parts: tuple[Part, ...]) -> None:
        self._member, self._parts = member, parts
        self.got = [part.result(member._rank) for part in parts]

    def run(self, arrays: list[np.ndarray], out: list[np.ndarray]) -> None:
        for part, x, y in zip(self._parts, arrays, out, strict=True):
            for sender, its in enumerate(self._member.everyones(x)):
                start, count, to = part.message(sender, self._member._rank)
                begin = start - part.owned[sender][0]
                y[:, to:to + count] = its[:, begin:begin + count]

    def exchange_arguments(self) -> None:
        return None


def logits_of_splits(folder: Path, asked: str, counts: tuple[int, ...], tokens: np.ndarray = TOKENS, mla: int = 0,
                     kv_mode: str = "redundant", kv_type: str = "f32") -> dict[int, np.ndarray]:
    """Logits float32 [tokens, vocab] of ``tokens`` in one step, for each count of ranks.

    Each rank must hold the bytes that were planned. Raises what a rank raises. In mode 3 the last ``tokens`` are taken
    as generated ones. Where the cache is sharded the sequence begins at the second place.
    """
    config, checkpoint = open_model(str(folder))
    config = dataclasses.replace(config, mla=mla)
    with contextlib.closing(checkpoint), pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy._Threads, "count", 1)
        weights = Weights(checkpoint, config)
        return {tp: _logits(config, weights, asked, tp, tokens, kv_mode, kv_type) for tp in counts}


def _logits(config, weights, asked, tp, tokens, kv_mode, kv_type) -> np.ndarray:
    split, sums = partition(registry.sizes(config, weights, asked), tp, kv_mode), Sums(tp)
    generated = len(tokens) // 3 if config.mla == 3 else 0

    def rank_logits(rank: int) -> np.ndarray:
        try:
            member = Member(sums, rank)
            loader = Loader(config, weights, split.shares[rank], asked, member)
            row = Row(member, split) if kv_mode != "redundant" and tp > 1 else None
            model = registry.BUILDERS[config.architecture](config, loader, row)
            assert loader.nbytes == registry.weight_bytes(config, weights, split, asked, rank), (tp, rank)
            heads, key, value = kvcache.form(config, split.shares[rank])
            blocks, shard, first = np.arange(-(-len(tokens) // kernels.BLOCK)), (rank % split.places, split.places), \
                np.ones(1, np.int32)
            cache = kvcache.allocate(kv_type, config.n_layers, len(blocks), heads, key, value_dim=value, shard=shard)
            table = np.where((first + blocks) % split.places == shard[0], blocks, -1).astype(np.int32)[None]
            place = np.roll(np.arange(len(tokens), dtype=np.int32), generated)      # generated ones stand first
            rows = kernels.Rows(tokens[place], place, np.zeros_like(place), table,
                                *model.rope.rows(place, place + 1), first, generated=generated)
            return model(rows, cache, np.argsort(place)).copy()
        except BaseException:
            sums.barrier.abort()
            raise

    with ThreadPoolExecutor(tp) as pool:
        found = list(pool.map(rank_logits, range(tp)))
    return np.concatenate(found, axis=1)
