"""Sums over ranks, by size and way: `mpirun -n 2 python benchmarks/exchanges.py [--nodes N]`.

shm: the kernel of a decode step (sum, residual, norm), calls back to back. mpi: MPI_Allreduce, called from Python.
messages: sums in rank order over MPI alone. With --nodes the ranks act as if they were on so many nodes, and the
sums in two levels are measured for each wire type, with the bytes that come in from the other nodes.
"""

from __future__ import annotations

import argparse
import os
import sys

from mpillm import collectives, main
from mpillm.engine import probe
from mpillm.jit import exchange
from mpillm.machine import launch

SIZES = (2304, 16 << 10, 256 << 10, 1 << 20)


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, help="act as if on N nodes")
    parser.add_argument("--repeats", type=int, default=2000, help="calls of the smallest size (default 2000)")
    given = parser.parse_args(argv)
    world = collectives.start()
    for turn in (0, 1):
        if (world.node_rank > 0) == turn:
            exchange.exchange_kernel(exchange.time_reduce_rows), exchange.warm_up()
        world.barrier_quiet()

    ways = {"shm": {}, "mpi": {"mode": "mpi"}, "messages": {"shared": False}}
    if given.nodes:
        os.environ[launch.FAKE_NODES] = str(given.nodes)
        ways = {wire: {"wire": wire} for wire in ("f32", "bf16", "q8_0")}
    for way, options in ways.items():
        replica = world.split(world.size, 1, **options)
        for nbytes in SIZES:
            repeats = max(20, given.repeats * SIZES[0] // nbytes)
            levels = replica._group.levels
            before = levels.received if levels else 0
            seconds = max(world.allgather(probe.measure_all_reduce(replica, nbytes, repeats)))
            received = sum(world.allgather((levels.received if levels else 0) - before)) / (repeats + 3)
            if world.rank == 0:
                extra = f"  {received / 1024:9.1f} KiB between nodes" if levels else ""
                print(f"{world.size} ranks  {way:8s} {nbytes:8d} bytes  {1e6 * seconds:9.1f} us{extra}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main.main(sys.argv[1:], run))
