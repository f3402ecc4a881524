"""Fresh random checkpoints, computed by transformers now: needs torch (``make test-reference``).

The seed is printed; ``MPILLM_LIVE_SEED`` repeats a run.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import fresh  # noqa: E402
from case_list import BY_NAME  # noqa: E402
from comparing import check, run_case, same_bits  # noqa: E402

CASES = [("tiny", 3), ("ratio1", 9), ("ratio4", 5), ("ratio7", 4), ("wide_head", 2), ("norms_bias", 8), ("biases", 9),
         ("linear", 1), ("dynamic", 2), ("yarn5", 3), ("llama3", 1), ("window", 4), ("window_late", 2), ("equal13", 13),
         ("experts", 2), ("experts_normed", 6), ("experts_dense", 4)]


@pytest.fixture(autouse=True)
def say_the_seed():
    fresh.say_the_seed()


@pytest.mark.parametrize("name, ranks", CASES, ids=lambda value: str(value))
def test_fresh_weights_and_prompts(name, ranks, tmp_path):
    folder = tmp_path / "model"
    prompts = fresh.drawn(BY_NAME[name], folder)
    redundant = run_case(tmp_path, folder, prompts, ranks, "redundant")
    check(redundant, prompts)
    if ranks in (4, 5):
        allgather = run_case(tmp_path, folder, prompts, ranks, "allgather")
        check(allgather, prompts)
        check(run_case(tmp_path, folder, prompts, ranks, "sharded"), prompts)
        same_bits(redundant, allgather, [f"p{i}" for i in range(len(prompts))])


@pytest.mark.parametrize("kind, ranks", [("Llama", 2), ("Mistral", 3), ("Qwen2", 1), ("Qwen3", 5), ("Mixtral", 4),
                                         ("Qwen3Moe", 3)])
def test_models_that_transformers_initialised_and_saved(kind, ranks, tmp_path):
    experts = {"Mixtral": {"num_local_experts": 6}, "Qwen3Moe": {
        "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}}
    prompts = fresh.initialised(kind, tmp_path / "model", num_key_value_heads=2, head_dim=16, **experts.get(kind, {}))
    check(run_case(tmp_path, tmp_path / "model", prompts, ranks), prompts)
