"""Every exchange at one rank count: `mpirun -n N python exchanges.py`. A failed assert aborts the job."""

from __future__ import annotations

import functools
import os
import sys

import numpy as np

from mpillm import collectives, kernels, main
from mpillm.errors import ModelError, MpillmError, ResourceError, UsageError
from mpillm.jit.exchange import warm_up as warm_up_exchanges
from mpillm.machine import group, launch, segment
from mpillm.partition import Sizes, partition
from mpillm.quant import wire

SIZES = (1, 2, 3, 7, 16, 100, 576, 4608, 32767, 32768, 32769, 65537, 200_000)


def warm_up() -> None:
    warm_up_exchanges(), norm_of(np.ones((1, 16), np.float32), np.ones(16, np.float32), 1e-5)


@functools.lru_cache(maxsize=32)
def parts_of(size: int, ranks: int) -> np.ndarray:
    """[ranks, size] float32 of very unlike magnitudes, the same on every rank: any other order shows."""
    generator = np.random.default_rng([ranks, size])
    values = generator.standard_normal((ranks, size), np.float32)
    parts = np.ldexp(values, generator.integers(-20, 21, (ranks, size), np.int32))
    parts.setflags(write=False)
    return parts


def in_rank_order(parts: np.ndarray) -> np.ndarray:
    total = parts[0].copy()
    for part in parts[1:]:
        total = total + part
    return total


def bits(x: np.ndarray) -> bytes:
    return x.tobytes()


def sums(replica) -> None:
    for size in SIZES:
        parts = parts_of(size, replica.tp)
        x = parts[replica.rank].copy()
        replica.all_reduce(x)
        expected = in_rank_order(parts)
        if replica.mode == "shm":
            assert bits(x) == bits(expected), f"{size} values over {replica.tp} ranks"
        else:
            bound = np.abs(parts.astype(np.float64)).sum(0) * replica.tp * 2.0 ** -23
            assert (np.abs(x - parts.astype(np.float64).sum(0)) <= bound).all(), f"{size} values"
    special = np.array([[np.inf, -np.inf, np.nan, -0.0, 1e-42]], np.float32)
    replica.all_reduce(special)
    assert np.isposinf(special[0, 0]) and np.isneginf(special[0, 1]) and np.isnan(special[0, 2])
    assert special[0, 3] == 0 and np.signbit(special[0, 3]), "a sum of -0.0 is -0.0"
    assert special[0, 4] > 0, "denormals survive"
    x = parts_of(24, replica.tp)[replica.rank].copy().reshape(2, 3, 4)
    replica.all_reduce(x)
    assert bits(x.reshape(-1)) == bits(in_rank_order(parts_of(24, replica.tp))) or replica.mode == "mpi"
    replica.all_reduce(np.empty((0, 5), np.float32))
    for wrong in (np.zeros(4), np.zeros((4, 4), np.float32)[:, ::2]):
        try:
            replica.all_reduce(wrong)
        except AssertionError:
            continue
        assert replica.tp == 1, "a wrong array was summed"


def long_sum(replica) -> None:
    """Beyond one piece of every way, and a small one after it: buffers are reused."""
    for size in (group.PIECE // 4 + 5, 3):
        short = parts_of(min(size, 9973), replica.tp)      # repeated, at a prime stride: no two pieces alike
        x = np.resize(short[replica.rank], size)
        replica.all_reduce(x)
        assert bits(x) == bits(np.resize(in_rank_order(short), size))


def small_arrays(replica) -> None:
    for dtype, shape in ((np.int64, (3,)), (np.float16, (2, 5)), (np.float64, ()), (np.int8, (70_000, 3)),
                         (np.uint16, (0, 4)), (bool, (9,))):
        mine = (np.arange(int(np.prod(shape))) * 7 + 13 * replica.rank).astype(dtype).reshape(shape)
        got = replica.gather(mine)
        assert (got is None) == (not replica.is_root)
        for rank, part in enumerate(got or ()):
            wanted = (np.arange(int(np.prod(shape))) * 7 + 13 * rank).astype(dtype).reshape(shape)
            assert part.dtype == wanted.dtype and part.shape == wanted.shape and np.array_equal(part, wanted)
        told = mine.copy()
        replica.bcast(told)
        assert np.array_equal(told, (np.arange(told.size) * 7).astype(dtype).reshape(shape))
    strided = np.arange(20, dtype=np.int32).reshape(4, 5)[:, ::2] + replica.rank
    got = replica.gather(strided)
    assert got is None or all(np.array_equal(g, strided - replica.rank + r) for r, g in enumerate(got))
    first = replica.gather(np.array([replica.rank]))
    for turn in range(50):                     # results are copies: later exchanges do not change them
        replica.gather(np.array([turn]))
    assert first is None or [int(f[0]) for f in first] == list(range(replica.tp))


def kv_exchange(replica, heads: int, kv: int, size: int, rows: int, mode: str = "allgather") -> None:
    sizes = Sizes(hidden=64, n_layers=1, n_heads=heads, n_kv_heads=kv, head_dim=size, intermediate=64,
                  vocab=64)
    split = partition(sizes, replica.tp, mode)
    exchange = replica.row(split)
    assert (exchange is None) == (split.width == 1)
    assert replica.row(partition(sizes, replica.tp, "redundant")) is None
    if exchange is None:
        return
    share = split.shares[replica.rank]
    if mode == "sharded":
        shards(exchange, split, share, rows)
        return
    redundant = partition(sizes, replica.tp, "redundant").shares[replica.rank]
    assert share.kv_heads == redundant.kv_heads and exchange.merge is None and exchange.width == 1
    generator = np.random.default_rng([heads, kv, size])
    for m in (rows, 1, rows, 0):
        both = generator.standard_normal((2, m, kv * size)).astype(np.float32)
        own = slice(share.kv_columns.start, share.kv_columns.stop)
        wanted = slice(redundant.kv_heads.start * size, redundant.kv_heads.stop * size)
        room = np.full((2, m, wanted.stop - wanted.start + 3), np.nan, np.float32)
        got = [room[0, :, :-3], np.ascontiguousarray(room[1, :, 3:])]
        exchange.gather.run([both[0, :, own], np.ascontiguousarray(both[1, :, own])], got)
        assert all(bits(x) == bits(y[:, wanted]) for x, y in zip(got, both, strict=True))
        assert np.isnan(room[0, :, -3:]).all(), "written beside the columns"


def shards(exchange, split, share, rows: int) -> None:
    """Queries, keys and values of the row to all; parts of all to the ranks of their heads."""
    size, row = split.sizes.head_dim, [split.shares[rank] for rank in split.row_ranks(share.row)]
    assert (exchange.place, exchange.width) == (share.row_rank, split.width)
    assert exchange.heads == sum(other.heads.size for other in row)
    generator = np.random.default_rng([row[0].heads.start, size])
    for m in (rows, 1, 0):
        q = generator.standard_normal((m, exchange.heads * size)).astype(np.float32)
        k, v = generator.standard_normal((2, m, share.kv_heads.size * size)).astype(np.float32)
        mine = share.heads.relative_to(row[0].heads.start)
        kv = share.kv_columns.relative_to(share.kv_heads.start * size)
        got = [np.empty_like(x) for x in (q, k, v)]
        exchange.gather.run([q[:, mine.start * size:mine.stop * size], k[:, kv.start:kv.stop], v[:, kv.start:kv.stop]],
                            got)
        assert all(bits(x) == bits(y) for x, y in zip(got, (q, k, v), strict=True))
        parts = generator.standard_normal((split.width, m, exchange.heads * (size + 1))).astype(np.float32)
        out, sums = parts[:, :, exchange.heads:], parts[:, :, :exchange.heads]
        got = [np.empty((m, n), np.float32) for n in exchange.merge.got]
        exchange.merge.run([out[share.row_rank], sums[share.row_rank]], got)
        for x, y, width in ((got[0], out, size), (got[1], sums, 1)):
            expected = y[:, :, mine.start * width:mine.stop * width].swapaxes(0, 1)
            assert bits(x) == bits(np.ascontiguousarray(expected)), "parts in order of the places"


def objects(world) -> None:
    for chunk in (7, 64, 1 << 29):
        small = collectives.World(world._mpi, world._comm, chunk=chunk)
        for length in (0, 1, chunk - 40, chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk + 1):
            if length < 0 or length > 1 << 20:
                continue
            root = length % world.size
            data = bytes(i % 251 for i in range(length))
            assert small.bcast(data if world.rank == root else None, root) == data
            got = small.gather((world.rank, data * (world.rank % 2 + 1)), root)
            assert (got is None) == (world.rank != root)
            assert got is None or got == [(rank, data * (rank % 2 + 1)) for rank in range(world.size)]
    border = collectives.World(world._mpi, world._comm, chunk=1000)
    for length in range(995, 1006):            # the transport itself at the border: raw bytes, no pickling
        data = np.arange(length, dtype=np.int64).astype(np.uint8)
        if world.size > 1 and world.rank == 1:
            border._send(data, 0)
        elif world.size > 1 and world.rank == 0:
            assert np.array_equal(border._receive(1), data)
    assert world.allgather({"rank": world.rank}) == [{"rank": rank} for rank in range(world.size)]
    world.barrier_quiet()


def agreement(world) -> None:
    assert world.agree(lambda: ("only rank 0 says", world.rank)) == ("only rank 0 says", 0)

    def refuse():
        assert world.rank == 0, "another rank than 0 was asked"
        raise ModelError("shard 3 is absent")

    def say_no(error):
        def function():
            raise error
        return function

    for function, kind, text in ((refuse, ModelError, "shard 3 is absent"),
                                 (say_no(SystemExit(2)), SystemExit, "2")):
        try:
            world.agree(function)
        except (MpillmError, SystemExit) as error:
            assert type(error) is kind and str(error) == text
            assert error.agreed and error.quiet == (world.rank > 0)
        else:
            raise AssertionError("nothing was raised")

    assert world.agree_all(lambda: world.rank * 2) == world.rank * 2
    last = world.size - 1
    try:
        world.agree_all(say_no(ResourceError("no memory")) if world.rank == last else lambda: 5)
    except ResourceError as error:
        assert str(error) == ("no memory" if world.size == 1 else f"no memory (rank {last})") and error.agreed
    else:
        raise AssertionError("nothing was raised")
    try:
        world.agree_all(say_no(UsageError("all say so")))
    except UsageError as error:
        assert str(error) == "all say so"
    else:
        raise AssertionError("nothing was raised")


def placed(world) -> None:
    placement = world.place(None)
    assert placement.threads >= 1 and len(placement.table) == world.size
    assert [row["rank"] for row in placement.table] == list(range(world.size))
    if world.crowded:
        assert placement.threads == 1
        assert any("share" in line for line in placement.warnings), placement.warnings
    else:
        assert len({row["cores"] for row in placement.table}) == world.size or world.size == 1
    assert len(placement.warnings) == len(set(placement.warnings))


def norm_of(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """The norm of each row, by the operation that plans use."""
    out, plan = np.empty_like(x), kernels.Plan(len(x))
    plan.norm(x, weight, eps, out)
    plan.run_alone(len(x))
    return out


def fused(replica) -> None:
    """The sum, the residual and the norm, as a kernel does them or as messages bring them."""
    for rows, n in ((1, 576), (3, 33), (40, 3001)):
        parts = parts_of(rows * n, replica.tp).reshape(replica.tp, rows, n)
        x, bias, weight = (parts_of(size, 1)[0].copy() for size in (rows * n, n, n))
        x, normed = x.reshape(rows, n), np.zeros((rows, n), np.float32)
        wanted = x + (in_rank_order(parts) + bias)
        replica.reduce_rows(parts[replica.rank].copy(), x, bias, weight, normed, 1e-5)
        assert bits(x) == bits(wanted) or replica.mode == "mpi"
        assert bits(normed) == bits(norm_of(x, weight, 1e-5))
        before = normed.copy()
        replica.reduce_rows(parts[replica.rank].copy(), x, None, None, normed, 1e-5)
        assert bits(normed) == bits(before)
    arguments = replica.exchange_arguments()
    assert (arguments is None) == (replica.tp > 1 and (replica.mode == "mpi" or not replica.shared_memory))
    replica.check()


def over_nodes(world, nodes: str) -> None:
    """As if the ranks were on several nodes: the same sums, and with a wire type those of rounded parts."""
    os.environ[launch.FAKE_NODES] = nodes
    try:
        for kind in wire.NBYTES:
            for shared in (True, False):
                replica = world.split(world.size, 1, shared=shared, wire=kind)
                assert world.wire == kind and not replica.shared_memory
                if kind == "f32":
                    sums(replica)
                    fused(replica)
                    small_arrays(replica)
                    kv_exchange(replica, 9, 3, 64, 300)
                    kv_exchange(replica, 9, 3, 64, 300, "sharded")
                    kv_exchange(replica, 8, 8, 5, 3)
                for rows, n in ((1, 576), (2, 33), (33, 1000), (67, 1000)):
                    parts = parts_of(rows * n, replica.tp).reshape(replica.tp, rows, n).copy()
                    x = parts[replica.rank].copy()
                    replica.all_reduce(x)
                    for part in parts:
                        wire.round_rows(kind, part)
                    assert bits(x) == bits(in_rank_order(parts)), f"{kind}, {rows} x {n}"
        for tp in range(2, world.size):          # replicas that span nodes beside others that do not
            replica = world.split(tp, world.size // tp, wire="bf16")
            if replica is not None:
                parts = parts_of(5000, tp).copy()
                x = parts[replica.rank].copy()
                replica.all_reduce(x)
                wire.round_rows(world.wire, parts)
                assert bits(x) == bits(in_rank_order(parts))
    finally:
        del os.environ[launch.FAKE_NODES]
    assert world.split(world.size, 1, wire="bf16").exchange_arguments() and world.wire == "f32"


def run(argv: list[str] | None) -> int:
    world = collectives.start()
    assert collectives.start() is world is collectives.current()
    if argv and argv[0] == "lanes":
        kernels.set_threads(2)                  # before the first kernel
    for turn in (0, 1):                         # one rank compiles, the others find it in the cache
        if (world.node_rank > 0) == turn:
            warm_up()
        world.barrier_quiet()
    if argv and argv[0] == "lanes":             # two threads a rank: each exchanges its own rows
        world._threads, world.crowded = 2, True
        replica = world.split(world.size, 1)
        assert replica._group.segment.lanes == 2
        sums(replica), fused(replica), long_sum(replica), small_arrays(replica)
        kv_exchange(replica, 9, 3, 64, 300)
        if world.rank == 0:
            print("all exchanges are right")
        return 0
    if argv and argv[0] == "nodes":
        over_nodes(world, argv[1])
        if world.rank == 0:
            print("all exchanges are right")
        return 0
    agreement(world)
    objects(world)
    placed(world)
    full = "full" in (argv or ())
    if full:                                    # more bytes are asked for than there are
        reserve = os.posix_fallocate
        segment.os.posix_fallocate = lambda descriptor, begin, n: reserve(descriptor, begin, 1 << 60)
    for shared in (False,) if full else (True, False):
        replica = world.split(world.size, 1, shared=shared or full)
        assert (replica.tp, replica.dp, replica.index, replica.rank) == (world.size, 1, 0, world.rank)
        assert replica.shared_memory == (shared and world.size > 1), "no shared memory on one node"
        sums(replica)
        fused(replica)
        assert replica.seconds > 0 or world.size == 1
        long_sum(replica)
        small_arrays(replica)
        for heads, kv in ((1, 1), (2, 1), (3, 1), (9, 3), (14, 2), (8, 8), (32, 8), (7, 1), (12, 4), (6, 6)):
            kv_exchange(replica, heads, kv, 5, 4)
            kv_exchange(replica, heads, kv, 5, 4, "sharded")
        kv_exchange(replica, 9, 3, 64, 300)     # more rows than a slot takes at once
        kv_exchange(replica, 4, 1, 65536, 2)    # a row of columns larger than a slot
        kv_exchange(replica, 4, 1, 65536, 2, "sharded")
    sums(world.split(world.size, 1, mode="mpi"))
    fused(world.split(world.size, 1, mode="mpi"))
    for tp in range(1, world.size + 1):         # replicas side by side, ranks left over
        dp = world.size // tp
        replica = world.split(tp, dp)
        assert (replica is None) == (world.rank >= tp * dp)
        if replica is not None:
            assert (replica.index, replica.rank) == divmod(world.rank, tp)
            x = np.full(3, 1.0 + world.rank, np.float32)
            replica.all_reduce(x)
            assert x[0] == sum(1 + replica.index * tp + r for r in range(tp))
    try:
        world.split(world.size + 1, 1)
    except UsageError:
        pass
    else:
        raise AssertionError("more ranks than there are")
    world.barrier_quiet()
    if world.rank == 0:
        print("all exchanges are right")
    return 0


if __name__ == "__main__":
    sys.exit(main.main(sys.argv[1:], run))
