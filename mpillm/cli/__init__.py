"""Sub-commands, one a file."""

from __future__ import annotations

import os
from collections.abc import Callable

from mpillm import __version__
from mpillm.errors import UsageError
from mpillm.machine.launch import is_first

HELP = """\
usage: mpillm COMMAND ...

Batch inference of large language models on CPU clusters, over MPI.

commands:
  run         the main job (also `python -m mpillm.main`): mpirun -n 32 mpillm run --prompts in.jsonl
  perplexity  how well a model predicts a text: mpirun -n 4 mpillm perplexity --text wiki.txt
  show        a short table of a run's results: mpillm show out.h5
  doctor      what a run would find on this machine, and what stands in its way
  bench       the machine's limits and a model's speed against them: mpillm bench machine | model
  plan        what ranks would hold and how fast they would be, before queuing: mpillm plan --model M --ranks 32
  split       one part of a prompts file, for an array of jobs: mpillm split --prompts in.jsonl --part 1/8 ..
  merge       their results as one file: mpillm merge --prompts in.jsonl --output all.results.jsonl p*.results.jsonl

`mpillm COMMAND --help` lists the options of a command, `mpillm --version` says which version this is.
"""
VERSION = "--version"


def _run(argv: list[str]) -> int:
    from mpillm.cli.run import run

    return run(argv)


def _show(argv: list[str]) -> int:
    from mpillm.cli.show import show

    return show(argv)


def _doctor(argv: list[str]) -> int:
    from mpillm.cli.doctor import doctor

    return doctor(argv)


def _bench(argv: list[str]) -> int:
    from mpillm.cli.bench import bench

    return bench(argv)


def _perplexity(argv: list[str]) -> int:
    from mpillm.cli.perplexity import main

    return main(argv)


def _plan(argv: list[str]) -> int:
    from mpillm.cli.plan import plan

    return plan(argv)


def _split(argv: list[str]) -> int:
    from mpillm.cli.merge import split

    return split(argv)


def _merge(argv: list[str]) -> int:
    from mpillm.cli.merge import merge

    return merge(argv)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "run": _run, "perplexity": _perplexity, "show": _show, "doctor": _doctor, "bench": _bench, "plan": _plan,
    "split": _split, "merge": _merge}


def command(argv: list[str]) -> int:
    """Run the sub-command that ``argv`` begins with; options alone are those of ``run``."""
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    first = is_first(os.environ)
    if argv and not argv[0].startswith("-"):
        error = UsageError(f"there is no command {argv[0]!r}: use one of {', '.join(COMMANDS)}")
        error.agreed, error.quiet = True, not first
        raise error
    if argv and argv[0] == VERSION:
        if first:
            print(f"mpillm {__version__}")
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        if first:
            print(HELP, end="")
        return 0 if argv else UsageError.exit_code
    return _run(argv)
