"""``mpillm run``: the main job. Reads prompts, runs them through a model split over ranks, writes results."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import platform
import time
from array import array
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from mpillm import __version__, collectives, io, kernels, log
from mpillm.cli import options, report
from mpillm.config import RunConfig, format_size
from mpillm.engine import setup
from mpillm.engine.blocks import BlockLedger
from mpillm.engine.generate import BatchLoop, Ends, sequences_of
from mpillm.engine.kvcache import allocate
from mpillm.engine.output import ReplicaOutput, results_part
from mpillm.engine.progress import RunProgress
from mpillm.engine.request import FailedLine, Limits, Request, Sampling, check_defaults, read_requests
from mpillm.engine.sampling import Sampler
from mpillm.engine.scheduler import Limits as Budgets
from mpillm.engine.scheduler import Scheduler, Sequence
from mpillm.errors import MpillmError, OutputError
from mpillm.formats import hdf5
from mpillm.machine import affinity, launch
from mpillm.models import registry
from mpillm.models.config import ModelConfig
from mpillm.models.parse import open_checkpoint, open_model
from mpillm.models.weights import Weights
from mpillm.partition import Layout, Span, balance, describe

if TYPE_CHECKING:
    from mpillm.engine.text import TextStream  # only roots need a tokenizer, and what it imports

LOG = logging.getLogger("mpillm.run")
COMPILERS = 8          # ranks of a node that compile kernels, at most
VERSIONS = ("mpi4py", "numpy", "numba", "h5py", "tokenizers", "gguf")


@dataclass
class Batch:
    """What rank 0 alone has: the prompts' lines, of which replicas get shares, their tokenizer, the outputs."""

    tokenizer: Any | None = None
    outputs: io.Outputs | None = None
    requests: list[Request] = field(default_factory=list)
    failed: list[FailedLine] = field(default_factory=list)


@dataclass
class Job:
    """What rank 0 found out before anything is loaded; told to all."""

    path: str
    model: ModelConfig
    parts: str
    context: int
    eos_ids: frozenset[int]
    created: int                     # seconds since 1970
    versions: dict[str, str]


def run(argv: list[str] | None) -> int:
    """Run the job of the command line; the exit code. Raises MpillmError."""
    if argv is not None and ("-h" in argv or "--help" in argv):
        if launch.is_first(os.environ):
            options.parser().print_help()
        return 0
    world = collectives.start()
    clock = time.perf_counter()
    settings = world.agree(lambda: options.parse(argv))
    log.setup(world.rank, world.host, settings.log_level)
    batch = Batch()
    job = world.agree(lambda: prepare(settings, batch))
    try:
        _work(world, settings, job, batch, clock)
    finally:
        if batch.outputs is not None:
            batch.outputs.release()
    return 0


def prepare(settings: RunConfig, batch: Batch) -> Job:
    """On rank 0: outputs, model and prompts are usable; fills ``batch``. Raises MpillmError."""
    io.check_prompts_place(settings.prompts, None not in (settings.output, settings.results))
    path = io.find_model(settings.model)
    io.check_names(settings.output_path, settings.results_path, (
        ("--prompts", settings.prompts), ("--model", path), ("--chat-template", settings.chat_template)))
    batch.outputs = io.Outputs(settings.output_path, settings.results_path, settings.overwrite)
    try:
        io.check_template(settings.chat_template)
        model, checkpoint = open_model(path, settings.tie_embeddings)
        with contextlib.closing(checkpoint):
            for line in checkpoint.warnings:
                LOG.warning("%s", line)
            batch.tokenizer = tokenizer = open_tokenizer(path, checkpoint, settings)
        context = setup.context_of(settings, model)
        read_prompts(settings, model, context, tokenizer, batch)
        eos_ids = frozenset(model.eos_ids) | (tokenizer.eos_ids if tokenizer is not None else frozenset())
        return Job(path, model, batch.outputs.parts, context, eos_ids, int(time.time()), versions())
    except MpillmError:
        batch.outputs.release()
        raise


def versions() -> dict[str, str]:
    """Of Python and of the packages that the results pass through."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in VERSIONS}}


def open_tokenizer(path: str, checkpoint: Any, settings: RunConfig) -> Any | None:
    """The model's tokenizer; None where it has none. Raises ModelError."""
    from mpillm.formats.tokenizer import tokenizer_from_folder, tokenizer_from_gguf

    if checkpoint.kind == "gguf":
        return tokenizer_from_gguf(checkpoint.metadata, settings.chat_template)
    return tokenizer_from_folder(checkpoint.path, settings.chat_template)


def read_prompts(settings: RunConfig, model: ModelConfig, context: int, tokenizer: Any | None, batch: Batch) -> None:
    """All lines of the prompts file, checked, into ``batch``. Raises InputError, UsageError."""
    limits = Limits(vocab=model.vocab, max_positions=context, bos_id=model.bos_id, model=model.name,
                    parse_special=settings.parse_special)
    defaults = check_defaults(Sampling(
        max_tokens=settings.max_tokens, temperature=settings.temperature, top_p=settings.top_p,
        top_k=settings.top_k, min_p=settings.min_p, stop=settings.stop, stop_token_ids=settings.stop_token_ids,
        ignore_eos=settings.ignore_eos, n=settings.n, logprobs=settings.logprobs), limits, tokenizer is not None)
    for line in read_requests(io.prompt_lines(settings.prompts), defaults, tokenizer, limits):
        if isinstance(line, Request):
            # An array takes 4 bytes a token, a tuple of integers some 36
            batch.requests.append(dataclasses.replace(line, prompts=tuple(array("i", p) for p in line.prompts)))
        else:
            batch.failed.append(line)


def _work(world: collectives.World, settings: RunConfig, job: Job, batch: Batch, clock: float) -> None:
    """Everything after the checks, on every rank."""
    checkpoint = world.agree_all(lambda: open_checkpoint(job.path))
    weights = Weights(checkpoint, job.model)
    placement = world.place(settings.threads_per_rank, settings.pin)
    free = min(world.allgather(world.free_nbytes()))
    split = world.agree(lambda: setup.choose_split(settings, job.model, weights, world.size, free))
    kernels.set_threads(placement.threads)
    kernels.prepare_threads(world.crowded)
    replica = world.split(split.layout.tp, split.layout.dp, settings.collectives, wire=settings.wire,
                          timeout=settings.exchange_timeout)
    if world.rank == 0:
        announce(world, settings, job, batch, split, placement)
    compile_kernels(world, settings, job.model, weights)

    model = load(world, settings, job, split, replica, weights)
    world.agree(lambda: batch.outputs.begin() if batch.outputs is not None else None)
    requests = world.scatter(shares(batch, split.layout, world.size) if world.rank == 0 else ())
    outcome = None
    if replica is not None and model is not None:
        outcome = run_replica(world, settings, job, split, replica, model, requests, checkpoint, placement, clock,
                              batch)
    finish(world, settings, job, batch, split, placement, outcome, clock)


def shares(batch: Batch, layout: Layout, ranks: int) -> list[list[Request]]:
    """The requests of each rank's replica: every dp-th line."""
    replicas = [batch.requests[index::layout.dp] for index in range(layout.dp)]
    return [replicas[rank // layout.tp] if rank < layout.tp * layout.dp else [] for rank in range(ranks)]


def compile_kernels(world: collectives.World, settings: RunConfig, model: ModelConfig, weights: Weights) -> None:
    """Some ranks of a node, one on each core, compile a share of what is needed; then all load it from the cache."""
    began = time.perf_counter()
    formats = registry.formats(model, weights, settings.weights)
    kernels.set_tier(kernels.lowest_tier(world.allgather(world.agree_all(kernels.tested_tier))))
    LOG.info("instructions: %s", kernels.tier())
    if settings.fast and kernels.tier() in ("generic", "avx2"):
        LOG.info("--fast changes nothing with these instructions: they do not multiply bf16")
    LOG.info("kernels: loading; the first start on a node compiles them, which takes a minute or so")
    compilers = max(1, min(world.node_size, world.cores, COMPILERS))
    if world.node_rank < compilers:
        kernels.warm_up(formats, settings.kv_type, settings.fast, world.node_rank, compilers)
    world.barrier_quiet()
    kernels.warm_up(formats, settings.kv_type, settings.fast)
    LOG.info("kernels: ready after %.1f s", time.perf_counter() - began)


def load(world: collectives.World, settings: RunConfig, job: Job, split: setup.Split,
         replica: collectives.Replica | None, weights: Weights) -> setup.LoadedModel | None:
    """This rank's part of the model; None on an idle rank. An error on one rank is raised on all."""
    began = time.perf_counter()
    gather = replica.row(split.partition) if replica is not None else None
    model = world.agree_all(lambda: None if replica is None else setup.load_model(
        settings, job.model, weights, split, replica.rank, replica, gather))
    if model is not None:
        LOG.info("weights: %s on rank %d, loaded in %.1f s", format_size(model.nbytes), world.rank,
                 time.perf_counter() - began)
    return model


@dataclass
class Outcome:
    """What a rank of a replica has to report when its requests are done."""

    replica: int
    tp_rank: int
    steps: np.ndarray
    failures: list[FailedLine]
    weight_bytes: int
    parts: list[str]


def run_replica(world: collectives.World, settings: RunConfig, job: Job, split: setup.Split,
                replica: collectives.Replica, model: setup.LoadedModel, requests: list[Request], checkpoint: Any,
                placement: affinity.Placement, clock: float, batch: Batch) -> Outcome:
    """Run the replica's share of the requests, leave the results in part files."""
    share = split.partition.shares[replica.rank]
    widest = max(other.vocab.size for other in split.partition.shares)
    ends = Ends(job.eos_ids, job.context)
    sequences = sequences_of(requests, ends, settings.seed)
    n_blocks = cache_blocks(world, settings, job, split, replica, sequences)
    cache = allocate(settings.kv_type, job.model.n_layers, n_blocks, share.kv_heads.size, job.model.head_dim)
    LOG.info("cache: %d blocks of %d positions, %s on rank %d", n_blocks, kernels.BLOCK,
             format_size(sum(layer.keys.nbytes + layer.values.nbytes for layer in cache)), world.rank)
    scheduler = Scheduler(sequences, BlockLedger(n_blocks),
                          Budgets(settings.max_batch, settings.prefill_chunk, kernels.BLOCK))
    del sequences                    # the scheduler lets go of those that are finished
    tokenizer = batch.tokenizer
    if replica.is_root and world.rank:
        tokenizer = open_tokenizer(job.path, checkpoint, settings)

    def text_stream(sequence: Sequence) -> TextStream | None:
        if tokenizer is None:
            return None
        from mpillm.engine.text import TextStream

        s = sequence.request.sampling
        return TextStream(tokenizer, sequence.prompt.tolist(), s.stop, s.skip_special_tokens,
                          s.include_stop_str_in_output)

    with open_output(world, settings, job, split, replica, tokenizer, placement, len(requests)) as output:
        for line in batch.failed:
            output.reject(line)
        sampler = Sampler(replica, share.vocab.start, widest)
        loop = BatchLoop(model.model, cache, scheduler, sampler, replica, output, ends, keep_logits=settings.logits,
                         text_stream=text_stream, replica=replica.index, clock_start=clock)
        try:
            steps = loop.run()
        except OutputError as error:
            raise OutputError(f"{error} (what was finished before lies in {job.parts})") from None
    if world.rank == 0 and replica.dp > 1:
        LOG.info("replica 0 is done; waiting for the other %d", replica.dp - 1)
    return Outcome(replica.index, replica.rank, steps, output.failures, model.nbytes, output.hdf5_parts)


def open_output(world: collectives.World, settings: RunConfig, job: Job, split: setup.Split,
                replica: collectives.Replica, tokenizer: Any | None, placement: affinity.Placement,
                n_requests: int) -> ReplicaOutput:
    """The part files of this rank, and on rank 0 the progress."""
    vocab = split.partition.shares[replica.rank].vocab
    logits = progress = None
    if settings.logits != "none":
        path = hdf5.logits_part_path(job.parts, replica.index, replica.rank)
        logits = hdf5.LogitsPart(path, vocab.start, vocab.stop, settings.logits_type, threads=placement.threads)
    if world.rank == 0:
        of = f" (replica 0 of {replica.dp})" if replica.dp > 1 else ""
        progress = RunProgress(n_requests, settings.progress_every, of)
    return ReplicaOutput(job.parts, replica.index, is_root=replica.is_root, logits=logits, tokenizer=tokenizer,
                         run_seed=settings.seed, created=job.created, progress=progress)


def cache_blocks(world: collectives.World, settings: RunConfig, job: Job, split: setup.Split,
                 replica: collectives.Replica, sequences: list[Sequence]) -> int:
    """The number of cache blocks, the same on all ranks of the replica. Raises ResourceError."""
    share = split.partition.shares[replica.rank]
    free = world.free_nbytes() - setup.activation_bytes(settings, job.model, share)
    offer = setup.affordable_blocks(
        settings, setup.cache_block_bytes(settings, job.model, split, replica.rank), free)
    if world.rank == 0 and settings.kv_memory is not None and settings.kv_memory > free:
        LOG.warning("--kv-memory %s is more than the %s that are free on a rank: that much is taken",
                    format_size(settings.kv_memory), format_size(max(free, 0)))
    offers = replica.gather(np.array([-1 if offer is None else offer], np.int64))
    agreed = np.zeros(1, np.int64)
    if offers is not None:
        agreed[0] = setup.agree_on_blocks(settings, setup.wanted_blocks(sequences, settings.max_batch),
                                          [None if o[0] < 0 else int(o[0]) for o in offers])
    replica.bcast(agreed)
    return int(agreed[0])


def finish(world: collectives.World, settings: RunConfig, job: Job, batch: Batch, split: setup.Split,
           placement: affinity.Placement, outcome: Outcome | None, clock: float) -> None:
    """Rank 0 folds the parts into the two outputs and prints the summary."""
    outcomes = world.gather(outcome)
    if outcomes is None:
        world.agree(lambda: None)
        return
    world.agree(lambda: _fold(world, settings, job, batch, split, placement, outcomes, clock))


def _fold(world: collectives.World, settings: RunConfig, job: Job, batch: Batch, split: setup.Split,
          placement: affinity.Placement, outcomes: list[Outcome | None], clock: float) -> None:
    done = [outcome for outcome in outcomes if outcome is not None]
    failures = batch.failed + [failed for outcome in done for failed in outcome.failures]
    waits = waiting(done)
    steps = hdf5.step_table(
        (outcome.replica, rank, number, record["rows_prefill"], record["rows_decode"], record["start_s"],
         record["total_s"] - record["communication_s"], record["communication_s"] - wait, wait)
        for rank, outcome in enumerate(outcomes) if outcome is not None
        for number, (record, wait) in enumerate(zip(outcome.steps, waits[outcome.replica, outcome.tp_rank],
                                                    strict=True)))
    ranks = hdf5.rank_table(_rank_row(rank, outcome, split, placement, job, settings)
                            for rank, outcome in enumerate(outcomes))
    assert batch.outputs is not None, "rank 0 holds the outputs"
    batch.outputs.merge_results(results_part(job.parts, index) for index in range(split.layout.dp))
    summary = hdf5.fold(settings.output_path, job.parts, _header(world, settings, job, split), steps, ranks,
                        [(f.index, f.line, f.custom_id, f.status, f.message) for f in failures],
                        settings.overwrite, expected=[part for outcome in done for part in outcome.parts])
    batch.outputs.commit_results()
    if failures:
        LOG.warning("%d line(s) failed, the first: %s", len(failures), min(failures, key=lambda f: f.index).message)
    report.summarize(summary, settings, split.layout, [(rank, outcome.steps, waits[outcome.replica, outcome.tp_rank])
                                                       for rank, outcome in enumerate(outcomes) if outcome is not None],
                     time.perf_counter() - clock)


def waiting(outcomes: list[Outcome]) -> dict[tuple[int, int], np.ndarray]:
    """Of each rank's communication in each step, the part that was waiting for slower ranks.

    Over shared memory it is measured. Over MPI it is inferred: the rank that comes last to a step's exchanges
    waits least, so what another spends beyond the least time of its replica in the step is waiting.
    """
    found = {}
    for replica in {outcome.replica for outcome in outcomes}:
        members = [outcome for outcome in outcomes if outcome.replica == replica]
        least = np.min([member.steps["communication_s"] for member in members], axis=0)
        for member in members:
            inferred = member.steps["communication_s"] - least
            measured = np.minimum(member.steps["waited_s"], member.steps["communication_s"])
            found[replica, member.tp_rank] = measured if measured.any() else inferred
    return found


def _cache_token_bytes(settings: RunConfig, job: Job, split: setup.Split, rank: int) -> float:
    return setup.cache_block_bytes(settings, job.model, split, rank) / kernels.BLOCK


def announce(world: collectives.World, settings: RunConfig, job: Job, batch: Batch, split: setup.Split,
             placement: affinity.Placement) -> None:
    """On rank 0: what runs where, before the long part begins."""
    layout, model = split.layout, job.model
    LOG.info("mpillm %s, %s", __version__, world.library)
    LOG.info("model %s: %s, %d layers, hidden %d, %d query and %d KV heads of %d, feed-forward %d, vocabulary %d",
             job.path, model.architecture, model.n_layers, model.hidden, model.n_heads, model.n_kv_heads,
             model.head_dim, model.intermediate, model.vocab)
    LOG.info("layout: %d rank(s) = %d replica(s) of %d%s", world.size, layout.dp, layout.tp,
             f"; the last {layout.idle} rank(s) stay idle" if layout.idle else "")
    if layout.dp > max(len(batch.requests), 1):
        LOG.info("%d of %d replicas have no request and stay idle", layout.dp - len(batch.requests), layout.dp)
    rows = describe(split.partition, split.weight_bytes)
    for row in rows:
        row["cache_bytes_per_token"] = _cache_token_bytes(settings, job, split, row["rank"])
    LOG.info("%s", report.split_table(rows, placement.table, "ranks" if layout.dp == 1 else "ranks of replica 0"))
    if layout.dp > 1 or layout.idle:
        title = "the other ranks: every replica holds the same"
        title += f"; the last {layout.idle} idle" if layout.idle else ""
        LOG.info("%s", report.place_table(placement.table[layout.tp:], title))
    if split.partition.width == 1:
        LOG.info("KV rows have one rank each: --kv-mode redundant and allgather are the same here")
    LOG.info("balance (mean over maximum of the bytes that a step reads): %.3f", balance(split.partition))
    for line in placement.warnings:
        LOG.warning("%s", line)
    LOG.info("prompts: %d lines to run, %d with errors", len(batch.requests), len(batch.failed))


def _header(world: collectives.World, settings: RunConfig, job: Job, split: setup.Split) -> dict[str, Any]:
    """Root attributes of the HDF5 output: what the results depend on."""
    layout = {**dataclasses.asdict(split.layout), "kv_mode": split.partition.kv_mode,
              "rows": split.partition.rows, "width": split.partition.width, "collectives": settings.collectives,
              "wire": world.wire, "instructions": kernels.tier()}
    model = {**dataclasses.asdict(job.model), "path": os.path.abspath(job.path), "weight_formats": split.formats,
             "kv_type": settings.kv_type}
    return {"mpillm_version": __version__, "config": settings.to_json(), "layout": json.dumps(layout),
            "model": json.dumps(model), "processor": world.processor,
            "versions": json.dumps({**job.versions, "mpi": world.library})}


def _rank_row(rank: int, outcome: Outcome | None, split: setup.Split, placement: affinity.Placement, job: Job,
              settings: RunConfig) -> dict[str, Any]:
    """One row of /ranks."""
    place = placement.table[rank]
    row = {"rank": rank, "host": place["host"], "cores": str(place["cores"]), "numa": str(place["NUMA domain"]),
           "threads": place["threads"], "replica": -1, "tp_rank": -1, "weight_bytes": 0, "kv_bytes_per_token": 0}
    nothing = Span(0, 0)
    spans = {"head": nothing, "kv_head": nothing, "column": nothing, "vocab": nothing}
    if outcome is not None:
        share = split.partition.shares[outcome.tp_rank]
        spans = {"head": share.heads, "kv_head": share.kv_heads, "column": share.columns, "vocab": share.vocab}
        row.update(replica=outcome.replica, tp_rank=outcome.tp_rank, weight_bytes=outcome.weight_bytes,
                   kv_bytes_per_token=round(_cache_token_bytes(settings, job, split, outcome.tp_rank)))
    for name, span in spans.items():
        row[f"{name}_start"], row[f"{name}_stop"] = span.start, span.stop
    return row
