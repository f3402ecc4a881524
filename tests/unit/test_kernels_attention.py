"""Attention over the block cache against its twin; poison, windows, groups; one order for all batches."""

import direct
import naive
import numpy as np
import pytest

from mpillm import kernels
from mpillm.errors import UsageError
from mpillm.jit import policy

POISON = {"f32": np.float32(np.nan), "f16": np.int16(0x7E00), "bf16": np.uint16(0x7FC0)}
NUMBERS = tuple(POISON)


class Setting:
    """Some sequences of given lengths, their K and V written to blocks in a shuffled order."""

    def __init__(self, kv_type, groups, size, lengths, seed=0, factor=1.0):
        rng = np.random.default_rng(seed)
        self.kv_type, self.size, self.lengths = kv_type, size, lengths
        self.stops = np.cumsum(groups).astype(np.int32)
        self.starts = (self.stops - groups).astype(np.int32)
        heads = len(groups)
        blocks = [-(-n // 64) for n in lengths]
        order = rng.permutation(sum(blocks) + 2).astype(np.int32)
        self.table = np.full((len(lengths), max(blocks)), -1, np.int32)
        for s, count in enumerate(blocks):
            self.table[s, :count], order = order[:count], order[count:]
        self.k_cache, self.v_cache = kernels.allocate_cache(kv_type, sum(blocks) + 2, heads, size)
        for cache in (self.k_cache, self.v_cache):
            cache.view(np.int16 if kv_type == "q8_0" else cache.dtype)[...] = POISON.get(kv_type, POISON["f16"])
        self.keys = [rng.standard_normal((n, heads, size), dtype=np.float32) for n in lengths]
        self.keys = [keys * np.float32(factor) for keys in self.keys]
        self.values = [rng.standard_normal((n, heads, size), dtype=np.float32) for n in lengths]
        rows = [(s, p) for s, n in enumerate(lengths) for p in range(n)]
        rows = np.array([rows[i] for i in rng.permutation(len(rows))], np.int32)
        k = np.stack([self.keys[s][p].ravel() for s, p in rows])
        v = np.stack([self.values[s][p].ravel() for s, p in rows])
        direct.cache_write(self.k_cache, self.v_cache, kv_type, k, v, rows[:, 0].copy(), rows[:, 1].copy(), self.table)
        self.queries = [rng.standard_normal((n, self.stops[-1] * size), dtype=np.float32) for n in lengths]

    def run(self, rows, window=0):
        rows = np.array(rows, np.int32)
        q = np.stack([self.queries[s][p] for s, p in rows])
        return direct.attention(q, self.k_cache, self.v_cache, self.kv_type, self.starts, self.stops,
                                 rows[:, 0].copy(), rows[:, 1].copy(), self.table, self.size ** -0.5, window)

    def expected(self, rows, window=0):
        q = np.stack([self.queries[s][p] for s, p in rows])
        scaled = (q * np.float32(self.size ** -0.5)).reshape(len(q), -1, self.size)
        scaled, _ = naive.attention_rounding(scaled, self.kv_type, self.kv_type, self.size, window)
        held = [[naive.round_to(self.kv_type, x) for x in side] for side in (self.keys, self.values)]
        return naive.attention(scaled.reshape(q.shape), *held, self.starts, self.stops, [s for s, _ in rows],
                               [p for _, p in rows], 1, window)

    def check(self, rows, window=0):
        tolerance = naive.attention_rounding(self.queries[0][:1, :self.size], self.kv_type, self.kv_type, self.size)[1]
        np.testing.assert_allclose(self.run(rows, window), self.expected(rows, window), rtol=0, atol=tolerance)
        return tolerance


@pytest.mark.parametrize("kv_type", NUMBERS)
@pytest.mark.parametrize("groups, size", [((3, 3, 3), 64), ((1, 1), 16), ((4,), 24), ((7,), 80), ((8,), 128),
                                          ((32,), 18), ((1, 3, 2), 64), ((2, 0, 1), 32)])
def test_attention_equals_its_twin(kv_type, groups, size):
    setting = Setting(kv_type, groups, size, [1, 64, 65, 130, 211])
    rows = [(0, 0), (1, 63), (2, 64), *((3, p) for p in range(50, 130)), (4, 7), (4, 210), (4, 209), (4, 128)]
    setting.check(rows)


@pytest.mark.parametrize("kv_type", NUMBERS)
@pytest.mark.parametrize("window", [1, 2, 17, 64, 65, 100, 1000])
def test_window(kv_type, window):
    setting = Setting(kv_type, (2, 1), 32, [200, 100])
    rows = [*((0, p) for p in range(90, 200)), (1, 99), (1, 0), (0, 64)]
    setting.check(rows, window)


@pytest.mark.parametrize("kv_type", kernels.KV_TYPES)
@pytest.mark.parametrize("window", [0, 33, 70])
def test_bits_of_a_row_do_not_depend_on_the_batch_chunks_or_threads(kv_type, window, monkeypatch):
    setting = Setting(kv_type, (3, 4, 7), 64 if kv_type == "q8_0" else 48, [150, 70, 200])
    rows = [(s, p) for s, n in enumerate(setting.lengths) for p in range(n)]
    monkeypatch.setattr(policy._Threads, "count", 1)
    alone = {row: setting.run([row], window)[0] for row in rows}
    shuffled = [rows[i] for i in np.random.default_rng(1).permutation(len(rows))]
    for parts in (1, 2, 3):
        monkeypatch.setattr(policy._Threads, "count", parts)
        for order, count in ((rows, 2), (rows, 7), (rows, 16), (rows, 33), (rows, 420), (shuffled, 33)):
            for start in range(0, len(order), count):
                batch = order[start:start + count]
                got = setting.run(batch, window)
                for row, result in zip(batch, got, strict=True):
                    same = np.array_equal(result.view(np.uint32), alone[row].view(np.uint32))
                    assert same, (parts, count, row)


@pytest.mark.parametrize("kv_type", NUMBERS)
def test_positions_outside_are_never_read(kv_type):
    """Poison all that a row may not see: positions after it, before its window, and other blocks."""
    setting = Setting(kv_type, (3, 1), 20, [130])
    window, position = 45, 101
    pair = 2 if kv_type == "bf16" else 1
    for p in [*range(position - window + 1), *range(position + 1, 130)]:
        block, within = setting.table[0, p // 64], p % 64
        setting.k_cache[block, :, within // 16, :, within % 16] = POISON[kv_type]
        where = (within // pair, slice(None)) + ((within % pair,) if pair == 2 else ())
        setting.v_cache[(block, slice(None), slice(None), *where)] = POISON[kv_type]
    setting.check([(0, position)], window)


def test_huge_scores_are_stable():
    for factor in (1e4, 1e15, 1e30):
        setting = Setting("f32", (2,), 64, [130], factor=factor)
        rows = [(0, p) for p in (0, 63, 64, 129)]
        got = setting.run(rows)
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, setting.expected(rows), rtol=0, atol=2e-2)


def test_nan_in_a_query_stays_in_its_row():
    setting = Setting("bf16", (2,), 16, [80])
    setting.queries[0][40, 3] = np.nan
    got = setting.run([(0, 39), (0, 40), (0, 41)])
    assert np.isnan(got[1, :16]).all() and np.isfinite(got[[0, 2]]).all() and np.isfinite(got[1, 16:]).all()


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_the_cache_cannot_hold_is_nan_and_never_infinite(kv_type, where):
    """Row 1 of head 0 has a value that is too large: it and all that attends to it is NaN, the others are not."""
    k_cache, v_cache = kernels.allocate_cache(kv_type, 1, 2, 16)
    given = {name: np.ones((3, 32), np.float32) for name in "kv"}
    given[where][1, 5] = {"f16": 65520, "bf16": 3.4e38, "f32": np.inf}[kv_type]
    zero, positions, table = np.zeros(3, np.int32), np.arange(3, dtype=np.int32), np.zeros((1, 1), np.int32)
    direct.cache_write(k_cache, v_cache, kv_type, given["k"], given["v"], zero, positions, table)
    infinite = {"f16": (0x7C00, 0xFC00), "bf16": (0x7F80, 0xFF80), "f32": (np.inf, -np.inf)}[kv_type]
    for cache in (k_cache, v_cache):
        words = cache.view(np.uint16) if kv_type != "f32" else cache
        assert not np.isin(words, infinite).any()
    starts = np.arange(2, dtype=np.int32)
    got = direct.attention(np.ones((3, 32), np.float32), k_cache, v_cache, kv_type, starts, starts + 1, zero, positions,
                           table, 0.25)
    assert np.isnan(got[1:, :16]).all() and np.array_equal(got[0], np.ones(32)) and (got[:, 16:] == 1).all()


@pytest.mark.parametrize("kv_type", kernels.KV_TYPES)
@pytest.mark.parametrize("window", [0, 700])
def test_stretches_of_positions_are_merged_alike_by_one_thread_and_by_many(kv_type, window, monkeypatch):
    setting = Setting(kv_type, (2, 3), 32, [1700, 40, 600])
    rows = [(0, 1699), (0, 511), (0, 512), (0, 1300), (0, 1301), (1, 39), (2, 599)]
    monkeypatch.setattr(policy._Threads, "count", 1)
    setting.check(rows, window)
    alone = [setting.run([row], window)[0] for row in rows]
    for threads in (2, 3, 5):
        monkeypatch.setattr(policy._Threads, "count", threads)
        for count in (1, 2, 7):
            for start in range(0, len(rows), count):
                got = setting.run(rows[start:start + count], window)
                assert np.array_equal(got.view(np.uint32), np.array(alone[start:start + count]).view(np.uint32))


def test_rows_of_wider_arrays_are_taken_as_they_are():
    setting = Setting("f16", (2, 2), 16, [70])
    rows = np.array([(0, 10), (0, 69)], np.int32)
    q = np.stack([setting.queries[0][p] for _, p in rows])
    qkv = np.concatenate([np.full((2, 5), np.nan, np.float32), q, np.full((2, 3), np.nan, np.float32)], 1)
    got = direct.attention(qkv[:, 5:-3], setting.k_cache, setting.v_cache, "f16", setting.starts,
                            setting.stops, rows[:, 0].copy(), rows[:, 1].copy(), setting.table, 0.25)
    assert np.array_equal(got, setting.run(rows))


def test_a_missing_block_is_told_not_read():
    setting = Setting("bf16", (1,), 16, [64, 128])
    with pytest.raises(AssertionError, match="no block"):
        setting.queries[0] = np.zeros((200, 16), np.float32)
        setting.run([(0, 64)])
    x, position = np.zeros((1, 16), np.float32), np.array([64], np.int32)
    with pytest.raises(AssertionError, match="no block"):
        direct.cache_write(setting.k_cache, setting.v_cache, "bf16", x, x, np.zeros(1, np.int32), position,
                            setting.table)
    with pytest.raises(AssertionError, match="no block"):
        direct.cache_write(setting.k_cache, setting.v_cache, "bf16", x, x, np.zeros(1, np.int32),
                            position * 2, setting.table)
    with pytest.raises(AssertionError, match="heads"):
        kernels.Heads(16, 1, setting.starts, setting.stops + 1)


@pytest.mark.parametrize("groups, size", [((3, 3, 3), 64), ((1, 1), 32), ((8,), 128), ((2, 0, 1), 96)])
def test_q8_0_attention_equals_its_twin(groups, size):
    """Queries are rounded like the keys; positions beyond a row's hold scales of NaN that are never used."""
    setting = Setting("q8_0", groups, size, [1, 64, 65, 130, 211])
    rows = [(0, 0), (1, 63), (2, 64), *((3, p) for p in range(50, 130)), (4, 7), (4, 210), (4, 209), (4, 128)]
    for window in (0, 17, 100):
        setting.check(rows, window)


def test_q8_0_needs_blocks_of_32_and_holds_no_infinities():
    with pytest.raises(UsageError, match="blocks of 32, this model's are 24: use bf16"):
        kernels.cache_shape("q8_0", 1, 1, 24)
    k_cache, v_cache = kernels.allocate_cache("q8_0", 1, 1, 32)
    k, v = np.ones((3, 32), np.float32), np.ones((3, 32), np.float32)
    k[1, 3], v[2, 4] = 1e9, np.inf
    zero, positions, table = np.zeros(3, np.int32), np.arange(3, dtype=np.int32), np.zeros((1, 1), np.int32)
    direct.cache_write(k_cache, v_cache, "q8_0", k, v, zero, positions, table)
    start = np.zeros(1, np.int32)
    got = direct.attention(k[:1].repeat(3, 0), k_cache, v_cache, "q8_0", start, start + 1, zero, positions, table, 0.2)
    assert np.isfinite(got[0]).all() and np.isnan(got[1:]).all()


@pytest.mark.parametrize("kv_type", kernels.KV_TYPES)
@pytest.mark.parametrize("size", [32, 64, 128])
def test_cache_bytes_are_those_of_its_arrays(kv_type, size):
    k, v = kernels.allocate_cache(kv_type, 5, 3, size)
    assert k.nbytes + v.nbytes == 5 * kernels.cache_block_nbytes(kv_type, 3, size)
    assert k.ctypes.data % 64 == 0 and v.ctypes.data % 64 == 0
    with pytest.raises(UsageError, match="kv-type"):
        kernels.cache_shape("q4_0", 1, 1, size)


def test_no_heads_or_rows_give_nothing():
    k, v = kernels.allocate_cache("bf16", 2, 0, 16)
    none, table = np.zeros(0, np.int32), np.zeros((1, 1), np.int32)
    row = np.zeros(1, np.int32)
    nothing = np.zeros((1, 0), np.float32)
    assert direct.attention(nothing, k, v, "bf16", none, none, row, row, table, 1.0).shape == (1, 0)
    k, v = kernels.allocate_cache("bf16", 2, 1, 16)
    one = np.ones(1, np.int32)
    empty = np.zeros((0, 16), np.float32)
    assert direct.attention(empty, k, v, "bf16", 0 * one, one, none, none, table, 1.0).shape == (0, 16)
