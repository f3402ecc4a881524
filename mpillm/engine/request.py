"""Requests: a line of the prompts file as the engine runs it, and what the engine hands to the writers.

Everything about a line is decided here, once, before any rank gets it; docs/input.md is the list.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from mpillm.engine.guided import check_guide, read_guide
from mpillm.engine.validate import (
    NAMES,
    Limits,
    Sampling,
    boolean,
    check_defaults,
    check_ids,
    check_names,
    read_sampling,
    refuse,
)
from mpillm.errors import LineError
from mpillm.formats.jsonl import has_lone_surrogate, one_line, parse_line, quote

__all__ = ["Choice", "FailedLine", "Limits", "PromptScore", "Request", "Result", "Sampling", "Timing",
           "check_defaults", "read_request", "read_requests", "resolve_max_tokens", "sequence_seed"]

MAX_ID_BYTES = 65536          # of a custom_id, in UTF-8
MAX_CHOICES = 65536           # items times n of one line
BYTES_PER_POSITION = 1024     # no token stands for so many: a longer text is too long without counting tokens
URLS = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
_ENVELOPE = frozenset(("custom_id", "id", "method", "url", "body"))


@dataclass(frozen=True)
class Request:
    """One line that can run."""

    line: int                                # from 1, blank lines counted
    index: int                               # from 0, blank lines left out
    custom_id: str | None
    kind: str                                # 'chat' or 'completion'
    bare: bool                               # the parameters stood beside the prompt, without a body
    prompts: tuple[Sequence[int], ...]       # token ids of each item, none of them empty
    sampling: Sampling
    model: str                               # echoed in the result


@dataclass(frozen=True)
class FailedLine:
    """One line that cannot run, with the fields of its LineError."""

    line: int
    index: int
    custom_id: str | None
    message: str
    param: str | None = None
    code: str = "invalid_request"
    status: int = 400

    @classmethod
    def of(cls, line: int, index: int, custom_id: str | None, error: LineError) -> FailedLine:
        """The line's error, its message led by the line's number, on one line and of bounded length."""
        param = None if error.param is None else one_line(error.param, 100)
        return cls(line, index, custom_id, f"line {line}: {one_line(str(error))}", param, error.code,
                   error.status)


@dataclass
class Choice:
    """One generated sequence."""

    item: int                                # which prompt of the line
    sample: int                              # which of its n
    index: int                               # item * n + sample
    token_ids: list[int]
    logprobs: list[float]                    # of token_ids; may be empty when they were not asked for
    top: list[list[tuple[int, float]]] | None    # per token: (id, logprob), best first
    text: str
    finish_reason: str                       # 'stop' or 'length'
    stop_reason: str | int | None            # the stop string or stop token id that ended it


@dataclass
class Timing:
    """Seconds of one choice; queue and first_token count from the run's start."""

    queue_s: float
    prefill_s: float
    first_token_s: float
    decode_s: float


# How likely one token of a prompt was after those before it: its logprob and the alternatives, best first.
PromptScore = tuple[float, "list[tuple[int, float]] | None"]


@dataclass
class Result:
    """All choices of one request, in order of their index."""

    request: Request
    choices: list[Choice]
    timings: list[Timing]
    replica: int
    prompt_logprobs: list[list[PromptScore | None]] | None    # per item, per token (None: the first)


def resolve_max_tokens(sampling: Sampling, prompt_len: int, max_positions: int) -> int:
    """How many tokens a prompt may get: what was asked for, clipped to the room in the context."""
    room = max_positions - prompt_len
    assert room >= 0, f"a prompt of {prompt_len} tokens passed the check against {max_positions} positions"
    return room if sampling.max_tokens is None else min(sampling.max_tokens, room)


def sequence_seed(run_seed: int, request: Request, item: int, sample: int) -> int:
    """The 64-bit seed of one sequence.

    From (seed, item, sample) where the line has a seed, else from (run seed, line number, item,
    sample); so it depends on nothing that runs beside it.
    """
    seed = request.sampling.seed
    numbers = (0, run_seed, request.line - 1, item, sample) if seed is None else (1, seed, item, sample)
    packed = struct.pack(f"<{len(numbers)}Q", *(number & (2**64 - 1) for number in numbers))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


# Lines to requests

def read_requests(lines: Iterable[tuple[int, bytes]], defaults: Sampling, tokenizer: Any | None,
                  limits: Limits) -> Iterator[Request | FailedLine]:
    """Each line (number, bytes) as a Request, or as a FailedLine when it cannot be served.

    ``tokenizer`` None: only lines of token ids can run. Raises only what ``lines`` raises.
    """
    for index, (line, raw) in enumerate(lines):
        yield read_request(line, index, raw, defaults, tokenizer, limits)


def read_request(line: int, index: int, raw: bytes, defaults: Sampling, tokenizer: Any | None,
                 limits: Limits) -> Request | FailedLine:
    """One line as a Request or a FailedLine."""
    custom_id = None
    try:
        value, defect = parse_line(raw, limits.max_line_bytes)
        if not isinstance(value, dict):
            raise LineError(f"a line must hold a JSON object, not {quote(value)}", code="invalid_line")
        try:
            custom_id = _custom_id(value)
        except LineError as error:
            raise defect or error from None
        if defect is not None:
            if _repeats_id(defect):
                custom_id = None
            raise defect
        body, kind, bare = _unwrap(value)
        sampling = read_sampling(body, kind, defaults, limits)
        guide = read_guide(body)
        model = _model(body, limits)
        prompts = _prompts(body, kind, tokenizer, limits, sampling)
        if sampling.stop and tokenizer is None:
            raise LineError("stop: the model has no tokenizer, so no text is made; use stop_token_ids with "
                            "prompt_token_ids", param="stop", code="no_tokenizer")
        if guide is not None:
            check_guide(guide, tokenizer)
            sampling = replace(sampling, guided=guide)
        return Request(line, index, custom_id, kind, bare, prompts, sampling, model)
    except LineError as error:
        return FailedLine.of(line, index, custom_id, error)


def echoed_id(raw: bytes) -> str | None:
    """The ``custom_id`` of the line's result, as ``read_request`` finds it, of a line that is not run."""
    try:
        value, defect = parse_line(raw)
        custom_id = _custom_id(value) if isinstance(value, dict) else None
    except LineError:
        return None
    return None if _repeats_id(defect) else custom_id


def _repeats_id(defect: LineError | None) -> bool:
    """Two ids stand in one line: which of them would it be."""
    return defect is not None and defect.code == "duplicate_key" and defect.param in ("custom_id", "id")


def _custom_id(value: dict[str, Any]) -> str | None:
    """``custom_id``, or ``id`` as its other name: a text, or a whole number, which becomes its digits."""
    ids = {}
    for name in ("custom_id", "id"):
        given = value.get(name)
        if given is None:
            continue
        if isinstance(given, int) and not isinstance(given, bool):
            given = str(given)
        if not isinstance(given, str):
            raise refuse(name, given, "a text or a whole number")
        if len(given) > MAX_ID_BYTES or len(given.encode("utf-8", "replace")) > MAX_ID_BYTES:
            raise refuse(name, given, f"of at most {MAX_ID_BYTES} bytes")
        if "\0" in given or has_lone_surrogate(given):
            raise refuse(name, given, "text without NUL and without halves of surrogate pairs")
        ids[name] = given
    if len(set(ids.values())) > 1:
        raise refuse("id", ids["id"], f"the same as custom_id {quote(ids['custom_id'])}, or left out")
    return next(iter(ids.values()), None)


def _unwrap(value: dict[str, Any]) -> tuple[dict[str, Any], str, bool]:
    """The parameters, the kind, and whether the line is bare. Raises LineError."""
    if not any(name in value for name in ("body", "url", "method")):
        found = _kind(value, "line")
        check_names(value, NAMES[found] | {"custom_id", "id"}, "field")
        return value, found, True
    inner = (NAMES["chat"] | NAMES["completion"]) - _ENVELOPE
    misplaced = [name for name in value if name in inner]
    if misplaced:
        raise LineError(f"{misplaced[0]} stands beside body: put it into body", param=misplaced[0],
                        code="invalid_line")
    check_names(value, _ENVELOPE, "field beside body")
    if value.get("method") not in (None, "POST"):
        raise refuse("method", value["method"], '"POST"')
    kind = _kind_of_url(value.get("url"))
    body = value.get("body")
    if not isinstance(body, dict):
        given = quote(body) if "body" in value else "is missing"
        raise LineError(f"body {given}: must be an object with the parameters", param="body",
                        code="invalid_line")
    found = _kind(body, "body")
    if kind is not None and kind != found:
        raise refuse("url", value["url"], f"{_url_of(found)} for a body with "
                                          f"{'messages' if found == 'chat' else 'a prompt'}")
    check_names(body, NAMES[found], "parameter")
    return body, found, False


def _kind_of_url(url: Any) -> str | None:
    """'chat' or 'completion'; a host before and a slash after are let pass; None where there is no url."""
    if url is None:
        return None
    path = url
    if isinstance(url, str) and url.lower().startswith(("http://", "https://")):
        try:
            parts = urlsplit(url)
        except ValueError:
            raise refuse("url", url, " or ".join(URLS)) from None
        path = parts.path if not parts.query and not parts.fragment else ""
    if isinstance(path, str):
        path = path.removesuffix("/")
        if path in URLS:
            return URLS[path]
    raise refuse("url", url, " or ".join(URLS))


def _url_of(kind: str) -> str:
    return next(url for url, its_kind in URLS.items() if its_kind == kind)


def _kind(params: dict[str, Any], where: str) -> str:
    """By the one of prompt, prompt_token_ids and messages that is there. Raises LineError."""
    names = [name for name in ("prompt", "prompt_token_ids", "messages") if params.get(name) is not None]
    if len(names) > 1:
        raise LineError(f"{names[0]} and {names[1]} in one {where}: give one of them", param=names[1],
                        code="invalid_prompt")
    if not names:
        null = [name for name in ("prompt", "prompt_token_ids", "messages") if name in params]
        problem = f"{null[0]} is null" if null else f"no prompt in the {where}"
        raise LineError(f"{problem}: give prompt, prompt_token_ids or messages",
                        param=null[0] if null else "prompt", code="invalid_prompt")
    return "chat" if names[0] == "messages" else "completion"


def _model(body: dict[str, Any], limits: Limits) -> str:
    model = body.get("model")
    if model is None:
        return limits.model
    if not isinstance(model, str) or len(model) > 1000 or "\0" in model:
        raise refuse("model", model, "a text of at most 1000 characters")
    return model


# Prompts

def _prompts(body: dict[str, Any], kind: str, tokenizer: Any | None, limits: Limits,
             sampling: Sampling) -> tuple[tuple[int, ...], ...]:
    """The token ids of each item, checked against vocabulary and context. Raises LineError."""
    if kind == "chat":
        name, items = "messages", [_chat_ids(body, tokenizer, limits)]
    else:
        name = "prompt" if body.get("prompt") is not None else "prompt_token_ids"
        special = body.get("parse_special")
        special = limits.parse_special if special is None else boolean("parse_special", special)
        begin = body.get("add_special_tokens")
        begin = True if begin is None else boolean("add_special_tokens", begin)
        _check_asked(body, ("parse_special", "add_special_tokens"), limits)
        items = _items(name, body[name], tokenizer, limits, begin, special)
    if len(items) * sampling.n > MAX_CHOICES:
        raise LineError(f"{name}: {len(items)} items times n {sampling.n} are more than {MAX_CHOICES} "
                        "choices: split the line", param=name, code="too_many_choices")
    return tuple(_fit(name if len(items) == 1 else f"{name}[{i}]", ids, tokenizer, limits, sampling)
                 for i, ids in enumerate(items))


def _check_asked(body: dict[str, Any], names: tuple[str, ...], limits: Limits) -> None:
    for name in names:
        if name in limits.unsupported and body.get(name) is not None:
            raise LineError(f"{name} {quote(body[name])}: not supported in this version, leave it out",
                            param=name, code="unsupported")


def _items(name: str, value: Any, tokenizer: Any | None, limits: Limits, begin: bool,
           special: bool) -> list[tuple[int, ...]]:
    """A text, a list of ids, or a list of either, as token ids; [] is one empty prompt."""
    forms = "a text, a list of token ids, or a list of either" if name == "prompt" else \
            "a list of token ids, or a list of such lists"
    if isinstance(value, str) and name == "prompt":
        return [_encode(name, value, tokenizer, limits, begin, special)]
    if not isinstance(value, list):
        raise refuse(name, value, forms)
    if not value or not isinstance(value[0], list if name == "prompt_token_ids" else (str, list)):
        return [check_ids(name, value, limits.vocab)]
    # A short look over everything first: one wrong item among thousands should cost nothing.
    kind = type(value[0])
    for position, item in enumerate(value):
        if not isinstance(item, kind):
            raise refuse(f"{name}[{position}]", item, f"like its neighbours, as {name} is {forms}")
    return [_encode(f"{name}[{i}]", item, tokenizer, limits, begin, special) if kind is str
            else check_ids(f"{name}[{i}]", item, limits.vocab) for i, item in enumerate(value)]


def _encode(name: str, text: str, tokenizer: Any | None, limits: Limits, begin: bool,
            special: bool) -> tuple[int, ...]:
    present = _need_tokenizer(name, tokenizer)
    _check_length(name, len(text), limits)
    return _call(name, lambda: present.encode(text, add_special=begin, parse_special=special), limits)


def _chat_ids(body: dict[str, Any], tokenizer: Any | None, limits: Limits) -> tuple[int, ...]:
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise refuse("messages", messages, "a list of at least one message")
    size = sum(_check_message(f"messages[{i}]", message) for i, message in enumerate(messages))
    if body.get("parse_special") is not None and boolean("parse_special", body["parse_special"]):
        raise refuse("parse_special", True, "left out of a chat: messages never hold special tokens")
    tools = _tools(body)
    _check_asked(body, ("tools", "tool_choice"), limits)
    present = _need_tokenizer("messages", tokenizer)
    _check_length("messages", size, limits)
    return _call("messages", lambda: present.encode_chat(messages, tools), limits)


def _check_message(where: str, message: Any) -> int:
    """Refuse what no template can take; gives the number of characters of the content."""
    if not isinstance(message, dict):
        raise refuse(where, message, "an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise refuse(f"{where}.role", role, 'a text such as "user"')
    if content is None and role != "assistant":
        raise refuse(f"{where}.content", content, "a text (only an assistant's may be null)")
    if content is not None and not isinstance(content, (str, list)):
        raise refuse(f"{where}.content", content, "a text or a list of text parts")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return sum(len(text) for text in texts if isinstance(text, str))
    return len(content or "")


def _tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that the template is to show; tool_choice none shows none of them."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise refuse("tools", tools, "a list of objects")
    if choice not in (None, "auto", "none"):
        raise refuse("tool_choice", choice, '"auto" or "none": no answer is forced into the form of a call')
    return (tools or None) if choice != "none" else None


def _need_tokenizer(name: str, tokenizer: Any | None) -> Any:
    if tokenizer is None:
        raise LineError(f"{name}: the model has no tokenizer, so text cannot be read: give prompt_token_ids",
                        param=name, code="no_tokenizer")
    return tokenizer


def _check_length(name: str, characters: int, limits: Limits) -> None:
    if characters > BYTES_PER_POSITION * limits.max_positions:
        raise LineError(f"{name}: {characters} characters are too long for the model's "
                        f"{limits.max_positions} positions", param=name, code="context_length_exceeded")


def _call(name: str, encode: Callable[[], list[int]], limits: Limits) -> tuple[int, ...]:
    """Token ids from the tokenizer; whatever it raises over a text fails the line, not the run."""
    try:
        ids = [int(token) for token in encode()]
    except LineError:
        raise
    except Exception as error:
        raise LineError(f"{name}: the tokenizer or chat template failed: {type(error).__name__}: "
                        f"{quote(str(error), 100)}", param=name, code="tokenizer_failed") from error
    worst = max(ids, default=0)
    if worst >= limits.vocab:
        raise LineError(f"{name}: the tokenizer gave the id {worst}, beyond the model's {limits.vocab} "
                        "tokens: do they belong together?", param=name, code="tokenizer_failed")
    return tuple(ids)


def _fit(name: str, ids: tuple[int, ...], tokenizer: Any | None, limits: Limits,
         sampling: Sampling) -> tuple[int, ...]:
    """The ids, an empty prompt begun with BOS, if they fit the context. Raises LineError."""
    if not ids:
        bos = getattr(tokenizer, "bos_id", None)
        bos = limits.bos_id if bos is None else bos
        if bos is None:
            raise LineError(f"{name} is empty, and the model has no start token to begin with", param=name,
                            code="empty_prompt")
        ids = (bos,)
    room = limits.max_positions - (sampling.max_tokens != 0)
    if len(ids) > room:
        more = "" if sampling.max_tokens == 0 else ", and at least one is to be generated"
        raise LineError(f"{name}: {len(ids)} tokens are too long: the model has {limits.max_positions} "
                        f"positions{more}", param=name, code="context_length_exceeded")
    return ids
