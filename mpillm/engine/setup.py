"""From a configuration and ranks to a model in memory: layout, split, weights, cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from mpillm import kernels
from mpillm.config import RunConfig, format_size
from mpillm.engine import kvcache, overlap
from mpillm.engine.blocks import BlockLedger, blocks_for
from mpillm.engine.cost import LayoutChoice
from mpillm.engine.scheduler import Limits, Scheduler, Sequence
from mpillm.errors import ResourceError, UsageError
from mpillm.kernels import LayerCache
from mpillm.layers.exchange import KVGather
from mpillm.models import deepseek, registry
from mpillm.models.config import ModelConfig
from mpillm.models.llama import Llama, room_for
from mpillm.models.load import LOADING_BYTES, Loader
from mpillm.models.weights import Weights
from mpillm.partition import Layout, Partition, Share, layout, partition

# What Python, numba's compiled kernels and MPI take in each rank, beside weights and cache.
RUNTIME_BYTES = 400 << 20


@dataclass(frozen=True)
class Split:
    """Who holds what: the same on every rank."""

    layout: Layout
    partition: Partition
    weight_bytes: tuple[int, ...]    # by rank of a replica
    formats: tuple[str, ...]         # of the weights in memory
    choice: LayoutChoice             # why this layout
    rules: tuple[registry.Matched, ...] = ()     # of the weight recipe, if there is one


@dataclass(frozen=True)
class LoadedModel:
    """One rank's part of a model, and the bytes of its weights."""

    model: Llama
    nbytes: int


SHARDED_MLA = 1, 2         # modes of latent attention whose cache can be dealt out by positions
LATENT_CHUNK = 4096        # prompt tokens in a step where the past is brought out of the latents for each


def decided(run: RunConfig, model: ModelConfig) -> tuple[RunConfig, ModelConfig]:
    """Both with what ``--mla auto`` means for this model: mode 3, with larger steps of prompts unless they are given.

    Where the cache is sharded it is mode 2: mode 3 makes keys and values of all positions before a prompt's rows, of
    which a rank then has a part.
    Raises UsageError for a mode that the model cannot have.
    """
    if not model.latent:
        if run.mla != "auto":
            raise UsageError(f"--mla {run.mla} is for models with latent attention (DeepSeek-V2, V3), and "
                             f"{model.architecture} has keys and values of each KV head: leave it out")
        return run, model
    sharded = run.kv_mode == "sharded"
    mode = (2 if sharded else 3) if run.mla == "auto" else int(run.mla)
    if sharded and mode not in SHARDED_MLA:
        raise UsageError(f"--mla {mode} attends to keys and values of each head, --kv-mode sharded deals out latent "
                         "rows: use --mla 1 or 2, or --kv-mode redundant or allgather")
    if mode > 1 and run.kv_type_v != run.kv_type:
        raise UsageError(f"--kv-type-v {run.kv_type_v}: --mla {mode} caches no values, they are part of the latent row "
                         f"that --kv-type {run.kv_type} is for: leave it out, or use --mla 0 or 1")
    chunk = LATENT_CHUNK if run.mla == "auto" and mode == 3 and run.prefill_chunk is None else run.chunk
    return (dataclasses.replace(run, mla=str(mode), prefill_chunk=chunk), dataclasses.replace(model, mla=mode))


def choose_split(run: RunConfig, model: ModelConfig, weights: Weights, ranks: int, memory: int,
                 choice: LayoutChoice | None = None) -> Split:
    """The layout and the split of the model over the ranks of a replica.

    ``memory``: bytes that each rank may use. ``choice``: of engine/layout.py; None for ``run.tp``, else the
    largest tp that divides the ranks and fits. A layout that is asked for need only hold the weights; one that is
    chosen here leaves room for the runtime too. Raises UsageError (tp too large), ResourceError (nothing fits).
    """
    for share in partition(registry.sizes(model, weights, run.weights), 1).shares:
        kvcache.share_block_bytes(run, model, share)        # raises where the type does not fit the heads
    if choice is None:
        found = layout(ranks, model.n_heads, lambda tp: fits(run, model, weights, tp, memory), run.tp)
        choice = LayoutChoice(found, "the largest that fits" if run.tp is None else f"--tp {run.tp}")
    split, needed = held(run, model, weights, choice.layout.tp)
    if max(needed) + LOADING_BYTES > memory:
        raise ResourceError(f"--tp {choice.layout.tp}: a rank needs {format_size(max(needed))} for weights and has "
                            f"{format_size(memory)}: use more ranks per model or smaller --weights")
    return Split(choice.layout, split, needed, tuple(sorted(registry.formats(model, weights, run.weights))), choice,
                 registry.matched(model, weights, split, run.weights))


def held(run: RunConfig, model: ModelConfig, weights: Weights, tp: int) -> tuple[Partition, tuple[int, ...]]:
    """The split over ``tp`` ranks, and the bytes of weights of each."""
    split = partition(registry.sizes(model, weights, run.weights), tp, run.kv_mode, run.moe_split)
    return split, tuple(registry.weight_bytes(model, weights, split, run.weights, rank) for rank in range(tp))


def fits(run: RunConfig, model: ModelConfig, weights: Weights, tp: int, memory: int) -> bool:
    """Whether weights and runtime fit the ``memory`` of each of ``tp`` ranks."""
    return max(held(run, model, weights, tp)[1]) + LOADING_BYTES + RUNTIME_BYTES <= memory


def load_model(run: RunConfig, model: ModelConfig, weights: Weights, split: Split, rank: int,
               reducer: overlap.Ranks, gather: KVGather | None) -> LoadedModel:
    """This rank's part of the model. Raises ModelError."""
    loader = Loader(model, weights, split.partition.shares[rank], run.weights, reducer)
    with loader.ahead():
        built = registry.BUILDERS[model.architecture](model, loader, gather)
    built.fast, built.scratch, built.overlap = run.fast, run.attention_scratch, overlap.chosen(run.overlap, reducer)
    return LoadedModel(built, loader.nbytes)


def context_of(run: RunConfig, model: ModelConfig) -> int:
    """Positions that a sequence may have. Raises UsageError when more are asked than the model has."""
    if run.max_model_len is None:
        return model.context
    if run.max_model_len > model.context:
        raise UsageError(f"--max-model-len {run.max_model_len} is beyond the model's {model.context} positions")
    return run.max_model_len


def cache_block_bytes(run: RunConfig, model: ModelConfig, split: Split, rank: int) -> int:
    """Bytes of one cache block, all layers, on ``rank``; 0 where no KV head is held."""
    return kvcache.share_block_bytes(run, model, split.partition.shares[rank])


def _latent_values(c: ModelConfig, share: Share) -> int:
    """Values of a row between the parts of latent attention."""
    heads, row = share.heads.size, c.kv_rank + c.rope_dim
    own = 2 * (c.q_rank + row) + c.q_rank + 2 * heads * c.head_dim + heads * c.value_dim
    if c.mla == 0:
        return own + c.kv_rank + heads * (c.nope_dim + 2 * c.value_dim + c.head_dim)
    return own + heads * (row + c.kv_rank + c.nope_dim + c.kv_rank)      # and what two products take of every head


def cache_token_bytes(run: RunConfig, model: ModelConfig, split: Split, rank: int) -> float:
    """Bytes of the cache that a position takes on ``rank``, on the mean over many where they are sharded."""
    return cache_block_bytes(run, model, split, rank) / (kernels.BLOCK * split.partition.places)


def make_cache(run: RunConfig, model: ModelConfig, split: Split, rank: int, n_blocks: int) -> list[LayerCache]:
    """The cache of ``rank``: ``n_blocks`` blocks of its KV heads."""
    share, places = split.partition.shares[rank], split.partition.places
    return kvcache.share_cache(run, model, share, n_blocks, (share.row_rank % places, places))


def make_scheduler(run: RunConfig, split: Split, rank: int, n_blocks: int, context: int) -> Scheduler:
    """The scheduler of ``rank``: ``n_blocks`` blocks on each rank, sequences of up to ``context`` positions."""
    places = split.partition.places
    return Scheduler(BlockLedger(n_blocks, places), Limits(run.max_batch, run.chunk, kernels.BLOCK),
                     context_blocks=blocks_for(context, kernels.BLOCK), continuous=run.batching == "continuous",
                     place=split.partition.shares[rank].row_rank % places)


def activation_bytes(run: RunConfig, model: ModelConfig, share: Share, threads: int | None = None,
                     places: int = 1) -> int:
    """Bytes that the largest step takes beside weights and cache: activations, and logits of all its rows.

    ``threads`` of a rank; None: those that the kernels have here. ``places``: over which the cache is sharded.
    """
    threads = kernels.threads() if threads is None else threads
    rows = room_for(run.chunk + run.max_batch)
    rows += room_for(run.max_batch) if model.mla == 3 else 0        # steps without prompts have a plan of their own
    columns = max(share.columns.size, share.dense_columns.size, share.shared_columns.size)
    widest = 7 * model.hidden + 4 * columns + 3 * model.experts + 64
    widest += _latent_values(model, share) if model.latent else 3 * (share.heads.size + 2) * model.head_dim
    own = kernels.ROOM_WIDTH + (0 if model.latent else model.head_dim)       # outputs in a thread's own room
    widened = 2 * kernels.ROOM_WIDTH * max(model.hidden, share.columns.size) if run.fast else 0
    count = model.experts_chosen + (model.shared_experts if share.experts.size == model.experts else 0)
    whole = share.vocab.size == model.vocab and share.heads.size == model.n_heads
    tp = 1 if whole else 2      # or more: who is alone cuts no step
    halves = overlap.planned(run, tp, rows)
    slots = rows * count * kernels.slot_bytes(model.hidden, share.columns.size) * (3 if halves else 2) // 2
    if halves and model.latent:
        widest += share.heads.size * (model.nope_dim + model.kv_rank)
    width = kvcache.form(model, share)[1]
    attention = kernels.attention_room(threads, width, context_of(run, model), run.attention_scratch)
    if places > 1:       # the row's queries, keys and values, outputs over the positions here, own heads' of all places
        in_row = share.kv_heads.size * (model.n_heads // model.n_kv_heads)
        query, value = (model.kv_rank + model.rope_dim, model.kv_rank) if model.latent else (model.head_dim,) * 2
        widest += in_row * (query + value + 1) + places * share.heads.size * (value + 1)
        widest += 0 if model.latent else 2 * share.kv_heads.size * model.head_dim
    if model.mla == 3 and share.heads:
        attention += 4 * kernels.STRETCH * (16 + model.kv_rank + 32)        # a stretch's latents as products take them
        for each in (rows, rows // 2)[:1 + halves]:
            attention += kernels.prompt_nbytes(deepseek.local_heads(model, share), each, run.attention_scratch)
    # Of a plan, in every tier: fused products ask for it. Mode 3 has one more without prompts, one for their stretches
    tiles = (3 if model.mla == 3 else 1) * threads * kernels.TILES
    return 4 * rows * (widest + threads * own + share.vocab.size) + threads * widened + slots + attention + tiles


def affordable_blocks(run: RunConfig, block_bytes: int, free: int) -> int | None:
    """Blocks that a rank has memory for; None where a block takes nothing.

    ``free``: bytes left to the rank with the weights loaded; without ``--kv-memory`` half of them.
    """
    if not block_bytes:
        return None
    return min(max(free // 2, 0) if run.kv_memory is None else run.kv_memory, max(free, 0)) // block_bytes


def most_blocks(max_batch: int, positions: int, places: int) -> int:
    """Blocks on each rank beyond which none is needed: all sequences have so many positions, and begin at one place."""
    return max_batch * blocks_for(blocks_for(positions, kernels.BLOCK), places)


def wanted_blocks(sequences: Iterable[Sequence], max_batch: int) -> int:
    """Blocks that the longest ``max_batch`` sequences take together: more are never needed."""
    needs = sorted((blocks_for(len(s.prompt) + max(s.max_tokens - 1, 0), kernels.BLOCK) for s in sequences),
                   reverse=True)
    return max(1, sum(needs[:max_batch]))


def other_modes(run: RunConfig, model: ModelConfig, split: Split) -> str:
    """What a block takes in the modes of latent attention that take less than the run's; empty if there is none."""
    def needed(mla: int) -> int:
        chosen = dataclasses.replace(model, mla=mla)
        return max(kvcache.share_block_bytes(run, chosen, share) for share in split.partition.shares)

    if not model.latent:
        return ""
    modes = SHARDED_MLA if split.partition.kv_mode == "sharded" else (1, 2, 3)
    less = [mla for mla in modes if needed(mla) < needed(model.mla)]
    return "".join(f", --mla {mla} (which needs {format_size(needed(mla))} for a block instead of "
                   f"{format_size(needed(model.mla))})" for mla in less)


def agree_on_blocks(run: RunConfig, wanted: int, offers: Iterable[int | None], modes: str = "") -> int:
    """The number of blocks on each rank of the replica: what is wanted, or the least that one of its ranks affords.

    Raises ResourceError when a rank cannot hold a single block; ``modes``: what else would help.
    """
    least = min((offer for offer in offers if offer is not None), default=wanted)
    if least < 1:
        option = f"--kv-memory {format_size(run.kv_memory)}" if run.kv_memory is not None else "the memory left"
        raise ResourceError(f"{option} does not hold one cache block of {kernels.BLOCK} positions: give more memory, "
                            f"use more ranks per model{modes} or --kv-type bf16")
    return min(wanted, least)
