"""Result lines in the OpenAI batch form, from results of the engine's shape."""

from __future__ import annotations

import json
import math

import pytest

from mpillm.engine.request import Choice, FailedLine, Request, Result, Sampling, Timing
from mpillm.engine.results import error_line, result_line
from mpillm.errors import LineError
from mpillm.formats.jsonl import dumps_strict

PIECES = {1: b"Hi", 2: b" the", 3: "é".encode()[:1], 4: "é".encode()[1:], 5: b"!", 6: b"Hi", 7: b"<eos>",
          8: b" "}
SPECIAL = {7}


class Pieces:
    """A tokenizer of a few pieces; 3 and 4 are the halves of one character, 7 is special, 6 doubles 1."""

    vocab_size = 9

    def token_bytes(self, token):
        return PIECES[token]

    def token_text(self, token):
        return PIECES[token].decode("utf-8", "replace")

    def decode(self, ids, skip_special=True):
        kept = [PIECES[token] for token in ids if not (skip_special and token in SPECIAL)]
        return b"".join(kept).decode("utf-8", "replace").lstrip(" ")


def make(sampling=Sampling(), kind="completion", prompts=((1, 2),), choices=None, scores=None):  # noqa: B008
    request = Request(12, 5, "c", kind, False, prompts, sampling, "ours")
    choices = choices or [choice()]
    return Result(request, choices, [Timing(0, 0, 0, 0)] * len(choices), 0, scores)


def choice(index=0, ids=(3, 4, 5), text="é!", item=0, top=None, **more):
    values = [-0.5 * (i + 1) for i in range(len(ids))]
    return Choice(item, 0, index, list(ids), values, top, text,
                  **{"finish_reason": "length", "stop_reason": None,
                                                                   **more})


def body_of(result, tokenizer=None, **options):
    line = result_line(result, tokenizer, **options)
    assert json.loads(dumps_strict(line))["custom_id"] == "c"
    assert line["error"] is None and line["response"]["status_code"] == 200
    return line["response"]["body"]


def test_envelope_and_usage():
    result = make(prompts=((1, 2), (1,)), choices=[choice(1, item=1, ids=(5,)),
                                                   choice(0, finish_reason="stop",
                                                                                      stop_reason="x")])
    line = result_line(result, Pieces(), created=1700000000)
    assert list(line) == ["id", "custom_id", "line", "response", "error"]
    assert (line["id"], line["line"], line["response"]["request_id"]) == ("batch_req_00000012", 12,
                                                                          "req_00000012")
    body = line["response"]["body"]
    assert (body["object"], body["created"], body["model"]) == ("text_completion", 1700000000, "ours")
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert body["choices"][0] == {"index": 0, "text": "é!", "logprobs": None, "finish_reason": "stop",
                                  "stop_reason": "x", "token_ids": [3, 4, 5]}


def test_chat():
    body = body_of(make(kind="chat"), Pieces())
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "é!"}
    assert body["choices"][0]["logprobs"] is None and "prompt_logprobs" not in body


def test_logprobs_of_a_chat():
    top = [[(3, -0.5), (1, -2.0)], [(1, -0.1), (4, -1.0)], [(5, -1.5), (2, -math.inf)]]
    result = make(Sampling(logprobs=2), "chat", choices=[choice(top=top)],
                  scores=[[None, (-3.0, [(2, -3.0), (1, -4.0)])]])
    body = body_of(result, Pieces())
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.5, -1.0, -1.5]
    assert content[0] == {"token": "\ufffd", "logprob": -0.5, "bytes": [0xc3], "top_logprobs": [
        {"token": "\ufffd", "logprob": -0.5, "bytes": [0xc3]}, {"token": "Hi", "logprob": -2.0,
                                                                "bytes": [72, 105]}]}
    assert bytes(sum((entry["bytes"] for entry in content), [])).decode() == "é!"
    assert '"logprob": null' in dumps_strict(body)              # -inf
    assert body["prompt_logprobs"] == [None, {"2": {"logprob": -3.0, "decoded_token": " the"},
                                              "1": {"logprob": -4.0, "decoded_token": "Hi"}}]
    none_wanted = body_of(make(Sampling(logprobs=0), "chat", choices=[choice(top=[[], [], []])]), Pieces())
    assert [e["top_logprobs"] for e in none_wanted["choices"][0]["logprobs"]["content"]] == [[], [], []]


def test_logprobs_of_a_completion():
    top = [[(3, -0.5)], [(1, -0.1)], [(5, -1.5)]]
    logprobs = body_of(make(Sampling(logprobs=1), choices=[choice(top=top)]),
                       Pieces())["choices"][0]["logprobs"]
    assert list(logprobs) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert logprobs["tokens"] == ["\ufffd", "\ufffd", "!"]
    assert logprobs["token_logprobs"] == [-0.5, -1.0, -1.5]
    assert logprobs["top_logprobs"] == [{"\ufffd": -0.5}, {"Hi": -0.1, "\ufffd": -1.0}, {"!": -1.5}]
    assert logprobs["text_offset"] == [0, 0, 1]      # the character is there with its second half


def test_one_text_for_two_tokens_loses_none():
    top = [[(1, -0.5), (6, -0.7)]]
    result = make(Sampling(logprobs=2), choices=[choice(ids=(1,), top=top, text="Hi")])
    assert body_of(result, Pieces())["choices"][0]["logprobs"]["top_logprobs"] == [{"Hi": -0.5,
                                                                                    "token_id:6": -0.7}]


def test_echo_puts_the_prompt_before():
    scores = [[None, (-3.0, [(2, -3.0)])]]
    top = [[(3, -0.5)], [(4, -1.0)], [(5, -1.5)]]
    body = body_of(make(Sampling(logprobs=1, prompt_logprobs=1, echo=True), choices=[choice(top=top)],
                        scores=scores), Pieces())
    shown = body["choices"][0]
    assert shown["text"] == "Hi theé!" and shown["token_ids"] == [3, 4, 5]
    assert shown["logprobs"]["tokens"] == ["Hi", " the", "\ufffd", "\ufffd", "!"]
    assert shown["logprobs"]["token_logprobs"] == [None, -3.0, -0.5, -1.0, -1.5]
    assert shown["logprobs"]["top_logprobs"][:2] == [None, {" the": -3.0}]
    assert shown["logprobs"]["text_offset"] == [0, 2, 6, 6, 7]
    assert shown["prompt_logprobs"][0] is None and list(shown["prompt_logprobs"][1]) == ["2"]


def test_scoring_alone():
    result = make(Sampling(max_tokens=0, logprobs=1, prompt_logprobs=1, echo=True),
                  choices=[choice(ids=(), text="", top=[])], scores=[[None, (-3.0, None)]])
    body = body_of(result, Pieces())
    assert body["choices"][0]["text"] == "Hi the" and body["usage"]["completion_tokens"] == 0
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [None, {" the": -3.0}]
    assert body_of(make(Sampling(max_tokens=0),
                        choices=[choice(ids=(), text="")]))["choices"][0]["token_ids"] == []


def test_offsets_stay_within_the_text():
    cut = make(Sampling(logprobs=0), choices=[choice(ids=(1, 2, 5), text="Hi", finish_reason="stop",
                                                    stop_reason=" the")])
    assert body_of(cut, Pieces())["choices"][0]["logprobs"]["text_offset"] == [0, 2, 2]
    special = make(Sampling(logprobs=0), choices=[choice(ids=(7, 8, 5), text=" !")])
    assert body_of(special, Pieces())["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1]
    shown = make(Sampling(logprobs=0, skip_special_tokens=False), choices=[choice(ids=(7, 5), text="<eos>!")])
    assert body_of(shown, Pieces())["choices"][0]["logprobs"]["text_offset"] == [0, 5]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_without_a_tokenizer(kind):
    result = make(Sampling(logprobs=1), kind,
                  choices=[choice(text="", top=[[(3, -0.5)], [(1, -0.1)], [(5, -1.5)]])])
    shown = body_of(result)["choices"][0]
    assert shown["token_ids"] == [3, 4, 5]
    if kind == "chat":
        assert shown["logprobs"]["content"][1]["token"] == "token_id:4"
        assert shown["logprobs"]["content"][1]["bytes"] is None
    else:
        assert shown["logprobs"]["top_logprobs"][1] == {"token_id:1": -0.1, "token_id:4": -1.0}
        assert shown["logprobs"]["text_offset"] == [0, 0, 0]


def test_ids_beyond_the_tokenizer_have_a_name():
    result = make(Sampling(logprobs=0), choices=[choice(ids=(5, 300, 5), text="!!")])
    assert body_of(result, Pieces())["choices"][0]["logprobs"]["tokens"] == ["!", "token_id:300", "!"]


def test_failed_lines_have_both_spellings():
    failed = FailedLine.of(3, 1, "c", LineError("temperature -1: must be\u2028more", param="temperature"))
    line = error_line(failed)
    assert line == {
        "id": "batch_req_00000003", "custom_id": "c", "line": 3,
        "response": {"status_code": 400, "request_id": "req_00000003", "body": {"error": {
            "message": "line 3: temperature -1: must be\\u2028more", "type": "invalid_request_error",
            "param": "temperature", "code": "invalid_request"}}},
        "error": {"code": "invalid_request", "message": "line 3: temperature -1: must be\\u2028more"}}
    ours = error_line(FailedLine(3, 1, None, "not finite", code="not_finite", status=500))
    assert ours["response"]["body"]["error"]["type"] == "server_error" and ours["custom_id"] is None
