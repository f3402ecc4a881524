"""The parameters of a line: which names there are, which values they may have, how they combine.

Every rule takes ``(name, value, limits)`` and gives the value as ``Sampling`` holds it, or raises
LineError naming field, value and range. Ranges are written so that NaN fails them.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from mpillm.errors import LineError, UsageError
from mpillm.formats.jsonl import MAX_LINE_BYTES, has_lone_surrogate, quote

INT64_MAX = 2**63 - 1
MAX_N = 1024               # samples of one prompt
MAX_LOGPROBS = 20          # alternatives per token
MAX_STOPS = 64             # stop strings of a line
MAX_STOP_LENGTH = 4096     # characters of one stop string


@dataclass(frozen=True)
class Guide:
    """The form that a text must have."""

    kind: str                            # 'json', 'regex', 'choice' or 'grammar'
    text: str                            # the schema, the expression, the choices as JSON, the grammar
    param: str                           # the parameter that named it
    whitespace: str | None = None        # between parts of JSON; "": none; None: some at commas and colons


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and where a text ends; names and meanings are vLLM's."""

    max_tokens: int | None = None        # None: to the end of the context
    temperature: float = 1.0             # 0: greedy
    top_p: float = 1.0                   # 0: the most likely token alone
    top_k: int = 0                       # 0: off
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None          # alternatives per generated token; 0: the token's own; None: off
    prompt_logprobs: int | None = None   # the same for the prompt's tokens
    echo: bool = False                   # the prompt's text before the completion
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()     # (token id, bias), ids ascending
    allowed_token_ids: tuple[int, ...] | None = None   # ascending
    min_tokens: int = 0
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    guided: Guide | None = None          # read by ``guided.read_guide``


@dataclass(frozen=True)
class Limits:
    """What the model and the program allow a line to ask for."""

    vocab: int                           # rows of the embedding: ids are below it
    max_positions: int                   # prompt and completion together, in tokens
    bos_id: int | None = None            # begins an empty prompt where the tokenizer names none
    model: str = ""                      # echoed where a line names no model
    parse_special: bool = False          # may text prompts hold special tokens
    unsupported: frozenset[str] = frozenset()   # parameters that the engine does not implement
    max_line_bytes: int = MAX_LINE_BYTES


def refuse(name: str, value: Any, what: str) -> LineError:
    """The error for a value that a field may not have."""
    return LineError(f"{name} {quote(value)}: must be {what}", param=name, code="invalid_value")


# Rules for one value

def integer(name: str, value: Any, _limits: Limits | None = None, *, low: int, high: int = INT64_MAX) -> int:
    """A whole number; 16.0 counts as 16, true and "16" do not."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        top = f"from {low} to {high}" if high < 2**31 else f"of at least {low}, within 64 bits"
        raise refuse(name, value, f"a whole number {top}")
    return value


def number(name: str, value: Any, _limits: Limits | None = None, *, low: float,
           high: float = math.inf) -> float:
    """A finite number within [low, high]; -0.0 becomes 0.0."""
    what = f"a number from {low:g} to {high:g}" if high < math.inf else f"a finite number of at least {low:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise refuse(name, value, what)
    try:
        exact = float(value)
    except OverflowError:
        raise refuse(name, value, what) from None
    if not (low <= exact <= high and math.isfinite(exact)):
        raise refuse(name, value, what)
    return exact + 0.0


def boolean(name: str, value: Any, _limits: Limits | None = None) -> bool:
    """true or false; 0, 1 and "true" are refused."""
    if not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return value


def check_ids(name: str, ids: list[Any], vocab: int) -> tuple[int, ...]:
    """Token ids of the model: whole numbers (16.0 is none) below ``vocab``."""
    for position, item in enumerate(ids):
        if type(item) is not int or not 0 <= item < vocab:
            raise LineError(f"{name}[{position}] {quote(item)}: must be a token id, a whole number from 0 to "
                            f"{vocab - 1}", param=name, code="invalid_value")
    return tuple(ids)


def id_list(name: str, value: Any, limits: Limits, *, ascending: bool = False) -> tuple[int, ...]:
    """A list of token ids, doubled ones once."""
    if not isinstance(value, list):
        raise refuse(name, value, "a list of token ids")
    ids = tuple(dict.fromkeys(check_ids(name, value, limits.vocab)))
    return tuple(sorted(ids)) if ascending else ids


def allowed_ids(name: str, value: Any, limits: Limits) -> tuple[int, ...]:
    """A list of token ids with at least one in it: an empty one would leave nothing to choose from."""
    if value == []:
        raise refuse(name, value, "a list of at least one token id (null: all are allowed)")
    return id_list(name, value, limits, ascending=True)


def stop_strings(name: str, value: Any, _limits: Limits | None = None) -> tuple[str, ...]:
    """One stop string or a list of them; [] is none at all."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise refuse(name, value, "a text or a list of texts")
    if len(stops) > MAX_STOPS:
        raise refuse(name, value, f"a list of at most {MAX_STOPS} texts")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_LENGTH or has_lone_surrogate(stop):
            raise refuse(name, stop, f"a text of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(dict.fromkeys(stops))


def bias_table(name: str, value: Any, limits: Limits) -> tuple[tuple[int, float], ...]:
    """{"token id": bias from -100 to 100}."""
    if not isinstance(value, dict):
        raise refuse(name, value, 'an object such as {"42": -100}')
    table = {}
    for key, bias in value.items():
        token = int(key) if re.fullmatch(r"0|[1-9][0-9]{0,17}", key) else -1
        if not 0 <= token < limits.vocab:
            raise LineError(f"{name} key {quote(key)}: must be a token id, a whole number from 0 to "
                            f"{limits.vocab - 1}", param=name, code="invalid_value")
        table[token] = number(f"{name}[{token}]", bias, low=-100, high=100)
    return tuple(sorted(table.items()))


def top_k(name: str, value: Any, _limits: Limits | None = None) -> int:
    """How many of the most likely tokens stay; -1 and 0 are off."""
    return max(0, integer(name, value, low=-1))


Rule = Callable[[str, Any, Limits], Any]
_penalty = partial(number, low=-2, high=2)
_share = partial(number, low=0, high=1)
_count = partial(integer, low=0)
_alternatives = partial(integer, low=0, high=MAX_LOGPROBS)

RULES: Mapping[str, Rule] = {
    "max_tokens": _count,
    "temperature": partial(number, low=0),
    "top_p": _share,
    "top_k": top_k,
    "min_p": _share,
    "seed": partial(integer, low=-2**63, high=2**64 - 1),
    "stop": stop_strings,
    "stop_token_ids": id_list,
    "ignore_eos": boolean,
    "n": partial(integer, low=1, high=MAX_N),
    "logprobs": _alternatives,
    "prompt_logprobs": _alternatives,
    "echo": boolean,
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    # Beyond these bounds a penalised logit may leave float32's range.
    "repetition_penalty": partial(number, low=1e-9, high=1e9),
    "logit_bias": bias_table,
    "allowed_token_ids": allowed_ids,
    "min_tokens": _count,
    "skip_special_tokens": boolean,
    "include_stop_str_in_output": boolean,
}

# Names that change nothing here, whatever their value.
IGNORED = frozenset((
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "cache_salt", "parallel_tool_calls", "stream_options", "request_id", "priority",
    "prediction", "return_token_ids", "guided_decoding_backend"))

# Names that say which form a text must have; ``guided.read_guide`` reads them.
FORMS = frozenset(("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
                   "guided_grammar", "guided_whitespace_pattern"))

# Names of things that are not done here, and the values with which they ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,), "suffix": ("",), "best_of": (1,), "use_beam_search": (False,),
    "length_penalty": (1, 1.0), "functions": ([],),
    "function_call": ("none", "auto"), "modalities": (["text"],), "audio": (), "web_search_options": (),
    "reasoning_effort": (), "verbosity": (), "logits_processors": ([],),
    "truncate_prompt_tokens": (), "prompt_embeds": (), "bad_words": ([],), "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template": (),
    "chat_template_kwargs": ({},), "documents": ([],), "return_tokens_as_token_ids": (False,),
    "top_a": (0, 0.0), "typical_p": (1, 1.0), "mirostat": (0,), "detokenize": (True,),
}

COMMON_NAMES = frozenset((*RULES, *IGNORED, *NEUTRAL, *FORMS, "max_completion_tokens", "model", "parse_special"))
NAMES: Mapping[str, frozenset[str]] = {
    "completion": COMMON_NAMES | {"prompt", "prompt_token_ids", "add_special_tokens"},
    "chat": COMMON_NAMES | {"messages", "tools", "tool_choice", "top_logprobs"},
}


# Rules for a whole line

def check_names(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuse names that are not known, suggesting the closest that is. Raises LineError."""
    known = sorted(known)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name[:64].lower(), known, n=1, cutoff=0.7)
            hint = f" (did you mean {close[0]!r}?)" if close else \
                   " (fields of your own go under \"metadata\")"
            raise LineError(f"unknown {where} {quote(name)}{hint}", param=name[:100],
                            code="unknown_parameter")


def check_neutral(params: Mapping[str, Any]) -> None:
    """Refuse what would change the result and is not done here. Raises LineError."""
    for name, harmless in NEUTRAL.items():
        value = params.get(name)
        if value is not None and not any(type(value) is type(h) and value == h for h in harmless):
            raise LineError(f"{name} {quote(value)}: not supported in this version, leave it out", param=name,
                            code="unsupported")


def read_sampling(params: Mapping[str, Any], kind: str, defaults: Sampling, limits: Limits) -> Sampling:
    """The line's parameters over the defaults; null stands for the default.

    ``kind`` 'chat' has ``logprobs`` (bool) and ``top_logprobs``; 'completion' has ``logprobs`` (count).
    Raises LineError.
    """
    check_neutral(params)
    changes = {name: rule(name, params[name], limits) for name, rule in RULES.items()
               if params.get(name) is not None and not (kind == "chat" and name in ("logprobs", "echo"))}
    longer = params.get("max_completion_tokens")
    if longer is not None:
        longer = _count("max_completion_tokens", longer, limits)
        if changes.setdefault("max_tokens", longer) != longer:
            raise refuse("max_completion_tokens", longer,
                         f"the same as max_tokens {changes['max_tokens']}, of which it is another name")
    if kind == "chat":
        changes["logprobs"] = _chat_logprobs(params, defaults)
        changes["echo"] = False
        if params.get("echo") is not None and boolean("echo", params["echo"]):
            raise refuse("echo", True, "left out of a chat: it belongs to prompts")
    sampling = replace(defaults, **changes)
    if sampling.echo and sampling.prompt_logprobs is None:
        # As in the completions interface: the text comes with its prompt, and so do its logprobs.
        sampling = replace(sampling, prompt_logprobs=sampling.logprobs)
    check_together(sampling)
    check_supported(sampling, limits)
    return sampling


def _chat_logprobs(params: Mapping[str, Any], defaults: Sampling) -> int | None:
    wanted = params.get("logprobs")
    if wanted is not None and not isinstance(wanted, bool):
        raise refuse("logprobs", wanted, "true or false in a chat (how many alternatives: top_logprobs)")
    count = params.get("top_logprobs")
    if count is not None:
        count = _alternatives("top_logprobs", count, None)
    if wanted is None:
        wanted = defaults.logprobs is not None
    if not wanted:
        if count:
            raise refuse("top_logprobs", count, "used together with \"logprobs\": true")
        return None
    return count if count is not None else defaults.logprobs or 0


def check_together(sampling: Sampling) -> None:
    """Refuse values that contradict each other. Raises LineError."""
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise refuse("min_tokens", sampling.min_tokens, f"at most max_tokens, which is {sampling.max_tokens}")


def check_supported(sampling: Sampling, limits: Limits) -> None:
    """Refuse a parameter that the engine does not implement, unless at its default. Raises LineError."""
    plain = Sampling()
    for field in fields(Sampling):
        value = getattr(sampling, field.name)
        if field.name in limits.unsupported and value != getattr(plain, field.name):
            shown = quote(_as_json(field.name, value))
            raise LineError(f"{field.name} {shown}: not supported in this version, leave it out",
                            param=field.name, code="unsupported")


def check_defaults(defaults: Sampling, limits: Limits, has_tokenizer: bool = True) -> Sampling:
    """The command line's values, held to the rules of the lines and in the same form (top_k -1 as 0).

    Raises UsageError naming the option.
    """
    plain = Sampling()
    try:
        for field in fields(Sampling):
            value = getattr(defaults, field.name)
            if value != getattr(plain, field.name):
                value = RULES[field.name](field.name, _as_json(field.name, value), limits)
                defaults = replace(defaults, **{field.name: value})
        check_together(defaults)
        check_supported(defaults, limits)
    except LineError as error:
        name = (error.param or "").split("[")[0].replace("_", "-")
        raise UsageError(f"option --{name}: {error}") from None
    if defaults.stop and not has_tokenizer:
        raise UsageError("option --stop: the model has no tokenizer, so no text is made; use "
                         "--stop-token-ids")
    return defaults


def _as_json(name: str, value: Any) -> Any:
    """A field of Sampling as a line would have written it."""
    if name == "logit_bias":
        return {str(token): bias for token, bias in value}
    return list(value) if isinstance(value, tuple) else value
