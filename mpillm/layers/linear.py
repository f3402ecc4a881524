"""Matrix products split over ranks: along outputs (column parallel) or inputs (row parallel).

Layers do not compute; they record operations into a step's plan, over buffers [rows, n].
Shape suffixes: T rows (tokens of a step), K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mpillm import kernels
from mpillm.layers.norm import RMSNorm


class Reducer(Protocol):
    """Sums arrays over the ranks that share a model, in rank order."""

    tp: int

    def all_reduce(self, array: np.ndarray) -> None: ...

    def exchange_arguments(self) -> tuple[np.ndarray, ...] | None: ...

    def check(self) -> None: ...


@dataclass
class ColumnLinear:
    """``y = x W^T + b`` of the outputs that are owned here: full [n_full, k], local [n, k]."""

    weight: kernels.PackedMatrix
    bias: np.ndarray | None
    n_full: int
    in_turn: bool = False     # two halves, a panel of each in turn
    widths: tuple[int, ...] = ()      # outputs of each tensor in it, if they stand below each other

    def input(self, plan: kernels.Plan, k: int) -> np.ndarray:
        """Where its input [T, k] is to be written: zeros fill it up to the stored blocks."""
        return plan.buffer("column_input", k, whole=self.weight.k)

    def record(self, plan: kernels.Plan, name: str) -> np.ndarray:
        """Record the product of what ``input`` holds; its result [T, n] is the buffer ``name``."""
        y_TN = plan.buffer(name, self.weight.n)
        plan.linear(plan.buffer("column_input", self.weight.k), self.weight, self.bias, y_TN)
        return y_TN

    def record_each(self, plan: kernels.Plan, name: str) -> list[np.ndarray]:
        """The same; the results of its tensors, each [T, width]."""
        y_TN, starts = self.record(plan, name), np.cumsum((0, *self.widths)).tolist()
        return [y_TN[:, start:start + width] for start, width in zip(starts, self.widths, strict=False)]

    def record_gated(self, plan: kernels.Plan, out: np.ndarray) -> None:
        """Record ``silu(first half) * second half`` of the product, in one pass; the halves stand in turn."""
        assert self.in_turn, "the halves stand below each other"
        plan.gated(plan.buffer("column_input", self.weight.k), self.weight, self.bias, out)

    def record_heads(self, plan: kernels.Plan, out: np.ndarray, heads: kernels.Heads, norms: kernels.HeadNorms,
                     cache: kernels.LayerCache) -> None:
        """Record the product as queries, keys and values, in one pass with norms, rotation and the cache write."""
        plan.heads(plan.buffer("column_input", self.weight.k), self.weight, self.bias, out, heads, norms, cache)


@dataclass
class RowLinear:
    """``y = sum over owners of x_local W_local^T``, then the bias, once: full [n, k_full], local [n, k].

    ``before`` counts columns that the stored slice has in front of the owned ones, so that it begins on
    a quantisation block's border; ``k_owned`` the owned ones.
    """

    weight: kernels.PackedMatrix
    bias: np.ndarray | None
    k_full: int
    before: int
    k_owned: int
    reducer: Reducer

    def input(self, plan: kernels.Plan) -> np.ndarray:
        """Where its input [T, k_owned] is to be written."""
        return plan.buffer(self._room, self.k_owned, self.before, self.weight.k)

    @property
    def _room(self) -> str:
        """The buffer of the input: shared only where the same columns are owned, for the others must stay zeros."""
        return f"row_input {self.before} {self.k_owned}"

    def record(self, plan: kernels.Plan, residual_TN: np.ndarray, norm: RMSNorm | None,
               normed_TN: np.ndarray) -> None:
        """``residual += y``, and its norm (if any) into ``normed``, which every rank computes alike."""
        y_TN = self.record_local(plan, "row_output")
        record_sum(plan, self.reducer, y_TN, self.bias, residual_TN, norm, normed_TN)

    def record_local(self, plan: kernels.Plan, name: str) -> np.ndarray:
        """This rank's part of the sum [T, N], the buffer ``name``; without the bias."""
        y_TN = plan.buffer(name, self.weight.n)
        plan.linear(plan.buffer(self._room, self.weight.k), self.weight, None, y_TN)
        return y_TN


def record_sum(plan: kernels.Plan, reducer: Reducer, y_TN: np.ndarray, bias: np.ndarray | None,
               residual_TN: np.ndarray, norm: RMSNorm | None, normed_TN: np.ndarray) -> None:
    """``residual += y (+ bias)``, y [T, N] summed over the ranks, and its norm (if any) into ``normed``."""
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    memory = reducer.exchange_arguments()
    if reducer.tp > 1 and memory is not None:
        plan.reduce_rows(memory, residual_TN, y_TN, bias, weight, eps, normed_TN)
        return
    if reducer.tp > 1:
        plan.call("exchange", lambda rows: reducer.all_reduce(y_TN[:rows]), elsewhere=True)
    plan.add_norm(residual_TN, y_TN, bias, weight, eps, normed_TN)
