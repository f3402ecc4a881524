"""Root-mean-square norms (arXiv 1910.07467); every rank computes the whole width alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over a row, or over each head of a row (Qwen3's queries and keys)."""

    weight: np.ndarray
    eps: float
