"""Steps in halves at one rank count, on as many nodes as told: `mpirun -n N python halves.py NODES FORMAT CASE...`.

Logits and tokens are bit for bit those of whole steps, whatever a step has of rows, however the parts of sums travel
and whichever KV mode exchanges beside them; all ranks decide alike what is quicker. A failed assert aborts the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "unit"))

import made_deepseek as made
from made_models import random_tensors, tiny, write_folder
from shards import alike, generate, workload
from test_expert_weights import MIXTRAL, apart

from mpillm import collectives, kernels, main
from mpillm.config import RunConfig
from mpillm.engine import setup
from mpillm.engine.overlap import COUNTED, FIRST, Overlap
from mpillm.machine import launch
from mpillm.models import registry
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import partition

DENSE = tiny(hidden_size=128, num_attention_heads=9, num_key_value_heads=3, head_dim=32, model_type="qwen3",
             architectures=["Qwen3ForCausalLM"])
#: name -> (model, KV mode, --mla, replica's options)
CASES = {
    "redundant": (DENSE, "redundant", "auto", {}),
    "allgather": (DENSE, "allgather", "auto", {}),
    "sharded": (DENSE, "sharded", "auto", {}),
    "bf16": (DENSE, "redundant", "auto", {"wire": "bf16"}),
    "q8_0": (DENSE, "allgather", "auto", {"wire": "q8_0"}),
    "messages": (DENSE, "sharded", "auto", {"shared": False}),
    "mpi": (DENSE, "redundant", "auto", {"mode": "mpi"}),        # of two ranks' parts any order is the same
    "experts": (MIXTRAL, "redundant", "auto", {}),
    "latent0": (made.V3, "allgather", "0", {}),
    "latent2": (made.V2, "allgather", "2", {"wire": "q8_0"}),
    "latent3": (made.V3, "redundant", "3", {}),
    "latents": (made.V3, "sharded", "auto", {}),
}


def folder_of(place: str, config: dict) -> str:
    """A checkpoint whose values do not grow from layer to layer."""
    if config is MIXTRAL:
        tensors = apart(config)
    else:
        tensors = made.tensors(config) if "kv_lora_rank" in config else random_tensors(config)
    return str(write_folder(Path(place), config, {
        name: x / np.sqrt(x.shape[-1]).astype(np.float32) if x.ndim > 1 else x * np.float32(0.2) + 1
        for name, x in tensors.items()}))


def load(world, folder: str, weights: str, case: str):
    """The replica of all ranks, the split and this rank's model."""
    _, mode, mla, options = CASES[case]
    config, checkpoint = open_model(folder)
    run, config = setup.decided(RunConfig("", weights=weights, kv_mode=mode, mla=mla, overlap="off"), config)
    with contextlib.closing(checkpoint):
        opened = Weights(checkpoint, config)
        split = SimpleNamespace(partition=partition(registry.sizes(config, opened, weights), world.size, mode))
        replica = world.split(world.size, 1, **options)
        model = setup.load_model(run, config, opened, split, replica.rank, replica, replica.row(split.partition))
    assert model.model.overlap is None
    return SimpleNamespace(run=run, config=config, split=split, replica=replica, model=model.model)


def check(world, folder: str, weights: str, case: str) -> None:
    own = load(world, folder, weights, case)
    lines = workload() if case == "redundant" else [workload()[i] for i in (0, 1, 4, 5)]
    # As its rows behind prompts are computed in another way than those in them, mode 3 shows every preemption
    lines = [dataclasses.replace(line, prompts=tuple([i % own.config.vocab for i in ids] for ids in line.prompts))
             for line in lines]
    whole, _ = generate(own, lines, keep="all", prefill_chunk=64)
    own.model.overlap = Overlap("on", own.replica, least=2)
    for chunk in (64, 250):
        before = own.replica.courier.worked
        halves, scheduler = generate(own, lines, keep="all", prefill_chunk=chunk)
        alike(halves, whole)
        assert scheduler.computed_positions and own.replica.courier.worked > before, "nothing was sent"
    assert own.model.overlap.cut_steps > 10
    places = own.split.partition.places
    tight, scheduler = generate(own, lines, -(-(6 if case == "redundant" else 4) // places), prefill_chunk=100)
    alike(tight, whole)
    assert scheduler.preempted or places > 1, "nothing was preempted"
    decide(world, own, lines, whole)


def decide(world, own, lines, whole) -> None:
    """The trial's steps and its end are the same on all ranks, though each measured for itself."""
    own.model.overlap = tried = Overlap("auto", own.replica, least=2)
    found, _ = generate(own, lines, keep="all", prefill_chunk=64)
    alike(found, whole)
    said = {size: (trial.steps, trial.cut) for size, trial in tried._trials.items()}
    assert world.allgather(said) == [said] * world.size
    assert any(steps == FIRST + COUNTED and cut is not None for steps, cut in said.values()), said
    assert world.allgather(tried.cut_steps) == [tried.cut_steps] * world.size


def run(argv: list[str] | None) -> int:
    nodes, weights, *cases = argv or []
    os.environ[launch.FAKE_NODES] = nodes
    world = collectives.start()
    world.place()
    kernels.set_threads(1)
    kernels.prepare_threads(world.crowded)
    for turn in (0, 1):                         # one rank compiles, the others find it in the cache
        if (world.rank > 0) == turn:
            for case in cases:
                mla = 2 if case == "latents" else None if CASES[case][2] == "auto" else int(CASES[case][2])
                kernels.warm_up([weights], "bf16", experts=CASES[case][0] is not DENSE, mla=mla)
        world.barrier_quiet()
    with tempfile.TemporaryDirectory() as place:
        place = world.bcast(place)
        for case in cases:
            path = f"{place}/{case}"
            if world.rank == 0:
                folder_of(path, CASES[case][0])
            world.barrier_quiet()
            check(world, path, weights, case)
        world.barrier_quiet()
    if world.rank == 0:
        print("halves are right:", *cases)
    return 0


if __name__ == "__main__":
    sys.exit(main.main(sys.argv[1:], run))
