"""``mpillm show``: a short table of the results in an HDF5 file."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from mpillm.cli.report import printable, render
from mpillm.errors import InputError

EXAMPLES = """\
examples:
  mpillm show out.h5
  mpillm show out.h5 --width 100
"""


def parser() -> argparse.ArgumentParser:
    """The parser of ``mpillm show``."""
    p = argparse.ArgumentParser(prog="mpillm show", description="Print a short table of a run's results.",
                                epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("output", metavar="FILE", help="HDF5 output of a run")
    p.add_argument("--width", type=_count, default=60, metavar="N",
                   help="characters of a text that are shown (default 60)")
    p.add_argument("--rows", type=_count, default=16, metavar="N", help="choices that are shown (default 16)")
    return p


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


def show(argv: list[str]) -> int:
    """Print the table; the exit code. Raises InputError."""
    import h5py

    given = parser().parse_args(argv)
    if os.path.isdir(given.output):
        raise InputError(f"{given.output} is a folder: give the HDF5 file of a run")
    try:
        with h5py.File(given.output, "r") as file:
            requests, sequences = file["requests"][:], file["sequences"][:given.rows]
            total, name = len(file["sequences"]), _model_name(file)
            rows = [_row(requests, sequence, given.width) for sequence in sequences]
            failed = [f"failed with {r['status']}: {printable(r['error'].decode())}"
                      for r in requests[requests["status"] != 0][:given.rows]]
    except FileNotFoundError:
        parts = f"; {given.output}.parts holds what an interrupted run had finished" \
            if os.path.isdir(given.output + ".parts") else ""
        raise InputError(f"{given.output} does not exist{parts}") from None
    except (OSError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{given.output} is not an output of mpillm: {' '.join(str(error).split())[:200]}") from None
    print(render(f"{given.output}: {len(requests)} requests, {total} choices, model {name}",
                 ["id", "choice", "prompt", "tokens", "end", "start to first token s", "decode s", "text"],
                 rows, left=("id", "text")))
    if total > given.rows:
        print(f"... and {total - given.rows} more")
    for line in failed:
        print(line)
    return 0


def _model_name(file: Any) -> str:
    return json.loads(file.attrs["model"]).get("name", "?")


def _row(requests: Any, sequence: Any, width: int) -> list[Any]:
    text = " ".join(sequence["text"].decode().split())
    request = requests[sequence["request"]]
    return [request["custom_id"].decode() or f"line {request['line']}", sequence["choice"], sequence["prompt_count"],
            sequence["token_count"], sequence["finish_reason"].decode(), f"{sequence['first_token_s']:.2f}",
            f"{sequence['decode_s']:.2f}", text[:width] + ("..." if len(text) > width else "")]
