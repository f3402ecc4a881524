"""Guided lines through the program: the form is kept, at every rank count by the same tokens, and beside others."""

from __future__ import annotations

import json
import re

import pytest
from program import Outputs, launch, run, write_lines
from tiny_text import CASE, write_model

from mpillm.engine import kvcache

EXACT = ("--weights", "f32", "--kv-type", "f32", "--logits", "generated", "--logits-type", "f32", "--max-tokens", 60)
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}, "size": {"type": "integer", "maximum": 999,
          "minimum": 0}, "tags": {"type": "array", "items": {"enum": ["DEF", "é", "to"]}, "maxItems": 2}},
          "required": ["ok", "size", "tags"], "additionalProperties": False}
SHORT = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
COMPACT = {"json": SCHEMA, "disable_any_whitespace": True}
DRAWN = {"temperature": 1.5, "seed": 4}
BOUND = {"ignore_eos": True, "max_tokens": 30}
PLAIN = [{"id": "plain", "prompt": "note", "temperature": 0, **BOUND},
         {"id": "plain drawn", "prompt": "note", "top_p": 0.9, "logprobs": 3, **BOUND, **DRAWN}]
GUIDED = [
    {"id": "short", "prompt": "ab", "temperature": 0, "max_tokens": 200, "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SHORT}}},
    {"id": "schema", "messages": [{"role": "user", "content": "ab"}], "n": 3, "structured_outputs": COMPACT,
     "logprobs": True, "top_logprobs": 2, "top_p": 0.95, **DRAWN},
    {"id": "regex", "prompt": "ab", "guided_regex": r"[A-F]{2}-\d{4}", "top_k": 5, "logprobs": 1, **DRAWN},
    {"id": "choice", "prompt": "ab", "structured_outputs": {"choice": ["red", "green", "blue"]}, "n": 4, **DRAWN},
    {"id": "penalties", "prompt": "ab", "guided_regex": "[a-e]{12}", "temperature": 0, "repetition_penalty": 1.3,
     "frequency_penalty": 0.5, "logit_bias": {"70": 3}},
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[int, Outputs]:
    """The lines by tp, at 2 with two replicas; under 0 the plain ones by themselves, at 1."""
    folder = tmp_path_factory.mktemp("guided")
    model = write_model(folder / "model")
    lines = [PLAIN[0], *GUIDED, PLAIN[1]]
    made = {tp: run(folder, ranks, model, lines, "--tp", tp, *EXACT, name=str(tp)) for ranks, tp in (
        (1, 1), (4, 2), (3, 3))}
    return made | {0: run(folder, 1, model, PLAIN, *EXACT, name="alone")}


def texts(outputs: Outputs, name: str) -> list[str]:
    choices = outputs.body(name)["choices"]
    assert all(choice["finish_reason"] == "stop" and choice["stop_reason"] is None for choice in choices), choices
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


def test_texts_keep_their_form(runs):
    assert json.loads(texts(runs[3], "short")[0]) in ({"ok": True}, {"ok": False})
    for text in texts(runs[3], "schema"):
        found = json.loads(text)
        assert list(found) == ["ok", "size", "tags"] and type(found["ok"]) is bool
        assert type(found["size"]) is int and 0 <= found["size"] <= 999
        assert len(found["tags"]) <= 2 and set(found["tags"]) <= {"DEF", "é", "to"}
    assert re.fullmatch(r"[A-F]{2}-\d{4}", texts(runs[3], "regex")[0])
    assert set(texts(runs[3], "choice")) <= {"red", "green", "blue"}
    assert re.fullmatch("[a-e]{12}", texts(runs[3], "penalties")[0])


def test_tokens_are_the_same_at_all_rank_counts(runs):
    for line in GUIDED:
        for choice in range(line.get("n", 1)):
            ids = [runs[tp].ids(line["id"], choice) for tp in (1, 2, 3)]
            assert ids[0] == ids[1] == ids[2], line["id"]


def test_logprobs_are_the_models_own(runs):
    """Most of the model's own best tokens are not in the form: they are listed all the same."""
    choice = runs[3].body("regex")["choices"][0]
    for value, top in zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True):
        assert max(top.values()) >= value and value < 0
    assert any(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])


def test_lines_beside_keep_their_bits(runs):
    for line in PLAIN:
        assert runs[1].ids(line["id"]) == runs[0].ids(line["id"])
        assert runs[1].logits(line["id"]).tobytes() == runs[0].logits(line["id"]).tobytes()
        assert runs[1].body(line["id"])["choices"] == runs[0].body(line["id"])["choices"]


def test_a_form_goes_on_where_a_preemption_cut_it(tmp_path):
    """Its sequences do not fit the cache together: each is computed again, and none of its form."""
    model = write_model(tmp_path / "model")
    lines = [{"id": str(i), "prompt": "ab" * i, "guided_regex": "[a-m]{280}", "max_tokens": 300, "top_k": 3,
              "logprobs": 1, **DRAWN, "seed": i} for i in range(4)]
    options = ("--tp", 2, *EXACT[:4])
    roomy = run(tmp_path, 2, model, lines, *options, name="roomy")
    prompts = write_lines(tmp_path / "in.jsonl", lines)
    tight = Outputs(tmp_path / "tight.results.jsonl", tmp_path / "tight.h5")
    block = kvcache.block_bytes("f32", CASE.config["num_hidden_layers"], 1, CASE.config["head_dim"])
    ended = launch(2, ["--model", model, "--prompts", prompts, "--results", tight.results, "--output", tight.hdf5,
                       "--kv-memory", 8 * block, *options])
    assert ended.code == 0, ended.stderr[-3000:]
    said = re.search(r"after (\d+) preemptions", ended.stdout + ended.stderr)
    assert said and int(said[1]) > 0, ended.stderr[-3000:]
    for line in lines:
        assert re.fullmatch("[a-m]{280}", texts(tight, line["id"])[0])
        assert tight.body(line["id"])["choices"] == roomy.body(line["id"])["choices"]
