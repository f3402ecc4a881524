"""Parts: what the ranks write during the run, in a folder ``OUT.h5.parts/`` beside the output.

``replica-RRRRR.h5``        one per replica, written by its root: the finished requests
``logits-RRRRR-TTTTT.h5``   one per rank that owns vocabulary rows: its columns of the logits

Replica part: ``requests`` (PART_REQUESTS) and ``sequences`` as in the output, except that starts count
within the part; flat per prompt token: prompt_tokens, prompt_logprobs, prompt_top_counts; flat per generated
token: tokens, logprobs, top_counts; flat per alternative: top_ids, top_values, prompt_top_ids,
prompt_top_values. Everything of one request is contiguous. Requests stand in the order in which they ended.

Logits part: ``logits`` [rows, columns] and ``keys`` int64 [rows, 4] (request index, choice, position, any),
in the order in which the rows were computed; a row without a key was never finished.

Both survive ``kill -9`` as of the last flush, which comes by itself every few seconds.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import h5py
import numpy as np

from mpillm.errors import OutputError
from mpillm.formats.hdf5_file import RowWriter, WritableFile, extend
from mpillm.formats.hdf5_schema import REQUESTS, SEQUENCES, clean_text

F16_MAX = float(np.finfo(np.float16).max)
FLUSH_SECONDS = 5.0

# Where the pieces of a request begin in the part, beside the columns of the output.
_INSIDE = [("index", "<i8"), ("prompt_first", "<i8"), ("token_first", "<i8"), ("top_first", "<i8"),
           ("top_count", "<i8"), ("prompt_top_first", "<i8"), ("prompt_top_count", "<i8"), ("scored", "<u1")]
PART_REQUESTS = np.dtype([(name, REQUESTS[name]) for name in REQUESTS.names or ()] + _INSIDE)

FLAT = {"prompt_tokens": "<i4", "prompt_logprobs": "<f4", "prompt_top_counts": "<i4",
        "tokens": "<i4", "logprobs": "<f4", "top_counts": "<i4",
        "top_ids": "<i4", "top_values": "<f4", "prompt_top_ids": "<i4", "prompt_top_values": "<f4"}

# (column with the first element, column with the count, datasets that must reach that far)
RANGES = (("first_sequence", "n_choices", ("sequences",)),
          ("prompt_first", "prompt_tokens", ("prompt_tokens", "prompt_logprobs", "prompt_top_counts")),
          ("token_first", "completion_tokens", ("tokens", "logprobs", "top_counts")),
          ("top_first", "top_count", ("top_ids", "top_values")),
          ("prompt_top_first", "prompt_top_count", ("prompt_top_ids", "prompt_top_values")))

_Self = TypeVar("_Self", bound="_Part")
Alternatives = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class SequenceRecord:
    """One finished choice, in plain numbers; ``choice`` = item * n + sample. Times in seconds, nan: unknown.

    ``logprobs``: one per token, or None where they were not computed. ``top``: per token its alternatives
    (id, log probability), best first. ``stop_reason``: the stop string, the id of the token, or None.
    """

    item: int
    sample: int
    choice: int
    seed: int
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    text: str
    finish_reason: str
    stop_reason: str | int | None = None
    top: Sequence[Alternatives] | None = None
    queue_s: float = float("nan")
    prefill_s: float = float("nan")
    first_token_s: float = float("nan")
    decode_s: float = float("nan")


def replica_part_path(parts_dir: str | os.PathLike[str], replica: int) -> str:
    """Where the root of ``replica`` writes its ReplicaPart."""
    return os.path.join(parts_dir, f"replica-{replica:05d}.h5")


def logits_part_path(parts_dir: str | os.PathLike[str], replica: int, tp_rank: int) -> str:
    """Where rank ``tp_rank`` of ``replica`` writes its LogitsPart."""
    return os.path.join(parts_dir, f"logits-{replica:05d}-{tp_rank:05d}.h5")


def part_replica(path: str) -> tuple[str, int] | None:
    """("replica" or "logits", the replica) of a part by its name; None: not a part."""
    found = re.fullmatch(r"(replica)-(\d{5,})\.h5|(logits)-(\d{5,})-\d{5,}\.h5", os.path.basename(path))
    if found is None:
        return None
    return found[1] or found[3], int(found[2] or found[4])


class _Part:
    """What both kinds of parts share: opening, timed flushes, closing, ``with``."""

    def __init__(self, path: str | os.PathLike[str], flush_seconds: float) -> None:
        self.path: str | None = os.fspath(path)
        self._out = WritableFile(os.fspath(path), exclusive=True)
        self._flush_seconds, self._flushed = flush_seconds, time.monotonic()

    def flush(self) -> None:
        """Writes what waits; everything so far survives the death of this process. OutputError."""
        with self._out.guard() as file:
            self._write_waiting(file)
        self._out.flush()
        self._flushed = time.monotonic()

    def flush_if_due(self) -> None:
        """For long steps without news: flushes when the last flush is ``flush_seconds`` ago. OutputError."""
        if time.monotonic() - self._flushed >= self._flush_seconds:
            self.flush()

    def close(self) -> None:
        """Flushes and closes; OutputError. A second call does nothing."""
        if self._out.is_open:
            try:
                self.flush()
                self._out.close()
            finally:
                self._out.abandon()

    def _write_waiting(self, file: h5py.File) -> None:
        raise NotImplementedError

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        try:
            self.close()
        except OutputError:
            if kind is None:  # else the first error is the one to tell
                raise


class ReplicaPart(_Part):
    """The finished requests of one replica; ``path`` must not exist (``replica_part_path``). OutputError."""

    WAITING = 1 << 20  # array elements that wait in memory at most

    def __init__(self, path: str | os.PathLike[str], *, flush_seconds: float = FLUSH_SECONDS) -> None:
        super().__init__(path, flush_seconds)
        with self._out.guard() as file:
            for name, dtype in (("requests", PART_REQUESTS), ("sequences", SEQUENCES)):
                file.create_dataset(name, (0,), dtype, maxshape=(None,), chunks=(64,))
            for name, kind in FLAT.items():
                file.create_dataset(name, (0,), kind, maxshape=(None,), chunks=(4096,))
        self._waiting: dict[str, list[np.ndarray]] = {name: [] for name in file}
        self._length = dict.fromkeys(self._waiting, 0)
        self.flush()

    def add_request(self, *, index: int, line: int, custom_id: str | None, replica: int,
                    prompts: Sequence[Sequence[int] | np.ndarray], choices: Sequence[SequenceRecord],
                    prompt_logprobs: Sequence[Sequence[float | None] | np.ndarray | None] | None = None,
                    prompt_top: Sequence[Sequence[Alternatives | None] | None] | None = None,
                    status: int = 0, error: str = "") -> None:
        """One finished (or, with ``status`` and ``error``, failed) request.

        ``index``: place among the input's requests, failed lines included; ``line``: number of the input
        line. ``prompts``: token ids of each item; ``prompt_logprobs`` and ``prompt_top``: per item one entry
        per prompt token (the first None or nan), or None. ``choices``: any order, numbered 0 .. n-1.
        """
        ordered = sorted(choices, key=lambda choice: choice.choice)
        assert [choice.choice for choice in ordered] == list(range(len(ordered))), "choices are 0 .. n-1"
        assert prompt_logprobs is None or len(prompt_logprobs) == len(prompts), "prompt logprobs per item"
        assert prompt_top is None or len(prompt_top) == len(prompts), "prompt alternatives for each item"

        row = np.zeros(1, PART_REQUESTS)
        firsts = {first: self._length[names[0]] for first, _, names in RANGES}
        starts = self._add_prompts(prompts, prompt_logprobs, prompt_top)
        for choice in ordered:
            self._add_sequence(choice, starts[choice.item], len(prompts[choice.item]))
        for first, count, names in RANGES:
            row[first], row[count] = firsts[first], self._length[names[0]] - firsts[first]
        row["index"], row["line"], row["replica"], row["status"] = index, line, replica, status
        row["custom_id"], row["error"] = clean_text(custom_id), clean_text(error)
        row["scored"] = prompt_logprobs is not None
        self._put("requests", row)

        if sum(len(array) for arrays in self._waiting.values() for array in arrays) > self.WAITING:
            self.flush()
        self.flush_if_due()

    def _add_prompts(self, prompts: Sequence[Any], logprobs: Sequence[Any] | None,
                     top: Sequence[Any] | None) -> list[int]:
        """Where each prompt starts in ``prompt_tokens``."""
        starts = []
        for item, ids in enumerate(prompts):
            starts.append(self._length["prompt_tokens"])
            self._put("prompt_tokens", np.asarray(ids, "<i4"))
            self._put("prompt_logprobs", _floats(logprobs[item] if logprobs else None, len(ids)))
            self._put_top("prompt_top", top[item] if top else None, len(ids))
        return starts

    def _add_sequence(self, choice: SequenceRecord, prompt_start: int, prompt_count: int) -> None:
        count = len(choice.token_ids)
        logprobs = _floats(choice.logprobs, count)
        row = np.zeros(1, SEQUENCES)
        for name in ("item", "sample", "choice", "seed", "queue_s", "prefill_s", "first_token_s", "decode_s"):
            row[name] = getattr(choice, name)
        row["prompt_start"], row["prompt_count"] = prompt_start, prompt_count
        row["token_start"], row["token_count"] = self._length["tokens"], count
        row["finish_reason"], row["text"] = clean_text(choice.finish_reason), clean_text(choice.text)
        stop = choice.stop_reason
        row["stop_reason"] = b"" if stop is None else clean_text(json.dumps(stop, ensure_ascii=False))
        row["cumulative_logprob"] = logprobs.astype(np.float64).sum()
        self._put("sequences", row)
        self._put("tokens", np.asarray(choice.token_ids, "<i4"))
        self._put("logprobs", logprobs)
        self._put_top("top", choice.top, count)

    def _put_top(self, name: str, entries: Sequence[Alternatives | None] | None, count: int) -> None:
        entries = entries if entries is not None else [None] * count
        assert len(entries) == count, f"{len(entries)} lists of alternatives for {count} tokens"
        flat = [pair for entry in entries if entry for pair in entry]
        self._put(f"{name}_counts", np.array([len(entry or ()) for entry in entries], "<i4"))
        self._put(f"{name}_ids", np.array([token for token, _ in flat], "<i4"))
        self._put(f"{name}_values", np.array([value for _, value in flat], "<f4"))

    def _put(self, name: str, values: np.ndarray) -> None:
        self._waiting[name].append(values)
        self._length[name] += len(values)

    def _write_waiting(self, file: h5py.File) -> None:
        for name, arrays in self._waiting.items():
            if arrays:
                extend(file[name], np.concatenate(arrays))
                arrays.clear()


class LogitsPart(_Part):
    """One rank's columns ``vocab_start`` to ``vocab_stop`` of the logits (``logits_part_path``).

    ``dtype`` f16 or f32. In f16 a finite value beyond 65504 is stored as 65504 with its sign and counted
    in ``clamped``; infinities and nan stay what they are. When the rank owns no columns, no file is made and
    ``path`` is None.
    """

    def __init__(self, path: str | os.PathLike[str], vocab_start: int, vocab_stop: int, dtype: str,
                 compress: bool = True, *, threads: int = 1, flush_seconds: float = FLUSH_SECONDS) -> None:
        assert dtype in ("f16", "f32"), f"logits are stored as f16 or f32, not {dtype}"
        assert 0 <= vocab_start <= vocab_stop, f"vocabulary rows {vocab_start} to {vocab_stop}"
        self.clamped = 0
        self._width = vocab_stop - vocab_start
        self._kind: np.dtype = np.dtype({"f16": "<f2", "f32": "<f4"}[dtype])
        if self._width == 0:
            self.path = None
            return
        super().__init__(path, flush_seconds)
        with self._out.guard() as file:
            self._logits = RowWriter.create(file, "logits", 0, self._width, self._kind, compress)
            self._keys = file.create_dataset("keys", (0, 4), "<i8", maxshape=(None, 4), chunks=(1024, 4))
            self._logits.attrs.update(vocab_start=vocab_start, vocab_stop=vocab_stop, clamped=0)
        self._writer = RowWriter(self._logits, threads)
        self.flush()

    def append(self, keys: np.ndarray, logits: np.ndarray) -> None:
        """Rows [r, local] with keys int64 [r, 4]: request index, choice, position, anything. OutputError.

        A key that comes again (a sequence computed anew) counts once.
        """
        assert keys.shape == (len(logits), 4) and logits.shape[1:] == (self._width,), \
            f"keys {keys.shape}, logits {logits.shape}, {self._width} columns"
        if self._width == 0 or not len(keys):
            return
        rows, clamped = _narrow(logits, self._kind)
        with self._out.guard():
            start = len(self._keys)
            self._logits.resize(start + len(rows), axis=0)
            self._writer.write(range(start, start + len(rows)), rows)
            extend(self._keys, np.asarray(keys, "<i8"))
        self.clamped += clamped
        self.flush_if_due()

    def flush_if_due(self) -> None:
        if self._width:
            super().flush_if_due()

    def flush(self) -> None:
        if self._width:
            super().flush()

    def close(self) -> None:
        if self._width:
            self._writer.close()
            super().close()

    def _write_waiting(self, file: h5py.File) -> None:
        self._logits.attrs.modify("clamped", self.clamped)


def whole_requests(file: h5py.File) -> int:
    """How many leading requests of a replica part are complete; the rest was cut off by a kill."""
    columns = ["line", *(column for first, count, _ in RANGES for column in (first, count))]
    rows = file["requests"].fields(columns)[:]
    whole = rows["line"] > 0
    for first, count, names in RANGES:
        length = min(len(file[name]) for name in names)
        whole &= (rows[first] >= 0) & (rows[count] >= 0) & (rows[count] <= length - rows[first])
    return len(rows) if whole.all() else int(np.argmin(whole))


def _floats(values: Sequence[float | None] | np.ndarray | None, count: int) -> np.ndarray:
    """float32 [count], None as nan; all nan when there are no values."""
    if values is None:
        return np.full(count, np.nan, "<f4")
    assert len(values) == count, f"{len(values)} log probabilities for {count} tokens"
    return np.array([np.nan if value is None else value for value in values], "<f4")


def _narrow(logits: np.ndarray, kind: np.dtype) -> tuple[np.ndarray, int]:
    """``logits`` in ``kind``, contiguous, and how many finite values were beyond its range."""
    if kind.itemsize == 4:
        return np.ascontiguousarray(logits, kind), 0
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(logits, kind)
    beyond = np.isinf(rows) & np.isfinite(logits)
    count = int(np.count_nonzero(beyond))
    if count:
        rows[beyond] = np.copysign(F16_MAX, logits[beyond])
    return rows, count
