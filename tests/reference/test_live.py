"""Fresh random checkpoints, computed by transformers now: needs torch (``make test-reference``).

The seed is printed; ``MPILLM_LIVE_SEED`` repeats a run.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from case_list import BY_NAME  # noqa: E402
from cases import DECODE, VOCAB, Case, hashed, write_folder  # noqa: E402
from comparing import check, run_case, same_bits  # noqa: E402
from make_checkpoints import MARGIN, load_model, record, run  # noqa: E402
from recorded import Recorded  # noqa: E402

SEED = int(os.environ.get("MPILLM_LIVE_SEED") or random.randrange(10**9))
CASES = [("tiny", 3), ("ratio1", 9), ("ratio4", 5), ("ratio7", 4), ("wide_head", 2), ("norms_bias", 8), ("biases", 9),
         ("linear", 1), ("dynamic", 2), ("yarn5", 3), ("llama3", 1), ("window", 4), ("window_late", 2), ("equal13", 13),
         ("experts", 2), ("experts_normed", 6), ("experts_dense", 4)]


@pytest.fixture(autouse=True)
def say_the_seed():
    print(f"MPILLM_LIVE_SEED={SEED}")


def expected(case: Case, folder) -> list[Recorded]:
    found = record(case, folder)
    return [Recorded(found[f"prompt_{i}"].tolist(), found[f"ids_{i}"].tolist(), found[f"logits_{i}"])
            for i in range(len(case.lengths))]


@pytest.mark.parametrize("name, ranks", CASES, ids=lambda value: str(value))
def test_fresh_weights_and_prompts(name, ranks, tmp_path):
    case = replace(BY_NAME[name], name=f"{name}-{SEED}")   # weights and prompts are hashes of the name
    folder = write_folder(case, tmp_path / "model")
    prompts = expected(case, folder)
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
    """Nothing of ours in between: transformers draws the weights, writes the folder, and computes."""
    torch.manual_seed(SEED)
    torch.set_grad_enabled(False)
    experts = {"Mixtral": {"num_local_experts": 6}, "Qwen3Moe": {
        "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, head_dim=16, initializer_range=0.2,
        attn_implementation="eager", bos_token_id=1, eos_token_id=2, pad_token_id=None,
        **experts.get(kind, {}))
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
    check(run_case(tmp_path, tmp_path / "model", prompts, ranks), prompts)
