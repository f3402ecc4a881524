"""A real model behind the scheduler: what runs beside a prompt, preempts it or shares its beginning changes no bit."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
from made_models import random_tensors, tiny, write_folder
from test_setup import _Alone, asked

from mpillm import kernels
from mpillm.engine import kvcache, setup
from mpillm.engine.blocks import BlockLedger, blocks_for
from mpillm.engine.generate import BatchLoop, Ends
from mpillm.engine.request import Request, Sampling
from mpillm.engine.sampling import Sampler
from mpillm.engine.scheduler import Limits, Scheduler
from mpillm.models import registry
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import Share, Span, partition

CONTEXT = 512
SMALL = 5            # blocks: the longest sequence of the workload just fits
SYSTEM = [(11 * i) % 300 + 3 for i in range(130)]


class _OneRank:
    is_root = True

    def gather(self, array):
        return [array]

    def bcast(self, array):
        pass


@dataclasses.dataclass
class Kept:
    """Takes results, as bits, and logits by (line, choice, position)."""

    results: dict = dataclasses.field(default_factory=dict)
    rows: dict = dataclasses.field(default_factory=dict)

    def result(self, result):
        choices = [(c.token_ids, np.array(c.logprobs).tobytes(), c.top) for c in result.choices]
        self.results[result.request.index] = choices, result.prompt_logprobs
        for choice, t in zip(result.choices, result.timings, strict=True):
            assert not choice.token_ids or t.queue_s + t.prefill_s == pytest.approx(t.first_token_s), \
                "a prefill ends with the first token, whatever is recomputed later"

    def failed(self, request, message, code, status):
        raise AssertionError(message)

    def logits(self, keys, logits):
        for key, row in zip(map(tuple, keys.tolist()), logits, strict=True):
            assert key not in self.rows, f"the logits of {key} are handed out twice"
            self.rows[key] = row.tobytes()

    def step(self, record):
        pass

    def progress(self, prefilled, generated, finished):
        pass


def workload():
    """Lines with and without a common beginning, of all kinds of sampling."""
    greedy = Sampling(temperature=0.0, ignore_eos=True)
    drawn = Sampling(temperature=0.9, seed=5, ignore_eos=True, logprobs=2)
    lines = [
        (SYSTEM + [5, 6, 7], dataclasses.replace(greedy, max_tokens=60)),
        (SYSTEM + [8], dataclasses.replace(drawn, max_tokens=70, n=3)),
        (SYSTEM[:128], dataclasses.replace(drawn, max_tokens=50, top_p=0.9, presence_penalty=0.5)),
        (SYSTEM + [9] * 70, dataclasses.replace(drawn, max_tokens=90, repetition_penalty=1.2)),
        (SYSTEM + [5, 6, 7, 8], dataclasses.replace(greedy, max_tokens=0, prompt_logprobs=1)),
        (list(range(20, 60)), dataclasses.replace(drawn, max_tokens=150, prompt_logprobs=2)),
        ([4], dataclasses.replace(greedy, max_tokens=150, logprobs=0)),
        (SYSTEM[:66], dataclasses.replace(drawn, max_tokens=10, min_p=0.1)),
    ]
    return [Request(i + 1, i, str(i), "completion", True, (ids,), sampling, "m")
            for i, (ids, sampling) in enumerate(lines)]


def build(folder, weights, **changes):
    config = tiny(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32, **changes)
    tensors = {name: tensor / 8 for name, tensor in random_tensors(config).items()}
    model, checkpoint = open_model(write_folder(folder / "model", config, tensors))
    with contextlib.closing(checkpoint):
        opened = Weights(checkpoint, model)
        split = partition(registry.sizes(model, opened, weights), 1)
        loaded = setup.load_model(asked(weights=weights), model, opened, SimpleNamespace(partition=split), 0, _Alone(),
                                  None)
    return model, loaded.model


def run(built, kv_type, requests, n_blocks=200, *, max_batch=32, chunk=256, share=True, keep_logits="none"):
    """What was handed out, and the scheduler behind it."""
    config, model = built
    scheduler = Scheduler(BlockLedger(n_blocks), Limits(max_batch, chunk, kernels.BLOCK),
                          context_blocks=blocks_for(CONTEXT, kernels.BLOCK), share=share)
    whole = Share(0, 0, 0, Span(0, config.n_heads), Span(0, config.n_kv_heads), *[Span(0, 0)] * 3)
    cache = kvcache.share_cache(asked(kv_type=kv_type), config, whole, n_blocks)
    kept, ends = Kept(), Ends(frozenset(), CONTEXT)
    loop = BatchLoop(model, cache, scheduler, Sampler(_OneRank(), 0, config.vocab),
                     SimpleNamespace(seconds=0.0, waited=0.0), kept, ends, keep_logits=keep_logits,
                     text_stream=lambda sequence: None, replica=0, clock_start=time.perf_counter(), run_seed=1)
    loop.admit(requests)
    assert loop.run() == 0
    assert len(kept.results) == len(requests)
    return kept, scheduler


def shuffled():
    requests = workload()
    random.Random(3).shuffle(requests)
    return requests


@pytest.mark.parametrize("weights, kv_type", [("f32", "f32"), ("bf16", "bf16"), ("q8_0", "q8_0")])
def test_tokens_and_logprobs_depend_on_the_prompt_alone(tmp_path, weights, kv_type):
    built = build(tmp_path, weights)
    alone, scheduler = run(built, kv_type, workload(), max_batch=1, share=False)
    assert not scheduler.preempted and not scheduler.shared_positions
    assert [len(c[0]) for choices, _ in map(alone.results.get, range(8)) for c in choices] == [
        60, 70, 70, 70, 50, 90, 0, 150, 150, 10]
    assert len({tuple(c[0]) for c in alone.results[1][0]}) == 3, "samples differ, else they tell nothing"

    together, scheduler = run(built, kv_type, workload(), share=False)
    assert together.results == alone.results and not scheduler.preempted
    sharing, scheduler = run(built, kv_type, workload())
    assert sharing.results == alone.results
    # Of lines 0 to 3 and 7 one computes the beginning; line 4 wants all its prompt's rows
    assert scheduler.shared_positions == 128 * 4 + 64 * 2
    in_another_order, scheduler = run(built, kv_type, shuffled(), max_batch=5, chunk=37)
    assert in_another_order.results == alone.results and scheduler.shared_positions
    for share in (False, True):
        crowded, scheduler = run(built, kv_type, workload()[::-1], SMALL, max_batch=6, chunk=50, share=share)
        assert scheduler.preempted and scheduler.recomputed_positions
        assert crowded.results == alone.results
        assert bool(scheduler.shared_positions) is share


@pytest.mark.parametrize("keep_logits", ["all", "generated", "last"])
def test_logits_are_handed_out_once_whatever_was_recomputed(tmp_path, keep_logits):
    built = build(tmp_path, "f32")
    alone, _ = run(built, "f32", workload(), max_batch=1, share=False, keep_logits=keep_logits)
    crowded, scheduler = run(built, "f32", workload()[::-1], SMALL, max_batch=6, keep_logits=keep_logits)
    assert scheduler.preempted and scheduler.recomputed_positions
    assert crowded.rows == alone.rows and crowded.results == alone.results
    all_rows = sum(r.sampling.n * (len(r.prompts[0]) + max(r.sampling.max_tokens - 1, 0)) for r in workload())
    assert len(alone.rows) == {"all": all_rows, "generated": 720, "last": 10}[keep_logits]


def test_a_recomputed_row_may_be_alone_in_its_step(tmp_path):
    """A chunk of one token: steps of one row of a generated token that is not the last."""
    built = build(tmp_path, "f32")
    drawn = Sampling(temperature=0.9, seed=5, ignore_eos=True, max_tokens=130)
    requests = [Request(i + 1, i, str(i), "completion", True, ([4 + i],), drawn, "m") for i in range(2)]
    alone, _ = run(built, "f32", requests, max_batch=1, share=False)
    crowded, scheduler = run(built, "f32", requests, 4, chunk=1, share=False)
    assert crowded.results == alone.results and scheduler.recomputed_positions > 100


def test_prompts_that_stretch_the_rope_differently_share_nothing(tmp_path):
    """Beyond the model's own 100 positions, dynamic scaling turns all keys by the prompt's length."""
    built = build(tmp_path, "f32", max_position_embeddings=100, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    greedy = Sampling(temperature=0.0, ignore_eos=True, max_tokens=8, logprobs=0)
    tails = [[5], [5, 6], [7], [8, 9]]
    requests = [Request(i + 1, i, str(i), "completion", True, (SYSTEM + tail,), greedy, "m")
                for i, tail in enumerate(tails)]
    alone, _ = run(built, "f32", requests, max_batch=1, share=False)
    sharing, scheduler = run(built, "f32", requests)
    assert sharing.results == alone.results
    assert scheduler.shared_positions == 2 * 128, "once among each length"
