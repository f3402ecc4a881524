"""Runs of the program held against reference logits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from program import EXACT, Outputs, run
from recorded import Recorded, relative_error

TOLERANCE = 2e-5


def lines_of(prompts: Iterable[Recorded]) -> list[dict[str, Any]]:
    """Bare input lines, named p0, p1, ..."""
    return [{"id": f"p{i}", "prompt_token_ids": prompt.prompt, "max_tokens": len(prompt.ids)}
            for i, prompt in enumerate(prompts)]


def run_case(folder: Path, model: Path, prompts: list[Recorded], ranks: int, mode: str = "redundant",
             *more: Any, name: str | None = None, weights: str = "f32") -> Outputs:
    """All prompts of a case in one batch, one model over all ranks, everything in float32."""
    return run(folder, ranks, model, lines_of(prompts), *EXACT, "--weights", weights, "--tp", ranks,
               "--kv-mode", mode, *more, name=name or f"{mode}-{ranks}")


def check(outputs: Outputs, prompts: list[Recorded], tolerance: float = TOLERANCE) -> None:
    """Greedy ids equal, prompt and decode logits within the tolerance."""
    for i, prompt in enumerate(prompts):
        found = outputs.ids(f"p{i}")
        assert found == prompt.ids, f"prompt {i} of {len(prompt.prompt)} ids: {found}, not {prompt.ids}"
        logits = outputs.logits(f"p{i}")
        split = len(prompt.prompt)
        assert logits.shape == prompt.logits.shape and logits.dtype == np.float32
        for part, rows in (("prompt", slice(None, split)), ("decode", slice(split, None))):
            if not len(prompt.logits[rows]):
                continue     # a single new token comes from the prompt's own last row
            error = relative_error(logits[rows], prompt.logits[rows])
            assert error < tolerance, f"prompt {i} of {split} ids, {part} logits: relative error {error:.2g}"


def same_bits(one: Outputs, other: Outputs, names: Iterable[str]) -> None:
    """Ids and every logit of these lines equal bit for bit."""
    for name in names:
        assert one.ids(name) == other.ids(name), name
        a, b = one.logits(name), other.logits(name)
        assert a.shape == b.shape and (a.view(np.uint32) == b.view(np.uint32)).all(), f"{name}: bits differ"
