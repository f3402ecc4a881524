"""Which cores and which memory each rank of a node works on, with how many threads: from masks, without MPI."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mpillm.machine import numa
from mpillm.machine.topology import Core, Topology, format_cpu_list, parse_cpu_list, read_text

WHOLE_DOMAIN_WORTH = 0.75       # a rank may lose a quarter of its even share to stay inside NUMA domains


@dataclass(frozen=True)
class RankCores:
    """A rank's place: its CPUs, how many physical cores they are, their NUMA domains, its threads.

    ``limit``: the most threads that make sense there. ``pin``: the CPUs are fewer than the launcher gave, so
    the process has to be pinned to them. ``memory``: the domains with the memory that is nearest.
    """

    cpus: tuple[int, ...]
    cores: int
    domains: tuple[int, ...]
    threads: int
    limit: int
    pin: bool
    memory: tuple[int, ...] = ()


@dataclass(frozen=True)
class NodePlan:
    """The places of a node's ranks, in rank order, and lines to warn with."""

    ranks: tuple[RankCores, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """Where one rank works: threads, CPUs, NUMA domains; all ranks' ``table`` and ``warnings``.

    ``memory``: the NUMA domains that its memory is bound to; () where it is not bound.
    """

    threads: int
    cpus: tuple[int, ...]
    domains: tuple[int, ...]
    table: list[dict[str, object]]
    warnings: list[str]
    memory: tuple[int, ...] = ()


def _by_domain(cores: Iterable[Core]) -> list[list[Core]]:
    groups: dict[int, list[Core]] = {}
    for core in cores:
        groups.setdefault(core.domain, []).append(core)
    return [groups[domain] for domain in sorted(groups)]


def _divide_evenly(items: Sequence, parts: int) -> list[Sequence]:
    each = len(items) // parts
    return [items[i * each:(i + 1) * each] for i in range(parts)]


def divide(cores: Sequence[Core], ranks: int) -> list[tuple[Core, ...]]:
    """Disjoint, equally many, contiguous cores for each of ``ranks`` <= len(cores) ranks.

    Ranks step together, so the one with the fewest cores sets the pace: all get the same number, and cores
    that do not divide stay free. A rank keeps inside NUMA domains (or gets whole ones) where that costs at
    most a quarter of its even share.
    """
    assert 0 < ranks <= len(cores), f"{ranks} ranks on {len(cores)} cores"
    even, groups = len(cores) // ranks, _by_domain(cores)
    worth = WHOLE_DOMAIN_WORTH * even
    if ranks <= len(groups):
        runs = [[core for group in part for core in group] for part in _divide_evenly(groups, ranks)]
        size = min(len(run) for run in runs)
        if size >= worth:
            return [tuple(run[:size]) for run in runs]
    size = even
    while size >= max(1.0, worth):
        if sum(len(group) // size for group in groups) >= ranks:
            slots = [tuple(group[i * size:(i + 1) * size])
                     for group in groups for i in range(len(group) // size)]
            return slots[:ranks]
        size -= 1
    return [tuple(part) for part in _divide_evenly(sorted(cores, key=lambda c: (c.domain, c.cpus)), ranks)]


def _place(cores: Iterable[Core], pin: bool) -> RankCores:
    cores = tuple(cores)
    cpus = tuple(sorted(cpu for core in cores for cpu in core.cpus))
    domains = tuple(sorted({core.domain for core in cores}))
    return RankCores(cpus, len(cores), domains, max(1, len(cores)), max(1, len(cpus)), pin)


def _place_group(topology: Topology, mask: frozenset[int], ranks: int) -> list[RankCores]:
    """Places of ranks that share one mask: each its own cores if there are enough, else the mask for all."""
    cores = topology.within(mask)
    if ranks == 1:
        return [_place(cores, pin=False)]
    if ranks <= len(cores):
        return [_place(part, pin=True) for part in divide(cores, ranks)]
    return [replace(_place(cores, pin=False), threads=1, limit=1)] * ranks


def _overlaps(topology: Topology, masks: Sequence[frozenset[int]], places: list[RankCores]) -> list[str]:
    """Halve (and so on) the threads of ranks that share cores under unlike masks; the lines that say so."""
    owners: dict[Core, list[int]] = {}
    for rank, place in enumerate(places):
        for core in topology.cores:
            if not set(place.cpus).isdisjoint(core.cpus):
                owners.setdefault(core, []).append(rank)
    shared = {core: ranks for core, ranks in owners.items() if len(ranks) > 1}
    unlike = {rank for ranks in shared.values() for rank in ranks if len({masks[r] for r in ranks}) > 1}
    for rank in unlike:
        most = max(len(ranks) for ranks in shared.values() if rank in ranks)
        threads = max(1, places[rank].cores // most)
        places[rank] = replace(places[rank], threads=threads, limit=threads)
    if not unlike:
        return []
    cpus = format_cpu_list(cpu for core, ranks in shared.items() if unlike & set(ranks) for cpu in core.cpus)
    return [f"local ranks {format_cpu_list(unlike)} overlap on CPUs {cpus}: "
            "give each rank its own cores in the launcher"]


def _limit(places: list[RankCores], threads: int | None, quota: float | None) -> list[str]:
    """Apply --threads and the CPU quota to ``places`` in place; the lines that say what was cut."""
    lines = []
    if threads is not None:
        low, high = min(p.limit for p in places), max(p.limit for p in places)
        if threads > low:
            range_ = f"{low}" if low == high else f"{low} to {high}"
            lines.append(f"--threads-per-rank {threads}: ranks have {range_} CPU(s) "
                         "of their own, more threads would only wait; using that many")
        places[:] = [replace(p, threads=min(threads, p.limit)) for p in places]
    if quota is not None and sum(p.threads for p in places) > quota:
        each = max(1, int(quota / len(places)))
        if any(p.threads > each for p in places):
            lines.append(f"a CPU quota of {quota:g} cores holds for {len(places)} ranks: "
                         f"at most {each} thread(s) each")
        elif quota < len(places):
            lines.append(f"a CPU quota of {quota:g} cores holds for {len(places)} ranks: "
                         "they will be throttled")
        places[:] = [replace(p, threads=min(p.threads, each)) for p in places]
    return lines


def _far_memory(topology: Topology, places: Sequence[RankCores]) -> list[str]:
    """The lines that say which ranks read memory of another domain than their cores'."""
    lines, has = [], set(topology.with_memory())
    wide = [rank for rank, place in enumerate(places) if len(place.domains) > 1]
    if wide and len(has) > 1:
        spanned = sorted({domain for rank in wide for domain in places[rank].domains})
        lines.append(f"local rank(s) {format_cpu_list(wide)}: cores in several of the NUMA domains "
                     f"{format_cpu_list(spanned)}, which read each other's memory; "
                     f"{len(topology.cpu_domains())} ranks a node, or a multiple, keep to their own")
    for domain in sorted({domain for place in places for domain in place.domains} - has if has else ()):
        ranks = [rank for rank, place in enumerate(places) if domain in place.domains]
        lines.append(f"NUMA domain {domain} has no memory: local rank(s) {format_cpu_list(ranks)} use that of domain "
                     f"{format_cpu_list(topology.memory_of([domain]))}")
    return lines


def plan(topology: Topology, masks: Sequence[Iterable[int]], threads: int | None = None,
         quota: float | None = None, allowed: Iterable[int] | None = None) -> NodePlan:
    """Places for the ranks of one node, from their CPU masks as the launcher left them.

    Ranks with the same mask (unbound, or bound to one socket) are given disjoint physical cores of it when
    there are enough; ranks with masks of their own keep them. Threads are the physical cores of a rank,
    ``threads`` (--threads) instead if given, at most its CPUs. ``quota``: CPUs' worth of time of all.
    ``allowed``: the CPUs that the launcher itself may use; more of them than all ranks have is worth a line.
    """
    sets = [frozenset(mask) for mask in masks]
    known = frozenset(cpu for core in topology.cores for cpu in core.cpus)
    extra = frozenset().union(*sets) - known
    if extra:                    # /sys and the scheduler disagree: believe the scheduler
        topology = replace(topology, cores=topology.cores + tuple(Core((cpu,), 0, 0) for cpu in sorted(extra)))
    found: dict[int, RankCores] = {}
    lines: list[str] = []
    for mask in dict.fromkeys(sets):
        members = [rank for rank, other in enumerate(sets) if other == mask]
        for rank, place in zip(members, _place_group(topology, mask, len(members)), strict=True):
            found[rank] = place
        count = len(topology.within(mask))
        if len(members) > count:
            lines.append(f"{len(members)} ranks share {count} core(s) (CPUs {format_cpu_list(mask)}): "
                         "one thread each, expect them to wait for each other")
    places = [replace(found[rank], memory=topology.memory_of(found[rank].domains)) for rank in range(len(sets))]
    lines += _overlaps(topology, sets, places)
    lines += _limit(places, threads, quota)
    lines += _far_memory(topology, places)
    used, whole = len(topology.within(frozenset().union(*sets))), len(topology.within(allowed or ()))
    if used < whole:
        lines.append(f"the launcher bound {len(sets)} rank(s) to {used} of {whole} cores: --bind-to none "
                     f"(Open MPI: or --map-by slot:PE={max(1, whole // len(sets))}) frees the rest")
    return NodePlan(tuple(places), tuple(lines))


def own_mask() -> frozenset[int]:
    """The CPUs on which this process may run."""
    return frozenset(os.sched_getaffinity(0))


def launcher_mask() -> frozenset[int]:
    """The CPUs of the process that started this one, this one's included: what a launcher had to give."""
    try:
        return own_mask() | frozenset(os.sched_getaffinity(os.getppid()))
    except OSError:
        return own_mask()


def pin(cpus: Iterable[int]) -> None:
    """Bind every thread of this process to ``cpus``; OSError when the system refuses."""
    cpus = tuple(cpus)
    os.sched_setaffinity(0, cpus)
    try:
        tasks = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return
    for task in tasks:
        try:
            os.sched_setaffinity(task, cpus)
        except ProcessLookupError:   # that thread ended meanwhile
            continue


def allowed_memory(root: str = "/") -> frozenset[int] | None:
    """The NUMA domains whose memory this process may use (cpusets); None where Linux does not say."""
    for line in (read_text(os.path.join(root, "proc/self/status")) or "").splitlines():
        if line.startswith("Mems_allowed_list:"):
            return frozenset(parse_cpu_list(line.partition(":")[2]))
    return None


def bind_memory(wanted: Sequence[int], topology: Topology, root: str = "/") -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Bind this process's new pages to the domains ``wanted``, and look whether they lie there.

    (the domains that they are bound to, lines to warn with). Nothing is done where one domain alone has memory, or
    where a policy was set before the start (numactl). Call before memory of any size is touched.
    """
    if len(topology.with_memory()) < 2 or not wanted:
        return (), ()
    allowed = allowed_memory(root)
    own = tuple(domain for domain in wanted if allowed is None or domain in allowed)
    if not own:
        return (), (f"cores of NUMA domain {format_cpu_list(wanted)}, but the job may only use memory of domain "
                    f"{format_cpu_list(allowed or ())}: all of it is remote; ask for memory where the cores are",)
    try:
        mode, domains = numa.policy()
        if mode:
            return (domains if mode == numa.BIND else ()), ()
        numa.bind(own)
        found = numa.touched_domains()
    except OSError as error:
        return (), (f"memory is not bound to NUMA domains ({error.strerror}): it lies where it is touched first; "
                    "in a container --cap-add SYS_NICE lets it be bound",)
    if not set(found) <= set(own):
        return (), (f"memory bound to NUMA domain {format_cpu_list(own)} lies in {format_cpu_list(found)}",)
    return own, ()


def table_row(rank: int, host: str, place: RankCores, memory: Sequence[int], nbytes: int) -> dict[str, object]:
    """One row of the table that a run shows at its start; ``memory``: its bound domains, with ``nbytes`` of room."""
    return {"rank": rank, "host": host, "cores": format_cpu_list(place.cpus),
            "NUMA domain": format_cpu_list(place.domains), "threads": place.threads,
            "memory domain": format_cpu_list(memory), "memory bytes": nbytes}
