"""``mpillm run``: the main job. Reads prompts, runs them through a model split over ranks, writes results."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import platform
import time
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import numpy as np

from mpillm import __version__, collectives, io, kernels, log
from mpillm.cli import options, report
from mpillm.config import RunConfig, format_size
from mpillm.engine import layout, resume, setup
from mpillm.engine.cost import LayoutChoice, Work
from mpillm.engine.expired import write_expired
from mpillm.engine.feed import TIME_LIMIT, Desk, Line
from mpillm.engine.order import sketch
from mpillm.engine.progress import RunProgress
from mpillm.engine.replica import Job, LineReader, run_replica, serve_others, time_left
from mpillm.errors import MpillmError, OutputError, Stopped, UsageError
from mpillm.formats.part_scan import finished
from mpillm.formats.parts import RankPart
from mpillm.formats.prompts import PromptFile, digest_of
from mpillm.machine import affinity, guard, launch, signals
from mpillm.machine.mail import Mail
from mpillm.models import registry
from mpillm.models.config import ModelConfig
from mpillm.models.parse import open_checkpoint, open_model
from mpillm.models.weights import Weights
from mpillm.partition import Layout, Span, balance

LOG = logging.getLogger("mpillm.run")
COMPILERS = 8          # ranks of a node that compile kernels, at most
EXPIRED = 9            # exit code of a run that stopped and will not be resumed
SAMPLE = 256           # lines of which the choice of the layout makes itself a picture
GRACE = 15.0           # seconds that a guard waits beyond --exchange-timeout: who exchanges can name the missing rank
VERSIONS = ("mpi4py", "numpy", "numba", "h5py", "tokenizers", "gguf", "llguidance")


@dataclass
class Hold:
    """What rank 0 alone has: the prompts' lines, their tokenizer, the outputs."""

    tokenizer: Any | None = None
    outputs: io.Outputs | None = None
    prompts: PromptFile | None = None
    what: dict[str, Any] = field(default_factory=dict)      # run.json
    done: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))    # by line: an earlier attempt finished it


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
    guard.board().limit(0, settings.exchange_timeout)
    hold = Hold()
    guard.board().say("reading the prompts" if world.rank == 0 else "waiting for rank 0 to read the prompts")
    job = world.agree(lambda: prepare(settings, hold))
    try:
        return job if isinstance(job, int) else _work(world, job.settings, job, hold, clock)
    finally:
        if hold.outputs is not None:
            hold.outputs.release()


def prepare(settings: RunConfig, hold: Hold) -> Job | int:
    """On rank 0: outputs, model and prompts are usable; fills ``hold``. Raises MpillmError.

    The exit code when the outputs are complete already and --resume finds nothing to do.
    """
    io.check_prompts_place(settings.prompts, settings.output is not None)
    path = io.find_model(settings.model)
    io.check_names(settings.output_path, settings.results_path, (
        ("--prompts", settings.prompts), ("--model", path), ("--chat-template", settings.chat_template)),
        settings.errors_path if settings.on_stop == "expire" else None)
    check_errors(settings)
    hold.outputs = io.Outputs(settings.output_path, settings.results_path, settings.overwrite, settings.resume)
    try:
        io.check_template(settings.chat_template)
        model, checkpoint = open_model(path, settings.tie_embeddings)
        settings, model = setup.decided(settings, model)
        with contextlib.closing(checkpoint):
            for line in checkpoint.warnings:
                LOG.warning("%s", line)
            for line in checkpoint.notes:
                LOG.info("%s", line)
            hold.tokenizer = tokenizer = open_tokenizer(path, checkpoint, settings)
            identity = resume.identity(settings, model, checkpoint, template_of(settings))
        if hold.outputs.finished:
            return complete(settings, hold.outputs.attributes(), identity)
        context = setup.context_of(settings, model)
        LineReader(settings, model, context, tokenizer)     # its defaults are checked
        attempt = find_begun(settings, hold, identity)
        eos_ids = frozenset(model.eos_ids) | (tokenizer.eos_ids if tokenizer is not None else frozenset())
        return Job(path, model, hold.outputs.parts, context, eos_ids, hold.what["created"], versions(), attempt,
                   settings)
    except MpillmError:
        hold.outputs.release()
        raise


def complete(settings: RunConfig, attributes: dict[str, Any], identity: dict[str, Any]) -> int:
    """The exit code of a run that had ended before, which must be the same. Raises UsageError, InputError."""
    resume.check_complete(settings.output_path, attributes, identity, settings.prompts, digest_of(settings.prompts))
    expired = int(attributes.get("expired", 0))
    if expired:
        LOG.warning("nothing to resume: the run had ended with --on-stop expire, %d lines expired: %s", expired,
                    settings.errors_path)
        return EXPIRED
    LOG.info("nothing to resume: %s and %s are complete", settings.output_path, settings.results_path)
    return 0


def check_errors(settings: RunConfig) -> None:
    """The errors file can be made where it may be needed. Raises OutputError."""
    path = settings.errors_path
    if settings.on_stop != "expire":
        return
    if os.path.exists(path) and not (settings.overwrite or settings.resume):
        raise OutputError(f"--errors {path} exists: choose another --errors, or use --overwrite")
    if os.path.lexists(path) and not os.path.isfile(path):     # it would be replaced: a device, a pipe
        raise OutputError(f"--errors {path} is not a regular file: choose another --errors")
    if not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK | os.X_OK):
        raise OutputError(f"--errors {path} cannot be written: name a file in a folder that is yours")


def template_of(settings: RunConfig) -> bytes | None:
    """The chat template that was given. Raises UsageError."""
    if settings.chat_template is None:
        return None
    try:
        with open(settings.chat_template, "rb") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"--chat-template {settings.chat_template}: {error.strerror}") from None


def find_begun(settings: RunConfig, hold: Hold, identity: dict[str, Any]) -> int:
    """Which attempt this is: 0, or with --resume the next one of a run that had begun, which must be the same.

    Fills the rest of ``hold``. Raises UsageError, InputError, OutputError.
    """
    assert hold.outputs is not None, "rank 0 holds the outputs"
    begun = resume.load(hold.outputs.parts) if settings.resume else None
    prompts = hold.prompts = PromptFile(settings.prompts, hold.outputs.parts, begun is not None)
    if begun is None:
        prompts.index()
        hold.done = np.zeros(prompts.count, bool)
        hold.what = {"identity": identity, "created": int(time.time()), "mpillm_version": __version__}
        return 0
    resume.check_same(begun["identity"], identity)
    prompts.compare()
    found = finished(hold.outputs.parts)
    hold.what, hold.done = begun, np.zeros(prompts.count, bool)
    hold.done[found.indices[found.indices < prompts.count]] = True
    LOG.info("resuming: %d of %d lines are done", int(hold.done.sum()), prompts.count)
    return found.next_attempt


def begin(hold: Hold) -> None:
    """On rank 0: all is ready to run; what an earlier run left goes, unless it is resumed. Raises OutputError."""
    if hold.outputs is None or hold.prompts is None:
        return
    hold.outputs.begin()
    if not os.path.exists(os.path.join(hold.outputs.parts, resume.FILE)):
        hold.prompts.keep()
    resume.save(hold.outputs.parts, hold.what)


def versions() -> dict[str, str]:
    """Of Python and of the packages that the results pass through."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in VERSIONS}}


def open_tokenizer(path: str, checkpoint: Any, settings: RunConfig) -> Any | None:
    """The model's tokenizer; None where it has none. Raises ModelError."""
    from mpillm.formats.tokenizer import tokenizer_from_folder, tokenizer_from_gguf

    if checkpoint.kind == "gguf":
        return tokenizer_from_gguf(checkpoint.metadata, settings.chat_template)
    return tokenizer_from_folder(checkpoint.path, settings.chat_template)


def _work(world: collectives.World, settings: RunConfig, job: Job, hold: Hold, clock: float) -> int:
    """Everything after the checks, on every rank; the exit code."""
    checkpoint = world.agree_all(lambda: open_checkpoint(job.path))
    weights = Weights(checkpoint, job.model)
    placement = world.place(settings.threads_per_rank, settings.pin)
    free = min(world.allgather(world.free_nbytes()))
    kernels.set_threads(placement.threads)
    kernels.prepare_threads(world.crowded)
    guard.board().say("measuring memory and exchanges for the layout")
    choice = choose_layout(world, settings, job, hold, weights, free, placement.threads)
    split = world.agree(lambda: setup.choose_split(settings, job.model, weights, world.size, free, choice))
    replica = world.split(split.layout.tp, split.layout.dp, settings.collectives, wire=settings.wire,
                          timeout=settings.exchange_timeout)
    if world.rank == 0:
        announce(world, settings, job, hold, split, placement)
    guard.board().say("compiling or loading kernels")
    compile_kernels(world, settings, job.model, weights)

    model = load(world, settings, job, split, replica, weights)
    world.agree_all(lambda: signals.check("before its first step"))
    world.agree(lambda: begin(hold))
    mail = world.mail()
    desk = open_desk(settings, hold, mail, split.layout, clock)
    own = rank_part(world, settings, job, split, replica, placement, model.nbytes if model is not None else 0)
    paths = [own.path]
    if replica is None or model is None:
        own.close()
    else:
        tokenizer = hold.tokenizer
        if replica.is_root and world.rank:
            tokenizer = open_tokenizer(job.path, checkpoint, settings)
        guard.board().limit(settings.exchange_timeout + GRACE, settings.exchange_timeout)
        paths = run_replica(world, settings, job, split, replica, model, own, tokenizer, clock, mail, desk)
        guard.board().limit(0, settings.exchange_timeout)
    guard.board().say("waiting for the other replicas")
    if desk is not None:
        serve_others(desk)
    world.barrier_quiet(Messenger(mail))
    return finish(world, settings, job, hold, split, paths, desk, clock)


def choose_layout(world: collectives.World, settings: RunConfig, job: Job, hold: Hold, weights: Weights, free: int,
                  threads: int) -> LayoutChoice:
    """How many replicas of how many ranks; that of the run that is resumed, if it had as many ranks."""

    def work() -> Work:
        assert hold.prompts is not None, "rank 0 has the prompts"
        sample = itertools.islice(hold.prompts.lines(), SAMPLE)
        return layout.work_of((sketch(raw, settings.max_tokens) for _, _, raw in sample),
                              hold.prompts.count - int(hold.done.sum()), settings)

    recorded = hold.what.get("layout")
    given = world.agree(lambda: None if recorded is None else LayoutChoice.from_dict(recorded))
    choice = layout.choose(world, settings, job.model, weights, free, threads, work, given)
    hold.what["layout"] = choice.to_dict()
    return choice


def rank_part(world: collectives.World, settings: RunConfig, job: Job, split: setup.Split,
              replica: collectives.Replica | None, placement: affinity.Placement, weight_bytes: int) -> RankPart:
    """The journal of this rank, which says what it is."""
    logits, index, tp_rank = None, -1, -1
    if replica is not None:
        index, tp_rank = replica.index, replica.rank
        if settings.logits != "none":
            vocab = split.partition.shares[tp_rank].vocab
            logits = vocab.start, vocab.stop, settings.logits_type
    part = RankPart(job.parts, job.attempt, world.rank, index, tp_rank, settings.flush_every, logits=logits)
    part.describe(_rank_row(world.rank, index, tp_rank, weight_bytes, split, placement, job, settings))
    return part


def open_desk(settings: RunConfig, hold: Hold, mail: Mail, laid: Layout, clock: float) -> Desk | None:
    """On rank 0: what hands out the lines."""
    if hold.prompts is None:
        return None
    progress = RunProgress(hold.prompts.count, settings.progress_every, done=int(hold.done.sum()))
    lines = (Line(*line) for line in hold.prompts.lines() if not hold.done[line[0]])
    return Desk(lines, mail, [index * laid.tp for index in range(laid.dp)], settings.max_tokens, progress,
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
    compilers, mla = max(1, min(world.node_size, world.cores, COMPILERS)), model.mla if model.latent else None
    if world.node_rank < compilers:
        kernels.warm_up(formats, settings.kv_type, settings.fast, world.node_rank, compilers, model.experts > 0,
                        settings.kv_type_v, mla, lambda: signals.heard() > 0)
    world.barrier_quiet()
    world.agree_all(lambda: signals.check("while kernels were compiled"))
    kernels.warm_up(formats, settings.kv_type, settings.fast, experts=model.experts > 0, kv_type_v=settings.kv_type_v,
                    mla=mla)
    LOG.info("kernels: ready after %.1f s", time.perf_counter() - began)


def load(world: collectives.World, settings: RunConfig, job: Job, split: setup.Split,
         replica: collectives.Replica | None, weights: Weights) -> setup.LoadedModel | None:
    """This rank's part of the model; None on an idle rank. An error on one rank is raised on all."""
    began = time.perf_counter()
    guard.board().say("making the exchange of K and V")
    gather = replica.row(split.partition) if replica is not None else None
    model = world.agree_all(lambda: None if replica is None else setup.load_model(
        settings, job.model, weights, split, replica.rank, replica, gather))
    if model is not None:
        LOG.info("weights: %s on rank %d, loaded in %.1f s", format_size(model.nbytes), world.rank,
                 time.perf_counter() - began)
    return model


def finish(world: collectives.World, settings: RunConfig, job: Job, hold: Hold, split: setup.Split,
           paths: list[str], desk: Desk | None, clock: float) -> int:
    """Rank 0 makes the outputs from the parts and prints the summary; the exit code of all. Raises Stopped."""
    journals = world.gather(paths)
    guard.board().say("writing the outputs" if world.rank == 0 else "waiting while rank 0 writes the outputs")
    return world.agree(lambda: _conclude(world, settings, job, hold, split, journals or [], desk, clock))


def _conclude(world: collectives.World, settings: RunConfig, job: Job, hold: Hold, split: setup.Split,
              journals: list[list[str]], desk: Desk | None, clock: float) -> int:
    assert hold.outputs is not None and hold.prompts is not None and desk is not None, "rank 0 has all of them"
    desk.close()
    count, n_done = hold.prompts.count, int(hold.done.sum()) + desk.n_finished
    stopped = desk.stop and n_done < count
    why = "--time-limit" if desk.stop == TIME_LIMIT else signals.name(desk.stop)
    if stopped and settings.on_stop == "resume":
        raise Stopped(f"stopped by {why} with {n_done} of {count} lines done: the same command with --resume does the "
                      "others")
    if stopped:
        write_expired(settings.errors_path, hold.prompts.lines(), finished(job.parts).indices)
        LOG.warning("stopped by %s: %d of %d lines expired: %s", why, count - n_done, count, settings.errors_path)
    assert stopped or n_done == count, f"{count - n_done} of {count} lines are missing, their parts lie in {job.parts}"
    summary = hold.outputs.finish(_header(world, settings, job, split, hold, count - n_done), settings.results_order,
                                  expected=[path for own in journals for path in own])
    if summary["failed"]:
        LOG.warning("%d line(s) failed, the first: %s", summary["failed"], summary["first_error"])
    if summary["warning"]:
        LOG.warning("%s", summary["warning"])
    report.summarize(summary, settings, time.perf_counter() - clock)
    return EXPIRED if stopped else 0


def _cache_token_bytes(settings: RunConfig, job: Job, split: setup.Split, rank: int) -> float:
    return setup.cache_token_bytes(settings, job.model, split, rank)


def feed_forward(model: ModelConfig) -> str:
    """How wide a layer's feed-forward is, in words."""
    if not model.experts:
        return str(model.intermediate)
    shared = f", {model.shared_experts} shared" if model.shared_experts else ""
    return f"{model.expert_intermediate} of {model.experts} experts, {model.experts_chosen} for each token{shared}"


def announce(world: collectives.World, settings: RunConfig, job: Job, hold: Hold, split: setup.Split,
             placement: affinity.Placement) -> None:
    """On rank 0: what runs where, before the long part begins."""
    laid, model = split.layout, job.model
    LOG.info("mpillm %s, %s", __version__, world.library)
    LOG.info("model %s: %s, %d layers, hidden %d, %d query and %d KV heads of %d, feed-forward %s, vocabulary %d",
             job.path, model.architecture, model.n_layers, model.hidden, model.n_heads, model.n_kv_heads,
             model.head_dim, feed_forward(model), model.vocab)
    LOG.info("%s", split.choice.line())
    rows = report.describe(split.partition, split.weight_bytes)
    for row in rows:
        row["cache_bytes_per_token"] = _cache_token_bytes(settings, job, split, row["rank"])
    LOG.info("%s", report.split_table(rows, placement.table, "ranks" if laid.dp == 1 else "ranks of replica 0"))
    if laid.dp > 1 or laid.idle:
        title = "the other ranks: every replica holds the same"
        title += f"; the last {laid.idle} idle" if laid.idle else ""
        LOG.info("%s", report.place_table(placement.table[laid.tp:], title))
    report.announce_rules(split.rules)
    if model.latent:
        LOG.info("latent attention: --mla %d, prompts in steps of %d tokens", model.mla, settings.chunk)
    if split.partition.width == 1 and not model.latent:
        LOG.info("KV rows have one rank each: all --kv-mode are the same here")
    LOG.info("balance (mean over maximum of the bytes that a step reads): %.3f", balance(split.partition))
    for line in placement.warnings:
        LOG.warning("%s", line)
    assert hold.prompts is not None, "rank 0 has the prompts"
    LOG.info("prompts: %d lines", hold.prompts.count)


def _header(world: collectives.World, settings: RunConfig, job: Job, split: setup.Split,
            hold: Hold, expired: int) -> dict[str, Any]:
    """Root attributes of the HDF5 output: what the results depend on, and how many lines expired."""
    described = {**split.choice.to_dict(), "kv_mode": split.partition.kv_mode, "moe_split": split.partition.moe_split,
              "rows": split.partition.rows, "width": split.partition.width, "collectives": settings.collectives,
              "wire": world.wire, "instructions": kernels.tier()}
    model = {**dataclasses.asdict(job.model), "path": os.path.abspath(job.path), "weight_formats": split.formats,
             "kv_type": settings.kv_type, "kv_type_v": settings.kv_type_v,
             "mla": job.model.mla if job.model.latent else None}
    assert hold.prompts is not None, "rank 0 has the prompts"
    return {"mpillm_version": __version__, "prompts": hold.prompts.digest,
            "identity": json.dumps(hold.what["identity"]), "expired": expired,
            "config": settings.to_json(), "layout": json.dumps(described),
            "model": json.dumps(model), "processor": world.processor,
            "versions": json.dumps({**job.versions, "mpi": world.library})}


def _rank_row(rank: int, replica: int, tp_rank: int, weight_bytes: int, split: setup.Split,
              placement: affinity.Placement, job: Job, settings: RunConfig) -> dict[str, Any]:
    """One row of /ranks; ``replica`` -1 for an idle rank."""
    place = placement.table[rank]
    row = {"rank": rank, "host": place["host"], "cores": str(place["cores"]), "numa": str(place["NUMA domain"]),
           "threads": place["threads"], "replica": replica, "tp_rank": tp_rank, "weight_bytes": weight_bytes,
           "kv_bytes_per_token": 0}
    nothing = Span(0, 0)
    spans = dict.fromkeys(("head", "kv_head", "column", "expert", "vocab"), nothing)
    if replica >= 0:
        share = split.partition.shares[tp_rank]
        spans = {"head": share.heads, "kv_head": share.kv_heads, "column": share.columns,
                 "expert": share.experts, "vocab": share.vocab}
        row["kv_bytes_per_token"] = round(_cache_token_bytes(settings, job, split, tp_rank))
    for name, span in spans.items():
        row[f"{name}_start"], row[f"{name}_stop"] = span.start, span.stop
    return row
