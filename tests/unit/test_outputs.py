"""Outputs are held from the start, and nothing of the user's is ever overwritten by accident."""

from __future__ import annotations

import json
import os
import shutil

import h5py
import pytest
from made_parts import HEADER

from mpillm import io
from mpillm.cli.run import Hold as Kept
from mpillm.cli.run import check_errors, prepare
from mpillm.config import RunConfig
from mpillm.errors import LaunchError, ModelError, OutputError, UsageError
from mpillm.formats.hold import Hold
from mpillm.formats.part_scan import choose, read_parts
from mpillm.formats.parts import RequestsPart, finished
from mpillm.formats.results import Target
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


@pytest.mark.parametrize("errors, prompts", [("p", "p"), ("o.h5", "p"), ("r", "p"), ("r.tmp", "p"), ("e", "e.tmp"),
                                            ("o.h5.parts", "p"), ("", "p")])
def test_an_errors_file_takes_no_name_of_another(tmp_path, monkeypatch, errors, prompts):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--errors"):
        io.check_names("o.h5", "r", [("--prompts", prompts)], errors)
    io.check_names("o.h5", "r", [("--prompts", "p")], "e")


@pytest.mark.parametrize("kind", ["pipe", "folder", "link to nothing"])
def test_an_errors_file_replaces_files_only(tmp_path, kind):
    path = tmp_path / "errors"
    {"pipe": os.mkfifo, "folder": os.mkdir, "link to nothing": lambda p: os.symlink("nothing", p)}[kind](path)
    settings = RunConfig(prompts="p", errors=str(path), on_stop="expire", overwrite=True)
    with pytest.raises(OutputError, match="not a regular file: choose another --errors"):
        check_errors(settings)
    path.rmdir() if kind == "folder" else path.unlink()
    check_errors(settings)


def test_prompts_of_a_pipe_need_an_output(tmp_path):
    """The results lie beside the output, so that alone tells where both go."""
    pipe, missing = str(tmp_path / "pipe"), str(tmp_path / "missing")
    os.mkfifo(pipe)
    unplaced = RunConfig(prompts=pipe, results="r", model=missing)
    with pytest.raises(UsageError, match="is no regular file to put outputs beside: give --output$"):
        prepare(unplaced, Kept())
    with pytest.raises(ModelError, match="missing"):       # the next thing that is looked at
        prepare(RunConfig(prompts=pipe, output="o.h5", model=missing), Kept())


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


def paths(folder) -> tuple[str, str]:
    return str(folder / "o.h5"), str(folder / "r.jsonl")


def record(parts: str, *indices: int, attempt: int = 0, replica: int = 0) -> None:
    """What a replica leaves that finished these requests."""
    with RequestsPart(parts, attempt, replica, 1.0) as part:
        for index in indices:
            part.add(index=index, line=index + 1, custom_id=None, replica=replica, tp=1, result={"index": index})


def lines(path: str) -> list[int]:
    return [json.loads(line)["index"] for line in open(path)]


def test_parts_of_a_killed_run_go_only_when_the_next_begins(tmp_path):
    killed = io.Outputs(*paths(tmp_path), False)
    record(killed.parts, 0)
    killed.release()
    with pytest.raises(OutputError, match="parts of an earlier run.*--resume.*--overwrite"):
        io.Outputs(*paths(tmp_path), False)
    again = io.Outputs(*paths(tmp_path), True)
    assert "requests-0000-00000.journal" in os.listdir(again.parts)
    again.begin()
    assert os.listdir(again.parts) == ["lock"]
    again.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("left", [(), ("run.json",), ("requests-0000-00000.journal",)])
def test_a_start_without_a_finished_line_is_in_nobody_s_way(tmp_path, left):
    failed = io.Outputs(*paths(tmp_path), False)
    record(failed.parts)
    for name in os.listdir(failed.parts):
        if name not in (*left, "lock"):
            os.unlink(os.path.join(failed.parts, name))
    if "run.json" in left:
        open(os.path.join(failed.parts, "run.json"), "x").close()
    with pytest.raises(OutputError, match="another run is writing"):
        io.Outputs(str(tmp_path / "o.h5"), str(tmp_path / "r2"), False)
    failed._results.release()
    failed._lock.release()                              # as a kill leaves it
    again = io.Outputs(*paths(tmp_path), False)
    again.begin()
    assert os.listdir(again.parts) == ["lock"]
    again.release()


def test_a_piped_prompt_s_copy_is_never_dropped_unasked(tmp_path):
    failed = io.Outputs(*paths(tmp_path), False)
    record(failed.parts)
    open(os.path.join(failed.parts, "prompts.copy"), "x").close()
    failed.release()
    with pytest.raises(OutputError, match="parts of an earlier run.*--resume.*--overwrite"):
        io.Outputs(*paths(tmp_path), False)


def test_parts_of_a_killed_run_stay_when_it_is_resumed(tmp_path):
    killed = io.Outputs(*paths(tmp_path), False)
    record(killed.parts, 2, 0)
    for name in ("run.json", "prompts.digests"):
        open(os.path.join(killed.parts, name), "x").close()
    killed.release()
    open(tmp_path / "o.h5.tmp", "w").write("half a fold")
    open(tmp_path / "r.jsonl.tmp", "w").write("half a line")
    again = io.Outputs(*paths(tmp_path), False, resume=True)
    with pytest.raises(OutputError, match="another run is writing"):
        io.Outputs(str(tmp_path / "o.h5"), str(tmp_path / "r2"), False, resume=True)
    again.begin()
    assert not again.finished and finished(again.parts).indices.tolist() == [0, 2]
    record(again.parts, 1, 0, attempt=1)             # one of them a second time
    summary = again.finish(HEADER)
    again.release()
    assert (summary["requests"], summary["warning"]) == (3, None)
    assert lines(paths(tmp_path)[1]) == [0, 1, 2]
    with h5py.File(paths(tmp_path)[0]) as file:
        assert file["requests"]["attempt"].tolist() == [0, 1, 0]
    assert sorted(os.listdir(tmp_path)) == ["o.h5", "r.jsonl"]


def test_resuming_a_finished_run_has_nothing_to_do_and_nothing_at_all_is_a_start(tmp_path):
    new = io.Outputs(*paths(tmp_path), False, resume=True)
    assert not new.finished
    record(new.parts, 0)
    new.finish(HEADER)
    new.release()
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    for overwrite in (False, True):
        done = io.Outputs(*paths(tmp_path), overwrite, resume=True)
        assert done.finished
        done.release()
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before
    os.unlink(tmp_path / "r.jsonl")
    with pytest.raises(OutputError, match="o.h5 exists"):    # half of it is not a finished run
        io.Outputs(*paths(tmp_path), False, resume=True)
    assert os.listdir(tmp_path) == ["o.h5"]


class Killed(BaseException):
    """Stands for a kill: nothing of the program runs after it."""


def die_at(monkeypatch, target, name: str, count: int) -> None:
    """The count-th call of ``target.name`` is a kill before it does anything."""
    real, left = getattr(target, name), [count]

    def dying(*arguments, **more):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return real(*arguments, **more)

    monkeypatch.setattr(target, name, dying)


@pytest.mark.parametrize("target, name, count", [
    (io.hdf5, "build", 1), (io.hdf5, "mark_committed", 1), (io.hdf5, "move_into_place", 1), (os, "replace", 1),
    (os, "replace", 2), (io.hdf5, "discard_parts", 1), (os, "unlink", 1), (os, "unlink", 3), (os, "unlink", 4),
    (os, "rmdir", 1)])
def test_a_kill_while_the_outputs_are_made_loses_nothing(tmp_path, target, name, count):
    (tmp_path / "new").mkdir()
    held = io.Outputs(*paths(tmp_path / "new"), False)
    record(held.parts, 3, 1)
    record(held.parts, 0, 2, replica=1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        die_at(patch, target, name, count)
        held.finish(HEADER)
    # The folder as the dead process leaves it, without its locks
    shutil.copytree(tmp_path / "new", tmp_path / "left")
    held.release()
    # An error instead of a kill lets go of them, and removes no more than that
    for name in ("left", "new"):
        output, results = paths(tmp_path / name)
        again = io.Outputs(output, results, False, resume=True)
        if not again.finished:
            assert finished(again.parts).indices.tolist() == [0, 1, 2, 3]
            again.begin()
            again.finish(HEADER)
        again.release()
        assert lines(results) == [0, 1, 2, 3]
        with h5py.File(output) as file:
            assert file["requests"]["line"].tolist() == [1, 2, 3, 4]
        assert sorted(os.listdir(tmp_path / name)) == ["o.h5", "r.jsonl"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_that_appears_after_the_mark_is_kept_unless_it_may_be_replaced(tmp_path, overwrite):
    held = io.Outputs(*paths(tmp_path), overwrite)
    record(held.parts, 0)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        die_at(patch, io.hdf5, "move_into_place", 1)
        held.finish(HEADER)
    held.release()
    (tmp_path / "r.jsonl").write_text("precious")
    if not overwrite:
        with pytest.raises(OutputError, match="r.jsonl appeared during the run: move it away, then .*--resume"):
            io.Outputs(*paths(tmp_path), False, resume=True)
        assert (tmp_path / "r.jsonl").read_text() == "precious"
        os.rename(tmp_path / "r.jsonl", tmp_path / "away")
    assert io.Outputs(*paths(tmp_path), False, resume=True).finished
    assert lines(paths(tmp_path)[1]) == [0] and not os.path.exists(held.parts)


def test_results_come_in_the_order_of_lines_or_of_their_ends(tmp_path, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("mpillm.formats.parts.time.time", lambda: next(clock))
    parts = str(tmp_path)
    record(parts, 5, 2, 0)
    record(parts, 4, 1, 3, replica=1)
    monkeypatch.setattr("mpillm.formats.results._BATCH", 2)
    for order, expected in (("input", [0, 1, 2, 3, 4, 5]), ("finished", [5, 2, 0, 4, 1, 3])):
        path = str(tmp_path / order)
        target, found = Target(path, False), read_parts(parts)
        assert target.fill(found, choose(found), order) == 6
        assert not os.path.exists(path)
        target.commit()
        assert lines(path) == expected and not os.path.exists(path + ".tmp")


def test_outputs_that_appear_during_the_run_are_kept(tmp_path):
    for name in ("o.h5", "r.jsonl"):
        held = io.Outputs(*paths(tmp_path), False, resume=True)
        record(held.parts, 0)
        (tmp_path / name).write_text("precious")
        with pytest.raises(OutputError, match=f"{name} (exists|appeared)"):
            held.finish(HEADER)
        held.release()
        assert (tmp_path / name).read_text() == "precious"
        assert sorted(os.listdir(tmp_path)) == sorted(["o.h5.parts", name]), "the parts have everything"
        os.unlink(tmp_path / name)
        shutil.rmtree(tmp_path / "o.h5.parts")


def test_what_is_not_the_run_s_stays_in_the_folder(tmp_path):
    held = io.Outputs(*paths(tmp_path), False)
    record(held.parts, 0)
    open(os.path.join(held.parts, "mine.txt"), "x").close()
    open(os.path.join(held.parts, "rank-0000-000001.journal.damaged"), "x").close()
    assert "cannot remove" in held.finish(HEADER)["warning"]
    held.release()
    assert sorted(os.listdir(held.parts)) == ["mine.txt", "rank-0000-000001.journal.damaged"]
    assert sorted(os.listdir(tmp_path)) == ["o.h5", "o.h5.parts", "r.jsonl"]


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
    target, found = Target(str(tmp_path / "link"), False), read_parts(str(tmp_path))
    target.fill(found, choose(found))
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
