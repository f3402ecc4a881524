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

Where the cache is sharded by positions (modes 1 and 2), each rank attends with all heads' queries in the latent's space
to the positions that it holds, and the parts of a head are merged in that space by the rank that has its matrices.

Shape suffixes: T rows of a step, H query heads that are held here; R of all ranks, whose P each hold a part of the
positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mpillm import kernels
from mpillm.kernels import Heads, LatentHeads, LayerCache, PackedMatrix
from mpillm.layers.exchange import KVGather, record_swap
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
        *queries, latents = self._inputs(plan)
        q_THD = self._queries(plan, queries[0]) if self.heads.n_heads else plan.buffer("queries", 0)
        if self.gather is not None and self.gather.width > 1:
            self._record_shard(plan, self.gather, cache, q_THD, latents)
        elif self.heads.n_heads:
            self._attend(plan, cache, q_THD, latents)
        self.output.record(plan, residual, norm, normed)

    def _inputs(self, plan: kernels.Plan) -> list[np.ndarray]:
        """The latent of queries [T, query_rank], or queries [T, H * query], and the latent row [T, row]."""
        parts = [y for i, part in enumerate(self.inputs) for y in part.record_each(plan, f"latents {i}")]
        if self.gather is None:
            return parts
        # Norms come after the exchange, so that both modes do the same arithmetic.
        own, first = (parts, []) if self.query_rank else (parts[1:], parts[:1])
        columns = own[0] if len(own) == 1 else self._beside(plan, own)
        whole, = record_swap(plan, self.gather.gather, [columns], ["whole_latents"])
        return [*first, *([whole[:, :self.query_rank]] if self.query_rank else []), whole[:, self.query_rank:]]

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
        if self.expand is not None:
            kernels.record_rows(plan, latents, self.latent_norm.weight, self.latent_norm.eps, h, q_THD, None,
                                plan.buffer("latent_input", h.kv_rank, whole=self.expand.k))
            self._expand(plan, cache, self.expand, latents)
            plan.attention(q_THD, h.apart, cache, self.scale, 0, self.output.input(plan))
            return
        m, found = self._matrices, plan.buffer("latent_values", h.n_heads * h.kv_rank)
        absorbed, apart = self._absorbed(plan, cache, q_THD, latents, h.together), m.keys is not None
        plan.attention(absorbed, h.together, cache, self.scale, 0, found, generated=apart)
        out = self._values(plan, found)
        if m.keys is not None and plan.prompts:
            kernels.record_prompts(plan, q_THD, h, cache, kernels.PromptMatrices(m.keys, m.values), self.scale, out)

    @property
    def _matrices(self) -> LatentMatrices:
        assert self.matrices is not None, f"mode {self.mode} brings queries into the latent's space"
        return self.matrices

    def _by_heads(self, plan: kernels.Plan, x: np.ndarray, steps: tuple[int, int], k: int, w: PackedMatrix,
                  out: np.ndarray, n: int) -> None:
        """``n`` outputs of ``k`` values of each head, whose columns stand ``steps`` apart in x and in out.

        Where prompts attend in another way, only of rows behind them.
        """
        rows = kernels.ROWS if self._matrices.keys is None else kernels.GENERATED
        kernels.record_by_heads(plan, x, steps[0], k, w, self.heads.n_heads, out, steps[1], n, rows)

    def _absorbed(self, plan: kernels.Plan, cache: LayerCache, q_THD: np.ndarray, latents: np.ndarray,
                  cached: Heads) -> np.ndarray:
        """Queries in the latent's space [T, H * row]; the latent rows, normed and rotated, go into the cache."""
        h, absorbed = self.heads, plan.buffer("absorbed", self.heads.n_heads * self.heads.row)
        kernels.record_rows(plan, latents, self.latent_norm.weight, self.latent_norm.eps, h, q_THD, absorbed)
        plan.cache_write(latents, latents[:, :h.kv_rank] if self.mode == 1 else None, cached, cache)
        self._by_heads(plan, q_THD, (h.query, h.row), h.nope, self._matrices.absorb, absorbed, h.kv_rank)
        return absorbed

    def _values(self, plan: kernels.Plan, found: np.ndarray) -> np.ndarray:
        """What the output takes, of what the heads found in the latent's space [T, H * kv_rank]."""
        h, out = self.heads, self.output.input(plan)
        self._by_heads(plan, found, (h.kv_rank, h.value), h.kv_rank, self._matrices.values, out, h.value)
        return out

    def _record_shard(self, plan: kernels.Plan, row: KVGather, cache: LayerCache, q_THD: np.ndarray,
                      latents: np.ndarray) -> None:
        """All ranks' heads over the positions held here; then each rank merges its own heads' parts."""
        assert row.queries is not None and row.merge is not None, "a sharded cache is merged"
        h, every = self.heads, replace(self.heads, n_heads=row.heads).together
        absorbed = self._absorbed(plan, cache, q_THD, latents, every)
        q_TRD, = record_swap(plan, row.queries, [absorbed], ["row_queries"])
        part_TRD, sums_TR = plan.buffer("part", row.heads * h.kv_rank), plan.buffer("part_sums", row.heads)
        plan.attention(q_TRD, every, cache, self.scale, 0, part_TRD, sums_TR)
        parts, sums = record_swap(plan, row.merge, (part_TRD, sums_TR), ("parts", "parts_sums"))
        if h.n_heads:
            found = plan.buffer("latent_values", h.n_heads * h.kv_rank)
            parts_PTHD, sums_PTH = (x.reshape(len(x), row.width, -1).swapaxes(0, 1) for x in (parts, sums))
            plan.merge_shards(parts_PTHD, sums_PTH, found)
            self._values(plan, found)

    def _expand(self, plan: kernels.Plan, cache: LayerCache, w: PackedMatrix, latents: np.ndarray) -> None:
        """Keys and values of each head of the latents, into the cache."""
        h, made = self.heads, plan.buffer("expanded", w.n)
        plan.linear(plan.buffer("latent_input", w.k), w, None, made)
        keys, values = plan.buffer("keys", h.n_heads * h.query), plan.buffer("values", h.n_heads * h.value)
        step = h.nope + h.value
        kernels.record_spread(plan, (made, step), (made[:, h.nope:], step), latents[:, h.kv_rank:], h, keys, values)
        plan.cache_write(keys, values, h.apart, cache)
