"""The weight formats in memory: exact where the file's values are exact in them, close where they are not."""

from __future__ import annotations

import numpy as np
import pytest
from case_list import BY_NAME
from cases import read_safetensors, shapes, values, write_folder
from comparing import check, run_case, same_bits
from naive_llama import NaiveLlama
from recorded import load_recorded, relative_error
from to_gguf import write_gguf


@pytest.mark.parametrize("name, weights", [("ratio4", "bf16"), ("nine", "f16")])
def test_exact_in_the_format_of_the_file(name, weights, tmp_path):
    prompts = load_recorded(name)
    model = write_folder(BY_NAME[name], tmp_path / "model")
    check(run_case(tmp_path, model, prompts, 2, weights=weights), prompts)


def test_auto_keeps_what_the_file_has(tmp_path):
    prompts = load_recorded("ratio4")
    model = write_folder(BY_NAME["ratio4"], tmp_path / "model")
    same_bits(run_case(tmp_path, model, prompts, 1, weights="auto", name="auto"),
              run_case(tmp_path, model, prompts, 1, weights="bf16", name="bf16"), ["p0", "p3"])


class RoundedInputs(NaiveLlama):
    """The twin of q8_0: what is multiplied is rounded to eight bits in blocks of 32 of a row, as ggml does."""

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return super().linear(rounded(x), name)

    def head(self, x: np.ndarray) -> np.ndarray:
        return super().head(rounded(x))


def rounded(x: np.ndarray) -> np.ndarray:
    blocks = x.reshape(len(x), -1, 32)
    d = np.abs(blocks).max(axis=2, keepdims=True) / 127
    q = blocks / np.where(d > 0, d, 1)
    return (np.sign(q) * np.floor(np.abs(q) + 0.5) * d.astype(np.float16)).reshape(x.shape)


@pytest.mark.parametrize("ranks", [1, 3])
def test_q8_0_rounds_inputs_to_eight_bits_and_nothing_else(ranks, tmp_path):
    """Most rows agree to float32's precision; in some a value came to the other side of a rounding border, and what
    follows from that is no more than the rounding itself does."""
    case, path = BY_NAME["tiny"], tmp_path / "model.gguf"
    tensors = write_gguf(case.config, read_safetensors(write_folder(case, tmp_path / "folder")), path, "Q8_0")
    wanted = load_recorded("tiny")[:3]
    found = run_case(tmp_path, path, wanted, ranks, weights="q8_0")
    twin, exact = RoundedInputs(case.config, tensors), NaiveLlama(case.config, tensors)
    for i, prompt in enumerate(wanted):
        logits = found.logits(f"p{i}")[:len(prompt.prompt)]
        rows = [relative_error(*pair) for pair in zip(logits, twin.logits(prompt.prompt), strict=True)]
        assert np.median(rows) < 1e-5 and max(rows) < 0.05, sorted(rows)
        assert 1e-3 < relative_error(logits, exact.logits(prompt.prompt)) < 0.05


def test_the_recipe_is_not_flat():
    """A model whose layers add nothing would pass any comparison: each of them has to matter."""
    case, prompt = BY_NAME["tiny"], load_recorded("tiny")[2].prompt
    tensors = {name: values(case, name, shape) for name, shape in shapes(case.config).items()}
    whole = NaiveLlama(case.config, tensors).logits(prompt)
    for name in tensors:
        if "proj" in name:
            without = NaiveLlama(case.config, tensors | {name: np.zeros_like(tensors[name])}).logits(prompt)
            assert relative_error(without, whole) > 0.05, name
