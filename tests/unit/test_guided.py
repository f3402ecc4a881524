"""Texts of a form: what a line may ask for, and that no walk through the masks leaves the form."""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import replace
from pathlib import Path

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import byte_level, folder, sentencepiece

from mpillm.engine.guided import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    Follower,
    Grammars,
    Guides,
    check_guide,
    grammars_of,
    read_guide,
)
from mpillm.engine.sampling import Row, apply_processors
from mpillm.engine.validate import Guide, Sampling
from mpillm.errors import LineError
from mpillm.formats.tokenizer import tokenizer_from_folder, tokenizer_from_gguf

BYTES, PIECES = tokenizer_from_gguf(byte_level()), tokenizer_from_gguf(sentencepiece())
TOKENIZERS = {"byte-level": BYTES, "sentencepiece": PIECES}
MADE = {name: Grammars(tokenizer) for name, tokenizer in TOKENIZERS.items()}
EOS = 1                 # of byte_level()
VOCAB = 300             # a model with rows beyond both tokenizers
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer",
          "minimum": 0, "maximum": 150}}, "required": ["name", "age"], "additionalProperties": False}


def choice(*texts: str) -> Guide:
    return Guide("choice", json.dumps(texts), "guided_choice")


def follower(guide: Guide, name: str = "byte-level", vocab: int = VOCAB, eos: frozenset[int] = frozenset((EOS,)),
             **sampling) -> Follower:
    return Follower(MADE[name], Sampling(guided=guide, **sampling), vocab, eos)


def ids(bits: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()


def walk(guide: Guide, name: str, seed: int, most: int = 400) -> tuple[bytes, bool]:
    """A text of random allowed tokens, and whether it came to its end."""
    chosen, tokenizer = random.Random(seed), TOKENIZERS[name]
    end = min(tokenizer.eos_ids)
    at, data = follower(guide, name, eos=frozenset((end,))), b""
    for _ in range(most):
        assert not at.broken
        allowed = ids(at.bits)
        assert allowed and max(allowed) < tokenizer.vocab_size
        token = chosen.choice(allowed)
        if token == end:
            return data, True
        assert not tokenizer.is_special(token)
        data += tokenizer.token_bytes(token)
        at.advance(token)
        if at.complete:
            return data, True
    return data, False


# What a line may ask for

@pytest.mark.parametrize("fields, expected", [
    ({}, None), ({"response_format": None}, None), ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Guide("json", '{"type": "object"}', "response_format")),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PERSON, "strict": True}}},
     Guide("json", json.dumps(PERSON), "response_format")),
    ({"structured_outputs": {"json": json.dumps(PERSON), "disable_any_whitespace": True}},
     Guide("json", json.dumps(PERSON), "structured_outputs", "")),
    ({"structured_outputs": {"json": True, "whitespace_pattern": " ?", "regex": None}},
     Guide("json", "{}", "structured_outputs", " ?")),
    ({"structured_outputs": {"json_object": True}}, Guide("json", '{"type": "object"}', "structured_outputs")),
    ({"structured_outputs": {"choice": ["a", "é"]}}, Guide("choice", '["a", "\\u00e9"]', "structured_outputs")),
    ({"structured_outputs": {"grammar": "root ::= x"}}, Guide("grammar", "root ::= x", "structured_outputs")),
    ({"guided_regex": "a+"}, Guide("regex", "a+", "guided_regex")),
    ({"guided_json": {"enum": [1]}, "guided_whitespace_pattern": ""},
     Guide("json", '{"enum": [1]}', "guided_json", "")),
    ({"guided_choice": ["b"], "response_format": {"type": "text"}}, choice("b")),
    ({"guided_grammar": 'start: "a"'}, Guide("grammar", 'start: "a"', "guided_grammar")),
])
def test_forms_that_are_read(fields, expected):
    assert read_guide(fields) == expected
    if expected is not None:
        assert hash(expected) == hash(read_guide(fields))


def test_the_documentations_examples_can_be_used():
    page = (Path(__file__).parents[2] / "docs" / "input.md").read_text()
    section = page.split("## Texts of a form")[1].split("(Each example")[0]
    code = " ".join(line for line in section.splitlines() if line.startswith("    "))
    examples = json.loads("[" + re.sub(r"}\s+{\"id\"", '}, {"id"', code).replace("[...]", '"..."') + "]")
    assert len(examples) == 5
    for example in examples:
        check_guide(read_guide(example), BYTES)


@pytest.mark.parametrize("fields, words", [
    ({"response_format": "json_object"}, "response_format"), ({"response_format": {}}, '"type"'),
    ({"response_format": {"type": "json"}}, "json_schema"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "schema"),
    ({"response_format": {"type": "json_schema"}}, "json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}}, "strict 1"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "scheme": 1}}}, "scheme"),
    ({"structured_outputs": []}, "one of json"), ({"structured_outputs": {}}, "one of json"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "one of json"),
    ({"structured_outputs": {"jsn": {}}}, "did you mean 'json'"),
    ({"structured_outputs": {"json_object": False}}, "json_object"),
    ({"structured_outputs": {"structural_tag": "x"}}, "not supported"),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": True}}, "not supported"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": 5}}, "whitespace_pattern 5"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"), ({"guided_json": [1]}, "guided_json"),
    ({"guided_json": "[" * 100_000}, "guided_json"), ({"guided_json": "false"}, "an object, or true"),
    ({"guided_regex": ""}, "empty"), ({"guided_regex": 5}, "guided_regex"),
    ({"guided_regex": "\ud800"}, "guided_regex"), ({"guided_choice": []}, "1 to"), ({"guided_choice": "ab"}, "list"),
    ({"guided_choice": ["a", ""]}, "none of them empty"), ({"guided_choice": ["a", 1]}, "guided_choice 1"),
    ({"guided_choice": ["x"] * (MAX_CHOICES + 1)}, "guided_choice"), ({"guided_grammar": {}}, "guided_grammar"),
    ({"guided_grammar": "x" * (MAX_GRAMMAR_BYTES + 1)}, "more than"), ({"guided_regex": "é" * 600_000}, "more than"),
    ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex and guided_choice"),
    ({"guided_json": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 997}]}}, "multipleOf"),
    ({"guided_json": {"properties": {"a": {"type": "integer", "multipleOf": 9999991}}}}, "multipleOf 9999991"),
])
def test_forms_that_are_refused(fields, words):
    with pytest.raises(LineError, match=re.escape(words)) as found:
        read_guide(fields)
    assert found.value.param and len(str(found.value)) < 500


@pytest.mark.parametrize("guide, words", [
    (Guide("regex", "[a-z", "guided_regex"), "unclosed character class"),
    (Guide("regex", "(?=a)b", "guided_regex"), "look-around"),
    (Guide("regex", "", "guided_regex"), "no text"), (Guide("regex", r"[^\s\S]", "guided_regex"), "no text"),
    (Guide("json", json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}),
           "response_format"), "schema too large"),
    (Guide("regex", "(" * 50_000 + "a" + ")" * 50_000, "guided_regex"), "cannot be used"),
    (Guide("json", '{"type": "objekt"}', "response_format"), "objekt"),
    (Guide("json", '{"not": {}}', "response_format"), "not"),
    (Guide("json", '{"unevaluatedProperties": false}', "response_format"), "unevaluatedProperties"),
    (Guide("json", '{"$ref": "http://x/y"}', "response_format"), "http://x/y"),
    (Guide("json", '{"$ref": "#"}', "response_format"), "no text"),
    (Guide("json", '{"type": "string", "minLength": 5, "maxLength": 3}', "response_format"), "minLength"),
    (Guide("json", '{"type": "integer", "minimum": 1' + "0" * 300 + "}", "response_format"), "cannot be used"),
    (Guide("json", "{}", "structured_outputs", "["), "unclosed character class"),
    (Guide("grammar", "start: x", "guided_grammar"), 'unknown name: "x"'),
    (Guide("grammar", 'a ::= "x"', "guided_grammar"), "root"),
    (Guide("grammar", "root ::= \"\\", "guided_grammar"), "GBNF"),
    (Guide("grammar", "root ::= " + "(" * 9000, "guided_grammar"), "GBNF"),
])
def test_forms_that_cannot_be_compiled(guide, words):
    began = time.perf_counter()
    for _ in range(2):          # the second time from the cache
        with pytest.raises(LineError, match=re.escape(words)) as found:
            check_guide(guide, BYTES)
        assert found.value.param == guide.param and found.value.code == "invalid_form"
        assert len(str(found.value)) < 400 and "\n" not in str(found.value)
    assert time.perf_counter() - began < 20


def test_without_a_tokenizer_there_is_no_form():
    with pytest.raises(LineError, match="no tokenizer"):
        check_guide(choice("a"), None)


def test_forms_are_compiled_once_and_followed_apart():
    made = grammars_of(BYTES)
    assert made is grammars_of(BYTES) and made.compiled(choice("ab", "cd")) is made.compiled(choice("ab", "cd"))
    one, other = (follower(choice("ab", "cd")) for _ in range(2))
    one.advance(BYTES.encode("a", add_special=False, parse_special=False)[0])
    assert ids(other.bits) == ids(follower(choice("ab", "cd")).bits) != ids(one.bits)


# What a text may become

@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=9), min_size=1,
                      max_size=5), seed=st.integers(0, 9))
def test_a_choice_ends_as_one_of_the_texts(name, texts, seed):
    data, ended = walk(choice(*texts), name, seed)
    assert ended and data.decode() in texts


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("expression", [r"\d{3}-\d{2,4}", "(hello|held)( world)?", "[äöü]{1,5}x", r" ?[A-F]{2,6}\n",
                                        "DE(F|DEF)*"])
def test_an_expression_matches_the_whole_text(name, expression):
    texts = {walk(Guide("regex", expression, "guided_regex"), name, seed) for seed in range(12)}
    for data, ended in texts:
        assert ended and re.fullmatch(expression, data.decode()), data
    assert len(texts) > 3 or "hel" in expression


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("whitespace", [None, "", " "])
def test_json_of_a_schema_is_of_that_schema(name, whitespace):
    for seed in range(8):
        data, ended = walk(Guide("json", json.dumps(PERSON), "response_format", whitespace), name, seed)
        found = json.loads(data)
        assert ended and list(found) == ["name", "age"]
        assert isinstance(found["name"], str) and len(found["name"]) <= 5
        assert type(found["age"]) is int and 0 <= found["age"] <= 150
        if whitespace is None:
            assert re.fullmatch(rb'{"name"\s{0,32}:\s{0,32}".*"\s{0,32},\s{0,32}"age"\s{0,32}:\s{0,32}\d+}', data, re.S)
        if whitespace == "":
            assert data == json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode() or b"\\" in data


def test_json_objects_and_grammars():
    for seed in range(8):
        data, ended = walk(Guide("json", '{"type": "object", "maxProperties": 2, "additionalProperties": '
                                         '{"enum": [1, "two", null]}}', "response_format"), "byte-level", seed)
        assert not ended or isinstance(json.loads(data), dict)
    gbnf = 'root ::= "SELECT " col " FROM t" [0-9]\ncol ::= "a" | "b" ("," col)?\n'
    lark = 'start: "(" start ")" | "x"'
    for seed in range(8):
        data, ended = walk(Guide("grammar", gbnf, "guided_grammar"), "byte-level", seed)
        assert ended and re.fullmatch(rb"SELECT (b,)*(a|b) FROM t\d", data), data
        data, ended = walk(Guide("grammar", lark, "guided_grammar"), "sentencepiece", seed)
        assert ended and data == b"(" * (len(data) // 2) + b"x" + b")" * (len(data) // 2)


def test_a_folder_and_a_gguf_allow_the_same(tmp_path):
    twin = tokenizer_from_folder(folder(tmp_path / "f", byte_level()))
    for guide in (choice("hello world", "DEFDEF"), Guide("json", json.dumps(PERSON), "response_format")):
        made = Follower(Grammars(twin), Sampling(guided=guide), VOCAB, frozenset((EOS,)))
        assert ids(made.bits) == ids(follower(guide).bits)


def token(text: str) -> int:
    (found,) = BYTES.encode(text, add_special=False, parse_special=False)
    return found


def test_ends_are_allowed_where_the_form_is_complete():
    at = follower(Guide("regex", "D+", "guided_regex"), stop_token_ids=(0, token("x")))
    assert not at.complete and EOS not in ids(at.bits) and set(ids(at.bits)) <= {token("D")}
    at.advance(token("D"))
    assert not at.complete and set(ids(at.bits)) == {token("D"), EOS, 0, token("x")}
    ignoring = follower(Guide("regex", "D+", "guided_regex"), ignore_eos=True)
    ignoring.advance(token("D"))
    assert ids(ignoring.bits) == [token("D")] and not ignoring.complete
    done = follower(choice("D"), ignore_eos=True, min_tokens=5)
    done.advance(token("D"))
    assert done.complete
    # Beyond the model's rows or the tokenizer's tokens there is nothing to allow
    narrow = follower(Guide("regex", "D*", "guided_regex"), vocab=token("D"), eos=frozenset((EOS, 999)))
    assert ids(narrow.bits) == [EOS]


def test_where_only_the_end_is_left_the_text_is_complete():
    more = Guide("regex", "Dx*", "guided_regex")
    for sampling, complete in (({}, False), ({"allowed_token_ids": (token("D"), EOS)}, True),
                               ({"stop_token_ids": (token("x"),)}, False),
                               ({"stop_token_ids": (token("x"),), "min_tokens": 4}, True),
                               ({"stop_token_ids": (token("x"),), "min_tokens": 1}, False)):
        at = follower(more, **sampling)
        at.advance(token("D"))
        assert at.complete is complete, sampling
    stuck = follower(choice("Dx"), allowed_token_ids=(token("D"),))
    stuck.advance(token("D"))
    assert not stuck.complete and ids(stuck.bits) == [token("x")]       # no end in sight: the sampler finds no token


def test_a_form_that_becomes_too_complex_is_broken():
    made = Grammars(BYTES)
    made._limits = llguidance.LLParserLimits(step_max_items=200, verbose_errors=False)
    guide = Guide("grammar", 'start: s\ns: s s | "a" | "aa"', "guided_grammar")
    at = Follower(made, Sampling(guided=guide), VOCAB, frozenset((EOS,)))
    steps = 0
    while not at.broken and steps < 100:
        at.advance(token("a"))
        steps += 1
    assert 10 < steps < 100


# Masks on split vocabularies

class Wire:
    """The root's arrays, for ranks that come after it."""

    def __init__(self):
        self.sent, self.root = [], True

    def bcast(self, array):
        if self.root:
            self.sent.append(array.copy())
        else:
            array[:] = self.sent[-1]


def row(sampling: Sampling, choose: bool = True) -> Row:
    return Row(sampling, 5, 1, np.array([3], np.int32), [], choose)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, VOCAB), max_size=3).map(sorted))
def test_every_rank_applies_its_own_part(cuts):
    guided, plain = Sampling(guided=choice("DEF", "xy")), Sampling(guided=None)
    wire, found = Wire(), []
    logits = np.random.default_rng(1).standard_normal((3, VOCAB)).astype(np.float32)
    for first, stop in zip([0, *cuts], [*cuts, VOCAB], strict=True):
        rows = [row(plain), row(guided), row(guided, choose=False)]
        guides = Guides(wire, first, stop - first, VOCAB, frozenset((EOS,)), BYTES if wire.root else None)
        guides.share(rows, [None, guides.follow(guided), guides.follow(guided)] if wire.root else [None] * 3)
        assert rows[0].allowed is None and rows[2].allowed is None and len(wire.sent) == 1
        own = logits[:, first:stop].copy()
        apply_processors(own[1], rows[1], first)
        found.append(own)
        wire.root = False
    together = np.concatenate(found, axis=1)
    assert wire.sent[0].shape == (1, -(-VOCAB // 8)) and wire.sent[0].dtype == np.uint8
    allowed = ids(follower(choice("DEF", "xy")).bits)
    assert np.array_equal(np.flatnonzero(np.isfinite(together[1])), allowed)
    assert np.array_equal(together[1, allowed], logits[1, allowed]) and np.array_equal(together[[0, 2]], logits[[0, 2]])


def test_nothing_is_sent_where_no_row_is_guided():
    wire = Wire()
    guides = Guides(wire, 0, VOCAB, VOCAB, frozenset((EOS,)), None)
    guides.share([row(Sampling()), row(Sampling(guided=choice("a")), choose=False)], [None, None])
    assert not wire.sent and guides.follow(Sampling()) is None


def test_the_mask_comes_before_bias_and_with_the_allowed_ids():
    logits = np.zeros(8, np.float32)
    asked = row(Sampling(allowed_token_ids=(1, 2, 6), logit_bias=((2, 5.0), (3, 100.0))))
    asked = replace(asked, allowed=np.array([0, 1, 1, 1, 0, 0, 0, 1], bool))
    apply_processors(logits, asked, 0)
    assert logits.tolist() == [-np.inf, 0, 5, -np.inf, -np.inf, -np.inf, -np.inf, -np.inf]
