"""Starts the scripts of cases/ under mpirun at several rank counts; each with a time limit: none can hang."""

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

from mpillm.machine import segment

CASES = Path(__file__).parent / "cases"
ROOT = Path(__file__).parents[2]
BESIDE = Path(sys.executable).with_name("mpirun")       # that of the MPI in this environment, if there is one
MPIRUN = str(BESIDE) if BESIDE.exists() else shutil.which("mpirun")
ON_NODES = {"mpi": {}, "shared": {}, "sending": {"MPILLM_FAKE_NODES": "0,0,1"}}      # by what the others wait in
pytestmark = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpich")


def environment(**extra: str) -> dict[str, str]:
    """This environment, in which Open MPI may run as root and with more ranks than cores."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1", **extra}


def launch(ranks: int, script: str, *arguments: str, limit: float = 60, **extra: str):
    """The finished `mpirun -n ranks python script arguments`; fails, and ends it, after ``limit`` seconds."""
    command = [MPIRUN, "-n", str(ranks), sys.executable, str(CASES / script), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env=environment(**extra), start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)       # mpirun passes it on to its ranks
            try:
                process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
            pytest.fail(f"{' '.join(command)} did not end within {limit} s")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def ours(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("mpillm:")]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_exchanges(ranks):
    done = launch(ranks, "exchanges.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all exchanges are right") == 1


def test_without_room_in_shared_memory():
    done = launch(3, "exchanges.py", "full")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: no second thread")
def test_exchanges_of_two_threads():
    done = launch(4, "exchanges.py", "lanes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all exchanges are right") == 1


@pytest.mark.parametrize("ranks, nodes", [(2, "2"), (3, "2"), (5, "2"), (5, "3"), (6, "0,1,0,0,2,1")])
def test_over_nodes(ranks, nodes):
    """Even and uneven nodes, and ranks dealt out in turns."""
    done = launch(ranks, "exchanges.py", "nodes", nodes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all exchanges are right") == 1


SLOW = pytest.mark.slow


@pytest.mark.parametrize("ranks, heads, kv_heads, kv_types", [
    (2, 4, 1, ["f32", "bf16"]), (3, 6, 2, ["q8_0"]), pytest.param(3, 3, 1, ["f32"], marks=SLOW),
    pytest.param(4, 9, 3, ["f16"], marks=SLOW), (6, 9, 3, ["f32"]), pytest.param(8, 6, 2, ["f32"], marks=SLOW),
    (2, 4, "latent2", ["bf16", "q8_0"]), pytest.param(3, 4, "latent1", ["q8_0", "f16"], marks=SLOW),
    (4, 4, "latent1", ["f32"]), pytest.param(6, 4, "latent2", ["f16"], marks=SLOW), (8, 4, "latent2", ["f32"])])
def test_a_sharded_cache(ranks, heads, kv_heads, kv_types):
    """Rows of all ranks and of some, heads that straddle two ranks, ranks without query heads."""
    done = launch(ranks, "shards.py", str(heads), str(kv_heads), *kv_types, limit=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("shards are right") == 1


@pytest.mark.parametrize("ranks, nodes, weights, cases", [
    (2, "2", "f32", "redundant mpi"), (2, "2", "q8_0", "latent0 latent2"), (3, "2", "bf16", "sharded q8_0 latents"),
    pytest.param(3, "2", "bf16", "allgather sharded q8_0 messages experts latent3 latents", marks=SLOW),
    pytest.param(5, "3", "f32", "redundant sharded messages", marks=SLOW),
    pytest.param(5, "0,1,0,1,0", "bf16", "allgather bf16 experts", marks=SLOW)])
def test_steps_in_halves(ranks, nodes, weights, cases):
    """The same bits as whole steps, over wires and KV modes; and all ranks find the same way quicker."""
    done = launch(ranks, "halves.py", nodes, weights, *cases.split(), limit=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("halves are right") == 1


def runs(process: str) -> bool:
    try:
        return b"failures.py" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize("waiting", ["shared", "sending"])
def test_a_stopped_rank_is_named_and_ended(waiting):
    began = time.monotonic()
    done = launch(3, "failures.py", "stopped", waiting, "1.5", limit=30, **ON_NODES[waiting])
    assert done.returncode == 8 and time.monotonic() - began < 20, done.stderr
    (said,) = ours(done.stderr)
    assert re.fullmatch(r"mpillm: rank 0 \(.+\): error: rank 0 waited 1.5 s for rank 1 \(host .+\) in an all-reduce: "
                        r"it is stuck or was killed; --exchange-timeout sets the time", said)
    stopped, until = done.stdout.split()[0], time.monotonic() + 10
    while runs(stopped) and time.monotonic() < until:      # mpirun does not wait for those that it kills
        time.sleep(0.05)
    assert not runs(stopped), "a stopped process was left behind"


@pytest.mark.parametrize("kind, code, line", [
    ("model", 3, "mpillm: rank 1 ({}): error: model.safetensors is cut short: read it again"),
    ("fault", 70, "mpillm: rank 1 ({}): fault of the program: KeyError: 'no such key'"),
    ("thread", 70, "mpillm: rank 1 ({}): fault of the program: IndexError: list index out of range"),
    ("exit", 9, "mpillm: rank 1 ({}): left with code 9"),
    ("interrupt", 130, "mpillm: rank 1 ({}): interrupted"),
    ("pipe", 5, "mpillm: rank 1 ({}): error: the reader of the output went away"),
])
@pytest.mark.parametrize("waiting", ["mpi", "shared", "sending"])
def test_one_rank_fails_and_the_job_ends(kind, code, line, waiting):
    began = time.monotonic()
    done = launch(3, "failures.py", kind, waiting, limit=20, **ON_NODES[waiting])
    assert time.monotonic() - began < 10
    left = [path for path in done.stdout.split() if os.path.exists(path)]
    assert not left, "the aborted run left shared memory behind"
    assert done.stdout.split() or not segment.supported(), "no segment was there to be left"
    assert done.returncode == code, done.stderr
    (said,) = ours(done.stderr)
    start, _, finish = line.partition("{}")
    assert said.startswith(start) and said.endswith(finish)
    assert ("Traceback" in done.stderr) == (code == 70)
    assert "Abort(" not in done.stderr, "MPI's own words about the abort are noise"


@pytest.mark.parametrize("waiting", ["shared", "sending"])
def test_a_killed_rank_ends_the_job(waiting):
    began = time.monotonic()
    done = launch(3, "failures.py", "killed", waiting, limit=20, **ON_NODES[waiting])
    assert done.returncode != 0 and time.monotonic() - began < 10


def test_a_rank_that_leaves_in_silence_ends_the_job():
    launch(3, "failures.py", "leave", "mpi", limit=20)


@pytest.mark.parametrize("kind, code, lines", [
    ("agreed", 3, ["mpillm: error: shard 3 is absent"]),
    ("all", 6, ["mpillm: error: rank too small (rank 1)"]),
    ("agreed_exit", 0, []),
    ("agreed_usage", 2, []),
    ("code", 5, []),
])
def test_all_ranks_leave_by_themselves(kind, code, lines):
    done = launch(3, "failures.py", kind, "", limit=20)
    assert done.returncode == code, done.stderr
    assert ours(done.stderr) == lines
    assert kind != "agreed_exit" or done.stdout == "usage: none\n"
    if "mpich" in MPI_NAME.lower():
        assert done.stderr.splitlines() == lines, "nothing but our line"


def mpi_name() -> str:
    """What this environment's MPI calls itself; asked in another process, for MPI starts once in each."""
    asked = subprocess.run([sys.executable, "-c", "from mpi4py import MPI; print(MPI.Get_library_version())"],
                           capture_output=True, text=True, env=environment(), timeout=60)
    return asked.stdout


MPI_NAME = mpi_name() if MPIRUN else ""


def test_the_mpirun_of_another_mpi_is_refused():
    """Each rank alone, though the environment speaks of four: what a foreign mpirun looks like."""
    script = ("import sys; from mpillm import collectives, main; "
              "sys.exit(main.main([], lambda argv: collectives.start() and 0))")
    for rank in range(2):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60,
                              env=environment(MV2_COMM_WORLD_SIZE="4", MV2_COMM_WORLD_LOCAL_RANK=str(rank)))
        assert done.returncode == 7, done.stderr
        lines = ours(done.stderr)
        assert len(lines) == (rank == 0)
        assert all("started 4 ranks" in line and "sees 1" in line for line in lines)


def test_without_mpi():
    script = ("import sys; sys.modules['mpi4py'] = None; from mpillm import collectives, main; "
              "sys.exit(main.main([], lambda argv: collectives.start() and 0))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60,
                          env=environment())
    assert done.returncode == 7 and len(done.stderr.splitlines()) == 1
    assert "pip install mpich mpi4py" in done.stderr


def test_a_reader_that_goes_away_does_not_hang():
    command = [MPIRUN, "-n", "2", sys.executable, str(CASES / "failures.py"), "flood", ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          env=environment()) as process:
        process.stdout.readline()
        process.stdout.close()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail("mpirun waits for a reader that has gone")
