"""Grouped-query attention over a cache in blocks, split along whole heads.

Shape suffixes: T rows of a step, H query heads and J KV heads that are held here, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mpillm import kernels
from mpillm.layers.linear import ColumnLinear, RowLinear
from mpillm.layers.norm import HeadRMSNorm


@dataclass
class Rows:
    """The rows of one step, from any number of sequences; every layer sees the same."""

    tokens: np.ndarray       # int64 [T]
    positions: np.ndarray    # int32 [T]
    sequences: np.ndarray    # int32 [T], rows of block_table
    block_table: np.ndarray  # int32 [S, blocks], cache blocks of each sequence in order of position
    cos: np.ndarray          # float32 [T, D / 2]
    sin: np.ndarray          # float32 [T, D / 2]


@dataclass
class LayerCache:
    """Keys and values of one layer, in blocks, as the kernels lay them out."""

    keys: np.ndarray
    values: np.ndarray
    kv_type: str


class KVGather(Protocol):
    """Turns owned K/V columns into the whole heads that are needed here (`allgather`)."""

    def run(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass
class Heads:
    """Which heads are held here: query heads in groups, one group for each KV head held."""

    head_dim: int
    n_heads: int
    n_kv_heads: int
    kv_columns: int         # columns of K (and of V) that are computed here
    starts: np.ndarray      # int32 [J] first local query head of each local KV head
    stops: np.ndarray       # int32 [J]


@dataclass
class Attention:
    """``o(softmax(q k^T / sqrt(D)) v)`` of the query heads held here, summed over the owners of the rest."""

    index: int
    heads: Heads
    qkv: ColumnLinear
    output: RowLinear
    query_norm: HeadRMSNorm | None
    key_norm: HeadRMSNorm | None
    gather: KVGather | None
    window: int             # 0: every position before

    def __call__(self, x: np.ndarray, rows: Rows, cache: LayerCache) -> np.ndarray:
        h = self.heads
        q_width, kv_width = h.n_heads * h.head_dim, h.kv_columns
        qkv = self.qkv(x)
        q_THD = np.ascontiguousarray(qkv[:, :q_width])
        k_TJD = np.ascontiguousarray(qkv[:, q_width:q_width + kv_width])
        v_TJD = np.ascontiguousarray(qkv[:, q_width + kv_width:])
        if self.gather is not None:
            k_TJD, v_TJD = self.gather.run(k_TJD, v_TJD)
        if not h.n_heads:
            return self.output(np.zeros((len(x), 0), np.float32))

        # Norms and rotation come after the exchange, so that both modes do the same arithmetic.
        if self.query_norm is not None:
            self.query_norm(q_THD)
        if self.key_norm is not None:
            self.key_norm(k_TJD)
        kernels.rope(q_THD, rows.cos, rows.sin, h.head_dim)
        kernels.rope(k_TJD, rows.cos, rows.sin, h.head_dim)

        beyond = kernels.cache_write(cache.keys, cache.values, cache.kv_type, k_TJD, v_TJD,
                                     rows.sequences, rows.positions, rows.block_table)
        if beyond:
            self._poison(cache, rows, k_TJD, v_TJD)
        mixed = kernels.attention(q_THD, cache.keys, cache.values, cache.kv_type, h.starts, h.stops,
                                  rows.sequences, rows.positions, rows.block_table,
                                  1.0 / h.head_dim ** 0.5, self.window)
        return self.output(mixed)

    @staticmethod
    def _poison(cache: LayerCache, rows: Rows, k: np.ndarray, v: np.ndarray) -> None:
        """Make NaN of the values of rows that the cache's type cannot hold.

        What attends to them becomes NaN as well, on every rank by the sums, so that all ranks find the same
        sequences failed without asking; the rest of the batch does not notice.
        """
        largest = kernels.largest(cache.kv_type)
        lost = np.flatnonzero(~((np.abs(k) <= largest).all(1) & (np.abs(v) <= largest).all(1)))
        kernels.cache_write(cache.keys, cache.values, cache.kv_type, k[lost], np.full_like(v[lost], np.nan),
                            rows.sequences[lost], rows.positions[lost], rows.block_table)
