"""Norms, rotary embedding and the gated activation; each row by itself, in one order.

Legend: rows of a step, n elements of a row. Strides are in elements from row to row.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.gemm import F32_1, VECTOR, reads
from mpillm.jit.isa.lanes import add_row, exponential_rows, rotate_pairs, scale_row, silu_mul_row, sum_squares
from mpillm.jit.tape import Operation


@policy.inlined
def norm_row(x, start, weight, n, eps, y, to):
    """y[to:to + n] = x / sqrt(mean(x**2) + eps) * weight of x[start:start + n]; y may be x."""
    scale = np.float32(1) / np.sqrt(sum_squares(x, start, n) / np.float32(n) + eps)
    scale_row(x, start, scale, weight, y, to, n)


@policy.inlined
def rotate_row(x, start, cos, sin, angle, size, y, to):
    """Rotate the pairs (i, i + size / 2) of one head by the angles from ``angle`` on, into y, which may be x."""
    rotate_pairs(x, start, cos, sin, angle, size // 2, y, to)


@policy.helper
def _norm_part(part, parts, rows, n, x, x_stride, choose, chosen, weight, eps, y, y_stride):
    """Norms of rows of x: with ``choose`` those that ``chosen`` names, else all in order."""
    for m in range(part * rows // parts, (part + 1) * rows // parts):
        row = chosen[m] if choose else m
        norm_row(x, row * x_stride, weight, n, eps, y, m * y_stride)


@policy.helper
def _add_norm_part(part, parts, rows, n, x, y, y_stride, biased, bias, normed, weight, eps, out, out_stride):
    """x += y (with ``biased``: + bias), then with ``normed`` the norm of x into ``out``."""
    for m in range(part * rows // parts, (part + 1) * rows // parts):
        if biased:
            add_row(y, m * y_stride, bias, 0, n)
        add_row(x, m * n, y, m * y_stride, n)
        if normed:
            norm_row(x, m * n, weight, n, eps, out, m * out_stride)


@policy.helper
def _silu_mul_part(part, parts, rows, n, x, x_stride, y, y_stride):
    """y = silu(first half of the row) * second half."""
    for m in range(part * rows // parts, (part + 1) * rows // parts):
        silu_mul_row(x, m * x_stride, m * x_stride + n, y, m * y_stride, n)


def exponential(x, y):
    """y = exp(x): the exponential of softmax and SiLU by itself."""
    exponential_rows(x, y, x.size)


INT, REAL = types.intp, types.float32
KINDS = {
    "norm": (_norm_part, (INT, INT, VECTOR, INT, INT, reads(types.int64), VECTOR, REAL, F32_1, INT)),
    "add_norm": (_add_norm_part, (INT, INT, F32_1, F32_1, INT, INT, VECTOR, INT, VECTOR, REAL, F32_1, INT)),
    "silu_mul": (_silu_mul_part, (INT, INT, VECTOR, INT, F32_1, INT)),
}


@lru_cache(None)
def operation(name: str) -> Operation:
    """norm, add_norm or silu_mul."""
    core, kinds = KINDS[name]
    return Operation(core, name, kinds)


@lru_cache(None)
def exponential_kernel() -> Any:
    return policy.kernel(exponential, "exponential", (VECTOR, F32_1))
