"""The HDF5 output, version 2: names, types and meanings of everything in the file.

``docs/formats.md`` is the prose to these tables; a test holds the two together.
"""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

FORMAT = "mpillm"
SCHEMA_VERSION = 2
TEXT = h5py.string_dtype("utf-8")

_Columns = tuple[tuple[str, Any, str], ...]

_REQUESTS: _Columns = (
    ("line", "<i8", "number of the input line, the first is 1"),
    ("custom_id", TEXT, "the line's custom_id or id; empty where it has none"),
    ("status", "<i4", "0 answered, else the HTTP-like code of the error (4xx)"),
    ("error", TEXT, "why the line failed; empty where it did not"),
    ("n_choices", "<i4", "rows of /sequences that belong to the request"),
    ("first_sequence", "<i8", "the first of them; they follow one another"),
    ("replica", "<i4", "replica that answered, -1 where none did"),
    ("attempt", "<i4", "start of the run, counted from 0, in which it ended"),
    ("tp", "<i4", "ranks of that replica, 0 where none answered"),
    ("prompt_tokens", "<i8", "prompt tokens, each item counted once"),
    ("completion_tokens", "<i8", "generated tokens of all choices"),
)
_SEQUENCES: _Columns = (
    ("request", "<i8", "row of /requests"),
    ("item", "<i4", "which prompt of the request"),
    ("sample", "<i4", "which of the n samples of that prompt"),
    ("choice", "<i4", "item * n + sample, the index of the choice in the results"),
    ("seed", "<u8", "seed of the sequence's random numbers"),
    ("prompt_start", "<i8", "first element of the prompt in /prompt_tokens (samples of an item share it)"),
    ("prompt_count", "<i8", "prompt tokens"),
    ("token_start", "<i8", "first element in /tokens and /logprobs"),
    ("token_count", "<i8", "generated tokens"),
    ("finish_reason", TEXT, "stop or length"),
    ("stop_reason", TEXT, "JSON text: the stop string, or the id of the token that ended it; empty for none"),
    ("cumulative_logprob", "<f8", "sum of the sequence's /logprobs [nat]"),
    ("text", TEXT, "the generated text, as in the results file"),
    ("queue_s", "<f8", "from the start of the run to the first prefill [s]"),
    ("prefill_s", "<f8", "prefill of the prompt [s]"),
    ("first_token_s", "<f8", "from the start of the run to the first token [s]"),
    ("decode_s", "<f8", "from the first token to the last [s]"),
    ("logits_start", "<i8", "first row in /logits and /logits_rows"),
    ("logits_count", "<i8", "rows there; they follow one another, positions ascending"),
)
_LOGITS_ROWS: _Columns = (
    ("sequence", "<i8", "row of /sequences"),
    ("position", "<i8", "index, in prompt + generated tokens, of the token whose successor the row predicts"),
)
_STEPS: _Columns = (
    ("attempt", "<i4", "start of the run, counted from 0"),
    ("replica", "<i4", "replica of the rank"),
    ("rank", "<i4", "rank among all ranks of the job"),
    ("step", "<i8", "number of the step within the replica"),
    ("rows_prefill", "<i4", "prompt tokens in the step"),
    ("rows_decode", "<i4", "sequences that decoded in the step"),
    ("start_s", "<f8", "start of the step since the start of the run [s]"),
    ("compute_s", "<f8", "computing [s]"),
    ("communication_s", "<f8", "exchanging with the other ranks of the replica [s]"),
    ("wait_s", "<f8", "waiting for the other ranks or for work [s]"),
)
_RANKS: _Columns = (
    ("attempt", "<i4", "start of the run, counted from 0"),
    ("rank", "<i4", "rank among all ranks of the job"),
    ("host", TEXT, "host name"),
    ("replica", "<i4", "replica, -1 for an idle rank"),
    ("tp_rank", "<i4", "rank within the replica, -1 for an idle rank"),
    ("cores", TEXT, "cores that the rank was given"),
    ("numa", TEXT, "NUMA domains of these cores"),
    ("threads", "<i4", "threads that compute"),
    ("head_start", "<i4", "query heads owned: first"),
    ("head_stop", "<i4", "query heads owned: one past the last"),
    ("kv_head_start", "<i4", "KV heads cached: first"),
    ("kv_head_stop", "<i4", "KV heads cached: one past the last"),
    ("column_start", "<i8", "feed-forward columns owned, with experts of each of its own: first"),
    ("column_stop", "<i8", "feed-forward columns owned: one past the last"),
    ("expert_start", "<i4", "routed experts owned: first"),
    ("expert_stop", "<i4", "routed experts owned: one past the last; as the first where the model has none"),
    ("vocab_start", "<i8", "vocabulary rows owned: first"),
    ("vocab_stop", "<i8", "vocabulary rows owned: one past the last"),
    ("weight_bytes", "<i8", "bytes of weights in memory [B]"),
    ("kv_bytes_per_token", "<i8", "bytes of KV cache per token, on the mean where positions are sharded [B]"),
)


def _dtype(columns: _Columns) -> np.dtype:
    return np.dtype([(name, kind) for name, kind, _ in columns])


REQUESTS, SEQUENCES, LOGITS_ROWS = _dtype(_REQUESTS), _dtype(_SEQUENCES), _dtype(_LOGITS_ROWS)
STEPS, RANKS = _dtype(_STEPS), _dtype(_RANKS)

COLUMNS: dict[str, _Columns] = {
    "requests": _REQUESTS, "sequences": _SEQUENCES, "logits_rows": _LOGITS_ROWS,
    "steps": _STEPS, "ranks": _RANKS}

DESCRIPTIONS: dict[str, str] = {
    "requests": "one row per input line, in line order",
    "sequences": "one row per choice, in the order of requests and choices",
    "prompt_tokens": "token ids of all prompts, one after another",
    "tokens": "generated token ids of all sequences, one after another",
    "logprobs": "log probability of each element of /tokens [nat]; -inf is possible; nan: not computed",
    "top_logprobs": "most likely tokens beside each element of /tokens, best first",
    "top_logprobs/starts": "alternatives of /tokens[i] are starts[i] to starts[i+1] in ids and values",
    "top_logprobs/ids": "token ids",
    "top_logprobs/values": "log probabilities [nat]",
    "prompt_logprobs": "log probability of each element of /prompt_tokens [nat]; nan for the first of a "
                       "prompt and where not asked for",
    "prompt_top_logprobs": "most likely tokens beside each element of /prompt_tokens, best first",
    "prompt_top_logprobs/starts": "alternatives of /prompt_tokens[i] are starts[i] to starts[i+1] "
                                  "in ids and values",
    "prompt_top_logprobs/ids": "token ids",
    "prompt_top_logprobs/values": "log probabilities [nat]",
    "logits": "rows of logits over the whole vocabulary",
    "logits_rows": "which sequence and position each row of /logits is",
    "steps": "time of every step on every rank, by attempt, rank and step",
    "ranks": "what every rank was and owned, by attempt and rank",
}


def clean_text(text: str | None) -> bytes:
    """``text`` as UTF-8 that an HDF5 string can hold.

    NUL would end the string, so it becomes U+2400 (the picture of NUL); half a surrogate pair is not
    UTF-8, so it becomes its escape, as in ``\\ud83d``.
    """
    if text is None:
        return b""
    return text.replace("\0", "\u2400").encode("utf-8", "backslashreplace")


def describe(item: h5py.Dataset | h5py.Group) -> None:
    """Gives a dataset or group of the output its ``description`` and, for a table, its ``columns``."""
    name = item.name.strip("/")
    item.attrs["description"] = DESCRIPTIONS[name]
    if name in COLUMNS:
        item.attrs["columns"] = "\n".join(f"{column}: {meaning}" for column, _, meaning in COLUMNS[name])
