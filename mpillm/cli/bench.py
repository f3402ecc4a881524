"""``mpillm bench``: the limits of this machine, and a model's speed against them."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from typing import TYPE_CHECKING, Any, NoReturn

from mpillm import config
from mpillm.cli.options import weights
from mpillm.cli.report import announce_rules, render
from mpillm.errors import OutputError, ResourceError, UsageError
from mpillm.machine.launch import is_first

if TYPE_CHECKING:
    from mpillm.bench.model import Loaded
    from mpillm.collectives import World
    from mpillm.engine.probe import Ranks

LOG = logging.getLogger("mpillm.bench")
EXAMPLES = """\
examples:
  mpillm bench machine
  mpirun -n 2 mpillm bench machine --json machine.json
  mpillm bench model --batch 1,8,32 --depth 0,4096 --plot speed.png
  mpirun -n 32 mpillm bench model --model Llama-3.3-70B-Instruct/ --threads-per-rank 4 --json speed.json

Rates are decimal: 1 GB/s is 1e9 bytes/s. docs/performance.md says what is measured and how.
"""


class _Parser(argparse.ArgumentParser):
    """Raises UsageError instead of leaving, so that one rank alone prints and all leave alike."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help lists the options)")


def parser() -> argparse.ArgumentParser:
    """The parser of ``mpillm bench``."""
    p = _Parser(prog="mpillm bench", description="Measure the machine's limits, or a model's speed against them.",
                epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    kinds = p.add_subparsers(dest="kind", metavar="machine|model", required=True)
    machine = kinds.add_parser("machine", help="read bandwidth, arithmetic peak, sums over ranks", allow_abbrev=False)
    model = kinds.add_parser("model", help="prefill and decode tokens/s of a model", allow_abbrev=False)
    for kind in (machine, model):
        kind.add_argument("--threads-per-rank", type=_positive, metavar="N",
                          help="threads of each rank (default: the cores that it was given)")
        kind.add_argument("--no-pin", dest="pin", action="store_false",
                          help="leave ranks unbound where mpirun left them so")
        kind.add_argument("--buffer", type=_size, metavar="SIZE",
                          help="bytes that each rank reads to measure the bandwidth (default: 4 times the last-level "
                               "cache over the node's ranks, 1 GiB at least)")
        kind.add_argument("--json", metavar="FILE", help="write the rows as a JSON list")
        kind.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    machine.add_argument("--seconds", type=_seconds, default=0.5, metavar="S",
                         help="of each measurement (default 0.5)")
    _model_options(model)
    return p


def _model_options(model: argparse.ArgumentParser) -> None:
    model.add_argument("--model", metavar="PATH", help="as for run: a Hugging Face folder or GGUF file")
    model.add_argument("--weights", type=weights, metavar="FORMAT|RECIPE", default="auto",
                       help="as for run (default auto)")
    model.add_argument("--kv-type", choices=config.KV_TYPES, default="bf16", help="as for run (default bf16)")
    model.add_argument("--kv-type-v", choices=config.KV_TYPES, default="", help="as for run (default: as --kv-type)")
    model.add_argument("--kv-mode", choices=config.KV_MODES, default="redundant", help="as for run")
    model.add_argument("--collectives", choices=config.COLLECTIVES, default=config.COLLECTIVES[0], help="as for run")
    model.add_argument("--overlap", choices=config.OVERLAPS, default=config.OVERLAPS[0], help="as for run")
    model.add_argument("--fast", action="store_true", help="as for run")
    model.add_argument("--mla", choices=config.MLA, default="auto", help="as for run")
    model.add_argument("--moe-split", choices=config.MOE_SPLITS, default="auto", help="as for run")
    model.add_argument("--prefill-chunk", type=_positive, metavar="N", help="as for run")
    model.add_argument("--batch", type=_positives, default=[1, 8, 32], metavar="N,N",
                       help="sequences that run together (default 1,8,32)")
    model.add_argument("--prompt-batch", type=_positives, metavar="N,N",
                       help="the same of the prefill tests (default: those of --batch)")
    model.add_argument("--depth", type=_counts, default=[0, 4096, 16384], metavar="N,N",
                       help="positions in the cache before the test (default 0,4096,16384)")
    model.add_argument("--prompt", type=_count, default=512, metavar="N",
                       help="tokens to prefill (default 512, 0: none)")
    model.add_argument("--tokens", type=_count, default=128, metavar="N",
                       help="tokens to generate (default 128, 0: none)")
    model.add_argument("--repetitions", type=_positive, default=3, metavar="N", help="of each test (default 3)")
    model.add_argument("--seconds", type=_seconds, default=60.0, metavar="S",
                       help="that a test may take: slow ones are repeated less, then cut (default 60)")
    model.add_argument("--plot", metavar="FILE", help="draw tokens/s over batch and depth with the machine's limit")


def _size(text: str) -> int:
    try:
        size = config.parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is less than 1MiB")
    return size


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part.strip()) for part in text.split(",")]


def _positives(text: str) -> list[int]:
    return [_positive(part.strip()) for part in text.split(",")]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def bench(argv: list[str]) -> int:
    """Measure on all ranks, print on rank 0; the exit code. Raises MpillmError."""
    if "-h" in argv or "--help" in argv:
        if is_first(os.environ):
            parser().parse_args(argv)
        return 0
    from mpillm import collectives, log

    world = collectives.start()
    given = world.agree(lambda: _checked(parser().parse_args(argv)))
    log.setup(world.rank, world.host, given.log_level)
    rows = _machine(world, given) if given.kind == "machine" else _model(world, given)
    world.agree(lambda: _write(rows, given))
    return 0


def _checked(given: argparse.Namespace) -> argparse.Namespace:
    """On rank 0, before anything is measured. Raises UsageError, OutputError."""
    if given.kind == "model" and not given.prompt + given.tokens:
        raise UsageError("--prompt 0 and --tokens 0 leave nothing to measure: give one of them")
    for path in filter(None, (given.json, getattr(given, "plot", None))):
        folder = os.path.dirname(os.path.abspath(path))
        if os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK):
            raise OutputError(f"{path} cannot be written: name a file in a folder that exists and is yours")
        if os.path.exists(path) and not os.path.isfile(path):
            raise OutputError(f"{path} is not a regular file: name one that may be replaced")
    if getattr(given, "plot", None):
        from mpillm.bench import plot

        plot.check(given.plot)
    return given


def _ranks(world: World, given: argparse.Namespace, tp: int) -> tuple[Ranks, Any]:
    """Take the cores; the ranks of one replica of ``tp``, and the placement."""
    from mpillm import kernels
    from mpillm.engine.probe import Ranks
    from mpillm.jit import measure

    measure.tiles_permitted()                # asked before threads are started
    placement = world.place(given.threads_per_rank, given.pin)
    for line in placement.warnings:
        LOG.warning("%s", line)
    kernels.set_threads(placement.threads)
    replica = world.split(tp, 1, getattr(given, "collectives", config.COLLECTIVES[0]))
    return Ranks(world, replica, placement.threads), placement


def _title(world: World, threads: int) -> str:
    return f"{world.processor}, {world.size} rank(s) x {threads} thread(s)"


def _machine(world: World, given: argparse.Namespace) -> list[dict[str, Any]]:
    from mpillm.bench.machine import measure_machine

    ranks, _ = _ranks(world, given, world.size)
    rows = measure_machine(ranks, given.seconds, given.buffer)
    if world.rank == 0:
        print(render(f"{_title(world, ranks.threads)}: all ranks together",
                     ["test", "size", "threads", "best", "median", ""], [_machine_line(row) for row in rows],
                     left=("test", "")))
    return rows


def _machine_line(row: dict[str, Any]) -> list[str]:
    size = config.format_size(row["nbytes"]) if "nbytes" in row else ""
    if row["unit"] == "s":
        return [row["test"], size, row["n_threads"], f"{1e6 * row['best']:.1f}", f"{1e6 * row['median']:.1f}",
                f"us, {row['bytes_per_s'] / 1e9:.2f} GB/s"]
    unit = "GB/s" if row["unit"] == "bytes/s" else "GFLOP/s" if "int8" not in row["test"] else "Gop/s"
    return [row["test"], size, row["n_threads"], f"{row['best'] / 1e9:.1f}", f"{row['median'] / 1e9:.1f}", unit]


def _model(world: World, given: argparse.Namespace) -> list[dict[str, Any]]:
    from mpillm.bench import model as measuring

    loaded = _load(world, given)
    tests = measuring.tests_of(given.prompt_batch or given.batch, given.batch, given.depth, given.prompt, given.tokens)
    beyond = [depth for depth in given.depth if depth + max(given.prompt, given.tokens) > loaded.config.context]
    if beyond and world.rank == 0:
        LOG.warning("at depth %s the tests go beyond the model's %d positions: measured all the same, texts would be "
                    "noise", ", ".join(map(str, beyond)), loaded.config.context)
    rows = []
    for row in measuring.measure_model(loaded, tests, given.repetitions, given.seconds, given.buffer):
        rows.append(row)
        LOG.info("%s, batch %d: %.1f tokens/s", row["test"], row["batch"], row["avg_ts"])
    if world.rank == 0 and rows:
        print(model_table(rows, f"{loaded.name}, {_title(world, loaded.ranks.threads)}"))
    return rows


def _load(world: World, given: argparse.Namespace) -> Loaded:
    """The model over all ranks, by the code of ``mpillm run``. Raises MpillmError."""
    from mpillm import io, kernels
    from mpillm.bench.figures import costs
    from mpillm.bench.model import Loaded
    from mpillm.cli import run
    from mpillm.engine import setup
    from mpillm.models.load import memory_format
    from mpillm.models.load_experts import routed_bytes
    from mpillm.models.parse import open_checkpoint, open_model
    from mpillm.models.weights import Weights

    settings = config.RunConfig(
        prompts="", model=given.model, weights=given.weights, kv_type=given.kv_type, kv_type_v=given.kv_type_v,
        kv_mode=given.kv_mode, mla=given.mla, moe_split=given.moe_split, collectives=given.collectives,
        overlap=given.overlap, fast=given.fast,
        prefill_chunk=given.prefill_chunk, tp=world.size, max_batch=max(given.batch))

    def job() -> run.Job:
        path = io.find_model(given.model)
        model, checkpoint = open_model(path, settings.tie_embeddings)
        checkpoint.close()
        own, model = setup.decided(settings, model)
        return run.Job(path, model, "", model.context, frozenset(), int(time.time()), {}, 0, own)

    found = world.agree(job)
    settings = found.settings
    weights = world.agree_all(lambda: Weights(open_checkpoint(found.path), found.model))
    free = min(world.allgather(world.free_nbytes()))
    split = world.agree(lambda: setup.choose_split(settings, found.model, weights, world.size, free))
    if world.rank == 0:
        announce_rules(split.rules)
    ranks, _ = _ranks(world, given, world.size)
    kernels.prepare_threads(world.crowded)
    run.compile_kernels(world, settings, found.model, weights)
    model = run.load(world, settings, found, split, ranks.replica, weights)
    assert model is not None, "every rank holds a part"
    share = split.partition.shares[world.rank]
    table = memory_format(weights, ["model.embed_tokens.weight"], settings.weights)
    embedding = kernels.packed_nbytes(table, share.vocab.size, found.model.hidden)
    routed = routed_bytes(found.model, weights, share, settings.weights)
    return Loaded(ranks, settings, found.model, split, model, costs(
        found.model, share, model.nbytes, embedding, setup.cache_block_bytes(settings, found.model, split, world.rank),
        kernels.BLOCK * split.partition.places, routed), "+".join(split.formats), found.model.name)


def model_table(rows: list[dict[str, Any]], title: str) -> str:
    """The rows of ``bench model`` for people."""
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.0f} %"

    lines = [[row["test"], row["batch"], row["weights"], f"{row['avg_ts']:.1f}", f"{row['stddev_ts']:.1f}",
              config.format_size(row["bytes_per_token"]), percent(row["bandwidth_fraction"]),
              percent(row["peak_fraction"]), percent(row["comm_fraction"]), percent(row["python_fraction"]),
              _families(row["family_seconds"])] for row in rows]
    first = rows[0]
    limit = (f"limits: {first['bandwidth'] / 1e9:.1f} GB/s read, {first['peak'] / 1e9:.0f} G operations/s "
             f"({first['peak_of']}), measured again for each test")
    return render(f"{title}\n{limit}", ["test", "batch", "weights", "tokens/s", "+-", "bytes/token", "of bandwidth",
                                        "of peak", "exchanges", "Python", "kernels' time"], lines,
                  left=("test", "weights", "kernels' time"))


def _families(seconds: dict[str, float]) -> str:
    total = sum(seconds.values())
    return ", ".join(f"{name} {100 * spent / total:.0f} %" for name, spent in seconds.items() if spent > 0.005 * total)


def _write(rows: list[dict[str, Any]], given: argparse.Namespace) -> None:
    """On rank 0: the files that were asked for. Raises OutputError, and ResourceError when nothing was measured."""
    if not rows:
        raise ResourceError("no test fits the memory: give smaller --batch, --depth, --prompt or --tokens")
    try:
        if given.json:
            target = os.path.realpath(given.json)       # a link stays a link
            with open(target + ".new", "w", encoding="utf-8") as file:
                json.dump(rows, file, indent=1)
                file.write("\n")
            os.replace(target + ".new", target)
        if getattr(given, "plot", None):
            from mpillm.bench import plot

            plot.draw(rows, given.plot)
    except OSError as error:
        raise OutputError(f"{error.filename or given.json} cannot be written: {error.strerror}") from None
