"""Some ranks that exchange arrays step by step: by shared memory, in two levels, or by messages alone.

The communicator and MPI's constants are given by collectives.py, the only importer of mpi4py.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpillm.machine.nodes import TwoLevels
from mpillm.machine.segment import FOLDER, LANES_LIMIT, TIMEOUT, Segment, add_in_order, shares, supported
from mpillm.quant import wire as formats

LOG = logging.getLogger("mpillm.exchange")
PIECE = 1 << 24                 # bytes of one summed message: bounds the scratch memory
NAP, NAP_LIMIT = 2e-5, 2e-4      # seconds between looks for messages while another thread computes
GATHERED_LIMIT = 1 << 18        # bytes of all ranks' parts: up to here one all-gather beats slices (measured)


@dataclass(frozen=True)
class Means:
    """How a group exchanges. ``node`` names this rank's node, ``name`` this rank in messages.

    ``wire`` other than f32: parts are rounded before they are added. ``shared`` False: messages only.
    ``chunk``: bytes of one message at most. ``lanes``: threads of this rank that may exchange at once.
    """

    node: int
    name: str
    crowded: bool
    chunk: int
    shared: bool = True
    lanes: int = 1
    timeout: float = TIMEOUT
    wire: str = "f32"


def send_pieces(comm: Any, data: np.ndarray, to: int, chunk: int) -> None:
    for begin in range(0, data.size, chunk):
        comm.Send(data[begin:begin + chunk], to)


def receive_pieces(comm: Any, data: np.ndarray, source: int, chunk: int) -> None:
    for begin in range(0, data.size, chunk):
        comm.Recv(data[begin:begin + chunk], source)


class Group:
    """The ranks of ``comm``. ``segment``: memory that all of them share, or None; ``levels``: across nodes."""

    def __init__(self, mpi: Any, comm: Any, means: Means) -> None:
        self.mpi, self.comm, self.chunk = mpi, comm, means.chunk
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._scratch = np.empty(0, np.float32)
        self.computing: Callable[[], bool] | None = None     # whether another thread of this rank is, if there is one
        everybody = comm.allgather((means.node, means.name, means.lanes))
        nodes, names, lanes = zip(*everybody, strict=True)
        self.means = dataclasses.replace(means, lanes=max(1, min(*lanes, LANES_LIMIT)))
        self.spans_nodes = len(set(nodes)) > 1
        self.segment = self.levels = self._node_segment = None
        if self.size == 1 or not means.shared:
            return
        local = [name for node, name in zip(nodes, names, strict=True) if node == means.node]
        self._node_segment = self._make_segment(nodes.index(means.node), local)
        if self._node_segment is None:
            return
        if self.spans_nodes or means.wire != "f32":
            self.levels = TwoLevels(comm, self.rank, nodes, self._node_segment, means.wire, self.finish)
        if not self.spans_nodes:
            self.segment = self._node_segment

    @property
    def fused(self) -> Segment | None:
        """The memory over which a kernel may do a whole sum by itself; None when Python has a part in it."""
        return self.segment if self.levels is None else None

    def _all(self, yes: bool) -> bool:
        return bool(self.comm.allreduce(int(yes), self.mpi.MIN))

    def _make_segment(self, color: int, names: list[str]) -> Segment | None:
        """A segment of each node's ranks, or None on all ranks: no room in /dev/shm, no common /dev/shm."""
        node, means = self.comm.Split(color, self.rank), self.means
        made, path, problem = None, None, ""
        if node.Get_size() == 1:
            made = Segment.alone(means.lanes)
        elif node.Get_rank() == 0 and not supported():
            problem = f"no {FOLDER}"
        elif node.Get_rank() == 0:
            try:
                made, path = Segment.create(node.Get_size(), means.lanes, means.crowded)
            except OSError as error:
                problem = f"{FOLDER}: {error.strerror}"
        path = node.bcast(path)
        if path is not None and node.Get_rank():
            try:
                made = Segment.attach(path, node.Get_size(), node.Get_rank(), means.lanes, means.crowded)
            except OSError as error:
                problem = f"{FOLDER}: {error.strerror}"
        everybody = self._all(made is not None)
        if path is not None and node.Get_rank() == 0:
            os.unlink(path)
        node.Free()
        if made is None or not everybody:
            if problem:
                LOG.warning("ranks cannot share memory (%s): they exchange by messages, which is slower", problem)
            return None
        made.names = names
        made.set_timeout(means.timeout)
        return made

    def subgroup(self, color: int, key: int) -> Group:
        return Group(self.mpi, self.comm.Split(color, key), dataclasses.replace(self.means, wire="f32"))

    def scratch(self, n: int) -> np.ndarray:
        """n float32 to receive into, reused from call to call."""
        if self._scratch.size < n:
            self._scratch = np.empty(n, np.float32)
        return self._scratch[:n]

    def all_reduce(self, rows: np.ndarray) -> None:
        """Sum float32 [M, n] (contiguous) over the ranks in rank order, in place."""
        if self.fused:
            self.fused.all_reduce(rows.reshape(-1))
            return
        if self.levels:
            self.levels.all_reduce(rows)
            return
        formats.round_rows(self.means.wire, rows)
        flat = rows.reshape(-1)
        for begin in range(0, flat.size, PIECE // 4):
            self._reduce_mpi(flat[begin:begin + PIECE // 4])

    def _reduce_mpi(self, x: np.ndarray) -> None:
        if self.size <= 3 or self.size * x.nbytes <= GATHERED_LIMIT:
            parts = self.scratch(self.size * x.size).reshape(self.size, x.size)
            self.together("Allgather", x, parts)
            add_in_order(parts, x)
            return
        counts, offsets = shares(x.size, self.size)
        n = counts[self.rank]
        room = self.scratch((self.size + 1) * n).reshape(self.size + 1, n)
        self.together("Alltoallv", [x, (counts, offsets)],
                      [room[:self.size], ([n] * self.size, [i * n for i in range(self.size)])])
        add_in_order(room[:self.size], room[self.size])
        self.together("Allgatherv", room[self.size], [x, (counts, offsets)])

    def all_reduce_mpi(self, flat: np.ndarray) -> None:
        for begin in range(0, flat.size, self.chunk // 4):
            self.together("Allreduce", self.mpi.IN_PLACE, flat[begin:begin + self.chunk // 4])

    def together(self, name: str, *arguments: Any) -> None:
        """A collective operation of the communicator, by its blocking name."""
        if self.computing is not None:
            self.finish([getattr(self.comm, f"I{name.lower()}")(*arguments)])
        else:
            getattr(self.comm, name)(*arguments)

    def finish(self, requests: Sequence[Any]) -> None:
        """Wait for messages: as MPI does, which is quickest, but asleep while another thread needs the core."""
        nap = NAP
        for request in requests:
            while self.computing is not None and self.computing() and not request.Test():
                time.sleep(nap)
                nap = min(1.25 * nap, NAP_LIMIT)
            request.Wait()

    def gather(self, data: np.ndarray) -> np.ndarray | None:
        """Every rank's bytes (uint8, the same number on all) as [ranks, n] on rank 0; None elsewhere."""
        if self.segment:
            return self.segment.gather(data)
        parts = np.empty((self.size, data.size), np.uint8) if self.rank == 0 else None
        if self.size * data.size <= self.chunk:
            self.comm.Gather(data, parts)
        elif self.rank:
            send_pieces(self.comm, data, 0, self.chunk)
        else:
            assert parts is not None, "rank 0 receives"
            parts[0] = data
            for source in range(1, self.size):
                receive_pieces(self.comm, parts[source], source, self.chunk)
        return parts

    def bcast(self, data: np.ndarray) -> None:
        """Rank 0's bytes (uint8, 1-D) into every rank's, in place."""
        if self.segment:
            self.segment.bcast(data)
            return
        for begin in range(0, data.size, self.chunk):
            self.comm.Bcast(data[begin:begin + self.chunk])

    @property
    def waited(self) -> float:
        """Seconds spent waiting for other ranks in shared memory."""
        return self._node_segment.waited if self._node_segment else 0.0

    def check(self) -> None:
        """ExchangeError if an exchange gave up waiting for a rank."""
        if self._node_segment:
            self._node_segment.check()
