"""Latent attention behind the scheduler: in every mode what runs beside a prompt or preempts it changes no bit."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import made_deepseek as made
import numpy as np
import pytest
from made_models import write_folder
from test_batches import SMALL, run, workload
from test_setup import _Alone, asked

from mpillm.engine import setup
from mpillm.engine.request import Request, Sampling
from mpillm.models import registry
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import partition

CONFIG = {**made.V3, "num_hidden_layers": 2, "vocab_size": 307, "kv_lora_rank": 96, "qk_rope_head_dim": 32,
          "num_attention_heads": 4}
GREEDY = Sampling(temperature=0.0, ignore_eos=True, max_tokens=100, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tensors = {name: x / np.sqrt(x.shape[-1]).astype(np.float32) if x.ndim > 1 else x * np.float32(0.2) + 1
               for name, x in made.tensors(CONFIG).items()}
    return write_folder(tmp_path_factory.mktemp("latent"), CONFIG, tensors)


def build(folder, mla, weights="bf16"):
    settings = asked(weights=weights, mla=str(mla))
    opened, checkpoint = open_model(folder)
    settings, model = setup.decided(settings, opened)
    with contextlib.closing(checkpoint):
        tensors = Weights(checkpoint, model)
        split = partition(registry.sizes(model, tensors, weights), 1)
        loaded = setup.load_model(settings, model, tensors, SimpleNamespace(partition=split), 0, _Alone(), None)
    return model, loaded.model


@pytest.mark.parametrize("mla", [0, 1, 2, 3])
def test_tokens_and_logprobs_depend_on_the_prompt_alone(folder, mla):
    built = build(folder, mla)
    alone, scheduler = run(built, "bf16", workload(), max_batch=1, share=False)
    assert not scheduler.preempted
    together, scheduler = run(built, "bf16", workload(), chunk=50)
    assert together.results == alone.results and scheduler.shared_positions
    crowded, scheduler = run(built, "bf16", workload()[::-1], SMALL, max_batch=6, chunk=50)
    assert scheduler.preempted and scheduler.recomputed_positions
    assert crowded.results == alone.results


@pytest.mark.parametrize("mla", [2, 3])
def test_a_prompt_of_what_another_generated(folder, mla):
    """In mode 3 its rows attend in another way than the same tokens did when they were generated."""
    built = build(folder, mla)
    first = Request(1, 0, "0", "completion", True, (list(range(5, 25)),), GREEDY, "m")
    made_by_first = run(built, "bf16", [first])[0].results[0][0][0][0]
    other = Request(2, 1, "1", "completion", True, (list(range(5, 25)) + made_by_first[:80],),
                    dataclasses.replace(GREEDY, max_tokens=4), "m")
    between = Request(3, 2, "2", "completion", True, ([9],), dataclasses.replace(GREEDY, max_tokens=60), "m")
    alone = run(built, "bf16", [other], share=False)[0].results[1]
    # The other one starts where the one between ends, while the first still holds its blocks
    together, scheduler = run(built, "bf16", [first, between, other], max_batch=2)
    assert together.results[1] == alone and together.results[0][0][0][0] == made_by_first
    assert scheduler.shared_positions == (64 if mla == 2 else 0)
