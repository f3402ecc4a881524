"""Attention on tiles of the tier amx, bit by bit against a slow twin; emulated where the machine has no tiles."""

import numpy as np
import pytest
import test_attention_forms as forms
import test_tiers
from naive import fma, round_to

from mpillm import kernels
from mpillm.jit import attention, latent_prompt, policy
from mpillm.jit.tape import Tape

amx_tier = test_tiers.amx_tier
F32 = np.float32
ROWS = [(0, 0), (1, 63), (1, 64), *((2, p) for p in range(50, 74)), (2, 7), (2, 600), (2, 601), (2, 511), (2, 512)]


def parts(x):
    """(r, n) of e**x = r * 2**n, as the kernels' exponential takes it apart."""
    x = np.asarray(x, F32)
    n = fma(x, F32(1.4426950408889634), F32(12582912)) - F32(12582912)
    rest = fma(n, F32(-1.428606765330187e-06), fma(n, F32(-0.693145751953125), x))
    series = F32(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        series = fma(np.broadcast_to(series, rest.shape), rest, F32(coefficient))
    return fma(rest * rest, series, rest) + F32(1), n


def softened(scores, seen):
    """(power of 2 of the largest, sum, probabilities) of a stretch's scores, of which ``seen`` count."""
    r, n = parts(np.where(seen, scores, F32(0)))
    most = parts(scores[seen].max())[1]
    p = round_to("bf16", np.where(seen & (n >= most - 124), np.ldexp(r, (n - most).astype(int)), F32(0)))
    lanes = np.zeros(16, F32)
    for part in p.reshape(-1, 16):
        lanes = lanes + part
    while len(lanes) > 1:
        lanes = lanes[:len(lanes) // 2] + lanes[len(lanes) // 2:]
    return most, lanes[0], p


def products(p, values, of_keys):
    """p [n] times values [n, width]: 32 positions at a time, or 16 with zeros beside them."""
    if of_keys:
        p, values = (np.stack([x, np.zeros_like(x)], 1).reshape(2 * len(x), *x.shape[1:]) for x in (p, values))
    return test_tiers.naive_amx(p[None], values.T, np.zeros(0, F32))[0]


def folded(before, most, total, acc):
    if before is None:
        return most, total, acc
    now = max(before[0], most)
    mine, its = (F32(2.0 ** (x - now)) for x in (before[0], most))
    return now, before[1] * mine + total * its, before[2] * mine + acc * its


def twin(q, keys, values, position, window, of_keys):
    """A head's output for query q (scaled), of keys [n, size] and values [n, width] that bf16 holds."""
    first, spans, span = max(0, position - window + 1) if window else 0, None, None
    for stretch in range(first // 512, position // 512 + 1):
        at = slice(stretch * 512, stretch * 512 + 512)
        k, v = (np.pad(x[at], ((0, 512 - len(x[at])), (0, 0))) for x in (keys, values))
        places = np.arange(512) + at.start
        seen = (places >= first) & (places <= position)
        most, total, p = softened(test_tiers.naive_amx(q[None], k, np.zeros(0, F32))[0], seen)
        span = folded(span, most, total, products(p, np.where(seen[:, None], v, F32(0)), of_keys))
        if stretch % attention.SPAN == attention.SPAN - 1 or stretch == position // 512:
            spans, span = folded(spans, *span), None
    return spans[2] / spans[1]


def check(setting, rows, window=0):
    heads, latent = setting.heads, setting.latent
    got = setting.run(rows, window)[0].reshape(len(rows), heads.n_heads, heads.value_dim)
    keys = [round_to("bf16", x) for x in setting.keys]
    values = [x[:, :, :heads.value_dim] for x in keys] if latent else [round_to("bf16", x) for x in setting.values]
    for m, (s, p) in enumerate(rows):
        q = setting.queries[s][p].reshape(heads.n_heads, -1) * F32(heads.head_dim ** -0.5)
        for j, (start, stop) in enumerate(zip(heads.starts, heads.stops, strict=True)):
            for head in range(start, stop):
                wanted = twin(q[head], keys[s][:, j], values[s][:, j], p, window, latent)
                assert np.array_equal(got[m, head].view(np.uint32), wanted.view(np.uint32)), (s, p, head)


@pytest.mark.parametrize(("size", "value_dim", "window"), [(64, 64, 0), (64, 64, 70), (96, 32, 0), (24, 20, 40)])
def test_keys_and_values_equal_their_twin(size, value_dim, window, monkeypatch):
    setting = forms.Setting(("bf16", "bf16"), (3, 1), size, value_dim, [1, 100, 650])
    assert attention.by_tiles("bf16", "bf16", size, value_dim, window)
    for threads in (1, 2):
        monkeypatch.setattr(policy._Threads, "count", threads)
        check(setting, ROWS, window)


@pytest.mark.parametrize(("heads", "size", "value_dim"), [(2, 96, 64), (20, 64, 48)])
def test_columns_of_keys_equal_their_twin(heads, size, value_dim, monkeypatch):
    setting = forms.Setting(("bf16", ""), (heads,), size, value_dim, [1, 100, 650], latent=True)
    assert attention.by_tiles("bf16", "", size, value_dim, 0)
    monkeypatch.setattr(policy._Threads, "count", 2)
    check(setting, ROWS[:4] + ROWS[20:] if heads > 2 else ROWS)


def test_many_stretches_equal_their_twin(monkeypatch):
    """More than a span of them, by one thread and split over two."""
    setting = forms.Setting(("bf16", "bf16"), (1,), 32, 16, [512 * 9 + 30])
    for threads in (1, 2):
        monkeypatch.setattr(policy._Threads, "count", threads)
        check(setting, [(0, 512 * 9 + 20)])


@pytest.mark.parametrize("latent", [False, True])
def test_what_a_row_does_not_see_is_never_multiplied(latent):
    """NaN in a position: rows before it keep their bits, those that see it are NaN, whatever goes beside them."""
    setting = forms.Setting(("bf16", "" if latent else "bf16"), (3,), 64, 64, [200], latent=latent)
    before = setting.run([(0, p) for p in range(64, 130)])[0]
    for name in ("keys",) if latent else ("keys", "values"):
        array = getattr(setting.cache, name)
        block, within = setting.table[0, 1], 30
        kept = array.copy()
        if name == "keys":
            array[block, :, within // 16, :, within % 16] = 0x7FC0
        else:
            array[block, :, :, within // 2, :, within % 2] = 0x7FC0
        after = setting.run([(0, p) for p in range(64, 130)])[0]
        assert np.array_equal(after[:within].view(np.uint32), before[:within].view(np.uint32))
        assert np.isnan(after[within:]).all()
        alone = setting.run([(0, 64 + within - 1)])[0]
        assert np.array_equal(alone[0].view(np.uint32), before[within - 1].view(np.uint32))
        array[...] = kept


@pytest.mark.parametrize(("positions", "nope", "rope", "value"), [(512, 128, 64, 128), (77, 48, 8, 20), (17, 32, 2, 6)])
def test_keys_and_values_of_a_stretch_lie_as_in_a_cache(positions, nope, rope, value):
    """Made of parts, in the layout that writing them into a bf16 cache gives."""
    heads, size, rng = 3, nope + rope, np.random.default_rng(0)
    k, v = (rng.standard_normal((positions, heads, n + 3), dtype=np.float32) for n in (nope, value))
    rotated = rng.standard_normal((positions, rope), dtype=np.float32)
    columns = np.concatenate([k[:, :, :nope], np.repeat(rotated[:, None], heads, 1)], 2)
    setting = forms.Setting(("bf16", "bf16"), (1,) * heads, size, value, [positions])
    setting.keys, setting.values = [columns], [v[:, :, :value]]
    setting.table[0] = np.arange(len(setting.table[0]))
    setting.cache.keys[...] = setting.cache.values[...] = 0x7FC0
    setting._write([(0, p) for p in range(positions)])
    blocks, width = len(setting.table[0]), -(-value // 16) * 16
    keys, values = np.zeros(blocks * heads * 64 * size, np.uint16), np.zeros(blocks * heads * 64 * width, np.uint16)
    tape = Tape()
    tape.add("attention", latent_prompt.fill_operation(True), positions, heads, nope, rope, value, k.reshape(-1),
             heads * (nope + 3), nope + 3, v.reshape(-1), heads * (value + 3), value + 3, rotated.reshape(-1), keys,
             values)
    tape.set({})
    tape.run(2)
    for got, cached in ((keys.reshape(setting.cache.keys.shape), setting.cache.keys),
                        (values.reshape(setting.cache.values.shape), setting.cache.values)):
        # What is beyond the positions and columns is not written in a cache.
        written = cached != 0x7FC0
        assert np.array_equal(got[written], cached[written]) and written.sum() >= positions * heads * min(size, value)


def test_other_caches_and_shapes_are_not_for_tiles():
    assert not attention.by_tiles("f16", "f16", 64, 64, 0) and not attention.by_tiles("bf16", "q8_0", 64, 64, 0)
    assert not attention.by_tiles("bf16", "", 80, 64, 0)        # keys that do not fill tiles cannot be values too
    assert not attention.by_tiles("bf16", "", 64, 64, 100)
    assert not attention.by_tiles("bf16", "bf16", 64, 8192, 0)      # no room
    assert kernels.tier() == "amx"
