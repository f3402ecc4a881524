"""Ranks and what they exchange: the only module that knows MPI.

Sums over ranks run in rank order, ((p0 + p1) + p2) + ..., whatever the message's size and whichever way it
goes, so that results do not depend on an MPI library's choice of algorithm. Inside a node the parts go
through shared memory (machine/segment.py), across nodes through MPI.
"""

from __future__ import annotations

import copy
import os
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from mpillm.errors import MpillmError, UsageError
from mpillm.machine import affinity, launch, topology
from mpillm.machine.segment import Segment, add_in_order, drop_library_segments, shares, supported
from mpillm.partition import Partition, Span, row_exchange

T = TypeVar("T")
CHUNK = 1 << 29                 # bytes of one message: far below 2**31, where MPI libraries fail or lie
PIECE = 1 << 24                 # bytes of one summed message: bounds the scratch memory
GATHERED_LIMIT = 1 << 18        # bytes of all ranks' parts: up to here one all-gather beats slices (measured)
FAREWELL = 0.25                 # seconds before an abort: launchers forward last words late, or drop them
MODES = ("ordered", "mpi")


class World:
    """All ranks of the job. ``node_rank`` of ``node_size`` on ``host``, which is node ``node`` of the job."""

    def __init__(self, mpi: Any, comm: Any, chunk: int = CHUNK) -> None:
        self._mpi, self._comm, self._chunk = mpi, comm, chunk
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.host = mpi.Get_processor_name().split(".")[0]
        self.processor = launch.processor_name()
        self.library = mpi.Get_library_version().split("\n")[0].strip("\0 ")
        self._node_comm = comm.Split_type(mpi.COMM_TYPE_SHARED, self.rank)
        self.node_rank, self.node_size = self._node_comm.Get_rank(), self._node_comm.Get_size()
        self.node = self._node_comm.bcast(self.rank)      # a node is named by its lowest rank
        masks = self._node_comm.allgather(tuple(affinity.own_mask()))
        self.crowded = self.node_size > len(set().union(*masks))

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """``obj`` of ``root`` on every rank (pickled, of any size)."""
        data = _pickled(obj) if self.rank == root else None
        length = np.array([0 if data is None else data.size], np.int64)
        self._comm.Bcast(length, root)
        if data is None:
            data = np.empty(int(length[0]), np.uint8)
        for begin in range(0, data.size, self._chunk):
            self._comm.Bcast(data[begin:begin + self._chunk], root)
        return obj if self.rank == root else pickle.loads(data.data)

    def gather(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Every rank's ``obj``, in rank order, on ``root`` (pickled, of any size); None elsewhere."""
        if self.rank == root:
            return [obj if rank == root else pickle.loads(self._receive(rank).data) for rank in range(self.size)]
        self._send(_pickled(obj), root)
        return None

    def allgather(self, obj: Any) -> list[Any]:
        """Every rank's ``obj``, in rank order, on every rank (pickled, of any size)."""
        return self.bcast(self.gather(obj))

    def scatter(self, objects: Sequence[Any]) -> Any:
        """``objects[rank]`` of rank 0's on each rank (pickled, of any size); others give nothing."""
        if self.rank:
            return pickle.loads(self._receive(0).data)
        for rank in range(1, self.size):
            self._send(_pickled(objects[rank]), rank)
        return objects[0]

    def _send(self, data: np.ndarray, to: int) -> None:
        self._comm.Send(np.array([data.size], np.int64), to)
        _send_pieces(self._comm, data, to, self._chunk)

    def _receive(self, source: int) -> np.ndarray:
        length = np.empty(1, np.int64)
        self._comm.Recv(length, source)
        data = np.empty(int(length[0]), np.uint8)
        _receive_pieces(self._comm, data, source, self._chunk)
        return data

    def barrier_quiet(self) -> None:
        """Wait for all ranks while sleeping: for long waits, which must not cost others their cores."""
        request, nap = self._comm.Ibarrier(), 1e-4
        while not request.Test():
            time.sleep(nap)
            nap = min(1.5 * nap, 1e-2)

    def abort(self, code: int) -> None:
        """End all ranks at once with this exit code, without MPI's own words about it: say why before."""
        time.sleep(FAREWELL)
        drop_library_segments()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        self._mpi.COMM_WORLD.Abort(code)

    def agree(self, function: Callable[[], T]) -> T:
        """Rank 0 calls ``function``; all return its value or raise its MpillmError or SystemExit alike.

        Such an exception has ``agreed`` True, and ``quiet`` True where another rank prints it. Anything else
        that rank 0 raises stays its own, to be ended by the abort guard.
        """
        outcome: tuple[bool, Any] | None = None
        if self.rank == 0:
            try:
                outcome = (True, function())
            except (MpillmError, SystemExit) as error:
                outcome = (False, error.with_traceback(None))
        self.barrier_quiet()
        good, value = self.bcast(outcome)
        if good:
            return value
        value.agreed, value.quiet = True, self.rank != 0
        raise value

    def agree_all(self, function: Callable[[], T]) -> T:
        """Every rank calls ``function`` and returns its own value, unless one raised an MpillmError.

        Then all raise the one of the lowest such rank, which the message names if not all ranks failed alike.
        """
        value, failure = None, None
        try:
            value = function()
        except MpillmError as error:
            failure = error.with_traceback(None)
        failures = self.allgather(failure)
        first = next((rank for rank, error in enumerate(failures) if error is not None), None)
        if first is None:
            return cast(T, value)
        worst = copy.copy(failures[first])
        if self.size > 1 and any(str(error) != str(worst) for error in failures):
            worst.args = (f"{worst} (rank {first})",)
        worst.agreed, worst.quiet = True, self.rank != 0
        raise worst

    def place(self, threads: int | None = None, pinning: bool = True, root: str = "/") -> affinity.Placement:
        """Decide this rank's cores and threads together with its node's ranks, and pin it; see affinity.plan.

        Call before threads are started. ``threads``: --threads-per-rank, None = the rank's physical cores.
        """
        if threads is not None and threads < 1:
            raise UsageError(f"--threads-per-rank {threads}: at least 1 is needed")
        mine = (affinity.own_mask(), affinity.launcher_mask())
        masks, launchers = zip(*self._node_comm.allgather(mine), strict=True)
        cores = topology.read_topology(os.path.join(root, "sys"), fallback=frozenset().union(*masks))
        plan = affinity.plan(cores, masks, threads, topology.cpu_quota(root), frozenset().union(*launchers))
        place = plan.ranks[self.node_rank]
        warnings = plan.warnings if self.node_rank == 0 else ()
        if place.pin and pinning:
            try:
                affinity.pin(place.cpus)
            except OSError as error:
                warnings += (f"rank {self.rank} could not be pinned to CPUs {place.cpus}: {error.strerror}",)
        row = affinity.table_row(self.rank, self.host, place)
        rows, lines = zip(*self.allgather((row, warnings)), strict=True)
        return affinity.Placement(place.threads, place.cpus, place.domains, list(rows),
                                  list(dict.fromkeys(line for part in lines for line in part)))

    def split(self, layout_tp: int, dp: int, mode: str = "ordered", shared: bool = True) -> Replica | None:
        """This rank's replica of ``layout_tp`` consecutive ranks; None beyond ``layout_tp * dp`` ranks.

        ``mode``: 'ordered' sums in rank order, 'mpi' leaves the order to MPI_Allreduce. ``shared`` False
        keeps to MPI inside a node. All ranks must call it.
        """
        if mode not in MODES:
            raise UsageError(f"--collectives {mode}: use one of {', '.join(MODES)}")
        if layout_tp < 1 or dp < 1 or layout_tp * dp > self.size:
            raise UsageError(f"{dp} x {layout_tp} ranks are wanted, the job has {self.size}")
        index, rank = divmod(self.rank, layout_tp)
        member = index < dp
        comm = self._comm.Split(index if member else self._mpi.UNDEFINED, self.rank)
        if not member:
            return None
        assert comm.Get_rank() == rank, "MPI ordered the replica's ranks in another way"
        return Replica(_Group(self._mpi, comm, self.crowded, shared, self._chunk), layout_tp, dp, index, mode)


_world: World | None = None     # MPI can be started once per process


def current() -> World | None:
    """The world, if MPI was started: what an abort guard needs to know."""
    return _world


def start() -> World:
    """Start MPI (once; later calls return the same world). LaunchError when that cannot work."""
    global _world
    if _world is not None:
        return _world
    launch.prepare_environment(os.environ, len(affinity.launcher_mask()))
    try:
        # With mpi4py's default, MPI_THREAD_MULTIPLE: below it, MPICH's waiting ranks do not give their core
        # away (8 ranks on 2 cores, all-reduce of 256 KiB: 1500 ms instead of 5).
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise launch.missing(os.environ, error) from error
    launch.check_size(os.environ, MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
    _world = World(MPI, MPI.COMM_WORLD.Dup())
    return _world


def _pickled(obj: Any) -> np.ndarray:
    return np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)


def _send_pieces(comm: Any, data: np.ndarray, to: int, chunk: int) -> None:
    for begin in range(0, data.size, chunk):
        comm.Send(data[begin:begin + chunk], to)


def _receive_pieces(comm: Any, data: np.ndarray, source: int, chunk: int) -> None:
    for begin in range(0, data.size, chunk):
        comm.Recv(data[begin:begin + chunk], source)


class _Group:
    """Some ranks that exchange arrays step by step: shared memory when they are one node, MPI otherwise."""

    def __init__(self, mpi: Any, comm: Any, crowded: bool, shared: bool, chunk: int) -> None:
        self.mpi, self.comm, self.crowded, self.shared, self.chunk = mpi, comm, crowded, shared, chunk
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._scratch = np.empty(0, np.float32)
        self.segment = self._make_segment() if shared and self.size > 1 else None

    def _all(self, yes: bool) -> bool:
        return bool(self.comm.allreduce(int(yes), self.mpi.MIN))

    def _make_segment(self) -> Segment | None:
        """A segment of all ranks, or None on all: several nodes, no room in /dev/shm, no common /dev/shm."""
        node = self.comm.Split_type(self.mpi.COMM_TYPE_SHARED, self.rank)
        one_node = node.Get_size() == self.size
        node.Free()
        if not self._all(one_node and supported()):
            return None
        made, path = None, None
        if self.rank == 0:
            try:
                made, path = Segment.create(self.size, self.crowded)
            except OSError:
                path = None
        path = self.comm.bcast(path)
        if path is not None and self.rank:
            try:
                made = Segment.attach(path, self.size, self.rank, self.crowded)
            except OSError:
                made = None
        everybody = self._all(made is not None)
        if path is not None and self.rank == 0:
            os.unlink(path)
        return made if everybody else None

    def subgroup(self, color: int, key: int) -> _Group:
        return _Group(self.mpi, self.comm.Split(color, key), self.crowded, self.shared, self.chunk)

    def scratch(self, n: int) -> np.ndarray:
        """n float32 to receive into, reused from call to call."""
        if self._scratch.size < n:
            self._scratch = np.empty(n, np.float32)
        return self._scratch[:n]

    def all_reduce(self, flat: np.ndarray) -> None:
        """Sum ``flat`` (float32, 1-D, contiguous) over the ranks in rank order, in place."""
        if self.segment:
            self.segment.all_reduce(flat)
            return
        for begin in range(0, flat.size, PIECE // 4):
            self._reduce_mpi(flat[begin:begin + PIECE // 4])

    def _reduce_mpi(self, x: np.ndarray) -> None:
        if self.size <= 3 or self.size * x.nbytes <= GATHERED_LIMIT:
            parts = self.scratch(self.size * x.size).reshape(self.size, x.size)
            self.comm.Allgather(x, parts)
            add_in_order(parts, x)
            return
        counts, offsets = shares(x.size, self.size)
        n = counts[self.rank]
        room = self.scratch((self.size + 1) * n).reshape(self.size + 1, n)
        self.comm.Alltoallv([x, (counts, offsets)],
                            [room[:self.size], ([n] * self.size, [i * n for i in range(self.size)])])
        add_in_order(room[:self.size], room[self.size])
        self.comm.Allgatherv(room[self.size], [x, (counts, offsets)])

    def all_reduce_mpi(self, flat: np.ndarray) -> None:
        for begin in range(0, flat.size, self.chunk // 4):
            self.comm.Allreduce(self.mpi.IN_PLACE, flat[begin:begin + self.chunk // 4])

    def gather(self, data: np.ndarray) -> np.ndarray | None:
        """Every rank's bytes (uint8, the same number on all) as [ranks, n] on rank 0; None elsewhere."""
        if self.segment and data.size <= self.segment.slot_nbytes:
            return self.segment.gather(data)
        parts = np.empty((self.size, data.size), np.uint8) if self.rank == 0 else None
        if self.size * data.size <= self.chunk:
            self.comm.Gather(data, parts)
        elif self.rank:
            _send_pieces(self.comm, data, 0, self.chunk)
        else:
            assert parts is not None, "rank 0 receives"
            parts[0] = data
            for source in range(1, self.size):
                _receive_pieces(self.comm, parts[source], source, self.chunk)
        return parts

    def bcast(self, data: np.ndarray) -> None:
        """Rank 0's bytes (uint8, 1-D) into every rank's, in place."""
        if self.segment and data.size <= self.segment.slot_nbytes:
            self.segment.bcast(data)
            return
        for begin in range(0, data.size, self.chunk):
            self.comm.Bcast(data[begin:begin + self.chunk])

    @property
    def waited(self) -> float:
        return self.segment.waited if self.segment else 0.0


class Replica:
    """The ranks of one copy of the model: ``rank`` of ``tp``; copy ``index`` of ``dp``.

    ``seconds`` adds up the time spent in its exchanges (the KV exchange included) until the caller resets it.
    """

    def __init__(self, group: _Group, tp: int, dp: int, index: int, mode: str) -> None:
        self._group, self.tp, self.dp, self.index, self.mode = group, tp, dp, index, mode
        self.rank, self.is_root = group.rank, group.rank == 0
        self.seconds = 0.0

    @property
    def shared_memory(self) -> bool:
        """Whether exchanges go through shared memory."""
        return self._group.segment is not None

    @property
    def waited(self) -> float:
        """Seconds since the start spent waiting for other ranks in shared memory; always 0.0 over MPI."""
        return self._group.waited

    def all_reduce(self, x: np.ndarray) -> None:
        """Sum float32 ``x`` (C-contiguous, the same shape on all) over the replica's ranks, in place."""
        if self.tp == 1 or x.size == 0:
            return
        assert x.dtype == np.float32 and x.flags.c_contiguous, f"all_reduce of {x.dtype}, strides {x.strides}"
        began = time.perf_counter()
        flat = x.reshape(-1)
        if self.mode == "mpi":
            self._group.all_reduce_mpi(flat)
        else:
            self._group.all_reduce(flat)
        self.seconds += time.perf_counter() - began

    def gather(self, array: np.ndarray) -> list[np.ndarray] | None:
        """Every rank's ``array`` (same shape and dtype on all) in rank order on the root; None elsewhere."""
        began = time.perf_counter()
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts = data.reshape(1, -1).copy() if self.tp == 1 else self._group.gather(data)
        self.seconds += time.perf_counter() - began
        return None if parts is None else [part.view(array.dtype).reshape(array.shape) for part in parts]

    def bcast(self, array: np.ndarray) -> None:
        """The root's values into every rank's ``array`` (C-contiguous, same shape and dtype), in place."""
        if self.tp == 1 or array.size == 0:
            return
        assert array.flags.c_contiguous, f"bcast into an array with strides {array.strides}"
        began = time.perf_counter()
        self._group.bcast(array.reshape(-1).view(np.uint8))
        self.seconds += time.perf_counter() - began

    def row(self, partition: Partition) -> KVExchange | None:
        """The planned exchange of K and V in this rank's KV row; None where nothing is exchanged.

        All ranks of the replica must call it.
        """
        assert partition.tp == self.tp, f"a partition over {partition.tp} ranks in a replica of {self.tp}"
        if partition.kv_mode == "redundant" or partition.width == 1:
            return None
        return KVExchange(self, partition)


def _columns(span: Span, whole: Span) -> slice:
    """Where ``span`` of the model's K/V columns stands within ``whole``."""
    return slice(span.start - whole.start, span.stop - whole.start) if span else slice(0, 0)


class KVExchange:
    """New K and V columns, computed once in a KV row, brought to the ranks whose queries need them."""

    def __init__(self, replica: Replica, partition: Partition) -> None:
        self._replica = replica
        me = partition.shares[replica.rank]
        row = [partition.shares[rank] for rank in partition.row_ranks(me.row)]
        plan, needed = row_exchange(partition, replica.rank), me.kv_heads.times(partition.sizes.head_dim)
        self._group = replica._group.subgroup(me.row, me.row_rank)
        assert self._group.rank == me.row_rank, "a row's ranks are not in the order of the partition"
        self.columns, self.needed = me.kv_columns.size, needed.size   # computed here, wanted here
        self._widths = [s.kv_columns.size for s in row]
        self._all_need_all = plan.kind == "all_gather"
        self._leaving = [_columns(span, me.kv_columns) for span in plan.send]
        self._arriving = [_columns(span, needed) for span in plan.receive]
        self._origins = [_columns(span, s.kv_columns) for span, s in zip(plan.receive, row, strict=True)]
        assert sum(span.size for span in plan.receive) == self.needed, "K/V columns that no rank computes"

    def run(self, k_part: np.ndarray, v_part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """k, v float32 [M, needed] of this rank's KV heads from all ranks' float32 parts [M, columns]."""
        rows = k_part.shape[0]
        assert k_part.shape == v_part.shape == (rows, self.columns), f"{k_part.shape}, {v_part.shape}"
        began = time.perf_counter()
        result = np.empty((2, rows, self.needed), np.float32)
        widest = 8 * max(self._widths)
        slot = self._group.segment.slot_nbytes if self._group.segment else 0
        if slot >= widest:
            exchange, step = self._shared, slot // widest
        else:
            exchange, step = self._mpi, max(1, PIECE // widest)
        for begin in range(0, rows, step):
            part = slice(begin, min(begin + step, rows))
            exchange(k_part[part], v_part[part], result[:, part])
        self._replica.seconds += time.perf_counter() - began
        return result[0], result[1]

    def _shared(self, k_part: np.ndarray, v_part: np.ndarray, result: np.ndarray) -> None:
        segment_, rows = self._group.segment, k_part.shape[0]
        assert segment_ is not None, "the exchange was planned over shared memory"
        slots = segment_.flip()
        views = [slots[i, :8 * rows * width].view(np.float32).reshape(2, rows, width)
                 for i, width in enumerate(self._widths)]
        views[self._group.rank][0], views[self._group.rank][1] = k_part, v_part
        segment_.meet()
        for view, source, target in zip(views, self._origins, self._arriving, strict=True):
            result[:, :, target] = view[:, :, source]

    def _mpi(self, k_part: np.ndarray, v_part: np.ndarray, result: np.ndarray) -> None:
        rows, comm = k_part.shape[0], self._group.comm
        part = np.stack((k_part, v_part))
        arriving = [2 * rows * (s.stop - s.start) for s in self._arriving]
        offsets = [sum(arriving[:i]) for i in range(len(arriving))]
        buffer = self._group.scratch(sum(arriving))
        if self._all_need_all:
            comm.Allgatherv(part.reshape(-1), [buffer, (arriving, offsets)])
        else:
            leaving = [part[:, :, s].reshape(-1) for s in self._leaving]
            counts = [piece.size for piece in leaving]
            comm.Alltoallv([np.concatenate(leaving), (counts, [sum(counts[:i]) for i in range(len(counts))])],
                           [buffer, (arriving, offsets)])
        for offset, count, target in zip(offsets, arriving, self._arriving, strict=True):
            result[:, :, target] = buffer[offset:offset + count].reshape(2, rows, -1)
