"""``mpillm split`` and ``mpillm merge``: a prompts file over an array of jobs, and their results as one file."""

from __future__ import annotations

import argparse
import os
import re
from typing import NoReturn

from mpillm.errors import InputError, UsageError
from mpillm.formats import merge as files
from mpillm.formats.jsonl import iterate_lines
from mpillm.machine.launch import is_first

SPLIT = """\
examples:
  mpillm split --prompts in.jsonl --part 3/8 --output in.3.jsonl

The part has every 8th prompt, from the 3rd on. Its other lines are blank, so that a line keeps its number, its
seed and its result. The parts of a run's results are put together by `mpillm merge`.
"""
MERGE = """\
examples:
  mpillm merge --output all.results.jsonl --prompts in.jsonl part.*.results.jsonl
  mpillm merge --output all.results.jsonl --match custom_id a.results.jsonl b.results.jsonl

With --prompts the results come in the order of the prompts, and every prompt must have one. Nothing is written
when a result is missing, stands there twice or belongs to no prompt. HDF5 files are not merged: each part keeps
its own.
"""


class _Parser(argparse.ArgumentParser):
    """Raises UsageError instead of leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help lists the options)")


def _parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    p = _Parser(prog=f"mpillm {name}", description=description, epilog=epilog, allow_abbrev=False,
                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--output", metavar="FILE", required=True, help="what is written")
    p.add_argument("--overwrite", action="store_true", help="replace an existing output")
    return p


def split_parser() -> argparse.ArgumentParser:
    """The parser of ``mpillm split``."""
    p = _parser("split", "Write one part of a prompts file.", SPLIT)
    p.add_argument("--prompts", metavar="FILE", required=True, help="JSONL, or gzip of it")
    p.add_argument("--part", metavar="I/N", required=True, type=_part, help="part I of N, from 1 on")
    return p


def merge_parser() -> argparse.ArgumentParser:
    """The parser of ``mpillm merge``."""
    p = _parser("merge", "Merge the results (JSONL) of several runs into one file.", MERGE)
    p.add_argument("parts", metavar="PART", nargs="+", help="results file of a run")
    p.add_argument("--prompts", metavar="FILE", help="the whole prompts file: its order, and all of its lines")
    p.add_argument("--match", choices=files.MATCHES, default="line",
                   help="a result is known by its line (default; parts from `mpillm split` keep it) or its custom_id")
    p.add_argument("--duplicates", choices=files.DUPLICATES, default="stop",
                   help="two results of one prompt: stop (default), or keep the one of the first or last PART")
    p.add_argument("--allow-missing", action="store_true", help="merge although prompts have no result")
    return p


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part like 1/8, from 1/8 to 8/8")
    return int(match[1]), int(match[2])


def _reject_same(output: str, inputs: list[str]) -> None:
    for path in inputs:
        if os.path.realpath(path) in (os.path.realpath(output), os.path.realpath(output) + ".tmp"):
            raise UsageError(f"--output {output} is, or would make, the file {path} that is read: choose another name")


def split(argv: list[str]) -> int:
    """Write the part; the exit code. Raises MpillmError."""
    given = split_parser().parse_args(argv)
    if not is_first(os.environ):
        return 0
    _reject_same(given.output, [given.prompts])
    part, parts = given.part
    count = files.split(iterate_lines(given.prompts), part, parts, given.output, overwrite=given.overwrite)
    print(f"{given.output}: {count} prompt(s), part {part} of {parts}")
    return 0


def merge(argv: list[str]) -> int:
    """Merge the parts; the exit code. Raises MpillmError."""
    given = merge_parser().parse_args(argv)
    if not is_first(os.environ):
        return 0
    _reject_same(given.output, [*given.parts, *([given.prompts] if given.prompts else [])])
    if len(given.parts) > 900:
        raise InputError(f"{len(given.parts)} parts are more than can be open at once: merge some of them first")
    prompts = iterate_lines(given.prompts) if given.prompts is not None else None
    done = files.merge(given.parts, given.output, prompts=prompts, match=given.match, duplicates=given.duplicates,
                       allow_missing=given.allow_missing, overwrite=given.overwrite)
    more = f", {done.left_out} duplicate(s) left out" if done.left_out else ""
    more += f", {done.missing} prompt(s) without a result" if done.missing else ""
    print(f"{given.output}: {done.records} result(s) of {len(given.parts)} part(s){more}")
    return 0
