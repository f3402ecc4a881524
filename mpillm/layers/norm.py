"""Root-mean-square norms (arXiv 1910.07467); every rank computes the whole width alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpillm import kernels


@dataclass
class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, float32 [T, hidden]."""

    weight: np.ndarray
    eps: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return kernels.rms_norm(x, self.weight, self.eps)


@dataclass
class HeadRMSNorm:
    """The same over each head of ``len(weight)`` values (Qwen3's norms of queries and keys), in place."""

    weight: np.ndarray
    eps: float

    def __call__(self, x: np.ndarray) -> None:
        if x.shape[1]:
            kernels.head_rms_norm(x, self.weight, len(self.weight), self.eps)
