"""Parts of sums as they travel between nodes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpillm.quant import wire

ANY = hnp.arrays(np.float32, (3, 32), elements=st.floats(width=32))


def travelled(kind, x):
    x = x.copy()
    wire.round_rows(kind, x)
    return x


@given(ANY)
def test_f32_is_exact(x):
    assert travelled("f32", x).tobytes() == x.tobytes()
    assert wire.decode("f32", wire.encode("f32", x)).tobytes() == x.tobytes()


@given(ANY)
def test_bf16_is_rounded_to_nearest_even(x):
    got, wanted = travelled("bf16", x), x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(got, wanted, equal_nan=True) and np.array_equal(np.signbit(got), np.signbit(x))


@given(hnp.arrays(np.float32, (4, 32), elements=st.floats(-2.0**100, 2.0**100, width=32)))
def test_q8_0_is_within_half_a_step(x):
    got, most = travelled("q8_0", x), np.abs(x).max(1, keepdims=True).astype(np.float64)
    assert (np.abs(got.astype(np.float64) - x) <= most / 127 * 0.501 + 2.0 ** -140).all()
    assert (got[x == 0] == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad):
    """A row that is NaN anywhere is a failed one: its sums must show it on every rank."""
    x = np.ones((2, 70), np.float32)
    x[0, 33] = bad
    for kind in wire.NBYTES:
        got = travelled(kind, x)
        assert not np.isfinite(got[0, 33]) and np.array_equal(got[1], x[1]) and (got[0, :32] == 1).all()
    assert np.isnan(travelled("q8_0", x)[0, 32:64]).all()


@pytest.mark.parametrize("kind", wire.NBYTES)
@pytest.mark.parametrize("n", [1, 31, 32, 33, 576, 100])
def test_a_row_s_bits_do_not_depend_on_the_rows_beside_it(kind, n):
    x = np.random.default_rng(n).standard_normal((5, n)).astype(np.float32) ** 3
    together = travelled(kind, x)
    for m in range(5):
        assert travelled(kind, x[m:m + 1]).tobytes() == together[m:m + 1].tobytes()
    assert wire.encode(kind, wire.blocks(x)).shape == (5 * -(-n // 32), wire.NBYTES[kind])
