"""Binding this process's memory to NUMA domains, and asking where pages lie: the system calls, without libnuma.

Sources: set_mempolicy(2), get_mempolicy(2), move_pages(2); Linux's asm/unistd.h for the numbers.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Iterable

BIND = 2                        # MPOL_BIND: pages of these domains only
OF_NODE, OF_ADDRESS = 1, 2      # MPOL_F_NODE, MPOL_F_ADDR
DOMAINS = 1024                  # as many as any Linux has (CONFIG_NODES_SHIFT is at most 10)
WORD = 8 * ctypes.sizeof(ctypes.c_ulong)

_GENERIC = {"get_mempolicy": 236, "set_mempolicy": 237, "move_pages": 239}
CALLS = {"x86_64": {"get_mempolicy": 239, "set_mempolicy": 238, "move_pages": 279},
         "aarch64": _GENERIC, "riscv64": _GENERIC, "loongarch64": _GENERIC,
         "ppc64le": {"get_mempolicy": 260, "set_mempolicy": 261, "move_pages": 301},
         "s390x": {"get_mempolicy": 269, "set_mempolicy": 270, "move_pages": 310}}

_Mask = ctypes.c_ulong * (DOMAINS // WORD)


def _call(name: str, *arguments: object) -> int:
    """The system call ``name``. OSError with what it answers; where there is none, ENOSYS."""
    number = CALLS.get(platform.machine(), {}).get(name)
    if number is None:
        raise OSError(38, f"no {name} for {platform.machine()}")
    result = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def bind(domains: Iterable[int]) -> None:
    """Take this thread's new pages, and those of threads that it starts later, from ``domains`` only.

    OSError when the system refuses (containers do) or one of them has no memory that the process may use.
    """
    mask = _Mask()
    for domain in domains:
        mask[domain // WORD] |= 1 << domain % WORD
    _call("set_mempolicy", ctypes.c_int(BIND), ctypes.byref(mask), ctypes.c_ulong(DOMAINS + 1))


def policy() -> tuple[int, tuple[int, ...]]:
    """(mode, domains) of this thread's memory policy. OSError."""
    mode, mask = ctypes.c_int(), _Mask()
    _call("get_mempolicy", ctypes.byref(mode), ctypes.byref(mask), ctypes.c_ulong(DOMAINS + 1), None, ctypes.c_ulong(0))
    return mode.value, tuple(domain for domain in range(DOMAINS) if mask[domain // WORD] >> domain % WORD & 1)


def domains_of(address: int, pages: int) -> list[int]:
    """The domain of each of ``pages`` touched pages from ``address`` on; negative: minus the error number. OSError."""
    places = (ctypes.c_void_p * pages)(*(address + i * mmap.PAGESIZE for i in range(pages)))
    found = (ctypes.c_int * pages)()
    _call("move_pages", ctypes.c_int(0), ctypes.c_ulong(pages), places, None, found, ctypes.c_int(0))
    return list(found)


def domain_at(address: int) -> int:
    """The domain of the page at ``address``, as get_mempolicy has it. OSError."""
    node = ctypes.c_int()
    _call("get_mempolicy", ctypes.byref(node), None, ctypes.c_ulong(0), ctypes.c_void_p(address),
          ctypes.c_ulong(OF_NODE | OF_ADDRESS))
    return node.value


def touched_domains(pages: int = 64) -> tuple[int, ...]:
    """In which domains the pages lie that this thread touches now, by two system calls that must agree. OSError."""
    with mmap.mmap(-1, pages * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for page in range(pages):
            memory[page * mmap.PAGESIZE] = 1
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        try:
            address = ctypes.addressof(view)
            found = domains_of(address, pages)
            if min(found) < 0:
                raise OSError(-min(found), f"move_pages: {os.strerror(-min(found))}")
            assert found[0] == domain_at(address), f"move_pages and get_mempolicy disagree: {found[0]}"
        finally:
            del view
    return tuple(sorted(set(found)))
