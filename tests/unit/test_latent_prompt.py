"""Prompts over keys and values that are made of cached latents, against a slow twin, within a bounded room."""

from __future__ import annotations

import naive
import numpy as np
import pytest
from test_latent import packed

from mpillm import cache, kernels, latent, latent_prompt
from mpillm.jit import policy

H = latent.LatentHeads(6, 64, 24, 32, 40)
SCALE = 0.13
POSITIONS = 1100
BLOCKS = np.random.default_rng(2).permutation(20).astype(np.int32)[None]


class Case:
    """Cached latents of one sequence, the matrices of its heads, and queries of all its rows."""

    def __init__(self, kv_type="f32"):
        rng = np.random.default_rng(9)
        self.rows = rng.normal(size=(POSITIONS, H.row)).astype(np.float32)
        self.queries = rng.normal(size=(POSITIONS, H.n_heads * H.query)).astype(np.float32)
        self.keys, self.values = (rng.normal(size=(H.n_heads, n, H.kv_rank)).astype(np.float32) / 8
                                  for n in (H.nope, H.value))
        keys, _ = cache.allocate_cache(kv_type, 20, 1, H.row, value_dim=0)
        keys.view(np.int8)[:] = -1
        self.cache, self.kv_type = cache.LayerCache(keys, None, kv_type), kv_type
        plan = kernels.Plan(POSITIONS)
        plan.cache_write(self.rows, None, H.together, self.cache)
        plan.run(self._rows(0, POSITIONS, 0), np.zeros(0, np.int64))

    @staticmethod
    def _rows(start, stop, generated):
        count, nothing = stop - start, np.zeros((stop - start, 1), np.float32)
        return kernels.Rows(np.zeros(count, np.int64), np.arange(start, stop, dtype=np.int32),
                            np.zeros(count, np.int32), BLOCKS, nothing, nothing, generated=generated)

    def attend(self, start, stop, scratch=64 << 20, kind="f32", generated=0):
        """Outputs of rows ``start`` ... , of which the first ``generated`` are left alone; and the plan."""
        plan = kernels.Plan(stop - start, scratch=scratch)
        q, out = plan.buffer("q", self.queries.shape[1]), plan.buffer("out", H.n_heads * H.value)
        q[:], out[:] = self.queries[start:stop], 5
        matrices = latent_prompt.PromptMatrices(packed(kind, self.keys), packed(kind, self.values))
        latent_prompt.record_prompts(plan, q, H, self.cache, matrices, SCALE, out)
        plan.run(self._rows(start, stop, generated), np.zeros(0, np.int64))
        return out.copy(), plan

    def slow(self, start, stop):
        held = naive.round_to(self.kv_type, self.rows).astype(np.float64)
        latents, rotated = held[:, :H.kv_rank], held[:, H.kv_rank:]
        out = np.zeros((stop - start, H.n_heads, H.value))
        for m in range(start, stop):
            for h in range(H.n_heads):
                q = self.queries[m, h * H.query:(h + 1) * H.query].astype(np.float64)
                keys = np.concatenate([latents[:m + 1] @ self.keys[h].T, rotated[:m + 1]], axis=1)
                scores = keys @ q * SCALE
                p = np.exp(scores - scores.max())
                out[m - start, h] = p @ (latents[:m + 1] @ self.values[h].T) / p.sum()
        return out.reshape(stop - start, -1)


@pytest.mark.parametrize("kv_type", kernels.KV_TYPES)
def test_outputs(kv_type):
    case = Case(kv_type)
    # On tiles keys, values and probabilities are bf16.
    tolerance = 6e-3 if kernels.by_tiles(kv_type, kv_type, H.query, H.value, 0) else 1e-5
    for start, stop in ((0, 70), (500, 530), (1000, 1100)):
        wanted = case.slow(start, stop)
        assert np.abs(case.attend(start, stop)[0] - wanted).max() < tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0"])
def test_bits_depend_on_neither_room_nor_chunks_nor_threads(kind, monkeypatch):
    case = Case("bf16")
    monkeypatch.setattr(policy._Threads, "count", 1)
    whole, plan = case.attend(0, POSITIONS, kind=kind)
    assert latent_prompt.Room.of(H, POSITIONS, plan.scratch_nbytes).heads == H.n_heads
    for scratch in (0, 3 << 20):
        room = latent_prompt.Room.of(H, POSITIONS, scratch)
        assert room.heads < H.n_heads and (scratch or room.rows < POSITIONS)
        assert (case.attend(0, POSITIONS, scratch, kind)[0] == whole).all()
    for start, stop in ((0, 1), (3, 40), (511, 513), (700, 1100)):
        assert (case.attend(start, stop, kind=kind)[0] == whole[start:stop]).all()
    monkeypatch.setattr(policy._Threads, "count", 2)
    assert (case.attend(0, POSITIONS, kind=kind)[0] == whole).all()


def test_generated_rows_are_left_to_the_other_way():
    out, _ = Case().attend(600, 700, generated=30)
    assert (out[:30] == 5).all() and not (out[30:] == 5).any()


@pytest.mark.parametrize("scratch", [1 << 20, 3 << 20, 64 << 20])
def test_what_is_taken_is_bounded_and_known(scratch):
    _, plan = Case().attend(0, POSITIONS, scratch)
    shared = {key: room for key, room in plan._branches[latent_prompt.STRETCH].items()
              if key[0] in ("keys", "values", "made keys", "made values", "most", "total", "acc")}
    taken = sum(room.nbytes for room in shared.values())
    planned = latent_prompt.prompt_nbytes(H, POSITIONS, scratch)
    assert len(shared) == 7 and taken <= planned <= max(scratch, planned if scratch < 2 << 20 else 0)
    assert planned - taken <= 4 * latent_prompt.STRETCH * (H.row + 64)


def test_runs_are_consecutive_positions_of_a_sequence():
    sequences, positions = np.array([0, 0, 1, 1, 1, 1, 0]), np.array([4, 5, 0, 1, 2, 7, 6])
    assert list(latent_prompt._runs(sequences, positions, 0, 7, 9)) == [(0, 2), (2, 3), (5, 1), (6, 1)]
    assert list(latent_prompt._runs(sequences, positions, 1, 5, 2)) == [(1, 1), (2, 2), (4, 1)]
    assert list(latent_prompt._runs(sequences, positions, 7, 7, 2)) == []
