"""The gated feed-forward layer (SwiGLU, arXiv 2002.05202), split along its columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpillm import kernels
from mpillm.layers.linear import ColumnLinear, RowLinear
from mpillm.layers.norm import RMSNorm


@dataclass
class GatedMLP:
    """``down(silu(gate(x)) * up(x))``; gate and up are one product and one pass where they are whole panels."""

    gate_up: ColumnLinear
    down: RowLinear

    def input(self, plan: kernels.Plan, hidden: int) -> np.ndarray:
        """Where its input [T, hidden] is to be written."""
        return self.gate_up.input(plan, hidden)

    def record(self, plan: kernels.Plan, residual: np.ndarray, norm: RMSNorm | None, normed: np.ndarray) -> None:
        """Take what ``input`` holds, add the result to ``residual`` and leave its norm in ``normed``."""
        self._record_columns(plan)
        self.down.record(plan, residual, norm, normed)

    def record_local(self, plan: kernels.Plan, name: str) -> np.ndarray:
        """What this rank adds to the sum, for what ``input`` holds: [T, hidden], the buffer ``name``."""
        self._record_columns(plan)
        return self.down.record_local(plan, name)

    def _record_columns(self, plan: kernels.Plan) -> None:
        if self.gate_up.in_turn:
            self.gate_up.record_gated(plan, self.down.input(plan))
        else:
            plan.silu_mul(self.gate_up.record(plan, "gate_up"), self.down.input(plan))
