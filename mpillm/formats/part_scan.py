"""Reads the parts of a run: which requests are there, whole, and where; what the ranks were; where their logits lie.

Held: some 130 bytes per request (40 in ``finished``), 24 per row of logits and 16 per record of them in each file.
"""

from __future__ import annotations

import json
import logging
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpillm.errors import OutputError
from mpillm.formats import part_records as records
from mpillm.formats.journal import Reader, Record, repair

LOG = logging.getLogger("mpillm.parts")
_NAME = re.compile(r"(requests|rank)-(\d{4,})-(\d{5,})\.journal(\.damaged\S*)?")
_BATCH = 1 << 16            # records between two compactions

# Where a request lies (file: number in ``Parts.requests``, at and length of its payload) and what it is.
PLACE = np.dtype([("index", "<i8"), ("at", "<i8"), ("length", "<i8"), ("file", "<i4")]
                 + [(name, records.ROW[name]) for name in records.ROW.names or ()])
BRIEF = np.dtype([(name, PLACE[name]) for name in ("index", "file", "attempt", "replica", "tp", "logits_rows")])


@dataclass(frozen=True)
class Finished:
    """What a run that goes on need not do again.

    ``indices``: int64, sorted, of the requests that are on disk with all their rows of logits. ``next_attempt``: no
    file of it exists. ``cut``: what had to be repaired, a line each.
    """

    indices: np.ndarray
    next_attempt: int
    cut: list[str]


@dataclass
class RankFile:
    """The journal of one rank: its head, its row of /ranks, where its steps and its rows of logits lie."""

    path: str
    head: Mapping[str, Any]
    row: Mapping[str, Any] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)      # offset and rows of each record
    keys: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), "<i8"))
    firsts: np.ndarray = field(default_factory=lambda: np.zeros(0, "<i8"))      # first row of each record
    offsets: np.ndarray = field(default_factory=lambda: np.zeros(0, "<i8"))     # and its place in the file
    clamped: int = 0

    @property
    def span(self) -> tuple[int, int]:
        """Its columns, half-open; equal where it keeps none."""
        start, stop, _ = self.head["logits"] or (0, 0, "")
        return start, stop

    @property
    def width(self) -> int:
        return self.span[1] - self.span[0]

    @property
    def kind(self) -> np.dtype:
        return records.KINDS[self.head["logits"][2]]


@dataclass
class LogitsSet:
    """The journals of one replica in one attempt that have logits, by columns; ``keys`` [rows, 3] of all of them.

    ``fault``: why they do not make up whole rows, empty if they do.
    """

    files: list[RankFile]
    keys: np.ndarray
    members: int                 # ranks of the replica whose journals are there
    fault: str


@dataclass
class Parts:
    """Everything in a folder of parts. ``places``: PLACE or BRIEF of all records of requests, doubled ones too."""

    requests: list[str]
    places: np.ndarray
    ranks: list[RankFile]
    sets: dict[tuple[int, int], LogitsSet]
    cut: list[str]


def requests_path(folder: str, attempt: int, replica: int) -> str:
    """Where the root of ``replica`` writes in this attempt."""
    return os.path.join(folder, f"requests-{attempt:04d}-{replica:05d}.journal")


def rank_path(folder: str, attempt: int, rank: int) -> str:
    """Where ``rank`` of the job writes in this attempt."""
    return os.path.join(folder, f"rank-{attempt:04d}-{rank:06d}.journal")


def is_part(name: str) -> bool:
    """Whether a file of this name in a folder of parts is a journal, or one that was set aside."""
    return _NAME.fullmatch(name) is not None


def is_journal(name: str) -> bool:
    """Whether a file of this name is a journal that counts."""
    found = _NAME.fullmatch(name)
    return found is not None and found[4] is None


def list_names(folder: str) -> list[str]:
    """The names in a folder, sorted. OutputError."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise OutputError(f"cannot read the folder {folder}: {error.strerror}") from error


def finished(folder: str) -> Finished:
    """Which requests of the interrupted run in ``folder`` are done; nobody may be writing there.

    A request is done when its record is whole and each rank of its replica in that attempt has all its rows of
    logits. Torn tails are cut off, damaged journals set aside (``journal.repair``) and both said. OutputError.
    """
    parts = read_parts(folder, mend=True, columns=BRIEF)
    for line in parts.cut:
        LOG.warning("%s", line)
    attempts = [int(found[2]) for name in list_names(folder) if (found := _NAME.fullmatch(name))]
    done = np.unique(parts.places["index"][complete(parts)])
    return Finished(done.astype(np.int64), max(attempts, default=-1) + 1, parts.cut)


def read_parts(folder: str, *, mend: bool = False, columns: np.dtype = PLACE, expected: Iterable[str] = ()) -> Parts:
    """Reads all journals once. With ``mend`` they are repaired, else one that is not whole is an OutputError.

    ``expected``: paths of journals that must be there, since other hosts' new files may be unseen for a while in a
    shared folder's listing.
    """
    names = sorted({*filter(is_journal, list_names(folder)), *map(os.path.basename, expected)})
    paths = [os.path.join(folder, name) for name in names if name.startswith("requests")]
    cut: list[str] = []
    places = [_read_requests(path, number, mend, cut, columns) for number, path in enumerate(paths)]
    ranks: list[RankFile] = []
    groups: dict[tuple[int, int], list[RankFile]] = {}
    for name in names:
        if name.startswith("rank"):
            rank = _read_rank(os.path.join(folder, name), mend, cut)
            if rank is not None:
                ranks.append(rank)
                groups.setdefault((rank.head["attempt"], rank.head["replica"]), []).append(rank)
    sets = {key: _make_set(files) for key, files in groups.items() if any(file.head["logits"] for file in files)}
    return Parts(paths, np.concatenate([np.zeros(0, columns), *places]), ranks, sets, cut)


def complete(parts: Parts) -> np.ndarray:
    """For each of ``places``, whether all its rows of logits are there (bool)."""
    places = parts.places
    fine = places["logits_rows"] == 0
    for (attempt, replica), own in parts.sets.items():
        mine = np.flatnonzero((places["attempt"] == attempt) & (places["replica"] == replica) & ~fine)
        if own.fault or not len(mine):
            continue
        indices, counts = _rows_of_requests(own.keys)
        if not len(indices):
            continue
        at = np.minimum(np.searchsorted(indices, places["index"][mine]), len(indices) - 1)
        found = np.where(indices[at] == places["index"][mine], counts[at], 0)
        fine[mine] = (found >= places["logits_rows"][mine]) & (places["tp"][mine] == own.members)
    return fine


def choose(parts: Parts) -> np.ndarray:
    """The places of the requests that count, the first complete record of each, by index.

    OutputError when a request has records, but none with all its logits.
    """
    places = parts.places
    fine = complete(parts)
    lost = np.setdiff1d(places["index"], places["index"][fine])
    if len(lost):
        row = places[places["index"] == lost[0]][0]
        own = parts.sets.get((int(row["attempt"]), int(row["replica"])))
        why = own.fault if own is not None and own.fault else f"{row['logits_rows']} rows are not all there"
        raise OutputError(f"the logits of line {row['line']} in {os.path.dirname(parts.requests[row['file']])} are "
                          f"incomplete: {why}: start again with --resume")
    places = places[fine]
    order = np.lexsort((places["at"], places["file"], places["attempt"], places["index"]))
    index = places["index"][order]
    return places[order[np.flatnonzero(np.diff(index, prepend=-1))]]


def _rows_of_requests(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(indices, different keys of each)."""
    order = np.lexsort((keys[:, 2], keys[:, 1], keys[:, 0]))
    new = np.ones(len(keys), bool)
    new[1:] = (keys[order[1:]] != keys[order[:-1]]).any(axis=1)
    return np.unique(keys[order[new], 0], return_counts=True)


def _read_requests(path: str, number: int, mend: bool, cut: list[str], columns: np.dtype) -> np.ndarray:
    pieces, rows, where = [], bytearray(), array("q")

    def compact() -> None:
        table = np.zeros(len(where) // 3, columns)
        found = np.frombuffer(bytes(rows), records.ROW)
        for name, values in zip(("index", "at", "length"), np.array(where).reshape(-1, 3).T, strict=True):
            if name in (columns.names or ()):
                table[name] = values
        for name in set(columns.names or ()) & set(records.ROW.names or ()):
            table[name] = found[name]
        table["file"] = number
        pieces.append(table)
        rows.clear()
        del where[:]

    with _malformed(path):
        for record in _records(path, "mpillm requests", mend, cut):
            if record.kind == records.REQUEST:
                rows += record.payload[:records.ROW.itemsize]
                where.extend((record.number, record.at, len(record.payload)))
                if len(where) >= 3 * _BATCH:
                    compact()
        compact()
    return np.concatenate(pieces)


def _read_rank(path: str, mend: bool, cut: list[str]) -> RankFile | None:
    """None for a file that has not even its head."""
    made: RankFile | None = None
    keys, offsets, counts = [], array("q"), array("q")
    with _malformed(path):
        for record in _records(path, "mpillm rank", mend, cut):
            if made is None:
                made = RankFile(path, json.loads(bytes(record.payload)))
            elif record.kind == records.RANK:
                made.row = json.loads(bytes(record.payload))
            elif record.kind == records.STEPS:
                made.steps.append((record.at, record.number))
            elif record.kind == records.LOGITS:
                count = record.number
                made.clamped += int.from_bytes(record.payload[:8], "little")
                keys.append(np.frombuffer(bytes(record.payload[8:8 + 24 * count]), "<i8").reshape(count, 3))
                offsets.append(record.at + 8 + 24 * count)
                counts.append(count)
                if len(record.payload) != 8 + 24 * count + count * made.width * made.kind.itemsize:
                    raise ValueError("a record of logits has another width")
    if made is not None and keys:
        made.keys = np.concatenate(keys)
        made.offsets = np.array(offsets, np.int64)
        made.firsts = np.cumsum(counts, dtype=np.int64) - np.array(counts, np.int64)
    return made


def _records(path: str, kind: str, mend: bool, cut: list[str]) -> Iterator[Record]:
    """The whole records, the head first. What cannot be read is repaired, or an OutputError."""
    reader = Reader(path)
    for number, record in enumerate(reader):
        if number == 0:
            head = json.loads(bytes(record.payload)) if record.kind == records.HEAD else {}
            if head.get("format") != kind or head.get("version") != records.VERSION:
                raise OutputError(f"{path} was written by another version of mpillm: finish the run with that, or "
                                  "use --overwrite to begin anew")
        yield record
    if reader.whole < reader.size:
        if not mend:
            raise OutputError(f"the part {path} is damaged: of {reader.size} bytes, {reader.whole} are whole: start "
                              "again with --resume")
        cut.append(repair(reader) or "")


def _make_set(files: Sequence[RankFile]) -> LogitsSet:
    """Journals of one replica; what one has more than another was not finished."""
    members = sorted(file.head["tp_rank"] for file in files)
    parts = sorted((file for file in files if file.width), key=lambda file: file.span)
    faults = [] if members == list(range(len(members))) else [f"only tp ranks {members} have journals"]
    reached = 0
    for file in parts:
        if file.span[0] != reached:
            faults.append(f"columns {reached} to {file.span[0]} are missing")
        reached = file.span[1]
    if len({file.kind for file in parts}) > 1:
        faults.append("their types differ")
    rows = min((len(file.keys) for file in parts), default=0)
    keys = parts[0].keys[:rows] if parts else np.zeros((0, 3), "<i8")
    for file in parts[1:]:
        if not np.array_equal(keys, file.keys[:rows]):
            faults.append(f"{parts[0].path} and {file.path} differ in rows")
        file.keys = file.keys[:0]
    return LogitsSet(parts, keys, len(members), "; ".join(faults))


@contextmanager
def _malformed(path: str) -> Iterator[None]:
    """Records whose sums are right but whose content is not."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OutputError(f"the part {path} is damaged: {error}") from error
