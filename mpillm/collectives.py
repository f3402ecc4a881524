"""Ranks and what they exchange: the only module that knows MPI.

Sums over ranks run in rank order, ((p0 + p1) + p2) + ..., whatever the message's size and whichever way it
goes, so that results do not depend on an MPI library's choice of algorithm. Inside a node the parts go
through shared memory (machine/segment.py, jit/exchange.py), across nodes through MPI (machine/nodes.py).
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from mpillm.errors import MpillmError, UsageError
from mpillm.jit.exchange import KV, MERGE, QUERIES
from mpillm.machine import affinity, launch, memory, topology
from mpillm.machine.courier import Courier
from mpillm.machine.group import Group, Means, receive_pieces, send_pieces
from mpillm.machine.mail import Mail
from mpillm.machine.segment import NOTHING, TIMEOUT, Segment, drop_library_segments
from mpillm.machine.swap import Part, Swap
from mpillm.partition import Partition, Span

T = TypeVar("T")
CHUNK = 1 << 29                 # bytes of one message: far below 2**31, where MPI libraries fail or lie
FAREWELL = 0.25                 # seconds before an abort: launchers forward last words late, or drop them
MODES = ("shm", "mpi")
LOG = logging.getLogger("mpillm.exchange")


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
        drop_library_segments()        # all have them open; whoever is killed later leaves nothing behind
        self.cores = len(set().union(*masks))
        self._bound: list[tuple[int, ...]] = [()] * self.node_size    # NUMA domains of the memory of the node's ranks
        self._threads, self.crowded = 1, self.node_size > self.cores
        self._varies = False           # it was said that sums over ranks may
        self.wire = "f32"              # the type to which parts of sums are rounded, as the last split decided

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
        send_pieces(self._comm, data, to, self._chunk)

    def _receive(self, source: int) -> np.ndarray:
        length = np.empty(1, np.int64)
        self._comm.Recv(length, source)
        data = np.empty(int(length[0]), np.uint8)
        receive_pieces(self._comm, data, source, self._chunk)
        return data

    def barrier_quiet(self, meanwhile: Callable[[], object] | None = None) -> None:
        """Wait for all ranks while sleeping: for long waits, which must not cost others their cores."""
        request, nap = self._comm.Ibarrier(), 1e-4
        while not request.Test():
            if meanwhile is not None:
                meanwhile()
            time.sleep(nap)
            nap = min(1.5 * nap, 1e-2)

    def mail(self) -> Mail:
        """Messages that nobody waits for; all ranks call it together."""
        return Mail(self._mpi, self._comm.Dup())

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
        """Decide this rank's cores and threads together with its node's ranks, pin it, bind its memory there.

        See affinity.plan and affinity.bind_memory. Call before threads are started and memory is touched.
        ``threads``: --threads-per-rank, None = the rank's physical cores. ``pinning`` False leaves both alone.
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
        bound, lines = affinity.bind_memory(place.memory, cores, root) if pinning else ((), ())
        self._bound = self._node_comm.allgather(bound)
        self._threads = place.threads
        self.crowded = sum(self._node_comm.allgather(place.threads)) > self.cores
        row = affinity.table_row(self.rank, self.host, place, bound, self.free_nbytes(root))
        rows, said = zip(*self.allgather((row, warnings + lines)), strict=True)
        return affinity.Placement(place.threads, place.cpus, place.domains, list(rows),
                                  list(dict.fromkeys(line for part in said for line in part)), bound)

    def free_nbytes(self, root: str = "/") -> int:
        """Bytes that this rank may still take: its share of the node's, and of its NUMA domains' after ``place``."""
        return memory.share_nbytes(self._bound, self.node_rank, root)

    def split(self, layout_tp: int, dp: int, mode: str = "shm", shared: bool = True, wire: str = "f32",
              timeout: float = TIMEOUT) -> Replica | None:
        """This rank's replica of ``layout_tp`` consecutive ranks; None beyond ``layout_tp * dp`` ranks.

        ``mode``: 'shm' sums in rank order, by shared memory where there is some; 'mpi' leaves the order to
        MPI_Allreduce. ``shared`` False keeps to MPI inside a node. ``wire``: the type of parts between nodes,
        see machine/nodes.py; it counts for all replicas if one of them spans nodes, so that all have the same
        arithmetic. ``timeout``: seconds that an exchange in shared memory waits for a rank. All ranks must call
        it, after ``place`` if they want to exchange with several threads.
        """
        if mode not in MODES:
            raise UsageError(f"--collectives {mode}: use one of {', '.join(MODES)}")
        if layout_tp < 1 or dp < 1 or layout_tp * dp > self.size:
            raise UsageError(f"{dp} x {layout_tp} ranks are wanted, the job has {self.size}")
        index, rank = divmod(self.rank, layout_tp)
        node, member = launch.exchange_node(os.environ, self.rank, self.size, self.node), index < dp
        nodes = self._comm.allgather(node)
        spans = any(len(set(nodes[i * layout_tp:(i + 1) * layout_tp])) > 1 for i in range(dp))
        self.wire = wire if spans and mode == "shm" else "f32"
        comm = self._comm.Split(index if member else self._mpi.UNDEFINED, self.rank)
        if not member:
            return None
        assert comm.Get_rank() == rank, "MPI ordered the replica's ranks in another way"
        means = Means(node, f"rank {self.rank} (host {self.host})", self.crowded, self._chunk, shared,
                      self._threads, timeout, self.wire)
        if mode == "mpi" and self.rank == 0 and not self._varies:
            self._varies = True
            LOG.info("sums over ranks by MPI_Allreduce: their order is MPI's choice, and last bits may vary")
        return Replica(Group(self._mpi, comm, means), layout_tp, dp, index, mode)


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
    atexit.register(drop_library_segments)      # MPICH makes more of them later, and finds its own gone
    return _world


def _pickled(obj: Any) -> np.ndarray:
    return np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)


class Replica:
    """The ranks of one copy of the model: ``rank`` of ``tp``; copy ``index`` of ``dp``.

    ``seconds`` adds up the time spent in its exchanges, a tape's and the KV exchange included, until the caller
    sets it to 0; of those that another thread makes (``sending``) the time that was waited for them. Exchanges raise
    ExchangeError when a rank does not come before the deadline.
    """

    def __init__(self, group: Group, tp: int, dp: int, index: int, mode: str) -> None:
        self._group, self.tp, self.dp, self.index, self.mode = group, tp, dp, index, mode
        self.rank, self.is_root = group.rank, group.rank == 0
        self._alone = Segment.alone(group.means.lanes)
        self._groups = [group]
        self._seconds = 0.0                    # in messages and in Python; kernels count for themselves
        self._reset = 0.0
        self.courier = Courier()               # its ``worked``: seconds of exchanges behind computing

    @property
    def seconds(self) -> float:
        return self._seconds + self._spent() - self._reset

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._seconds, self._reset = value, self._spent()

    def _spent(self) -> float:
        return sum(group.segment.spent for group in self._groups if group.segment)

    @property
    def shared_memory(self) -> bool:
        """Whether all exchanges go through shared memory."""
        return self._group.segment is not None

    @property
    def waited(self) -> float:
        """Seconds since the start spent waiting for other ranks in shared memory; always 0.0 over MPI."""
        return sum(group.waited for group in self._groups)

    def exchange_arguments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """(flags int64, slots float32, state int64), 1-D, for the cores of jit/exchange.py; after them ``check``.

        None when a sum needs messages: then ``reduce_rows`` and ``all_reduce`` are to be called instead.
        """
        if self.tp == 1:
            return self._alone.arguments
        fused = self._group.fused if self.mode == "shm" else None
        return None if fused is None else fused.arguments

    def sends(self, inside: bool) -> bool:
        """Whether its sums are messages that a thread may send, between nodes or, if ``inside``, in one too."""
        mpi, spans = self._group.mpi, self._group.spans_nodes
        return (spans or inside) and self.exchange_arguments() is None and mpi.Query_thread() >= mpi.THREAD_SERIALIZED

    @contextlib.contextmanager
    def sending(self) -> Iterator[Callable[[Callable[[], None]], Callable[[], None]]]:
        """A function that has an exchange made by another thread, in order; what it returns waits for it.

        Meanwhile the caller must not use MPI. Of such exchanges ``seconds`` counts what was waited for them.
        """
        before = self._seconds - self.courier.waited
        try:
            with self.courier.sending(self._groups) as send:
                yield send
        finally:
            self._seconds = before + self.courier.waited

    def check(self) -> None:
        """ExchangeError if an exchange in shared memory, of a tape too, gave up waiting for a rank."""
        for group in self._groups:
            group.check()

    def all_reduce(self, x: np.ndarray) -> None:
        """Sum float32 ``x`` (C-contiguous, the same shape on all) over the replica's ranks, in place."""
        if self.tp == 1 or x.size == 0:
            return
        assert x.dtype == np.float32 and x.flags.c_contiguous, f"all_reduce of {x.dtype}, strides {x.strides}"
        began, before = time.perf_counter(), self._spent()
        if self.mode == "mpi":
            self._group.all_reduce_mpi(x.reshape(-1))
        else:
            self._group.all_reduce(x.reshape(-1, x.shape[-1]))
        self._account(began, before)

    def _timed(self, exchange: Callable[[], None]) -> None:
        began, before = time.perf_counter(), self._spent()
        exchange()
        self._account(began, before)

    def _account(self, began: float, before: float) -> None:
        """Add what passed since ``began`` and was not counted by the kernels themselves."""
        self._seconds += time.perf_counter() - began - (self._spent() - before)

    def reduce_rows(self, y: np.ndarray, x: np.ndarray, bias: np.ndarray | None, weight: np.ndarray | None,
                    normed: np.ndarray, eps: float) -> None:
        """x += (y summed over the ranks) + bias; normed = rms_norm(x) * weight, unless ``weight`` is None.

        y, x, normed float32 [M, n], contiguous; bias, weight [n]. y is not needed afterwards: it may be changed.
        """
        if x.size == 0:
            return
        fused = self._group.fused if self.mode == "shm" else None
        began, before = time.perf_counter(), self._spent()
        if fused is None:
            self.all_reduce(y)
        segment = self._alone if fused is None else fused
        segment.reduce_rows(y, x, NOTHING if bias is None else bias, NOTHING if weight is None else weight,
                            normed, eps)
        if fused is not None:
            self._account(began, before)

    def gather(self, array: np.ndarray) -> list[np.ndarray] | None:
        """Every rank's ``array`` (same shape and dtype on all) in rank order on the root; None elsewhere."""
        began, before = time.perf_counter(), self._spent()
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts = data.reshape(1, -1).copy() if self.tp == 1 else self._group.gather(data)
        self._account(began, before)
        return None if parts is None else [part.view(array.dtype).reshape(array.shape) for part in parts]

    def bcast(self, array: np.ndarray) -> None:
        """The root's values into every rank's ``array`` (C-contiguous, same shape and dtype), in place."""
        if self.tp == 1 or array.size == 0:
            return
        assert array.flags.c_contiguous, f"bcast into an array with strides {array.strides}"
        began, before = time.perf_counter(), self._spent()
        self._group.bcast(array.reshape(-1).view(np.uint8))
        self._account(began, before)

    def row(self, partition: Partition) -> KVExchange | None:
        """The planned exchanges in this rank's KV row; None where nothing is exchanged.

        All ranks of the replica must call it.
        """
        assert partition.tp == self.tp, f"a partition over {partition.tp} ranks in a replica of {self.tp}"
        if partition.kv_mode == "redundant" or partition.width == 1:
            return None
        return KVExchange(self, partition)


class RowParts(NamedTuple):
    """What the ranks of a KV row exchange in each layer, in order; empty: no exchange.

    ``gather``: K and V, of latent attention the columns of the latents. Where the cache is sharded all ranks need all
    queries: they travel with K and V, or as ``queries`` of their own, as those in the latent's space are made of whole
    latents. ``merge``: there, outputs over each rank's positions and their log-sum-exps, after attention.
    """

    gather: tuple[Part, ...] = ()
    queries: tuple[Part, ...] = ()
    merge: tuple[Part, ...] = ()


def row_parts(partition: Partition, row: int) -> RowParts:
    """What the ranks of a KV row exchange. Columns are counted over the model."""
    if partition.kv_mode == "redundant" or partition.width == 1:
        return RowParts()
    sizes, shares = partition.sizes, [partition.shares[rank] for rank in partition.row_ranks(row)]
    latent, size = bool(sizes.latent_head), sizes.head_dim
    kv = Part(tuple(_pair(s.kv_columns) for s in shares), tuple(_pair(s.kv_heads.times(size)) for s in shares))
    if partition.places == 1:
        return RowParts((kv,) if latent else (kv, kv))

    def own(n: int) -> tuple[tuple[int, int], ...]:
        return tuple(_pair(s.heads.times(n)) for s in shares)

    def whole(n: int) -> tuple[tuple[int, int], ...]:
        return ((own(n)[0][0], own(n)[-1][1]),) * len(shares)

    query, value = (sizes.latent_query, sizes.latent_value) if latent else (size, size)
    queries, merge = Part(own(query), whole(query)), tuple(Part(whole(n), own(n), stacked=True) for n in (value, 1))
    return RowParts((kv,), (queries,), merge) if latent else RowParts((queries, kv, kv), (), merge)


def _pair(span: Span) -> tuple[int, int]:
    return span.start, span.stop


class KVExchange:
    """What the ranks of a KV row exchange in each layer, by ``row_parts``.

    ``gather`` and ``queries`` come before attention, ``merge`` after. New K and V columns are computed once in the
    row. ``place``: which of ``width`` shares of the positions this rank has; ``heads``: query heads of the row.
    """

    def __init__(self, replica: Replica, partition: Partition) -> None:
        me = partition.shares[replica.rank]
        group = replica._group.subgroup(me.row, me.row_rank)
        replica._groups.append(group)
        assert group.rank == me.row_rank, "a row's ranks are not in the order of the partition"
        self.place, self.width = me.row_rank % partition.places, partition.places
        self.heads = partition.sizes.n_heads // partition.rows
        parts = row_parts(partition, me.row)
        self.gather = Swap(group, parts.gather, KV, replica._timed)
        self.queries, self.merge = (Swap(group, own, doing, replica._timed) if own else None
                                    for own, doing in ((parts.queries, QUERIES), (parts.merge, MERGE)))
