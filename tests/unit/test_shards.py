"""What a cache that is sharded by positions adds to a layer: the merge of the places' parts, and its order."""

from __future__ import annotations

import numpy as np
import pytest

from mpillm import kernels

HEADS, SIZE = 3, 16


def merged(parts: np.ndarray, lses: np.ndarray, sequences: np.ndarray, first: np.ndarray) -> np.ndarray:
    """plan.merge_shards of [places, T, HEADS * SIZE] and [places, T, HEADS] for rows of these sequences."""
    rows = parts.shape[1]
    plan, out = kernels.Plan(rows), np.empty((rows, HEADS * SIZE), np.float32)
    # As an exchange brings them: the places beside each other in a row
    beside = [np.ascontiguousarray(x.swapaxes(0, 1).reshape(rows, -1)) for x in (parts, lses)]
    plan.merge_shards(*(x.reshape(rows, len(parts), -1).swapaxes(0, 1) for x in beside), out)
    positions, angles = np.zeros(rows, np.int32), np.zeros((rows, 8), np.float32)
    plan.run(kernels.Rows(np.zeros(rows, np.int64), positions, sequences, np.zeros((len(first), 1), np.int32), angles,
                          angles, first), np.zeros(0, np.int64))
    return out


@pytest.mark.parametrize("places", [2, 3, 5])
def test_parts_are_merged_from_the_place_of_the_first_block_on(places):
    """So that where a sequence begins changes no bit, and another order does."""
    generator = np.random.default_rng(places)
    rows = 40
    parts = generator.standard_normal((places, rows, HEADS * SIZE)).astype(np.float32)
    lses = generator.uniform(-3, 3, (places, rows, HEADS)).astype(np.float32)
    lses[0, :5] = -np.inf
    sequences, first = np.arange(rows, dtype=np.int32) % 7, np.arange(7, dtype=np.int32) % places
    wanted = merged(parts, lses, sequences, np.zeros(7, np.int32))
    turned = [np.stack([np.roll(x[:, m], first[sequences[m]], axis=0) for m in range(rows)], 1) for x in (parts, lses)]
    assert merged(*turned, sequences, first).tobytes() == wanted.tobytes()
    if places > 2:
        assert merged(*turned, sequences, np.zeros(7, np.int32)).tobytes() != wanted.tobytes()
    shares = np.exp(lses.astype(np.float64))[..., None]
    exact = (shares * parts.reshape(places, rows, HEADS, SIZE)).sum(0) / shares.sum(0)
    np.testing.assert_allclose(wanted.reshape(exact.shape), exact, rtol=0, atol=2e-6)
