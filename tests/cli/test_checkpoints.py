"""Checkpoints that are right but unusual: heads tied or not, types mixed, data at odd addresses, float16's ceiling."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from case_list import BY_NAME
from cases import encode, encoded, read_safetensors, write_folder, write_safetensors
from comparing import check, lines_of, run_case, same_bits
from naive_llama import NaiveLlama
from program import EXACT, launch, write_lines
from recorded import Recorded, load_recorded

TINY = BY_NAME["tiny"]
NAMES = ["p0", "p1", "p2"]


def folder_with(folder, config: dict, change=None):
    """The tiny model with other entries in config.json, and its tensors changed."""
    path = write_folder(replace(TINY, config=TINY.config | config), folder)
    tensors = encoded(TINY)
    write_safetensors(path / "model.safetensors", change(tensors) if change else tensors)
    return path


def without_head(tensors):
    return {name: value for name, value in tensors.items() if name != "lm_head.weight"}


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(9, marks=pytest.mark.slow)])
def test_tied_is_the_embedding(ranks, tmp_path):
    """The head that is not in the file, cut by vocabulary."""
    tied = folder_with(tmp_path / "tied", {"tie_word_embeddings": True}, without_head)
    twin = NaiveLlama.from_folder(tied)
    wanted = [Recorded(prompt.prompt, *twin.greedy(prompt.prompt, 3)) for prompt in load_recorded("tiny")[:3]]
    check(run_case(tmp_path, tied, wanted, ranks, name="tied"), wanted)


def test_another_head_beside_the_embedding_wins_over_tied(tmp_path):
    """As transformers 5 does, which ties only where the file has no head or the same."""
    both = folder_with(tmp_path / "both", {"tie_word_embeddings": True})
    check(run_case(tmp_path, both, load_recorded("tiny"), 3), load_recorded("tiny"))


def test_untied_without_a_head_may_be_tied_by_option(tmp_path):
    prompts = load_recorded("tiny")[:3]
    untied = folder_with(tmp_path / "untied", {}, without_head)
    tied = folder_with(tmp_path / "tied", {"tie_word_embeddings": True}, without_head)
    same_bits(run_case(tmp_path, untied, prompts, 2, "redundant", "--tie-embeddings", name="forced"),
              run_case(tmp_path, tied, prompts, 2, name="tied"), NAMES)


@pytest.mark.parametrize("name", ["tiny", "ratio1"])
def test_floats_at_odd_addresses_and_types_mixed(name, tmp_path):
    """A header of odd length and a three-byte tensor before the others; norms in float32, o_proj in float16."""
    case = BY_NAME[name]
    folder = write_folder(case, tmp_path / "model")
    write_safetensors(folder / "model.safetensors", {"odd": ("U8", (3,), b"abc")} | encoded(case), pad=3)
    check(run_case(tmp_path, folder, load_recorded(name), 2), load_recorded(name))


def test_null_is_absent_and_the_stated_width_counts(tmp_path):
    prompts = load_recorded("tiny")[:3]
    nulls = folder_with(tmp_path / "nulls", {"head_dim": None, "rope_scaling": None, "sliding_window": None})
    check(run_case(tmp_path, nulls, prompts, 2), prompts)


def scaled(name: str, factor: float, dtype: str = "BF16"):
    """A change that makes one kind of matrix larger by a power of two."""
    def change(tensors):
        out = {}
        for key, (kind, shape, data) in tensors.items():
            if name in key:
                values = np.frombuffer(data, np.float32) * np.float32(factor)
                bits = values.view(np.uint32) & np.uint32(0xFFFF0000)
                data, kind = encode(bits.view(np.float32), dtype), dtype
            out[key] = (kind, shape, data)
        return out
    return change


def launch_in(folder, model, prompts, *options):
    """Two ranks; however the run ends."""
    lines = write_lines(folder / "in.jsonl", lines_of(prompts))
    return launch(2, ["--model", model, "--prompts", lines, "--output", folder / "o.h5", "--results",
                      folder / "o.jsonl", *EXACT, *options])


def test_weights_beyond_float16_stay_finite(tmp_path):
    """down_proj in bfloat16, far beyond 65,504: kept wider, or a stop that says how many values are too large."""
    folder = folder_with(tmp_path / "model", {}, scaled("down_proj", 2.0 ** 20))
    assert max(np.abs(x).max() for x in read_safetensors(folder).values()) > 65504
    prompts = load_recorded("tiny")[:3]
    ended = launch_in(tmp_path, folder, prompts, "--weights", "f16")
    if ended.code == 0:
        wide = run_case(tmp_path, folder, prompts, 2, name="wide")
        half = run_case(tmp_path, folder, prompts, 2, weights="f16", name="half")
        for name in NAMES:
            assert np.isfinite(half.logits(name)).all() and half.ids(name) == wide.ids(name)
            assert "down_proj" in ended.stderr + ended.stdout, "it is said that the tensor stays wider"
    else:
        assert ended.code == 3 and "down_proj" in "".join(ended.errors), ended.stderr
        assert any(word.isdigit() for word in "".join(ended.errors).split()), "it is said how many values"


def test_keys_and_values_beyond_float16_are_never_infinite_in_silence(tmp_path):
    folder = folder_with(tmp_path / "model", {}, scaled("v_proj", 2.0 ** 20, "F32"))
    prompts = load_recorded("tiny")[:3]
    ended = launch_in(tmp_path, folder, prompts, "--kv-type", "f16")
    assert ended.code == 0 and "Traceback" not in ended.stderr, ended.stderr
    for line in map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines()):
        assert line["response"]["status_code"] == 500 and "--kv-type" in line["error"]["message"], line
    wide = run_case(tmp_path, folder, prompts, 2, "redundant", "--kv-type", "bf16", name="bf16")
    assert all(np.isfinite(wide.logits(name)).all() for name in NAMES)
