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
class Topology:
    """The online cores of a node, ordered by NUMA domain and first CPU."""

    cores: tuple[Core, ...]

    def within(self, mask: Iterable[int]) -> tuple[Core, ...]:
        """The cores of which ``mask`` has a CPU, each with those CPUs only."""
        allowed = frozenset(mask)
        cut = (replace(core, cpus=tuple(c for c in core.cpus if c in allowed)) for core in self.cores)
        return tuple(core for core in cut if core.cpus)


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


def _domains(root: str) -> dict[int, int]:
    folder = os.path.join(root, "devices/system/node")
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    return {cpu: int(name[4:]) for name in names if name.startswith("node") and name[4:].isdigit()
            for cpu in _read_cpus(os.path.join(folder, name, "cpulist"))}


def read_topology(root: str = "/sys", fallback: Iterable[int] = ()) -> Topology:
    """The node's online cores; where /sys says nothing, each CPU of ``fallback`` is a core of domain 0."""
    base = os.path.join(root, "devices/system/cpu")
    online = _read_cpus(os.path.join(base, "online")) or tuple(sorted(fallback))
    seen: set[int] = set()
    domain_of, present, cores = _domains(root), frozenset(online), []
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
    return Topology(tuple(sorted(cores, key=lambda core: (core.domain, core.cpus))))


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
