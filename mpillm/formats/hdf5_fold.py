"""Folds the parts of a run into one file: requests in line order, logits in sequence order, steps by rank.

Streamed: tables and flat arrays in slabs of some MiB of records, logits in slabs of ``slab_bytes``, steps a rank at
a time. Held for the whole fold: what ``part_scan`` holds, 16 bytes per sequence and some 100 per row of logits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from mpillm.errors import OutputError
from mpillm.formats import part_records as records
from mpillm.formats.hdf5_file import RowWriter, WritableFile, extend
from mpillm.formats.hdf5_schema import LOGITS_ROWS, RANKS, REQUESTS, SEQUENCES, STEPS, clean_text, describe
from mpillm.formats.journal import OpenFiles
from mpillm.formats.part_scan import LogitsSet, Parts, RankFile

_SLAB_BYTES = 4 << 20    # records of requests copied at a time

# Seconds and tokens of one rank in one attempt; prefill: steps with prompt rows.
TIMES = np.dtype([(name, "<i4") for name in ("attempt", "rank", "replica", "tp_rank")] + [("steps", "<i8")]
                 + [(name, "<f8") for name in ("total_s", "communication_s", "wait_s", "prefill_s", "decode_s")]
                 + [(name, "<i8") for name in ("prefill_tokens", "decode_tokens")])


def write_requests(out: WritableFile, files: OpenFiles, paths: list[str], chosen: np.ndarray,
                   logits_count: np.ndarray) -> None:
    """Everything but logits, steps and ranks.

    ``chosen``: PLACE of each request of the output, ``paths`` being the files they name; ``logits_count``: rows of
    logits of each sequence. OutputError.
    """
    totals = {name: int(chosen[name].sum()) for name in (
        "n_choices", "prompt_tokens", "completion_tokens", "top_count", "prompt_top_count")}
    with out.guard() as file:
        _create(file, "requests", REQUESTS, len(chosen))
        _create(file, "sequences", SEQUENCES, totals["n_choices"])
        _create(file, "prompt_tokens", "<i4", totals["prompt_tokens"])
        _create(file, "tokens", "<i4", totals["completion_tokens"])
        _create(file, "logprobs", "<f4", totals["completion_tokens"])
        if chosen["scored"].any():
            _create(file, "prompt_logprobs", "<f4", totals["prompt_tokens"])
        for name, owner in (("top", "completion_tokens"), ("prompt_top", "prompt_tokens")):
            if totals[f"{name}_count"]:
                describe(file.create_group(f"{name}_logprobs"))
                _create(file, f"{name}_logprobs/ids", "<i4", totals[f"{name}_count"])
                _create(file, f"{name}_logprobs/values", "<f4", totals[f"{name}_count"])
                extend(_create(file, f"{name}_logprobs/starts", "<i8", totals[owner] + 1), np.zeros(1, "<i8"))
    logits_start = np.cumsum(logits_count) - logits_count
    firsts = {name: np.cumsum(chosen[name]) - chosen[name] for name in totals}
    for begin, end in _slabs(chosen):
        slab = _Slab(files, paths, chosen[begin:end], begin,
                     {name: int(first[begin]) for name, first in firsts.items()})
        slab.write(out, logits_start, logits_count)


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


def _slabs(chosen: np.ndarray) -> Iterator[tuple[int, int]]:
    """Begin and end of consecutive stretches of requests, each of bounded size."""
    number = np.cumsum(chosen["length"] + 64) // _SLAB_BYTES
    cuts = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(chosen)]
    return ((begin, end) for begin, end in zip(cuts, cuts[1:], strict=False) if begin < end)


class _Slab:
    """Some consecutive requests of the output, read into memory."""

    def __init__(self, files: OpenFiles, paths: list[str], chosen: np.ndarray, begin: int,
                 firsts: dict[str, int]) -> None:
        self.begin, self.firsts, self.chosen = begin, firsts, chosen
        # Read in the order of the files, not of the lines
        self.requests: list[records.Unpacked] = [None] * len(chosen)     # type: ignore[list-item]
        for at in np.lexsort((chosen["at"], chosen["file"])):
            place = chosen[at]
            payload = np.empty(int(place["length"]), np.uint8)
            path = paths[place["file"]]
            files.read(path, int(place["at"]), payload)
            try:
                self.requests[at] = records.unpack_request(payload.data)
            except ValueError as error:
                raise OutputError(f"the part {path} is damaged: {error}") from error

    def write(self, out: WritableFile, logits_start: np.ndarray, logits_count: np.ndarray) -> None:
        """Appends the slab's share to all datasets of the output that it concerns."""
        requests, sequences = self._request_rows(), self._sequence_rows(logits_start, logits_count)
        with out.guard() as file:
            extend(file["requests"], requests)
            extend(file["sequences"], sequences)
            for name, kind in (("prompt_tokens", "<i4"), ("prompt_logprobs", "<f4"), ("tokens", "<i4"),
                               ("logprobs", "<f4")):
                if name in file:
                    extend(file[name], self._flat(name, kind))
            for name in ("top", "prompt_top"):
                if f"{name}_logprobs" in file:
                    group, counts = file[f"{name}_logprobs"], self._flat(f"{name}_counts", "<i4")
                    extend(group["starts"], self.firsts[f"{name}_count"] + np.cumsum(counts, dtype="<i8"))
                    extend(group["ids"], self._flat(f"{name}_ids", "<i4"))
                    extend(group["values"], self._flat(f"{name}_values", "<f4"))

    def _flat(self, name: str, kind: str) -> np.ndarray:
        """One array of all requests; where a request has none: nan, or a count of 0, for each of its tokens."""
        nothing = np.nan if kind == "<f4" else 0
        count = {"prompt_logprobs": "prompt_tokens", "prompt_top_counts": "prompt_tokens",
                 "top_counts": "completion_tokens"}.get(name, "")
        return np.concatenate([
            request.flat[name] if name in request.flat else np.full(int(request.row[count][0]), nothing, kind)
            for request in self.requests])

    def _request_rows(self) -> np.ndarray:
        rows = np.zeros(len(self.requests), REQUESTS)
        for name in ("line", "status", "n_choices", "replica", "attempt", "tp", "prompt_tokens", "completion_tokens"):
            rows[name] = self.chosen[name]
        rows["custom_id"] = [request.custom_id for request in self.requests]
        rows["error"] = [request.error for request in self.requests]
        counts = rows["n_choices"].astype(np.int64)
        rows["first_sequence"] = self.firsts["n_choices"] + np.cumsum(counts) - counts
        return rows

    def _sequence_rows(self, logits_start: np.ndarray, logits_count: np.ndarray) -> np.ndarray:
        own = np.concatenate([request.choices for request in self.requests])
        rows = np.zeros(len(own), SEQUENCES)
        for name in set(SEQUENCES.names or ()) & set(records.CHOICE.names or ()):
            rows[name] = own[name]
        owner = np.repeat(np.arange(len(self.requests)), self.chosen["n_choices"])
        rows["request"] = self.begin + owner
        for name, count in (("prompt_start", "prompt_tokens"), ("token_start", "completion_tokens")):
            lengths = self.chosen[count]
            rows[name] += (self.firsts[count] + np.cumsum(lengths) - lengths)[owner]
        for place, name in enumerate(("finish_reason", "stop_reason", "text")):
            rows[name] = [texts[place] for request in self.requests for texts in request.texts]
        begin = self.firsts["n_choices"]
        rows["logits_start"] = logits_start[begin:begin + len(rows)]
        rows["logits_count"] = logits_count[begin:begin + len(rows)]
        return rows


def plan_logits(parts: Parts, chosen: np.ndarray
                ) -> tuple[list[tuple[LogitsSet, np.ndarray]], np.ndarray, np.ndarray, int]:
    """Where every row of logits goes.

    Returns each usable set with the place of each of its rows (-1: nowhere), the table LOGITS_ROWS of the output,
    the rows of each sequence, and how many rows belong to no request of their replica and attempt.
    """
    sets = [(key, own) for key, own in sorted(parts.sets.items()) if not own.fault and own.files]
    keys = np.concatenate([np.zeros((0, 3), "<i8"), *(own.keys for _, own in sets)])
    sizes = [len(own.keys) for _, own in sets]
    source = np.repeat(np.array([key for key, _ in sets], np.int64).reshape(-1, 2), sizes, axis=0)

    sequence = np.full(len(keys), -1)
    if len(chosen):
        firsts = np.cumsum(chosen["n_choices"], dtype=np.int64) - chosen["n_choices"]
        row = np.minimum(np.searchsorted(chosen["index"], keys[:, 0]), len(chosen) - 1)
        known = (chosen["index"][row] == keys[:, 0]) & (keys[:, 1] >= 0) & (keys[:, 1] < chosen["n_choices"][row])
        # Rows of a request that another attempt has finished are of no use.
        known &= (chosen["attempt"][row] == source[:, 0]) & (chosen["replica"][row] == source[:, 1])
        sequence = np.where(known, firsts[row] + keys[:, 1], -1)
    order = np.lexsort((keys[:, 2], sequence))
    order = order[sequence[order] >= 0]
    fresh = np.ones(len(order), bool)
    fresh[1:] = (np.diff(sequence[order]) != 0) | (np.diff(keys[order, 2]) != 0)
    order = order[fresh]

    place = np.full(len(keys), -1)
    place[order] = np.arange(len(order))
    rows = np.empty(len(order), LOGITS_ROWS)
    rows["sequence"], rows["position"] = sequence[order], keys[order, 2]
    counts = np.bincount(sequence[order], minlength=int(chosen["n_choices"].sum()))
    cuts = np.cumsum([0, *sizes])
    planned = [(own, place[begin:end]) for (_, own), begin, end in zip(sets, cuts, cuts[1:], strict=False)]
    return planned, rows, counts, int(np.count_nonzero(sequence < 0))


def write_logits(out: WritableFile, files: OpenFiles, sets: list[tuple[LogitsSet, np.ndarray]], rows: np.ndarray, *,
                 compress: bool, threads: int, slab_bytes: int) -> int:
    """/logits and /logits_rows; how many values had been clamped. OutputError."""
    kinds = {(own.files[-1].span[1], str(own.files[0].kind)) for own, _ in sets}
    if len(kinds) != 1:
        raise OutputError(f"the logits parts in {os.path.dirname(sets[0][0].files[0].path)} differ in size or type: "
                          + ", ".join(f"{width} {kind}" for width, kind in sorted(kinds)))
    (width, kind), = kinds
    with out.guard() as file:
        extend(_create(file, "logits_rows", LOGITS_ROWS, len(rows)), rows)
        dataset = RowWriter.create(file, "logits", len(rows), width, kind, compress)
        describe(dataset)
    writer = RowWriter(dataset, threads)
    step = max(1, slab_bytes // (width * dataset.dtype.itemsize))
    try:
        for own, places in sets:
            _write_set(out, files, own, places, writer, step, dataset.dtype)
    finally:
        writer.close()
    clamped = sum(file.clamped for own, _ in sets for file in own.files)
    with out.guard():
        dataset.attrs["clamped"] = clamped
    return clamped


def _write_set(out: WritableFile, files: OpenFiles, own: LogitsSet, places: np.ndarray, writer: RowWriter, step: int,
               dtype: np.dtype) -> None:
    slab = np.empty((min(step, len(places)), own.files[-1].span[1]), dtype)
    for start in range(0, len(places), step):
        stop = min(start + step, len(places))
        wanted = places[start:stop] >= 0
        if not wanted.any():
            continue
        for file in own.files:
            low, high = file.span
            slab[:stop - start, low:high] = _read_rows(files, file, start, stop, dtype)
        rows = slab[:stop - start]
        with out.guard():
            writer.write(places[start:stop][wanted], rows if wanted.all() else rows[wanted])


def _read_rows(files: OpenFiles, file: RankFile, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
    """Rows ``start`` to ``stop`` of a rank's logits, from the records that have them."""
    rows = np.empty((stop - start, file.width), dtype)
    at = start
    record = int(np.searchsorted(file.firsts, start, "right")) - 1
    while at < stop:
        end = min(stop, int(file.firsts[record + 1]) if record + 1 < len(file.firsts) else stop)
        offset = int(file.offsets[record]) + (at - int(file.firsts[record])) * file.width * dtype.itemsize
        files.read(file.path, offset, rows[at - start:end - start])
        at, record = end, record + 1
    return rows


def write_ranks(out: WritableFile, ranks: list[RankFile]) -> None:
    """/ranks, by attempt and rank; a rank that was killed before it described itself has no row."""
    told = sorted((rank for rank in ranks if rank.row), key=lambda rank: (rank.head["attempt"], rank.head["rank"]))
    table = np.zeros(len(told), RANKS)
    for row, rank in zip(table, told, strict=True):
        # A run that an older version began did not note its experts.
        values: dict[str, Any] = {"expert_start": 0, "expert_stop": 0, **rank.row, "attempt": rank.head["attempt"]}
        missing = set(RANKS.names or ()) - set(values)
        assert not missing, f"the row of a rank lacks the columns {sorted(missing)}"
        for name in RANKS.names or ():
            row[name] = clean_text(str(values[name])) if RANKS[name].hasobject else values[name]
    with out.guard() as file:
        extend(_create(file, "ranks", RANKS, len(table)), table)


def write_steps(out: WritableFile, files: OpenFiles, ranks: list[RankFile]) -> np.ndarray:
    """/steps, by attempt, rank and step; the sums of each rank that belongs to a replica, TIMES.

    Waiting is measured where ranks share memory. Else it is inferred: the rank that comes last to a step's exchanges
    waits least, so what another spends beyond the least time of its replica in the step is waiting.
    """
    ranks = sorted((rank for rank in ranks if rank.head["replica"] >= 0),
                   key=lambda rank: (rank.head["attempt"], rank.head["rank"]))
    total = sum(count for rank in ranks for _, count in rank.steps)
    with out.guard() as file:
        _create(file, "steps", STEPS, total)
    least: dict[tuple[int, int], np.ndarray] = {}
    for rank in ranks:
        own, key = _steps(files, rank)["communication_s"], (rank.head["attempt"], rank.head["replica"])
        known = least.get(key, own)
        shared = min(len(known), len(own))
        longer = known if len(known) > len(own) else own
        least[key] = np.concatenate([np.minimum(known[:shared], own[:shared]), longer[shared:]])
    times = np.zeros(len(ranks), TIMES)
    for row, rank in zip(times, ranks, strict=True):
        steps, head = _steps(files, rank), rank.head
        exchange = steps["communication_s"]
        wait = np.minimum(steps["waited_s"], exchange)
        if not wait.any():
            wait = exchange - least[head["attempt"], head["replica"]][:len(steps)]
        table = np.zeros(len(steps), STEPS)
        for name in ("attempt", "replica", "rank"):
            table[name] = head[name]
        for name in ("step", "rows_prefill", "rows_decode", "start_s"):
            table[name] = steps[name]
        table["compute_s"], table["communication_s"] = steps["total_s"] - exchange, exchange - wait
        table["wait_s"] = wait
        with out.guard() as file:
            extend(file["steps"], table)
        prefill = steps["rows_prefill"] > 0
        row["attempt"], row["rank"], row["replica"] = head["attempt"], head["rank"], head["replica"]
        row["tp_rank"], row["steps"], row["total_s"] = head["tp_rank"], len(steps), steps["total_s"].sum()
        row["communication_s"], row["wait_s"] = exchange.sum(), wait.sum()
        row["prefill_s"], row["decode_s"] = steps["total_s"][prefill].sum(), steps["total_s"][~prefill].sum()
        row["prefill_tokens"] = steps["rows_prefill"].sum()
        row["decode_tokens"] = steps["rows_decode"][~prefill].sum()
    return times


def _steps(files: OpenFiles, rank: RankFile) -> np.ndarray:
    rows = np.zeros(sum(count for _, count in rank.steps), records.STEP_ROWS)
    begin = 0
    for at, count in rank.steps:
        files.read(rank.path, at, rows[begin:begin + count])
        begin += count
    return rows
