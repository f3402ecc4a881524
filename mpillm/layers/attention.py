"""Grouped-query attention over a cache in blocks, split along whole heads.

Shape suffixes: T rows of a step, H query heads and J KV heads that are held here, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mpillm import kernels
from mpillm.kernels import Heads, LayerCache
from mpillm.layers.linear import ColumnLinear, RowLinear
from mpillm.layers.norm import RMSNorm


class KVGather(Protocol):
    """Turns owned K/V columns into the whole heads that are needed here (`allgather`)."""

    def run(self, k: np.ndarray, v: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]: ...

    def exchange_arguments(self) -> tuple[np.ndarray, ...] | None: ...


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
            if self.gather is not None:
                k_TJD, v_TJD = self._exchange(plan, self.gather, k_TJD, v_TJD)
            # Norms and rotation come after the exchange, so that both modes do the same arithmetic.
            if h.n_heads:
                plan.rope_write(q_THD, k_TJD, v_TJD, h, norms, cache)
        if h.n_heads:
            plan.attention(q_THD, h, cache, 1.0 / h.head_dim ** 0.5, self.window, self.output.input(plan))
        self.output.record(plan, residual, norm, normed)

    def _exchange(self, plan: kernels.Plan, gather: KVGather, k: np.ndarray,
                  v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Raw projections to the ranks whose queries need them."""
        needed = self.heads.n_kv_heads * self.heads.head_dim
        whole_k, whole_v = plan.buffer("whole_k", needed), plan.buffer("whole_v", needed)
        memory = gather.exchange_arguments()
        if memory is not None and k.strides != v.strides:       # of products that stand apart
            k, v = self._beside(plan, k, v)
        if memory is not None:
            plan.gather_columns(memory, k, v, whole_k, whole_v)
            return whole_k, whole_v

        def exchange(rows: int) -> None:
            parts = gather.run(np.ascontiguousarray(k[:rows]), np.ascontiguousarray(v[:rows]))
            whole_k[:rows], whole_v[:rows] = parts

        plan.call("exchange", exchange)
        return whole_k, whole_v

    def _beside(self, plan: kernels.Plan, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copies of k and v in one buffer."""
        own, n = plan.buffer("own_kv", 2 * self.kv_columns), self.kv_columns

        def copy(rows: int) -> None:
            own[:rows, :n], own[:rows, n:] = k[:rows], v[:rows]

        plan.call("exchange", copy)
        return own[:, :n], own[:, n:]
