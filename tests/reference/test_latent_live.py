"""DeepSeek-V2 and V3 on fresh random checkpoints, computed by transformers now: needs torch (``make test-reference``).

The seed is printed; ``MPILLM_LIVE_SEED`` repeats a run.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import fresh  # noqa: E402
from case_list import LATENT_CASES  # noqa: E402
from comparing import check, run_case, same_bits  # noqa: E402

TOLERANCE, MODES, CUT = 5e-5, ("redundant", "allgather"), (1, 2)      # CUT: --mla whose cache may be dealt out
MLA, RANKS = (0, 1, 2, 3), (1, 2, 3, 4, 6)


@pytest.fixture(autouse=True)
def say_the_seed():
    fresh.say_the_seed()


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """A folder of the case's figures with weights of this run's seed, and what transformers makes of it."""
    folder = tmp_path_factory.mktemp(request.param.name) / "model"
    return folder, fresh.drawn(request.param, folder, (1, 17, 140))


def runs() -> list:
    """Every case, mode and rank count: each pair of the three here, the whole product in ``make test-all``."""
    found = []
    for c, case in enumerate(LATENT_CASES):
        for r, ranks in enumerate(RANKS):
            for mla in MLA:
                marks = () if (c + r) % len(MLA) == mla else pytest.mark.slow
                found.append(pytest.param(case, ranks, mla, marks=marks, id=f"{case.name}-{ranks}-{mla}"))
    return found


@pytest.mark.parametrize("model, ranks, mla", runs(), indirect=["model"])
def test_every_mode_at_every_split(model, mla, ranks, tmp_path):
    folder, prompts = model
    runs = [run_case(tmp_path, folder, prompts, ranks, mode, "--mla", mla) for mode in MODES[:1 + (ranks > 1)]]
    cut = [run_case(tmp_path, folder, prompts, ranks, "sharded", "--mla", mla)] if ranks > 1 and mla in CUT else []
    for outputs in runs + cut:
        check(outputs, prompts, TOLERANCE)
    if len(runs) == 2:
        same_bits(*runs, [f"p{i}" for i in range(len(prompts))])


@pytest.mark.parametrize("kind, ranks, mla", [("DeepseekV2", 2, "auto"), ("DeepseekV3", 3, "2")])
def test_models_that_transformers_initialised_and_saved(kind, ranks, mla, tmp_path):
    prompts = fresh.initialised(
        kind, tmp_path / "model", moe_intermediate_size=48, num_key_value_heads=6, q_lora_rank=48, kv_lora_rank=40,
        qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=3, n_group=2, topk_group=1, first_k_dense_replace=1)
    check(run_case(tmp_path, tmp_path / "model", prompts, ranks, "allgather", "--mla", mla), prompts, TOLERANCE)
