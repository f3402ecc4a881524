"""How many replicas of how many ranks: as asked, as recorded, or by the cost model over what is measured now."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from mpillm import collectives, kernels
from mpillm.config import RunConfig
from mpillm.engine import cost, kvcache, probe, setup
from mpillm.engine.cost import LayoutChoice
from mpillm.engine.order import Sketch
from mpillm.errors import UsageError
from mpillm.models import registry
from mpillm.models.config import ModelConfig
from mpillm.models.weights import Weights
from mpillm.partition import Layout, Partition, layout, partition, step_bytes

GUESS = cost.Work()        # where nothing is known of the batch


def work_of(sketches: Iterable[Sketch], lines: int, run: RunConfig) -> cost.Work:
    """The batch as the cost model sees it, from a sample of its ``lines``.

    Every sequence is taken to use what it may generate, 256 tokens at most.
    """
    count = samples = 0
    prompts = new = 0.0
    for one in sketches:
        count += 1
        samples += one.samples
        prompts += one.samples * one.prompt
        new += one.samples * min(one.new, 256)
    if not samples or not lines:
        return dataclasses.replace(GUESS, max_batch=run.max_batch, chunk=run.chunk)
    return cost.Work(round(lines * samples / count), prompts / samples, new / samples, run.max_batch, run.chunk)


def candidates(run: RunConfig, model: ModelConfig, weights: Weights, ranks: int, memory: int) -> list[cost.Candidate]:
    """The layouts worth comparing, with what the fullest rank of each holds and does.

    ``memory``: bytes that each rank may use.
    """
    sizes = registry.sizes(model, weights, run.weights)
    return [candidate(run, model, weights, partition(sizes, tp, run.kv_mode, run.moe_split), ranks, memory)
            for tp in cost.sizes_to_try(ranks, model.n_heads, model.n_heads if model.latent else model.n_kv_heads)]


def candidate(run: RunConfig, model: ModelConfig, weights: Weights, split: Partition, ranks: int,
              memory: int) -> cost.Candidate:
    """One layout. The rank that reads the most stands for all of the replica."""
    read = [step_bytes(split, rank, run.max_batch) for rank in range(split.tp)]
    fullest = max(range(split.tp), key=read.__getitem__)
    share = split.shares[fullest]
    weight_bytes = registry.weight_bytes(model, weights, split, run.weights, fullest)
    free = memory - weight_bytes - setup.LOADING_BYTES - setup.RUNTIME_BYTES
    free -= setup.activation_bytes(run, model, share)
    if free >= 0:
        free = free // 2 if run.kv_memory is None else min(run.kv_memory, free)
    columns = cost.row_columns(share, model.experts, model.experts_chosen, model.shared_experts)
    layer = registry.attention_products(model, share) + 3 * columns * model.hidden
    return cost.Candidate(
        tp=split.tp, dp=ranks // split.tp, idle=ranks % split.tp, weight_bytes=weight_bytes, read_bytes=read[fullest],
        products=float(model.n_layers * layer), head_products=float(model.hidden * share.vocab.size),
        cache_bytes=max(kvcache.share_block_bytes(run, model, other) for other in split.shares) // kernels.BLOCK,
        free=free, sums=2 * model.n_layers + 1, row_bytes=4 * model.hidden)


def asked(run: RunConfig, ranks: int, given: LayoutChoice | None) -> LayoutChoice | None:
    """The layout that needs no choosing: by an option, recorded, or of one rank. Raises UsageError."""
    if run.tp is not None:
        return LayoutChoice(layout(ranks, 1, lambda tp: True, run.tp), f"--tp {run.tp}")
    if run.layout != "auto":
        dp, tp = map(int, run.layout.split("x"))
        if dp * tp > ranks:
            raise UsageError(f"--layout {run.layout} needs {dp * tp} ranks, the job has {ranks}: start more ranks or "
                             "ask for fewer")
        return LayoutChoice(Layout(tp, dp, ranks - dp * tp), f"--layout {run.layout}")
    if given is not None and given.layout.tp * given.layout.dp + given.layout.idle == ranks:
        return dataclasses.replace(given, chosen_by="the interrupted run")
    return LayoutChoice(Layout(1, 1, 0), "one rank") if ranks == 1 else None


def choose(world: collectives.World, run: RunConfig, model: ModelConfig, weights: Weights, memory: int, threads: int,
           work: Callable[[], cost.Work], given: LayoutChoice | None = None) -> LayoutChoice:
    """The layout of the job, the same on every rank; rank 0 decides. All ranks must call it, with their cores taken.

    Measures (under a second) only where several layouts fit. ``memory``: bytes that each rank may use; ``work``:
    called on rank 0; ``given``: that of the run that is resumed, taken over if it has as many ranks. Raises
    UsageError, ResourceError.
    """
    known = world.agree(lambda: asked(run, world.size, given))
    if known is not None:
        return known
    found, batch = world.agree(lambda: (candidates(run, model, weights, world.size, memory), work()))
    fit = cost.fitting(found, batch)
    if len(fit) <= 1:
        return world.agree(lambda: only(run, model, weights, world.size, memory, fit))
    kinds = registry.formats(model, weights, run.weights)
    kind = min(kinds, key=("f32", "f16", "bf16").index) if kinds <= {"f32", "f16", "bf16"} else "q8_0"
    read, operations, sums = probe.quick_figures(world, threads, kind, cost.sizes_to_measure(fit), 4 * model.hidden,
                                                 run.collectives, run.wire)
    machine = cost.Machine(read, operations, tuple(sums))
    return world.agree(lambda: fastest(run, model, weights, memory, found, machine, batch))


def only(run: RunConfig, model: ModelConfig, weights: Weights, ranks: int, memory: int,
         fit: list[cost.Candidate]) -> LayoutChoice:
    """The one candidate that fits with a cache, else what holds at least the weights. Raises ResourceError."""
    if fit and setup.fits(run, model, weights, fit[0].tp, memory):
        return LayoutChoice(Layout(fit[0].tp, fit[0].dp, fit[0].idle), "the only one that fits")
    found = layout(ranks, model.n_heads, lambda tp: setup.fits(run, model, weights, tp, memory))
    return LayoutChoice(found, "what holds the weights")


def fastest(run: RunConfig, model: ModelConfig, weights: Weights, memory: int, found: list[cost.Candidate],
            machine: cost.Machine, work: cost.Work) -> LayoutChoice:
    """The candidate with the most tokens/s whose every rank fits its memory. Raises ResourceError."""
    rated = cost.rate(found, machine, work)
    for place, best in enumerate(rated):
        if best.speed is not None and setup.fits(run, model, weights, best.candidate.tp, memory):
            own, others = best.candidate, rated[:place] + rated[place + 1:]
            return LayoutChoice(
                Layout(own.tp, own.dp, own.idle), "auto",
                {**dataclasses.asdict(machine), "work": dataclasses.asdict(work)},
                tuple((rating.candidate.name, rating.speed) for rating in [best, *others]))
    return only(run, model, weights, found[-1].tp, memory, [])
