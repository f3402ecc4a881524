"""Ways to fail, one a run: `mpirun -n N python failures.py KIND WAITING`. The job has to end at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np

from mpillm import collectives, main
from mpillm.errors import LaunchError, ModelError, ResourceError


def wait_in_mpi(world, replica) -> None:
    """What the healthy ranks do: wait in MPI for the one that never comes."""
    world.bcast(None, 1)


def wait_in_shared_memory(world, replica) -> None:
    replica.all_reduce(np.ones(1000, np.float32))


def wait_for_another_thread(world, replica) -> None:
    """An exchange that a thread makes, between two nodes, while this one would compute."""
    with replica.sending() as send:
        send(lambda: replica.all_reduce(np.ones((1, 1000), np.float32)))()


def mapped_segments() -> list[str]:
    with open("/proc/self/maps", encoding="utf-8") as file:
        paths = {line.split(None, 5)[-1].strip() for line in file if "/dev/shm/mp" in line}
    return sorted(path.removesuffix(" (deleted)") for path in paths)


def fail_in_thread() -> None:
    thread = threading.Thread(target=lambda: [][1])
    thread.start()
    time.sleep(60)               # the main thread is busy elsewhere


def refuse(error: BaseException):
    raise error


FAIL = {
    "model": lambda: refuse(ModelError("model.safetensors is cut short:\n  read it again")),
    "fault": lambda: {}["no such key"],
    "thread": fail_in_thread,
    "exit": lambda: sys.exit(9),
    "leave": lambda: sys.exit(0),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "memory": lambda: refuse(MemoryError()),
    "stopped": lambda: (print(os.getpid(), flush=True), os.kill(os.getpid(), signal.SIGSTOP)),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "pipe": lambda: refuse(BrokenPipeError(32, "Broken pipe")),
}


def run(argv: list[str] | None) -> int:
    kind, place = argv[:2]
    if kind == "launch":
        raise LaunchError("before MPI started")
    world = collectives.start()
    replica = world.split(world.size, 1, timeout=float(argv[2]) if argv[2:] else 60.0)
    if kind == "agreed":
        world.agree(lambda: refuse(ModelError("shard 3 is absent")))
    elif kind == "agreed_exit":
        world.agree(lambda: (print("usage: none"), sys.exit(0)))
    elif kind == "agreed_usage":
        world.agree(lambda: sys.exit(2))
    elif kind == "all":
        world.agree_all(lambda: refuse(ResourceError("rank too small")) if world.rank == 1 else None)
    elif kind == "code":
        return 5
    elif kind == "flood":
        for i in range(100_000):
            if world.rank == 0:
                print("line", i, "x" * 200)
    elif world.rank == 1:
        if kind != "stopped":
            print(*mapped_segments(), flush=True)
        FAIL[kind]()
        time.sleep(60)
    else:
        {"mpi": wait_in_mpi, "shared": wait_in_shared_memory, "sending": wait_for_another_thread}[place](world, replica)
    world.barrier_quiet()
    return 0


if __name__ == "__main__":
    sys.exit(main.main(sys.argv[1:], run))
