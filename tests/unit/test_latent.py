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


H = latent.LatentHeads(5, 64, 24, 8, 40)


def with_rows(rows, positions, record, table=None):
    """Run what ``record(plan)`` records for rows of one sequence."""
    plan = kernels.Plan(rows)
    found = record(plan)
    angles = np.random.default_rng(1).normal(size=(2, rows, H.rope // 2)).astype(np.float32)
    table = np.zeros((1, 1), np.int32) if table is None else table
    plan.run(kernels.Rows(np.zeros(rows, np.int64), positions, np.zeros(rows, np.int32), table, *angles),
             np.zeros(0, np.int64))
    return found, angles


def test_latents_are_normed_and_what_stands_behind_them_is_rotated():
    rng = np.random.default_rng(5)
    rows = 7
    given = rng.normal(size=(rows, H.row)).astype(np.float32)
    queries = rng.normal(size=(rows, H.n_heads * H.query)).astype(np.float32)
    weight = rng.uniform(0.5, 1.5, H.kv_rank).astype(np.float32)
    x, q = given.copy(), queries.copy()

    def record(plan):
        absorbed, normed = plan.buffer("absorbed", H.n_heads * H.row), plan.buffer("normed", H.kv_rank, whole=80)
        latent.record_rows(plan, x, weight, 1e-5, H, q, absorbed, normed)
        return absorbed, normed

    (absorbed, normed), (cos, sin) = with_rows(rows, np.arange(rows, dtype=np.int32), record)
    latents = naive.rms_norm(given[:, :H.kv_rank], weight, 1e-5)
    assert np.abs(x[:, :H.kv_rank] - latents).max() < 1e-5 and (normed == x[:, :H.kv_rank]).all()
    assert np.abs(x[:, H.kv_rank:] - naive.rope(given[:, H.kv_rank:], cos, sin, H.rope)).max() < 1e-5
    heads, before = q.reshape(rows, -1, H.query), queries.reshape(rows, -1, H.query)
    assert (heads[..., :H.nope] == before[..., :H.nope]).all()
    wanted = naive.rope(before[..., H.nope:].reshape(rows, -1), cos, sin, H.rope)
    assert np.abs(heads[..., H.nope:].reshape(rows, -1) - wanted).max() < 1e-5
    assert (absorbed.reshape(rows, -1, H.row)[..., H.kv_rank:] == heads[..., H.nope:]).all()


def test_keys_and_values_of_each_head_are_put_together():
    rng = np.random.default_rng(6)
    rows, step = 9, H.nope + H.value
    both = rng.normal(size=(rows, H.n_heads * step)).astype(np.float32)
    rotated = rng.normal(size=(rows, H.rope)).astype(np.float32)
    plan = kernels.Plan(rows)
    keys, values = plan.buffer("keys", H.n_heads * H.query), plan.buffer("values", H.n_heads * H.value)
    latent.record_spread(plan, (both, step), (both[:, H.nope:], step), rotated, H, keys, values)
    plan.run_alone(rows)
    heads = both.reshape(rows, -1, step)
    shared = np.repeat(rotated[:, None], H.n_heads, axis=1)
    assert (keys.reshape(rows, -1, H.query) == np.concatenate([heads[..., :H.nope], shared], axis=2)).all()
    assert (values.reshape(rows, -1, H.value) == heads[..., H.nope:]).all()
