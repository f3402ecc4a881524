"""Lines that fail alone, and lines that come out right, as bytes; by sections of the field's pitfalls.

A case is (name, line, what is expected): ``Fails`` with words of its message, or a function of the result's body.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiny_text import EOS, OTHER_END, TURN, token

PROMPT = [5, 77, 200, 31]          # the healthy line's
TOKENS = 6                         # --max-tokens of the run


@dataclass(frozen=True)
class Fails:
    """A line error; its message has these words."""

    words: tuple[str, ...]
    custom_id: bool = True         # the line's own id can be known


@dataclass(frozen=True)
class Case:
    """One line of the file."""

    name: str
    line: bytes
    expected: Fails | Callable[[dict[str, Any]], None]


def line(name: str, raw: str = "", **fields: Any) -> bytes:
    """A bare line with the healthy prompt unless another is given; ``raw`` JSON text is put behind."""
    content: dict[str, Any] = {"id": name}
    if not fields.keys() & {"prompt", "messages", "prompt_token_ids"}:
        content["prompt_token_ids"] = PROMPT
    return (json.dumps(content | fields)[:-1] + (", " + raw if raw else "") + "}").encode()


def fails(name: str, *words: str, raw: str = "", **fields: Any) -> Case:
    return Case(name, line(name, raw, **fields), Fails(words))


def right(name: str, check: Callable[[dict[str, Any]], None], **fields: Any) -> Case:
    return Case(name, line(name, **fields), check)


def answers(count: int = TOKENS, choices: int = 1, finish: str = "length", prompt: int | None = None
            ) -> Callable[[dict[str, Any]], None]:
    """So many choices of so many tokens; ``prompt`` tokens were fed."""
    def check(body: dict[str, Any]) -> None:
        assert [c["index"] for c in body["choices"]] == list(range(choices))
        for choice in body["choices"]:
            assert len(choice["token_ids"]) == count and choice["finish_reason"] == finish, choice
        assert body["usage"]["completion_tokens"] == count * choices
        if prompt is not None:
            assert body["usage"]["prompt_tokens"] == prompt
    return check


def only(token_id: int, count: int = TOKENS) -> Callable[[dict[str, Any]], None]:
    """The one choice is this token, again and again."""
    def check(body: dict[str, Any]) -> None:
        assert body["choices"][0]["token_ids"] == [token_id] * count, body["choices"][0]
    return check


def text(wanted: str, tokens: int, reason: Any, finish: str = "stop") -> Callable[[dict[str, Any]], None]:
    """Text, number of ids and the reason of the end; logprobs, if any, go with the ids."""
    def check(body: dict[str, Any]) -> None:
        for choice in body["choices"]:
            found = (choice["text"], len(choice["token_ids"]), choice["stop_reason"], choice["finish_reason"])
            assert found == (wanted, tokens, reason, finish), found
            if choice["logprobs"]:
                assert len(choice["logprobs"]["token_logprobs"]) == tokens
                assert len(choice["logprobs"]["text_offset"]) == tokens
    return check


# Values at the edge, ids out of range. A draw at a vanishing temperature is greedy, and so are the sharpest filters.
HOT = {"temperature": 1.0, "seed": 3}
SAMPLING = [
    *(fails(f"temperature {value}", "temperature", raw=f'"temperature": {value}')
      for value in ("-1", "true", '"0.7"')),
    *(fails(f"not a number {value}", value, raw=f'"temperature": {value}') for value in ("1e400", "NaN", "-Infinity")),
    fails("top_p 1.5", "top_p", "1.5", top_p=1.5), fails("top_k 1.5", "top_k", "1.5", top_k=1.5),
    fails("top_k -2", "top_k", "-2", top_k=-2), fails("min_p 1.1", "min_p", "1.1", min_p=1.1),
    fails("repetition 0", "repetition_penalty", "0", repetition_penalty=0),
    fails("presence", "presence_penalty", "1e+30", presence_penalty=1e30),
    fails("bias beyond", "logit_bias", "99999999", logit_bias={"99999999": 5}),
    fails("bias below", "logit_bias", "-1", logit_bias={"-1": 5}),
    fails("bias word", "logit_bias", "abc", logit_bias={"abc": 1}),
    fails("bias infinite", "1e400", raw='"logit_bias": {"5": 1e400}'),
    fails("stop id beyond", "stop_token_ids", "1000000000", stop_token_ids=[10**9]),
    fails("stop id below", "stop_token_ids", "-1", stop_token_ids=[-1]),
    fails("allowed none", "allowed_token_ids", allowed_token_ids=[]),
    fails("allowed beyond", "allowed_token_ids", "307", allowed_token_ids=[307]),
    fails("min above max", "min_tokens", min_tokens=8, max_tokens=4),
    fails("n 0", "n 0", n=0), fails("n 1e6", "n ", n=10**6), fails("seed word", "seed", seed="x"),
    fails("logprobs 99", "logprobs", logprobs=99),
    right("allowed one", only(7), allowed_token_ids=[7]),
    right("penalty tiny", answers(), repetition_penalty=1e-9),
    right("top_k huge", answers(), top_k=10**9, **HOT),
]
AS_GREEDY = {
    "temperature tiny": {"temperature": 1e-45, "seed": 3}, "temperature 1e-5": {"temperature": 1e-5, "seed": 3},
    "temperature -0": {"temperature": -0.0}, "top_p 0": {"top_p": 0, **HOT}, "top_p 1e-9": {"top_p": 1e-9, **HOT},
    "top_k 1": {"top_k": 1, **HOT}, "min_p 1": {"min_p": 1, **HOT},
    "all banned alike": {"logit_bias": {str(i): -100 for i in range(307)}},
    "top_k off": {"top_k": -1}, "as text": {"max_completion_tokens": TOKENS},
}


# Where a text ends.
DEF, DOT_GAP, D = token("DEF"), token(".ĊĊ"), token("D")
ENDS = [
    right("stop inside a token", text("", 1, "DE"), prompt="ab", allowed_token_ids=[DEF], stop="DE"),
    right("stop kept", text("DE", 1, "DE"), prompt="ab", allowed_token_ids=[DEF], stop=["DE"],
          include_stop_str_in_output=True, logprobs=2, n=2),
    right("stop at the end of a token", text(".", 1, "\n\n"), prompt="ab", allowed_token_ids=[DOT_GAP], stop="\n\n",
          logprobs=2),
    right("stop across tokens", text("", 4, "DDDD"), prompt="ab", allowed_token_ids=[D], stop=["DDDD"], max_tokens=9),
    right("stop of stops", text("", 1, "DE"), prompt="ab", allowed_token_ids=[DEF], stop=["DEFDEF", "DE"]),
    right("forty stops", text("", 1, "DEF"), prompt="ab", allowed_token_ids=[DEF],
          stop=[*(f"x{i}" for i in range(39)), "DEF"]),
    right("stop null", text("DEF" * TOKENS, TOKENS, None, "length"), prompt="ab", allowed_token_ids=[DEF], stop=None),
    fails("stop empty", "stop", prompt="ab", stop=[""]),
    fails("stops too many", "stop", prompt="ab", stop=["x"] * 65),
    fails("stop number", "stop", prompt="ab", stop=5),
    *(right(f"end {end}", text("", 1, reason), prompt="ab", allowed_token_ids=[end], ignore_eos=False,
            **({"stop_token_ids": [end]} if reason else {}))
      for end, reason in ((EOS, None), (TURN, None), (50, 50))),
    *(right(f"end {end} ignored", only(end), allowed_token_ids=[end], ignore_eos=True)
      for end in (EOS, TURN, OTHER_END)),
    right("end of the second list", answers(1, finish="stop"), allowed_token_ids=[OTHER_END], ignore_eos=False),
]


def scored(body: dict[str, Any]) -> None:
    choice = body["choices"][0]
    assert choice["token_ids"] == [] and choice["text"] == "Yes" and body["usage"]["completion_tokens"] == 0
    values = choice["logprobs"]["token_logprobs"]
    assert len(values) == body["usage"]["prompt_tokens"] == 3 and values[0] is None
    assert all(value <= 0 for value in values[1:])


def first_has_no_score(body: dict[str, Any]) -> None:
    scores = body["choices"][0]["prompt_logprobs"]
    assert scores[0] is None and len(scores) == len(PROMPT)
    for asked, score in zip(PROMPT[1:], scores[1:], strict=True):
        assert str(asked) in score and 1 <= len(score) <= 2 and all(s["logprob"] <= 0 for s in score.values())


def all_but_one_banned(body: dict[str, Any]) -> None:
    """Logprobs are the model's own, before any ban: finite, and the banned tokens are the likelier ones."""
    choice = body["choices"][0]
    assert choice["token_ids"] == [7] * TOKENS
    for value, top in zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True):
        assert value < 0 and len(top) == 3 and min(top.values()) == value


def samples_differ(body: dict[str, Any]) -> None:
    """With one seed each item and sample draws its own; the first item's first as a line of one does."""
    found = [tuple(choice["token_ids"]) for choice in body["choices"]]
    assert len(set(found)) == len(found) == 4


def echoed(body: dict[str, Any]) -> None:
    """Each item's text, tokens and logprobs: those of the prompt, then those that were generated."""
    for prompt, choice in zip(("ab", "xyz"), body["choices"], strict=True):
        assert choice["text"].startswith(prompt) and len(choice["token_ids"]) == 2
        lists = choice["logprobs"]
        assert lists["tokens"][:1 + len(prompt)] == ["<s>", *prompt] and lists["token_logprobs"][0] is None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert len(lists[name]) == 1 + len(prompt) + 2
        assert lists["text_offset"] == sorted(lists["text_offset"]) and lists["text_offset"][1] == 0


# Nothing to write, nothing to read, too much of either.
SIZES = [
    right("score", scored, prompt="Yes", max_tokens=0, echo=True, logprobs=1),
    right("nothing", answers(0), max_tokens=0),
    right("empty text", answers(prompt=1), prompt=""), right("empty list", answers(prompt=1), prompt=[]),
    right("empty lists", answers(prompt=1), prompt=[[]]),
    right("three texts", answers(choices=3, prompt=6), prompt=["a", "b", "c"]),
    right("ids as prompt", answers(prompt=3), prompt=[1, 2, 3]),
    right("two of each", answers(choices=4, prompt=5), prompt=[[5, 6], [7, 8, 9]], n=2),
    right("empty message", answers(), messages=[{"role": "user", "content": ""}]),
    fails("too long", "513", "512", prompt_token_ids=[5] * 513),
    fails("full", "512", prompt_token_ids=[5] * 512),
    fails("too long text", "512", prompt="xq" * 400),
    right("clipped", answers(12, prompt=500), prompt_token_ids=[5] * 500, max_tokens=100),
    right("clipped far", answers(7), prompt_token_ids=[5] * 505, max_tokens=10**9),
    right("null is absent", answers(), max_tokens=None, temperature=None, stop=None, n=None),
    right("prompt_logprobs", first_has_no_score, prompt_logprobs=1),
    right("samples with a seed", samples_differ, prompt=["note", "note"], n=2, temperature=1.5, seed=7),
    right("echo of a list", echoed, prompt=["ab", "xyz"], echo=True, logprobs=2, max_tokens=2),
    fails("stop id too early", "no token is left", "min_tokens", allowed_token_ids=[57], stop_token_ids=[57],
          min_tokens=2),
    right("all but one banned", all_but_one_banned, allowed_token_ids=[7], logprobs=2),
]


# Texts of a form: what cannot be one, and how it goes with what else is asked.
GUIDED = [
    fails("schema word", "response_format", "objekt", response_format={
        "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}),
    fails("schema kept", "unevaluatedProperties", structured_outputs={"json": {"unevaluatedProperties": False}}),
    fails("format word", "response_format", "xml", response_format={"type": "xml"}),
    fails("regex cut", "guided_regex", "unclosed", guided_regex="[a-z"),
    fails("regex of nothing", "no text", guided_regex=r"[^\s\S]"),
    fails("choice of none", "guided_choice", guided_choice=[]),
    fails("two forms", "response_format", "guided_choice", response_format={"type": "json_object"},
          guided_choice=["a"]),
    fails("grammar without a root", "grammar", "root", structured_outputs={"grammar": 'a ::= "x"'}),
    fails("form without an end", "no token is left", guided_choice=["DEF"], allowed_token_ids=[7]),
    right("form of text", answers(), response_format={"type": "text"}),
    right("form scored", answers(0), guided_choice=["a"], max_tokens=0),
    right("form ends early", text("DEFD", 2, None), guided_choice=["DEFD"], min_tokens=5),
    right("form cut", text("DDDDDD", 6, None, "length"), guided_regex="D*", allowed_token_ids=[D]),
    right("form stopped", text("DE", 1, "F"), guided_choice=["DEFD"], stop="F", n=2),
]


def batch(name: str, **fields: Any) -> bytes:
    """An OpenAI batch line; a field given as ... is left out."""
    content = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": PROMPT}} | fields
    return json.dumps({key: value for key, value in content.items() if value is not ...}).encode()


def bad(name: str, *words: str, **fields: Any) -> Case:
    return Case(name, batch(name, **fields), Fails(words))


def good(name: str, **fields: Any) -> Case:
    return Case(name, batch(name, **fields), answers(prompt=len(PROMPT)))


TURNS = "/v1/chat/completions"
FORMS = [
    good("plain"), good("slash", url="/v1/completions/"), good("host", url="https://x/v1/completions"),
    good("no url", url=...), good("url null", url=None), good("no method", method=...),
    good("other model", body={"prompt": PROMPT, "model": "gpt-5"}),
    good("16.0", body={"prompt": PROMPT, "max_tokens": 6.0}),
    good("user", body={"prompt": PROMPT, "user": "me", "stream": False}),
    bad("embeddings", "/v1/embeddings", url="/v1/embeddings"), bad("url 5", "url", url=5),
    bad("get", "GET", method="GET"),
    bad("body null", "body", body=None), bad("body list", "body", body=[]), bad("no body", "body", body=...),
    bad("stream", "stream", body={"prompt": PROMPT, "stream": True}),
    bad("word", "max_tokens", '"16"', body={"prompt": PROMPT, "max_tokens": "16"}),
    bad("true", "max_tokens", "true", body={"prompt": PROMPT, "max_tokens": True}),
    bad("half", "max_tokens", "1.5", body={"prompt": PROMPT, "max_tokens": 1.5}),
    bad("foo", "foo", body={"prompt": PROMPT, "foo": 1}), bad("typo", "temprature", "temperature",
                                                             body={"prompt": PROMPT, "temprature": 1}),
    bad("no prompt", "prompt", body={"max_tokens": 3}), bad("both", "prompt", body={
        "prompt": PROMPT, "messages": [{"role": "user", "content": "x"}]}),
    bad("prompt number", "prompt", body={"prompt": 5}), bad("prompt mixed", "prompt", body={"prompt": [5, "x"]}),
    bad("prompt id", "307", body={"prompt": [307]}), bad("prompt negative", "-1", body={"prompt": [-1]}),
    *(bad(f"messages {i}", word, url=TURNS, body={"messages": value}) for i, (value, word) in enumerate((
        (None, "messages"), ([], "messages"), ([None], "messages"), ([[]], "messages"), ("x", "messages"),
        ([{"role": 5, "content": "x"}], "role"), ([{"role": "user"}], "content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image"),
        ([{"role": "system", "content": "x"}], "No system turns here.")))),
]


def raw(name: str, data: bytes, *words: str, known: bool = False) -> Case:
    return Case(name, data, Fails(words, custom_id=known))


# The line as bytes and as JSON.
BYTES = [
    raw("latin-1", b'{"id": "latin-1", "prompt": "caf\xe9"}', "UTF-8"),
    raw("cut", b'{"id": "cut", "prompt": "x"', "JSON"), raw("a word", b'"hello"', "object"),
    raw("a list", b"[1]", "object"),
    raw("nested", b"[" * 20000), raw("digits", b'{"id": "digits", "seed": ' + b"1" * 5000 + b"}"),
    raw("half pair", b'{"id": "half pair", "prompt": "\\ud83d"}', "surrogate"),
    raw("twice", b'{"id": "twice", "prompt": [5], "temperature": 0, "temperature": 1}', "temperature"),
    Case("nul", b'{"id": "nul", "prompt": "\\u0000"}', answers(prompt=2)),
    Case("separators", '{"id": "separators", "prompt": "a\u2028b\u2029c\u0085d\fe"}'.encode(), answers(prompt=15)),
    Case("windows", line("windows") + b"\r", answers(prompt=len(PROMPT))),
]
CASES = [*SAMPLING, *(Case(name, line(name, **fields), answers()) for name, fields in AS_GREEDY.items()),
         *ENDS, *SIZES, *GUIDED, *FORMS, *BYTES]
