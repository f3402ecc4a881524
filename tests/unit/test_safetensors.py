"""The reader of safetensors folders: values, slices, and whatever can be wrong with the files."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from made_models import TINY, encode, file_of, from_bf16, random_tensors, safetensors_bytes, tiny, to_bf16

from mpillm.errors import ModelError
from mpillm.formats.checkpoint import Source
from mpillm.formats.safetensors import SafetensorsFolder, read_header

CONFIG = json.dumps(tiny(num_hidden_layers=1))


def folder(path, files: dict[str, bytes]) -> str:
    (path / "config.json").write_text(CONFIG)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return str(path)


def small(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"a": rng.normal(size=(23, 17)).astype(np.float32), "b": rng.normal(size=40).astype(np.float32)}


def refused(path: str) -> str:
    """The message with which a folder is refused: one line that begins with a path."""
    with pytest.raises(ModelError) as caught:
        SafetensorsFolder(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


def test_reads_what_the_published_library_writes(tmp_path):
    x = small() | {"h": np.arange(12, dtype=np.float16).reshape(3, 4), "i": np.arange(5)}
    safetensors.numpy.save_file(x, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(CONFIG)
    with SafetensorsFolder(str(tmp_path)) as reader:
        assert {n: i.shape for n, i in reader.tensors.items()} == {n: a.shape for n, a in x.items()}
        assert {n: i.dtype for n, i in reader.tensors.items()} == {"a": "F32", "b": "F32", "h": "F16", "i": "I64"}
        for name in "abh":
            values = reader.read(name)
            assert values.dtype == np.float32 and np.array_equal(values, x[name].astype(np.float32))
        assert reader.metadata == json.loads(CONFIG)
        with pytest.raises(ModelError, match="tensor i has type I64"):
            reader.read("i")
        with pytest.raises(ModelError, match="tensor z is missing"):
            reader.read("z")


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_rows_and_columns(tmp_path_factory, dtype, data):
    path = tmp_path_factory.getbasetemp() / f"slices-{dtype}"
    x = small(1)
    if not path.exists():
        path.mkdir()
        folder(path, {"model.safetensors": file_of(x, dtype)})
    full = {"F32": x["a"], "F16": x["a"].astype(np.float16).astype(np.float32),
            "BF16": from_bf16(to_bf16(x["a"]))}[dtype]
    rows = data.draw(st.one_of(
        st.none(), st.lists(st.integers(0, 22), max_size=30).map(lambda r: np.array(r, np.int64)),
        st.tuples(st.integers(0, 23), st.integers(0, 23)).map(lambda r: range(min(r), max(r)))))
    first, last = sorted(data.draw(st.tuples(st.integers(0, 17), st.integers(0, 17))))
    with SafetensorsFolder(str(path)) as reader:
        found = reader.read("a", rows, range(first, last))
        wanted = full[np.arange(23) if rows is None else np.asarray(rows, np.int64)][:, first:last]
        assert found.shape == wanted.shape and np.array_equal(found, wanted)
        assert found.flags.c_contiguous and found.flags.aligned and found.flags.writeable


def test_vectors_by_any_rows(tmp_path):
    x = small()
    with SafetensorsFolder(folder(tmp_path, {"model.safetensors": file_of(x)})) as reader:
        for rows in (range(3, 9), range(0), np.array([39, 0, 7, 7]), np.array([4, 5, 6]), range(39, -1, -1)):
            assert np.array_equal(reader.read("b", rows), x["b"][np.asarray(rows, np.int64)])


def test_only_the_needed_bytes_are_read(tmp_path):
    with SafetensorsFolder(folder(tmp_path, {"model.safetensors": file_of(small())})) as reader:
        before = reader.bytes_read
        reader.read("a", range(4, 9), range(3, 8))
        assert reader.bytes_read - before == 5 * 5 * 4
        reader.read("a", np.array([1, 2, 20]))
        assert reader.bytes_read - before == 5 * 5 * 4 + 3 * 17 * 4


def test_large_tensors_are_read_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("mpillm.formats.checkpoint.CHUNK_BYTES", 100)
    x = {"a": small()["a"]}
    with SafetensorsFolder(folder(tmp_path, {"model.safetensors": file_of(x, "BF16")})) as reader:
        order = np.random.default_rng(0).permutation(23)
        assert np.array_equal(reader.read("a", order, range(2, 15)), from_bf16(to_bf16(x["a"]))[order, 2:15])


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("remainder", range(8))
def test_odd_addresses(tmp_path, dtype, remainder):
    x = small()["a"]
    items = [("first", "U8", (3,), b"abc"), ("a", dtype, x.shape, encode(x, dtype))]
    plain = len(safetensors_bytes(items)) - len(encode(x, dtype)) - 3
    data = safetensors_bytes(items, pad=(remainder - plain) % 8)
    assert (len(data) - len(encode(x, dtype)) - 3) % 8 == remainder
    with SafetensorsFolder(folder(tmp_path, {"model.safetensors": data})) as reader:
        found = reader.read("a")
        assert found.flags.aligned and found.ctypes.data % 4 == 0
        assert np.array_equal(found, from_bf16(to_bf16(x)) if dtype == "BF16" else x.astype(
            {"F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32))


def test_each_tensor_has_its_own_dtype(tmp_path):
    x = small()
    items = [("a", "BF16", x["a"].shape, encode(x["a"], "BF16")), ("b", "F32", x["b"].shape, encode(x["b"], "F32"))]
    with SafetensorsFolder(folder(tmp_path, {"model.safetensors": safetensors_bytes(items)})) as reader:
        assert np.array_equal(reader.read("a"), from_bf16(to_bf16(x["a"])))
        assert np.array_equal(reader.read("b"), x["b"])


def shards(x: dict[str, np.ndarray]) -> dict[str, bytes]:
    names = [f"model-{i}-of-00002.safetensors" for i in ("00001", "00002")]
    index = {"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}
    return {names[0]: file_of({"a": x["a"]}), names[1]: file_of({"b": x["b"]}),
            "model.safetensors.index.json": json.dumps(index).encode()}


def test_shards_with_an_index(tmp_path):
    x = small()
    (tmp_path / "consolidated.safetensors").write_bytes(file_of(x))     # not in the index: not opened
    with SafetensorsFolder(folder(tmp_path, shards(x))) as reader:
        assert len(reader.sources) == 2
        assert all(np.array_equal(reader.read(name), x[name]) for name in x)


@pytest.mark.parametrize("missing", [1, 2])
@pytest.mark.parametrize("index", [True, False])
def test_an_absent_shard_is_named(tmp_path, missing, index):
    files = shards(small())
    name = f"model-0000{missing}-of-00002.safetensors"
    del files[name]
    if not index:
        del files["model.safetensors.index.json"]
    assert name in (message := refused(folder(tmp_path, files))) and "incomplete" in message


def test_a_tensor_absent_from_its_shard_is_named(tmp_path):
    files = shards(small())
    files["model-00002-of-00002.safetensors"] = file_of({"c": small()["b"]})
    message = refused(folder(tmp_path, files))
    assert "model-00002-of-00002.safetensors" in message and "tensor b is missing" in message


def test_a_tensor_in_two_files_is_named(tmp_path):
    files = shards(small())
    files["model-00002-of-00002.safetensors"] = file_of(small())
    message = refused(folder(tmp_path, files))
    assert "tensor a is stored twice" in message and "00001-of" in message and "00002-of" in message


@pytest.mark.parametrize("index", [
    b"{", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": {"a": "../x.safetensors"}}',
    b'{"weight_map": {"a": 5}}', b'{"weight_map": {"a": ""}}', b"\xff\xfe", b"[" * 20000])
def test_a_wrong_index(tmp_path, index):
    files = shards(small()) | {"model.safetensors.index.json": index}
    assert "model.safetensors.index.json" in refused(folder(tmp_path, files))


def test_files_without_index_or_common_name(tmp_path):
    x = small()
    files = {"part_a.safetensors": file_of({"a": x["a"]}), "rest.safetensors": file_of({"b": x["b"]})}
    with SafetensorsFolder(folder(tmp_path, files)) as reader:
        assert all(np.array_equal(reader.read(name), x[name]) for name in x)


@pytest.mark.parametrize("files, words", [
    ({"pytorch_model.bin": b"x"}, "only as pytorch_model.bin"),
    ({"adapter_model.safetensors": b"x"}, "adapter"),
    ({}, "no \\*.safetensors file"),
    ({"model.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"}, "git-lfs pointer"),
    ({"model.safetensors": b""}, "0 bytes"),
    ({"model.safetensors": b"<!DOCTYPE html><html>not found</html>"}, "truncated, or not a safetensors"),
])
def test_folders_without_usable_weights(tmp_path, files, words):
    with pytest.raises(ModelError, match=words):
        SafetensorsFolder(folder(tmp_path, files))


def test_special_files_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    assert "not a regular file" in refused(folder(tmp_path, {}))
    assert "config.json" in refused(str(tmp_path / "nowhere"))


def entry(dtype="F32", shape=(2, 3), offsets=(0, 24)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("header, words", [
    ({"a": entry("F33")}, "tensor a has the unknown dtype 'F33'"),
    ({"a": entry(dtype=None)}, "tensor a has the unknown dtype"),
    ({"a": entry(shape=(2, 4))}, r"tensor a \(F32, shape \(2, 4\)\) takes 32 bytes"),
    ({"a": entry(shape=(2, -3))}, "tensor a has a shape or offsets"),
    ({"a": entry(shape=(2, 3.0))}, "tensor a has a shape or offsets"),
    ({"a": entry(shape=(True, 6))}, "tensor a has a shape or offsets"),
    ({"a": entry(shape=(2 ** 64,))}, "tensor a has a shape or offsets"),
    ({"a": entry(shape=(1,) * 9)}, "tensor a has a shape or offsets"),
    ({"a": entry(offsets=(24, 0))}, "tensor a"),
    ({"a": entry(offsets=(-24, 0))}, "tensor a has a shape or offsets"),
    ({"a": entry(offsets=(0, 24, 30))}, "tensor a lacks one of"),
    ({"a": entry(offsets=(4, 28))}, "tensor a leaves a hole behind the header"),
    ({"a": entry(offsets=(1 << 40, (1 << 40) + 24))}, "tensor a ends at byte"),
    ({"a": entry(), "b": entry(offsets=(20, 44))}, "tensor b overlaps a"),
    ({"a": entry(), "b": entry(offsets=(28, 52))}, "tensor b leaves a hole behind a"),
    ({"a": entry()}, "40 bytes follow the last tensor"),
    ({"a": [1, 2]}, "tensor a lacks one of"), ({"a": None}, "tensor a lacks one of"),
    ({"a": {"dtype": "F32", "shape": [2]}}, "tensor a lacks one of"),
    ([], "holds a JSON list"), (5, "holds a JSON int"),
    ('{"a": {}, "a": {}}', "'a' is there twice"), ("{", "not valid JSON"), ("[" * 20000, "not valid JSON"),
    ('{"a": ' + "9" * 5000 + "}", "model.safetensors"),
])
def test_wrong_headers(tmp_path, header, words):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(64)
    with pytest.raises(ModelError, match=words) as caught:
        SafetensorsFolder(folder(tmp_path, {"model.safetensors": data}))
    assert "\n" not in str(caught.value) and "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 10 ** 8 + 1, 100])
def test_header_lengths_beyond_the_file(tmp_path, length):
    data = struct.pack("<Q", length) + b"{}"
    assert "truncated" in refused(folder(tmp_path, {"model.safetensors": data}))


@pytest.mark.parametrize("dtype", ["F8_E5M2", "F8_E4M3", "I64", "BOOL", "F64", "F4"])
def test_dtypes_that_are_known_and_not_computed_with(tmp_path, dtype):
    data = bytes({"I64": 8, "F64": 8, "F4": 1}.get(dtype, 1) * 16)[:8 if dtype == "F4" else None]
    items = [("w", dtype, (4, 4), data)]
    with SafetensorsFolder(folder(tmp_path, {"model.safetensors": safetensors_bytes(items)})) as reader:
        with pytest.raises(ModelError, match=f"model.safetensors: tensor w has type {dtype}.*convert"):
            reader.read("w")


def test_a_file_cut_while_it_is_read(tmp_path):
    path = folder(tmp_path, {"model.safetensors": file_of(small())})
    with SafetensorsFolder(path) as reader:
        os.truncate(tmp_path / "model.safetensors", 1000)
        with pytest.raises(ModelError, match="model.safetensors: ends at byte 1000"):
            reader.read("a")


def test_every_truncation_is_noticed(tmp_path):
    data = file_of({"a": np.ones((2, 3), np.float32)})
    for length in range(len(data)):
        refused(folder(tmp_path, {"model.safetensors": data[:length]}))


WHOLE = file_of(random_tensors(tiny(num_hidden_layers=1, hidden_size=16, intermediate_size=8, vocab_size=9)))


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=4), st.integers(0, len(WHOLE)))
@settings(max_examples=250, deadline=None)
def test_damaged_files_raise_nothing_else(tmp_path_factory, flips, length):
    data = bytearray(WHOLE[:length] if length % 3 == 0 else WHOLE)
    for at, value in flips:
        if at < len(data):
            data[at] = value
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(data)
    try:
        read_header(Source(str(path)))
    except ModelError as error:
        assert "\n" not in str(error)


def test_config_of_the_tests_is_whole():
    assert TINY["hidden_size"] == TINY["num_attention_heads"] * TINY["head_dim"]
