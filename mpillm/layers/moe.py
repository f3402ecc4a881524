"""A mixture of experts (arXiv 2101.03961, 2401.04088, 2401.06066) as a feed-forward layer, split over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpillm import kernels
from mpillm.layers.linear import Reducer, record_sum
from mpillm.layers.mlp import GatedMLP
from mpillm.layers.norm import RMSNorm


@dataclass
class ExpertMLP:
    """``sum over a row's experts of weight * down(silu(gate(x)) * up(x))``.

    Every rank has the whole router, and so finds the same choice, and a slice of the columns of every expert, so that
    the load is even whatever the rows choose; or some experts whole, of which the rows that chose them are computed.
    ``shared``: those that every row goes to, as one feed-forward, if they are not among the experts.
    """

    experts: kernels.Experts
    shared: GatedMLP | None
    reducer: Reducer

    def input(self, plan: kernels.Plan, hidden: int) -> np.ndarray:
        """Where its input [T, hidden] is to be written."""
        return plan.buffer("column_input", hidden, whole=self.experts.gate_up.k)

    def record(self, plan: kernels.Plan, residual: np.ndarray, norm: RMSNorm | None, normed: np.ndarray) -> None:
        """Take what ``input`` holds, add the result to ``residual`` and leave its norm in ``normed``."""
        y_TN = plan.buffer("row_output", self.experts.hidden)
        beside_TN = self.shared.record_local(plan, "shared_output") if self.shared is not None else None
        kernels.record_experts(plan, plan.buffer("column_input", self.experts.gate_up.k), self.experts, y_TN, beside_TN)
        record_sum(plan, self.reducer, y_TN, None, residual, norm, normed)
