"""Several results files of one prompts file, as an array of jobs leaves them, merged into one.

Beside a table of some 32 bytes a record, one record is in memory at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpillm.errors import InputError, OutputError
from mpillm.formats.hold import Hold
from mpillm.formats.jsonl import parse_line, quote

MATCHES = ("line", "custom_id")
DUPLICATES = ("stop", "first", "last")
NAMED = 3                       # keys that a message names
PLACE = np.dtype([("high", "<u8"), ("low", "<u8"), ("file", "<u4"), ("at", "<u8"), ("size", "<u8")])

Key = tuple[int, int]


@dataclass(frozen=True)
class Merged:
    """What came of a merge: records written, records left out as duplicates, prompts without a result."""

    records: int
    left_out: int
    missing: int


def key_of(value: int | str) -> Key:
    """Of a line's number the number itself, of a custom_id 128 bits of its BLAKE2b."""
    if isinstance(value, int):
        return 0, value
    digest = hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def record_key(record: Any, match: str) -> int | str:
    """A result's line number or custom_id. ValueError when it is no result, or has none."""
    if not isinstance(record, dict) or not {"custom_id", "response", "error"} <= set(record):
        raise ValueError("it is no result line (custom_id, response, error)")
    value = record.get(match)
    if match == "line" and isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63:
        return value
    if match == "custom_id" and isinstance(value, str):
        return value
    raise ValueError(f"its {match} is {quote(value)}: use --match {'custom_id' if match == 'line' else 'line'}")


def prompt_key(number: int, raw: bytes, match: str) -> int | str:
    """The key that the result of line ``number`` has. InputError when the line has no custom_id to match by."""
    if match == "line":
        return number
    with contextlib.suppress(Exception):
        value, _ = parse_line(raw)
        found = value.get("custom_id") if value.get("custom_id") is not None else value.get("id")
        if isinstance(found, (int, str)) and not isinstance(found, bool):
            return str(found)
    raise InputError(f"line {number} of the prompts has no custom_id to match by: use --match line")


def read_places(paths: Sequence[str], match: str) -> np.ndarray:
    """Key and place (``PLACE``) of every record of the files, in their order. Raises InputError."""
    places: list[np.ndarray] = []
    for number, path in enumerate(paths):
        rows, at = [], 0
        try:
            with open(path, "rb") as file:
                for line, raw in enumerate(file, 1):
                    if raw.strip():
                        rows.append((*key_of(_key(path, line, raw, match)), number, at, len(raw)))
                    at += len(raw)
                    if len(rows) == 1 << 16:
                        places.append(np.array(rows, PLACE))
                        rows = []
        except OSError as error:
            raise InputError(f"the results {path} cannot be read: {error.strerror}") from None
        places.append(np.array(rows, PLACE))
    return np.concatenate(places) if places else np.empty(0, PLACE)


def _key(path: str, line: int, raw: bytes, match: str) -> int | str:
    try:
        return record_key(json.loads(raw), match)
    except ValueError as error:             # broken JSON and broken UTF-8 are ValueErrors too
        reason = "it is cut short, or not JSON" if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) \
            else str(error)
        raise InputError(f"line {line} of {path} cannot be merged: {reason}") from None


def repeated(keys: np.ndarray) -> np.ndarray:
    """For each row of ``keys`` [n] (high, low) the earlier rows with the same key, counted: 0 for the first."""
    order = np.lexsort((keys["low"], keys["high"]))      # stable: equal keys stay in their order
    ordered = keys[order]
    fresh = np.ones(len(keys), bool)
    fresh[1:] = (ordered["high"][1:] != ordered["high"][:-1]) | (ordered["low"][1:] != ordered["low"][:-1])
    begins = np.maximum.accumulate(np.where(fresh, np.arange(len(keys)), 0))
    counts = np.empty(len(keys), np.int64)
    counts[order] = np.arange(len(keys)) - begins
    return counts


def choose(places: np.ndarray, duplicates: str) -> np.ndarray:
    """``places`` with one record of each key: the first or the last; ``stop`` takes none away."""
    if duplicates == "stop":
        return places
    if duplicates == "first":
        return places[repeated(places) == 0]
    return places[repeated(places[::-1])[::-1] == 0]


def arrange(places: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(places in the order of ``wanted``, rows of ``wanted`` without a place, places that nobody wants).

    Both have unique keys; ``wanted`` has the fields high and low.
    """
    keys = np.concatenate([wanted[["high", "low"]], places[["high", "low"]]])
    second = repeated(keys) > 0
    found = second[len(wanted):]            # a key of places that came second stands in wanted
    order = np.lexsort((wanted["low"], wanted["high"]))
    known = places[found]
    known = known[np.lexsort((known["low"], known["high"]))]
    present = np.zeros(len(wanted), bool)
    both = np.concatenate([known[["high", "low"]], wanted[["high", "low"]]])
    present[:] = repeated(both)[len(known):] > 0
    arranged = np.empty(len(wanted), PLACE)
    arranged[order[present[order]]] = known
    return arranged[present], np.flatnonzero(~present), places[~found]


def write(paths: Sequence[str], places: np.ndarray, output: str, overwrite: bool) -> None:
    """Copy the records at ``places`` into ``output``: under a temporary name, then renamed. Raises OutputError."""
    final = os.path.realpath(output)
    if os.path.exists(final) and not os.path.isfile(final):
        raise OutputError(f"--output {output} is no regular file: choose another name")
    if os.path.exists(final) and not overwrite:
        raise OutputError(f"--output {output} exists: choose another name, or use --overwrite")
    hold = Hold(final + ".tmp", f"the output {output}")
    try:
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(open(path, "rb")) for path in paths]
            os.ftruncate(hold.descriptor, 0)
            with open(hold.descriptor, "wb", closefd=False) as target:
                for raw in _records(files, places):
                    target.write(raw)
                target.flush()
                os.fsync(target.fileno())
        os.replace(hold.path, final)
        hold.release(keep=True)
    except OSError as error:
        raise OutputError(f"--output {output}: {error.strerror}") from None
    finally:
        hold.release()


def _records(files: Sequence[Any], places: np.ndarray) -> Iterator[bytes]:
    for place in places:
        raw = os.pread(files[place["file"]].fileno(), int(place["size"]), int(place["at"]))
        if len(raw) != place["size"]:
            raise InputError(f"{files[place['file']].name} became shorter while it was read: is a run writing it?")
        yield raw.rstrip(b"\r\n") + b"\n"


def merge(paths: Sequence[str], output: str, *, prompts: Iterable[tuple[int, bytes]] | None = None,
          match: str = "line", duplicates: str = "stop", allow_missing: bool = False,
          overwrite: bool = False) -> Merged:
    """Merge the results files ``paths`` into ``output``.

    In the order of ``prompts`` (numbered lines) where they are given, of which each must then have its result
    unless ``allow_missing``; else as they stand, file by file. ``match``: by what a result is known. Raises
    InputError for duplicates (with ``stop``), missing and unknown results, and what cannot be read; OutputError.
    """
    places = read_places(paths, match)
    chosen = choose(places, duplicates)
    again = np.flatnonzero(repeated(chosen) > 0)
    if len(again):
        hint = "a part was given twice, or numbered its lines anew (--match custom_id)" if match == "line" \
            else "a part was given twice, or prompts share an id (--match line)"
        raise InputError(f"{len(again)} result(s) of one {match} stand there twice: "
                         f"{_named(paths, chosen[again], match)}; {hint}; --duplicates first or last keeps one of them")
    missing = 0
    if prompts is not None:
        numbers, wanted = _wanted(prompts, match)
        chosen, absent, unknown = arrange(chosen, wanted)
        if len(unknown):
            raise InputError(f"{len(unknown)} result(s) belong to no line of the prompts: "
                             f"{_named(paths, unknown, match)}; are these parts of another file?")
        missing = len(absent)
        if missing and not allow_missing:
            lines = ", ".join(str(numbers[row]) for row in absent[:NAMED])
            raise InputError(f"{missing} of {len(wanted)} prompts have no result: line {lines}"
                             f"{', ...' if missing > NAMED else ''}; finish the runs first, or --allow-missing")
    write(paths, chosen, output, overwrite)
    return Merged(len(chosen), len(places) - len(chosen), missing)


def _wanted(prompts: Iterable[tuple[int, bytes]], match: str) -> tuple[np.ndarray, np.ndarray]:
    """(line numbers, keys) of the prompts; InputError when two have one key."""
    pairs = np.fromiter(((number, *key_of(prompt_key(number, raw, match))) for number, raw in prompts),
                        [("line", "<u8"), ("high", "<u8"), ("low", "<u8")])
    again = np.flatnonzero(repeated(pairs) > 0)
    if len(again):
        raise InputError(f"line {pairs['line'][again[0]]} of the prompts has the custom_id of an earlier line: "
                         "use --match line")
    return pairs["line"], pairs


def _named(paths: Sequence[str], places: np.ndarray, match: str) -> str:
    """The first few of ``places`` as words."""
    words = []
    for place in places[:NAMED]:
        with open(paths[place["file"]], "rb") as file:
            raw = os.pread(file.fileno(), int(place["size"]), int(place["at"]))
        words.append(f"{match} {quote(json.loads(raw)[match])} in {paths[place['file']]}")
    return ", ".join(words) + (", ..." if len(places) > NAMED else "")


def split(prompts: Iterable[tuple[int, bytes]], part: int, parts: int, output: str, *,
          overwrite: bool = False) -> int:
    """Every ``parts``-th prompt from the ``part``-th (from 1) on, into ``output``; the number of them.

    All other lines are blank, so that line numbers, seeds and messages are those of the whole file. Raises
    OutputError, and what ``prompts`` raises.
    """
    assert 1 <= part <= parts, f"part {part} of {parts}"
    final = os.path.realpath(output)
    if os.path.lexists(final) and not (overwrite and os.path.isfile(final)):
        raise OutputError(f"--output {output} exists: choose another name, or use --overwrite")
    hold, count, at = Hold(final + ".tmp", f"the output {output}"), 0, 1
    try:
        os.ftruncate(hold.descriptor, 0)
        with open(hold.descriptor, "wb", closefd=False) as target:
            for index, (number, raw) in enumerate(prompts):
                if index % parts == part - 1:
                    target.write(b"\n" * (number - at) + raw + b"\n")
                    count, at = count + 1, number + 1
            target.flush()
            os.fsync(target.fileno())
        os.replace(hold.path, final)
        hold.release(keep=True)
    except OSError as error:
        raise OutputError(f"--output {output}: {error.strerror}") from None
    finally:
        hold.release()
    return count
