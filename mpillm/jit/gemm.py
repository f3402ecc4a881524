"""Matrix products with packed weights, for every format and number of rows.

Legend: M rows, N outputs, K inputs; a panel is 16 outputs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.isa import quantised
from mpillm.jit.isa.generic import MOST_ROWS, flat, rows_by_panels
from mpillm.jit.isa.quantised import blocks_by_panels, quantise_row
from mpillm.jit.isa.select import tier
from mpillm.jit.parallel import in_parts

GROUP = 4              # panels that a thread takes at a time
K_STRETCH = 512        # of K when there are several blocks of rows: GROUP panels of it stay in cache


@policy.inlined
def multiply(x, x_scales, x_offset, x_stride, rows, w, w_scales, w_offset, panel_stride, panels,
             k_start, k_stop, y, y_offset, y_stride):
    """y[rows, 16 * panels] += x[rows, k_start:k_stop] @ panels, in register blocks of a few rows."""
    if rows == 0:
        return
    blocks = (rows + MOST_ROWS - 1) // MOST_ROWS
    size, extra = rows // blocks, rows % blocks
    row = 0
    for block in range(blocks):
        count = size + 1 if block < extra else size
        rows_by_panels(count, panels, x, x_scales, x_offset + row * x_stride, x_stride, w, w_scales, w_offset,
                       panel_stride, k_start, k_stop, y, y_offset + row * y_stride, y_stride)
        row += count


@policy.inlined
def _clear(rows, columns, y, offset, stride):
    for m in range(rows):
        for i in range(columns):
            y[offset + m * stride + i] = 0


@policy.inlined
def _finish(rows, p, panels, partial, bias, y, n, tail):
    """Copy a partly filled panel from ``tail``, and add the bias."""
    columns = min(16 * panels, n - 16 * p)
    for m in range(rows):
        if partial:
            for i in range(columns):
                y[m * n + 16 * p + i] = tail[16 * m + i]
        if bias.size:
            for i in range(columns):
                y[m * n + 16 * p + i] += bias[16 * p + i]


@policy.helper
def _linear_part(part, parts, x, x_scales, rows, k, w, w_scales, panel_stride, bias, y, n, tail):
    """A thread's panels of a linear layer; ``tail`` takes the last, partly filled panel."""
    all_panels = (n + 15) // 16
    p, stop = part * all_panels // parts, (part + 1) * all_panels // parts
    stretch = k if rows <= MOST_ROWS else K_STRETCH
    while p < stop:
        panels = min(GROUP, stop - p)
        partial = 16 * (p + panels) > n
        if partial and panels > 1:
            panels, partial = panels - 1, False
        target, offset, stride = (tail, 0, 16) if partial else (y, 16 * p, n)
        _clear(rows, 16 * panels, target, offset, stride)
        for k_start in range(0, k, stretch):
            multiply(x, x_scales, 0, k, rows, w, w_scales, p * panel_stride, panel_stride, panels,
                     k_start, min(k, k_start + stretch), target, offset, stride)
        _finish(rows, p, panels, partial, bias, y, n, tail)
        p += panels


_run_linear = in_parts(_linear_part)


def linear(x_MK, x_scales, w, w_scales, panel_stride, bias, y_MN, tail, threads):
    """y = x @ w + bias; ``tail`` is room for [M, 16] f32, ``bias`` empty if there is none."""
    rows, k = x_MK.shape
    _run_linear((flat(x_MK), x_scales, rows, k, w, w_scales, panel_stride, bias, flat(y_MN),
                 y_MN.shape[1], tail), threads)


@policy.helper
def _quantised_part(part, parts, x, x_scales, x_sums, rows, k, w, w_scales, phase, bias, y, n, tail):
    """The same for quantised formats."""
    all_panels = (n + 15) // 16
    p, stop = part * all_panels // parts, (part + 1) * all_panels // parts
    stretch = k if rows <= quantised.MOST_ROWS else K_STRETCH
    while p < stop:
        panels = min(GROUP, stop - p)
        partial = 16 * (p + panels) > n
        if partial and panels > 1:
            panels, partial = panels - 1, False
        target, offset, stride = (tail, 0, 16) if partial else (y, 16 * p, n)
        _clear(rows, 16 * panels, target, offset, stride)
        for k_start in range(0, k, stretch):
            for row in range(0, rows, quantised.MOST_ROWS):
                blocks_by_panels(min(quantised.MOST_ROWS, rows - row), row, k, x, x_scales, x_sums, w, w_scales,
                                 phase, p, panels, k_start, min(k, k_start + stretch), target,
                                 offset + row * stride, stride)
        _finish(rows, p, panels, partial, bias, y, n, tail)
        p += panels


_run_quantised = in_parts(_quantised_part)


def linear_quantised(x_MK, x_scales, x_sums, w, w_scales, phase, bias, y_MN, tail, threads):
    """:func:`linear` of activations from :func:`quantise`; ``phase``: see ``quant/layout.py``."""
    rows, k = x_MK.shape
    _run_quantised((flat(x_MK), flat(x_scales), flat(x_sums), rows, k, w, w_scales, phase, bias, flat(y_MN),
                    y_MN.shape[1], tail), threads)


@policy.helper
def _quantise_part(part, parts, x, rows, k, codes, scales, sums):
    for m in range(part * rows // parts, (part + 1) * rows // parts):
        quantise_row(x, m * k, k, codes, m * k, scales, m * (k // 32), sums, m * (k // 16))


_run_quantise = in_parts(_quantise_part)


def quantise(x_MK, codes_MK, scales_MB, sums_MH, threads):
    """Activations to q8_0: int8 codes, float32 scales of 32-blocks, int32 sums of the codes of 16."""
    rows, k = x_MK.shape
    _run_quantise((flat(x_MK), rows, k, flat(codes_MK), flat(scales_MB), flat(sums_MH)), threads)


def reads(kind: Any, dimensions: int = 1, layout: Literal["A", "C"] = "C") -> types.Array:
    """The type of an array that a kernel only reads: a caller's may be read-only or not."""
    return types.Array(kind, dimensions, layout, readonly=True)


F32_1, F32_2 = types.float32[::1], types.float32[:, ::1]
VECTOR, ROWS, STRIDED = reads(types.float32), reads(types.float32, 2), reads(types.float32, 2, "A")
ELEMENTS: dict[str, Any] = {"f32": types.float32, "bf16": types.uint16, "f16": types.int16,
                            **{name: element for element, name in quantised.FORMAT_OF.items()}}


@lru_cache(None)
def linear_kernel(name: str) -> Any:
    """The compiled :func:`linear` or :func:`linear_quantised` of a weight format."""
    if name in quantised.SHAPES:
        signature = (reads(types.int8, 2), ROWS, reads(types.int32, 2), reads(ELEMENTS[name]),
                     reads(types.int16), types.intp, VECTOR, F32_2, F32_1, types.intp)
        return policy.kernel(linear_quantised, f"linear_{name}_{tier()}", signature)
    plain = (ROWS, VECTOR, reads(ELEMENTS[name]), VECTOR, types.intp, VECTOR, F32_2, F32_1, types.intp)
    return policy.kernel(linear, f"linear_{name}", plain)


@lru_cache(None)
def quantise_kernel() -> Any:
    signature = (ROWS, types.int8[:, ::1], F32_2, types.int32[:, ::1], types.intp)
    return policy.kernel(quantise, "quantise", signature)


NOTHING = np.zeros(0, np.float32)
