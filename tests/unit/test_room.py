"""What is planned for weights, cache and a step is what a rank then has allocated."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import made_deepseek as made
import pytest
from made_models import random_tensors, tiny, write_folder
from test_expert_weights import MIXTRAL, apart
from test_setup import _Alone, _Silent

from mpillm import kernels
from mpillm.collectives import row_parts
from mpillm.config import RunConfig
from mpillm.engine import kvcache, overlap, room, setup
from mpillm.engine.estimate import Asked, Mode, Subject
from mpillm.jit import policy
from mpillm.models import registry
from mpillm.models.llama import room_for
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import Partition, partition

DENSE = tiny()
QWEN = tiny(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=24)
BATCH, CHUNK = 4, 60


class _Row(_Silent):
    """The exchange of a row whose other ranks say nothing, where nothing need be merged either."""

    def __init__(self, split: Partition, rank: int) -> None:
        me = split.shares[rank]
        self.place, self.width, self.heads = me.row_rank % split.places, split.places, \
            split.sizes.n_heads // split.rows
        self.gather, self.queries, self.merge = (SimpleNamespace(
            got=[part.result(me.row_rank) for part in parts], run=self.run, exchange_arguments=lambda: None)
            for parts in row_parts(split, me.row))


def allocated(run: RunConfig, model, weights: Weights, split: Partition, rank: int) -> tuple[int, int, int]:
    """Bytes of weights, of a cache of 3 blocks, and of the plans of steps, as a rank makes them."""
    own = SimpleNamespace(partition=split)
    exchange = _Row(split, rank) if split.kv_mode != "redundant" and split.width > 1 else None
    loaded = setup.load_model(run, model, weights, own, rank, _Alone(), exchange)
    cache = setup.make_cache(run, model, own, rank, 3)
    steps = [loaded.model._record(cache, room_for(CHUNK + BATCH), True)]
    if loaded.model.prompts_apart:
        steps.append(loaded.model._record(cache, room_for(BATCH), False))
    if overlap.planned(run, split.tp, CHUNK + BATCH):
        steps[0].halves = loaded.model._record_halves(steps[0])
    nbytes = 0
    for step in steps:
        rooms = [step.plan._buffers, *step.plan._branches.values(),
                 *(room for branches in step.plan.part_branches.values() for room in branches.values())]
        assert not any(half._buffers for half in step.halves or ()), "rooms of their own"
        nbytes += sum(array.nbytes for found in rooms for array in found.values())
    return loaded.nbytes, sum(layer.nbytes for layer in cache), nbytes


@pytest.mark.parametrize("tp", [1, 2, 3, 7])
@pytest.mark.parametrize(("config", "kv_mode", "mla", "weights", "moe_split"), [
    (DENSE, "redundant", None, "auto", "auto"), (DENSE, "allgather", None, "q8_0", "auto"),
    (DENSE, "sharded", None, "bf16", "auto"), (QWEN, "sharded", None, "q4_0", "auto"),
    (MIXTRAL, "redundant", None, "auto", "columns"), (MIXTRAL, "sharded", None, "q8_0", "experts"),
    (made.V3, "redundant", 0, "auto", "auto"), (made.V2, "allgather", 1, "q8_0", "auto"),
    (made.V3, "allgather", 2, "bf16", "experts"), (made.V2, "redundant", 3, "auto", "columns"),
    (made.V3, "sharded", 2, "auto", "auto"), (made.V2, "sharded", 1, "q8_0", "auto"),
    (made.V3, "redundant", 3, "attn=bf16,experts=q4_0,shared=q8_0,default=bf16", "auto")])
def test_planned_is_what_is_allocated(tmp_path, tp, config, kv_mode, mla, weights, moe_split, monkeypatch):
    threads = 1 + tp % 2 if config in (DENSE, made.V3) else 1
    monkeypatch.setattr(policy._Threads, "count", threads)
    make = made.tensors if mla is not None else apart if config is MIXTRAL else random_tensors
    figures, checkpoint = open_model(write_folder(tmp_path / "m", config, make(config)))
    with contextlib.closing(checkpoint):
        opened = Weights(checkpoint, figures)
        asked = Asked(192, 1, CHUNK, kernels.threads(), weights, "bf16", moe_split=moe_split)
        mode = Mode(kv_mode, mla)
        asked_steps = Asked(192, BATCH, CHUNK, kernels.threads(), weights, "bf16", moe_split=moe_split)
        run, model = setup.decided(asked_steps.run(mode), figures)
        split = partition(registry.sizes(figures, opened, weights), tp, kv_mode, moe_split)
        cache_of_one = Subject(figures, opened, weights).plan(asked, tp, mode)
        for rank in range(tp):
            own, share = allocated(run, model, opened, split, rank), split.shares[rank]
            planned = cache_of_one.ranks[rank]
            assert planned.weight_bytes == own[0]
            blocks = setup.most_blocks(1, 192, split.places)
            assert planned.cache_bytes * 3 == own[1] * blocks
            assert planned.kv_bytes_per_token == own[1] // (3 * kernels.BLOCK * split.places)
            step = room.step_nbytes(run, model, opened, split, share, threads)
            # What stretches that are split over threads come to take, test_attention_memory.py watches.
            width = kvcache.form(model, share)[1]
            beside = kernels.attention_room(threads, width, setup.context_of(run, model), run.attention_scratch)
            assert (beside > 0) == (threads > 1)
            assert step - beside == pytest.approx(own[2], rel=0.02), (rank, share)
            assert step <= setup.activation_bytes(run, model, share, places=split.places)
