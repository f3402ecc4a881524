"""Lines of JSON as files really are, and strict JSON on the way out."""

from __future__ import annotations

import gzip
import json
import math
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm.errors import InputError, LineError
from mpillm.formats import jsonl
from mpillm.formats.jsonl import dumps_strict, iterate_lines, one_line, parse_line, quote

MARK = b"\xef\xbb\xbf"
SEPARATORS = "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e\r"


@pytest.fixture
def lines_of(tmp_path):
    def read(content: bytes, **options):
        path = tmp_path / "in.jsonl"
        path.write_bytes(content)
        return list(iterate_lines(path, **options))
    return read


def value_of(raw: bytes):
    value, defect = parse_line(raw)
    assert defect is None, defect
    return value


# Files

def test_mark_crlf_blanks_latin1_and_no_last_newline(lines_of):
    content = (MARK + b'{"id":"a","prompt":"x"}\r\n\r\n{"id":"b","prompt":"caf\xe9"}\n\n'
               b'{"id":"c","prompt":"y"}')
    assert lines_of(content) == [(1, b'{"id":"a","prompt":"x"}'), (3, b'{"id":"b","prompt":"caf\xe9"}'),
                                 (5, b'{"id":"c","prompt":"y"}')]
    with pytest.raises(LineError, match=r"not UTF-8: byte 0xe9 at offset 23"):
        parse_line(b'{"id":"b","prompt":"caf\xe9"}')


@pytest.mark.parametrize("content, expected", [
    (b"", []), (b"\n\n\r\n \t\n", []), (MARK, []), (MARK + b"\n", []), (b"a", [(1, b"a")]),
    (b"a\n", [(1, b"a")]),
    (b"\n a \n", [(2, b" a ")]), (b"a\r\r\n", [(1, b"a\r")]), (b"a\rb\n", [(1, b"a\rb")]),
    (b"a\n" + MARK + b"b\n", [(1, b"a"), (2, b"b")]),        # two files joined by cat
    (b"\x0c\n", [(1, b"\x0c")]),
    # not blank: JSON knows no form feed outside strings
])
def test_blank_lines_and_line_ends(lines_of, content, expected):
    assert lines_of(content) == expected


def test_only_newline_ends_a_line(lines_of):
    prompt = "a" + SEPARATORS.replace("\r", "") + "b"
    raw = json.dumps({"prompt": prompt}, ensure_ascii=False).encode()
    raw_too = ('{"prompt":"' + prompt + '"}').encode()       # control characters as they are, not escaped
    for each in (raw, raw_too):
        assert [value_of(line) for _, line in lines_of(each + b"\n" + each)] == [{"prompt": prompt}] * 2


@given(st.lists(st.binary(max_size=12).filter(lambda b: b"\n" not in b), max_size=6), st.booleans())
def test_lines_are_those_between_newlines(tmp_path_factory, pieces, last):
    path = tmp_path_factory.mktemp("lines") / "f"
    path.write_bytes(b"!" + b"\n!".join(pieces) + b"\n" * last)
    read = list(iterate_lines(path))
    assert [number for number, _ in read] == list(range(1, max(1, len(pieces)) + 1))
    assert [line for _, line in read] == [b"!" + piece.removesuffix(b"\r") for piece in pieces or [b""]]


def test_a_long_line_is_cut_and_the_next_one_whole(lines_of):
    content = b'"%s"\nok\n%s' % (b"x" * 5000, b" " * 3000)
    read = lines_of(content, max_bytes=100)
    assert [number for number, _ in read] == [1, 2, 3]
    assert len(read[0][1]) == len(read[2][1]) == 101 and read[1][1] == b"ok"
    with pytest.raises(LineError, match="longer than 100 bytes") as caught:
        parse_line(read[0][1], 100)
    assert caught.value.status == 413
    assert lines_of(b"y" * 100 + b"\r\n", max_bytes=100) == [(1, b"y" * 100)]
    assert lines_of(MARK + b"y" * 100 + b"\r\n", max_bytes=100) == [(1, b"y" * 100)]
    for length in range(98, 112):       # nothing within the bound is lost, nothing beyond it passes
        (_, line), (number, after) = lines_of(b"z" * length + b"\nnext", max_bytes=100)
        assert (line == b"z" * length) if length <= 100 else len(line) > 100
        assert (number, after) == (2, b"next")
    assert lines_of(b"y" * 9000, max_bytes=None) == [(1, b"y" * 9000)]


def test_memory_is_bounded_by_the_line_bound(tmp_path):
    tracemalloc = pytest.importorskip("tracemalloc")
    path = tmp_path / "big"
    with open(path, "wb") as file:
        file.truncate(200 * 2**20)       # one line of 200 MB of NULs, sparse
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"prompt":"x"}\n')
    tracemalloc.start()
    try:
        sizes = [(number, len(line)) for number, line in iterate_lines(path, 2**20)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sizes == [(1, 2**20 + 1), (2, 14)]
    assert peak < 8 * 2**20


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
def test_other_unicode_files_stop(lines_of, encoding):
    mark = "" if encoding in ("utf-16", "utf-32") else "\ufeff"
    with pytest.raises(InputError, match="UTF-(16|32).*iconv"):
        lines_of((mark + '{"prompt":"x"}\n').encode(encoding))


def test_utf16_without_mark_is_hinted_at(lines_of):
    for _, line in lines_of('{"prompt":"x"}\n'.encode("utf-16-le")):
        with pytest.raises(LineError, match="not JSON"):
            parse_line(line)
    with pytest.raises(LineError, match="UTF-16"):
        parse_line('{"prompt":"x"}'.encode("utf-16-le"))


@pytest.mark.parametrize("name, content, message", [
    ("a.bz2", b"BZh91AY", "bzip2"), ("a.xz", b"\xfd7zXZ\x00\x00", "xz"), ("a.zst", b"\x28\xb5\x2f\xfd\x04",
                                                                          "zstd"),
    ("a.zip", b"PK\x03\x04", "zip archive"), ("a.h5", b"\x89HDF\r\n\x1a\n", "HDF5"),
])
def test_foreign_files_stop_with_a_remedy(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        iterate_lines(tmp_path / name)


def test_gzip_is_read_as_it_is(tmp_path):
    path = tmp_path / "in.jsonl"                # its bytes say so, not its name
    path.write_bytes(gzip.compress(MARK + b"a\n\nb"))
    assert list(iterate_lines(path)) == [(1, b"a"), (3, b"b")]
    path.write_bytes(gzip.compress(b""))
    assert list(iterate_lines(path)) == []
    with pytest.raises(InputError, match="UTF-16"):
        path.write_bytes(gzip.compress("x".encode("utf-16")))
        iterate_lines(path)


def test_damaged_gzip_stops(tmp_path):
    path = tmp_path / "in.jsonl.gz"
    whole = gzip.compress(os.urandom(4096).hex().encode() + b"\n")
    for damaged in (whole[:-1000], whole[:12], whole[:2], whole[:-8] + b"12345678",
                    whole[:100] + b"\xff" * 50 + whole[150:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match="damaged or half-written gzip"):
            list(iterate_lines(path))


def test_unreadable_paths_stop(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        iterate_lines(tmp_path / "none")
    with pytest.raises(InputError, match="is a folder"):
        iterate_lines(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        iterate_lines("a\0b")
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(InputError, match="cannot be read: Not a directory"):
        iterate_lines(tmp_path / "file" / "inner")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="cannot be read"):
        iterate_lines(tmp_path / "loop")


def test_a_forbidden_file_stops(tmp_path, monkeypatch):
    def forbidden(*_):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr(jsonl, "open", forbidden, raising=False)      # root may read everything
    with pytest.raises(InputError, match="may not be read: check its permissions"):
        iterate_lines(tmp_path / "secret")


def test_devices_and_fifos(tmp_path):
    assert list(iterate_lines("/dev/null")) == []
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: fifo.write_bytes(MARK + b"a\r\n\nb"))
    writer.start()
    assert list(iterate_lines(fifo)) == [(1, b"a"), (3, b"b")]
    writer.join()


# Lines

@pytest.mark.parametrize("raw, message", [
    (b'{"a": NaN}', "NaN is not JSON"), (b'{"a": -Infinity}', "-Infinity is not JSON"),
    (b'{"a": 1e400}', "1e400 is beyond"), (b'{"a": -1e999}', "-1e999 is beyond"),
    (b'{"seed": ' + b"7" * 5000 + b"}", "a number of 5000 digits"), (b"9" * 401, "a number of 401 digits"),
    (b'{"a": 1, "a": 1}', '"a" stands twice'), (b'{"b": [{"x": 1, "y": 2, "x": 3}]}', '"x" stands twice'),
    (b'{"prompt": "\\ud83d"}', "prompt holds half a surrogate pair"),
    (b'{"m": [{"c": "a\\uDE00b"}]}', r"m\[0\].c holds half a surrogate pair"),
    (b'{"m": {"\\ud800": 1}}', "a key in m holds half"), (b'"\\udfff"', "the text holds half"),
])
def test_what_python_lets_pass_is_a_defect(raw, message):
    _, defect = parse_line(raw)
    assert defect is not None
    with pytest.raises(LineError, match=message):
        raise defect


@pytest.mark.parametrize("raw, message", [
    (b"{", "not JSON: .* at character 2"), (b"", "not JSON"), (b'{"a":1} x', "Extra data at character 9"),
    (b"[" * 20000, "nested more than 200 levels"), (b'{"a":' * 20000 + b"1" + b"}" * 20000,
                                                    "nested more than 200 levels"),
    (b"{'a': 1}", "not JSON"), (b'{"a": 01}', "not JSON"), (b'"\xed\xa0\x80"', "not UTF-8: byte 0xed"),
    (b"\xc3", "not UTF-8: byte 0xc3 at offset 0"), (b'{"a": "x', "not JSON"), (b'"\\u12"', "not JSON"),
])
def test_what_is_not_json(raw, message):
    with pytest.raises(LineError, match=message) as caught:
        parse_line(raw)
    assert len(str(caught.value)) < 300


def test_depth():
    for depth, opening, closing in ((200, b"[", b"]"), (199, b'{"a":', b"}")):
        inner = opening * depth + b"[]" * (closing == b"}") + closing * depth
        assert value_of(inner)
        with pytest.raises(LineError, match="nested more than 200 levels"):
            parse_line(b"[" + inner + b"]")
    assert value_of(b"[" + b",".join([b"[1]"] * 1000) + b"]")


def test_whole_pairs_and_nul_are_text():
    assert value_of(b'"\\ud83d\\ude00"') == "\U0001f600"
    assert value_of(b'"a\\u0000b\\ud7ff\\ue000"') == "a\0b\ud7ff\ue000"
    assert value_of(b'"\\\\ud83d"') == "\\ud83d"              # an escaped backslash, no surrogate
    assert value_of(b"123456789012345678901234567890") == 123456789012345678901234567890
    assert value_of(b"1e-400") == 0.0


def test_huge_bad_lines_are_quoted_briefly():
    text = b'{"prompt": "' + b"x" * 10**6
    with pytest.raises(LineError) as caught:
        parse_line(text)
    assert len(str(caught.value)) < 300
    for value in ("x" * 10**6, ["x" * 10**6], {"x" * 10**6: 1}, {"a": {"b": "x" * 10**6}}, [[1]] * 10**5,
                  10**399,
                  list(range(10**5)), [10**399] * 8):
        assert len(quote(value)) < 200
    assert quote("a\u2028\n\0\ud800") == '"a\\u2028\\n\\u0000\\ud800"'
    assert one_line("a\nb\0\u2028\ud800") == "a\\u000ab\\u0000\\u2028\\ud800"
    assert len(one_line("\n" * 10**6, 100)) < 700


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-10**30, 10**30) | st.floats() | st.text()
    | st.text(st.characters(min_codepoint=0xd7f0, max_codepoint=0xe010), max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12)


@given(st.binary(max_size=80) | json_values.map(lambda v: json.dumps(v).encode()))
@settings(max_examples=150)
def test_any_bytes_give_a_value_or_a_line_error(raw):
    try:
        _, defect = parse_line(raw)
    except LineError as error:
        defect = error
    if defect is not None:
        assert 0 < len(str(defect)) < 500


# Writing

def refuse_constant(name):
    raise AssertionError(f"{name} is not strict JSON")


def nulled(value):
    """What a reader gets of a value that was written."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):      # two halves side by side are one character in JSON
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(value, dict):
        return {nulled(key): nulled(inner) for key, inner in value.items()}
    return [nulled(inner) for inner in value] if isinstance(value, list) else value


@given(json_values)
@settings(max_examples=150)
def test_written_lines_are_strict_and_read_back(value):
    text = dumps_strict(value)
    assert text.splitlines() == [text]                          # no reader sees two lines
    text.encode("utf-8")                                        # no half pairs left raw
    assert json.loads(text, parse_constant=refuse_constant) == nulled(value)


def test_text_stays_readable_and_unsafe_characters_are_escaped():
    assert dumps_strict({"a": "é漢😀"}) == '{"a": "é漢😀"}'
    assert dumps_strict("\u2028\u2029\u0085\x7f\ud83d\ufeff\0\n") == \
        '"\\u2028\\u2029\\u0085\\u007f\\ud83d\\ufeff\\u0000\\n"'


def test_numbers_json_has_no_words_for_become_null():
    assert dumps_strict([1.5, -math.inf, {"x": (math.nan, 2)}]) == "[1.5, null, {\"x\": [null, 2]}]"
    assert dumps_strict([np.float32(0.5), np.int64(3), np.array([1.0, -np.inf])]) == "[0.5, 3, [1.0, null]]"
    with pytest.raises(TypeError, match="set has no JSON form"):
        dumps_strict({1, 2})
