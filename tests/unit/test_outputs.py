"""Outputs are held from the start, and nothing of the user's is ever overwritten by accident."""

from __future__ import annotations

import os

import pytest

from mpillm import io
from mpillm.errors import LaunchError, OutputError, UsageError
from mpillm.formats.hold import Hold
from mpillm.formats.results import ResultsPart, Target
from mpillm.machine.launch import check_shared_memory


@pytest.mark.parametrize("output, results, prompts", [
    ("x", "x", "p"), ("x", "./x", "p"), ("x.h5", "x.h5.tmp", "p"), ("x", "x.parts", "p"), ("o", "p", "p"),
    ("p", "r", "p"), ("o", "r", "r.tmp"), ("o.h5", "r", "o.h5.tmp"), ("o", "r", "link"), ("link", "r", "r2"),
    ("", "r", "p"), ("o", "", "p"),
])
def test_names_that_meet_are_refused(tmp_path, monkeypatch, output, results, prompts):
    monkeypatch.chdir(tmp_path)
    os.symlink("r" if prompts == "link" else "r2", "link")
    with pytest.raises(UsageError, match="same file|choose another name|is empty"):
        io.check_names(output, results, [("--prompts", prompts), ("--model", None)])
    io.check_names("other", "another", [("--prompts", prompts)])


def test_a_second_hold_is_refused_until_the_first_lets_go(tmp_path):
    path = str(tmp_path / "lock")
    first = Hold(path, "it")
    with pytest.raises(OutputError, match="another run is writing it"):
        Hold(path, "it")
    first.release()
    first.release()
    assert not os.path.exists(path)
    second = Hold(path, "it")
    second.release(keep=True)
    assert os.path.exists(path)


def test_outputs_are_one_runs(tmp_path):
    output, results = str(tmp_path / "o.h5"), str(tmp_path / "r.jsonl")
    first = io.Outputs(output, results, False)
    for others in ((output, str(tmp_path / "r2")), (str(tmp_path / "o2.h5"), results)):
        for overwrite in (False, True):
            with pytest.raises(OutputError, match="another run is writing"):
                io.Outputs(*others, overwrite)
    assert os.path.isdir(first.parts), "a second run's failure leaves the first one's folder"
    first.release()
    assert os.listdir(tmp_path) == []


def test_parts_of_a_killed_run_go_only_when_the_next_begins(tmp_path):
    output, results = str(tmp_path / "o.h5"), str(tmp_path / "r.jsonl")
    killed = io.Outputs(output, results, False)
    ResultsPart(os.path.join(killed.parts, "results-0000.jsonl")).add(0, {"a": 1})
    killed.release()
    with pytest.raises(OutputError, match="parts of an earlier run"):
        io.Outputs(output, results, False)
    again = io.Outputs(output, results, True)
    assert "results-0000.jsonl" in os.listdir(again.parts)
    again.begin()
    assert "results-0000.jsonl" not in os.listdir(again.parts)
    again.release()
    assert os.listdir(tmp_path) == []


def test_results_are_merged_in_order_and_renamed_last(tmp_path):
    path = str(tmp_path / "r.jsonl")
    target = Target(path, False)
    parts = [str(tmp_path / f"results-000{i}.jsonl") for i in range(2)]
    for i, part in enumerate(parts):
        writer = ResultsPart(part)
        for index in (4 + i, 2 + i - 2 * i, 0 + i):
            writer.add(index, {"index": index})
    assert target.fill(parts) == 6
    assert not os.path.exists(path)
    target.commit()
    assert [line[:11] for line in open(path)] == [f'{{"index": {i}' for i in (0, 1, 1, 2, 4, 5)]
    assert not os.path.exists(path + ".tmp")


def test_results_that_appear_during_the_run_are_kept(tmp_path):
    path = tmp_path / "r.jsonl"
    target = Target(str(path), False)
    path.write_text("precious")
    target.fill([])
    with pytest.raises(OutputError, match="exists"):
        target.commit()
    target.release()
    assert path.read_text() == "precious"


@pytest.mark.parametrize("name", ["no/such/r.jsonl", "x" * 252, "folder/", "folder"])
def test_results_that_cannot_be_written_stop_before_work(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    os.mkdir("folder")
    with pytest.raises(OutputError, match="choose another|name a file"):
        Target(name, True)


def test_a_device_is_not_replaced_and_a_link_is_followed(tmp_path):
    with pytest.raises(OutputError, match="not a regular file"):
        Target("/dev/null", True)
    os.symlink(tmp_path / "real", tmp_path / "link")
    target = Target(str(tmp_path / "link"), False)
    target.fill([])
    target.commit()
    assert (tmp_path / "real").exists() and os.path.islink(tmp_path / "link")


def test_too_little_shared_memory_is_said_before_mpi_starts(tmp_path, monkeypatch):
    real = os.statvfs("/")
    small = os.statvfs_result((*real[:1], 1024, 2048, 2048, 2000, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda folder: small)
    with pytest.raises(LaunchError, match="2000 KiB free, 3 ranks need 3072 KiB"):
        check_shared_memory({"MPI_LOCALNRANKS": "3", "PMI_SIZE": "3"}, str(tmp_path))
    check_shared_memory({"MPI_LOCALNRANKS": "1", "PMI_SIZE": "3"}, str(tmp_path))
    check_shared_memory({}, str(tmp_path))
