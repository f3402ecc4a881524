"""Blocks as GGUF files hold them, through packing, lookups and products: to the bit as their twins."""

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import naive
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm import kernels
from mpillm.errors import UsageError
from mpillm.jit import policy
from mpillm.jit.isa import select

FORMATS = ("q8_0", "q4_0", "q4_1", "q4_K", "q6_K")
K_QUANTS = ("q4_K", "q6_K")


def stored(name, n, k, seed=0):
    """Random blocks with scales of many sizes."""
    size, values, halves = naive.STORED[name]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n, k // values, size), dtype=np.uint8)
    for at in halves:
        scales = rng.standard_normal((n, k // values, 1)) * 10.0 ** rng.integers(-6, 1, (n, k // values, 1))
        raw[..., at:at + 2] = scales.astype(np.float16).view(np.uint8)
    return raw.reshape(n, -1)


def packed(name, raw, k, phase=0, chunks=(10**9,)):
    packer = kernels.Packer(name, len(raw), k, phase)
    row, turn = 0, 0
    while row < len(raw):
        stop = min(len(raw), row + chunks[turn % len(chunks)])
        packer.put_raw(row, raw[row:stop])
        row, turn = stop, turn + 1
    assert packer.nonfinite == packer.overflow == 0
    return packer.finish()


def values(name, raw):
    return quants.dequantize(raw, GGMLQuantizationType[name.upper()]).reshape(len(raw), -1)


def random(m, k, seed=5):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((m, k), dtype=np.float32) * np.float32(10) ** rng.integers(-3, 3, (m, 1)).astype("f4")


def same_bits(x, y):
    return x.shape == y.shape and np.array_equal(x.view(np.uint32), y.view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
def test_packed_values_are_those_that_the_gguf_package_decodes(name):
    raw = stored(name, 43, 1024)
    ids = np.array([42, 0, 7, 7, 16])
    matrix = packed(name, raw, 1024)
    assert same_bits(kernels.lookup(matrix, ids), values(name, raw)[ids])
    assert matrix.nbytes == kernels.packed_nbytes(name, 43, 1024)
    assert matrix.data.ctypes.data % 64 == matrix.scales.ctypes.data % 64 == 0
    bits = {"q8_0": 34 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32, "q4_K": 148 / 256, "q6_K": 210 / 256}[name]
    assert matrix.nbytes == 48 * 1024 * bits


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n, k, m", [(1, 256, 1), (16, 512, 2), (40, 256, 7), (77, 1280, 16), (33, 768, 33)])
def test_products_are_their_twin_s_to_the_bit(name, n, k, m):
    raw, x, bias = stored(name, n, k), random(m, k), random(1, n, 3)[0]
    expected = naive.linear_blocks(name, x, raw)
    assert same_bits(kernels.linear(x, packed(name, raw, k)), expected)
    assert same_bits(kernels.linear(x, packed(name, raw, k), bias), expected + bias)
    # And the twin means what the values mean.
    scales, codes = naive.quantise(x)
    rounded = (scales.astype(np.float64)[..., None] * codes.reshape(m, -1, 32)).reshape(m, k)
    exact, size = rounded @ values(name, raw).T.astype(np.float64), np.abs(rounded) @ np.abs(values(name, raw)).T
    # q4_1 and K-quants take large terms from each other
    assert (np.abs(expected - exact) <= 3e-5 * size.max()).all()


@pytest.mark.parametrize("name", K_QUANTS)
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 30), st.integers(1, 24), st.integers(1, 40))
def test_slices_of_k_quants_begin_and_end_anywhere(name, first, count, n):
    """A slice has the super-blocks that cover it; its phase says where it begins in the first."""
    raw, phase = stored(name, n, 2048), first % 8
    last, size = min(64, first + count), naive.STORED[name][0]
    cut = np.ascontiguousarray(raw[:, first // 8 * size:-(-last // 8) * size])
    k = 32 * (last - first)
    matrix, x = packed(name, cut, k, phase), random(3, k)
    assert same_bits(kernels.lookup(matrix, np.arange(n)), values(name, raw)[:, 32 * first:32 * last].copy())
    assert same_bits(kernels.linear(x, matrix), naive.linear_blocks(name, x, cut, phase))
    assert matrix.nbytes == kernels.packed_nbytes(name, n, k, phase)


@pytest.mark.parametrize("name", FORMATS)
def test_bits_of_a_row_do_not_depend_on_the_batch_or_threads(name, monkeypatch):
    n, k = 83, 1280
    x, w, bias = random(50, k), packed(name, stored(name, n, k), k), random(1, n, 3)[0]
    monkeypatch.setattr(policy._Threads, "count", 1)
    alone = np.concatenate([kernels.linear(x[i:i + 1], w, bias) for i in range(50)])
    for parts in (1, 2):
        monkeypatch.setattr(policy._Threads, "count", parts)
        for rows in (1, 2, 7, 16, 17, 33, 50):
            for start in (0, 50 - rows):
                batch = kernels.linear(x[start:start + rows].copy(), w, bias)
                assert same_bits(batch, alone[start:start + rows]), (parts, rows, start)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 75))
def test_chunks_of_rows_and_threads_do_not_matter(name, chunks, n):
    raw = stored(name, n, 768)
    whole, cut = packed(name, raw, 768), packed(name, raw, 768, chunks=chunks)
    assert np.array_equal(whole.data, cut.data) and np.array_equal(whole.scales, cut.scales)


@pytest.mark.parametrize("name", FORMATS)
def test_large_matrices_are_packed_in_threads_alike(name, monkeypatch):
    raw, matrices = stored(name, 150, 1024), []
    for parts in (1, 2):
        monkeypatch.setattr(policy._Threads, "count", parts)
        matrices.append(packed(name, raw, 1024))
    assert np.array_equal(matrices[0].data, matrices[1].data)
    assert np.array_equal(matrices[0].scales, matrices[1].scales)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("byte", [0x00, 0x80, 0x7F, 0xFF])
@pytest.mark.parametrize("x", [1.0, -1.0])
def test_extreme_codes_do_not_overflow(name, byte, x):
    """All codes and small scales alike, against activations of full size: the largest sums there are."""
    size, _, halves = naive.STORED[name]
    raw = np.full((19, 512 // naive.STORED[name][1], size), byte, np.uint8)
    for at in halves:
        raw[..., at:at + 2] = np.array([1], np.float16).view(np.uint8)
    rows = np.full((2, 512), x, np.float32)
    rows[1, ::2] *= -1
    raw = raw.reshape(19, -1)
    assert same_bits(kernels.linear(rows, packed(name, raw, 512)), naive.linear_blocks(name, rows, raw))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [0.0, -0.0, 6e-8, -65504.0])
def test_scales_that_are_zero_subnormal_or_largest(name, scale):
    size, per, halves = naive.STORED[name]
    raw = np.random.default_rng(3).integers(0, 256, (20, 512 // per, size), dtype=np.uint8)
    for at in halves:
        raw[..., at:at + 2] = np.array([scale], np.float16).view(np.uint8)
    raw = raw.reshape(20, -1)
    x = random(3, 512)
    x[1, 32:64], x[2] = 0, 0
    matrix = packed(name, raw, 512)
    assert same_bits(kernels.linear(x, matrix), naive.linear_blocks(name, x, raw))
    assert same_bits(kernels.lookup(matrix, np.arange(20)), values(name, raw))


@pytest.mark.parametrize("name", FORMATS)
def test_scales_that_are_not_finite_are_counted(name):
    size, per, halves = naive.STORED[name]
    for at in halves:
        raw = stored(name, 18, 512).reshape(18, -1, size)
        raw[3, -1, at:at + 2] = np.array([np.inf], np.float16).view(np.uint8)
        raw[17, 0, at:at + 2] = np.array([np.nan], np.float16).view(np.uint8)
        packer = kernels.Packer(name, 18, 512)
        packer.put_raw(0, raw.reshape(18, -1))
        assert (packer.nonfinite, packer.overflow) == (2 * per, 0)


@pytest.mark.parametrize("name", FORMATS)
def test_activations_that_are_not_finite_stay_visible(name):
    x = np.ones((4, 256), np.float32)
    x[0, 5], x[1, 200], x[3] = np.nan, -np.inf, 1e30
    y = kernels.linear(x, packed(name, stored(name, 16, 256), 256))
    assert np.isnan(y[:2]).all() and np.isfinite(y[2:]).all()


def test_what_does_not_go_into_a_format_is_told():
    packer = kernels.Packer("q4_K", 2, 256)
    with pytest.raises(UsageError, match="weights q4_K come from a GGUF file only.*use q8_0 or q4_0 or q4_1"):
        packer.put(0, np.zeros((2, 256), np.float32))
    with pytest.raises(AssertionError, match="not 288 bytes"):
        kernels.Packer("q4_K", 2, 256, 3).put_raw(0, np.zeros((2, 144), np.uint8))
    with pytest.raises(AssertionError, match="phase 3 of q4_0"):
        kernels.Packer("q4_0", 2, 256, 3)
    with pytest.raises(UsageError, match="q6_K need inputs in blocks of 32.*48.*bf16"):
        kernels.Packer("q6_K", 2, 48)


def digest():
    """Of products of every format: what a tier must not change."""
    total = sha256()
    for name in FORMATS:
        for n, k, m in ((50, 1280, 1), (70, 512, 37)):
            total.update(kernels.linear(random(m, k), packed(name, stored(name, n, k), k)).tobytes())
    return total.hexdigest()


@pytest.mark.parametrize("tier", select.TIERS)
def test_every_tier_gives_the_same_bits(tier):
    """Tiers that this processor lacks run with emulated instructions."""
    here = Path(__file__).parent
    code = "import test_kernels_quantised as t; from mpillm.jit.isa.select import tier; print(tier(), t.digest())"
    environment = {**os.environ, "MPILLM_ISA": tier, "MPILLM_ISA_EMULATE": "1",
                   "PYTHONPATH": f"{here}{os.pathsep}{here.parents[1]}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == [tier, digest()], done.stderr


def fast_error(*names: str) -> float:
    """The largest error of fast products against weights and activations rounded to bf16; few rows are as ever."""
    worst = 0.0
    for name in names:
        w = packed(name, stored(name, 50, 512), 512)
        x = random(40, 512)
        exact = naive.round_to("bf16", kernels.lookup(w, np.arange(50))).astype(np.float64)
        expected = naive.round_to("bf16", x).astype(np.float64) @ exact.T
        got = kernels.linear(x, w, fast=True)
        worst = max(worst, float(np.abs(got - expected).max() / np.abs(expected).max()))
        assert np.array_equal(kernels.linear(x[:31], w, fast=True), kernels.linear(x[:31], w)), name
    return worst


@pytest.mark.parametrize("tier, names", [("avx512", FORMATS), ("amx", ("q8_0", "q6_K")), pytest.param(
    "amx", ("q4_0", "q4_1", "q4_K"), marks=pytest.mark.slow)])       # emulated tiles take long to compile
def test_fast_products_widen_weights_to_bf16(tier, names):
    here = Path(__file__).parent
    code = f"import test_kernels_quantised as t; print(t.fast_error(*{names}))"
    environment = {**os.environ, "MPILLM_ISA": tier, "MPILLM_ISA_EMULATE": "1",
                   "PYTHONPATH": f"{here}{os.pathsep}{here.parents[1]}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and float(done.stdout) < 1e-5, done.stderr
