"""DeepSeek-V2 and V3 on fresh random checkpoints, computed by transformers now: needs torch (``make test-reference``).

The seed is printed; ``MPILLM_LIVE_SEED`` repeats a run.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from case_list import LATENT_CASES  # noqa: E402
from cases import DECODE, VOCAB, Case, hashed, write_folder  # noqa: E402
from comparing import check, run_case, same_bits  # noqa: E402
from make_checkpoints import MARGIN, load_model, record, run  # noqa: E402
from recorded import Recorded  # noqa: E402

SEED = int(os.environ.get("MPILLM_LIVE_SEED") or random.randrange(10**9))
TOLERANCE, MODES, CUT = 5e-5, ("redundant", "allgather"), (1, 2)      # CUT: --mla whose cache may be dealt out
MLA, RANKS = (0, 1, 2, 3), (1, 2, 3, 4, 6)


@pytest.fixture(autouse=True)
def say_the_seed():
    print(f"MPILLM_LIVE_SEED={SEED}")


@pytest.fixture(scope="module")
def fresh(request, tmp_path_factory):
    """A folder of the case's figures with weights of this run's seed, and what transformers makes of it."""
    case: Case = replace(request.param, name=f"{request.param.name}-{SEED}", lengths=(1, 17, 140))
    folder = write_folder(case, tmp_path_factory.mktemp(request.param.name) / "model")
    found = record(case, folder)
    return folder, [Recorded(found[f"prompt_{i}"].tolist(), found[f"ids_{i}"].tolist(), found[f"logits_{i}"])
                    for i in range(len(case.lengths))]


def runs() -> list:
    """Every case, mode and rank count: each pair of the three here, the whole product in ``make test-all``."""
    found = []
    for c, case in enumerate(LATENT_CASES):
        for r, ranks in enumerate(RANKS):
            for mla in MLA:
                marks = () if (c + r) % len(MLA) == mla else pytest.mark.slow
                found.append(pytest.param(case, ranks, mla, marks=marks, id=f"{case.name}-{ranks}-{mla}"))
    return found


@pytest.mark.parametrize("fresh, ranks, mla", runs(), indirect=["fresh"])
def test_every_mode_at_every_split(fresh, mla, ranks, tmp_path):
    folder, prompts = fresh
    runs = [run_case(tmp_path, folder, prompts, ranks, mode, "--mla", mla) for mode in MODES[:1 + (ranks > 1)]]
    cut = [run_case(tmp_path, folder, prompts, ranks, "sharded", "--mla", mla)] if ranks > 1 and mla in CUT else []
    for outputs in runs + cut:
        check(outputs, prompts, TOLERANCE)
    if len(runs) == 2:
        same_bits(*runs, [f"p{i}" for i in range(len(prompts))])


@pytest.mark.parametrize("kind, ranks, mla", [("DeepseekV2", 2, "auto"), ("DeepseekV3", 3, "2")])
def test_models_that_transformers_initialised_and_saved(kind, ranks, mla, tmp_path):
    """Nothing of ours in between: transformers draws the weights, writes the folder, and computes."""
    torch.manual_seed(SEED)
    torch.set_grad_enabled(False)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=96, intermediate_size=160, moe_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=512, initializer_range=0.2,
        q_lora_rank=48, kv_lora_rank=40, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8,
        n_shared_experts=1, num_experts_per_tok=3, n_group=2, topk_group=1, first_k_dense_replace=1,
        attn_implementation="eager", bos_token_id=1, eos_token_id=2, pad_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.copy_(torch.rand_like(parameter) + (0.5 if "norm" in name else -0.5))
    model.save_pretrained(tmp_path / "model", max_shard_size="300KB")
    prompts = []
    for length in (1, 9, 70):
        for salt in range(50):
            ids = [int(h % VOCAB) for h in hashed(f"{SEED}/{kind}/{length}/{salt}", length)]
            greedy, logits, lead = run(load_model(tmp_path / "model"), ids, DECODE)
            if lead > MARGIN:
                prompts.append(Recorded(ids, greedy, logits))
                break
    assert len(prompts) == 3
    check(run_case(tmp_path, tmp_path / "model", prompts, ranks, "allgather", "--mla", mla), prompts, TOLERANCE)
