"""The weight formats in memory: exact where the file's values are exact in them, close where they are not."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.mark.parametrize("ranks", [1, 3])
def test_q8_0_is_close_to_its_dequantised_weights(ranks, tmp_path):
    """Activations are rounded to eight bits too, so this is no equality: within 2 % of the largest logit."""
    case = replace(BY_NAME["tiny"], lengths=(6, 30))
    folder, path = write_folder(case, tmp_path / "folder"), tmp_path / "model.gguf"
    tensors = write_gguf(case.config, read_safetensors(folder), path, "Q8_0")
    wanted = load_recorded("tiny")[:3]
    found = run_case(tmp_path, path, wanted, ranks, weights="q8_0")
    exact = NaiveLlama(case.config, tensors)
    for i, prompt in enumerate(wanted):
        logits = found.logits(f"p{i}")[:len(prompt.prompt)]
        error = relative_error(logits, exact.logits(prompt.prompt))
        assert error < 0.02, error


def test_the_recipe_is_not_flat():
    """A model whose layers add nothing would pass any comparison: each of them has to matter."""
    case, prompt = BY_NAME["tiny"], load_recorded("tiny")[2].prompt
    tensors = {name: values(case, name, shape) for name, shape in shapes(case.config).items()}
    whole = NaiveLlama(case.config, tensors).logits(prompt)
    for name in tensors:
        if "proj" in name:
            without = NaiveLlama(case.config, tensors | {name: np.zeros_like(tensors[name])}).logits(prompt)
            assert relative_error(without, whole) > 0.05, name
