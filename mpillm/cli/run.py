"""``mpillm run``: the main job. Reads prompts, runs them through a model split over ranks, writes results."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import platform
import time
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from mpillm import __version__, collectives, io, kernels, log
from mpillm.cli import options, report
from mpillm.config import RunConfig, format_size
from mpillm.engine import setup
from mpillm.engine.feed import TIME_LIMIT, Desk, Line
from mpillm.engine.output import results_part
from mpillm.engine.progress import RunProgress
from mpillm.engine.replica import Job, LineReader, Outcome, run_replica, serve_others, time_left
from mpillm.errors import MpillmError, Stopped
from mpillm.formats import hdf5
from mpillm.formats.prompts import PromptFile
from mpillm.machine import affinity, guard, launch, memory, signals
from mpillm.machine.mail import Mail
from mpillm.models import registry
from mpillm.models.config import ModelConfig
from mpillm.models.parse import open_checkpoint, open_model
from mpillm.models.weights import Weights
from mpillm.partition import Layout, Span, balance, describe

LOG = logging.getLogger("mpillm.run")
COMPILERS = 8          # ranks of a node that compile kernels, at most
GRACE = 15.0           # seconds that a guard waits beyond --exchange-timeout: who exchanges can name the missing rank
VERSIONS = ("mpi4py", "numpy", "numba", "h5py", "tokenizers", "gguf")


@dataclass
class Hold:
    """What rank 0 alone has: the prompts' lines, their tokenizer, the outputs."""

    tokenizer: Any | None = None
    outputs: io.Outputs | None = None
    prompts: PromptFile | None = None


def run(argv: list[str] | None) -> int:
    """Run the job of the command line; the exit code. Raises MpillmError."""
    if argv is not None and ("-h" in argv or "--help" in argv):
        if launch.is_first(os.environ):
            options.parser().print_help()
        return 0
    guard.board().say("starting MPI")
    world = collectives.start()
    guard.board().name(f"rank {world.rank} (host {world.host}, process {os.getpid()})")
    clock = time.perf_counter()
    settings = world.agree(lambda: options.parse(argv))
    log.setup(world.rank, world.host, settings.log_level)
    hold = Hold()
    guard.board().say("reading the prompts" if world.rank == 0 else "waiting for rank 0 to read the prompts")
    job = world.agree(lambda: prepare(settings, hold))
    try:
        _work(world, settings, job, hold, clock)
    finally:
        if hold.outputs is not None:
            hold.outputs.release()
    return 0


def prepare(settings: RunConfig, hold: Hold) -> Job:
    """On rank 0: outputs, model and prompts are usable; fills ``hold``. Raises MpillmError."""
    io.check_prompts_place(settings.prompts, None not in (settings.output, settings.results))
    path = io.find_model(settings.model)
    io.check_names(settings.output_path, settings.results_path, (
        ("--prompts", settings.prompts), ("--model", path), ("--chat-template", settings.chat_template)))
    hold.outputs = io.Outputs(settings.output_path, settings.results_path, settings.overwrite)
    try:
        io.check_template(settings.chat_template)
        model, checkpoint = open_model(path, settings.tie_embeddings)
        with contextlib.closing(checkpoint):
            for line in checkpoint.warnings:
                LOG.warning("%s", line)
            hold.tokenizer = tokenizer = open_tokenizer(path, checkpoint, settings)
        context = setup.context_of(settings, model)
        LineReader(settings, model, context, tokenizer)     # its defaults are checked
        hold.prompts = PromptFile(settings.prompts, hold.outputs.parts)
        hold.prompts.index()
        eos_ids = frozenset(model.eos_ids) | (tokenizer.eos_ids if tokenizer is not None else frozenset())
        return Job(path, model, hold.outputs.parts, context, eos_ids, int(time.time()), versions(), 0)
    except MpillmError:
        hold.outputs.release()
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


def _work(world: collectives.World, settings: RunConfig, job: Job, hold: Hold, clock: float) -> None:
    """Everything after the checks, on every rank."""
    checkpoint = world.agree_all(lambda: open_checkpoint(job.path))
    weights = Weights(checkpoint, job.model)
    free = min(world.allgather(memory.available_nbytes() // world.node_size))
    split = world.agree(lambda: setup.choose_split(settings, job.model, weights, world.size, free))
    placement = world.place(settings.threads_per_rank, settings.pin)
    kernels.set_threads(placement.threads)
    kernels.prepare_threads(world.crowded)
    replica = world.split(split.layout.tp, split.layout.dp, settings.collectives, wire=settings.wire,
                          timeout=settings.exchange_timeout)
    if world.rank == 0:
        announce(world, settings, job, hold, split, placement)
    guard.board().say("compiling or loading kernels")
    compile_kernels(world, settings, job.model, weights)

    model = load(world, settings, job, split, replica, weights)
    world.agree(lambda: hold.outputs.begin() if hold.outputs is not None else None)
    mail = world.mail()
    desk = open_desk(settings, hold, mail, split.layout, clock)
    outcome = None
    if replica is not None and model is not None:
        tokenizer = hold.tokenizer
        if replica.is_root and world.rank:
            tokenizer = open_tokenizer(job.path, checkpoint, settings)
        guard.board().limit(settings.exchange_timeout + GRACE, settings.exchange_timeout)
        outcome = run_replica(world, settings, job, split, replica, model, tokenizer, placement.threads, clock, mail,
                              desk)
        guard.board().limit(0, 0)
    guard.board().say("waiting for the other replicas")
    if desk is not None:
        serve_others(desk)
    world.barrier_quiet(Messenger(mail))
    finish(world, settings, job, hold, split, placement, outcome, desk, clock)


def open_desk(settings: RunConfig, hold: Hold, mail: Mail, layout: Layout, clock: float) -> Desk | None:
    """On rank 0: what hands out the lines."""
    if hold.prompts is None:
        return None
    progress = RunProgress(hold.prompts.count, settings.progress_every)
    lines = (Line(*line) for line in hold.prompts.lines())
    return Desk(lines, mail, [index * layout.tp for index in range(layout.dp)], settings.max_tokens, progress.add,
                time_left(settings, clock))


class Messenger:
    """Tells rank 0 of a signal that a rank hears while it waits for the end."""

    def __init__(self, mail: Mail) -> None:
        self._mail, self._told = mail, mail.rank == 0

    def __call__(self) -> None:
        if not self._told and signals.heard():
            self._mail.send(0, ("stop", signals.heard()))
            self._told = True


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


def finish(world: collectives.World, settings: RunConfig, job: Job, hold: Hold, split: setup.Split,
           placement: affinity.Placement, outcome: Outcome | None, desk: Desk | None, clock: float) -> None:
    """Rank 0 folds the parts into the two outputs and prints the summary."""
    outcomes = world.gather(outcome)
    if outcomes is None or desk is None:
        world.agree(lambda: None)
        return
    world.agree(lambda: _fold(world, settings, job, hold, split, placement, outcomes, desk, clock))


def _fold(world: collectives.World, settings: RunConfig, job: Job, hold: Hold, split: setup.Split,
          placement: affinity.Placement, outcomes: list[Outcome | None], desk: Desk,
          clock: float) -> None:
    done = [outcome for outcome in outcomes if outcome is not None]
    waits = waiting(done)
    steps = hdf5.step_table(
        (outcome.replica, rank, number, record["rows_prefill"], record["rows_decode"], record["start_s"],
         record["total_s"] - record["communication_s"], record["communication_s"] - wait, wait)
        for rank, outcome in enumerate(outcomes) if outcome is not None
        for number, (record, wait) in enumerate(zip(outcome.steps, waits[outcome.replica, outcome.tp_rank],
                                                    strict=True)))
    ranks = hdf5.rank_table(_rank_row(rank, outcome, split, placement, job, settings)
                            for rank, outcome in enumerate(outcomes))
    assert hold.outputs is not None and hold.prompts is not None, "rank 0 holds the outputs"
    if desk.stop and desk.n_finished < hold.prompts.count:
        why = "--time-limit" if desk.stop == TIME_LIMIT else signals.name(desk.stop)
        raise Stopped(f"stopped by {why} with {desk.n_finished} of {hold.prompts.count} lines done: the same command with --resume "
                      "does the others")
    hold.outputs.merge_results(results_part(job.parts, index) for index in range(split.layout.dp))
    summary = hdf5.fold(settings.output_path, job.parts, _header(world, settings, job, split), steps, ranks,
                        [],
                        settings.overwrite, expected=[part for outcome in done for part in outcome.parts])
    hold.outputs.commit_results()
    failed = [outcome for outcome in done if outcome.n_failed]
    if failed:
        LOG.warning("%d line(s) failed, one of them: %s", sum(o.n_failed for o in failed), failed[0].first_failure)
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


def announce(world: collectives.World, settings: RunConfig, job: Job, hold: Hold, split: setup.Split,
             placement: affinity.Placement) -> None:
    """On rank 0: what runs where, before the long part begins."""
    layout, model = split.layout, job.model
    LOG.info("mpillm %s, %s", __version__, world.library)
    LOG.info("model %s: %s, %d layers, hidden %d, %d query and %d KV heads of %d, feed-forward %d, vocabulary %d",
             job.path, model.architecture, model.n_layers, model.hidden, model.n_heads, model.n_kv_heads,
             model.head_dim, model.intermediate, model.vocab)
    LOG.info("layout: %d rank(s) = %d replica(s) of %d%s", world.size, layout.dp, layout.tp,
             f"; the last {layout.idle} rank(s) stay idle" if layout.idle else "")
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
    assert hold.prompts is not None, "rank 0 has the prompts"
    LOG.info("prompts: %d lines", hold.prompts.count)


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
