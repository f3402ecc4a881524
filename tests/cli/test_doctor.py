"""`mpillm doctor`: what it prints on this machine, and that its exit code says whether a run would work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple

import pytest
from program import REPOSITORY, launch

from mpillm.cli import doctor
from mpillm.errors import LaunchError
from mpillm.jit.isa import select
from mpillm.machine.topology import Core, Domain, Topology, format_cpu_list


def ask(*arguments, **environment):
    path = os.pathsep.join([environment.pop("before", ""), str(REPOSITORY)]).strip(os.pathsep)
    return subprocess.run([sys.executable, "-m", "mpillm.main", "doctor", *arguments], capture_output=True, text=True,
                          timeout=300, env={**os.environ, "PYTHONPATH": path, **environment})


def lines(text):
    return {line[:15].strip(): line[15:] for line in text.splitlines()}


def test_this_machine_can_run():
    done = ask()
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.splitlines()[-1] == "A run would work here."
    said = lines(done.stdout)
    assert said["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert "numba " in said["packages"] and "mpi4py " in said["packages"]
    assert said["MPI"] and f"(CPUs {format_cpu_list(os.sched_getaffinity(0))})" in said["cores"]
    assert said["test kernel"] == "compiled, and right"
    tier = said["instructions"]
    assert tier in select.TIERS
    declined = {name for name in select.TIERS if f"not {name}" in done.stdout}
    assert declined == set(select.TIERS) - {tier}, "every other tier has its reason"
    assert "none needed" in said["C compiler"]


def test_only_the_first_rank_prints():
    done = launch(2, ["doctor"])
    assert done.code == 0, done.stderr
    assert done.stdout.count("A run would work here.") == 1 and done.stdout.count("packages ") == 1


def one_error(done, code, *words):
    assert done.returncode == code, done.stdout + done.stderr
    errors = done.stderr.splitlines()
    assert len(errors) == 1 and errors[0].startswith("mpillm: error: "), done.stderr
    assert all(word in errors[0] for word in words), errors[0]
    assert "A run would work here." not in done.stdout and "<- a run ends here" in done.stdout


def test_unknown_instructions_end_with_the_code_of_a_run():
    one_error(ask(MPILLM_ISA="sse9"), LaunchError.exit_code, "MPILLM_ISA=sse9", "use one of generic, avx2")


@pytest.mark.parametrize("package, words", [
    ("mpi4py", ("MPI cannot be loaded (ImportError: libmpi.so.12 is broken)", "pip install mpich mpi4py")),
    ("numba", ("numba cannot be loaded (ImportError: libmpi.so.12 is broken)", "pip install -U numba"))])
def test_a_broken_library_is_named_and_the_rest_is_told(tmp_path, package, words):
    broken = tmp_path / package
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('libmpi.so.12 is broken')\n")
    done = ask(before=str(tmp_path))
    one_error(done, LaunchError.exit_code, *words)
    assert {"packages", "memory", "C compiler"} <= set(lines(done.stdout))


def test_a_missing_package_is_named():
    name, found, problem = doctor.packages(("numpy", "no-such-package"))
    assert found.startswith("numpy ") and found.endswith(", no no-such-package")
    assert "pip install no-such-package" in str(problem)
    assert doctor.packages(("numpy",))[2] is None


def test_an_unknown_argument_is_usage():
    done = ask("--fast")
    assert done.returncode == 2 and "--fast" in done.stderr


@pytest.mark.parametrize("setting, found", [
    ("always [madvise] never\n", "madvise"), ("[always] madvise never\n", "always"),
    ("always madvise [never]\n", "never: reading weights is some per cent slower (ask for madvise)"),
    (None, "this kernel has none: reading weights is some per cent slower")])
def test_huge_pages(tmp_path, setting, found):
    if setting is not None:
        path = tmp_path / doctor.HUGE_PAGES
        path.parent.mkdir(parents=True)
        path.write_text(setting)
    assert doctor.huge_pages(str(tmp_path)) == found


def test_cores_in_words():
    node = Topology(tuple(Core((cpu, cpu + 4), 0, cpu // 2) for cpu in range(4)))
    assert doctor.describe_cores(node, frozenset({0, 1, 4}), None) == "2 of 4 (CPUs 0-1,4), NUMA domain 0, no CPU quota"
    assert doctor.describe_cores(node, frozenset({1, 2}), 1.5) == \
        "2 of 4 (CPUs 1-2), NUMA domains 0-1, a CPU quota of 1.5 cores"


def test_memory_of_domains_in_words(tmp_path, monkeypatch):
    assert doctor.numa_memory(Topology(())) == "one domain: nothing to bind"
    node = Topology((Core((0,), 0, 0), Core((1,), 0, 1)), (
        Domain(0, 2 << 30, (0,)), Domain(1, 0, (0,)), Domain(2, 1 << 30, (2,))))
    path = tmp_path / "sys/devices/system/node/node2/meminfo"
    path.parent.mkdir(parents=True)
    path.write_text("Node 2 MemTotal: 1048576 kB\nNode 2 MemFree: 1024 kB\n")
    bound = []
    monkeypatch.setattr(doctor.numa, "bind", bound.append)
    monkeypatch.setattr(doctor.numa, "touched_domains", lambda: bound[-1])
    assert doctor.numa_memory(node, str(tmp_path)) == (
        "domain 0: 0 B of 2.00 GiB free; domain 1: none, nearest is 0; domain 2: 1.0 MiB of 1.00 GiB free, no cores; "
        "memory can be bound") and bound == [(0,), (2,)]
    monkeypatch.setattr(doctor.numa, "touched_domains", lambda: (0, 2))
    assert doctor.bindable((0, 2)) == "memory bound to domain 0 lies in 0,2"

    def refuse(domains):
        raise OSError(1, "set_mempolicy: Operation not permitted")

    monkeypatch.setattr(doctor.numa, "bind", refuse)
    assert "cannot be bound (set_mempolicy: Operation not permitted)" in doctor.bindable((0,))


def test_too_little_shared_memory_is_a_problem(tmp_path, monkeypatch):
    room = namedtuple("room", "f_bavail f_frsize")
    monkeypatch.setattr(doctor.os, "statvfs", lambda folder: room(10, 4096))
    name, found, problem = doctor.shared_memory({"PMI_SIZE": "3"}, str(tmp_path))
    assert found == f"{tmp_path}: 40.0 KiB free for 3 ranks" and "3 ranks need 3072 KiB" in str(problem)
    monkeypatch.setattr(doctor.os, "statvfs", lambda folder: room(1000, 4096))
    assert doctor.shared_memory({"PMI_SIZE": "3"}, str(tmp_path))[1:] == (f"{tmp_path}: 3.9 MiB free", None)
    assert doctor.shared_memory({}, str(tmp_path / "none"))[2] is None


def test_state_of_the_cache(tmp_path):
    assert "empty" in doctor.cache_state(str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kernel.1.nbc").write_bytes(bytes(2048))
    assert doctor.cache_state(str(tmp_path)) == f"{tmp_path} (1 kernel(s), 2.0 KiB)"
    assert "in memory" in doctor.cache_state(None)
