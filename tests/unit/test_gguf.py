"""The reader of GGUF files: container, types, split sets, and files that lie about themselves."""

from __future__ import annotations

import os
import shutil
import struct

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from hypothesis import given, settings
from hypothesis import strategies as st
from made_models import add_tensors, finish, gguf_tensors, gguf_writer, random_tensors, tiny, write_gguf

from mpillm.errors import ModelError
from mpillm.formats.gguf import GgufFile, gguf_of_folder

CONFIG = tiny()
TENSORS = random_tensors(CONFIG)
Q8_0 = GGMLQuantizationType.Q8_0


def refused(path) -> str:
    with pytest.raises(ModelError) as caught:
        GgufFile(str(path))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600 and ".gguf" in message
    return message


def same(path: str, tensors: dict[str, np.ndarray] = TENSORS, config: dict = CONFIG) -> bool:
    """Whether the file (or set) at ``path`` holds exactly ``tensors`` (by Hugging Face names) in F32."""
    wanted = gguf_tensors(config, tensors, "llama")
    with GgufFile(path) as reader:
        return reader.tensors.keys() == wanted.keys() and all(
            np.array_equal(reader.read(name), x) for name, x in wanted.items())


def test_reads_what_the_gguf_package_writes(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS)
    assert same(path)
    with GgufFile(path) as reader:
        assert reader.tensors["blk.0.ffn_down.weight"].shape == (96, 160)
        assert reader.metadata["llama.embedding_length"] == 96
        assert reader.metadata["general.architecture"] == "llama"


def test_metadata_of_every_kind(tmp_path):
    tokens = [f"token {i}" for i in range(150_000)] + ["", "é" * 100, "\n", "x" * 100_000]
    writer = gguf_writer(tmp_path / "m.gguf", CONFIG)
    writer.add_token_list(tokens)
    writer.add_token_scores([i / 2 for i in range(len(tokens))])
    writer.add_token_types([1] * len(tokens))
    for kind, value in ((GGUFValueType.UINT8, 255), (GGUFValueType.INT8, -128), (GGUFValueType.UINT16, 65535),
                        (GGUFValueType.INT16, -32768), (GGUFValueType.UINT64, 2 ** 64 - 1),
                        (GGUFValueType.INT64, -2 ** 63), (GGUFValueType.FLOAT64, 1e300), (GGUFValueType.BOOL, True)):
        writer.add_key_value(f"test.{kind.name}", value, kind)
    writer.add_array("test.bools", [True, False])
    writer.add_key_value("test.nested", [[1, 2], [3]], GGUFValueType.ARRAY)
    add_tensors(writer, gguf_tensors(CONFIG, TENSORS, "llama"))
    finish(writer)
    with GgufFile(str(tmp_path / "m.gguf")) as reader:
        meta = reader.metadata
        assert meta["tokenizer.ggml.tokens"] == tokens
        assert meta["tokenizer.ggml.scores"][1:3] == [0.5, 1.0]
        assert meta["tokenizer.ggml.token_type"] == [1] * len(tokens)
        assert meta["test.UINT64"] == 2 ** 64 - 1 and meta["test.INT64"] == -2 ** 63 and meta["test.BOOL"] is True
        assert meta["test.UINT8"] == 255 and meta["test.INT16"] == -32768 and meta["test.FLOAT64"] == 1e300
        assert meta["test.bools"] == [True, False] and meta["test.nested"] == [[1, 2], [3]]
    assert same(str(tmp_path / "m.gguf"))


def decodable() -> list[GGMLQuantizationType]:
    """Types that the gguf package has a dequantiser for."""
    found = []
    for kind in GGMLQuantizationType:
        try:
            gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            found.append(kind)
        except (NotImplementedError, KeyError):
            continue
    return found


@pytest.mark.parametrize("kind", decodable(), ids=lambda kind: kind.name)
def test_every_type_as_the_gguf_package_decodes_it(tmp_path, kind):
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    n_rows, n_cols = 37, 768 if block > 1 else 100
    raw = rng.integers(0, 256, (n_rows, n_cols // block * size), dtype=np.uint8)
    writer = gguf_writer(tmp_path / "m.gguf", CONFIG)
    writer.add_tensor("w", raw, raw_dtype=kind)
    finish(writer)
    with np.errstate(all="ignore"):
        full = gguf.quants.dequantize(raw, kind)
    with GgufFile(str(tmp_path / "m.gguf")) as reader:
        assert reader.tensors["w"].dtype == kind.name and reader.tensors["w"].block == block
        assert np.array_equal(reader.read("w"), full, equal_nan=True)
        # Slices off the block borders, rows in any order
        for rows in (range(5, 30), np.array([36, 0, 7, 7, 8, 9, 1])):
            for cols in (range(0, n_cols), range(1, 33), range(40, 95), range(31, 32), range(7, 7)):
                found = reader.read("w", rows, cols)
                wanted = full[np.asarray(rows)][:, cols.start:cols.stop]
                assert found.shape == wanted.shape and np.array_equal(found, wanted, equal_nan=True)


def test_only_the_covering_blocks_are_read(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS, kind=Q8_0)
    with GgufFile(path) as reader:
        before = reader.bytes_read
        reader.read("blk.0.ffn_gate.weight", range(10, 15), range(40, 60))
        assert reader.bytes_read - before == 5 * 34


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q4_K", "Q6_K"])
def test_blocks_as_stored(tmp_path, name):
    """Of types with blocks of 256, slices at multiples of 32 get the blocks that cover them."""
    kind = GGMLQuantizationType[name]
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(1).integers(0, 256, (37, 768 // block * size), dtype=np.uint8)
    writer = gguf_writer(tmp_path / "m.gguf", CONFIG)
    writer.add_tensor("w", raw, raw_dtype=kind)
    finish(writer)
    with GgufFile(str(tmp_path / "m.gguf")) as reader:
        for rows, cols in ((None, None), (range(3, 30), range(32, 288)), (np.array([9, 2, 2]), range(96, 96)),
                           (np.array([36, 2, 2]), range(0, 64)), (range(5, 6), range(224, 736))):
            before = reader.bytes_read
            found = reader.read_raw("w", rows, cols)
            cut = range(768) if cols is None else cols
            first, last = cut.start // block * size, -(-cut.stop // block) * size if cut else cut.start // block * size
            index = np.arange(37) if rows is None else np.asarray(rows)
            assert np.array_equal(found, raw[index, first:last])
            assert reader.bytes_read - before == len(index) * (last - first)
        with pytest.raises(AssertionError, match="cuts a block"):
            reader.read_raw("w", None, range(16, 64))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_K, GGMLQuantizationType.F64, GGMLQuantizationType.I32])
def test_types_without_a_decoder_are_named(tmp_path, kind):
    block, size = GGML_QUANT_SIZES[kind]
    writer = gguf_writer(tmp_path / "m.gguf", CONFIG)
    writer.add_tensor("w", np.zeros((2, 256 // block * size), np.uint8), raw_dtype=kind)
    finish(writer)
    with GgufFile(str(tmp_path / "m.gguf")) as reader:
        with pytest.raises(ModelError, match=f"tensor w has type {kind.name}.*llama-quantize"):
            reader.read("w")


@pytest.mark.parametrize("alignment", [8, 16, 24, 64, 4096])
@pytest.mark.parametrize("stored", [GGUFValueType.UINT32, GGUFValueType.INT64])
def test_declared_alignment(tmp_path, alignment, stored):
    writer = gguf_writer(tmp_path / "m.gguf", CONFIG)
    writer.data_alignment = alignment
    writer.add_key_value("general.alignment", alignment, stored)
    add_tensors(writer, gguf_tensors(CONFIG, TENSORS, "llama"))
    finish(writer)
    assert same(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("alignment, kind", [(0, GGUFValueType.UINT32), (12, GGUFValueType.UINT32),
                                             (-8, GGUFValueType.INT64), (32.0, GGUFValueType.FLOAT32),
                                             (True, GGUFValueType.BOOL), ("32", GGUFValueType.STRING)])
def test_impossible_alignment(tmp_path, alignment, kind):
    writer = gguf_writer(tmp_path / "m.gguf", CONFIG)
    writer.add_key_value("general.alignment", alignment, kind)
    add_tensors(writer, gguf_tensors(CONFIG, TENSORS, "llama"))
    finish(writer)
    assert "general.alignment" in refused(tmp_path / "m.gguf")


def test_big_endian_files_are_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS, endianess=gguf.GGUFEndian.BIG)
    assert "big-endian" in refused(path)


def test_other_versions_and_other_files(tmp_path):
    path = tmp_path / "m.gguf"
    data = open(write_gguf(path, CONFIG, TENSORS), "rb").read()
    for version in (0, 1, 4):
        path.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
        assert f"version {version}" in refused(path)
    path.write_bytes(data[:4] + struct.pack("<I", 2) + data[8:])
    assert same(str(path))
    path.write_bytes(b"PK\x03\x04" + data[4:])
    assert "not a GGUF file" in refused(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "git-lfs pointer" in refused(path)


def container(tensors: int = 0, keys: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + body


def string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


@pytest.mark.parametrize("data, words", [
    (container(tensors=1 << 60), "tensors"),
    (container(keys=1 << 60), "keys"),
    (container(keys=1, body=string(b"a", 1 << 63)), "a key"),
    (container(keys=1, body=string(b"k") + struct.pack("<I", 8) + string(b"", 1 << 63)), "the value of k"),
    (container(keys=1, body=string(b"k") + struct.pack("<IIQ", 9, 4, 1 << 61)), "the value of k"),
    (container(keys=1, body=string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 61)), "the value of k"),
    (container(keys=1, body=string(b"k") + struct.pack("<IIQ", 9, 9, 1 << 61)), "the value of k"),
    (container(keys=1, body=string(b"k") + struct.pack("<IIQQ", 9, 8, 1, 1 << 62)), "the value of k"),
    (container(keys=1, body=string(b"k") + struct.pack("<IIQ", 9, 13, 1) + bytes(8)), "value type 13"),
    (container(keys=1, body=string(b"k") + struct.pack("<I", 77) + bytes(99)), "value type 77"),
    (container(keys=1, body=string(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50), "nested"),
    (container(keys=2, body=(string(b"k") + struct.pack("<IB", 0, 1)) * 2), "key k is there twice"),
    (container(keys=1, body=string(b"\xff\xfe") + bytes(50)), "not UTF-8"),
    (container(keys=1, body=string(b"a\nb") + bytes(50)), "cannot be right"),
    (container(tensors=1, body=string(b"w") + struct.pack("<I", 0) + bytes(50)), "tensor w has 0 axes"),
    (container(tensors=1, body=string(b"w") + struct.pack("<I", 5) + bytes(99)), "tensor w has 5 axes"),
    (container(tensors=1, body=string(b"w") + struct.pack("<IQIQ", 1, 0, 0, 0)), "tensor w of type F32"),
    (container(tensors=1, body=string(b"w") + struct.pack("<IQIQ", 1, 33, 8, 0)), "multiple of 32"),
    (container(tensors=1, body=string(b"w") + struct.pack("<IQIQ", 1, 32, 99, 0)), "type number 99"),
    (container(tensors=1, body=string(b"w") + struct.pack("<IQQQQIQ", 4, *[1 << 63] * 4, 0, 0)), "truncated"),
    (container(tensors=1, body=string(b"w") + struct.pack("<IQIQ", 1, 8, 0, 1 << 62) + bytes(99)), "truncated"),
    (container(tensors=1, body=string(b"w") + struct.pack("<IQIQ", 1, 8, 0, 4) + bytes(99)), "not aligned"),
    (container(tensors=2, body=string(b"w") + struct.pack("<IQIQ", 1, 8, 0, 0) + string(b"v")
               + struct.pack("<IQIQ", 1, 8, 0, 0) + bytes(99)), "overlaps"),
    (container(tensors=2, body=string(b"w") + struct.pack("<IQIQ", 1, 8, 0, 0) + string(b"w")
               + struct.pack("<IQIQ", 1, 8, 0, 32) + bytes(99)), "stored twice"),
    (b"", "truncated"), (b"GGUF", "truncated"),
])
def test_containers_that_lie(tmp_path, data, words):
    (tmp_path / "m.gguf").write_bytes(data)
    assert words in refused(tmp_path / "m.gguf")


def test_a_file_cut_short(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", CONFIG, TENSORS)
    os.truncate(path, os.path.getsize(path) - 100)
    assert "truncated" in refused(path)


@pytest.mark.parametrize("bad", [b"\xff\xfe\xfd", b"\xe2\x82"])
def test_tokens_that_are_not_utf8_keep_their_bytes(tmp_path, bad):
    body = string(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + string(b"ok") + string(bad)
    (tmp_path / "m.gguf").write_bytes(container(keys=1, body=body))
    with GgufFile(str(tmp_path / "m.gguf")) as reader:
        tokens = reader.metadata["tokenizer.ggml.tokens"]
        assert [token.encode("utf-8", "surrogateescape") for token in tokens] == [b"ok", bad]


def make_set(folder, stem: str = "m", seed: int = 0, **options) -> list:
    """A split set of the tiny model: its paths."""
    folder.mkdir(exist_ok=True)
    write_gguf(folder / f"{stem}.gguf", CONFIG, random_tensors(CONFIG, seed), split_max_tensors=4, **options)
    return sorted(folder.glob(f"{stem}-*.gguf"))


def test_any_part_or_the_folder_opens_the_whole_set(tmp_path):
    parts = make_set(tmp_path / "set")
    assert len(parts) == 6
    for path in (*parts, gguf_of_folder(str(tmp_path / "set"))):
        assert same(str(path))
        with GgufFile(str(path)) as reader:
            assert reader.metadata["llama.block_count"] == 2


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_a_set_with_an_alignment_that_only_the_first_part_declares(tmp_path, alignment):
    writer = gguf_writer(tmp_path / "m.gguf", CONFIG, split_max_tensors=4)
    writer.add_custom_alignment(alignment)
    add_tensors(writer, gguf_tensors(CONFIG, TENSORS, "llama"))
    finish(writer)
    assert same(str(sorted(tmp_path.glob("m-*.gguf"))[3]))


@pytest.mark.parametrize("missing", [0, 2, 5])
def test_a_missing_part_is_named(tmp_path, missing):
    parts = make_set(tmp_path / "set")
    parts[missing].unlink()
    for path in parts:
        if path.exists():
            assert f"m-0000{missing + 1}-of-00006.gguf" in refused(path)


def test_a_renamed_part_says_so(tmp_path):
    parts = make_set(tmp_path / "set")
    parts[1].rename(tmp_path / "other.gguf")
    assert "give it its name back" in refused(tmp_path / "other.gguf")
    shutil.copy(parts[2], parts[1])
    assert "says it is part 2" in refused(parts[0])


def test_foreign_parts_are_named(tmp_path):
    parts = make_set(tmp_path / "set")
    (tmp_path / "other").mkdir()
    write_gguf(tmp_path / "other" / "m.gguf", tiny(tie_word_embeddings=True),
               random_tensors(tiny(tie_word_embeddings=True)), split_max_tensors=4)
    other = sorted((tmp_path / "other").glob("*.gguf"))
    assert len(other) in (5, 6)
    shutil.copy(other[2], parts[2])
    assert parts[2].name in (message := refused(parts[0])) and "belongs to another set" in message
    make_set(tmp_path / "set", "n", 1)
    with pytest.raises(ModelError, match="holds 2 GGUF models .m-00001-of-00006.gguf, n-00001-of-00006.gguf"):
        gguf_of_folder(str(tmp_path / "set"))


def test_folders_without_or_with_several_models(tmp_path):
    assert gguf_of_folder(str(tmp_path)) is None
    write_gguf(tmp_path / "a.gguf", CONFIG, TENSORS)
    (tmp_path / "mmproj-a.gguf").write_bytes(b"")
    assert gguf_of_folder(str(tmp_path)) == str(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf", CONFIG, TENSORS)
    with pytest.raises(ModelError, match="name the file"):
        gguf_of_folder(str(tmp_path))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    config = tiny(num_hidden_layers=1, hidden_size=32, intermediate_size=32, vocab_size=9)
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    return open(write_gguf(path, config, random_tensors(config)), "rb").read()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_files_raise_nothing_else(tmp_path_factory, whole, data):
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 4))):
        # Mostly in the head, where the counts and sizes are
        content[data.draw(st.integers(0, 1500))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))):]
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    try:
        with GgufFile(str(path)) as reader:
            for name in reader.tensors:
                reader.read(name)
    except ModelError as error:
        assert "\n" not in str(error)
