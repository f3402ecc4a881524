"""Folds the parts of a run into one file: requests in line order, logits in sequence order.

Streamed: tables and flat arrays in slabs of some thousand requests, logits in slabs of ``slab_bytes``.
Held for the whole fold: some 200 bytes per request, 16 per sequence and 150 per row of logits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import h5py
import numpy as np

from mpillm.errors import OutputError
from mpillm.formats.hdf5_file import OpenParts, RowWriter, WritableFile, extend, gather, reading, spread
from mpillm.formats.hdf5_parts import PART_REQUESTS, RANGES, part_replica, whole_requests
from mpillm.formats.hdf5_schema import LOGITS_ROWS, REQUESTS, SEQUENCES, clean_text, describe

# A plan has one row per request of the output: which part has it (-1: a failed line) and at which row,
# and for each kind of piece where it begins in the part, how much it is, and where it begins in the output.
_NUMBERS = ["index", "scored"] + [column for first, count, _ in RANGES for column in (first, count)]
_PLAN = np.dtype([("part", "<i4"), ("row", "<i8"), ("one", "<i8")] + [(name, "<i8") for name in _NUMBERS]
                 + [(f"{first}_out", "<i8") for first, _, _ in RANGES])
_SLAB_COST = 1 << 20     # pieces of requests copied at a time
_ROW_GAP, _FLAT_GAP = 16, 4096


@dataclass(frozen=True)
class FailedRow:
    """A line that failed before it reached a replica; ``index`` counts with the requests."""

    index: int
    line: int
    custom_id: str | None
    status: int
    error: str


class LogitsSet(NamedTuple):
    """The logits parts of one replica by columns, and where each of their rows goes (-1: nowhere)."""

    paths: list[str]
    spans: list[tuple[int, int]]
    places: np.ndarray


def sort_parts(paths: Sequence[str]) -> tuple[list[str], dict[int, list[str]]]:
    """Replica parts, and logits parts by replica; other files are ignored."""
    replicas: list[str] = []
    logits: dict[int, list[str]] = {}
    for path in sorted(paths):
        kind, replica = part_replica(path) or ("", -1)
        if kind == "replica":
            replicas.append(path)
        elif kind == "logits":
            logits.setdefault(replica, []).append(path)
    return replicas, logits


def make_plan(parts: OpenParts, replicas: list[str], failed: Sequence[FailedRow]) -> np.ndarray:
    """The plan of all requests, in the order of their indices. OutputError for a damaged part."""
    pieces = []
    for number, path in enumerate(replicas):
        with reading(path):
            file = parts(path)
            rows = file["requests"].fields(_NUMBERS)[:]
            whole = whole_requests(file)
        if whole != len(rows):
            raise OutputError(f"the part {path} is damaged: of {len(rows)} requests, {whole} are whole")
        piece = np.zeros(len(rows), _PLAN)
        for name in _NUMBERS:
            piece[name] = rows[name]
        piece["part"], piece["row"], piece["one"] = number, np.arange(len(rows)), 1
        pieces.append(piece)
    lost = np.zeros(len(failed), _PLAN)
    lost["part"], lost["row"], lost["index"] = -1, np.arange(len(failed)), [row.index for row in failed]

    plan = np.concatenate([lost, *pieces])
    plan = plan[np.argsort(plan["index"], kind="stable")]
    double = np.flatnonzero(np.diff(plan["index"]) == 0)
    assert not len(double), f"request {plan['index'][double[0]]} is there twice"
    for first, count, _ in RANGES:
        plan[f"{first}_out"] = np.cumsum(plan[count]) - plan[count]
    return plan


def write_requests(out: WritableFile, parts: OpenParts, replicas: list[str], failed: Sequence[FailedRow],
                   plan: np.ndarray, logits_count: np.ndarray) -> None:
    """Everything but logits, steps and ranks; ``logits_count``: rows of logits of each sequence."""
    totals = {first: int(plan[count].sum()) for first, count, _ in RANGES}
    with out.guard() as file:
        _create(file, "requests", REQUESTS, len(plan))
        _create(file, "sequences", SEQUENCES, totals["first_sequence"])
        _create(file, "prompt_tokens", "<i4", totals["prompt_first"])
        _create(file, "tokens", "<i4", totals["token_first"])
        _create(file, "logprobs", "<f4", totals["token_first"])
        if plan["scored"].any():
            _create(file, "prompt_logprobs", "<f4", totals["prompt_first"])
        for name, owner, entries in (("top", "token_first", "top_first"),
                                     ("prompt_top", "prompt_first", "prompt_top_first")):
            if totals[entries]:
                describe(file.create_group(f"{name}_logprobs"))
                _create(file, f"{name}_logprobs/ids", "<i4", totals[entries])
                _create(file, f"{name}_logprobs/values", "<f4", totals[entries])
                extend(_create(file, f"{name}_logprobs/starts", "<i8", totals[owner] + 1), np.zeros(1, "<i8"))
    logits_start = np.cumsum(logits_count) - logits_count
    for slab, offset in _slabs(plan):
        copy = _SlabCopy(slab, offset, parts, replicas)
        requests = copy.requests(failed)
        sequences = copy.sequences(logits_start, logits_count)
        with out.guard() as file:
            extend(file["requests"], requests)
            extend(file["sequences"], sequences)
        copy.flat(out)


def _create(file: h5py.File, name: str, dtype: np.dtype | str, length: int) -> h5py.Dataset:
    """An empty one-dimensional dataset that will get ``length`` elements."""
    dtype = np.dtype(dtype)
    most = 1024 if dtype.names else 1 << 16
    # Strings live outside the chunks, so compressing a table with strings gains nothing.
    filters = {} if dtype.hasobject else dict(compression="gzip", compression_opts=1, shuffle=True)
    chunks = (min(max(length, 1), most),)
    dataset = file.create_dataset(name, (0,), dtype, maxshape=(None,), chunks=chunks, **filters)
    describe(dataset)
    return dataset


def write_table(out: WritableFile, name: str, rows: np.ndarray, dtype: np.dtype) -> None:
    """A whole table, its columns taken by name."""
    missing = set(dtype.names or ()) - set(rows.dtype.names or ())
    assert not missing, f"the table {name} lacks the columns {sorted(missing)}"
    table = np.empty(len(rows), dtype)
    for column in dtype.names or ():
        if dtype[column].hasobject:
            table[column] = [value if isinstance(value, bytes) else clean_text(str(value))
                             for value in rows[column]]
        else:
            table[column] = rows[column]
    with out.guard() as file:
        extend(_create(file, name, dtype, len(table)), table)


def _slabs(plan: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Consecutive stretches of the plan, each of bounded size, and the row at which each begins."""
    cost = 64 + 64 * plan["n_choices"] + sum(plan[count] for _, count, _ in RANGES)
    number = np.cumsum(cost) // _SLAB_COST
    cuts = np.flatnonzero(np.diff(number)) + 1
    offset = 0
    for slab in np.split(plan, cuts):
        if len(slab):
            yield slab, offset
            offset += len(slab)


class _SlabCopy:
    """Collects the pieces of the requests of one slab from the parts."""

    def __init__(self, slab: np.ndarray, offset: int, parts: OpenParts, replicas: list[str]) -> None:
        self.slab, self.offset, self.parts, self.replicas = slab, offset, parts, replicas
        self.used = [int(part) for part in np.unique(slab["part"]) if part >= 0]

    def collect(self, name: str, first: str, count: str, dtype: np.dtype | str) -> np.ndarray:
        """Elements ``first`` .. ``first + count`` of ``name`` of all requests, in the slab's order."""
        counts = self.slab[count]
        begins = np.cumsum(counts) - counts
        out = np.zeros(int(counts.sum()), dtype)
        for part in self.used:
            mine = np.flatnonzero(self.slab["part"] == part)
            path = self.replicas[part]
            with reading(path):
                dataset = self.parts(path)[name]
                gap = _ROW_GAP if dataset.dtype.names else _FLAT_GAP
                values = gather(dataset, self.slab[first][mine], counts[mine], gap)
            out[spread(begins[mine], counts[mine])] = values
        return out

    def requests(self, failed: Sequence[FailedRow]) -> np.ndarray:
        rows = np.zeros(len(self.slab), REQUESTS)
        found = self.collect("requests", "row", "one", PART_REQUESTS)
        lost = self.slab["part"] < 0
        for name in REQUESTS.names or ():
            rows[name][~lost] = found[name]
        for place in np.flatnonzero(lost):
            line = failed[self.slab["row"][place]]
            rows[place] = (line.line, clean_text(line.custom_id), line.status, clean_text(line.error),
                           0, 0, -1, 0, 0)
        rows["first_sequence"] = self.slab["first_sequence_out"]
        return rows

    def sequences(self, logits_start: np.ndarray, logits_count: np.ndarray) -> np.ndarray:
        slab = self.slab
        rows = self.collect("sequences", "first_sequence", "n_choices", SEQUENCES)
        owner = np.repeat(np.arange(len(slab)), slab["n_choices"])
        rows["request"] = self.offset + owner
        rows["prompt_start"] += (slab["prompt_first_out"] - slab["prompt_first"])[owner]
        rows["token_start"] += (slab["token_first_out"] - slab["token_first"])[owner]
        begin = int(slab["first_sequence_out"][0])
        rows["logits_start"] = logits_start[begin:begin + len(rows)]
        rows["logits_count"] = logits_count[begin:begin + len(rows)]
        return rows

    def flat(self, out: WritableFile) -> None:
        """Appends the slab's share of all flat arrays that the output has."""
        for name, first, count, kind in (("prompt_tokens", "prompt_first", "prompt_tokens", "<i4"),
                                         ("prompt_logprobs", "prompt_first", "prompt_tokens", "<f4"),
                                         ("tokens", "token_first", "completion_tokens", "<i4"),
                                         ("logprobs", "token_first", "completion_tokens", "<f4")):
            if name in out.file:
                values = self.collect(name, first, count, kind)
                with out.guard() as file:
                    extend(file[name], values)
        for name, first, count in (("top", "token_first", "completion_tokens"),
                                   ("prompt_top", "prompt_first", "prompt_tokens")):
            if f"{name}_logprobs" not in out.file:
                continue
            counts = self.collect(f"{name}_counts", first, count, "<i4")
            ids = self.collect(f"{name}_ids", f"{name}_first", f"{name}_count", "<i4")
            values = self.collect(f"{name}_values", f"{name}_first", f"{name}_count", "<f4")
            begin = int(self.slab[f"{name}_first_out"][0])
            with out.guard() as file:
                group = file[f"{name}_logprobs"]
                extend(group["starts"], begin + np.cumsum(counts, dtype="<i8"))
                extend(group["ids"], ids)
                extend(group["values"], values)


def plan_logits(parts: OpenParts, logits: dict[int, list[str]], plan: np.ndarray
                ) -> tuple[list[LogitsSet], np.ndarray, np.ndarray, int]:
    """Where every row of every logits part goes.

    Returns the sets, the table LOGITS_ROWS of the output, the rows of each sequence, and how many rows belong
    to no request. OutputError when the parts of a replica do not make up the vocabulary or differ in rows.
    """
    found = [_read_keys(parts, paths) for paths in logits.values()]
    keys = np.concatenate([np.zeros((0, 3), "<i8"), *(own for _, own in found)])
    ends = np.cumsum([len(own) for _, own in found])

    # The sequence of each key, -1 for a request that was never recorded.
    if len(plan):
        row = np.minimum(np.searchsorted(plan["index"], keys[:, 0]), len(plan) - 1)
        known = (plan["index"][row] == keys[:, 0]) & (keys[:, 1] < plan["n_choices"][row])
        sequence = np.where(known, plan["first_sequence_out"][row] + keys[:, 1], -1)
    else:
        sequence = np.full(len(keys), -1)
    order = np.lexsort((keys[:, 2], sequence))
    order = order[sequence[order] >= 0]
    fresh = np.ones(len(order), bool)
    fresh[1:] = (np.diff(sequence[order]) != 0) | (np.diff(keys[order, 2]) != 0)
    order = order[fresh]

    place = np.full(len(keys), -1)
    place[order] = np.arange(len(order))
    rows = np.empty(len(order), LOGITS_ROWS)
    rows["sequence"], rows["position"] = sequence[order], keys[order, 2]
    counts = np.bincount(sequence[order], minlength=int(plan["n_choices"].sum()))
    sets = [LogitsSet([path for _, path in columns], [span for span, _ in columns], place[end - len(own):end])
            for (columns, own), end in zip(found, ends, strict=True)]
    return sets, rows, counts, int(np.count_nonzero(sequence < 0))


def _read_keys(parts: OpenParts, paths: list[str]) -> tuple[list[tuple[tuple[int, int], str]], np.ndarray]:
    """((columns, path) of one replica's logits parts, by columns; their keys [rows, 3], all the same)."""
    columns: list[tuple[tuple[int, int], str]] = []
    keys = np.zeros((0, 3), "<i8")
    for path in paths:
        with reading(path):
            file = parts(path)
            low, high = (int(file["logits"].attrs[name]) for name in ("vocab_start", "vocab_stop"))
            own = file["keys"][:, :3]
        keys = keys if columns else own
        columns.append(((low, high), path))
        if not np.array_equal(keys, own):
            raise OutputError(f"the logits parts {paths[0]} and {path} differ in rows: one was cut off")
    columns.sort()
    reached = 0
    for (low, high), path in columns:
        if low != reached:
            raise OutputError(f"the logits part before {path} is missing: columns {reached} to {low}")
        reached = high
    return columns, keys


def write_logits(out: WritableFile, parts: OpenParts, sets: list[LogitsSet], rows: np.ndarray, *,
                 compress: bool, threads: int, slab_bytes: int) -> int:
    """/logits and /logits_rows; how many values had been clamped. OutputError."""
    kinds = {(own.spans[-1][1], str(parts(own.paths[0])["logits"].dtype)) for own in sets}
    if len(kinds) != 1:
        raise OutputError(f"the logits parts in {os.path.dirname(sets[0].paths[0])} differ in size or type: "
                          + ", ".join(f"{width} {kind}" for width, kind in sorted(kinds)))
    (width, kind), = kinds
    with out.guard() as file:
        extend(_create(file, "logits_rows", LOGITS_ROWS, len(rows)), rows)
        dataset = RowWriter.create(file, "logits", len(rows), width, kind, compress)
        describe(dataset)
    writer = RowWriter(dataset, threads)
    step = max(1, slab_bytes // (width * dataset.dtype.itemsize))
    clamped = 0
    try:
        for own in sets:
            clamped += _write_set(out, parts, own, writer, step, dataset.dtype)
    finally:
        writer.close()
    with out.guard():
        dataset.attrs["clamped"] = clamped
    return clamped


def _write_set(out: WritableFile, parts: OpenParts, own: LogitsSet, writer: RowWriter, step: int,
               dtype: np.dtype) -> int:
    places = own.places
    slab = np.empty((min(step, len(places)), own.spans[-1][1]), dtype)
    for start in range(0, len(places), step):
        stop = min(start + step, len(places))
        wanted = places[start:stop] >= 0
        if not wanted.any():
            continue
        for path, (low, high) in zip(own.paths, own.spans, strict=True):
            with reading(path):
                parts(path)["logits"].read_direct(slab, np.s_[start:stop], np.s_[:stop - start, low:high])
        rows = slab[:stop - start]
        with out.guard():
            writer.write(places[start:stop][wanted], rows if wanted.all() else rows[wanted])
    with reading(own.paths[0]):
        return sum(int(parts(path)["logits"].attrs["clamped"]) for path in own.paths)
