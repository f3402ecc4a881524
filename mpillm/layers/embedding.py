"""The embedding and the output head, split over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpillm import kernels
from mpillm.layers.linear import Reducer


@dataclass
class VocabEmbedding:
    """Rows ``first .. first + n`` of the embedding [vocab, hidden]; absent rows come from their owners."""

    weight: kernels.PackedMatrix
    first: int
    hidden: int
    reducer: Reducer

    def __call__(self, tokens: np.ndarray, x: np.ndarray) -> None:
        """``x`` float32 [T, hidden] of token ids int64 [T]; exact: all but one term of each sum are zero."""
        local = tokens - self.first
        mine = np.flatnonzero((local >= 0) & (local < self.weight.n))
        if len(mine) < len(tokens):
            x[:] = 0
        if len(mine):
            x[mine] = kernels.lookup(self.weight, local[mine])[:, :self.hidden]
        self.reducer.all_reduce(x)


@dataclass
class VocabHead:
    """Logits of the owned vocabulary rows: full [vocab, hidden], local [n, hidden]; they stay split."""

    weight: kernels.PackedMatrix
    first: int

    def input(self, plan: kernels.Plan, hidden: int) -> np.ndarray:
        """Where its input [wanted, hidden] is to be written."""
        return plan.buffer("head_input", hidden, whole=self.weight.k)

    def record(self, plan: kernels.Plan) -> np.ndarray:
        """Record the product of what ``input`` holds; logits [wanted, n]."""
        logits = plan.buffer("logits", self.weight.n)
        plan.linear(plan.buffer("head_input", self.weight.k), self.weight, None, logits, kernels.WANTED)
        return logits
