"""What --resume does where it must not go on, and what a run leaves on the disk while it runs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from program import launch, mpirun, write_lines

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from reliability import STOPPED, Job, results_of, send  # noqa: E402

MODEL = ROOT / "tests" / "reference" / "data" / "saved_tiny"
LINES = [{"id": f"p{i}", "prompt_token_ids": [10 + i, 20], "max_tokens": 3 + i % 4, "ignore_eos": True}
         for i in range(12)]
USAGE, OUTPUT, EXPIRED = 2, 5, 9
ENDLESS = 4000      # lines of some hundred tokens that no machine answers while a test lasts


def arguments(folder: Path, prompts: Path, *more: str, model: Path = MODEL) -> list[str]:
    return ["--model", str(model), "--prompts", str(prompts), "--results", str(folder / "out.results.jsonl"),
            "--output", str(folder / "out.h5"), *more]


def started(folder: Path, prompts: Path, ranks: int, *more: str) -> Job:
    """A job whose first step has come."""
    options = ["--model", str(MODEL), "--prompts", str(prompts), "--results", str(folder / "out.results.jsonl"), *more]
    job = Job(mpirun(), ranks, folder / "out.h5", options)
    job.await_begin()
    return job


def worker(job: Job, rank: int) -> int:
    """The process of a rank."""
    names = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
    for pid in job.found()["workers"]:
        words = Path(f"/proc/{pid}/environ").read_text().split("\0")
        if any(f"{name}={rank}" in words for name in names):
            return pid
    raise AssertionError(f"rank {rank} is not there")


def snapshot(folder: Path) -> dict[str, bytes]:
    """All files below."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(prompts, folder of a complete run, folder of one that was stopped before its first step)."""
    top = tmp_path_factory.mktemp("runs")
    prompts = write_lines(top / "in.jsonl", LINES)
    for name, more, code in (("whole", (), 0), ("stopped", ("--time-limit", "0.001"), STOPPED)):
        (top / name).mkdir()
        ended = launch(2, arguments(top / name, prompts, "--resume", *more))
        assert ended.code == code, ended.stderr[-3000:]
    return prompts, top / "whole", top / "stopped"


COMPLETE, BEGUN = 1, 2


@pytest.mark.parametrize("run, what", [(COMPLETE, "reordered"), (COMPLETE, "seed"), (BEGUN, "reordered"),
                                       (BEGUN, "template"), (BEGUN, "model")])
def test_another_run_is_refused_and_nothing_touched(runs, run, what, tmp_path):
    prompts, folder, model, more, words = runs[0], runs[run], MODEL, (), (f"--prompts {tmp_path}",)
    before = snapshot(folder)
    if what == "reordered":
        prompts = tmp_path / "in.jsonl"
        prompts.write_text("".join(reversed(runs[0].read_text().splitlines(keepends=True))))
    elif what == "template":
        (tmp_path / "t.jinja").write_text("{{ messages }}")
        more, words = ("--chat-template", str(tmp_path / "t.jinja")), ("the chat template is another one",)
    elif what == "seed":
        more, words = ("--seed", "5"), ("--seed is 5, the run began with 0",)
    else:
        model = shutil.copytree(MODEL, tmp_path / "model")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
        words = ("the model is another one",)
    ended = launch(1, arguments(folder, prompts, "--resume", *more, model=model))
    assert ended.code == USAGE and len(ended.errors) == 1, ended.stderr[-3000:]
    for word in words:
        assert word in ended.errors[0]
    assert snapshot(folder) == before


def test_a_complete_run_has_nothing_to_resume(runs):
    before = snapshot(runs[1])
    ended = launch(1, arguments(runs[1], runs[0], "--resume"))
    assert ended.code == 0 and "nothing to resume" in ended.stdout + ended.stderr
    assert snapshot(runs[1]) == before


def test_an_expired_run_stays_expired(runs, tmp_path):
    for _ in range(2):
        ended = launch(1, arguments(tmp_path, runs[0], "--resume", "--on-stop", "expire", "--time-limit", "0.001"))
        assert ended.code == EXPIRED and "12" in ended.stdout + ended.stderr, ended.stderr[-3000:]
        assert len((tmp_path / "out.errors.jsonl").read_text().splitlines()) == len(LINES)


def test_one_job_at_a_time_and_what_one_left_is_not_overwritten_unasked(runs, tmp_path):
    long = write_lines(tmp_path / "long.jsonl", [LINES[0] | {"max_tokens": 500} for _ in range(ENDLESS)])
    job = started(tmp_path, long, 2, "--flush-every", "0.1")
    for more in ("--resume", "--overwrite", "--flush-every=5"):
        ended = launch(1, arguments(tmp_path, long, more))
        assert ended.code == OUTPUT and "another run is writing" in ended.errors[0], ended.stderr[-3000:]
    job.await_lines(1)
    assert job.process.poll() is None
    job.destroy()
    while any(job.found().values()):
        time.sleep(0.05)
    ended = launch(1, arguments(tmp_path, long))
    assert ended.code == OUTPUT and "--resume" in ended.errors[0] and "--overwrite" in ended.errors[0]


def test_a_rank_that_cannot_write_is_named_in_seconds(runs, tmp_path):
    long = write_lines(tmp_path / "long.jsonl", [LINES[0] | {"max_tokens": 300} for _ in range(ENDLESS)])
    job = started(tmp_path, long, 3, "--tp", "3", "--flush-every", "0.2")
    began = time.monotonic()
    resource.prlimit(worker(job, 2), resource.RLIMIT_FSIZE, (1, 1))
    assert job.end(60) == OUTPUT and time.monotonic() - began < 20
    said = job.log.read_text()
    assert "rank 2 (" in said and "File too large" in said and "Traceback" not in said, said[-2000:]


def test_what_is_finished_is_on_the_disk_in_time(tmp_path):
    """Short lines are finished while a long one still runs: killed then, they are there."""
    lines = write_lines(tmp_path / "in.jsonl", [
        LINES[i] | ({"max_tokens": 500, "n": 16} if i < 4 else {"max_tokens": 2}) for i in range(12)])
    job = started(tmp_path, lines, 2, "--tp", "2", "--flush-every", "0.1", "--progress-every", "0.05", "--max-batch",
                  "80")
    until = time.monotonic() + 60
    while "8 of 12 requests" not in job.log.read_text() and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(0.4)
    for pid in [*job.found()["workers"], *job.found()["guards"]]:
        send(pid, signal.SIGKILL)
    job.end(60)
    assert not (tmp_path / "out.h5").exists(), "the long lines ended too soon for this test"
    assert job.finished() == 8


def test_a_pipe_is_read_once(runs, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(runs[0].read_bytes()))
    writer.start()
    ended = launch(2, arguments(tmp_path, pipe, "--resume", "--tp", "2", "--time-limit", "0.001"))
    writer.join()
    assert ended.code == STOPPED, ended.stderr[-3000:]
    for _ in range(2):         # the second time all is complete
        ended = launch(2, arguments(tmp_path, pipe, "--resume", "--tp", "2"))
        assert ended.code == 0, ended.stderr[-3000:]
    assert [line for line, _ in results_of(tmp_path / "out.results.jsonl")] == list(range(1, 13))
