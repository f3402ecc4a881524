"""Real jobs killed and signalled at random moments, then resumed: no prompt is lost, doubled or answered otherwise."""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path

import pytest
from program import mpirun

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from reliability import KINDS, STOPPED, Job, Tally, results_of, send, torment, undisturbed, write_prompts  # noqa: E402

MODEL = ROOT / "tests" / "reference" / "data" / "saved_tiny"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(options, spans, results) of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("kills")
    write_prompts(folder / "in.jsonl", 120, 307, 100)
    options = ["--prompts", str(folder / "in.jsonl"), "--model", str(MODEL), "--tp", "2", "--max-batch", "2",
               "--flush-every", "0.1", "--logits", "last"]
    (folder / "whole").mkdir()
    return options, *undisturbed(folder / "whole", mpirun(), options)


def check(tally: Tally) -> None:
    assert (tally.lost, tally.doubled, tally.differing) == (0, 0, 0), tally


def torn(whole, folder: Path, kinds: list[str], seed: int) -> Tally:
    options, spans, expected = whole
    tally = Tally()
    torment(tally, folder, mpirun(), [2, 4], options, kinds, expected, random.Random(seed), spans[0])
    return tally


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_moments(whole, tmp_path, seed):
    kinds = random.Random(seed).sample(KINDS, 3)
    check(torn(whole, tmp_path, kinds, seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 18))
def test_killed_many_times(whole, tmp_path, seed):
    check(torn(whole, tmp_path, random.Random(seed).choices(KINDS, k=6), seed))


def begun(whole, folder: Path, *more: str) -> Job:
    """A job that has begun to run."""
    job = Job(mpirun(), 2, folder / "out.h5", [*whole[0], "--results", str(folder / "out.results.jsonl"), *more])
    job.await_begin()
    return job


def test_a_rank_that_is_killed_is_named_and_the_next_attempt_goes_on(whole, tmp_path):
    job = begun(whole, tmp_path)
    job.await_lines(1)
    send(job.found()["workers"][0], signal.SIGKILL)
    code = job.end(60)
    said = job.log.read_text()
    assert code in (9, 137) and "was killed by SIGKILL" in said and "while computing step" in said, said[-2000:]
    again = begun(whole, tmp_path, "--resume")
    assert again.end(120) == 0
    assert " of 120 lines are done" in again.log.read_text()
    assert results_of(tmp_path / "out.results.jsonl") == whole[2]


@pytest.mark.parametrize("to", ["mpirun", "one rank"])
def test_a_signal_stops_all_ranks_after_their_step(whole, tmp_path, to):
    job = begun(whole, tmp_path)
    job.await_lines(1)
    send(job.process.pid if to == "mpirun" else job.found()["workers"][-1], signal.SIGUSR1)
    assert job.end(60) == STOPPED
    assert "stopped by SIGUSR1 with" in job.log.read_text()
    other = begun(whole, tmp_path)                     # neither --resume nor --overwrite
    assert other.end(60) == 5 and "--resume" in other.log.read_text()
    assert begun(whole, tmp_path, "--resume").end(120) == 0
    assert results_of(tmp_path / "out.results.jsonl") == whole[2]


def test_a_rank_that_stands_still_is_named_in_time(whole, tmp_path):
    job = begun(whole, tmp_path, "--exchange-timeout", "2")
    job.await_lines(1)
    send(job.found()["workers"][0], signal.SIGSTOP)
    began = time.monotonic()
    job.end(60)
    said = job.log.read_text()
    assert time.monotonic() - began < 20 and ("stands still" in said or "did not come" in said), said[-2000:]


def test_a_line_that_expires_is_in_the_errors_file(whole, tmp_path):
    import json

    job = begun(whole, tmp_path, "--on-stop", "expire")
    job.await_lines(1)
    send(job.process.pid, signal.SIGUSR1)
    assert job.end(60) == 9, job.log.read_text()[-2000:]
    expired = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    done = results_of(tmp_path / "out.results.jsonl")
    assert expired and {r["error"]["code"] for r in expired} == {"batch_expired"}
    assert sorted([r["line"] for r in expired] + [line for line, _ in done]) == list(range(1, 121))
    assert set(map(str, done)) <= set(map(str, whole[2]))
    assert {r["custom_id"] for r in expired} == {f"p{r['line'] - 1}" for r in expired}


def test_the_time_limit_stops_and_refuses_to_go_on_with_something_else(whole, tmp_path):
    job = begun(whole, tmp_path, "--time-limit", "0.001")
    assert job.end(60) == STOPPED and "stopped by --time-limit" in job.log.read_text()
    for more, words in ((("--seed", "5"), "--seed is 5, the run began with 0"),
                        (("--weights", "f32"), '--weights is "f32"'), (("--temperature", "0"), "--temperature is 0")):
        other = begun(whole, tmp_path, "--resume", *more)
        assert other.end(60) == 2 and words in other.log.read_text(), more
    prompts = Path(whole[0][1])
    changed = tmp_path / "changed.jsonl"
    changed.write_text(prompts.read_text().replace('"max_tokens": ', '"max_tokens":  ', 1))
    options = [str(changed) if word == str(prompts) else word for word in whole[0]]
    other = Job(mpirun(), 2, tmp_path / "out.h5",
                [*options, "--results", str(tmp_path / "out.results.jsonl"), "--resume"])
    assert other.end(60) == 2 and "line 1 " in other.log.read_text()
