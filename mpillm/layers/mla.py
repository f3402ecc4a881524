"""Multi-head latent attention (arXiv 2405.04434) over a cache in blocks, split along whole heads.

Keys and values of all heads follow from one latent row of a position. What is cached, by ``mode``:

====  =====================================================================  ======================================
mode  cached                                                                 how a row attends
====  =====================================================================  ======================================
0     keys and values of each head                                           as any attention
1     the latent row, and its first columns a second time in values' layout  each head's query brought into the
2     the latent row                                                         latent's space, one KV head for all
3     the latent row                                                         behind its prompt as in 2; in it to keys
                                                                             and values made of latents, as in 0
====  =====================================================================  ======================================

Shape suffixes: T rows of a step, H query heads that are held here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpillm import kernels
from mpillm.kernels import LatentHeads, LayerCache, PackedMatrix
from mpillm.layers.attention import KVGather
from mpillm.layers.linear import ColumnLinear, RowLinear
from mpillm.layers.norm import RMSNorm


@dataclass
class LatentMatrices:
    """What brings a head's query into the latent's space, and values out of it: of every head held here a matrix.

    ``absorb`` [H][kv_rank, nope], ``values`` [H][value, kv_rank], and in mode 3 ``keys`` [H][nope, kv_rank], which
    makes the key part of a latent; each filled up to whole panels of outputs.
    """

    absorb: PackedMatrix
    values: PackedMatrix
    keys: PackedMatrix | None = None


@dataclass
class LatentAttention:
    """``o(softmax(q k^T scale) v)`` of the query heads held here, summed over the owners of the rest."""

    heads: LatentHeads
    mode: int
    scale: float
    inputs: list[ColumnLinear]      # to the latents of queries (or the queries) and of keys and values
    query_rank: int                 # 0: queries have no latent
    query_norm: RMSNorm | None
    query: PackedMatrix | None      # from its latent to the heads' queries
    latent_norm: RMSNorm
    expand: PackedMatrix | None     # mode 0: from the latent to keys and values of each head, in turn
    matrices: LatentMatrices | None
    output: RowLinear
    gather: KVGather | None

    def input(self, plan: kernels.Plan, hidden: int) -> np.ndarray:
        """Where its input [T, hidden] is to be written."""
        return self.inputs[0].input(plan, hidden)

    def record(self, plan: kernels.Plan, cache: LayerCache, residual: np.ndarray, norm: RMSNorm | None,
               normed: np.ndarray) -> None:
        """Take what ``input`` holds, add the result to ``residual`` and leave its norm in ``normed``."""
        parts = self._inputs(plan)
        if self.heads.n_heads:
            *queries, latents = parts
            self._attend(plan, cache, self._queries(plan, queries[0]), latents)
        self.output.record(plan, residual, norm, normed)

    def _inputs(self, plan: kernels.Plan) -> list[np.ndarray]:
        """The latent of queries [T, query_rank], or queries [T, H * query], and the latent row [T, row]."""
        parts = [y for i, part in enumerate(self.inputs) for y in part.record_each(plan, f"latents {i}")]
        if self.gather is None:
            return parts
        # Norms come after the exchange, so that both modes do the same arithmetic.
        own, first = (parts, []) if self.query_rank else (parts[1:], parts[:1])
        whole = plan.buffer("whole_latents", self.query_rank + self.heads.row)
        self._exchange(plan, self.gather, own, whole)
        return [*first, *([whole[:, :self.query_rank]] if self.query_rank else []), whole[:, self.query_rank:]]

    def _exchange(self, plan: kernels.Plan, gather: KVGather, own: list[np.ndarray], whole: np.ndarray) -> None:
        """This rank's columns of the latents, and all other ranks', to ``whole``."""
        columns = own[0] if len(own) == 1 else self._beside(plan, own)
        memory = gather.exchange_arguments()
        if memory is not None:
            plan.gather_columns(memory, columns, None, whole, None)
            return

        def exchange(rows: int) -> None:
            found, _ = gather.run(np.ascontiguousarray(columns[:rows]), None)
            if self.heads.n_heads:          # else there is nothing that is needed here
                whole[:rows] = found

        plan.call("exchange", exchange)

    def _beside(self, plan: kernels.Plan, own: list[np.ndarray]) -> np.ndarray:
        """One product's parts as they stand; those of several products in one buffer."""
        width = sum(part.shape[1] for part in own)
        if len(self.inputs) == 1:
            return self._whole(plan, width)
        both = plan.buffer("own_latents", width)

        def copy(rows: int) -> None:
            np.concatenate([part[:rows] for part in own], axis=1, out=both[:rows])

        plan.call("exchange", copy)
        return both

    def _whole(self, plan: kernels.Plan, width: int) -> np.ndarray:
        """The last ``width`` columns of the one product's outputs."""
        n = self.inputs[0].weight.n
        return plan.buffer("latents 0", n)[:, n - width:]

    def _queries(self, plan: kernels.Plan, given: np.ndarray) -> np.ndarray:
        """Queries [T, H * query] of their latent, or as they are."""
        if self.query is None or self.query_norm is None:
            return given
        normed = plan.buffer("normed_queries", self.query_rank, whole=self.query.k)
        plan.norm(given, self.query_norm.weight, self.query_norm.eps, normed)
        q_THD = plan.buffer("queries", self.query.n)
        plan.linear(plan.buffer("normed_queries", self.query.k), self.query, None, q_THD)
        return q_THD

    def _attend(self, plan: kernels.Plan, cache: LayerCache, q_THD: np.ndarray, latents: np.ndarray) -> None:
        """The heads' results into what the output takes."""
        h = self.heads
        own = self.latent_norm.weight, self.latent_norm.eps, h, q_THD
        if self.expand is not None:
            kernels.record_rows(plan, latents, *own, None, plan.buffer("latent_input", h.kv_rank, whole=self.expand.k))
            self._expand(plan, cache, self.expand, latents)
            plan.attention(q_THD, h.apart, cache, self.scale, 0, self.output.input(plan))
            return
        assert self.matrices is not None, f"mode {self.mode} brings queries into the latent's space"
        absorbed = plan.buffer("absorbed", h.n_heads * h.row)
        kernels.record_rows(plan, latents, *own, absorbed)
        plan.cache_write(latents, latents[:, :h.kv_rank] if self.mode == 1 else None, h.together, cache)
        m, found, out = self.matrices, plan.buffer("latent_values", h.n_heads * h.kv_rank), self.output.input(plan)
        apart = m.keys is not None
        rows = kernels.GENERATED if apart else kernels.ROWS
        kernels.record_by_heads(plan, q_THD, h.query, h.nope, m.absorb, h.n_heads, absorbed, h.row, h.kv_rank, rows)
        plan.attention(absorbed, h.together, cache, self.scale, 0, found, generated=apart)
        kernels.record_by_heads(plan, found, h.kv_rank, h.kv_rank, m.values, h.n_heads, out, h.value, h.value, rows)
        if m.keys is not None and plan.prompts:
            kernels.record_prompts(plan, q_THD, h, cache, kernels.PromptMatrices(m.keys, m.values), self.scale, out)

    def _expand(self, plan: kernels.Plan, cache: LayerCache, w: PackedMatrix, latents: np.ndarray) -> None:
        """Keys and values of each head of the latents, into the cache."""
        h, made = self.heads, plan.buffer("expanded", w.n)
        plan.linear(plan.buffer("latent_input", w.k), w, None, made)
        keys, values = plan.buffer("keys", h.n_heads * h.query), plan.buffer("values", h.n_heads * h.value)
        step = h.nope + h.value
        kernels.record_spread(plan, (made, step), (made[:, h.nope:], step), latents[:, h.kv_rank:], h, keys, values)
        plan.cache_write(keys, values, h.apart, cache)
