"""The HDF5 output: parts, fold, checks, and the document that describes it."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_parts import FAILED, HEADER, SLICES, VOCAB, logit, make_request, names, rank_row, steps, write_parts

from mpillm.errors import OutputError
from mpillm.formats import hdf5, hdf5_fold, hdf5_schema
from mpillm.formats.hdf5 import check_output, fold
from mpillm.formats.hdf5_file import _Disk
from mpillm.formats.journal import OpenFiles
from mpillm.formats.parts import RankPart, RequestsPart, SequenceRecord, rank_path, requests_path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "formats.md"


def run(folder: Path, count: int = 40, dtype: str = "f16", **how) -> tuple[str, list[dict], dict]:
    """A whole run in ``folder``: (path, requests in line order, summary)."""
    random = np.random.default_rng(count)
    indices = [index for index in range(count) if index not in (1, 7)]
    requests = [make_request(random, index, int(random.integers(len(SLICES))), logits=True) for index in indices]
    path = str(folder / "out.h5")
    parts = check_output(path, False)
    write_parts(parts, requests, dtype, failed=FAILED)
    summary = fold(path, parts, HEADER, False, **how)
    return path, requests, summary


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[str, list[dict], dict]:
    return run(tmp_path_factory.mktemp("run"))


def test_requests_are_in_line_order_with_failed_lines_between(finished):
    path, requests, summary = finished
    with h5py.File(path) as file:
        rows = file["requests"][:]
    assert summary["requests"] == len(rows) == 40 and summary["failed"] == 2
    assert rows["line"].tolist() == sorted([3 * request["index"] + 2 for request in requests] + [5, 23])
    assert rows["status"].tolist() == [400 if i == 1 else 404 if i == 7 else 0 for i in range(40)]
    assert rows["custom_id"][0] == b"id-0" and rows["custom_id"][1] == b""
    assert rows["custom_id"][7] == rb"doubled\ud83d"  # half a surrogate pair is written as its escape
    assert rows["error"][1].decode() == "no prompt␀" and rows["error"][7].decode() == "…"
    assert (rows["replica"][1], rows["tp"][1], rows["attempt"][1]) == (-1, 0, 0)
    for request in requests:
        row = rows[request["index"]]
        assert (row["replica"], row["tp"]) == (request["replica"], len(SLICES[request["replica"]]))
        assert row["n_choices"] == len(request["choices"])
        assert row["prompt_tokens"] == sum(map(len, request["prompts"]))
        assert row["completion_tokens"] == sum(len(choice.token_ids) for choice in request["choices"])
    assert rows["first_sequence"].tolist() == (np.cumsum(rows["n_choices"]) - rows["n_choices"]).tolist()


def test_every_sequence_comes_back(finished):
    path, requests, _ = finished
    number = 0
    with h5py.File(path) as file:
        sequences, tokens, logprobs = file["sequences"][:], file["tokens"][:], file["logprobs"][:]
        prompts = file["prompt_tokens"][:]
    for request in requests:
        for choice in sorted(request["choices"], key=lambda choice: choice.choice):
            row = sequences[number]
            number += 1
            assert row["request"] == request["index"]
            for name in ("item", "sample", "choice", "seed", "queue_s", "prefill_s", "first_token_s",
                         "decode_s"):
                assert row[name] == getattr(choice, name), name
            span = slice(row["token_start"], row["token_start"] + row["token_count"])
            assert tokens[span].tolist() == choice.token_ids
            np.testing.assert_array_equal(logprobs[span], np.array(choice.logprobs, np.float32))
            start = row["prompt_start"]
            assert prompts[start:start + row["prompt_count"]].tolist() == request["prompts"][choice.item]
            assert row["text"].decode() == choice.text and row["finish_reason"] == b"stop"
            stop = row["stop_reason"].decode()
            assert (json.loads(stop) if stop else None) == choice.stop_reason
            assert row["cumulative_logprob"] == pytest.approx(sum(choice.logprobs), rel=1e-6)
    assert number == len(sequences)
    assert np.isneginf(logprobs).any()


def test_alternatives_and_prompt_logprobs(finished):
    path, requests, _ = finished
    with h5py.File(path) as file:
        sequences, requests_table = file["sequences"][:], file["requests"][:]
        top = {name: values[:] for name, values in file["top_logprobs"].items()}
        prompt_top = {name: values[:] for name, values in file["prompt_top_logprobs"].items()}
        scores = file["prompt_logprobs"][:]
        assert len(top["starts"]) == len(file["tokens"]) + 1
        assert len(prompt_top["starts"]) == len(scores) + 1 == len(file["prompt_tokens"]) + 1
    for request in requests:
        first = requests_table["first_sequence"][request["index"]]
        for choice in request["choices"]:
            row = sequences[first + choice.choice]
            for step in range(row["token_count"]):
                low, high = top["starts"][row["token_start"] + step:][:2]
                expected = choice.top[step] if choice.top else []
                assert top["ids"][low:high].tolist() == [token for token, _ in expected]
                values = np.float32([value for _, value in expected])
                np.testing.assert_array_equal(top["values"][low:high], values)
            start, count = row["prompt_start"], row["prompt_count"]
            given_scores = request["prompt_logprobs"] and request["prompt_logprobs"][choice.item]
            expected = [np.nan] + [-0.5 * i for i in range(1, count)] if given_scores else [np.nan] * count
            np.testing.assert_array_equal(scores[start:start + count], np.float32(expected))
            sizes = np.diff(prompt_top["starts"][start:start + count + 1]).tolist()
            assert sizes == ([0] + [2] * (count - 1) if request["prompt_top"] else [0] * count)


@pytest.mark.parametrize("dtype, how", [
    ("f16", {}), ("f32", dict(slab_bytes=1, threads=3)),
    ("f16", dict(compress=False, threads=1)), ("f32", dict(compress=False))])
def test_logits_rows_are_those_of_their_keys(tmp_path, dtype, how):
    path, requests, summary = run(tmp_path, 25, dtype, **how)
    expected = [(request["index"], choice.choice, len(request["prompts"][choice.item]) - 1 + step)
                for request in requests for choice in sorted(request["choices"], key=lambda c: c.choice)
                for step in range(len(choice.token_ids))]
    with h5py.File(path) as file:
        rows, sequences, logits = file["logits_rows"][:], file["sequences"][:], file["logits"][:]
        assert file["logits"].chunks == (1, VOCAB)
        assert file["logits"].compression == (None if how.get("compress") is False else "gzip")
        assert file["logits"].dtype == {"f16": np.float16, "f32": np.float32}[dtype]
    assert len(rows) == len(expected) == summary["logits_rows"] and summary["logits_dropped"] == 0
    keys = [(row["request"], row["choice"]) for row in sequences[rows["sequence"]]]
    assert [(*key, position) for key, position in zip(keys, rows["position"], strict=True)] == expected
    np.testing.assert_array_equal(logits, np.array([logit(*key) for key in expected]).astype(logits.dtype))
    assert np.isneginf(logits).sum() == len(expected)
    assert sequences["logits_count"].tolist() == sequences["token_count"].tolist()
    assert sequences["logits_start"].tolist() == (np.cumsum(sequences["token_count"])
                                                  - sequences["token_count"]).tolist()


def test_small_slabs_give_the_same_file(tmp_path, finished, monkeypatch):
    monkeypatch.setattr(hdf5_fold, "_SLAB_BYTES", 1000)
    monkeypatch.setattr(OpenFiles.__init__, "__defaults__", (1,))  # fewer open files than parts
    path, _, _ = run(tmp_path)
    with h5py.File(path) as one, h5py.File(finished[0]) as other:
        names: list[str] = []
        one.visit(names.append)
        assert set(names) == set(hdf5_schema.DESCRIPTIONS)
        for name in names:
            if isinstance(one[name], h5py.Dataset):
                np.testing.assert_array_equal(one[name][:], other[name][:])


def test_header_tables_and_order_of_steps(finished):
    with h5py.File(finished[0]) as file:
        assert file.attrs["format"] == "mpillm" and file.attrs["schema_version"] == 2
        assert json.loads(file.attrs["config"]) == {"tp": 3, "text": "é\0"}
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", file.attrs["created"])
        steps, ranks = file["steps"][:], file["ranks"][:]
        for name in hdf5_schema.DESCRIPTIONS:
            assert file[name].attrs["description"] == hdf5_schema.DESCRIPTIONS[name]
        assert "line: number of the input line" in file["requests"].attrs["columns"]
    count = sum(map(len, SLICES.values()))
    assert [(row["rank"], row["step"]) for row in steps] == [(rank, step) for rank in range(count) for step in (0, 1)]
    assert ranks["rank"].tolist() == list(range(count)) and ranks["tp_rank"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert ranks["host"][1].decode() == "näme" and ranks["weight_bytes"][0] == 10**11


def test_attributes_longer_than_an_object_header(tmp_path):
    path = tmp_path / "out.h5"
    layout = {"shares": list(range(50_000))}
    parts = check_output(path, False)
    fold(path, parts, {**HEADER, "layout": layout}, False)
    with h5py.File(path) as file:
        assert json.loads(file.attrs["layout"]) == layout


@pytest.mark.parametrize("parts_made", [False, True])
def test_empty_run(tmp_path, parts_made):
    path = tmp_path / "out.h5"
    parts = check_output(path, False)
    if parts_made:
        write_parts(parts, [])
    summary = fold(path, parts, HEADER, False)
    assert summary["requests"] == summary["sequences"] == summary["logits_rows"] == 0
    with h5py.File(path) as file:
        for name in ("requests", "sequences", "prompt_tokens", "tokens", "logprobs"):
            assert file[name].shape == (0,)
        assert len(file["ranks"]) == 7 * parts_made and len(file["steps"]) == 14 * parts_made
        assert ("logits" in file) == parts_made
        assert "top_logprobs" not in file and "prompt_logprobs" not in file
        if parts_made:
            assert file["logits"].shape == (0, VOCAB)
    assert os.listdir(tmp_path) == ["out.h5"]


def result(number: int) -> dict:
    return {"result": {"line": number}, "replica": 0, "tp": 1}


def test_a_failed_request_of_a_replica_and_no_tokens(tmp_path):
    path = tmp_path / "out.h5"
    parts = check_output(path, False)
    with RequestsPart(parts, 0, 0, 1.0) as part:
        part.add(index=0, line=1, custom_id="", prompts=[[1, 2]], status=413,
                 error="the prompt needs 9 blocks, there are 8", **result(1))
        scored = SequenceRecord(0, 0, 0, 5, [], [], "", "length")
        part.add(index=1, line=2, custom_id="b", prompts=[[1, 2]], choices=[scored], logits_rows=1, **result(2))
    with RankPart(parts, 0, 0, 0, 0, 1.0, logits=(0, 4, "f32")) as part:
        keys = np.array([[1, 0, 1, 0], [0, 0, 0, 0], [9, 0, 0, 0], [1, 5, 0, 0]])
        part.add_logits(keys, np.ones((4, 4), np.float32))
    summary = fold(path, parts, HEADER, False)
    assert (summary["failed"], summary["logits_rows"], summary["logits_dropped"]) == (1, 1, 3)
    assert summary["first_error"] == "the prompt needs 9 blocks, there are 8"
    with h5py.File(path) as file:
        assert file["requests"]["status"].tolist() == [413, 0]
        assert file["requests"]["n_choices"].tolist() == [0, 1]
        row = file["sequences"][0]
        assert (row["token_count"], row["cumulative_logprob"], row["logits_count"]) == (0, 0, 1)
        assert file["logits_rows"][0].tolist() == (0, 1)


def test_logprobs_that_were_not_computed_are_nan(tmp_path):
    parts = check_output(tmp_path / "out.h5", False)
    with RequestsPart(parts, 0, 0, 1.0) as part:
        part.add(index=0, line=1, custom_id=None, prompts=[np.arange(3)],
                 choices=[SequenceRecord(0, 0, 0, 0, [4, 5], None, "x", "length")], **result(1))
    fold(tmp_path / "out.h5", parts, HEADER, False)
    with h5py.File(tmp_path / "out.h5") as file:
        assert np.isnan(file["logprobs"][:]).tolist() == [True, True]
        assert np.isnan(file["sequences"]["cumulative_logprob"][0])


def test_f16_overflow_is_clamped_and_counted(tmp_path):
    parts = check_output(tmp_path / "out.h5", False)
    values = np.float32([[65504, 65519, 65520, -1e9, np.inf, -np.inf, np.nan, 3e-8]])
    with RequestsPart(parts, 0, 0, 1.0) as part:
        part.add(index=0, line=1, custom_id="a", prompts=[[1]],
                 choices=[SequenceRecord(0, 0, 0, 0, [1], [-1.0], "x", "length")], **result(1))
    with RankPart(parts, 0, 0, 0, 0, 1.0, logits=(0, 8, "f16")) as part:
        part.add_logits(np.zeros((1, 4), np.int64), values)
        assert part.clamped == 2
    summary = fold(tmp_path / "out.h5", parts, HEADER, False)
    assert summary["logits_clamped"] == 2
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["logits"].attrs["clamped"] == 2
        expected = np.float16([65504, 65504, 65504, -65504, np.inf, -np.inf, np.nan, 3e-8])
        np.testing.assert_array_equal(file["logits"][0], expected)


def test_waiting_is_measured_where_it_can_be_and_else_inferred_from_the_fastest_rank(tmp_path):
    """Ranks 0 and 1 of replica 0 share memory, ranks 2 and 3 of replica 1 do not; attempt 1 has other ranks."""
    parts = check_output(tmp_path / "out.h5", False)
    made = {(0, 0, 0, 0): steps((5, 0, 2, 1.0, 0.25), (0, 3, 2, 2.0, 3.0)), (0, 1, 0, 1): steps((5, 0, 2, 4, 0.5)),
            (0, 2, 1, 0): steps((5, 1, 4, 1.0, 0), (0, 2, 4, 2.0, 0), (0, 2, 4, 1.5, 0)),
            (0, 3, 1, 1): steps((5, 1, 4, 3.0, 0), (0, 2, 4, 1.5, 0)),
            (1, 0, 1, 0): steps((7, 0, 1, 0.5, 0)), (1, 1, -1, -1): steps()}
    for (attempt, rank, replica, tp_rank), table in made.items():
        with RankPart(parts, attempt, rank, replica, tp_rank, 1.0) as part:
            part.describe(rank_row(rank, replica, tp_rank))
            for piece in np.array_split(table, 2):
                part.add_steps(piece)
    times = fold(tmp_path / "out.h5", parts, HEADER, False)["times"]
    with h5py.File(tmp_path / "out.h5") as file:
        rows, ranks = file["steps"][:], file["ranks"][:]
    assert rows["wait_s"].tolist() == [0.25, 2.0, 0.5, 0.0, 0.5, 0.0, 2.0, 0.0, 0.0]
    assert rows["step"].tolist() == [0, 1, 0, 0, 1, 2, 0, 1, 0]
    assert (rows["communication_s"] + rows["wait_s"]).tolist() == [1, 2, 4, 1, 2, 1.5, 3, 1.5, 0.5]
    assert (rows["compute_s"] + rows["communication_s"] + rows["wait_s"]).tolist() == [2] * 3 + [4] * 5 + [1]
    assert [tuple(row) for row in ranks[["attempt", "rank", "replica"]]] == [
        (0, 0, 0), (0, 1, 0), (0, 2, 1), (0, 3, 1), (1, 0, 1), (1, 1, -1)]
    assert [tuple(row) for row in times[["attempt", "rank", "replica", "tp_rank", "steps"]]] == [
        (0, 0, 0, 0, 2), (0, 1, 0, 1, 1), (0, 2, 1, 0, 3), (0, 3, 1, 1, 2), (1, 0, 1, 0, 1)]
    assert times["wait_s"].tolist() == [2.25, 0.5, 0.5, 2.0, 0.0]
    row = times[2]
    assert (row["prefill_s"], row["prefill_tokens"], row["decode_s"], row["decode_tokens"]) == (4, 5, 8, 4)


# Parts that do not fit together


def two_logits_parts(folder: Path, spans, rows=(2, 2), dtypes=("f16", "f16")) -> tuple[Path, str]:
    """One request with two rows of logits in each replica, or in one of two ranks."""
    parts = check_output(folder / "out.h5", False)
    apart = dtypes[0] != dtypes[1]
    for replica in (0, 1) if apart else (0,):
        with RequestsPart(parts, 0, replica, 1.0) as part:
            part.add(index=replica, line=1, custom_id="a", prompts=[[1, 2]], logits_rows=2, replica=replica,
                     choices=[SequenceRecord(0, 0, 0, 0, [1], [-1.0], "x", "length")], result={}, tp=2 - apart)
    for number, (span, count, dtype) in enumerate(zip(spans, rows, dtypes, strict=True)):
        replica = number if apart else 0
        with RankPart(parts, 0, number, replica, 0 if apart else number, 1.0, logits=(*span, dtype)) as part:
            keys = np.array([[replica, 0, position, 0] for position in range(count)])
            part.add_logits(keys, np.zeros((count, span[1] - span[0]), np.float32))
    return folder / "out.h5", parts


@pytest.mark.parametrize("how, words", [
    (dict(spans=((0, 16), (32, 48))), "line 1 .* incomplete: columns 16 to 32 are missing: start again with --resume"),
    (dict(spans=((16, 32), (32, 48))), "incomplete: columns 0 to 16 are missing"),
    (dict(spans=((0, 16), (16, 48)), rows=(2, 1)), "incomplete: 2 rows are not all there"),
    (dict(spans=((0, 16), (0, 16)), dtypes=("f16", "f32")), "differ in size or type: 16 float16, 16 float32"),
])
def test_logits_parts_that_do_not_fit_are_refused_and_kept(tmp_path, how, words):
    path, parts = two_logits_parts(tmp_path, **how)
    before = names(parts)
    with pytest.raises(OutputError, match=words):
        fold(path, parts, HEADER, False)
    assert os.listdir(tmp_path) == ["out.h5.parts"] and names(parts) == before


def test_damaged_and_missing_parts(tmp_path):
    path, parts = two_logits_parts(tmp_path, ((0, 16), (16, 48)))
    absent = requests_path(parts, 0, 5)
    with pytest.raises(OutputError, match=f"cannot read {absent}: No such file"):
        fold(path, parts, HEADER, False, expected=[absent])
    root = Path(requests_path(parts, 0, 0))
    whole = root.read_bytes()
    root.write_bytes(whole[:-1])
    with pytest.raises(OutputError, match=f"the part {root} is damaged: of {len(whole) - 1} bytes, "):
        fold(path, parts, HEADER, False)
    root.write_bytes(whole)
    os.rename(rank_path(parts, 0, 1), tmp_path / "away")
    with pytest.raises(OutputError, match="incomplete: 2 rows are not all there"):
        fold(path, parts, HEADER, False)
    with pytest.raises(OutputError, match="cannot read the folder"):
        fold(path, str(tmp_path / "nowhere"), HEADER, False)


@pytest.mark.parametrize("name", ["requests-0000-00000.journal", "rank-0000-000001.journal"])
@pytest.mark.parametrize("position", [0.0, 0.3, 0.6, 0.9])
def test_random_damage_is_an_error_and_never_another_one(tmp_path, name, position):
    path, parts = two_logits_parts(tmp_path, ((0, 16), (16, 48)))
    file = Path(parts) / name
    data = bytearray(file.read_bytes())
    start = int(len(data) * position)
    data[start:start + 16] = np.random.default_rng(start).bytes(len(data[start:start + 16]))
    file.write_bytes(data)
    with pytest.raises(OutputError, match="damaged"):
        fold(path, parts, HEADER, False)
    assert file.read_bytes() == data


# Before the run


def test_check_output_makes_the_folder_of_parts(tmp_path):
    parts = check_output(tmp_path / "out.h5", False)
    assert parts == str(tmp_path / "out.h5.parts") and os.listdir(parts) == []
    assert check_output(tmp_path / "out.h5", False) == parts  # nothing was written yet
    hdf5.discard_parts(parts)
    assert os.listdir(tmp_path) == []


def test_existing_outputs(tmp_path):
    path = tmp_path / "out.h5"
    with h5py.File(path, "w") as file:
        file["x"] = 1
    with pytest.raises(OutputError, match=f"{path} exists: choose another --output, or use --overwrite"):
        check_output(path, False)
    assert os.listdir(tmp_path) == ["out.h5"]
    assert os.path.isdir(check_output(path, True))
    assert h5py.is_hdf5(path)  # still there, until the new one is complete
    prompts = tmp_path / "in.jsonl"
    prompts.write_text("{}\n")
    with pytest.raises(OutputError, match="not an HDF5 file"):
        check_output(prompts, True)
    with pytest.raises(OutputError, match="is a folder"):
        check_output(tmp_path, True)
    with pytest.raises(OutputError, match="not a regular file"):
        check_output("/dev/null", True)


@pytest.mark.parametrize("path, words", [
    ("/nowhere/at/all/out.h5", "the folder /nowhere/at/all of the output"),
    ("/proc/self/out.h5", "cannot write in /proc/"),
    ("/tmp/" + "x" * 300 + ".h5", "cannot use .*: File name too long"),
    ("/tmp/a\0b.h5", "cannot use"),
])
def test_unusable_paths(path, words):
    with pytest.raises(OutputError, match=words) as caught:
        check_output(path, True)
    assert "\n" not in str(caught.value)


def test_stale_parts(tmp_path):
    path = tmp_path / "out.h5"
    parts = check_output(path, False)
    RequestsPart(parts, 0, 0, 1.0).close()
    with pytest.raises(OutputError, match="parts of an earlier run.*use --resume to go on with it, or --overwrite"):
        check_output(path, False)
    with pytest.raises(OutputError, match="File exists"):  # a second job that was faster than the check
        RequestsPart(parts, 0, 0, 1.0)
    assert check_output(path, False, resume=True) == parts and len(os.listdir(parts)) == 1
    (Path(parts) / "mine.txt").write_text("precious")
    with pytest.raises(OutputError, match="cannot remove"):
        check_output(path, True)
    assert os.listdir(parts) == ["mine.txt"]
    os.unlink(Path(parts) / "mine.txt")
    for name in ("run.json", "prompts.digests", "committed", "rank-0000-000000.journal.damaged"):
        (Path(parts) / name).write_text("x")
    with pytest.raises(OutputError, match="cannot remove"):      # what was set aside is not deleted at the end of a run
        hdf5.discard_parts(parts)
    assert os.listdir(parts) == ["rank-0000-000000.journal.damaged"]
    assert check_output(path, True) == parts and os.listdir(parts) == []
    (tmp_path / "out.h5.tmp").write_bytes(b"")
    with pytest.raises(OutputError, match="out.h5.tmp is left from an earlier run"):
        check_output(path, False)
    assert check_output(path, False, resume=True) == parts


def test_parts_that_cannot_be_removed_are_a_warning(tmp_path):
    path = tmp_path / "out.h5"
    parts = check_output(path, False)
    (Path(parts) / "mine.txt").write_text("precious")
    summary = fold(path, parts, HEADER, False)
    assert "cannot remove" in summary["warning"] and h5py.is_hdf5(path)


def test_parts_stay_if_they_are_asked_to(tmp_path):
    path = tmp_path / "out.h5"
    parts = check_output(path, False)
    write_parts(parts, [], None)
    before = names(parts)
    assert fold(path, parts, HEADER, False, discard=False)["warning"] is None
    assert names(parts) == before
    fold(path, parts, HEADER, True)
    assert os.listdir(tmp_path) == ["out.h5"]


def test_a_link_keeps_its_place(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "out.h5").symlink_to(tmp_path / "scratch" / "real.h5")
    path = tmp_path / "out.h5"
    summary = fold(path, check_output(path, False), HEADER, False)
    assert path.is_symlink() and h5py.is_hdf5(tmp_path / "scratch" / "real.h5")
    assert summary["path"] == str(tmp_path / "scratch" / "real.h5")


def test_an_output_that_appears_during_the_run_is_not_replaced(tmp_path):
    path = tmp_path / "out.h5"
    parts = check_output(path, False)
    path.write_text("someone else's")
    with pytest.raises(OutputError, match="appeared during the run: the results are in .*out.h5.tmp"):
        fold(path, parts, HEADER, False)
    assert path.read_text() == "someone else's" and h5py.is_hdf5(tmp_path / "out.h5.tmp")
    fold(path, parts, HEADER, True)
    assert h5py.is_hdf5(path)


# Full disks and kills


def in_process(code: str, *arguments: str) -> subprocess.CompletedProcess:
    """Runs ``code`` in a process of its own, with this file's helpers."""
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n" \
              "from test_hdf5 import *\n" + textwrap.dedent(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", program, *arguments], env=environment,
                          capture_output=True, text=True, timeout=120)


def full_disk(size: int) -> None:
    """Files of this process cannot grow beyond ``size`` bytes: what a full disk looks like to HDF5."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_disk_full_while_folding_keeps_everything(tmp_path):
    path = tmp_path / "out.h5"
    with h5py.File(path, "w") as file:
        file["x"] = 1
    parts = check_output(path, True)
    write_parts(parts, [make_request(np.random.default_rng(1), index, index % 3) for index in range(30)])
    before = names(parts)
    done = in_process("""
        full_disk(int(sys.argv[3]))
        try:
            fold(sys.argv[1], sys.argv[2], HEADER, True)
        except OutputError as error:
            print(error)
            sys.exit(5)
        """, str(path), parts, "20000")
    assert done.returncode == 5 and done.stderr == "", done.stderr
    assert done.stdout == f"cannot write {path}.tmp: File too large\n"
    assert sorted(os.listdir(tmp_path)) == ["out.h5", "out.h5.parts"] and names(parts) == before
    with h5py.File(path) as file:
        assert file["x"][()] == 1
    assert fold(path, parts, HEADER, True)["requests"] == 30


# The file layer


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(
    st.tuples(st.just("write"), st.integers(0, 20_000), st.integers(1, 9000)),
    st.tuples(st.just("read"), st.integers(0, 30_000), st.integers(0, 9000)),
    st.tuples(st.just("truncate"), st.integers(0, 30_000), st.just(0))), max_size=25))
def test_the_disk_is_a_file(tmp_path_factory, steps):
    path = tmp_path_factory.getbasetemp() / "disk"
    disk, twin = _Disk(str(path)), bytearray()
    for number, (kind, offset, size) in enumerate(steps):
        if kind == "write":
            data = bytes([number + 1]) * size
            disk.seek(offset)
            assert disk.write(data) == size and disk.tell() == offset + size
            twin.extend(bytes(max(0, offset + size - len(twin))))
            twin[offset:offset + size] = data
        elif kind == "read":
            offset = min(offset, len(twin))
            disk.seek(offset)
            assert disk.read(size)[:len(twin) - offset] == twin[offset:offset + size]
        elif offset >= len(twin):       # HDF5 cuts only what it has not written
            disk.truncate(offset)
            twin.extend(bytes(offset - len(twin)))
        assert disk.seek(0, 2) == len(twin)
    disk.finish(sync=True)
    assert disk.error is None and path.read_bytes() == bytes(twin)


def test_a_writer_that_is_never_closed_does_not_break_the_exit(tmp_path):
    done = in_process("""
        from mpillm.formats.hdf5_file import WritableFile, extend
        out = WritableFile(sys.argv[1] + "/x.h5")
        extend(out.file.create_dataset("x", (0,), "i4", maxshape=(None,), chunks=(10,)), np.arange(50))
        raise ValueError("a fault")
        """, str(tmp_path))
    assert done.returncode == 1 and done.stderr.strip().endswith("ValueError: a fault")
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["x"][:].tolist() == list(range(50))


# The document


def test_the_document_has_every_dataset_and_column():
    text = DOCUMENT.read_text()
    for name, columns in hdf5_schema.COLUMNS.items():
        section = re.search(rf"^### `/{name}`.*?(?=^##|\Z)", text, re.S | re.M)
        assert section, name
        rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", section[0], re.M)
        kinds = [(column, "string" if np.dtype(kind).hasobject else np.dtype(kind).name)
                 for column, kind, _ in columns]
        assert [row[:2] for row in rows] == kinds
        for (_, _, meaning), row in zip(columns, rows, strict=True):
            unit = re.search(r" \[(\w+)\]$", meaning)
            assert row[2] == (unit[1] if unit else "")
    for name in set(hdf5_schema.DESCRIPTIONS):
        assert f"`/{name}`" in text, name


def test_the_document_s_examples_run(finished, monkeypatch, capsys):
    pytest.importorskip("pandas")
    monkeypatch.chdir(Path(finished[0]).parent)
    examples = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.S | re.M)
    assert len(examples) >= 3
    space: dict = {}
    for example in examples:
        exec(compile(example, str(DOCUMENT), "exec"), space)  # noqa: S102
    requests, sequences = space["requests"], space["sequences"]
    assert len(requests) == 40 and requests["custom_id"][0] == "id-0"
    assert sequences["text"][0].startswith("é ")
    assert capsys.readouterr().out


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump (Debian: hdf5-tools) is not installed")
def test_h5dump_shows_what_the_document_says(finished):
    shown = subprocess.run(["h5dump", "-H", "-A", "0", "-d", "/requests", "-d", "/tokens", finished[0]],
                           capture_output=True, text=True, check=True).stdout
    excerpt = re.search(r"^```text\n(HDF5.*?)^```", DOCUMENT.read_text(), re.S | re.M)[1]

    def lines(text: str) -> list[str]:
        return [line.strip() for line in text.splitlines()
                if "DATASPACE" not in line and "out.h5" not in line]

    assert lines(excerpt) == lines(shown)
    texts = subprocess.run(["h5dump", "-y", "-d", "/sequences", finished[0]],
                           capture_output=True, check=True).stdout
    assert b'"stop"' in texts
