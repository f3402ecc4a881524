"""From a configuration and ranks to a model in memory: layout, split, weights, cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mpillm import kernels
from mpillm.config import RunConfig, format_size
from mpillm.engine import kvcache
from mpillm.engine.blocks import blocks_for
from mpillm.engine.cost import LayoutChoice
from mpillm.engine.scheduler import Sequence
from mpillm.errors import ResourceError, UsageError
from mpillm.layers.attention import KVGather
from mpillm.layers.linear import Reducer
from mpillm.models import registry
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


def choose_split(run: RunConfig, model: ModelConfig, weights: Weights, ranks: int, memory: int,
                 choice: LayoutChoice | None = None) -> Split:
    """The layout and the split of the model over the ranks of a replica.

    ``memory``: bytes that each rank may use. ``choice``: of engine/layout.py; None for ``run.tp``, else the
    largest tp that divides the ranks and fits. A layout that is asked for need only hold the weights; one that is
    chosen here leaves room for the runtime too. Raises UsageError (tp too large), ResourceError (nothing fits).
    """
    kernels.cache_shape(run.kv_type, 1, 1, model.head_dim)      # raises where the type does not fit the heads
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


def load_model(run: RunConfig, model: ModelConfig, weights: Weights, split: Split, rank: int, reducer: Reducer,
               gather: KVGather | None) -> LoadedModel:
    """This rank's part of the model. Raises ModelError."""
    loader = Loader(model, weights, split.partition.shares[rank], run.weights, reducer)
    built = registry.BUILDERS[model.architecture](model, loader, gather)
    built.fast = run.fast
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
    kv_heads = split.partition.shares[rank].kv_heads.size
    return kvcache.block_bytes(run.kv_type, model.n_layers, kv_heads, model.head_dim) if kv_heads else 0


def activation_bytes(run: RunConfig, model: ModelConfig, share: Share, threads: int | None = None) -> int:
    """Bytes that the largest step takes beside weights and cache: activations, and logits of all its rows.

    ``threads`` of a rank; None: those that the kernels have here.
    """
    threads = kernels.threads() if threads is None else threads
    rows = room_for(run.prefill_chunk + run.max_batch)
    columns = max(share.columns.size, share.dense_columns.size, share.shared_columns.size)
    widest = 7 * model.hidden + 4 * columns + 3 * model.experts + 3 * (share.heads.size + 2) * model.head_dim + 64
    own = kernels.ROOM_WIDTH + model.head_dim            # outputs in a thread's own room
    widened = 2 * kernels.ROOM_WIDTH * max(model.hidden, share.columns.size) if run.fast else 0
    count = model.experts_chosen + (model.shared_experts if share.experts.size == model.experts else 0)
    slots = rows * count * kernels.slot_bytes(model.hidden, share.columns.size)
    return 4 * rows * (widest + threads * own + share.vocab.size) + threads * widened + slots


def affordable_blocks(run: RunConfig, block_bytes: int, free: int) -> int | None:
    """Blocks that a rank has memory for; None where a block takes nothing.

    ``free``: bytes left to the rank with the weights loaded; without ``--kv-memory`` half of them.
    """
    if not block_bytes:
        return None
    return min(max(free // 2, 0) if run.kv_memory is None else run.kv_memory, max(free, 0)) // block_bytes


def wanted_blocks(sequences: Iterable[Sequence], max_batch: int) -> int:
    """Blocks that the longest ``max_batch`` sequences take together: more are never needed."""
    needs = sorted((blocks_for(len(s.prompt) + max(s.max_tokens - 1, 0), kernels.BLOCK) for s in sequences),
                   reverse=True)
    return max(1, sum(needs[:max_batch]))


def agree_on_blocks(run: RunConfig, wanted: int, offers: Iterable[int | None]) -> int:
    """The replica's number of blocks: what is wanted, or the least that one of its ranks affords.

    Raises ResourceError when a rank cannot hold a single block.
    """
    least = min((offer for offer in offers if offer is not None), default=wanted)
    if least < 1:
        option = f"--kv-memory {format_size(run.kv_memory)}" if run.kv_memory is not None else "the memory left"
        raise ResourceError(f"{option} does not hold one cache block of {kernels.BLOCK} positions: give more memory, "
                            "use more ranks per model or --kv-type bf16")
    return min(wanted, least)
