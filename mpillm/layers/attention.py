"""Grouped-query attention over a cache in blocks, split along whole heads; the cache perhaps by positions.

Shape suffixes: T rows of a step, H query heads and J KV heads that are held here, D head_dim; R query heads of a
KV row, whose P ranks each hold a part of the positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpillm import kernels
from mpillm.kernels import Heads, LayerCache
from mpillm.layers.exchange import KVGather, record_swap
from mpillm.layers.linear import ColumnLinear, RowLinear
from mpillm.layers.norm import RMSNorm


@dataclass
class Attention:
    """``o(softmax(q k^T / sqrt(D)) v)`` of the query heads held here, summed over the owners of the rest."""

    heads: Heads
    kv_columns: int         # columns of K (and of V) that are computed here
    qkv: list[ColumnLinear]     # one product, or runs of q, k and v that have other formats
    output: RowLinear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    gather: KVGather | None
    window: int             # 0: every position before

    def input(self, plan: kernels.Plan, hidden: int) -> np.ndarray:
        """Where its input [T, hidden] is to be written."""
        return self.qkv[0].input(plan, hidden)

    def record(self, plan: kernels.Plan, cache: LayerCache, residual: np.ndarray, norm: RMSNorm | None,
               normed: np.ndarray) -> None:
        """Take what ``input`` holds, add the result to ``residual`` and leave its norm in ``normed``."""
        h, q_width = self.heads, self.heads.n_heads * self.heads.head_dim
        query, key = (None if norm_ is None else norm_.weight for norm_ in (self.query_norm, self.key_norm))
        norms = kernels.HeadNorms(query, key, 0.0 if self.query_norm is None else self.query_norm.eps)
        if self.gather is None and h.head_dim % 16 == 0 and len(self.qkv) == 1:
            q_THD = plan.buffer("queries", q_width)
            self.qkv[0].record_heads(plan, q_THD, h, norms, cache)
        else:
            q_THD, k_TJD, v_TJD = (y for i, part in enumerate(self.qkv) for y in part.record_each(plan, f"qkv {i}"))
            # Norms and rotation come after the exchange, so that all modes do the same arithmetic.
            if self.gather is not None and self.gather.width > 1:
                self._record_shard(plan, self.gather, (q_THD, k_TJD, v_TJD), norms, cache)
                self.output.record(plan, residual, norm, normed)
                return
            if self.gather is not None:
                k_TJD, v_TJD = record_swap(plan, self.gather.gather, (k_TJD, v_TJD), ("whole_k", "whole_v"))
            if h.n_heads:
                plan.rope_write(q_THD, k_TJD, v_TJD, h, norms, cache)
        if h.n_heads:
            plan.attention(q_THD, h, cache, self._scale, self.window, self.output.input(plan))
        self.output.record(plan, residual, norm, normed)

    @property
    def _scale(self) -> float:
        return 1.0 / self.heads.head_dim ** 0.5

    def _record_shard(self, plan: kernels.Plan, row: KVGather, own: tuple[np.ndarray, ...], norms: kernels.HeadNorms,
                      cache: LayerCache) -> None:
        """All of the row's queries over the positions held here; then each rank merges its own heads' parts."""
        assert row.merge is not None, "a sharded cache is merged"
        group = row.heads // self.heads.n_kv_heads
        starts = np.arange(0, row.heads, group, dtype=np.int32)
        h = Heads(self.heads.head_dim, row.heads, starts, starts + np.int32(group))
        q_TRD, k_TJD, v_TJD = record_swap(plan, row.gather, own, ("row_queries", "whole_k", "whole_v"))
        plan.rope_write(q_TRD, k_TJD, v_TJD, h, norms, cache)
        part_TRD, sums_TR = plan.buffer("part", row.heads * h.head_dim), plan.buffer("part_sums", row.heads)
        plan.attention(q_TRD, h, cache, self._scale, self.window, part_TRD, sums_TR)
        parts, sums = record_swap(plan, row.merge, (part_TRD, sums_TR), ("parts", "parts_sums"))
        if self.heads.n_heads:
            parts_PTHD, sums_PTH = (x.reshape(len(x), row.width, -1).swapaxes(0, 1) for x in (parts, sums))
            plan.merge_shards(parts_PTHD, sums_PTH, self.output.input(plan))
