"""A mixture of experts against its slow twin; a row's bits depend on nothing but the row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm import experts, kernels
from mpillm.quant.layout import PANEL


def silu(x):
    return x / (1 + np.exp(-x))


class Slow:
    """The experts of a layer in float64: weights [E, out, in], the router [E, hidden]."""

    def __init__(self, rng, count, hidden, columns):
        self.router = rng.normal(size=(count, hidden)).astype(np.float32)
        self.gate, self.up = (rng.normal(size=(count, columns, hidden)).astype(np.float32) / 8 for _ in range(2))
        self.down = rng.normal(size=(count, hidden, columns)).astype(np.float32) / 8

    def __call__(self, x, chosen, normed):
        out = np.zeros(x.shape)
        for row, values in enumerate(x.astype(np.float64)):
            logits = self.router @ values
            powers = np.exp(logits - logits.max())
            best = sorted(np.argsort(-logits, kind="stable")[:chosen])
            for e in best:
                weight = powers[e] / (powers[best].sum() if normed else powers.sum())
                out[row] += weight * (self.down[e] @ (silu(self.gate[e] @ values) * (self.up[e] @ values)))
        return out


def packed(kind, matrix, interleaved=1):
    """[E, out, in], or a list of two to stand in turn, as one matrix; outputs filled up to whole panels."""
    parts = matrix if interleaved == 2 else [matrix]
    count, rows, k = parts[0].shape
    filled = [np.pad(part, ((0, 0), (0, -rows % PANEL), (0, 0))).reshape(count * -(-rows // PANEL) * PANEL, k)
              for part in parts]
    packer = kernels.Packer(kind, sum(map(len, filled)), k, interleaved=interleaved)
    for tensor, part in enumerate(filled):
        packer.put(0, part, tensor)
    return packer.finish()


def made(slow, kind, chosen, normed):
    """The slow twin's weights as kernels take them; columns filled up to whole panels (blocks, if quantised)."""
    count, hidden, columns = slow.down.shape
    width = -(-columns // PANEL) * PANEL
    k = -(-width // 32) * 32 if kind in kernels.QUANTISED else width
    down = np.pad(slow.down, ((0, 0), (0, 0), (0, k - columns)))
    router = kernels.Packer("f32", count, hidden)
    router.put(0, slow.router)
    return experts.Experts(experts.Router(router.finish(), chosen, normed), packed(kind, [slow.gate, slow.up], 2),
                           packed(kind, down), width, hidden, count)


def run(x, layer, threads=1, capacity=None):
    before = kernels.threads()
    kernels.set_threads(threads)
    try:
        rows = len(x)
        plan = kernels.Plan(capacity or rows)
        given, out = plan.buffer("given", x.shape[1]), plan.buffer("out", layer.hidden)
        out[:] = np.nan
        given[:rows] = x
        experts.record_experts(plan, given, layer, out)
        plan.run_alone(rows)
        return out[:rows].copy()
    finally:
        kernels.set_threads(before)


def error(found, wanted):
    return np.abs(found - wanted).max() / np.abs(wanted).max()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.data(), st.booleans(), st.sampled_from([(32, 48), (72, 20), (40, 5)]),
       st.integers(0, 999))
def test_rows_go_to_their_best_experts(rows, count, data, normed, sizes, seed):
    chosen = data.draw(st.integers(1, count))
    rng = np.random.default_rng(seed)
    slow = Slow(rng, count, *sizes)
    x = rng.normal(size=(rows, sizes[0])).astype(np.float32)
    assert error(run(x, made(slow, "f32", chosen, normed), capacity=64), slow(x, chosen, normed)) < 2e-5


@pytest.mark.parametrize("kind, tolerance", [("f32", 2e-6), ("bf16", 2e-2), ("f16", 1e-3), ("q8_0", 3e-2),
                                             ("q4_0", 0.5), ("q4_1", 0.5)])
def test_a_row_has_its_bits_in_every_batch_order_and_number_of_threads(kind, tolerance):
    rng = np.random.default_rng(5)
    slow = Slow(rng, 6, 64, 96)
    layer = made(slow, kind, 3, True)
    x = rng.normal(size=(70, 64)).astype(np.float32)
    x[40:] = x[7]             # a crowd at three of the experts
    whole = run(x, layer)
    assert error(whole[:40], slow(x[:40], 3, True)) < tolerance
    assert (whole[40:] == whole[7]).all()
    assert (run(x, layer, threads=2) == whole).all()
    for part in (slice(7, 8), slice(3, 20), slice(30, 70)):
        assert (run(x[part], layer, capacity=64) == whole[part]).all()
    assert (run(x[::-1].copy(), layer) == whole[::-1]).all()


def test_a_rank_without_columns_adds_zeros():
    slow = Slow(np.random.default_rng(0), 3, 32, 0)
    assert not run(np.ones((4, 32), np.float32), made(slow, "f32", 2, True)).any()


