"""The gated feed-forward layer (SwiGLU, arXiv 2002.05202), split along its columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpillm import kernels
from mpillm.layers.linear import ColumnLinear, RowLinear


@dataclass
class GatedMLP:
    """``down(silu(gate(x)) * up(x))``; gate and up are one product, their owned rows below each other."""

    gate_up: ColumnLinear
    down: RowLinear

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return self.down(kernels.silu_mul(self.gate_up(x)))
