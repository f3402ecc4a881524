"""Attention over keys and values of other types and widths than each other, latent values, shards, bounded scratch."""

import itertools

import numpy as np
import pytest
from naive import attention_rounding, round_to

from mpillm import kernels
from mpillm.errors import UsageError
from mpillm.jit import attention, policy
from mpillm.jit.attention import SPAN, STRETCH
from mpillm.jit.block_steps import block_step

NOTHING = np.zeros(0, np.int64)
TOLERANCE = 3e-6


class Setting:
    """Sequences whose keys and values stand in blocks; ``latent``: values are the first columns of the keys.

    ``firsts`` and ``shard``: the cache holds a place's share of the blocks.
    """

    def __init__(self, types, groups, size, value_dim, lengths, latent=False, shard=(0, 1), firsts=None, seed=0):
        rng = np.random.default_rng(seed)
        stops = np.cumsum(groups).astype(np.int32)
        self.heads = kernels.Heads(size, int(stops[-1]), (stops - groups).astype(np.int32), stops, value_dim)
        self.types, self.latent, self.lengths, n_kv = types, latent, lengths, len(groups)
        self.first = np.zeros(len(lengths), np.int32) if firsts is None else np.array(firsts, np.int32)
        self.keys = [rng.standard_normal((n, n_kv, size), dtype=np.float32) for n in lengths]
        self.values = [rng.standard_normal((n, n_kv, value_dim), dtype=np.float32) for n in lengths]
        self.queries = [rng.standard_normal((n, self.heads.n_heads * size), dtype=np.float32) for n in lengths]
        blocks = [-(-n // 64) for n in lengths]
        self.table = np.full((len(lengths), max(blocks)), -1, np.int32)
        held = [(s, b) for s, n in enumerate(blocks) for b in range(n) if (self.first[s] + b) % shard[1] == shard[0]]
        for (s, b), number in zip(held, rng.permutation(len(held)), strict=True):
            self.table[s, b] = number
        k, v = kernels.allocate_cache(types[0], max(1, len(held)), n_kv, size, types[1], 0 if latent else value_dim)
        for array, kind in ((k, types[0]), (v, types[1])):
            if array is not None:           # positions that are never written hold NaN
                words = array.view(np.int16) if kind == "q8_0" else array
                words[...] = {"f32": np.nan, "bf16": np.uint16(0x7FC0)}.get(kind, np.int16(0x7E00))
        self.cache = kernels.LayerCache(k, v, *types, shard)
        self._write([(s, p) for s, n in enumerate(lengths) for p in range(n)])

    def _write(self, places):
        k, v = (np.stack([side[s][p].ravel() for s, p in places]) for side in (self.keys, self.values))
        plan = kernels.Plan(len(places))
        plan.cache_write(k, None if self.latent else v, self.heads, self.cache)
        plan.run(self._rows(places), NOTHING)

    def _rows(self, places):
        rows, none = np.array(places, np.int32), np.zeros((len(places), 0), np.float32)
        return kernels.Rows(np.zeros(len(rows), np.int64), rows[:, 1].copy(), rows[:, 0].copy(), self.table, none, none,
                            self.first)

    def run(self, places, window=0, scratch=kernels.SCRATCH):
        """(out, lse) of these rows."""
        q = np.stack([self.queries[s][p] for s, p in places])
        out = np.full((len(places), self.heads.n_heads * self.heads.value_dim), np.nan, np.float32)
        lse = np.full((len(places), self.heads.n_heads), np.nan, np.float32)
        plan = kernels.Plan(len(places), scratch=scratch)
        plan.attention(q, self.heads, self.cache, self.heads.head_dim ** -0.5, window, out, lse)
        plan.run(self._rows(places), NOTHING)
        return out, lse

    def expected(self, places, window=0):
        """The same from what the types hold, in float64; queries of keys in codes are rounded like the keys."""
        heads = self.heads
        size, width = heads.head_dim, heads.value_dim
        keys = [round_to(self.types[0], x).astype(np.float64) for x in self.keys]
        values = [x[:, :, :width] for x in keys] if self.latent else [
            round_to(self.types[1], x).astype(np.float64) for x in self.values]
        out, lse = np.zeros((len(places), heads.n_heads * width)), np.zeros((len(places), heads.n_heads))
        for m, (s, p) in enumerate(places):
            first = max(0, p - window + 1) if window else 0
            scaled = self.queries[s][p].reshape(-1, size) * np.float32(size ** -0.5)
            scaled, _ = attention_rounding(scaled, *self.types, width, window)
            for j, (start, stop) in enumerate(zip(heads.starts, heads.stops, strict=True)):
                for head in range(start, stop):
                    scores = keys[s][first:p + 1, j] @ scaled[head].astype(np.float64)
                    share = np.exp(scores - scores.max())
                    out[m, head * width:][:width] = share @ values[s][first:p + 1, j] / share.sum()
                    lse[m, head] = scores.max() + np.log(share.sum())
        return out, lse

    def check(self, places, window=0):
        scaled = self.queries[0][:1, :self.heads.head_dim]
        tolerance = attention_rounding(scaled, *self.types, self.heads.value_dim, window)[1]
        for got, wanted in zip(self.run(places, window), self.expected(places, window), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance)


def bits(arrays):
    return [array.view(np.uint32) for array in arrays]


ROWS = [(0, 0), (1, 63), (1, 64), *((2, p) for p in range(60, 80)), (2, 7), (2, 210), (2, 209), (2, 128)]


# A pair's kernels take ten seconds to compile: each type is with itself and some others here, all pairs are in test-all
PAIRS = [pytest.param(k, v, marks=() if (i - j) % 4 < 2 or "q8_0" in (k, v) and "f32" in (k, v) else pytest.mark.slow)
         for i, k in enumerate(kernels.KV_TYPES) for j, v in enumerate(kernels.KV_TYPES)]


@pytest.mark.parametrize("k_type, v_type", PAIRS)
def test_every_pair_of_types_and_widths_equals_its_twin(k_type, v_type, monkeypatch):
    for size, value_dim in ((64, 32), (32, 96)):
        setting = Setting((k_type, v_type), (3, 2), size, value_dim, [1, 100, 211])
        for threads, window in ((1, 0), (2, 70)):
            monkeypatch.setattr(policy._Threads, "count", threads)
            setting.check(ROWS, window)


@pytest.mark.parametrize(("size", "value_dim"), [(48, 32), (20, 8), (18, 40), (192, 128)])
def test_widths_apart_in_numbers(size, value_dim):
    for types in (("f32", "bf16"), ("bf16", "f16"), ("f16", "f32")):
        Setting(types, (1, 4), size, value_dim, [1, 100, 211]).check(ROWS, 33)


@pytest.mark.parametrize("kv_type", kernels.KV_TYPES)
@pytest.mark.parametrize("heads", [1, 3, 16, 40])
def test_a_latent_is_keys_and_values_at_once(kv_type, heads, monkeypatch):
    """40 heads are more than a tile takes: they go through the cache in parts."""
    setting = Setting((kv_type, ""), (heads,), 576, 512, [1, 100, 211], latent=True)
    for threads, window in ((1, 0), (2, 70)):
        monkeypatch.setattr(policy._Threads, "count", threads)
        setting.check(ROWS[2:8] if heads > 3 else ROWS, window)


@pytest.mark.parametrize(("size", "value_dim"), [(48, 32), (56, 48), (28, 24), (20, 16), (40, 40), (34, 2)])
def test_latents_of_any_width(size, value_dim):
    for kv_type in ("f32", "f16", "bf16"):
        Setting((kv_type, ""), (5, 2), size, value_dim, [1, 100, 211], latent=True).check(ROWS, 90)


def test_a_latent_gives_what_a_second_copy_gives():
    """Bit for bit where sums have one order: values from the keys, and values in blocks of their own."""
    for kv_type in ("f32", "f16", "bf16", "q8_0"):
        one = Setting((kv_type, ""), (3,), 96, 64, [300], latent=True)
        two = Setting((kv_type, kv_type), (3,), 96, 64, [300])
        two.values = [keys[:, :, :64] for keys in two.keys]
        two._write([(0, p) for p in range(300)])
        places = [(0, 299), (0, 130), (0, 131)]
        for got, wanted in zip(one.run(places), two.run(places), strict=True):
            if attention.by_tiles(kv_type, "", 96, 64, 0):
                np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6)
            else:
                assert np.array_equal(got.view(np.uint32), wanted.view(np.uint32)), kv_type


FORMS = {"apart": dict(groups=(3, 30), size=64, value_dim=96), "latent": dict(groups=(30,), size=64, value_dim=32,
                                                                               latent=True)}


@pytest.mark.parametrize("types", [("f32", "bf16"), ("bf16", "f32"), ("q8_0", "q8_0")])
@pytest.mark.parametrize("form", FORMS)
def test_bits_of_a_row_depend_on_nothing_beside_it(form, types, monkeypatch):
    """Neither on the batch, nor on threads, nor on how positions were split for them and for their room."""
    setting = Setting((types[0], "" if form == "latent" else types[1]), lengths=[SPAN * STRETCH + 700, 40, 600],
                      **FORMS[form])
    rows = [(0, SPAN * STRETCH + 699), (0, 511), (0, 512), (0, SPAN * STRETCH), (0, SPAN * STRETCH + 1), (1, 39),
            (2, 599)]
    for window in (0, 700):
        monkeypatch.setattr(policy._Threads, "count", 1)
        alone = [[part[0] for part in setting.run([row], window)] for row in rows]
        # 24 heads take 4 * 24 * 98 bytes a stretch at least: one stretch each, spans of them, and no split
        for threads, scratch in ((2, 1 << 26), (3, 1 << 26), (8, 900_000), (2, 50_000), (2, 1)):
            monkeypatch.setattr(policy._Threads, "count", threads)
            for count in (1, 2, 7):
                for start in range(0, len(rows), count):
                    got = setting.run(rows[start:start + count], window, scratch)
                    for m, wanted in enumerate(alone[start:start + count]):
                        for a, b in zip(got, wanted, strict=True):
                            np.testing.assert_array_equal(a[m].view(np.uint32), b.view(np.uint32),
                                                          f"{window, threads, scratch, count, start + m}")


def test_scratch_is_used_within_its_bounds():
    """The plan's own room: of single stretches, of spans, or none; it never passes the bound."""
    setting = Setting(("bf16", ""), (16,), 64, 32, [3 * SPAN * STRETCH], latent=True)
    each = 4 * 16 * 34
    before = policy._Threads.count
    try:
        policy._Threads.count = 2
        for scratch, wanted in ((1 << 26, 3 * SPAN * each), (3 * SPAN * each, 3 * SPAN * each),
                                (3 * SPAN * each - 1, 3 * each), (3 * each, 3 * each), (3 * each - 1, 0)):
            out = np.zeros((1, 16 * 32), np.float32)
            plan = kernels.Plan(1, scratch=scratch)
            plan.attention(np.zeros((1, 16 * 64), np.float32), setting.heads, setting.cache, 1.0, 0, out)
            plan.run(setting._rows([(0, 3 * SPAN * STRETCH - 1)]), NOTHING)
            assert plan.room_nbytes == wanted <= max(scratch, wanted), scratch
    finally:
        policy._Threads.count = before


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("width", "types"), [(2, ("f32", "f32")), (3, ("bf16", "q8_0")), (5, ("q8_0", "bf16"))])
def test_shards_merged_are_the_whole(form, width, types, monkeypatch):
    """Every place gets the same rows and attends to its own blocks; sequences begin at different places."""
    types = (types[0], "" if form == "latent" else types[1])
    made = dict(types=types, lengths=[1, 100, 211, 1300], firsts=[4, 1, 0, 2], **FORMS[form])
    whole = Setting(**made)
    places = [(0, 0), (1, 63), (1, 64), *((2, p) for p in range(60, 70)), (2, 210), (3, 1299), (3, 512)]
    for threads, window in ((1, 0), (2, 0), (2, 100)):
        monkeypatch.setattr(policy._Threads, "count", threads)
        parts = [Setting(**made, shard=(place, width)) for place in range(width)]
        got = [part.run(places, window) for part in parts]
        n = whole.heads.n_heads
        empty = np.stack([lse == -np.inf for _, lse in got])
        assert empty[:, 0].sum() == (width - 1) * n, "a sequence of one block is held at one place"
        assert all((out.reshape(len(places), n, -1)[lse == -np.inf] == 0).all() for out, lse in got)
        # Outputs and log-sum-exps side by side, as an exchange may bring them
        columns = got[0][0].shape[1]
        buffer = np.stack([np.concatenate(pair, 1) for pair in got])
        out = np.full((len(places), columns), np.nan, np.float32)
        plan = kernels.Plan(len(places))
        plan.merge_shards(buffer[:, :, :columns], buffer[:, :, columns:], out)
        plan.run_alone(len(places))
        np.testing.assert_allclose(out, whole.run(places, window)[0], rtol=0, atol=TOLERANCE)
        # The slow twin of the merge
        lse = buffer[:, :, columns:].astype(np.float64)
        share = np.exp(lse - lse.max(0))
        parts_out = buffer[:, :, :columns].astype(np.float64).reshape(width, len(places), n, -1)
        merged = (share[..., None] * parts_out).sum(0) / share.sum(0)[..., None]
        np.testing.assert_allclose(out, merged.reshape(out.shape), rtol=0, atol=1e-6)


def test_what_an_empty_place_gave_counts_nothing_whatever_it_holds():
    parts, lses = np.full((2, 1, 4), np.nan, np.float32), np.array([[[-np.inf, 1]], [[3, -np.inf]]], np.float32)
    parts[1, 0, :2], parts[0, 0, 2:] = 5, 7
    out, plan = np.zeros((1, 4), np.float32), kernels.Plan(1)
    plan.merge_shards(parts, lses, out)
    plan.run_alone(1)
    assert out.tolist() == [[5, 5, 7, 7]]


def test_nan_in_a_shard_reaches_the_whole():
    parts, lses = np.ones((2, 1, 2), np.float32), np.array([[[0.0]], [[np.nan]]], np.float32)
    out, plan = np.zeros((1, 2), np.float32), kernels.Plan(1)
    plan.merge_shards(parts, lses, out)
    plan.run_alone(1)
    assert np.isnan(out).all()


def test_a_block_on_the_wrong_side_of_a_shard_is_told():
    """Its own block missing, and a number for one that is held elsewhere."""
    setting = Setting(("f32", "f32"), (1,), 16, 16, [200], shard=(1, 2), firsts=[0])
    setting.run([(0, 199)])
    assert (setting.table >= 0).tolist() == [[False, True, False, True]]
    for block, number in ((1, -1), (0, 0)):
        kept, setting.table[0, block] = setting.table[0, block], number
        with pytest.raises(AssertionError, match="no block"):
            setting.run([(0, 199)])
        setting.table[0, block] = kept


def test_types_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match="kv-type-v q8_0 needs head sizes in blocks of 32, this model's are 48"):
        kernels.cache_shape("bf16", 1, 1, 64, "q8_0", 48)
    with pytest.raises(UsageError, match="blocks of 32, this model's are 72"):
        kernels.cache_shape("q8_0", 1, 1, 72, "", 0)
    with pytest.raises(UsageError, match="kv-type cannot be 'q4_0'"):
        kernels.cache_shape("bf16", 1, 1, 64, "q4_0")


@pytest.mark.parametrize(("types", "value_dim", "bits_of_a_position"), [
    (("f16", ""), 0, 576 * 16), (("q8_0", ""), 0, 576 * 8.5), (("q8_0", "f16"), 512, 576 * 8.5 + 512 * 16),
    (("bf16", "q8_0"), 512, 576 * 16 + 512 * 8.5), (("f32", "f32"), 512, 32 * 1088)])
def test_bytes_of_a_latent_cache_are_those_of_its_arrays(types, value_dim, bits_of_a_position):
    keys, values = kernels.allocate_cache(types[0], 3, 1, 576, types[1], value_dim)
    cache = kernels.LayerCache(keys, values, *types)
    assert cache.nbytes == 3 * kernels.cache_block_nbytes(types[0], 1, 576, types[1], value_dim)
    assert cache.nbytes == 3 * 64 * bits_of_a_position / 8


def test_kernels_of_a_latent_cache_have_names_of_their_own():
    """Its arrays are of the types of one that has values: only names tell their kernels apart."""
    for kind in kernels.KV_TYPES:
        own, latent = block_step(kind, kind), block_step(kind, "")
        assert own.py_func.__qualname__ != latent.py_func.__qualname__
        own, latent = attention.stretch_core(own), attention.stretch_core(latent)
        assert own.py_func.__qualname__ != latent.py_func.__qualname__
        own, latent = (attention._attention_core(kind, v, False) for v in (kind, ""))
        assert own.py_func.__qualname__ != latent.py_func.__qualname__
    names = {attention._merge_core(*one).py_func.__qualname__ for one in itertools.product((False, True), repeat=2)}
    assert len(names) == 4
