"""Exchanges over shared memory. The ranks are threads here, each with a mapping and a state of its own."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import direct
import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm.errors import ExchangeError
from mpillm.jit import exchange, policy
from mpillm.jit.isa import atomics
from mpillm.machine import segment
from mpillm.machine.segment import NOTHING, Segment
from mpillm.machine.swap import Part, Swap

EPS = 1e-5


def together(tmp_path, ranks, lanes, act, crowded=True):
    """[act(segment of the rank, rank)] of threads that act as the ranks; what one raises is raised."""
    first, path = Segment.create(ranks, lanes, crowded, str(tmp_path))
    made = [first] + [Segment.attach(path, ranks, rank, lanes, crowded) for rank in range(1, ranks)]
    os.unlink(path)
    results, errors = [None] * ranks, []

    def one(rank):
        try:
            made[rank].set_timeout(60)
            results[rank] = act(made[rank], rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def unlike(shape, *seed):
    """Values of very unlike magnitudes: any other order of a sum shows in its bits."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(shape).astype(np.float32)
    return np.ldexp(values, generator.integers(-12, 13, shape)).astype(np.float32)


def in_rank_order(parts):
    total = parts[0].copy()
    for part in parts[1:]:
        total = total + part
    return total


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(1, 5), lanes=st.integers(1, 3), slot=st.sampled_from((4096, 8192, 256 * 1024)),
       rows=st.integers(1, 9), n=st.sampled_from((1, 15, 16, 64, 576, 1000, 3001)), biased=st.booleans(),
       normed=st.booleans(), seed=st.integers(0, 99))
def test_sums_add_the_residual_and_norm_in_one_pass(tmp_path_factory, ranks, lanes, slot, rows, n, biased, normed,
                                                    seed):
    parts = unlike((2, ranks, rows, n), seed)
    x, bias, weight = unlike((rows, n), seed, 1), unlike(n, seed, 2), unlike(n, seed, 3)

    def act(memory, rank):
        mine, out, turns = x.copy(), np.full_like(x, 7), []
        for step in parts:
            y = step[rank].copy()
            memory.reduce_rows(y, mine, bias if biased else NOTHING, weight if normed else NOTHING, out, EPS)
            assert y.tobytes() == step[rank].tobytes(), "y is only read"
            turns.append((mine.tobytes(), out.tobytes()))
        return turns

    old, segment.SLOT_LIMIT = segment.SLOT_LIMIT, slot
    try:
        got = together(tmp_path_factory.mktemp("s"), ranks, lanes, act)
    finally:
        segment.SLOT_LIMIT = old
    wanted, turns = x.copy(), []
    for step in parts:
        total = in_rank_order(step)
        wanted = wanted + (total + bias if biased else total)
        norm = direct.rms_norm(wanted, weight, EPS) if normed else np.full_like(x, 7)
        turns.append((wanted.tobytes(), norm.tobytes()))
    assert all(result == turns for result in got)


@pytest.mark.parametrize("ranks, lanes, n", [(2, 1, 1), (3, 2, 4096), (3, 2, 4097), (2, 3, 200_001), (5, 1, 70_000),
                                             (5, 2, 300_000), (7, 1, 65_537)])
def test_plain_sums_whichever_way_they_go(tmp_path, ranks, lanes, n):
    """5 ranks of 256 KiB are above DIRECT_LIMIT: each adds a share."""
    parts = unlike((ranks, n), ranks, n)

    def act(memory, rank):
        x = parts[rank].copy()
        memory.all_reduce(x)
        return x.tobytes()

    assert set(together(tmp_path, ranks, lanes, act)) == {in_rank_order(parts).tobytes()}


@pytest.mark.parametrize("n", [0, 1, 4095, 4096, 4097, 20_000])
def test_bytes_are_gathered_and_told(tmp_path, n, monkeypatch):
    monkeypatch.setattr(segment, "SLOT_LIMIT", 4096)
    data = np.random.default_rng(n).integers(0, 256, (3, n)).astype(np.uint8)

    def act(memory, rank):
        for _ in range(3):
            got = memory.gather(data[rank])
            assert (got is None) == (rank > 0) and (got is None or np.array_equal(got, data))
            told = data[rank].copy()
            memory.bcast(told)
            assert np.array_equal(told, data[0])

    together(tmp_path, 3, 2, act)


@st.composite
def swaps(draw):
    """Ranks, and up to three arrays: who has which of their columns, and who wants which."""
    ranks, made = draw(st.integers(1, 5)), []
    for _ in range(draw(st.integers(1, 3))):
        total, stacked = draw(st.integers(0, 40)), draw(st.booleans())
        cuts = sorted(draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
        owned = [(0, total)] * ranks if stacked else list(zip([0, *cuts], [*cuts, total], strict=True))
        ends = [sorted(draw(st.tuples(st.integers(0, total), st.integers(0, total)))) for _ in range(ranks)]
        wanted = [(0, total)] * ranks if draw(st.booleans()) else [tuple(pair) for pair in ends]
        made.append(Part(tuple(owned), tuple(wanted), stacked))
    return ranks, made


@settings(max_examples=60, deadline=None)
@given(swaps(), st.integers(1, 3), st.sampled_from([64, 256, 4096]), st.sampled_from([1, 2, 130]))
def test_columns_go_where_they_are_wanted(tmp_path_factory, planned, lanes, slot, rows):
    """Rows may be wider than a slot, arrays parts of wider ones."""
    ranks, parts = planned
    values = [unlike((ranks, rows, max(high for _, high in part.owned)), i) for i, part in enumerate(parts)]

    def act(memory, rank):
        swap = Swap(SimpleNamespace(rank=rank, size=ranks, segment=memory), parts, exchange.KV)
        given_ = [x[rank][:, part.owned[rank][0]:part.owned[rank][1]] for x, part in zip(values, parts, strict=True)]
        for turn in range(2):
            out = [np.full((rows, n + turn), np.nan, np.float32)[:, :n] for n in swap.got]
            swap.run(given_, out)
            for x, part, got in zip(values, parts, out, strict=True):
                low, high = part.wanted[rank]
                if part.stacked:
                    expected = np.concatenate([x[other][:, low:high] for other in range(ranks)], axis=1)
                else:
                    owner = [next(r for r in range(ranks) if part.owned[r][0] <= c < part.owned[r][1])
                             for c in range(low, high)]
                    expected = np.array([x[r][:, c] for c, r in zip(range(low, high), owner, strict=True)]).T
                assert got.tobytes() == expected.tobytes() or not got.size

    least, most = segment.SLOT_LEAST, segment.SLOT_LIMIT
    segment.SLOT_LEAST = segment.SLOT_LIMIT = slot
    try:
        together(tmp_path_factory.mktemp("s"), ranks, lanes, act)
    finally:
        segment.SLOT_LEAST, segment.SLOT_LIMIT = least, most


def test_columns_that_nobody_has_are_noticed():
    group = SimpleNamespace(rank=0, size=2, segment=None)
    with pytest.raises(AssertionError, match="2 columns that no rank has"):
        Swap(group, [Part(((0, 3), (5, 9)), ((0, 9), (0, 9)))], exchange.KV)


def test_a_rank_that_does_not_come_is_named(tmp_path):
    exchange.warm_up()
    first, path = Segment.create(3, 1, False, str(tmp_path))
    second = Segment.attach(path, 3, 1, 1, False)
    os.unlink(path)
    first.names = ["rank 4 (host n0)", "rank 5 (host n0)", "rank 6 (host n1)"]
    first.set_timeout(0.3), second.set_timeout(60)
    x = np.ones(5, np.float32)
    helper = threading.Thread(target=lambda: pytest.raises(ExchangeError, second.all_reduce, x.copy()))
    helper.start()
    began = time.monotonic()
    with pytest.raises(ExchangeError, match=r"^rank 4 waited 0.3 s for rank 6 \(host n1\) in an all-reduce: it is"):
        first.all_reduce(x.copy())
    assert 0.25 < time.monotonic() - began < 5
    assert first.waited >= 0.25 and first.spent <= first.waited, "an exchange that failed is not counted as done"
    began = time.monotonic()
    for exchange_again in (lambda: first.gather(x.view(np.uint8)), lambda: first.bcast(x.view(np.uint8)),
                           first.meet, lambda: first.all_reduce(x)):
        with pytest.raises(ExchangeError, match="rank 6"):
            exchange_again()
    assert time.monotonic() - began < 0.2, "after a failure nothing waits again"
    second.set_timeout(0)
    helper.join(20)
    assert not helper.is_alive()


@pytest.mark.parametrize("doing, words", [(exchange.KV, "an exchange of K and V"),
                                          (exchange.MERGE, "a merge of attention's parts")])
def test_a_rank_that_does_not_come_to_a_swap_is_named(tmp_path, doing, words):
    first, path = Segment.create(2, 1, False, str(tmp_path))
    second = Segment.attach(path, 2, 1, 1, False)
    os.unlink(path)
    first.set_timeout(0.2)
    group = SimpleNamespace(rank=0, size=2, segment=first)
    swap = Swap(group, [Part(((0, 3), (3, 5)), ((0, 5), (0, 5)))], doing)
    with pytest.raises(ExchangeError, match=f"^rank 0 waited 0.2 s for rank 1 in {words}: it is"):
        swap.run([np.ones((4, 3), np.float32)], [np.zeros((4, 5), np.float32)])
    assert second.waited == 0


def test_waits_are_counted(tmp_path):
    def act(memory, rank):
        x = np.ones(3, np.float32)
        memory.all_reduce(x)              # the kernel is there
        before = memory.waited
        if rank:
            time.sleep(0.3)
        memory.all_reduce(x)
        return memory.waited - before

    patient, late = together(tmp_path, 2, 1, act, crowded=False)
    assert 0.2 < patient < 2 and late < 0.2


def test_one_rank_alone_sums_its_own_parts():
    alone = Segment.alone(2)
    y, x, out = unlike((3, 4, 33), 1)
    expected = x + y
    alone.reduce_rows(y, x, NOTHING, NOTHING, out, EPS)
    assert x.tobytes() == expected.tobytes() and alone.waited == 0


def test_calls_can_be_timed(tmp_path):
    times = together(tmp_path, 2, 1, lambda memory, rank: memory.time_reduce(3, 576, 50))
    assert all(t.shape == (50,) and (t > 0).all() for t in times)


@numba.njit(nogil=True)
def _count(words, times, done):
    for _ in range(times):
        atomics.fetch_add(words, 1, 1)
        atomics.pause()
    atomics.store_release(done, 0, atomics.load_acquire(done, 0) + 5)
    atomics.yield_core()
    before = atomics.clock_ns()
    atomics.nap(2000)
    return atomics.clock_ns() - before


def test_atomic_words():
    words, done = np.zeros(3, np.int64), np.zeros((4, 1), np.int64)
    naps = [0] * 4

    def one(i):
        naps[i] = _count(words, 100_000, done[i])

    _count(words, 0, np.zeros(1, np.int64))
    threads = [threading.Thread(target=one, args=(i,)) for i in range(4)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert words.tolist() == [0, 400_000, 0] and (done == 5).all()
    assert all(2e6 <= slept < 2e9 for slept in naps), "2 ms by the clock"


def test_the_segment_and_the_kernels_mean_the_same_places():
    assert policy.threads() >= 1 and exchange.DOINGS[exchange.ALL_REDUCE] == "an all-reduce"
    assert len({exchange.STATUS, exchange.MISSING, exchange.LANE, exchange.DOING, exchange.RANKS, exchange.RANK,
                exchange.LANES, exchange.SLOT, exchange.SPINS, exchange.YIELDS, exchange.DEADLINE}) == 11
    words = segment.Segment.alone(3).arguments[2]
    assert words.ctypes.data % segment.LINE == 0 and words.size == exchange.HEADER + 3 * exchange.LINE
    assert exchange.DEADLINE < exchange.HEADER and segment.LINE == 8 * exchange.LINE
