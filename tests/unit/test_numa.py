"""NUMA domains as Linux describes them, on recorded trees of machines; whose memory a rank gets, and is it there."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpillm import main
from mpillm.machine import affinity, memory, numa, topology
from mpillm.machine.topology import Domain, Topology, format_cpu_list, parse_cpu_list

GIB = 1 << 30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def machine(root: Path, table: str, online: str = "", smt: int = 0) -> str:
    """A tree of /sys and /proc, from a table of domains: number, socket, CPUs, GiB, GiB free, distances.

    ``smt``: CPU c + smt is the second thread of the core of CPU c; 0: cores have one. The root's path.
    """
    everything: set[int] = set()
    for row in table.strip().splitlines():
        number, socket, cpus, size, free, *distances = row.split()
        cpus = "" if cpus == "-" else cpus
        folder = root / f"sys/devices/system/node/node{number}"
        write(folder / "cpulist", cpus)
        write(folder / "distance", " ".join(distances))
        write(folder / "meminfo", f"Node {number} MemTotal: {int(size) << 20} kB\nNode {number} MemFree: "
                                  f"{int(free) << 20} kB\nNode {number} Inactive(file): 1024 kB")
        for cpu in parse_cpu_list(cpus):
            first = cpu % smt if smt else cpu
            write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list", f"{first},{first + smt}")
            write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", socket)
            everything.add(cpu)
    write(root / "sys/devices/system/cpu/online", online or format_cpu_list(everything))
    write(root / "proc/meminfo", "MemTotal: 1 kB\nMemAvailable: 209715200 kB")
    return str(root)


# Two sockets with hyperthreads, as Intel's servers number them
TWO_SOCKETS = """
0 0 0-3,8-11  96 90 10 21
1 1 4-7,12-15 96 40 21 10
"""
# Two sockets of four domains each, as AMD's with NPS4
FOUR_A_SOCKET = "\n".join(f"{d} {d // 4} {2 * d}-{2 * d + 1} 32 30 " + " ".join(
    str(10 if d == e else 12 if d // 4 == e // 4 else 32) for e in range(8)) for d in range(8))
# HBM beside DRAM (flat mode): domains 2 and 3 have memory and no cores
HBM = """
0 0 0-3 256 250 10 21 13 23
1 1 4-7 256 250 21 10 23 13
2 0 -    64  64 13 23 10 23
3 1 -    64  64 23 13 23 10
"""
# A socket whose memory slots are empty, and memory on CXL
NO_MEMORY = """
0 0 0-3  0  0 10 21 28
1 1 4-7 96 90 21 10 14
2 1 -  128 99 28 14 10
"""


@pytest.mark.parametrize("table, smt, near", [
    (TWO_SOCKETS, 8, {0: (0,), 1: (1,)}),
    (FOUR_A_SOCKET, 0, {d: (d,) for d in range(8)}),
    (HBM, 0, {0: (0,), 1: (1,), 2: (2,), 3: (3,)}),
    (NO_MEMORY, 0, {0: (1,), 1: (1,), 2: (2,)})], ids=["two sockets", "four a socket", "HBM", "no memory"])
def test_the_nearest_memory(tmp_path, table, smt, near):
    found = topology.read_topology(machine(tmp_path, table, smt=smt) + "/sys")
    assert {domain.number: domain.nearest for domain in found.domains} == near
    assert set(found.cpu_domains()) <= set(near) and found.memory_of(near) == tuple(sorted(
        {d for one in near.values() for d in one}))
    assert found.with_memory() == tuple(d.number for d in found.domains if d.nbytes >= 32 * GIB)


def test_distances_that_are_not_there(tmp_path):
    root = machine(tmp_path, NO_MEMORY)
    (tmp_path / "sys/devices/system/node/node0/distance").unlink()
    assert topology.read_domains(root + "/sys")[0].nearest == (1, 2), "any that has some"
    assert topology.read_domains(str(tmp_path / "absent")) == ()


def test_ranks_of_four_domains_a_socket(tmp_path):
    top = topology.read_topology(machine(tmp_path, FOUR_A_SOCKET) + "/sys")
    plan = affinity.plan(top, [range(16)] * 8)
    assert [(r.cpus, r.domains, r.memory) for r in plan.ranks] == [
        ((2 * d, 2 * d + 1), (d,), (d,)) for d in range(8)] and not plan.warnings
    plan = affinity.plan(top, [range(16)] * 2)
    assert [r.memory for r in plan.ranks] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert len(plan.warnings) == 1 and "local rank(s) 0-1: cores in several" in plan.warnings[0]
    assert "8 ranks a node" in plan.warnings[0]


def test_ranks_that_the_launcher_bound_across_domains(tmp_path):
    top = topology.read_topology(machine(tmp_path, TWO_SOCKETS, smt=8) + "/sys")
    plan = affinity.plan(top, [{0, 1}, {3, 4}])
    assert [r.memory for r in plan.ranks] == [(0,), (0, 1)]
    assert len(plan.warnings) == 1 and "local rank(s) 1: cores in several of the NUMA domains 0-1" in plan.warnings[0]


def test_cores_that_are_offline(tmp_path):
    top = topology.read_topology(machine(tmp_path, TWO_SOCKETS, online="0-2,4-9,12", smt=8) + "/sys")
    assert [(core.cpus, core.domain) for core in top.cores] == [
        ((0, 8), 0), ((1, 9), 0), ((2,), 0), ((4, 12), 1), ((5,), 1), ((6,), 1), ((7,), 1)]
    plan = affinity.plan(top, [{0, 1, 2, 4, 5, 6, 7, 8, 9, 12}] * 2)      # masks never hold an offline CPU
    assert [(r.domains, r.cores, r.memory) for r in plan.ranks] == [((0,), 3, (0,)), ((1,), 3, (1,))]


def test_a_domain_whose_cores_are_all_offline(tmp_path):
    top = topology.read_topology(machine(tmp_path, TWO_SOCKETS, online="0-3", smt=8) + "/sys")
    assert top.cpu_domains() == (0,) and top.with_memory() == (0, 1)
    assert [r.memory for r in affinity.plan(top, [range(4)] * 2).ranks] == [(0,), (0,)]


def test_cores_without_memory_use_the_nearest_and_say_so(tmp_path):
    plan = affinity.plan(topology.read_topology(machine(tmp_path, NO_MEMORY) + "/sys"), [range(8)] * 2)
    assert [(r.domains, r.memory) for r in plan.ranks] == [((0,), (1,)), ((1,), (1,))]
    assert plan.warnings == ("NUMA domain 0 has no memory: local rank(s) 0 use that of domain 1",)


def test_memory_only_domains_are_left_to_whoever_asks_for_them(tmp_path):
    plan = affinity.plan(topology.read_topology(machine(tmp_path, HBM) + "/sys"), [range(8)] * 2)
    assert [r.memory for r in plan.ranks] == [(0,), (1,)] and not plan.warnings


@pytest.mark.parametrize("bound, shares", [
    ([(), ()], [100, 100]),                 # of MemAvailable, 200 GiB
    ([(0,), (1,)], [90, 40]),               # each its domain's
    ([(0,), (0,), (1,), (1,)], [45, 45, 20, 20]),
    ([(0, 1)], [130]),
    ([(0, 1), (1,)], [100, 20])])
def test_a_rank_s_share_of_the_memory(tmp_path, bound, shares):
    root = machine(tmp_path, TWO_SOCKETS, smt=8)
    got = [memory.share_nbytes(bound, rank, root) for rank in range(len(bound))]
    assert [round(nbytes / GIB) for nbytes in got] == shares
    assert memory.domain_nbytes(1, root) == 40 * GIB + (1 << 20), "pages that the kernel drops count"


TWO = Topology((), (Domain(0, GIB, (0,)), Domain(1, GIB, (1,))))


class Calls:
    """Stands for the system calls of machine/numa.py."""

    def __init__(self, monkeypatch, mode=0, refuses=None, lies=None):
        self.bound, self.mode, self.refuses, self.lies = None, mode, refuses, lies
        for name in ("policy", "bind", "touched_domains"):
            monkeypatch.setattr(numa, name, getattr(self, name))

    def policy(self):
        return self.mode, (1,) if self.mode else ()

    def bind(self, domains):
        if self.refuses:
            raise OSError(self.refuses, "set_mempolicy: Operation not permitted")
        self.bound = tuple(domains)

    def touched_domains(self):
        return self.lies or self.bound


@pytest.mark.parametrize("wanted, allowed, how, bound, words", [
    ((1,), "0-1", {}, (1,), []),
    ((0, 1), "1", {}, (1,), []),
    ((0,), "1", {}, (), ["cores of NUMA domain 0", "memory of domain 1"]),
    ((1,), "0-1", {"refuses": 1}, (), ["not bound", "not permitted", "SYS_NICE"]),
    ((1,), "0-1", {"lies": (0, 1)}, (), ["bound to NUMA domain 1 lies in 0-1"]),
    ((0,), "0-1", {"mode": 2}, (1,), []),           # numactl --membind=1 before the start
    ((0,), "0-1", {"mode": 3}, (), []),             # numactl --interleave
    ((), "0-1", {}, (), [])])
def test_binding_and_what_stands_in_its_way(tmp_path, monkeypatch, wanted, allowed, how, bound, words):
    write(tmp_path / "proc/self/status", f"Name: x\nMems_allowed_list:\t{allowed}")
    calls = Calls(monkeypatch, **how)
    got, lines = affinity.bind_memory(wanted, TWO, str(tmp_path))
    assert got == bound and len(lines) == bool(words) and all(word in lines[0] for word in words)
    assert calls.bound == (got if got and not how else calls.bound)
    assert not how.get("mode") or calls.bound is None, "what was set before stays"


def test_one_domain_needs_no_binding(tmp_path, monkeypatch):
    calls = Calls(monkeypatch)
    assert affinity.bind_memory((0,), Topology((), TWO.domains[:1]), str(tmp_path)) == ((), ()) and calls.bound is None


def test_what_a_process_may_use(tmp_path):
    assert affinity.allowed_memory(str(tmp_path)) is None
    write(tmp_path / "proc/self/status", "Mems_allowed:\t3\nMems_allowed_list:\t0-1,3")
    assert affinity.allowed_memory(str(tmp_path)) == {0, 1, 3}


@given(st.sets(st.integers(0, numa.DOMAINS - 1), min_size=1))
def test_masks_are_those_that_the_kernel_reads(domains):
    seen = {}

    def call(name, mode, mask, bits):
        words = ctypes.cast(mask, ctypes.POINTER(ctypes.c_ulong))
        seen.update(mode=mode.value, bits=bits.value, domains={
            d for d in range(numa.DOMAINS) if words[d // numa.WORD] >> d % numa.WORD & 1})
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numa, "_call", call)
        numa.bind(domains)
    assert seen == {"mode": 2, "bits": numa.DOMAINS + 1, "domains": domains}


def test_binding_for_real():
    """In a process of its own: bound to its first domain, a thread's pages too; an absent domain is refused."""
    script = """
import threading
from mpillm.machine import numa, topology
first = topology.read_topology().with_memory()[0]
try:
    before = numa.policy()
    numa.bind([first])
except OSError as error:
    assert error.errno in (1, 38), error
    raise SystemExit(f"77 {error}")
assert before == (0, ()) and numa.policy() == (numa.BIND, (first,)), before
assert numa.touched_domains() == (first,)
seen = []
thread = threading.Thread(target=lambda: seen.append((numa.policy(), numa.touched_domains(3))))
thread.start(), thread.join()
assert seen == [((numa.BIND, (first,)), (first,))], seen
try:
    numa.bind([900])
    raise AssertionError("bound to a domain that is not there")
except OSError as error:
    assert error.errno == 22, error
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60,
                          env={"PYTHONPATH": str(Path(main.__file__).parents[1])})
    if done.stderr.startswith("77 "):
        pytest.skip(f"memory cannot be bound here: {done.stderr}")
    assert done.returncode == 0, done.stderr


def test_an_unknown_processor_has_no_calls(monkeypatch):
    monkeypatch.setattr(numa.platform, "machine", lambda: "vax")
    with pytest.raises(OSError, match="vax") as caught:
        numa.policy()
    assert caught.value.errno == 38
