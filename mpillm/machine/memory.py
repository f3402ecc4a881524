"""Memory that this node can still give, as Linux and the control groups see it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from mpillm.machine.topology import cgroup_folders, domain_figure, read_text

NAMES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
         2: ("memory.max", "memory.current", "inactive_file")}
NO_LIMIT = 1 << 60              # cgroup v1 writes "no limit" as a huge multiple of the page size


def _stat(folder: str, key: str) -> int:
    for line in (read_text(os.path.join(folder, "memory.stat")) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0


def cgroup_room(root: str = "/") -> int | None:
    """Bytes left below the tightest memory limit of the process's control groups; None = no limit.

    Cached file pages that the kernel would drop (inactive ones) count as free.
    """
    rooms = []
    for version, folder in cgroup_folders(root, "memory"):
        limit_name, used_name, cache_key = NAMES[version]
        limit = read_text(os.path.join(folder, limit_name)) or "max"
        used = read_text(os.path.join(folder, used_name)) or "0"
        if limit.isdigit() and used.isdigit() and int(limit) < NO_LIMIT:
            rooms.append(max(0, int(limit) - max(0, int(used) - _stat(folder, cache_key))))
    return min(rooms, default=None)


def available_nbytes(root: str = "/") -> int:
    """Bytes that processes of this node may still allocate together: MemAvailable and the cgroups' limits.

    OSError when /proc/meminfo has no figure.
    """
    figures = {}
    for line in (read_text(os.path.join(root, "proc/meminfo")) or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            figures[name] = int(words[0]) * 1024
    free = figures.get("MemAvailable", figures.get("MemFree"))
    if free is None:
        raise OSError("/proc/meminfo names neither MemAvailable nor MemFree")
    room = cgroup_room(root)
    return free if room is None else min(free, room)


def domain_nbytes(domain: int, root: str = "/") -> int:
    """Bytes that a NUMA domain can still give: what is free, and cached file pages that the kernel would drop."""
    sys = os.path.join(root, "sys")
    return domain_figure(sys, domain, "MemFree") + domain_figure(sys, domain, "Inactive(file)")


def share_nbytes(bound: Sequence[Sequence[int]], rank: int, root: str = "/") -> int:
    """Bytes for one rank of a node, ``bound``: each rank's NUMA domains, () where its memory is not bound.

    An even share of what the node can give, and no more than an even share of its own domains. OSError as
    available_nbytes.
    """
    even = available_nbytes(root) // len(bound)
    if not bound[rank]:
        return even
    users = Counter(domain for domains in bound for domain in domains)
    return min(even, sum(domain_nbytes(domain, root) // users[domain] for domain in bound[rank]))
