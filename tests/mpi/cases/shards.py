"""A cache sharded by positions at one rank count: `mpirun -n N python shards.py HEADS KV_HEADS KV_TYPE...`.

KV_HEADS latent1 or latent2: of a DeepSeek, in this mode of --mla.

Logits are those of the redundant mode within rounding, and in themselves the same bits whatever runs beside a prompt,
however it is cut, preempted and shared. A failed assert aborts the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "unit"))

import made_deepseek
from made_models import random_tensors, tiny, write_folder
from test_batches import Kept

from mpillm import collectives, kernels, main
from mpillm.config import RunConfig
from mpillm.engine import setup
from mpillm.engine.generate import BatchLoop, Ends
from mpillm.engine.request import Request, Sampling
from mpillm.engine.sampling import Sampler
from mpillm.models import registry
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import partition

CONTEXT = 512
LATENT = {"latent1": "1", "latent2": "2"}      # --mla
SYSTEM = [(11 * i) % 300 + 3 for i in range(130)]
#: largest difference of logits, over the largest logit: sums in another order, and the roundings that they flip
BOUNDS = {"f32": 2e-6, "f16": 2e-4, "bf16": 2e-3, "q8_0": 4e-3}


def workload() -> list[Request]:
    """Lines with and without a common beginning, shorter and longer than a block, several samples of one."""
    greedy = Sampling(temperature=0.0, ignore_eos=True)
    drawn = Sampling(temperature=0.9, seed=5, ignore_eos=True, logprobs=2)
    lines = [
        (SYSTEM + [5, 6, 7], dataclasses.replace(greedy, max_tokens=12)),
        (SYSTEM + [8], dataclasses.replace(drawn, max_tokens=9, n=3)),
        (SYSTEM[:126], dataclasses.replace(drawn, max_tokens=7, repetition_penalty=1.2)),
        (SYSTEM + [9] * 200, dataclasses.replace(greedy, max_tokens=0, prompt_logprobs=1)),
        (list(range(20, 80)), dataclasses.replace(drawn, max_tokens=72)),
        (list(range(40, 102)), dataclasses.replace(greedy, max_tokens=70, logprobs=0, n=4)),
    ]
    return [Request(i + 1, i, str(i), "completion", True, (ids,), sampling, "m")
            for i, (ids, sampling) in enumerate(lines)]


def write_model(folder: Path, heads: int, kind: str) -> None:
    """A model whose values do not grow from layer to layer: Qwen3 with ``kind`` KV heads, or a DeepSeek.

    That has no experts: their choice makes of a rounding another result.
    """
    if kind in LATENT:
        config = {**made_deepseek.V3, "num_hidden_layers": 2, "first_k_dense_replace": 2, "vocab_size": 307,
                  "num_attention_heads": heads, "num_key_value_heads": heads, "kv_lora_rank": 64,
                  "qk_rope_head_dim": 32, "v_head_dim": 24}
        write_folder(folder, config, {name: x / np.sqrt(x.shape[-1]).astype(np.float32) if x.ndim > 1 else x / 5 + 1
                                      for name, x in made_deepseek.tensors(config).items()})
        return
    config = tiny(hidden_size=128, num_attention_heads=heads, num_key_value_heads=int(kind), head_dim=32,
                  model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    write_folder(folder, config, {k: v / 8 for k, v in random_tensors(config).items()})


def load(world, folder: str, mode: str, kv_type: str, mla: str, shared: bool = True):
    """The replica of all ranks, the split and this rank's model."""
    config, checkpoint = open_model(folder)
    run, config = setup.decided(RunConfig("", weights="f32", kv_mode=mode, kv_type=kv_type, mla=mla), config)
    with contextlib.closing(checkpoint):
        weights = Weights(checkpoint, config)
        split = SimpleNamespace(partition=partition(registry.sizes(config, weights, "f32"), world.size, mode))
        replica = world.split(world.size, 1, shared=shared)
        model = setup.load_model(run, config, weights, split, replica.rank, replica, replica.row(split.partition))
    return SimpleNamespace(run=run, config=config, split=split, replica=replica, model=model.model)


def generate(own, requests, n_blocks=100, keep="generated", **changes):
    """What was handed out, and the scheduler behind it. Where all logits are kept no prefix is shared."""
    run, shares = dataclasses.replace(own.run, **changes), own.split.partition.shares
    share = shares[own.replica.rank]
    scheduler = setup.make_scheduler(run, own.split, own.replica.rank, n_blocks, CONTEXT)
    cache = setup.make_cache(run, own.config, own.split, own.replica.rank, n_blocks)
    held = sum(layer.nbytes for layer in cache)
    assert held == n_blocks * setup.cache_block_bytes(run, own.config, own.split, own.replica.rank)
    kept = Kept()
    sampler = Sampler(own.replica, share.vocab.start, max(other.vocab.size for other in shares))
    loop = BatchLoop(own.model, cache, scheduler, sampler, own.replica, kept, Ends(frozenset(), CONTEXT),
                     keep_logits=keep, text_stream=lambda sequence: None, replica=0,
                     clock_start=time.perf_counter(), run_seed=1)
    loop.admit(requests)
    assert loop.run() == 0
    return kept, scheduler


def alike(one: Kept, other: Kept) -> None:
    """The same tokens and logits, bit for bit, in all that the first one has."""
    assert one.rows and all(result == other.results[index] for index, result in one.results.items())
    assert all(row == other.rows[key] for key, row in one.rows.items())


def close(found: Kept, wanted: Kept, bound: float, exact_tokens: bool) -> float:
    """The largest difference of the logits of prompts, which no choice of a token changes."""
    for index, (choices, _) in found.results.items() if exact_tokens else ():
        assert [c[0] for c in choices] == [c[0] for c in wanted.results[index][0]], "other tokens are chosen"
    worst, largest = 0.0, 1e-9
    lengths = {request.index: len(request.prompts[0]) for request in workload()}
    for key in found.rows:
        if key[2] < lengths[key[0]]:
            mine, its = (np.frombuffer(kept.rows[key], np.float32) for kept in (found, wanted))
            assert np.isfinite(mine).all()
            worst, largest = max(worst, np.abs(mine - its).max(initial=0)), max(largest, np.abs(its).max(initial=0))
    assert worst <= bound * largest, f"{worst / largest} of the largest logit"
    return worst / largest


def check(world, folder: str, kv_type: str, mla: str, whole: bool) -> str:
    wanted, _ = generate(load(world, folder, "redundant", kv_type, mla), workload(), keep="all", prefill_chunk=64)
    own = load(world, folder, "sharded", kv_type, mla)
    found, _ = generate(own, workload(), keep="all", prefill_chunk=64)
    assert wanted.rows.keys() == found.rows.keys()
    worst = max(world.allgather(close(found, wanted, BOUNDS[kv_type], kv_type == "f32")))
    if not whole:
        return f"{worst:.1e}"
    alone, scheduler = generate(own, workload()[:3], max_batch=1, prefill_chunk=512)
    alike(alone, found)
    assert scheduler.shared_positions, "nothing was shared"
    messages, _ = generate(load(world, folder, "sharded", kv_type, mla, shared=False), workload()[:3], prefill_chunk=90)
    alike(messages, found)
    # As small as holds the longest sequence, at the place that has the most of it
    places = own.split.partition.places
    tight, scheduler = generate(own, workload(), -(-6 // places), prefill_chunk=100)
    alike(tight, found)
    assert scheduler.preempted or places > 4, "nothing was preempted"       # over many places less grows into others
    return f"{worst:.1e}"


def run(argv: list[str] | None) -> int:
    heads, kind, *kv_types = argv or []
    world = collectives.start()
    world.place()
    kernels.set_threads(1)
    kernels.prepare_threads(world.crowded)
    for turn in (0, 1):                         # one rank compiles, the others find it in the cache
        if (world.rank > 0) == turn:
            for kv_type in kv_types:
                kernels.warm_up(["f32"], kv_type, mla=int(LATENT[kind]) if kind in LATENT else None)
        world.barrier_quiet()
    with tempfile.TemporaryDirectory() as made:
        folder = world.bcast(made)
        if world.rank == 0:
            write_model(Path(folder) / "model", int(heads), kind)
        world.barrier_quiet()
        found = [check(world, folder + "/model", kv_type, LATENT.get(kind, "auto"), i == 0)
                 for i, kv_type in enumerate(kv_types)]
        world.barrier_quiet()
    if world.rank == 0:
        print("shards are right:", *found)
    return 0


if __name__ == "__main__":
    sys.exit(main.main(sys.argv[1:], run))
