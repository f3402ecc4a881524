"""The slow twin against everything that transformers recorded, and the recipe against its checksums."""

from __future__ import annotations

import json

import numpy as np
import pytest
from case_list import BY_NAME, CASES
from cases import DECODE, checksum, write_folder
from make_checkpoints import DATA, SAVED
from naive_llama import NaiveLlama
from recorded import load_recorded, relative_error

TOLERANCE = 5e-6   # float64 here against float32 there


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_are_the_recorded_ones(case):
    recorded = json.loads((DATA / "recorded.json").read_text())
    assert checksum(case) == recorded[case.name]["weights_sha256"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_twin_gives_the_recorded_logits(case, tmp_path):
    model = NaiveLlama.from_folder(write_folder(case, tmp_path))
    for prompt in load_recorded(case.name):
        sequence = [*prompt.prompt, *prompt.ids[:-1]]
        ours = model.logits(sequence, len(prompt.prompt))
        assert relative_error(ours, prompt.logits) < TOLERANCE
        assert ours[len(prompt.prompt) - 1:].argmax(axis=1).tolist() == prompt.ids
        assert len(prompt.ids) == DECODE


@pytest.mark.parametrize("name", SAVED)
def test_folders_that_transformers_saved_are_the_recipe(name, tmp_path):
    recipe = NaiveLlama.from_folder(write_folder(BY_NAME[name], tmp_path))
    saved = NaiveLlama.from_folder(DATA / f"saved_{name}")
    assert saved.w.keys() == recipe.w.keys()
    assert all(np.array_equal(saved.w[key], recipe.w[key]) for key in recipe.w)
    prompt = load_recorded(name)[1]
    assert np.array_equal(saved.logits(prompt.prompt), recipe.logits(prompt.prompt))


def test_dynamic_scaling_reaches_beyond_the_original_length(tmp_path):
    """The case would not test anything if its sequences stayed below the length where the scaling begins."""
    limit = BY_NAME["dynamic"].config["max_position_embeddings"]
    long = load_recorded("dynamic")[-1]
    model = NaiveLlama.from_folder(write_folder(BY_NAME["dynamic"], tmp_path))
    assert len(long.prompt) > limit
    plain = NaiveLlama(model.config | {"rope_scaling": None}, model.w)
    assert relative_error(plain.logits(long.prompt), long.logits[:len(long.prompt)]) > 1e-2
