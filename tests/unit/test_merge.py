"""Prompts cut over an array, results merged: each exactly once, in order, or one line that says why not."""

from __future__ import annotations

import gzip
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm.cli import command
from mpillm.errors import InputError, OutputError, UsageError
from mpillm.formats import merge as files
from mpillm.formats.jsonl import iterate_lines

PLACES = st.lists(st.integers(1, 12), max_size=30)


def record(line, custom_id=None, text="é"):
    return {"id": f"batch_req_{line:08d}", "custom_id": custom_id, "line": line,
            "response": {"status_code": 200, "body": {"text": text}}, "error": None}


def results(path, *records):
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return path


def merged(folder, *arguments):
    out = folder / "all.results.jsonl"
    assert command(["merge", "--output", str(out), *map(str, arguments)]) == 0
    return [json.loads(line) for line in out.read_text(encoding="utf-8").split("\n")[:-1]]


@given(st.lists(st.sampled_from([b"", b"  ", b'{"prompt": "x"}', b"[1]", "é".encode(), b"{}\r"]), max_size=25),
       st.integers(1, 6), st.booleans())
@settings(max_examples=60)
def test_parts_are_the_file_again(tmp_path_factory, lines, parts, ended):
    folder = tmp_path_factory.mktemp("split")
    (folder / "in").write_bytes(b"\n".join(lines) + (b"\n" if ended else b""))
    whole = list(iterate_lines(folder / "in"))
    counts, seen = [], []
    for part in range(1, parts + 1):
        counts.append(files.split(iterate_lines(folder / "in"), part, parts, str(folder / "part"), overwrite=True))
        seen.append(list(iterate_lines(folder / "part")))
        assert len(seen[-1]) == counts[-1]
    assert sorted(pair for part in seen for pair in part) == whole, "numbers and bytes"
    assert max(counts) - min(counts) <= 1 and sorted(os.listdir(folder)) == ["in", "part"]


def test_a_part_of_a_packed_file(tmp_path, capsys):
    (tmp_path / "in.gz").write_bytes(gzip.compress(b'{"id": 1}\n\n{"id": 2}\n{"id": 3}\n'))
    assert command(["split", "--prompts", str(tmp_path / "in.gz"), "--part", "2/2", "--output",
                    str(tmp_path / "p")]) == 0
    assert (tmp_path / "p").read_bytes() == b'\n\n{"id": 2}\n' and "1 prompt(s), part 2 of 2" in capsys.readouterr().out
    with pytest.raises(OutputError, match="exists.*--overwrite"):
        command(["split", "--prompts", str(tmp_path / "in.gz"), "--part", "1/2", "--output", str(tmp_path / "p")])


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "a/b", "-1/2", "1/0"])
def test_parts_that_are_none(part, tmp_path):
    with pytest.raises(UsageError, match=part):
        command(["split", "--prompts", "x", f"--part={part}", "--output", str(tmp_path / "p")])


@given(PLACES)
def test_repetitions_are_counted_as_by_hand(values):
    keys = np.array([(0, v, 0, 0, 0) for v in values], files.PLACE)
    assert files.repeated(keys).tolist() == [values[:i].count(v) for i, v in enumerate(values)]
    for duplicates, expected in (("first", list(dict.fromkeys(values))),
                                 ("last", list(dict.fromkeys(reversed(values)))[::-1]), ("stop", values)):
        assert files.choose(keys, duplicates)["low"].tolist() == expected


@given(st.permutations(range(1, 13)).flatmap(lambda p: st.tuples(st.just(p), st.integers(0, 12))),
       st.lists(st.integers(1, 14), unique=True))
def test_arranging_is_that_of_a_dictionary(order, present):
    wanted = [(v % 3, v) for v in order[0][:order[1]]]
    places = np.array([(v % 3, v, 7, v, 1) for v in present], files.PLACE)
    arranged, missing, unknown = files.arrange(places, np.array(wanted, [("high", "<u8"), ("low", "<u8")]))
    have = set(present)
    assert arranged["at"].tolist() == [v for _, v in wanted if v in have]
    assert missing.tolist() == [row for row, (_, v) in enumerate(wanted) if v not in have]
    assert unknown["at"].tolist() == [v for v in present if v not in {v for _, v in wanted}]


def test_results_come_in_the_order_of_the_prompts(tmp_path, capsys):
    (tmp_path / "in").write_text('{"id": "a"}\n\n{"id": 7}\nbroken\n{"custom_id": "a"}\n')
    one = results(tmp_path / "1", record(5, "a", "zwei\u2028"), record(3, "7"))
    two = results(tmp_path / "2", record(1, "a"), record(4))
    two.write_bytes(two.read_bytes()[:-1])                           # no newline at the end
    assert merged(tmp_path, "--prompts", tmp_path / "in", one, two) == [
        record(1, "a"), record(3, "7"), record(4), record(5, "a", "zwei\u2028")]
    assert "4 result(s) of 2 part(s)" in capsys.readouterr().out
    assert [r["line"] for r in merged(tmp_path, "--overwrite", one, two)] == [5, 3, 1, 4], "as given without prompts"
    assert not (tmp_path / "all.results.jsonl.tmp").exists()


def test_parts_that_were_cut_by_hand_are_matched_by_id(tmp_path):
    (tmp_path / "in").write_text("".join(f'{{"id": "{name}"}}\n' for name in "abcd"))
    one, two = (results(tmp_path / name, record(1, name[0]), record(2, name[1])) for name in ("ab", "cd"))
    got = merged(tmp_path, "--match", "custom_id", "--prompts", tmp_path / "in", two, one)
    assert [r["custom_id"] for r in got] == list("abcd")


@pytest.mark.parametrize("arguments, error, words", [
    (["1", "1"], InputError, ["2 result(s)", "line 1 in", "--match custom_id", "--duplicates"]),
    (["1", "3"], InputError, ["1 result(s)", "line 2 in"]),
    (["--match", "custom_id", "1", "3"], InputError, ["1 result(s)", 'custom_id "b" in']),
    (["--prompts", "in", "1"], InputError, ["1 of 3 prompts", "line 3", "--allow-missing"]),
    (["--prompts", "in", "1", "2", "4"], InputError, ["1 result(s) belong to no line", "line 9 in"]),
    (["1", "torn"], InputError, ["line 2 of", "torn", "cut short"]),
    (["1", "bytes"], InputError, ["line 1 of", "not JSON"]),
    (["1", "in"], InputError, ["line 1 of", "no result line"]),
    (["--match", "custom_id", "4"], InputError, ["line 1 of", "custom_id is null", "--match line"]),
    (["absent"], InputError, ["absent", "No such file"]),
    (["1", "--output", "1"], UsageError, ["that is read"]),
    (["1", "--output", "2"], OutputError, ["exists", "--overwrite"]),
    (["1", "--output", "folder"], OutputError, ["no regular file"]),
    (["--duplicates", "best", "1"], UsageError, ["best"]),
    ([], UsageError, ["PART"]),
], ids=str)
def test_what_stops_a_merge_leaves_nothing_behind(tmp_path, monkeypatch, arguments, error, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "in").write_text('{"id": "a"}\n{"id": "b"}\n{"id": "c"}\n')
    results(tmp_path / "1", record(1, "a"), record(2, "b"))
    results(tmp_path / "2", record(3, "c"))
    results(tmp_path / "3", record(2, "b"))
    results(tmp_path / "4", record(9))
    (tmp_path / "torn").write_bytes(results(tmp_path / "torn", record(4), record(5)).read_bytes()[:-9])
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")
    before = {path.name: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(error) as caught:
        command(["merge", *(["--output", "out"] if "--output" not in arguments else []), *arguments])
    assert all(word in str(caught.value) for word in words), caught.value
    assert {path.name: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("which, text", [("first", "old"), ("last", "new")])
def test_one_of_two_can_be_kept(tmp_path, which, text):
    old, new = results(tmp_path / "old", record(1, text="old"), record(2)), results(tmp_path / "new",
                                                                                   record(1, text="new"))
    got = merged(tmp_path, "--duplicates", which, old, new)
    assert sorted(r["line"] for r in got) == [1, 2]
    assert [r["response"]["body"]["text"] for r in got if r["line"] == 1] == [text]


def test_missing_ones_may_be_allowed(tmp_path, capsys):
    (tmp_path / "in").write_text('{"id": "a"}\n{"id": "b"}\n')
    got = merged(tmp_path, "--prompts", tmp_path / "in", "--allow-missing", results(tmp_path / "1", record(2, "b")))
    assert got == [record(2, "b")] and "1 prompt(s) without a result" in capsys.readouterr().out


def test_prompts_without_ids_cannot_be_matched_by_them(tmp_path):
    one = results(tmp_path / "1", record(1, "a"))
    for text, words in (('{"id": "a"}\n{"prompt": "x"}\n', "line 2 .* no custom_id"),
                        ('{"id": "a"}\n{"id": "a"}\n', "line 2 .* earlier line"), ("[]\n", "line 1 ")):
        (tmp_path / "in").write_text(text)
        with pytest.raises(InputError, match=words):
            merged(tmp_path, "--match", "custom_id", "--prompts", tmp_path / "in", one)
