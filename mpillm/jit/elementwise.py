"""Norms, rotary embedding and the gated activation; each row by itself, in one order.

Legend: M rows, H elements of a row, D a head's size. Row-strided views are taken as they are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.gemm import F32_1, F32_2, ROWS, STRIDED, VECTOR
from mpillm.jit.isa.generic import flat
from mpillm.jit.isa.lanes import exponential_rows, scale_row, silu_mul_row, sum_squares
from mpillm.jit.parallel import in_parts


@policy.inlined
def _norm(x, start, weight, n, eps, y, to):
    scale = np.float32(1) / np.sqrt(sum_squares(x, start, n) / np.float32(n) + eps)
    scale_row(x, start, scale, weight, y, to, n)


@policy.helper
def _rms_norm_part(part, parts, x, stride, rows, n, weight, eps, y):
    for m in range(part * rows // parts, (part + 1) * rows // parts):
        _norm(x, m * stride, weight, n, eps, y, m * n)


_run_rms_norm = in_parts(_rms_norm_part)


def rms_norm(x_MH, weight, eps, y_MH, threads):
    """y = x / sqrt(mean(x**2) + eps) * weight, row by row."""
    rows, n = x_MH.shape
    _run_rms_norm((flat(x_MH), x_MH.strides[0] // 4, rows, n, weight, eps, flat(y_MH)), threads)


def head_rms_norm(x_MH, weight, size, eps):
    """The same in place for every head of ``size`` elements."""
    x, stride = flat(x_MH), x_MH.strides[0] // 4
    for m in range(x_MH.shape[0]):
        for head in range(x_MH.shape[1] // size):
            start = m * stride + head * size
            _norm(x, start, weight, size, eps, x, start)


def rope(x_MH, cos_MD, sin_MD, size):
    """Rotate the pairs (i, i + size / 2) of every head in place."""
    x, stride, half = flat(x_MH), x_MH.strides[0] // 4, size // 2
    cos, sin = flat(cos_MD), flat(sin_MD)
    for m in range(x_MH.shape[0]):
        for head in range(x_MH.shape[1] // size):
            start = m * stride + head * size
            for i in range(half):
                left, right = x[start + i], x[start + half + i]
                c, s = cos[m * half + i], sin[m * half + i]
                x[start + i] = left * c - right * s
                x[start + half + i] = right * c + left * s


@policy.helper
def _silu_mul_part(part, parts, x, rows, n, y):
    for m in range(part * rows // parts, (part + 1) * rows // parts):
        silu_mul_row(x, 2 * m * n, 2 * m * n + n, y, m * n, n)


_run_silu_mul = in_parts(_silu_mul_part)


def silu_mul(x_M2F, y_MF, threads):
    """y = silu(first half of the row) * second half."""
    rows, n = y_MF.shape
    _run_silu_mul((flat(x_M2F), rows, n, flat(y_MF)), threads)


def exponential(x, y):
    """y = exp(x): the exponential of softmax and SiLU by itself."""
    exponential_rows(x, y, x.size)


IN_PLACE, INT, REAL = types.float32[:, :], types.intp, types.float32
SIGNATURES = {
    rms_norm: (STRIDED, VECTOR, REAL, F32_2, INT),
    head_rms_norm: (IN_PLACE, VECTOR, INT, REAL),
    rope: (IN_PLACE, ROWS, ROWS, INT),
    silu_mul: (ROWS, F32_2, INT),
    exponential: (VECTOR, F32_1),
}


@lru_cache(None)
def elementwise_kernel(function: Any) -> Any:
    return policy.kernel(function, function.__name__, SIGNATURES[function])
