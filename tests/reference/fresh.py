"""Checkpoints drawn anew in each run, and what transformers makes of them now: needs torch.

``MPILLM_LIVE_SEED`` repeats a run; it is printed by ``say_the_seed``.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cases import DECODE, VOCAB, Case, hashed, write_folder  # noqa: E402
from make_checkpoints import MARGIN, load_model, record, run  # noqa: E402
from recorded import Recorded  # noqa: E402

SEED = int(os.environ.get("MPILLM_LIVE_SEED") or random.randrange(10**9))
#: figures of small models that transformers draws by itself
SMALL = {"vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
         "num_attention_heads": 6, "max_position_embeddings": 512, "initializer_range": 0.2,
         "attn_implementation": "eager", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}


def say_the_seed() -> None:
    print(f"MPILLM_LIVE_SEED={SEED}")


def drawn(case: Case, folder: Path, lengths: Sequence[int] = ()) -> list[Recorded]:
    """A folder of the case's figures with weights of this run's seed, and what comes of prompts of the ``lengths``.

    Weights and prompts are hashes of the case's name, which gets the seed.
    """
    case = replace(case, name=f"{case.name}-{SEED}", lengths=tuple(lengths) or case.lengths)
    found = record(case, write_folder(case, folder))
    return [Recorded(found[f"prompt_{i}"].tolist(), found[f"ids_{i}"].tolist(), found[f"logits_{i}"])
            for i in range(len(case.lengths))]


def initialised(kind: str, folder: Path, **figures) -> list[Recorded]:
    """Nothing of ours in between: transformers draws a ``kind``'s weights, writes the folder, and computes."""
    torch.manual_seed(SEED)
    torch.set_grad_enabled(False)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **figures})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.copy_(torch.rand_like(parameter) + (0.5 if "norm" in name else -0.5))
    model.save_pretrained(folder, max_shard_size="300KB")
    prompts = []
    for length in (1, 9, 70):
        for salt in range(50):
            ids = [int(h % VOCAB) for h in hashed(f"{SEED}/{kind}/{length}/{salt}", length)]
            greedy, logits, lead = run(load_model(folder), ids, DECODE)
            if lead > MARGIN:
                prompts.append(Recorded(ids, greedy, logits))
                break
    assert len(prompts) == 3
    return prompts
