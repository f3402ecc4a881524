"""The scripts of jobs/ under a real SLURM: submitted, signalled and requeued in mid-run, their results compared.

`tests/slurm/setup.sh` installs SLURM; `make test-slurm` runs this.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

import mpillm
from mpillm.io import demo_model

sys.path.insert(0, str(Path(__file__).parent))

import cluster as slurm  # noqa: E402  (beside this file)

pytestmark = pytest.mark.slurm
JOBS = Path(mpillm.__file__).parents[1] / "jobs"
PROMPTS = 24
# The same --tp everywhere: it decides in which order parts of sums are added
OPTIONS = ("--tp", "2", "--max-batch", "2", "--max-tokens", "48", "--ignore-eos", "--progress-every", "0.2",
           "--logprobs", "2")
SECONDS = 240      # of a job; the machine may be busy, and kernels not compiled yet
PROGRESS = re.compile(r"(\d+) of (\d+) requests")
MISSING = slurm.missing()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if MISSING:
        reason = f"no SLURM ({', '.join(MISSING)} missing): run tests/slurm/setup.sh as root"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    with slurm.running(tmp_path_factory.mktemp("cluster") / "c") as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prompts that sample, so that a seed that came from somewhere else would show; one blank line, one broken."""
    folder = tmp_path_factory.mktemp("jobs")
    lines = [json.dumps({"id": f"p{i}", "prompt": f"Number {i} is", "max_tokens": 40 + i % 5 * 8})
             for i in range(PROMPTS - 1)]
    lines[5:5] = ["", '{"id": "broken", "prompt": 5}']
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def submit(cluster, folder, script, *words, **variables):
    """sbatch of a script of jobs/, in ``folder``; this environment's Python and mpirun."""
    path = os.pathsep.join((str(Path(sys.executable).parent), cluster.environment["PATH"]))
    options, rest = [w for w in words if w.startswith("--array") or w.startswith("--n")], \
        [w for w in words if not (w.startswith("--array") or w.startswith("--n"))]
    return cluster.submit(f"--chdir={folder}", "--output=%x.%A_%a.log" if script == "array.sbatch" else
                          "--output=%x.%j.log", *options, str(JOBS / script), *rest, *OPTIONS, PATH=path,
                          PYTHON=sys.executable, PYTHONPATH=str(JOBS.parent), MPIR_CVAR_ENABLE_HEAVY_YIELD="1",
                          **variables)


def ended(cluster, job, log):
    found = cluster.wait(job, SECONDS, lambda: log.read_text()[-3000:] if log.exists() else "")
    text = log.read_text()
    assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0"), text[-4000:]
    return text


def warn_in_mid_run(cluster, job, log):
    """What --signal=B:USR1@120 does, as soon as some requests are finished and others are not; how many were."""
    def progress():
        found = PROGRESS.findall(log.read_text()) if log.exists() else []
        return [int(figure) for figure in found[-1]] if found else [0, 1]

    slurm.wait_until(lambda: progress()[0] > 0, SECONDS, lambda: log.read_text()[-3000:] if log.exists() else "")
    done, of = progress()
    assert 0 < done < of, f"too late: {done} of {of} were finished"
    cluster.call("scancel", "--batch", "--signal=USR1", str(job))
    return done


def records(path):
    """Result lines without the time of the run."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["response"]["body"].pop("created", None)
    return lines


def same(got, expected):
    """All lines are alike, to the last bit of their logprobs."""
    assert [line["line"] for line in got] == [line["line"] for line in expected]
    unlike = [one["line"] for one, other in zip(got, expected, strict=True) if one != other]
    assert not unlike, f"lines {unlike} differ"


def requeued(text):
    """The log is that of a run that was interrupted, requeued and resumed."""
    assert [line.split(maxsplit=1)[1] for line in text.splitlines() if " end: exit code" in line] == [
        "end: exit code 75", "end: exit code 0"], text[-4000:]
    assert " start 0 on " in text and " start 1 on " in text, text[-4000:]
    stopped = re.findall(r"stopped by SIGUSR1 with (\d+ of \d+) lines done", text)
    assert stopped and re.findall(r"resuming: (\d+ of \d+) lines are done", text) == stopped, text[-4000:]
    done, of = map(int, stopped[0].split(" of "))
    assert 0 < done < of, "in mid-run"


@pytest.fixture(scope="module")
def undisturbed(cluster, folder):
    """The results of run.sbatch on one node, left alone."""
    job = submit(cluster, folder, "run.sbatch", "in.jsonl", "--output", "alone.h5")
    ended(cluster, job, folder / f"mpillm.{job}.log")
    lines = records(folder / "alone.results.jsonl")
    assert [line["line"] for line in lines] == [i for i in range(1, PROMPTS + 2) if i != 6]
    assert sum(line["error"] is not None for line in lines) == 1
    return lines


def test_an_array_by_srun_one_task_warned_and_requeued(cluster, folder, undisturbed):
    job = submit(cluster, folder, "array.sbatch", "--array=1-2", "in.jsonl", "all.results.jsonl", LAUNCH="srun")
    logs = {task: folder / f"mpillm.{job}_{task}.log" for task in (1, 2)}
    warn_in_mid_run(cluster, f"{job}_1", logs[1])
    texts = [ended(cluster, f"{job}_{task}", log) for task, log in logs.items()]
    requeued(texts[0])
    same(records(folder / "all.results.jsonl"), undisturbed)
    assert sum(f"{PROMPTS} result(s) of 2 part(s)" in text for text in texts) == 1


def test_two_nodes_by_mpirun_warned_and_requeued(cluster, folder, undisturbed):
    job = submit(cluster, folder, "multinode.sbatch", "--nodes=2", "--ntasks-per-node=2", "in.jsonl", "--output",
                 "nodes.h5", MODEL=demo_model())
    log = folder / f"mpillm.{job}.log"
    warn_in_mid_run(cluster, job, log)
    text = ended(cluster, job, log)
    requeued(text)
    assert f"mpillm-weights-{job}" in text and " on n[1-2]: 4 rank(s) by mpirun" in text
    same(records(folder / "nodes.results.jsonl"), undisturbed)
