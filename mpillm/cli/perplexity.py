"""``mpillm perplexity``: how well a model predicts a text, by the batch engine's prefill alone."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpillm import config
from mpillm.cli import options
from mpillm.cli.report import announce_rules
from mpillm.errors import InputError, OutputError, ResourceError, UsageError
from mpillm.machine.launch import is_first

if TYPE_CHECKING:
    from mpillm.cli.run import Job
    from mpillm.collectives import Replica, World
    from mpillm.engine.score import Sums
    from mpillm.engine.setup import LoadedModel, Split

LOG = logging.getLogger("mpillm.perplexity")
LONGEST = 2048          # tokens of the default window
ROUND = 16              # windows that a replica is given at once: bounds what the ranks hold of the text
EXAMPLES = """\
examples:
  mpillm perplexity --text wiki.txt
  mpirun -n 4 mpillm perplexity --text wiki.txt --window 2048 --stride 512 --json wiki.json
  mpirun -n 32 mpillm perplexity --text wiki.txt --model Llama-3.3-70B-Instruct/ --weights q8_0 --layout 4x8

Window i begins at token i x stride. Every token but the first is scored once, with at least window - stride tokens
before it (fewer only where the text begins). The text is tokenized as a prompt is: where the tokenizer adds a start
token, it stands once, before the text, and is not scored. docs/perplexity.md has the formulas.
"""


@dataclass
class Text:
    """What rank 0 alone has: the tokens of the whole text, and where the figures go."""

    ids: array = field(default_factory=lambda: array("i"))
    nbytes: int = 0
    sha256: str = ""
    start_tokens: int = 0


@dataclass
class Plan:
    """What all ranks know of the text."""

    tokens: int
    window: int
    stride: int
    windows: int


def parser() -> argparse.ArgumentParser:
    """The parser of ``mpillm perplexity``."""
    p = options.Parser(prog="mpillm perplexity", description="Perplexity of a text file, in windows over MPI ranks.",
                       epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
                       argument_default=argparse.SUPPRESS, allow_abbrev=False)
    text, memory, split = (p.add_argument_group(title) for title in (
        "the text", "the model in memory", "the split over ranks"))
    text.add_argument("--text", metavar="FILE", required=True, help="UTF-8 text")
    text.add_argument("--model", metavar="PATH", help="as for run: a Hugging Face folder or GGUF file")
    text.add_argument("--window", type=int, metavar="N",
                      help=f"tokens that the model sees at once (default: its positions, at most {LONGEST})")
    text.add_argument("--stride", type=int, metavar="N",
                      help="tokens from one window to the next, below --window (default: half of it)")
    text.add_argument("--parse-special", action="store_true",
                      help="special tokens written out in the text are meant (default: they are text)")
    text.add_argument("--json", metavar="FILE", help="write the figures, and what they depend on, as a JSON object")
    options.memory_options(memory)
    memory.add_argument("--prefill-chunk", type=int, metavar="N", help="tokens in a step (default 512)")
    options.split_options(split)
    p.add_argument("--progress-every", type=float, metavar="S", help="seconds between progress lines (default 10)")
    p.add_argument("--log-level", choices=("debug", "info", "warning", "error"), help="default info")
    return p


def main(argv: list[str]) -> int:
    """Score the text on all ranks, print on rank 0; the exit code. Raises MpillmError."""
    if "-h" in argv or "--help" in argv:
        if is_first(os.environ):
            parser().print_help()
        return 0
    from mpillm import collectives, log

    world = collectives.start()
    clock = time.perf_counter()
    given, settings = world.agree(lambda: parse(argv))
    log.setup(world.rank, world.host, settings.log_level)
    text = Text()
    job, plan = world.agree(lambda: prepare(given, settings, text))
    _work(world, given, settings, job, plan, text, clock)
    return 0


def parse(argv: list[str]) -> tuple[dict[str, Any], config.RunConfig]:
    """The command's own options, and those that it shares with ``run``. Raises UsageError, OutputError."""
    found = vars(parser().parse_args(argv))
    given = {name: found.pop(name, None) for name in ("text", "window", "stride", "json")}
    settings = config.resolve({}, {"prompts": given["text"], **found})
    # Two windows fill a step when one ends in it; more would take memory alone
    window = given["window"] or LONGEST
    return check(given), dataclasses.replace(settings, max_batch=1 + -(-settings.chunk // max(window, 1)))


def check(given: dict[str, Any]) -> dict[str, Any]:
    """The options that stand for themselves are possible. Raises UsageError, OutputError."""
    for name in ("window", "stride"):
        if given[name] is not None and given[name] < (2 if name == "window" else 1):
            raise UsageError(f"--{name} {given[name]} is too small: give a number of tokens")
    path = given["json"]
    if path is not None:
        folder = os.path.dirname(os.path.abspath(path))
        if os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK):
            raise OutputError(f"{path} cannot be written: name a file in a folder that exists and is yours")
        if os.path.exists(path) and (not os.path.isfile(path) or os.path.samefile(path, given["text"])):
            raise OutputError(f"{path} may not be replaced: name another file")
    return given


def prepare(given: dict[str, Any], settings: config.RunConfig, text: Text) -> tuple[Job, Plan]:
    """On rank 0: model and windows are usable; fills ``text``. Raises MpillmError."""
    from mpillm import io
    from mpillm.cli import run
    from mpillm.engine import score, setup
    from mpillm.models.parse import open_model

    path = io.find_model(settings.model)
    model, checkpoint = open_model(path, settings.tie_embeddings)
    settings, model = setup.decided(settings, model)
    with contextlib.closing(checkpoint):
        for line in checkpoint.warnings:
            LOG.warning("%s", line)
        for line in checkpoint.notes:
            LOG.info("%s", line)
        tokenizer = run.open_tokenizer(path, checkpoint, settings)
    if tokenizer is None:
        raise UsageError(f"{path} has no tokenizer: text cannot be scored; use a run with prompt_token_ids, "
                         "prompt_logprobs 0 and max_tokens 0")
    window = min(model.context, LONGEST) if given["window"] is None else given["window"]
    stride = max(1, window // 2) if given["stride"] is None else given["stride"]
    if window > model.context:
        raise UsageError(f"--window {window} is beyond the model's {model.context} positions")
    if stride >= window:
        raise UsageError(f"--stride {stride} must be below --window {window}: every scored token needs one before it")
    read(settings, tokenizer, text)
    tokens = len(text.ids)
    if not (windows := score.count_windows(tokens, window, stride)):
        raise InputError(f"{settings.prompts} has {tokens} token(s): a score needs two")
    # The context bounds the cache that is taken
    job = run.Job(path, model, "", min(window, tokens), frozenset(), int(time.time()), run.versions(), 0,
                  settings)
    return job, Plan(tokens, window, stride, windows)


def read(settings: config.RunConfig, tokenizer: Any, text: Text) -> None:
    """Tokens, size and checksum of the text, a piece at a time: 4 bytes a token stay. Raises InputError."""
    from mpillm import io

    begun, bare = (tokenizer.encode("x", add_special=add, parse_special=False) for add in (True, False))
    text.start_tokens = next(i for i in range(len(begun)) if begun[i:i + len(bare)] == bare)
    text.ids.extend(begun[:text.start_tokens])
    digest = hashlib.sha256()
    for piece in io.text_pieces(settings.prompts):
        data = piece.encode()
        digest.update(data)
        text.nbytes += len(data)
        text.ids.extend(tokenizer.encode(piece, add_special=False, parse_special=settings.parse_special))
    text.sha256 = digest.hexdigest()


def _work(world: World, given: dict[str, Any], settings: config.RunConfig, job: Job, plan: Plan, text: Text,
          clock: float) -> None:
    """Everything after the checks, on every rank."""
    from mpillm import kernels
    from mpillm.cli import run
    from mpillm.engine import cost, layout, setup
    from mpillm.models.parse import open_checkpoint
    from mpillm.models.weights import Weights

    weights = Weights(world.agree_all(lambda: open_checkpoint(job.path)), job.model)
    free = min(world.allgather(world.free_nbytes()))
    placement = world.place(settings.threads_per_rank, settings.pin)
    kernels.set_threads(placement.threads)
    kernels.prepare_threads(world.crowded)
    work = cost.Work(plan.windows, min(plan.window, plan.tokens), 0, settings.max_batch, settings.chunk)
    choice = layout.choose(world, settings, job.model, weights, free, placement.threads, lambda: work)
    split = world.agree(lambda: setup.choose_split(settings, job.model, weights, world.size, free, choice))
    replica = world.split(split.layout.tp, split.layout.dp, settings.collectives, wire=settings.wire,
                          timeout=settings.exchange_timeout)
    for line in placement.warnings if world.rank == 0 else ():
        LOG.warning("%s", line)
    LOG.info("%s", choice.line())
    if world.rank == 0:
        announce_rules(split.rules)
    LOG.info("text: %d tokens in %d window(s) of %d, stride %d", plan.tokens, plan.windows, plan.window, plan.stride)
    run.compile_kernels(world, settings, job.model, weights)
    model = run.load(world, settings, job, split, replica, weights)
    found = world.gather(score_share(world, settings, job, plan, text, split, replica, model, clock))
    world.agree(lambda: None if found is None else report(
        given, settings, job, plan, text, split, found, {"seconds": time.perf_counter() - clock,
                                                         "wire": world.wire, "processor": world.processor}))


def score_share(world: World, settings: config.RunConfig, job: Job, plan: Plan, text: Text, split: Split,
                replica: Replica | None, model: LoadedModel | None, clock: float) -> tuple[list[Sums], str | None]:
    """This replica's windows, in rounds that rank 0 deals out; their sums on its root, and what failed."""
    from mpillm import kernels
    from mpillm.engine.blocks import BlockLedger, blocks_for
    from mpillm.engine.generate import BatchLoop, Ends
    from mpillm.engine.kvcache import share_cache
    from mpillm.engine.replica import cache_blocks
    from mpillm.engine.sampling import Sampler
    from mpillm.engine.scheduler import Limits, Scheduler
    from mpillm.engine.score import ScoreSink, window_at

    dp = split.layout.dp
    sink, ends = ScoreSink(plan.tokens, plan.window, plan.stride), Ends(frozenset(), job.context)
    cache, said = None, time.perf_counter()
    for begin in range(0, plan.windows, dp * ROUND):
        dealt: list[list[Any]] = [[] for _ in range(world.size)]
        for index in range(begin, min(begin + dp * ROUND, plan.windows)) if world.rank == 0 else ():
            made = window_at(index, plan.tokens, plan.window, plan.stride).request(text.ids, job.model.name)
            for rank in range(index % dp * split.layout.tp, (index % dp + 1) * split.layout.tp):
                dealt[rank].append(made)
        world.barrier_quiet()
        requests = world.scatter(dealt)
        if replica is None or model is None:
            continue
        if cache is None:
            share = split.partition.shares[replica.rank]
            blocks = cache_blocks(world, settings, job, split, replica)
            cache = share_cache(settings, job.model, share, blocks)
            sampler = Sampler(replica, share.vocab.start, max(s.vocab.size for s in split.partition.shares))
        scheduler = Scheduler(BlockLedger(blocks), Limits(settings.max_batch, settings.chunk, kernels.BLOCK),
                              context_blocks=blocks_for(job.context, kernels.BLOCK))
        loop = BatchLoop(model.model, cache, scheduler, sampler, replica, sink, ends, keep_logits="none",
                         text_stream=lambda sequence: None, replica=replica.index, clock_start=clock)
        loop.admit(requests)
        loop.run()
        if world.rank == 0 and time.perf_counter() - said >= settings.progress_every:
            said = time.perf_counter()
            LOG.info("%d of %d windows, perplexity of replica 0 so far %.4g", min(begin + dp * ROUND, plan.windows),
                     plan.windows, sink.so_far())
    return sink.sums, sink.failure


def report(given: dict[str, Any], settings: config.RunConfig, job: Job, plan: Plan, text: Text, split: Split,
           found: list[tuple[list[Sums], str | None]], more: dict[str, Any]) -> None:
    """On rank 0: the figures, printed and written. Raises ResourceError, OutputError."""
    from mpillm import __version__, kernels
    from mpillm.engine import score

    for failure in (failure for _, failure in found if failure is not None):
        raise ResourceError(failure)
    sums = [own for part, _ in found for own in part]
    assert sorted(s.index for s in sums) == list(range(plan.windows)), "every window is scored once"
    result = score.perplexity(sums, text.nbytes)
    spread = "" if result.perplexity_stderr is None else f" +- {result.perplexity_stderr:.4f}"
    print(f"perplexity {result.perplexity:.4f}{spread} ({result.tokens} tokens scored, window {plan.window}, "
          f"stride {plan.stride})\nbits per byte {result.bits_per_byte:.4f} ({text.nbytes} bytes)")
    if given["json"] is None:
        return
    figures = {name: value if value is None or math.isfinite(value) else None
               for name, value in dataclasses.asdict(result).items()}
    record = {
        **figures, "window": plan.window, "stride": plan.stride, "windows": plan.windows, "bytes": text.nbytes,
        "start_tokens": text.start_tokens, "text": os.path.abspath(settings.prompts), "text_sha256": text.sha256,
        "model": os.path.abspath(job.path), "weight_formats": split.formats, "kv_type": settings.kv_type,
        "kv_type_v": settings.kv_type_v, "kv_mode": settings.kv_mode,
        "collectives": settings.collectives, "instructions": kernels.tier(),
        "fast": settings.fast, "layout": split.choice.to_dict(), "mpillm_version": __version__, **more}
    target = os.path.realpath(given["json"])
    try:
        with open(target + ".new", "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1, allow_nan=False)
            file.write("\n")
        os.replace(target + ".new", target)
    except OSError as error:
        raise OutputError(f"{given['json']} cannot be written: {error.strerror}") from None
