"""What was recorded, and how outputs are compared with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

DATA = Path(__file__).with_name("data")


@dataclass(frozen=True)
class Recorded:
    """One prompt: its ids, the greedy ids after it, and logits [len(prompt) + len(ids) - 1, vocab]."""

    prompt: list[int]
    ids: list[int]
    logits: np.ndarray


def load_recorded(name: str) -> list[Recorded]:
    """The prompts of a case, shortest first."""
    with np.load(DATA / f"{name}.npz") as file:
        count = sum(key.startswith("prompt_") for key in file.files)
        return [Recorded(file[f"prompt_{i}"].tolist(), file[f"ids_{i}"].tolist(), file[f"logits_{i}"])
                for i in range(count)]


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """max |a - b| / max |b|; infinite where the shapes differ or a value is not finite."""
    if ours.shape != theirs.shape or not np.isfinite(ours).all():
        return float("inf")
    return float(np.abs(ours.astype(np.float64) - theirs).max() / np.abs(theirs).max())
