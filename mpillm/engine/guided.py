"""Guided output: texts that follow a JSON schema, a regular expression, a list of choices or a grammar.

A line names its form (``response_format``, ``structured_outputs``); llguidance says which tokens may come next. The
replica's root, which has the tokenizer, follows each guided text and finds its mask; every rank gets the packed bits
and applies its own vocabulary rows. Where no line of a step is guided nothing is sent.

One way for all tokenizers: llguidance gets the bytes of each token, the special ones marked, and behind the last a
token of our own that stands for the end. So it never allows a special token, nor an id that the tokenizer does not
know; the real end tokens are put in here, where the form is complete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpillm.engine.validate import Guide, Sampling, boolean, check_names, refuse
from mpillm.errors import LineError
from mpillm.formats.jsonl import has_lone_surrogate, one_line, quote

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_FORM_BYTES = 1 << 20          # of a schema, a regular expression or a list of choices
MAX_GRAMMAR_BYTES = 32 << 10      # of a grammar: rules are resolved in quadratic time
MAX_CHOICES = 4096
MAX_MULTIPLE = 50_000             # least common multiple of all multipleOf: so many states the library builds
CACHED = 32                       # compiled forms that are kept: some milliseconds to make, up to 100 MB each
# Around commas and colons of JSON; not without end, as small models fall into blanks and never come out.
_BLANKS = r"[\x20\x0A\x0D\x09]{0,32}"
SPACED = {"whitespace_flexible": False, "item_separator": f"{_BLANKS},{_BLANKS}",
          "key_separator": f"{_BLANKS}:{_BLANKS}"}
COMPACT = {"whitespace_flexible": False}

KINDS = ("json", "regex", "choice", "grammar", "json_object")
# vLLM's older names for the same.
OLDER = {f"guided_{kind}": kind for kind in KINDS[:4]}
_SWITCHES = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")


# The fields of a line

def read_guide(params: Mapping[str, Any]) -> Guide | None:
    """The form that a line asks for; None where it asks for none. Raises LineError.

    As OpenAI: ``response_format``; as vLLM: ``structured_outputs``, or its older names ``guided_json`` and so on.
    """
    found = [name for name in ("response_format", "structured_outputs", *OLDER) if params.get(name) is not None]
    guides = [(name, guide) for name in found if (guide := _guide(name, params)) is not None]
    if len(guides) > 1:
        raise LineError(f"{guides[0][0]} and {guides[1][0]} in one line: give one of them", param=guides[1][0],
                        code="invalid_value")
    pattern = params.get("guided_whitespace_pattern")
    if pattern is not None and not (guides and guides[0][0] == "guided_json"):
        raise refuse("guided_whitespace_pattern", pattern, "used together with guided_json")
    return guides[0][1] if guides else None


def _guide(name: str, params: Mapping[str, Any]) -> Guide | None:
    value = params[name]
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _structured(value)
    return _form(name, OLDER[name], value, _pattern("guided_whitespace_pattern",
                                                    params.get("guided_whitespace_pattern")))


def _response_format(value: Any) -> Guide | None:
    name = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise refuse(name, value, 'an object with "type" "text", "json_object" or "json_schema"')
    check_names(value, ("type", "json_schema") if kind == "json_schema" else ("type",), f"field of {name}")
    if kind == "text":
        return None
    if kind == "json_object":
        return Guide("json", '{"type": "object"}', name)
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or inner.get("schema") is None:
        raise refuse(f"{name}.json_schema", inner, 'an object with "name" and "schema"')
    check_names(inner, ("name", "schema", "strict", "description"), f"field of {name}.json_schema")
    if inner.get("strict") is not None:
        boolean(f"{name}.json_schema.strict", inner["strict"])
    return _form(name, "json", inner["schema"], None)


def _structured(value: Any) -> Guide:
    name = "structured_outputs"
    if not isinstance(value, dict):
        raise refuse(name, value, f"an object with one of {', '.join(KINDS)}")
    check_names(value, (*KINDS, *_SWITCHES, "whitespace_pattern", "structural_tag"), f"field of {name}")
    on = {switch: value.get(switch) is not None and boolean(f"{name}.{switch}", value[switch]) for switch in _SWITCHES}
    for missing in ("structural_tag", "disable_additional_properties"):
        if on.get(missing, value.get(missing) is not None):
            raise LineError(f"{name}.{missing} {quote(value[missing])}: not supported in this version, leave it out",
                            param=name, code="unsupported")
    given = [kind for kind in KINDS if value.get(kind) is not None]
    if len(given) != 1:
        raise refuse(name, value, f"an object with one of {', '.join(KINDS)}")
    whitespace = _pattern(f"{name}.whitespace_pattern", value.get("whitespace_pattern"))
    if on["disable_any_whitespace"]:
        whitespace = ""
    if given[0] != "json_object":
        return _form(name, given[0], value[given[0]], whitespace)
    if value["json_object"] is not True:
        raise refuse(f"{name}.json_object", value["json_object"], "true, or left out")
    return Guide("json", '{"type": "object"}', name, whitespace)


def _pattern(name: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or has_lone_surrogate(value)):
        raise refuse(name, value, "a regular expression as text")
    return value


def _form(param: str, kind: str, value: Any, whitespace: str | None) -> Guide:
    """The form with its text in one spelling. Raises LineError."""
    name = {"response_format": f"{param}.json_schema.schema", "structured_outputs": f"{param}.{kind}"}.get(param, param)
    if kind == "json":
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        schema = _schema(name, text)
        _check_multiples(name, schema)
        text = "{}" if schema is True else text
    elif kind == "choice":
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
            raise refuse(name, value, f"a list of 1 to {MAX_CHOICES} texts")
        for choice in value:
            if not isinstance(choice, str) or not choice or has_lone_surrogate(choice):
                raise refuse(name, choice, "a list of texts, none of them empty")
        text = json.dumps(value)
    else:
        if not isinstance(value, str) or not value or has_lone_surrogate(value):
            raise refuse(name, value, "a text that is not empty")
        text = value
    most = MAX_GRAMMAR_BYTES if kind == "grammar" else MAX_FORM_BYTES
    if len(text) > most or len(text.encode()) > most:
        raise LineError(f"{name}: more than {most} bytes: give a smaller one", param=param, code="form_too_large")
    return Guide(kind, text, param, whitespace if kind == "json" else None)


def _schema(name: str, text: str) -> Any:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise refuse(name, text, "a JSON schema") from None
    if not isinstance(schema, dict) and schema is not True:
        raise refuse(name, schema, "a JSON schema: an object, or true")
    return schema


def _check_multiples(name: str, schema: Any) -> None:
    """Refuse what takes minutes to compile: for multiples of m the library builds m states."""
    together = 1
    for value in _values_of(schema, "multipleOf"):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and math.isfinite(value):
            digits = "".join(map(str, Decimal(str(value)).as_tuple().digits)).rstrip("0")
            together = math.lcm(together, int(digits or "1"))
            if together > MAX_MULTIPLE:
                raise LineError(f"{name}: multipleOf {quote(value)}: the multiples of a schema together may take "
                                f"{MAX_MULTIPLE} states, give a rounder number", param="multipleOf",
                                code="form_too_large")


def _values_of(value: Any, key: str) -> Iterator[Any]:
    """Every value that stands under a key, at any depth."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if key in value:
                yield value[key]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def check_guide(guide: Guide, tokenizer: Any | None) -> None:
    """Refuse a form that cannot be compiled, or that no text of at least one token follows. Raises LineError."""
    if tokenizer is None:
        raise LineError(f"{guide.param}: the model has no tokenizer, so no text is made: leave it out",
                        param=guide.param, code="no_tokenizer")
    grammars_of(tokenizer).compiled(guide)


# Forms and a tokenizer's tokens

@lru_cache(maxsize=1)
def grammars_of(tokenizer: Any) -> Grammars:
    """The compiled forms for a tokenizer, made once: it takes half a second with 50,000 tokens."""
    return Grammars(tokenizer)


class Grammars:
    """Compiles forms for one tokenizer and keeps the last ones."""

    def __init__(self, tokenizer: Any) -> None:
        import llguidance  # only roots need it

        self._library = llguidance
        self.end = tokenizer.vocab_size          # our own end token, the last
        words = llguidance.TokenizerWrapper(_Vocabulary(tokenizer))
        self._tokens = llguidance.LLTokenizer(words, eos_token=self.end)
        assert self._tokens.vocab_size == self.end + 1, f"{self._tokens.vocab_size} tokens instead of {self.end + 1}"
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._compiled = lru_cache(maxsize=CACHED)(self._compile)

    def compiled(self, guide: Guide) -> LLMatcher:
        """A matcher at its begin, to be copied. Raises LineError."""
        made = self._compiled(guide)
        if isinstance(made, str):
            name = "JSON schema" if guide.kind == "json" else guide.kind
            raise LineError(f"{guide.param}: this {name} cannot be used: {made}", param=guide.param,
                            code="invalid_form")
        return made

    def _compile(self, guide: Guide) -> LLMatcher | str:
        """The matcher, or why there is none: a form that fails slowly should do so once."""
        try:
            form = self._form(guide)
        except ValueError as error:
            return _sentence(str(error))
        matcher = self._library.LLMatcher(self._tokens, form, log_level=0, limits=self._limits)
        if matcher.is_error():
            return _sentence(matcher.get_error())
        # Some forms turn out to be too large, or empty, only when the first token is looked for.
        first = matcher.deep_copy()
        mask = np.frombuffer(first.compute_bitmask(), np.uint8)
        if first.is_error() and "NoExtension" not in first.get_error():
            return _sentence(first.get_error())
        if first.is_error() or not np.unpackbits(mask, bitorder="little")[:self.end].any():
            return "no text of at least one token follows it"
        return matcher

    def _form(self, guide: Guide) -> str:
        library = self._library
        if guide.kind == "json":
            options: dict[str, Any] = SPACED if guide.whitespace is None else COMPACT
            if guide.whitespace:
                options = {"whitespace_pattern": guide.whitespace}
            return library.LLMatcher.grammar_from_json_schema(guide.text, defaults=options)
        return library.grammar_from(guide.kind, guide.text)


def _sentence(why: str) -> str:
    """Of the library's lines the one that says what is wrong."""
    lines = [line.strip() for line in why.replace("<non-verbose/>", "").splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "unknown")
    return one_line(said.removeprefix("error: "), 200)


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        ids = range(tokenizer.vocab_size)
        self.special_token_ids = [*(i for i in ids if tokenizer.is_special(i)), tokenizer.vocab_size]
        # 0xFF marks a special token, and is in no text.
        self.tokens = [b"\xff" + tokenizer.token_bytes(i) if tokenizer.is_special(i) else
                       b"" if tokenizer.token_bytes(i).startswith(b"\xff") else tokenizer.token_bytes(i) for i in ids]
        self.tokens.append(b"\xff<end of the text>")
        self.eos_token_id, self.bos_token_id = tokenizer.vocab_size, None
        self._by_bytes = {token: i for i, token in reversed(list(enumerate(self.tokens)))}
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens that spell a text, as the tokenizer would in the middle of one; they say how forced text is cut."""
        data = text.encode() if isinstance(text, str) else bytes(text)
        for before in (b"", b"\n"):         # a SentencePiece tokenizer begins a text with a space of its own
            ids = self._encoded(before, data)
            if ids is not None:
                return ids
        return list(self._longest_first(data))

    def _encoded(self, before: bytes, data: bytes) -> list[int] | None:
        try:
            ids = self._tokenizer.encode((before + data).decode(), add_special=False, parse_special=False)
        except (LineError, UnicodeDecodeError):
            return None
        for start in range(min(len(ids), 4)):
            if b"".join(self.tokens[i] for i in ids[start:]) == data:
                return ids[start:]
        return None

    def _longest_first(self, data: bytes) -> Iterator[int]:
        at = 0
        while at < len(data):
            for stop in range(min(len(data), at + self._longest), at, -1):
                if data[at:stop] in self._by_bytes:
                    yield self._by_bytes[data[at:stop]]
                    break
            else:
                return
            at = stop


# Texts that are being generated

class Follower:
    """How far one text has come in its form; on the root of a replica.

    ``bits``: the tokens that may come next, packed, lowest bit first. ``complete``: nothing but the end may.
    ``broken``: the form became too complex to follow.
    """

    def __init__(self, grammars: Grammars, sampling: Sampling, vocab: int, eos_ids: frozenset[int]) -> None:
        assert sampling.guided is not None, "a text without a form has nothing to follow"
        self._matcher = grammars.compiled(sampling.guided).deep_copy()
        self._vocab, self._known = vocab, min(vocab, grammars.end)
        self._end, self._min_tokens, self._count = grammars.end, sampling.min_tokens, 0
        stops = _packed(sampling.stop_token_ids, vocab)
        self._ends = stops if sampling.ignore_eos else stops | _packed(eos_ids, vocab)
        self._late = ~stops if sampling.stop_token_ids else None     # what may come before min_tokens
        allowed = sampling.allowed_token_ids
        self._allowed = None if allowed is None else _packed(allowed, vocab)
        self.complete = self.broken = False
        self.bits = np.zeros(-(-vocab // 8), np.uint8)
        self._look()

    def advance(self, token: int) -> None:
        """Go on by a token that ``bits`` allowed and that did not end the text."""
        self._count += 1
        self._matcher.consume_token(token)
        self._look()

    def _look(self) -> None:
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            self.broken = True
            return
        may_end = bool(found[self._end >> 3] >> (self._end & 7) & 1)
        bits = np.zeros(-(-self._vocab // 8), np.uint8)
        whole, rest = divmod(self._known, 8)
        bits[:whole] = found[:whole]
        if rest:
            bits[whole] = found[whole] & (1 << rest) - 1
        more = bits if self._allowed is None else bits & self._allowed
        if self._late is not None and self._count < self._min_tokens:
            more = more & self._late
        self.complete = may_end and not more.any()
        self.bits = bits | self._ends if may_end else bits


def _packed(ids: Any, vocab: int) -> np.ndarray:
    """The bits of token ids, those beyond the vocabulary left out."""
    marks = np.zeros(vocab, np.uint8)
    marks[[i for i in ids if i < vocab]] = 1
    return np.packbits(marks, bitorder="little")


class ChoosingRow(Protocol):
    """What a ``sampling.Row`` has to do with guided texts."""

    sampling: Sampling
    choose: bool
    allowed: np.ndarray | None


class Broadcast(Protocol):
    """The root's array to all ranks of the replica."""

    def bcast(self, array: np.ndarray) -> None: ...


class Guides:
    """The guided texts of a replica: begun on its root, their masks on every rank."""

    def __init__(self, exchange: Broadcast, first_id: int, n_local: int, vocab: int, eos_ids: frozenset[int],
                 tokenizer: Any | None) -> None:
        """``first_id``, ``n_local``: this rank's rows of the ``vocab``; ``tokenizer``: on the root, if there is one."""
        self._exchange, self._first, self._n_local, self._vocab = exchange, first_id, n_local, vocab
        self._eos_ids, self._tokenizer = eos_ids, tokenizer

    def follow(self, sampling: Sampling) -> Follower | None:
        """On the root: a new text with this form; None where it has none."""
        if sampling.guided is None:
            return None
        return Follower(grammars_of(self._tokenizer), sampling, self._vocab, self._eos_ids)

    def share(self, rows: Sequence[ChoosingRow], followers: Sequence[Follower | None]) -> None:
        """Set ``allowed`` of the rows that choose a guided token; ``followers``: of each row, read on the root."""
        guided = [at for at, row in enumerate(rows) if row.choose and row.sampling.guided is not None]
        if not guided:
            return
        bits = np.zeros((len(guided), -(-self._vocab // 8)), np.uint8)
        for place, at in enumerate(guided):
            follower = followers[at]
            if follower is not None:
                bits[place] = follower.bits
        self._exchange.bcast(bits)
        first = self._first // 8
        own = np.unpackbits(bits[:, first:-(-(self._first + self._n_local) // 8)], axis=1, bitorder="little")
        begin = self._first - 8 * first
        for place, at in enumerate(guided):
            rows[at].allowed = own[place, begin:begin + self._n_local].view(bool)
