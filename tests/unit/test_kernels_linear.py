"""Packed matrices: rounding, chunks, products, and the same bits whatever stands beside a row."""

import ml_dtypes
import naive
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm import kernels
from mpillm.errors import UsageError
from mpillm.jit import policy

QUANTISED = ("q8_0", "q4_0", "q4_1")
FORMATS = ("f32", "bf16", "f16", *QUANTISED)


def pack(name, w, chunks=(10**9,)):
    packer = kernels.Packer(name, *w.shape)
    row, turn = 0, 0
    while row < len(w):
        stop = min(len(w), row + chunks[turn % len(chunks)])
        packer.put(row, w[row:stop])
        row, turn = stop, turn + 1
    return packer.finish()


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def same_bits(x, y):
    return x.shape == y.shape and np.array_equal(x.view(np.uint32), y.view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n, k", [(1, 32), (16, 64), (40, 96), (77, 1120), (129, 32)])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 7, 19])
def test_linear_equals_its_twin(name, n, k, m):
    k = k if name in QUANTISED else k - k // 32        # odd numbers of inputs too
    x, w, bias = random(m, k), random(n, k, seed=1), random(n, seed=2)
    expected = naive.linear(name, x, w, bias)
    got = kernels.linear(x, pack(name, w), bias)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1.2e-5 * k ** 0.5)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n, k", [(83, 1056), (16, 544), (200, 96)])
def test_bits_of_a_row_do_not_depend_on_the_batch_or_threads(name, n, k, monkeypatch):
    k = k if name in QUANTISED else k + 1
    x, w, bias = random(33, k), pack(name, random(n, k, seed=1)), random(n, seed=2)
    monkeypatch.setattr(policy._Threads, "count", 1)
    alone = np.concatenate([kernels.linear(x[i:i + 1], w, bias) for i in range(33)])
    for parts in (1, 2, 3):
        monkeypatch.setattr(policy._Threads, "count", parts)
        for rows in (1, 2, 3, 4, 5, 6, 7, 16, 33):
            for start in (0, 33 - rows):
                batch = kernels.linear(x[start:start + rows].copy(), w, bias)
                assert same_bits(batch, alone[start:start + rows]), (parts, rows, start)


@pytest.mark.parametrize("name", FORMATS)
def test_bits_of_an_output_do_not_depend_on_the_slice(name):
    """Cutting outputs over ranks changes nothing; only a cut of the inputs does."""
    x, w = random(5, 64), random(70, 64, seed=1)
    whole = kernels.linear(x, pack(name, w))
    for start, stop in ((0, 9), (9, 41), (41, 70)):
        assert same_bits(kernels.linear(x, pack(name, w[start:stop])), whole[:, start:stop].copy())


def test_bf16_panels_hold_whole_tiles_with_zeros_beyond_the_inputs():
    w = pack("bf16", random(20, 5))
    panels = w.data.reshape(2, 16, 16, 2)
    assert not panels[:, 3:].any() and not panels[:, 2, :, 1].any() and panels[0, 2, :, 0].all()


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_in_nothing_out(name):
    bias = random(7)
    without_outputs = pack(name, np.zeros((0, 32), np.float32))
    assert kernels.linear(np.zeros((3, 32), np.float32), without_outputs).shape == (3, 0)
    empty = pack(name, np.zeros((7, 0), np.float32))
    x = np.zeros((2, 0), np.float32)
    assert not kernels.linear(x, empty).any()
    assert same_bits(kernels.linear(x, empty, bias), np.stack([bias, bias]))
    assert kernels.linear(np.zeros((0, 32), np.float32), pack(name, random(7, 32))).shape == (0, 7)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 75))
def test_chunks_of_rows_do_not_matter(name, chunks, n):
    w = random(n, 64)
    whole, cut = pack(name, w), pack(name, w, chunks)
    assert np.array_equal(whole.data, cut.data)
    assert name not in QUANTISED or np.array_equal(whole.scales, cut.scales)
    assert whole.nbytes == kernels.packed_nbytes(name, n, 64)
    assert whole.data.ctypes.data % 64 == 0


@pytest.mark.parametrize("name", FORMATS)
def test_lookup_gives_rounded_rows(name):
    w = random(50, 96)
    w[3, :4] = [1 + 2.0 ** -8, 1 + 3 * 2.0 ** -8, 1 + 2.0 ** -11, -6e-8]     # ties, a subnormal half
    ids = np.array([49, 0, 3, 3, 17], np.int64)
    assert same_bits(kernels.lookup(pack(name, w), ids), naive.round_to(name, w)[ids])
    with pytest.raises(AssertionError, match="1 of 2 ids"):
        kernels.lookup(pack(name, w), np.array([0, 50]))


def test_large_matrices_are_packed_in_threads_alike(monkeypatch):
    w = random(1000, 1088)
    packed = {}
    for parts in (1, 2):
        monkeypatch.setattr(policy._Threads, "count", parts)
        packed[parts] = [pack(name, w) for name in FORMATS]
    for one, two in zip(packed[1], packed[2], strict=True):
        assert np.array_equal(one.data, two.data)
        assert one.data.ctypes.data % 64 == 0


@pytest.mark.parametrize("name, values, overflow, nonfinite", [
    ("f16", [65519, -65519, 65520, -7e4, np.nan, np.inf, 1e-9], 2, 2),
    ("bf16", [3.39e38, 3.4e38, -3.4e38, np.nan, -np.inf], 2, 2),
    ("f32", [3.4e38, np.nan, np.inf], 0, 2),
    ("q8_0", [65504 * 127, np.nan], 0, 1),
    ("q8_0", [65600 * 127], 32, 0),
    ("q4_0", [65504 * 8, np.nan], 0, 1),
    ("q4_0", [65600 * 8], 32, 0),
    ("q4_1", [65504, -np.inf], 0, 1),
    ("q4_1", [-65600], 32, 0),
    ("q4_1", [65600 * 15], 32, 0),
])
def test_what_a_format_cannot_hold_is_counted(name, values, overflow, nonfinite):
    w = np.zeros((3, 64), np.float32)
    w[1, 32:32 + len(values)] = values
    packer = kernels.Packer(name, *w.shape)
    packer.put(0, w)
    assert (packer.overflow, packer.nonfinite) == (overflow, nonfinite)


@pytest.mark.parametrize("name, kind", [("f32", np.float32), ("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("n, k, interleaved", [(83, 70, 1), (64, 32, 2), (5, 2, 1), (50, 402, 1), (64, 256, 2)])
def test_rows_as_stored_become_what_their_values_become(name, kind, n, k, interleaved):
    rows = random(n, k).astype(kind)
    values, stored = (kernels.Packer(name, n, k, interleaved=interleaved) for _ in range(2))
    each = n // interleaved
    for tensor in range(interleaved):
        own = rows[tensor * each:(tensor + 1) * each]
        values.put(0, own.astype(np.float32), tensor)
        for start, stop in ((0, each // 3), (each // 3, each)):
            stored.put_raw(start, own[start:stop].view(np.uint8), tensor)
    assert stored.takes_raw()
    assert np.array_equal(stored.finish().data, values.finish().data)


@pytest.mark.parametrize("name, kind", [("f32", np.float32), ("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("k", [64, 300])
def test_stored_rows_are_searched_for_what_is_not_finite(name, kind, k):
    rows = random(40, k).astype(kind)
    rows[3, 4], rows[17, 5], rows[31, 62], rows[30, k - 1], rows[39, k - 1] = np.nan, np.inf, np.nan, np.nan, -np.inf
    packer = kernels.Packer(name, 40, k)
    packer.put_raw(0, rows.view(np.uint8))
    assert (packer.nonfinite, packer.overflow) == (5, 0)


def test_an_odd_row_of_bf16_is_not_taken_as_stored():
    assert not kernels.Packer("bf16", 3, 5).takes_raw() and kernels.Packer("f16", 3, 5).takes_raw()


@pytest.mark.parametrize("name", QUANTISED)
def test_rounding_is_ggml_s(name):
    powers = np.random.default_rng(1).integers(-9, 3, (33, 256)).astype(np.float32)
    w = random(33, 256) * np.float32(10) ** powers
    w[5, :32], w[7, :32], w[8, :32] = 0, 3, np.linspace(-15, 15, 32)
    w[9, :32] = np.tile([0.5, 1.5, -0.5, -7.5, 8, -8, 7.5, 6.5], 4)          # ties
    as_is, quantised = kernels.Packer(name, 33, 256), pack(name, w)
    raw = quants.quantize(w, GGMLQuantizationType[name.upper()])
    as_is.put_raw(0, raw[:20]), as_is.put_raw(20, raw[20:])
    stored = as_is.finish()
    assert np.array_equal(stored.scales, quantised.scales)
    different = np.count_nonzero(stored.data.view(np.uint8) != quantised.data.view(np.uint8))
    assert different == 0
    assert same_bits(kernels.lookup(quantised, np.arange(33)), naive.round_to(name, w))


def test_q8_0_carries_the_codes_that_files_hold():
    codes = np.full((1, 32), -128, np.int8)
    packer = kernels.Packer("q8_0", 1, 32)
    packer.put_raw(0, np.concatenate([np.ones((1, 1), np.float16).view(np.uint8), codes.view(np.uint8)], 1))
    y = kernels.linear(np.full((1, 32), 127, np.float32), packer.finish())
    assert y[0, 0] == -128 * 127 * 32


def test_activations_beyond_q8_0_stay_finite_and_nan_stays_nan():
    w = pack("q8_0", np.full((16, 64), 1, np.float32))
    x = np.zeros((3, 64), np.float32)
    x[0, 0], x[1, 5], x[2, 6] = 1e30, np.nan, np.inf
    y = kernels.linear(x, w)
    np.testing.assert_allclose(y[0], 1e30, rtol=1e-3)
    assert np.isnan(y[1:]).all()


def test_weights_beside_each_other_in_bf16_round_to_nearest_even():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 4096, np.uint32)
    values = bits.view(np.float32)[None]
    packer = kernels.Packer("bf16", 1, 4096)
    packer.put(0, values)
    got = kernels.lookup(packer.finish(), np.array([0]))
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    nan = np.isnan(values)
    assert np.array_equal(np.isnan(got), nan) and np.array_equal(got[~nan], expected[~nan])


def test_wrong_use_is_told():
    with pytest.raises(UsageError, match="blocks of 32.*48.*bf16"):
        kernels.Packer("q8_0", 4, 48)
    with pytest.raises(UsageError, match="'q5_1'"):
        kernels.Packer("q5_1", 4, 32)
    packer = kernels.Packer("f32", 4, 8)
    with pytest.raises(AssertionError, match="rows 3"):
        packer.put(3, np.zeros((2, 8), np.float32))
    with pytest.raises(AssertionError, match="0 rows came of 4"):
        packer.finish()
    w = pack("f32", random(4, 8))
    with pytest.raises(AssertionError, match="8 inputs"):
        kernels.linear(np.zeros((1, 9), np.float32), w)
    with pytest.raises(AssertionError, match="contiguous"):
        kernels.linear(np.zeros((2, 16), np.float32)[:, ::2], w)
    with pytest.raises(AssertionError, match="bias"):
        kernels.linear(np.zeros((1, 8), np.float32), w, np.zeros(3, np.float32))
