"""Matrix products split over ranks: along outputs (column parallel) or inputs (row parallel).

Shape suffixes: T rows (tokens of a step), K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mpillm import kernels


class Reducer(Protocol):
    """Sums an array over the ranks that share a model, in place, in rank order."""

    def all_reduce(self, array: np.ndarray) -> None: ...


def _padded(x_TK: np.ndarray, before: int, k: int) -> np.ndarray:
    """``x`` inside ``k`` columns, ``before`` zeros in front: quantised blocks keep their absolute borders."""
    if x_TK.shape[1] == k:
        return x_TK
    wide = np.zeros((x_TK.shape[0], k), np.float32)
    wide[:, before:before + x_TK.shape[1]] = x_TK
    return wide


@dataclass
class ColumnLinear:
    """``y = x W^T + b`` of the outputs that are owned here: full [n_full, k], local [n, k]."""

    weight: kernels.PackedMatrix
    bias: np.ndarray | None
    n_full: int

    def __call__(self, x_TK: np.ndarray) -> np.ndarray:
        return kernels.linear(_padded(x_TK, 0, self.weight.k), self.weight, self.bias)


@dataclass
class RowLinear:
    """``y = sum over owners of x_local W_local^T``, then the bias, once: full [n, k_full], local [n, k].

    ``before`` counts columns that the stored slice has in front of the owned ones, so that it begins on
    a quantisation block's border.
    """

    weight: kernels.PackedMatrix
    bias: np.ndarray | None
    k_full: int
    before: int
    reducer: Reducer

    def __call__(self, x_TK: np.ndarray) -> np.ndarray:
        y_TN = kernels.linear(_padded(x_TK, self.before, self.weight.k), self.weight, None)
        self.reducer.all_reduce(y_TN)
        if self.bias is not None:
            y_TN += self.bias
        return y_TN
