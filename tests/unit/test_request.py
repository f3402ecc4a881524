"""Lines to requests: every leniency and every refusal of docs/input.md."""

from __future__ import annotations

import json
import math
import pickle
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm.engine.request import (
    FailedLine,
    Limits,
    Request,
    Sampling,
    check_defaults,
    echoed_id,
    read_request,
    read_requests,
    resolve_max_tokens,
    sequence_seed,
)
from mpillm.engine.validate import FORMS, IGNORED, NAMES, NEUTRAL, RULES
from mpillm.errors import LineError, UsageError

BOS, EOS, VOCAB = 256, 257, 300


class ByteTokenizer:
    """Ids 0..255 are bytes; "<s>" is 256 where specials may be parsed."""

    vocab_size, bos_id, eos_ids, has_chat_template = VOCAB, BOS, frozenset((EOS,)), True

    def __init__(self, adds_bos=True, bos_id=BOS):
        self.adds_bos, self.bos_id = adds_bos, bos_id

    def encode(self, text, *, add_special, parse_special):
        parts = text.split("<s>") if parse_special else [text]
        ids = list(parts[0].encode("utf-8"))
        for part in parts[1:]:
            ids += [BOS, *part.encode("utf-8")]
        return [BOS] * (add_special and self.adds_bos and ids[:1] != [BOS]) + ids

    def encode_chat(self, messages, tools=None):
        if messages[0]["role"] == "refused":
            raise LineError("the template refuses this role", param="messages", code="template")
        if messages[0]["role"] == "broken":
            raise KeyError("x" * 5000)
        ids = [BOS] if self.adds_bos else []
        for message in messages:
            content = message.get("content") or ""
            if isinstance(content, list):
                content = "".join(part["text"] for part in content)
            ids += content.encode("utf-8")
        return ids + [1] * len(tools or [])

    def is_special(self, token_id):
        return token_id in (BOS, EOS)

    def token_bytes(self, token_id):
        return bytes((token_id,)) if token_id < 256 else {BOS: b"<s>", EOS: b"</s>"}.get(token_id, b"")


LIMITS = Limits(vocab=VOCAB, max_positions=512, model="ours")


def read(line, defaults=Sampling(), tokenizer=ByteTokenizer(), limits=LIMITS, **changes):  # noqa: B008
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    return read_request(7, 3, raw, defaults, tokenizer, replace(limits, **changes) if changes else limits)


def ok(line, *rest, **options) -> Request:
    got = read(line, *rest, **options)
    assert isinstance(got, Request), got
    return got


def failed(line, *rest, **options) -> FailedLine:
    got = read(line, *rest, **options)
    assert isinstance(got, FailedLine), got
    assert got.message.startswith("line 7: ") and len(got.message) < 700 and "\n" not in got.message
    assert 400 <= got.status < 600
    return got


def batch(body, url="/v1/completions", **more):
    return {"custom_id": "c", "method": "POST", "url": url, "body": body, **more}


def sampled(**params) -> Sampling:
    return ok({"prompt": "x", **params}).sampling


# The envelope

def test_batch_and_bare_lines():
    got = ok(batch({"prompt": "hi", "max_tokens": 5, "model": "other"}))
    assert got == Request(7, 3, "c", "completion", False, ((BOS, 104, 105),), Sampling(max_tokens=5), "other")
    got = ok({"id": "b", "messages": [{"role": "user", "content": "hi"}], "seed": 4})
    assert got == Request(7, 3, "b", "chat", True, ((BOS, 104, 105),), Sampling(seed=4), "ours")
    assert ok(batch({"messages": [{"role": "user", "content": ""}]},
                    "/v1/chat/completions")).prompts == ((BOS,),)


@pytest.mark.parametrize("url", [None, "/v1/completions", "/v1/completions/", "https://x/v1/completions",
                                 "http://h:8000/v1/completions/"])
def test_urls_let_pass(url):
    assert ok(batch({"prompt": "x"}, url)).kind == "completion"


@pytest.mark.parametrize("url", ["/v1/embeddings", 5, [], {}, True, "", "v1/completions",
                                 "/v1/completions?x=1",
                                 "/V1/completions", "https://[x/v1/completions", "/v1/chat/completions",
                                 "ftp://x/v1/completions", "/v1/completions//", "/chat/completions"])
def test_urls_refused(url):
    got = failed(batch({"prompt": "x"}, url))
    assert got.param == "url" and got.custom_id == "c" and "/v1/completions" in got.message


def test_url_absent_and_method():
    line = batch({"prompt": "x"})
    del line["url"]
    assert ok(line).kind == "completion"
    assert ok(batch({"prompt": "x"}, method=None))
    for method in ("GET", "post", 5, True, []):
        assert failed(batch({"prompt": "x"}, method=method)).param == "method"


@pytest.mark.parametrize("body", [None, [], "x", 5, True])
def test_body_must_be_an_object(body):
    assert failed(batch(body)).param == "body"


def test_body_absent_or_beside():
    assert "body is missing" in failed({"custom_id": "c", "url": "/v1/completions"}).message
    assert "put it into body" in failed(batch({"prompt": "x"}, temperature=1)).message
    got = failed(batch({"prompt": "x"}, foo=1))
    assert (got.param, got.code) == ("foo", "unknown_parameter")
    assert "messages" in failed(batch({"messages": [{"role": "user", "content": "x"}]})).message


@pytest.mark.parametrize("given_id, expected", [("", ""), ("a/b", "a/b"), (7, "7"), (-1, "-1"), (None, None),
                                                ("x" * 10240, "x" * 10240), ("é😀", "é😀")])
def test_ids_accepted(given_id, expected):
    assert ok({"id": given_id, "prompt": "x"}).custom_id == expected
    assert ok({**batch({"prompt": "x"}), "custom_id": given_id}).custom_id == expected
    assert failed({"custom_id": given_id, "prompt": 5}).custom_id == expected


@pytest.mark.parametrize("given_id", [1.5, 7.0, True, [], {}, "x" * 70000, "é" * 40000, "a\0b"])
def test_ids_refused(given_id):
    got = failed({"custom_id": given_id, "prompt": "x"})
    assert (got.custom_id, got.param) == (None, "custom_id")


def test_two_ids():
    assert ok({"id": "a", "custom_id": "a", "prompt": "x"}).custom_id == "a"
    assert "same as custom_id" in failed({"id": "a", "custom_id": "b", "prompt": "x"}).message


def test_doubled_ids_are_told_apart_by_line():
    lines = [(1, b'{"id":"a","prompt":"x"}'), (4, b'{"id":"a","prompt":5}'), (9, b'{"id":"a","prompt":"x"}')]
    got = list(read_requests(lines, Sampling(), ByteTokenizer(), LIMITS))
    assert [(g.custom_id, g.line, g.index, type(g)) for g in got] == [
        ("a", 1, 0, Request), ("a", 4, 1, FailedLine), ("a", 9, 2, Request)]
    assert got[1].message.startswith("line 4: ")


@pytest.mark.parametrize("raw", [b'"a string"', b"5", b"null", b"[]", b"true", b"[{}]", b"{", b"\xff",
                                 b"[" * 20000])
def test_lines_that_are_no_object(raw):
    assert failed(raw).custom_id is None


def test_defects_keep_the_lines_id():
    got = failed(b'{"id":"a","prompt":"x","temperature":1,"temperature":0}')
    assert (got.custom_id, got.param, got.code) == ("a", "temperature", "duplicate_key")
    assert failed(b'{"id":"a","id":"b","prompt":"x"}').custom_id is None
    for raw, part in ((b'{"id":"a","prompt":"\\ud83d"}', "half a surrogate"),
                      (b'{"id":"a","prompt":"x","seed":' + b"7" * 5000 + b"}", "5000 digits"),
                      (b'{"id":"a","prompt":"x","temperature":NaN}', "NaN"),
                      (b'{"id":"a","prompt":"x","temperature":1e400}', "1e400")):
        got = failed(raw)
        assert got.custom_id == "a" and part in got.message
    assert failed(b'{"id":"\\ud83d","prompt":"x"}').custom_id is None
    got = failed(b'{"a\\n\\u0000\\ud800":1,"prompt":"x"}')
    assert got.param == "a key"
    assert failed(b'{"a\\n\\u0000":1,"prompt":"x"}').param == "a\\u000a\\u0000"


def test_long_lines_are_refused_by_the_documented_limit():
    got = failed(b'{"prompt":"' + b"x" * 1000, max_line_bytes=100)
    assert (got.status, got.code) == (413, "line_too_long")


def test_unknown_parameters_suggest_the_close_one():
    assert "did you mean 'temperature'" in failed({"prompt": "x", "temprature": 1}).message
    assert "did you mean 'max_tokens'" in failed(batch({"prompt": "x", "maxTokens": 1})).message
    assert "metadata" in failed({"prompt": "x", "foo": None}).message
    assert failed({"prompt": "x", "y" * 10**6: 1}).code == "unknown_parameter"
    assert failed({"prompt": "x", "tools": []}).param == "tools"       # belongs to chats


def test_parameters_without_effect_are_ignored():
    assert ok({"prompt": "x", **{name: {"any": 1} for name in IGNORED}}).sampling == Sampling()
    for name, harmless in NEUTRAL.items():
        for value in (None, *harmless):
            assert ok({"prompt": "x", name: value}).sampling == Sampling()
        got = failed({"prompt": "x", name: [{"a": 1}]})
        assert (got.param, got.code) == (name, "unsupported")
    assert failed({"prompt": "x", "stream": True}).param == "stream"
    assert failed({"prompt": "x", "stream": 0}).param == "stream"
    assert ok({"prompt": "x", "response_format": {"type": "text"}}).sampling == Sampling()


def test_models():
    assert ok({"prompt": "x", "model": "not-ours"}).model == "not-ours"
    assert ok({"prompt": "x", "model": None}).model == "ours"
    for model in (5, [], True, "a\0", "x" * 5000):
        assert failed({"prompt": "x", "model": model}).param == "model"


# Values

@pytest.mark.parametrize("name, value, expected", [
    ("temperature", 1e-45, 1e-45), ("temperature", 1e-5, 1e-5), ("temperature", -0.0, 0.0),
    ("temperature", 2, 2.0),
    ("top_p", 0, 0.0), ("top_p", 1e-9, 1e-9), ("top_p", 1, 1.0), ("top_k", -1, 0), ("top_k", 0, 0),
    ("top_k", 10**9, 10**9), ("top_k", 5.0, 5), ("min_p", 1, 1.0), ("repetition_penalty", 1e-9, 1e-9),
    ("presence_penalty", -2, -2.0), ("frequency_penalty", 2, 2.0), ("seed", -2**63, -2**63),
    ("seed", 2**64 - 1, 2**64 - 1), ("seed", 0, 0), ("stop", "a", ("a",)), ("stop", [], ()),
    ("stop", ["b", "a", "b"], ("b", "a")), ("stop", [str(i) for i in range(40)],
                                            tuple(str(i) for i in range(40))),
    ("stop_token_ids", [299, 0, 299], (299, 0)), ("stop_token_ids", [], ()), ("ignore_eos", True, True),
    ("n", 1024, 1024), ("max_tokens", 16.0, 16), ("max_tokens", 0, 0), ("max_tokens", 10**9, 10**9),
    ("logprobs", 0, 0), ("logprobs", 20, 20), ("prompt_logprobs", 1, 1), ("echo", True, True),
    ("logit_bias", {"5": -100, "2": 1.5}, ((2, 1.5), (5, -100.0))), ("logit_bias", {}, ()),
    ("allowed_token_ids", [7, 3, 7], (3, 7)), ("min_tokens", 3, 3), ("skip_special_tokens", False, False),
    ("include_stop_str_in_output", True, True),
    ("logit_bias", {str(i): -100 for i in range(VOCAB)}, tuple((i, -100.0) for i in range(VOCAB))),
])
def test_values_in_range(name, value, expected):
    got = getattr(sampled(**{name: value}), name)
    assert got == expected and type(got) is type(expected)
    assert math.copysign(1, got) > 0 if name == "temperature" else True


@pytest.mark.parametrize("name, value", [
    ("temperature", -1), ("temperature", True), ("temperature", "0.7"), ("temperature", 10**399),
    ("temperature", -1e-300), ("top_p", 1.5), ("top_p", -0.1), ("top_p", "1"), ("top_k", -2), ("top_k", 1.5),
    ("top_k", 2**63), ("top_k", 1e300), ("min_p", 1.1), ("min_p", -1e-9), ("repetition_penalty", 0),
    ("repetition_penalty", -1), ("presence_penalty", 1e30), ("frequency_penalty", -2.1), ("seed", 2**64),
    ("seed", -2**63 - 1), ("seed", 1.5), ("seed", "1"), ("seed", True), ("stop", ""), ("stop", [""]),
    ("stop", ["a", 5]), ("stop", 5), ("stop", [None]), ("stop", ["x"] * 65), ("stop", "x" * 5000),
    ("stop", {}),
    ("stop_token_ids", [10**9]), ("stop_token_ids", [-1]), ("stop_token_ids", [VOCAB]), ("stop_token_ids", 5),
    ("stop_token_ids", ["5"]), ("stop_token_ids", [True]), ("stop_token_ids", [1.0]), ("ignore_eos", 1),
    ("ignore_eos", "true"), ("n", 0), ("n", 1025), ("n", True), ("n", -1), ("max_tokens", "16"),
    ("max_tokens", True), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", []), ("max_tokens", 10**20),
    ("logprobs", 21), ("logprobs", -1), ("logprobs", True), ("prompt_logprobs", -1), ("prompt_logprobs", 21),
    ("echo", 1), ("logit_bias", {"99999999": 5}), ("logit_bias", {"-1": 5}), ("logit_bias", {"abc": 1}),
    ("logit_bias", {"05": 1}), ("logit_bias", {"5": 101}), ("logit_bias", {"5": "1"}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"5": None}), ("logit_bias", [5]), ("logit_bias", {"": 1}), ("logit_bias", {"\u0665": 1}),
    ("logit_bias", {"9" * 5000: 1}), ("allowed_token_ids", []), ("allowed_token_ids", [VOCAB]),
    ("allowed_token_ids", 7), ("min_tokens", -1), ("skip_special_tokens", 0), ("include_stop_str_in_output",
                                                                               "no"),
    ("max_completion_tokens", "5"), ("max_completion_tokens", -1),
])
def test_values_out_of_range(name, value):
    got = failed({"id": "a", "prompt": "x", name: value})
    assert got.custom_id == "a" and got.param.startswith(name) and name in got.message
    assert failed(batch({"prompt": "x", name: value})).param == got.param


@pytest.mark.parametrize("name", sorted(RULES))
def test_null_is_the_default(name):
    defaults = Sampling(max_tokens=9, temperature=0.5, n=2, stop=("z",), logprobs=3, seed=5)
    assert ok({"prompt": "x", name: None}, defaults).sampling == defaults


def test_defaults_fill_what_the_line_leaves_open():
    defaults = Sampling(max_tokens=9, temperature=0.5, stop=("z",))
    assert ok({"prompt": "x", "temperature": 0, "stop": []}, defaults).sampling == \
        Sampling(max_tokens=9, temperature=0.0)


def test_max_completion_tokens_is_another_name():
    assert sampled(max_completion_tokens=3).max_tokens == 3
    assert sampled(max_completion_tokens=3, max_tokens=3).max_tokens == 3
    assert sampled(max_completion_tokens=None, max_tokens=3).max_tokens == 3
    assert ok({"prompt": "x", "max_completion_tokens": 3}, Sampling(max_tokens=9)).sampling.max_tokens == 3
    assert failed({"prompt": "x", "max_completion_tokens": 3,
                   "max_tokens": 4}).param == "max_completion_tokens"


def test_min_tokens_against_max_tokens():
    assert sampled(min_tokens=3, max_tokens=3).min_tokens == 3
    assert "max_tokens, which is 2" in failed({"prompt": "x", "min_tokens": 3, "max_tokens": 2}).message
    assert failed({"prompt": "x", "max_tokens": 2}, Sampling(min_tokens=3)).param == "min_tokens"


def test_echo_brings_the_prompts_logprobs():
    got = sampled(max_tokens=0, echo=True, logprobs=1)
    assert (got.prompt_logprobs, got.logprobs, got.max_tokens) == (1, 1, 0)
    assert sampled(echo=True, logprobs=1, prompt_logprobs=5).prompt_logprobs == 5
    assert sampled(echo=True).prompt_logprobs is None


def chat(**params):
    return {"messages": [{"role": "user", "content": "x"}], **params}


def test_logprobs_of_chats():
    assert ok(chat(logprobs=True, top_logprobs=5)).sampling.logprobs == 5
    assert ok(chat(logprobs=True)).sampling.logprobs == 0
    assert ok(chat(logprobs=False)).sampling.logprobs is None
    assert ok(chat(logprobs=False), Sampling(logprobs=4)).sampling.logprobs is None
    assert ok(chat(), Sampling(logprobs=4)).sampling.logprobs == 4
    assert ok(chat(top_logprobs=2), Sampling(logprobs=4)).sampling.logprobs == 2
    assert ok(chat(top_logprobs=0)).sampling.logprobs is None
    assert failed(chat(top_logprobs=5)).param == "top_logprobs"
    assert failed(chat(logprobs=True, top_logprobs=21)).param == "top_logprobs"
    assert "top_logprobs" in failed(chat(logprobs=5)).message
    assert failed({"prompt": "x", "top_logprobs": 5}).param == "top_logprobs"


def test_echo_belongs_to_prompts():
    assert ok(chat(echo=False)).sampling.echo is False
    assert ok(chat(), Sampling(echo=True)).sampling.echo is False
    assert failed(chat(echo=True)).param == "echo"
    assert failed(chat(parse_special=True)).param == "parse_special"


def test_unsupported_parameters_are_refused_unless_at_their_default():
    limits = replace(LIMITS, unsupported=frozenset(("prompt_logprobs", "logit_bias", "parse_special", "tools",
                                                    "n")))
    for name, value, harmless in (("prompt_logprobs", 1, None), ("logit_bias", {"5": 1}, {}), ("n", 2, 1),
                                  ("parse_special", True, None)):
        got = failed({"prompt": "x", name: value}, limits=limits)
        assert (got.param, got.code) == (name,
                                         "unsupported") and "not supported in this version" in got.message
        assert ok({"prompt": "x", name: harmless}, limits=limits)
    assert failed({"prompt": "x", "echo": True, "logprobs": 1}, limits=limits).param == "prompt_logprobs"
    assert failed(chat(tools=[{"type": "function"}]), limits=limits).param == "tools"


# Prompts

@pytest.mark.parametrize("prompt, expected", [
    ("ab", [[BOS, 97, 98]]), (["a", "b", "a"], [[BOS, 97], [BOS, 98], [BOS, 97]]), ([1, 2, 3], [[1, 2, 3]]),
    ([[1], [2, 3]], [[1], [2, 3]]), ("", [[BOS]]), ([], [[BOS]]), ([[]], [[BOS]]),
    (["", "a"], [[BOS], [BOS, 97]]),
    ([[], [5]], [[BOS], [5]]), ("\0", [[BOS, 0]]), ("<s>", [[BOS, 60, 115, 62]]),
    ([0, VOCAB - 1], [[0, VOCAB - 1]]),
])
def test_prompts(prompt, expected):
    assert [list(ids) for ids in ok({"prompt": prompt}).prompts] == expected
    assert [list(ids) for ids in ok(batch({"prompt": prompt})).prompts] == expected
    if isinstance(prompt, list) and not any(isinstance(item, str) for item in prompt):
        assert [list(ids) for ids in ok({"prompt_token_ids": prompt}).prompts] == expected


@pytest.mark.parametrize("prompt", [5, True, {}, 1.5, [1.0], [True], [None], ["a", 1], [1, "a"], ["a", ["b"]],
                                    [[1], "a"], [[1], 2], [[1.5]], [["a"]], [[[1]]], [VOCAB], [-1],
                                    [[0], [VOCAB]],
                                    [10**399], [{}]])
def test_prompts_refused(prompt):
    got = failed({"prompt": prompt})
    assert got.param.startswith("prompt") and "must be" in got.message


@pytest.mark.parametrize("ids", ["ab", ["a"], ["a", "b"], 5, {}, [[1], "a"], ["a", [1]], [True]])
def test_token_ids_refused(ids):
    assert failed({"prompt_token_ids": ids}).param.startswith("prompt_token_ids")


def test_one_prompt_and_only_one():
    assert "no prompt" in failed({"max_tokens": 5}).message
    assert "no prompt" in failed({}).message
    assert "messages is null" in failed({"messages": None}).message
    assert "prompt is null" in failed(batch({"prompt": None})).message
    assert ok({"prompt": None, "prompt_token_ids": [1]}).prompts == ((1,),)
    assert failed({"prompt": "x", "messages": []}).code == "invalid_prompt"
    assert failed({"prompt": "x", "prompt_token_ids": [1]}).code == "invalid_prompt"


def test_empty_prompts_need_a_start_token():
    bare = ByteTokenizer(adds_bos=False, bos_id=None)
    for prompt in ("", [], [[]]):
        assert failed({"prompt": prompt}, tokenizer=bare).code == "empty_prompt"
        assert ok({"prompt": prompt}, tokenizer=ByteTokenizer(adds_bos=False)).prompts == ((BOS,),)
        assert ok({"prompt": prompt}, tokenizer=bare, bos_id=9).prompts == ((9,),)
    assert failed({"prompt": ["a", ""]}, tokenizer=bare).param == "prompt[1]"
    assert ok({"prompt_token_ids": []}, tokenizer=None, bos_id=9).prompts == ((9,),)
    assert failed({"prompt_token_ids": []}, tokenizer=None).code == "empty_prompt"


def test_special_tokens_in_text():
    assert ok({"prompt": "<s>a", "parse_special": True}).prompts == ((BOS, 97),)
    assert ok({"prompt": "<s>a"}, parse_special=True).prompts == ((BOS, 97),)
    assert ok({"prompt": "<s>", "parse_special": False}, parse_special=True).prompts == ((BOS, 60, 115, 62),)
    assert ok({"prompt": "a", "add_special_tokens": False}).prompts == ((97,),)
    for name in ("parse_special", "add_special_tokens"):
        assert failed({"prompt": "x", name: 1}).param == name


def test_context():
    for ids, max_tokens, fits in ((511, 1, True), (511, None, True), (512, 1, False), (512, None, False),
                                  (512, 0, True), (513, 0, False), (500, 100, True), (513, 100, False)):
        line = {"prompt_token_ids": [1] * ids, "max_tokens": max_tokens}
        if fits:
            assert len(ok(line).prompts[0]) == ids
        else:
            got = failed(line)
            assert got.code == "context_length_exceeded" and str(ids) in got.message and "512" in got.message
    assert failed({"prompt": [[1], [1] * 600]}).param == "prompt[1]"
    assert failed({"prompt": "a" * 512}).code == "context_length_exceeded"
    assert failed({"prompt_token_ids": [1] * 512}, Sampling(max_tokens=5)).status == 400

    class NeverAsked(ByteTokenizer):
        def encode(self, text, **_):
            raise AssertionError("so long a text needs no tokenizer")
    for line in ({"prompt": "a" * 600000}, chat(messages=[{"role": "user", "content": "a" * 600000}]),
                 chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a" * 600000}]}])):
        got = failed(line, tokenizer=NeverAsked())
        assert got.code == "context_length_exceeded" and "600000" in got.message and "512" in got.message


def test_too_many_choices():
    assert failed({"prompt": [[1]] * 65, "n": 1024}).code == "too_many_choices"
    assert len(ok({"prompt": [[1]] * 64, "n": 1024}).prompts) == 64


def test_resolve_max_tokens():
    for wanted, length, expected in ((None, 500, 12), (100, 500, 12), (5, 500, 5), (0, 512, 0),
                                     (10**9, 1, 511)):
        assert resolve_max_tokens(Sampling(max_tokens=wanted), length, 512) == expected
    with pytest.raises(AssertionError):
        resolve_max_tokens(Sampling(), 513, 512)


@pytest.mark.parametrize("messages", [[], {}, "x", 5, [None], [[]], ["x"], [{}],
                                      [{"role": 5, "content": "x"}],
                                      [{"role": "", "content": "x"}], [{"content": "x"}], [{"role": "user"}],
                                      [{"role": "user", "content": None}], [{"role": "user", "content": 5}],
                                      [{"role": "user", "content": {}}]])
def test_messages_refused(messages):
    assert failed({"messages": messages}).param.startswith("messages")


def test_messages_accepted():
    got = ok({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None,
                                                              "tool_calls": [{"id": "1"}]},
                           {"role": "tool", "content": "b", "tool_call_id": "1"},
                           {"role": "user", "content": [{"type": "text", "text": "c"}]}]})
    assert got.prompts == ((BOS, 97, 98, 99),)


def test_tools():
    tools = [{"type": "function"}]
    assert ok(chat(tools=tools)).prompts == ok(chat(tools=tools, tool_choice="auto")).prompts == ((BOS, 120,
                                                                                                   1),)
    assert ok(chat(tools=tools, tool_choice="none")).prompts == ok(chat(tools=[])).prompts == ((BOS, 120),)
    for choice in ("required", {"type": "function"}, 5):
        assert failed(chat(tools=tools, tool_choice=choice)).param == "tool_choice"
    for wrong in ("x", {}, [5]):
        assert failed(chat(tools=wrong)).param == "tools"


def test_what_the_tokenizer_raises_fails_the_line_alone():
    assert "refuses this role" in failed({"messages": [{"role": "refused", "content": "x"}]}).message
    got = failed({"messages": [{"role": "broken", "content": "x"}]})
    assert got.code == "tokenizer_failed" and "KeyError" in got.message
    assert "beyond the model's 200 tokens" in failed({"prompt": "é"}, vocab=200).message


def test_without_a_tokenizer_only_ids_run():
    assert ok({"prompt_token_ids": [1, 2]}, tokenizer=None).prompts == ((1, 2),)
    assert ok({"prompt": [1, 2]}, tokenizer=None).prompts == ((1, 2),)
    for line in ({"prompt": "x"}, {"prompt": ["x"]}, chat(), {"prompt_token_ids": [1], "stop": "x"}):
        got = failed(line, tokenizer=None)
        assert got.code == "no_tokenizer" and "prompt_token_ids" in got.message


# Helpers

def test_seeds_depend_on_what_they_should():
    one, other = ok({"prompt": "x"}), replace(ok({"prompt": "x"}), line=4)
    seeds = {sequence_seed(run, request, item, sample) for run in (0, 1, -1, 2**63) for request in (one,
                                                                                                    other)
             for item in (0, 1) for sample in (0, 1)}
    assert len(seeds) == 32 and all(0 <= seed < 2**64 for seed in seeds)
    assert sequence_seed(0, one, 0, 0) == sequence_seed(0, replace(one, index=99), 0, 0)
    seeded = replace(one, sampling=Sampling(seed=5))
    assert sequence_seed(0, seeded, 1, 2) == sequence_seed(9, replace(seeded, line=4), 1, 2)
    assert len({sequence_seed(0, seeded, i, s) for i in (0, 1) for s in (0, 1)}) == 4
    assert sequence_seed(0, replace(one, sampling=Sampling(seed=-2**63)), 0, 0) < 2**64
    # Recorded: results of earlier versions must stay reproducible.
    assert sequence_seed(1, seeded, 0, 0) == SEEDED and sequence_seed(1, other, 0, 0) == UNSEEDED


SEEDED, UNSEEDED = 5263611865943489849, 18069862631456376920


def test_defaults_of_the_command_line_obey_the_same_rules():
    good = Sampling(temperature=0, top_k=-1, stop=("a",), logit_bias=((7, 1), (5, -100)),
                    allowed_token_ids=(5, 3))
    got = check_defaults(good, LIMITS, True)
    assert (got.top_k, got.logit_bias, got.allowed_token_ids) == (0, ((5, -100.0), (7, 1.0)), (3, 5))
    assert check_defaults(Sampling(), LIMITS, False) == Sampling()
    for wrong, message in ((Sampling(temperature=math.nan), "option --temperature: temperature NaN: must be"),
                           (Sampling(top_p=1.5), "--top-p"), (Sampling(stop=("",)), "--stop"),
                           (Sampling(allowed_token_ids=()), "--allowed-token-ids"), (Sampling(n=0), "--n:"),
                           (Sampling(logit_bias=((VOCAB, 1.0),)), "--logit-bias"),
                           (Sampling(logit_bias=((5, 1000.0),)), "--logit-bias"),
                           (Sampling(max_tokens=1, min_tokens=2), "--min-tokens")):
        with pytest.raises(UsageError, match=message):
            check_defaults(wrong, LIMITS, True)
    with pytest.raises(UsageError, match="no tokenizer"):
        check_defaults(Sampling(stop=("a",)), LIMITS, False)
    with pytest.raises(UsageError, match="--echo: .*not supported"):
        check_defaults(Sampling(echo=True), replace(LIMITS, unsupported=frozenset(("echo",))), True)


def test_every_field_of_sampling_has_a_rule():
    assert {field.name for field in fields(Sampling)} == set(RULES) | {"guided"}
    assert not (IGNORED & set(NEUTRAL)) and not ((IGNORED | set(NEUTRAL)) & set(RULES))


def test_the_documentation_names_every_parameter_and_code():
    root = Path(__file__).parents[2]
    named = set(re.findall(r"`([a-z_0-9]+)`", (root / "docs" / "input.md").read_text()))
    assert set(RULES) | IGNORED | FORMS | {"max_completion_tokens", "top_logprobs", "tools", "parse_special"} <= named
    sources = [root / "mpillm" / name for name in ("engine/request.py", "engine/validate.py", "engine/guided.py",
                                                   "formats/jsonl.py")]
    codes = {code for path in sources for code in re.findall(r'code="(\w+)"', path.read_text())}
    assert len(codes) > 10 and codes <= named


def test_requests_travel_between_ranks():
    for got in (ok({"prompt": "x", "logit_bias": {"5": 1}}), failed({"prompt": 5})):
        assert pickle.loads(pickle.dumps(got)) == got


# Anything at all

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([10**30, -1, 0, 1, 2, 0.5, "user", "a", "\ud800", "POST", "/v1/completions"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "5", "text", "type"]) | st.text(max_size=4), inner, max_size=3),
    max_leaves=8)
names = st.sampled_from(sorted(NAMES["chat"] | NAMES["completion"])) | st.text(max_size=5)
bodies = st.dictionaries(names, anything, max_size=4)
some_lines = bodies | st.builds(lambda a, b: {**a, **b}, bodies, st.fixed_dictionaries({}, optional={
    "prompt": anything | st.text(), "messages": anything, "body": bodies | anything, "custom_id": anything,
    "id": anything, "url": anything, "method": anything}))


@given(st.binary(max_size=60) | (some_lines | anything).map(lambda v: json.dumps(v).encode()),
       st.sampled_from([None, ByteTokenizer()]))
@settings(max_examples=250, deadline=None)
def test_any_line_gives_a_request_or_a_failed_line(raw, tokenizer):
    got = read(raw, tokenizer=tokenizer)
    if isinstance(got, Request):
        assert got.prompts and all(0 <= token < VOCAB for ids in got.prompts for token in ids)
        assert all(1 <= len(ids) <= LIMITS.max_positions for ids in got.prompts)
        assert check_defaults(got.sampling, LIMITS, True) == got.sampling
    else:
        assert got.message.startswith("line 7: ")
        assert not re.search("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", got.message + (got.param or ""))
        assert len(got.message) < 700 and (got.param is None or len(got.param) < 110)
        (got.custom_id or "").encode()


@given(st.sampled_from(sorted(RULES)), anything)
@settings(max_examples=150, deadline=None)
def test_any_value_of_any_parameter(name, value):
    raw = json.dumps({"prompt": "x", name: value}).encode()
    got = read(raw)
    if isinstance(got, Request):
        assert value is None or check_defaults(got.sampling, LIMITS, True) == got.sampling
    else:
        assert got.code in ("invalid_value", "invalid_json", "invalid_text", "duplicate_key"), got


@pytest.mark.parametrize("raw", [
    b'{"custom_id": "a", "prompt": "x"}', b'{"custom_id": null, "id": "z", "prompt": "x"}', b'{"id": 7, "n": -1}',
    b'{"id": "", "prompt": "x"}', b'{"id": "a", "custom_id": "b"}', b'{"id": "a", "id": "a"}', b'{"id": "\\ud83d"}',
    b'{"id": "a", "user": "\\ud83d"}', b'{"id": "a\\u0000"}', b'{"id": 1.5}', b'{"id": true}', b"[]", b"{", b"\xff",
    b'{"id": "' + b"x" * 65537 + b'"}', b'{"id": ' + b"9" * 5000 + b"}", b"[" * 5000,
])
def test_a_line_that_is_not_run_keeps_the_id_of_its_result(raw):
    assert echoed_id(raw) == read_request(1, 0, raw, Sampling(), ByteTokenizer(), LIMITS).custom_id


def test_ids_are_echoed():
    assert [echoed_id(b'{"custom_id": null, "id": "z"}'), echoed_id(b'{"id": 7}'), echoed_id(b"{")] == ["z", "7", None]
