"""The embedding and the output head, split over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpillm import kernels
from mpillm.layers.linear import Reducer, _padded


@dataclass
class VocabEmbedding:
    """Rows ``first .. first + n`` of the embedding [vocab, hidden]; absent rows come from their owners."""

    weight: kernels.PackedMatrix
    first: int
    hidden: int
    reducer: Reducer

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [T, hidden] of token ids int64 [T]; exact: all but one term of each sum are zero."""
        x = np.zeros((len(tokens), self.hidden), np.float32)
        local = tokens - self.first
        mine = np.flatnonzero((local >= 0) & (local < self.weight.n))
        if len(mine):
            x[mine] = kernels.lookup(self.weight, local[mine])[:, :self.hidden]
        self.reducer.all_reduce(x)
        return x


@dataclass
class VocabHead:
    """Logits of the owned vocabulary rows: full [vocab, hidden], local [n, hidden]; they stay split."""

    weight: kernels.PackedMatrix
    first: int

    def __call__(self, x_TK: np.ndarray) -> np.ndarray:
        return kernels.linear(_padded(x_TK, 0, self.weight.k), self.weight, None)
