"""Operations of latent attention against slow twins; a row's bits depend on nothing but the row."""

from __future__ import annotations

import naive
import numpy as np
import pytest

from mpillm import kernels, latent
from mpillm.jit import policy
from mpillm.quant.layout import PANEL


def packed(kind, matrices):
    """[H, n, k] as one matrix: outputs of each head filled up to whole panels, inputs to whole blocks."""
    heads, n, k = matrices.shape
    k_stored = -(-k // 32) * 32 if kind in kernels.QUANTISED else k
    filled = np.pad(matrices, ((0, 0), (0, -n % PANEL), (0, k_stored - k))).reshape(-1, k_stored)
    packer = kernels.Packer(kind, len(filled), k_stored)
    packer.put(0, filled)
    return packer.finish()


def by_heads(x, x_step, matrices, kind, out_step, threads=1, capacity=None):
    heads, n, k = matrices.shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy._Threads, "count", threads)
        plan = kernels.Plan(capacity or len(x))
        given, out = plan.buffer("given", x.shape[1]), plan.buffer("out", heads * out_step)
        given[:len(x)] = x
        out[:] = 7
        latent.record_by_heads(plan, given, x_step, k, packed(kind, matrices), heads, out, out_step, n)
        plan.run_alone(len(x))
        return out[:len(x)].copy()


def slow_by_heads(x, x_step, matrices, kind):
    heads, _, k = matrices.shape
    padding = -k % 32 if kind in kernels.QUANTISED else 0
    return [naive.linear(kind, np.pad(x[:, h * x_step:h * x_step + k], ((0, 0), (0, padding))),
                         np.pad(matrices[h], ((0, 0), (0, padding)))) for h in range(heads)]


@pytest.mark.parametrize("kind, tolerance", [("f32", 2e-6), ("bf16", 1e-2), ("f16", 2e-6), ("q8_0", 2e-6),
                                             ("q4_0", 2e-6), ("q4_1", 2e-6)])
@pytest.mark.parametrize("heads, n, k", [(1, 32, 64), (3, 72, 24), (10, 24, 72), (16, 128, 96)])
def test_each_head_has_a_matrix_of_its_own(kind, tolerance, heads, n, k):
    rng = np.random.default_rng(heads * n + k)
    x_step, out_step = k + 8, n + 5
    x = rng.normal(size=(41, heads * x_step)).astype(np.float32)
    matrices = rng.normal(size=(heads, n, k)).astype(np.float32)
    whole = by_heads(x, x_step, matrices, kind, out_step)
    for h, wanted in enumerate(slow_by_heads(x, x_step, matrices, kind)):
        found = whole[:, h * out_step:(h + 1) * out_step]
        assert np.abs(found[:, :n] - wanted).max() < tolerance * np.abs(wanted).max()
        assert (found[:, n:] == 7).all(), "columns of others were written"
    assert (by_heads(x, x_step, matrices, kind, out_step, threads=2) == whole).all()
    for part in (slice(7, 8), slice(3, 20), slice(9, 41)):
        assert (by_heads(x[part], x_step, matrices, kind, out_step, capacity=64) == whole[part]).all()
