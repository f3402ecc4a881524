"""What stands in the journals of a run: the layouts of their records, packed and unpacked.

Every journal begins with HEAD (JSON: who writes it). A root's journal then has REQUEST records, a rank's journal one
RANK (JSON, its row of /ranks), STEPS (rows of STEP_ROWS) and LOGITS (one i64: values that were clamped; keys i64
[rows, 3] of request index, choice and position; logits [rows, columns]).

REQUEST: one ROW, ``n_choices`` CHOICEs, then flat arrays per prompt token (prompt_tokens; prompt_logprobs if
``scored``; prompt_top_counts if ``prompt_topped``) and per generated token (tokens, logprobs; top_counts if
``topped``), per alternative (top_ids, top_values, prompt_top_ids, prompt_top_values), and the texts: custom_id,
error, of each choice finish_reason, stop_reason and text, and the line of the results with its line end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpillm.formats.hdf5_schema import clean_text
from mpillm.formats.jsonl import dumps_strict

HEAD, REQUEST, RANK, STEPS, LOGITS = range(1, 6)
VERSION = 1
KINDS: dict[str, np.dtype] = {"f16": np.dtype("<f2"), "f32": np.dtype("<f4")}
F16_MAX = float(np.finfo(np.float16).max)

# What a request has, and how much of everything; prompt_items: tokens of each item counted once.
ROW = np.dtype([
    ("line", "<i8"), ("status", "<i4"), ("attempt", "<i4"), ("replica", "<i4"), ("tp", "<i4"), ("ended", "<f8"),
    ("n_choices", "<i4"), ("scored", "<u1"), ("topped", "<u1"), ("prompt_topped", "<u1"), ("zero", "<u1"),
    ("prompt_tokens", "<i8"), ("completion_tokens", "<i8"), ("top_count", "<i8"), ("prompt_top_count", "<i8"),
    ("logits_rows", "<i8"), ("id_bytes", "<i4"), ("error_bytes", "<i4"), ("result_bytes", "<i8")])
CHOICE = np.dtype([
    ("item", "<i4"), ("sample", "<i4"), ("choice", "<i4"), ("reason_bytes", "<i4"), ("stop_bytes", "<i4"),
    ("zero", "<i4"), ("text_bytes", "<i8"), ("seed", "<u8"), ("prompt_start", "<i8"), ("prompt_count", "<i8"),
    ("token_start", "<i8"), ("token_count", "<i8"), ("cumulative_logprob", "<f8"),
    ("queue_s", "<f8"), ("prefill_s", "<f8"), ("first_token_s", "<f8"), ("decode_s", "<f8")])
# A step as the rank measured it: communication includes waiting; waited is 0 where it cannot be measured.
STEP_ROWS = np.dtype([
    ("step", "<i8"), ("rows_prefill", "<i4"), ("rows_decode", "<i4"), ("start_s", "<f8"), ("total_s", "<f8"),
    ("communication_s", "<f8"), ("waited_s", "<f8")])

Alternatives = Sequence[tuple[int, float]]
# (array, column of ROW with its length, type, column of ROW that says whether it is there)
FLAT = (("prompt_tokens", "prompt_tokens", "<i4", ""), ("prompt_logprobs", "prompt_tokens", "<f4", "scored"),
        ("prompt_top_counts", "prompt_tokens", "<i4", "prompt_topped"), ("tokens", "completion_tokens", "<i4", ""),
        ("logprobs", "completion_tokens", "<f4", ""), ("top_counts", "completion_tokens", "<i4", "topped"),
        ("top_ids", "top_count", "<i4", ""), ("top_values", "top_count", "<f4", ""),
        ("prompt_top_ids", "prompt_top_count", "<i4", ""), ("prompt_top_values", "prompt_top_count", "<f4", ""))


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


@dataclass(frozen=True)
class Unpacked:
    """A REQUEST record, its texts as UTF-8; arrays that were not stored are absent in ``flat``."""

    row: np.ndarray                  # [1] of ROW
    choices: np.ndarray              # [n_choices] of CHOICE
    flat: dict[str, np.ndarray]
    custom_id: bytes
    error: bytes
    texts: list[tuple[bytes, bytes, bytes]]     # finish_reason, stop_reason, text of each choice
    result: bytes                    # the line of the results, its line end included


def pack_request(row: np.ndarray, custom_id: str | None, error: str, prompts: Sequence[Any],
                 choices: Sequence[SequenceRecord], prompt_logprobs: Sequence[Any] | None,
                 prompt_top: Sequence[Any] | None, result: dict[str, Any]) -> list[Any]:
    """The pieces of a REQUEST record; fills in what ``row`` [1] of ROW does not have yet.

    ``prompts``: token ids of each item; ``prompt_logprobs`` and ``prompt_top``: per item one entry per prompt
    token (the first None or nan), or None. ``choices``: any order, numbered 0 .. n-1.
    """
    ordered = sorted(choices, key=lambda choice: choice.choice)
    assert [choice.choice for choice in ordered] == list(range(len(ordered))), "choices are 0 .. n-1"
    assert prompt_logprobs is None or len(prompt_logprobs) == len(prompts), "prompt logprobs for each item"
    assert prompt_top is None or len(prompt_top) == len(prompts), "prompt alternatives for each item"

    counts = [len(ids) for ids in prompts]
    starts = np.cumsum([0, *counts])
    flat: dict[str, list[np.ndarray]] = {name: [] for name, *_ in FLAT}
    for item, ids in enumerate(prompts):
        flat["prompt_tokens"].append(np.asarray(ids, "<i4"))
        if prompt_logprobs is not None:
            flat["prompt_logprobs"].append(_floats(prompt_logprobs[item], len(ids)))
        if prompt_top is not None:
            _add_top(flat, "prompt_top", prompt_top[item], len(ids))
    topped = any(choice.top is not None for choice in ordered)
    table, texts, reached = np.zeros(len(ordered), CHOICE), [], 0
    for own, choice in zip(table, ordered, strict=True):
        count = len(choice.token_ids)
        logprobs = _floats(choice.logprobs, count)
        flat["tokens"].append(np.asarray(choice.token_ids, "<i4"))
        flat["logprobs"].append(logprobs)
        if topped:
            _add_top(flat, "top", choice.top, count)
        stop = "" if choice.stop_reason is None else json.dumps(choice.stop_reason, ensure_ascii=False)
        words = [clean_text(text) for text in (choice.finish_reason, stop, choice.text)]
        own["reason_bytes"], own["stop_bytes"], own["text_bytes"] = map(len, words)
        texts += words
        for name in ("item", "sample", "choice", "seed", "queue_s", "prefill_s", "first_token_s", "decode_s"):
            own[name] = getattr(choice, name)
        own["prompt_start"], own["prompt_count"] = starts[choice.item], counts[choice.item]
        own["token_start"], own["token_count"] = reached, count
        own["cumulative_logprob"] = logprobs.astype(np.float64).sum()
        reached += count

    line = (dumps_strict(result) + "\n").encode()
    words = [clean_text(custom_id), clean_text(error)]
    row["n_choices"], row["prompt_tokens"], row["completion_tokens"] = len(ordered), starts[-1], reached
    row["scored"], row["topped"], row["prompt_topped"] = prompt_logprobs is not None, topped, prompt_top is not None
    row["top_count"] = sum(map(len, flat["top_ids"]))
    row["prompt_top_count"] = sum(map(len, flat["prompt_top_ids"]))
    row["id_bytes"], row["error_bytes"], row["result_bytes"] = *map(len, words), len(line)
    arrays = [np.ascontiguousarray(array) for name, *_ in FLAT for array in flat[name]]
    return [row, table, *arrays, *words, *texts, line]


def _add_top(flat: dict[str, list[np.ndarray]], name: str, entries: Sequence[Alternatives | None] | None,
             count: int) -> None:
    entries = entries if entries is not None else [None] * count
    assert len(entries) == count, f"{len(entries)} lists of alternatives for {count} tokens"
    pairs = [pair for entry in entries if entry for pair in entry]
    flat[f"{name}_counts"].append(np.array([len(entry or ()) for entry in entries], "<i4"))
    flat[f"{name}_ids"].append(np.array([token for token, _ in pairs], "<i4"))
    flat[f"{name}_values"].append(np.array([value for _, value in pairs], "<f4"))


def _floats(values: Sequence[float | None] | np.ndarray | None, count: int) -> np.ndarray:
    """float32 [count], None as nan; all nan when there are no values."""
    if values is None:
        return np.full(count, np.nan, "<f4")
    assert len(values) == count, f"{len(values)} log probabilities for {count} tokens"
    return np.array([np.nan if value is None else value for value in values], "<f4")


def unpack_request(payload: bytes | memoryview) -> Unpacked:
    """A REQUEST record. ValueError when its lengths are not those of its payload."""
    at = 0

    def take(dtype: np.dtype | str, count: int) -> np.ndarray:
        nonlocal at
        values = np.frombuffer(payload, dtype, count, at) if count else np.zeros(0, dtype)
        at += values.nbytes
        return values

    def text(length: int) -> bytes:
        nonlocal at
        at += length
        return bytes(payload[at - length:at])

    row = take(ROW, 1)
    own = {name: int(row[name][0]) for name in ROW.names or () if name != "ended"}
    choices = take(CHOICE, own["n_choices"])
    flat = {name: take(kind, own[count]) for name, count, kind, flag in FLAT if not flag or own[flag]}
    custom_id, error = text(own["id_bytes"]), text(own["error_bytes"])
    lengths = [choices[name].tolist() for name in ("reason_bytes", "stop_bytes", "text_bytes")]
    texts = [(text(a), text(b), text(c)) for a, b, c in zip(*lengths, strict=True)]
    result = text(own["result_bytes"])
    if at != len(payload):
        raise ValueError(f"a request of {at} bytes in a record of {len(payload)}")
    return Unpacked(row, choices, flat, custom_id, error, texts, result)


def narrow(logits: np.ndarray, kind: np.dtype) -> tuple[np.ndarray, int]:
    """``logits`` in ``kind``, contiguous, and how many finite values were beyond its range."""
    if kind.itemsize == 4:
        return np.ascontiguousarray(logits, kind), 0
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(logits, kind)
    beyond = np.isinf(rows)
    if not beyond.any():
        return rows, 0
    beyond &= np.isfinite(logits)
    rows[beyond] = np.copysign(F16_MAX, logits[beyond])
    return rows, int(np.count_nonzero(beyond))
