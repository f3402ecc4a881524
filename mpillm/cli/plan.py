"""``mpillm plan``: what each rank of a job would hold, and how fast it would be, from config.json alone."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mpillm import config
from mpillm.cli.options import weights
from mpillm.config import format_size
from mpillm.errors import OutputError, ResourceError, UsageError
from mpillm.machine.launch import is_first

if TYPE_CHECKING:
    from mpillm.engine.cost import Machine
    from mpillm.engine.estimate import Asked, Mode, Planned, Subject

EXAMPLES = """\
examples:
  mpillm plan --model examples/models/Llama-3.3-70B --ranks 32 --kv-mode sharded --memory-per-rank 16GiB
  mpillm plan --model examples/models/DeepSeek-V3 --ranks 64 --kv-mode allgather --context 32768 --batch 16
  mpirun -n 2 mpillm bench machine --json bench.json
  mpillm plan --model SmolLM2-135M.gguf --ranks 8 --machine bench.json --json plan.json --plot plan.png

Nothing is started and no weights are read. The exit code is 6 where --memory-per-rank does not suffice.
docs/planning.md says what the figures mean.
"""
SIZES_SHOWN = 8       # numbers of ranks in the table
MOST_RANKS = 8192     # each rank is counted by itself, which takes time


class _Parser(argparse.ArgumentParser):
    """Raises UsageError instead of leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help lists the options)")


def parser() -> argparse.ArgumentParser:
    """The parser of ``mpillm plan``."""
    p = _Parser(prog="mpillm plan", description="Memory, traffic and speed of a job before it is queued.",
                epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--model", metavar="PATH",
                   help="config.json, a folder with one, or a GGUF file, of which the header is read (default: as run)")
    p.add_argument("--ranks", type=_positive, required=True, metavar="N", help="ranks of the job")
    p.add_argument("--ranks-per-node", type=_positive, metavar="M",
                   help="ranks that share a node's bandwidth and peak (default: those of --machine, else 1)")
    p.add_argument("--tp", type=_positive, metavar="T", help="ranks of a replica (default: all)")
    p.add_argument("--context", type=_positive, metavar="C", help="positions of each sequence (default 4096)")
    p.add_argument("--batch", type=_positive, default=32, metavar="B",
                   help="sequences that a replica runs together (default 32)")
    p.add_argument("--prefill-chunk", type=_positive, metavar="N", help="as for run (default 512; --mla auto: 4096)")
    p.add_argument("--threads-per-rank", type=_positive, default=1, metavar="T",
                   help="each has some scratch memory (default 1)")
    p.add_argument("--memory-per-rank", type=_size, metavar="SIZE", help="bytes that a rank has, such as 16GiB")
    p.add_argument("--weights", type=weights, metavar="FORMAT|RECIPE", default="auto",
                   help="in memory (default auto: as the model states them); a recipe as for run")
    p.add_argument("--tie-embeddings", action="store_true", help="as for run")
    p.add_argument("--kv-mode", choices=config.KV_MODES, default="redundant", help="as for run")
    p.add_argument("--moe-split", choices=config.MOE_SPLITS, default="auto", help="as for run")
    p.add_argument("--kv-type", choices=config.KV_TYPES, default="bf16", help="as for run (default bf16)")
    p.add_argument("--kv-type-v", choices=config.KV_TYPES,
                   help="of values where they are apart: not in --mla 2 and 3 (default: --kv-type)")
    p.add_argument("--mla", choices=("auto", "0", "1", "2", "3"), default="auto",
                   help="how latent attention caches (default auto: 3; where it is sharded 2)")
    p.add_argument("--attention-scratch", type=_size, metavar="SIZE", default=config.RunConfig.attention_scratch,
                   help="as for run (default 64MiB)")
    p.add_argument("--machine", metavar="FILE", help="what `mpillm bench machine --json FILE` measured on one node")
    p.add_argument("--bandwidth", type=_number, metavar="GB/s", help="what a node reads from memory")
    p.add_argument("--peak", type=_number, metavar="GFLOP/s", help="a node's arithmetic peak in the weights' format")
    p.add_argument("--latency", type=_number, metavar="US", help="of a message between ranks (default 0)")
    p.add_argument("--network", type=_number, metavar="GB/s",
                   help="what a node sends (default: messages cost their latency only)")
    p.add_argument("--json", metavar="FILE", help="write all figures as JSON")
    p.add_argument("--plot", metavar="FILE", help="draw memory and speed over the number of ranks")
    return p


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:12]) <= 1 << 30:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from 1 to {1 << 30}")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0")
    return value


def _size(text: str) -> int:
    try:
        return config.parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def plan(argv: list[str]) -> int:
    """Print, write and draw the plan; the exit code. Raises MpillmError, ResourceError where it does not fit."""
    given = parser().parse_args(argv)
    if not is_first(os.environ):
        return 0
    _check(given)
    from mpillm.cli import plan_tables as tables
    from mpillm.engine import estimate
    from mpillm.engine.subject import open_subject

    subject, source = open_subject(given.model, given.weights, given.tie_embeddings)
    mode = _mode(given, subject)
    chosen = subject.plan(_asked(given, subject, mode), given.tp or given.ranks, mode)
    table = _table(subject, given, mode)
    machine = _machine(given, subject, [planned.tp for planned in table])
    speeds = None if machine is None else [
        estimate.speed(planned, machine, given.ranks // planned.tp) for planned in table]
    found = tables.to_json(subject, source, given, chosen, table, speeds, _types(subject, chosen.asked, chosen.tp))
    own = None if machine is None else estimate.speed(chosen, machine, given.ranks // chosen.tp)
    found["predicted"] = None if own is None else own.to_dict()
    print(tables.text(found))
    _write(given, found)
    if given.memory_per_rank is not None and chosen.needed_bytes > given.memory_per_rank:
        raise ResourceError(_too_small(given.memory_per_rank, chosen, table))
    return 0


def _check(given: argparse.Namespace) -> None:
    """What can be refused before the model is opened. Raises UsageError, OutputError."""
    if given.ranks > MOST_RANKS:
        raise UsageError(f"--ranks {given.ranks}: no more than {MOST_RANKS} are planned")
    if given.tp is not None and given.tp > given.ranks:
        raise UsageError(f"--tp {given.tp} does not go into {given.ranks} ranks: use 1 to {given.ranks}")
    if given.machine is not None and (given.bandwidth or given.peak):
        raise UsageError("--machine has bandwidth and peak: leave out --bandwidth and --peak")
    if given.bandwidth is None and given.machine is None and (given.peak or given.latency or given.network):
        raise UsageError("--peak, --latency and --network predict nothing without --bandwidth or --machine")
    for path in filter(None, (given.json, given.plot)):
        folder = os.path.dirname(os.path.abspath(path))
        if os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK):
            raise OutputError(f"{path} cannot be written: name a file in a folder that exists and is yours")
    if given.plot:
        from mpillm.bench import plot

        plot.check(given.plot)


def _asked(given: argparse.Namespace, subject: Subject, mode: Mode) -> Asked:
    from mpillm.engine.estimate import Asked

    if given.context is not None and given.context > subject.context:
        raise UsageError(f"--context {given.context} is beyond the model's {subject.context} positions")
    context = given.context or min(4096, subject.context)
    return Asked(context, given.batch, _chunk(given, subject, mode), given.threads_per_rank, given.weights,
                 given.kv_type, given.kv_type_v or "", given.moe_split, given.attention_scratch)


def _chunk(given: argparse.Namespace, subject: Subject, mode: Mode) -> int:
    """Rows of a prefill step of a run in this mode: what --mla auto chooses may have its own."""
    from mpillm.engine.setup import decided

    run = config.RunConfig("", kv_mode=mode.kv_mode, prefill_chunk=given.prefill_chunk)
    chosen, model = decided(run, subject.model)
    return chosen.chunk if given.mla == "auto" and model.mla == mode.mla else run.chunk


def _mode(given: argparse.Namespace, subject: Subject) -> Mode:
    from mpillm.engine.estimate import Mode
    from mpillm.engine.setup import decided

    run = config.RunConfig("", mla=given.mla, kv_mode=given.kv_mode, kv_type=given.kv_type,
                           kv_type_v=given.kv_type_v or given.kv_type)
    model = decided(run, subject.model)[1]
    return Mode(given.kv_mode, model.mla if model.latent else None)


def _table(subject: Subject, given: argparse.Namespace, mode: Mode) -> list[Planned]:
    """Powers of two up to the ranks of a replica and these, in all modes that differ and the one that is asked for."""
    most = given.tp or given.ranks
    sizes = sorted({most, *(1 << i for i in range(most.bit_length()) if 1 << i <= most)})[-SIZES_SHOWN:]
    modes = {one: _asked(given, subject, one) for one in [*subject.modes(), mode]}
    found = [subject.plan(asked, tp, one) for tp in sizes for one, asked in modes.items()]
    return [planned for planned in found if planned.mode.kv_mode == "redundant" or not planned.alike]


def _types(subject: Subject, asked: Asked, tp: int) -> dict[str, dict[str, int | None]]:
    """Bytes of the cache for a position on the fullest rank, by mode and type; None: the type does not fit."""
    import dataclasses

    found: dict[str, dict[str, int | None]] = {}
    for mode in subject.modes():
        row: dict[str, int | None] = {}
        for kind in config.KV_TYPES:
            try:
                planned = subject.plan(dataclasses.replace(asked, kv_type=kind, kv_type_v=kind), tp, mode)
                row[kind] = planned.cache_per_token
            except UsageError:
                row[kind] = None
        found[mode.name] = row
    return found


def _machine(given: argparse.Namespace, subject: Subject, sizes: Sequence[int]) -> Machine | None:
    """What a rank can do, as given or measured; None where nothing is known. Raises UsageError."""
    from mpillm.engine import estimate
    from mpillm.engine.cost import Machine

    network = None if given.network is None else 1e9 * given.network / (given.ranks_per_node or 1)
    points = estimate.exchange_figures(sorted(set(sizes)), 1e-6 * (given.latency or 0.0), network)
    if given.machine is not None:
        from mpillm.engine.measured import read_machine

        found = read_machine(given.machine, subject.formats, given.ranks_per_node)
        return Machine(found.read, found.operations, points) if given.latency or given.network else found
    if given.bandwidth is None:
        return None
    share = given.ranks_per_node or 1
    peak = float("inf") if given.peak is None else 1e9 * given.peak / share
    return Machine(1e9 * given.bandwidth / share, peak, points)


def _too_small(memory: int, chosen: Planned, table: Sequence[Planned]) -> str:
    fit = [f"{p.mode.name} at {p.tp} ranks" for p in table if p.needed_bytes <= memory]
    remedy = f"these fit: {', '.join(fit[:4])}" if fit else \
        "none of the modes in the table fits: use more ranks, smaller --weights, a smaller --context or --batch"
    return (f"{chosen.mode.name} at {chosen.tp} ranks needs {format_size(chosen.needed_bytes)} on a rank, which has "
            f"{format_size(memory)}; {remedy}")


def _write(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """JSON and picture. Raises OutputError."""
    path = given.json
    try:
        if given.json:
            with open(given.json, "w", encoding="utf-8") as file:
                json.dump(found, file, indent=1)
                file.write("\n")
        if given.plot:
            from mpillm.bench import plot

            path = given.plot
            plot.draw_plan(found, given.plot)
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror or error}") from None
