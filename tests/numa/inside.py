"""The first process of the guest of guest.py, and the ranks that it starts: where cores and memory come to lie."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter

TOUCHED = 32 << 20              # bytes that each rank touches


def start_machine() -> dict[str, str]:
    """Mount what Linux offers, set the loopback up; the words of the kernel's command line that are ours."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, place in (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/dev/shm")):
        os.makedirs(place, exist_ok=True)
        libc.mount(kind.encode(), place.encode(), kind.encode(), 0, None)
    socket.sethostname("guest")
    with socket.socket() as any_socket:                     # SIOCSIFFLAGS: lo is up and running
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 0x41))
    with open("/proc/cmdline", encoding="ascii") as file:
        return dict(word[7:].split("=", 1) for word in file.read().split() if word.startswith("mpillm."))


def power_off() -> None:
    os.sync()
    ctypes.CDLL(None).reboot(0x4321FEDC)


def show(python: str, command: list[str]) -> None:
    """Run ``command`` with its words printed as a user would write them."""
    bin_folder = os.path.dirname(python)
    print("$", " ".join("python" if word == python else word for word in command), flush=True)
    environment = {"PATH": bin_folder, "PYTHONPATH": os.environ["PYTHONPATH"], "HOME": "/tmp", "TMPDIR": "/tmp"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace")
    print(done.stdout, f"(exit code {done.returncode})\n", sep="", flush=True)


def first() -> None:
    """As process 1: all commands, between two marks; then off."""
    words = start_machine()
    python, repository = words["python"], words["repository"]
    os.environ["PYTHONPATH"] = repository
    os.chdir("/tmp")
    print("== begin", flush=True)
    inside = os.path.join(repository, "tests/numa/inside.py")
    try:
        for options in (["-n", "4"], ["-n", "2"], ["-n", "1"],
                        ["-n", "4", "-genv", "NO_PIN", "1"]):
            show(python, ["mpirun", *options, python, inside])
    except Exception as error:           # nobody reads what process 1 says after its end
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        print("== end", flush=True)
        power_off()


def rank() -> None:
    """One rank: placed as a run places it, then the pages of an array that it and its threads touch."""
    import numpy as np

    from mpillm import collectives
    from mpillm.cli.report import place_table
    from mpillm.machine import numa

    world = collectives.start()
    placement = world.place(pinning="NO_PIN" not in os.environ)
    array = np.ones(TOUCHED // 8)
    address = -(-array.ctypes.data // 4096) * 4096
    found = Counter(numa.domains_of(address, (TOUCHED - 4096) // 4096))
    mode, domains = numa.policy()
    policy = f"MPOL_BIND {domains}" if mode == numa.BIND else f"policy {mode}"
    lines = world.gather(f"rank {world.rank} on CPUs {sorted(os.sched_getaffinity(0))}: get_mempolicy {policy}; "
                         f"move_pages: {dict(sorted(found.items()))} pages by domain")
    if lines is not None:
        print(place_table(placement.table, "ranks"), *(f"warning: {line}" for line in placement.warnings), *lines,
              sep="\n", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if os.getpid() == 1:
        first()
    else:
        rank()
    sys.exit()
