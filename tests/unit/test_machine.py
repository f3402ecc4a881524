"""Cores, quotas, memory, affinity, launch and log on small recorded trees: two sockets, SMT, offline CPUs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm import log, main
from mpillm.errors import InputError, LaunchError, UsageError
from mpillm.machine import affinity, launch, memory, segment, topology
from mpillm.machine.topology import Core, Topology, format_cpu_list, parse_cpu_list


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def sys_tree(root: Path, cores: list[tuple[int, ...]], nodes: list[str], packages: list[int],
             online: str, siblings: str = "core_cpus_list") -> Path:
    """A /sys of these cores (their CPUs), NUMA nodes' CPU lists and cores' sockets."""
    base = root / "devices/system"
    write(base / "cpu/online", online)
    for cpus, package in zip(cores, packages, strict=True):
        for cpu in cpus:
            write(base / f"cpu/cpu{cpu}/topology" / siblings, format_cpu_list(cpus))
            write(base / f"cpu/cpu{cpu}/topology/physical_package_id", str(package))
    for node, cpus in enumerate(nodes):
        write(base / f"node/node{node}/cpulist", cpus)
    return root


def two_sockets(root: Path, each: int = 4, smt: bool = True) -> Path:
    """Two sockets of ``each`` cores; the hyperthreads are numbered after all cores, as Intel's servers do."""
    total = 2 * each
    cores = [(c, c + total) if smt else (c,) for c in range(total)]
    halves = cores[:each], cores[each:]
    nodes = [format_cpu_list(cpu for core in half for cpu in core) for half in halves]
    return sys_tree(root, cores, nodes, [c // each for c in range(total)], f"0-{total * (1 + smt) - 1}")


def flat(cores: int, domains: int = 1) -> Topology:
    return Topology(tuple(Core((c,), c * domains // cores, c * domains // cores) for c in range(cores)))


@given(st.sets(st.integers(0, 600)))
def test_cpu_lists_are_read_as_written(cpus):
    assert parse_cpu_list(format_cpu_list(cpus)) == tuple(sorted(cpus))


def test_cpu_lists_of_the_kernel():
    assert parse_cpu_list("0-3,8,10-11\n") == (0, 1, 2, 3, 8, 10, 11) and parse_cpu_list("\n") == ()
    assert format_cpu_list([0, 1, 2, 3, 8]) == "0-3,8" and format_cpu_list([]) == ""
    with pytest.raises(ValueError):
        parse_cpu_list("a-b")


def test_two_sockets_with_hyperthreads(tmp_path):
    top = topology.read_topology(str(two_sockets(tmp_path)))
    assert [core.cpus for core in top.cores] == [(c, c + 8) for c in range(8)]
    assert [core.domain for core in top.cores] == [core.package for core in top.cores] == [0] * 4 + [1] * 4
    assert [core.cpus for core in top.within({0, 8, 5})] == [(0, 8), (5,)]


def test_offline_cpus_and_old_names(tmp_path):
    root = sys_tree(tmp_path, [(0, 1), (2, 3), (4, 5)], ["0-5"], [0, 0, 0], "0,2-3,5", "thread_siblings_list")
    assert [core.cpus for core in topology.read_topology(str(root)).cores] == [(0,), (2, 3), (5,)]


def test_domains_that_interleave_and_a_memory_only_node(tmp_path):
    root = sys_tree(tmp_path, [(c,) for c in range(4)], ["0,2", "1,3", ""], [0, 1, 0, 1], "0-3")
    assert [(core.cpus, core.domain) for core in topology.read_topology(str(root)).cores] == [
        ((0,), 0), ((2,), 0), ((1,), 1), ((3,), 1)]


def test_no_sys_at_all(tmp_path):
    assert topology.read_topology(str(tmp_path), {3, 1}).cores == (Core((1,), 0, 0), Core((3,), 0, 0))


def test_this_machine():
    top = topology.read_topology()
    assert affinity.own_mask() <= {cpu for core in top.cores for cpu in core.cpus}
    assert affinity.own_mask() <= affinity.launcher_mask()
    assert 1 << 20 < memory.available_nbytes() < 1 << 50


@pytest.mark.parametrize("files, quota", [
    ({"cgroup.controllers": "cpu", "cpu.max": "max 100000"}, None),
    ({"cgroup.controllers": "cpu", "job/cpu.max": "150000 100000", "job/step/cpu.max": "max 100000"}, 1.5),
    ({"cgroup.controllers": "cpu", "job/cpu.max": "400000 100000", "job/step/cpu.max": "50000"}, 0.5),
    ({"cgroup.controllers": "cpu", "cpu.max": "nonsense here"}, None),
    ({}, None),
])
def test_cpu_quota_of_cgroup_2(tmp_path, files, quota):
    write(tmp_path / "proc/self/cgroup", "0::/job/step")
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, text)
    assert topology.cpu_quota(str(tmp_path)) == quota


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize("inside", ["docker/abc/", ""])     # in a container the path is not below the mount
def test_cpu_quota_of_cgroup_1(tmp_path, mount, inside):
    write(tmp_path / "proc/self/cgroup", "5:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\nodd line")
    write(tmp_path / "sys/fs/cgroup" / mount / inside / "cpu.cfs_quota_us", "250000")
    write(tmp_path / "sys/fs/cgroup" / mount / inside / "cpu.cfs_period_us", "100000")
    assert topology.cpu_quota(str(tmp_path)) == 2.5
    write(tmp_path / "sys/fs/cgroup" / mount / inside / "cpu.cfs_quota_us", "-1")
    assert topology.cpu_quota(str(tmp_path)) is None


def test_memory_of_the_node_and_of_the_group(tmp_path):
    root = str(tmp_path)
    with pytest.raises(OSError, match="meminfo"):
        memory.available_nbytes(root)
    write(tmp_path / "proc/meminfo", "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable:   4000 kB\nodd")
    assert memory.available_nbytes(root) == 4000 * 1024
    write(tmp_path / "proc/self/cgroup", "0::/job")
    write(tmp_path / "sys/fs/cgroup/cgroup.controllers", "memory")
    write(tmp_path / "sys/fs/cgroup/job/memory.max", "max")
    assert memory.available_nbytes(root) == 4000 * 1024 and memory.cgroup_room(root) is None
    write(tmp_path / "sys/fs/cgroup/job/memory.max", "3000000")
    write(tmp_path / "sys/fs/cgroup/job/memory.current", "2000000")
    write(tmp_path / "sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 500000\n")
    assert memory.available_nbytes(root) == 1_500_000
    write(tmp_path / "sys/fs/cgroup/job/memory.max", "1000")
    assert memory.available_nbytes(root) == 0


def test_memory_of_cgroup_1(tmp_path):
    write(tmp_path / "proc/self/cgroup", "4:memory:/gone")
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    assert memory.cgroup_room(str(tmp_path)) is None
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "5000")
    write(tmp_path / "sys/fs/cgroup/memory/memory.usage_in_bytes", "4000")
    write(tmp_path / "sys/fs/cgroup/memory/memory.stat", "total_inactive_file 1000")
    assert memory.cgroup_room(str(tmp_path)) == 2000


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.data())
@settings(max_examples=200)
def test_division_is_disjoint_equal_and_near_even(domains, data):
    cores = sum(domains)
    owner = [domain for domain, count in enumerate(domains) for _ in range(count)]
    top = Topology(tuple(Core((c,), domain, domain) for c, domain in enumerate(owner)))
    ranks = data.draw(st.integers(1, cores))
    parts = affinity.divide(top.cores, ranks)
    used = [core for part in parts for core in part]
    assert len(parts) == ranks and len(set(used)) == len(used)
    assert len({len(part) for part in parts}) == 1 and len(parts[0]) >= 1
    assert len(parts[0]) >= affinity.WHOLE_DOMAIN_WORTH * (cores // ranks)
    for part in parts:
        indices = [top.cores.index(core) for core in part]
        assert indices == list(range(indices[0], indices[0] + len(part))), "neighbours"


@pytest.mark.parametrize("cores, domains, ranks, size, straddling", [
    (16, 2, 2, 8, 0), (16, 2, 4, 4, 0), (16, 2, 3, 4, 0), (16, 4, 2, 8, 2), (24, 3, 4, 6, 2),
    (12, 4, 12, 1, 0),
    (16, 4, 3, 4, 0), (10, 1, 3, 3, 0)])
def test_division_keeps_domains_whole(cores, domains, ranks, size, straddling):
    parts = affinity.divide(flat(cores, domains).cores, ranks)
    assert [len(part) for part in parts] == [size] * ranks
    assert sum(len({core.domain for core in part}) > 1 for part in parts) == straddling


def test_unbound_ranks_are_given_their_own_cores(tmp_path):
    top = topology.read_topology(str(two_sockets(tmp_path)))
    plan = affinity.plan(top, [range(16)] * 2)
    assert [(r.cores, r.domains, r.threads, r.pin) for r in plan.ranks] == [
        (4, (0,), 4, True), (4, (1,), 4, True)]
    assert plan.ranks[0].cpus == (0, 1, 2, 3, 8, 9, 10, 11) and not plan.warnings
    assert affinity.table_row(7, "n1", plan.ranks[1], (1,), 5) == {
        "rank": 7, "host": "n1", "cores": "4-7,12-15", "NUMA domain": "1", "threads": 4, "memory domain": "1",
        "memory bytes": 5}


def test_one_rank_keeps_everything_and_counts_physical_cores(tmp_path):
    (place,) = affinity.plan(topology.read_topology(str(two_sockets(tmp_path))), [range(16)]).ranks
    assert (place.cores, place.threads, place.pin, len(place.cpus)) == (8, 8, False, 16)


def test_bound_ranks_are_left_alone():
    plan = affinity.plan(flat(8), [{0, 1}, {2, 3}, {4, 5, 6}])
    assert [r.cpus for r in plan.ranks] == [(0, 1), (2, 3), (4, 5, 6)]
    assert [r.threads for r in plan.ranks] == [2, 2, 3] and not any(r.pin for r in plan.ranks)
    assert not plan.warnings


def test_ranks_bound_to_sockets_divide_them():
    plan = affinity.plan(flat(8, 2), [{0, 1, 2, 3}, {4, 5, 6, 7}] * 2)
    assert [r.cpus for r in plan.ranks] == [(0, 1), (4, 5), (2, 3), (6, 7)] and all(r.pin for r in plan.ranks)


@pytest.mark.parametrize("masks", [[{0, 1}] * 32, [{0}] * 2, [{0}, {0}, {1}]])
def test_more_ranks_than_cores(masks):
    plan = affinity.plan(flat(2), masks)
    assert all(r.threads == 1 and not r.pin for r in plan.ranks)
    assert len(plan.warnings) == 1 and "share" in plan.warnings[0]


def test_masks_that_overlap():
    plan = affinity.plan(flat(8), [range(0, 6), range(4, 8)])
    assert [r.threads for r in plan.ranks] == [3, 2]
    assert len(plan.warnings) == 1 and "overlap on CPUs 4-5" in plan.warnings[0]


@pytest.mark.parametrize("asked, threads, warned", [(1, 1, 0), (4, 4, 0), (8, 8, 0), (9, 8, 1)])
def test_threads_that_are_asked_for(tmp_path, asked, threads, warned):
    plan = affinity.plan(topology.read_topology(str(two_sockets(tmp_path))), [range(16)] * 2, asked)
    assert [r.threads for r in plan.ranks] == [threads] * 2     # up to the hyperthreads when asked for
    assert len(plan.warnings) == warned


def test_threads_asked_on_a_single_cpu():
    plan = affinity.plan(flat(4), [{2}], 2)
    assert plan.ranks[0].threads == 1 and len(plan.warnings) == 1 and "--threads-per-rank 2" in plan.warnings[0]


@pytest.mark.parametrize("ranks, quota, threads, warned", [
    (1, 1.5, 1, 1), (2, 4.0, 2, 1), (2, 8.0, 4, 0), (8, 2.0, 1, 1)])
def test_quota(ranks, quota, threads, warned):
    plan = affinity.plan(flat(8), [range(8)] * ranks, quota=quota)
    assert [r.threads for r in plan.ranks] == [threads] * ranks
    assert len(plan.warnings) == warned and all("quota" in line for line in plan.warnings)


def test_cores_that_a_launcher_left_unused():
    plan = affinity.plan(flat(16), [{0}, {1}], allowed=range(16))
    assert len(plan.warnings) == 1 and "2 of 16 cores" in plan.warnings[0] and "PE=8" in plan.warnings[0]


def test_a_cpu_that_sys_does_not_know():
    assert affinity.plan(flat(2), [{0, 1, 5}]).ranks[0].cpus == (0, 1, 5)


@given(st.lists(st.sets(st.integers(0, 11), min_size=1), min_size=1, max_size=12),
       st.one_of(st.none(), st.integers(1, 20)), st.one_of(st.none(), st.floats(0.1, 20)))
def test_any_masks_give_a_plan(masks, threads, quota):
    plan = affinity.plan(flat(12, 3), masks, threads, quota)
    for mask, place in zip(masks, plan.ranks, strict=True):
        assert set(place.cpus) <= mask and 1 <= place.threads <= max(1, len(place.cpus))
        assert threads is None or place.threads <= threads


def test_pinning_holds_for_new_threads():
    script = ("import os, threading\nfrom mpillm.machine import affinity\n"
              "cpu = min(affinity.own_mask())\naffinity.pin([cpu])\nseen = []\n"
              "t = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))\n"
              "t.start(); t.join()\n"
              "assert seen == [{cpu}] and affinity.own_mask() == {cpu}, seen\n")
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60,
                   env={**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[1])})


@pytest.mark.parametrize("environment, expected", [
    ({}, None), ({"PMI_SIZE": "4"}, 4), ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
    ({"SLURM_STEP_NUM_TASKS": "5"}, 5),
    ({"SLURM_NTASKS": "5"}, None),                                   # a batch script, no step: one process
    ({"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}, 1),             # hydra's daemons below srun
    ({"PMI_SIZE": "many"}, None)])
def test_what_the_launcher_says(environment, expected):
    found = launch.launched(environment)
    assert (found and found[1]) == expected
    if expected is None or expected == 1:
        launch.check_size(environment, 1, "MPICH")
    else:
        launch.check_size(environment, expected, "MPICH")
        with pytest.raises(LaunchError, match=rf"started {expected} ranks.*sees 1") as caught:
            launch.check_size(environment, 1, "Some MPI v1\nbuilt with gcc\0")
        assert "\n" not in str(caught.value) and "(Some MPI v1)" in str(caught.value)


def test_one_rank_a_node_speaks_for_all():
    for rank, quiet in (("0", False), ("1", True)):
        error = launch.missing({"MPI_LOCALRANKID": rank, "PMI_RANK": "7"}, ImportError("no libmpi.so\nmore"))
        assert error.agreed and error.quiet == quiet and "no libmpi.so)" in str(error)


@pytest.mark.parametrize("given_, cpus, yields", [
    ({"MPI_LOCALNRANKS": "8"}, 2, True), ({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "64"}, 2, False),
    ({}, 1, False),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 2, True)])
def test_waiting_ranks_yield_when_crowded(given_, cpus, yields):
    environment = {**given_, "OMPI_MCA_mpi_yield_when_idle": "0"}
    launch.prepare_environment(environment, cpus)
    assert ("MPIR_CVAR_ENABLE_HEAVY_YIELD" in environment) == yields
    assert environment["OMPI_MCA_mpi_yield_when_idle"] == "0", "what the user set stays"


@pytest.mark.parametrize("fake, nodes", [
    (None, [3] * 6), ("", [3] * 6), ("2", [0, 0, 0, 1, 1, 1]), ("0,1,0", [0, 1, 0, 0, 1, 0])])
def test_nodes_that_exchanges_believe_in(fake, nodes):
    environment = {} if fake is None else {launch.FAKE_NODES: fake}
    assert [launch.exchange_node(environment, rank, 6, 3) for rank in range(6)] == nodes
    with pytest.raises(LaunchError, match="MPILLM_FAKE_NODES=two"):
        launch.exchange_node({launch.FAKE_NODES: "two"}, 0, 6, 3)


@given(st.integers(1, 600), st.integers(1, 64))
def test_segments_stay_small_and_aligned(ranks, lanes):
    slot = segment.slot_nbytes(ranks, lanes)
    assert slot % segment.LINE == 0 and 4096 <= slot <= segment.SLOT_LIMIT
    bound = max(segment.TOTAL_LIMIT, 2 * lanes * (ranks + 1) * 4096) + ranks * lanes * segment.LINE
    assert segment.segment_nbytes(ranks, lanes, slot) <= bound


@given(st.integers(0, 10_000), st.integers(1, 50))
def test_shares_cover(n, parts):
    counts, offsets = segment.shares(n, parts)
    assert sum(counts) == n and max(counts) - min(counts) <= 1
    assert all(offsets[i] + counts[i] == (offsets + [n])[i + 1] for i in range(parts))


def test_a_full_shared_memory_is_an_error_not_a_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(segment, "segment_nbytes", lambda ranks, lanes, slot: 1 << 60)
    with pytest.raises(OSError):
        segment.Segment.create(2, 1, False, str(tmp_path))
    assert not list(tmp_path.iterdir()), "its name must not stay"


def test_a_lone_segment(tmp_path):
    made, path = segment.Segment.create(1, 1, False, str(tmp_path))
    os.unlink(path)
    data = np.arange(10, dtype=np.uint8)
    assert np.array_equal(made.gather(data), data[None]) and made.waited == 0


@pytest.fixture
def quiet_logger():
    yield
    logging.getLogger(log.NAME).handlers.clear()
    logging.getLogger(log.NAME).propagate = True


@pytest.mark.parametrize("rank, level, expected", [
    (0, "info", ["hello", "warning: careful"]), (0, "error", []),
    (3, "info", ["[rank 3 n1] warning: careful"]), (3, "error", []),
    (3, "debug", ["[rank 3 n1] debug: detail", "[rank 3 n1] hello", "[rank 3 n1] warning: careful"])])
def test_log_knows_its_rank(rank, level, expected, capsys, quiet_logger):
    log.setup(5, "elsewhere", "debug")
    logger = log.setup(rank, "n1", level)
    logger.debug("detail")
    logging.getLogger("mpillm.engine").info("hel%s", "lo")
    logger.warning("careful")
    assert capsys.readouterr().err.splitlines() == expected


def test_log_level_unknown():
    with pytest.raises(UsageError, match="--log-level loud: use one of debug"):
        log.setup(0, "n1", "loud")


@pytest.fixture
def hooks():
    saved = sys.excepthook, main.threading.excepthook
    yield
    sys.excepthook, main.threading.excepthook = saved


@pytest.mark.parametrize("error, code, text", [
    (InputError("line 3 is\nnot text"), 4, "mpillm: error: line 3 is not text\n"),
    (KeyboardInterrupt(), 130, "mpillm: interrupted\n"),
    (SystemExit(), 0, ""), (SystemExit(2), 2, ""), (SystemExit("too bad"), 1, "mpillm: too bad\n")])
def test_the_guard_on_one_rank(error, code, text, capsys, hooks):
    def run(argv):
        assert argv == ["--x"]
        raise error
    assert main.main(["--x"], run) == code
    assert capsys.readouterr().err == text


def test_the_guard_names_faults_with_a_short_trace(capsys, hooks):
    def deep(n):
        return 1 // n if n == 0 else deep(n - 1)
    assert main.main([], lambda argv: deep(50)) == 70
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith("Traceback")
    assert err[-1].startswith("mpillm: fault of the program: ZeroDivisionError: ")
    assert len(err) < 25


def test_the_guard_passes_codes_on(hooks):
    assert main.main(["x"], lambda argv: 5 if argv == ["x"] else 0) == 5
