"""Cores, hyperthreads, NUMA domains and CPU quotas of this node, as Linux describes them.

Sources: Documentation/admin-guide/cputopology.rst, cgroup-v2.rst and cgroup-v1/cpu (sched-bwc.rst) of Linux.
Every function takes the root of the tree it reads, so that recorded trees can be tested.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Core:
    """A physical core: the CPUs (hyperthreads) it shows, its socket and its NUMA domain."""

    cpus: tuple[int, ...]
    package: int
    domain: int


@dataclass(frozen=True)
class Domain:
    """A NUMA domain: its bytes of memory (0: it has none), and the domains whose memory is nearest to its cores."""

    number: int
    nbytes: int
    nearest: tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """The online cores of a node, ordered by NUMA domain and first CPU, and its domains, those without cores too."""

    cores: tuple[Core, ...]
    domains: tuple[Domain, ...] = ()

    def within(self, mask: Iterable[int]) -> tuple[Core, ...]:
        """The cores of which ``mask`` has a CPU, each with those CPUs only."""
        allowed = frozenset(mask)
        cut = (replace(core, cpus=tuple(c for c in core.cpus if c in allowed)) for core in self.cores)
        return tuple(core for core in cut if core.cpus)

    def cpu_domains(self) -> tuple[int, ...]:
        """The domains that have cores."""
        return tuple(sorted({core.domain for core in self.cores}))

    def with_memory(self) -> tuple[int, ...]:
        """The domains that have memory."""
        return tuple(domain.number for domain in self.domains if domain.nbytes)

    def memory_of(self, domains: Iterable[int]) -> tuple[int, ...]:
        """The domains whose memory is nearest to the cores of ``domains``: themselves where they have some."""
        wanted = set(domains)
        return tuple(sorted({near for domain in self.domains if domain.number in wanted for near in domain.nearest}))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """``"0-3,8"`` as (0, 1, 2, 3, 8); empty text as (). ValueError for anything else."""
    cpus: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.strip().split(","))):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """(0, 1, 2, 3, 8) as ``"0-3,8"``."""
    ordered, parts, begin = sorted(set(cpus)), [], 0
    for i, cpu in enumerate(ordered):
        if i + 1 == len(ordered) or ordered[i + 1] != cpu + 1:
            parts.append(f"{ordered[begin]}-{cpu}" if i > begin else f"{cpu}")
            begin = i + 1
    return ",".join(parts)


def read_text(path: str) -> str | None:
    """A small file of /sys or /proc, stripped; None when it is not there or not readable."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def _read_int(path: str, default: int) -> int:
    text = read_text(path)
    try:
        return int(text) if text else default
    except ValueError:
        return default


def _read_cpus(path: str) -> tuple[int, ...]:
    try:
        return parse_cpu_list(read_text(path) or "")
    except ValueError:
        return ()


def _domain_folders(root: str) -> dict[int, str]:
    folder = os.path.join(root, "devices/system/node")
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    return {int(name[4:]): os.path.join(folder, name) for name in sorted(names)
            if name.startswith("node") and name[4:].isdigit()}


def domain_figure(root: str, number: int, name: str) -> int:
    """Bytes of a line of a domain's meminfo, such as MemFree; 0 where there is none."""
    path = os.path.join(root, f"devices/system/node/node{number}/meminfo")
    for line in (read_text(path) or "").splitlines():
        words = line.split()             # Node 0 MemFree:   16174472 kB
        if len(words) >= 4 and words[2] == name + ":" and words[3].isdigit():
            return int(words[3]) * 1024
    return 0


def read_domains(root: str = "/sys") -> tuple[Domain, ...]:
    """The NUMA domains by number, memory-only ones (CXL, HBM) and CPU-only ones included; () where /sys has none."""
    numbers = sorted(folders := _domain_folders(root))
    sizes = {number: domain_figure(root, number, "MemTotal") for number in numbers}
    domains = []
    for number in numbers:
        words = (read_text(os.path.join(folders[number], "distance")) or "").split()
        known = len(words) == len(numbers) and all(word.isdigit() for word in words)
        distances = dict(zip(numbers, map(int, words), strict=True)) if known else {}
        others = {other: distances.get(other, 0) for other in numbers if sizes[other]}
        least = min(others.values(), default=0)
        nearest = (number,) if sizes[number] else tuple(other for other in others if others[other] == least)
        domains.append(Domain(number, sizes[number], nearest))
    return tuple(domains)


def read_topology(root: str = "/sys", fallback: Iterable[int] = ()) -> Topology:
    """The node's online cores; where /sys says nothing, each CPU of ``fallback`` is a core of domain 0."""
    base = os.path.join(root, "devices/system/cpu")
    online = _read_cpus(os.path.join(base, "online")) or tuple(sorted(fallback))
    seen: set[int] = set()
    domain_of = {cpu: number for number, folder in _domain_folders(root).items()
                 for cpu in _read_cpus(os.path.join(folder, "cpulist"))}
    present, cores = frozenset(online), []
    for cpu in online:
        if cpu in seen:
            continue
        folder = os.path.join(base, f"cpu{cpu}", "topology")
        siblings = (_read_cpus(os.path.join(folder, "core_cpus_list"))
                    or _read_cpus(os.path.join(folder, "thread_siblings_list")))
        cpus = tuple(sorted((frozenset(siblings) & present) | {cpu}))
        seen.update(cpus)
        package = max(0, _read_int(os.path.join(folder, "physical_package_id"), 0))
        cores.append(Core(cpus, package, domain_of.get(cpu, 0)))
    return Topology(tuple(sorted(cores, key=lambda core: (core.domain, core.cpus))), read_domains(root))


def cgroup_folders(root: str, controller: str) -> Iterator[tuple[int, str]]:
    """(version, folder) of this process's control groups with ``controller``, from its own to the top.

    Inside a container the path of /proc/self/cgroup may not exist below the mount: the mount counts.
    """
    mount = os.path.join(root, "sys/fs/cgroup")
    for line in (read_text(os.path.join(root, "proc/self/cgroup")) or "").splitlines():
        number, names, path = (line.split(":", 2) + ["", ""])[:3]
        if number == "0" and not names:
            version, tops = 2, (mount, os.path.join(mount, "unified"))
        elif controller in names.split(","):
            version, tops = 1, (os.path.join(mount, names), os.path.join(mount, controller))
        else:
            continue
        top = next((t for t in tops if os.path.isdir(t)), None)
        if top is None or (version == 2 and not os.path.exists(os.path.join(top, "cgroup.controllers"))):
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = os.path.join(top, *parts[:depth])
            if os.path.isdir(folder):
                yield version, folder


def cpu_quota(root: str = "/") -> float | None:
    """CPUs' worth of time that the control groups grant this process (1.5 = 150 %); None = no limit."""
    limits = []
    for version, folder in cgroup_folders(root, "cpu"):
        if version == 2:
            words = (read_text(os.path.join(folder, "cpu.max")) or "max").split()
            quota, period = words[0], words[1] if len(words) > 1 else "100000"
        else:
            quota = read_text(os.path.join(folder, "cpu.cfs_quota_us")) or "-1"
            period = read_text(os.path.join(folder, "cpu.cfs_period_us")) or "100000"
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            limits.append(int(quota) / int(period))
    return min(limits, default=None)
