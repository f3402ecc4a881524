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
from mpillm.jit.isa.generic import MOST_ROWS, rows_by_panels
from mpillm.jit.isa.quantised import blocks_by_panels, quantise_row
from mpillm.jit.isa.select import key
from mpillm.jit.tape import Operation

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
def clear(rows, columns, y, offset, stride):
    for m in range(rows):
        for i in range(columns):
            y[offset + m * stride + i] = 0


@policy.inlined
def finish(rows, p, panels, partial, bias, y, n, tail):
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
def linear_part(part, parts, x, x_scales, rows, k, w, w_scales, panel_stride, bias, y, n, tail):
    """A thread's panels of a linear layer; ``tail`` takes the last, partly filled panel."""
    all_panels = (n + 15) // 16
    p, stop = part * all_panels // parts, (part + 1) * all_panels // parts
    stretch = max(k, 1) if rows <= MOST_ROWS else K_STRETCH
    while p < stop:
        panels = min(GROUP, stop - p)
        partial = 16 * (p + panels) > n
        if partial and panels > 1:
            panels, partial = panels - 1, False
        target, offset, stride = (tail, 0, 16) if partial else (y, 16 * p, n)
        clear(rows, 16 * panels, target, offset, stride)
        for k_start in range(0, k, stretch):
            multiply(x, x_scales, 0, k, rows, w, w_scales, p * panel_stride, panel_stride, panels,
                     k_start, min(k, k_start + stretch), target, offset, stride)
        finish(rows, p, panels, partial, bias, y, n, tail)
        p += panels


@policy.helper
def quantised_part(part, parts, x, x_scales, x_sums, rows, k, w, w_scales, phase, bias, y, n, tail):
    """The same for quantised formats."""
    all_panels = (n + 15) // 16
    p, stop = part * all_panels // parts, (part + 1) * all_panels // parts
    stretch = max(k, 1) if rows <= quantised.MOST_ROWS else K_STRETCH
    while p < stop:
        panels = min(GROUP, stop - p)
        partial = 16 * (p + panels) > n
        if partial and panels > 1:
            panels, partial = panels - 1, False
        target, offset, stride = (tail, 0, 16) if partial else (y, 16 * p, n)
        clear(rows, 16 * panels, target, offset, stride)
        for k_start in range(0, k, stretch):
            for row in range(0, rows, quantised.MOST_ROWS):
                blocks_by_panels(min(quantised.MOST_ROWS, rows - row), row, k, x, x_scales, x_sums, w, w_scales,
                                 phase, p, panels, k_start, min(k, k_start + stretch), target,
                                 offset + row * stride, stride)
        finish(rows, p, panels, partial, bias, y, n, tail)
        p += panels


@policy.helper
def quantise_part(part, parts, x, rows, k, codes, scales, sums):
    for m in range(part * rows // parts, (part + 1) * rows // parts):
        quantise_row(x, m * k, k, codes, m * k, scales, m * (k // 32), sums, m * (k // 16))


def reads(kind: Any, dimensions: int = 1, layout: Literal["A", "C"] = "C") -> types.Array:
    """The type of an array that a kernel only reads: a caller's may be read-only or not."""
    return types.Array(kind, dimensions, layout, readonly=True)


INT = types.intp
F32_1, F32_2 = types.float32[::1], types.float32[:, ::1]
VECTOR, ROWS, STRIDED = reads(types.float32), reads(types.float32, 2), reads(types.float32, 2, "A")
ELEMENTS: dict[str, Any] = {"f32": types.float32, "bf16": types.uint16, "f16": types.int16,
                            **{name: element for element, name in quantised.FORMAT_OF.items()}}


@lru_cache(None)
def linear_operation(name: str) -> Operation:
    """y = x @ w + bias for a weight format, of activations from :func:`quantise_operation` where it is quantised.

    ``tail`` is room for [rows, 16], ``bias`` empty if there is none; ``phase``: see ``quant/layout.py``.
    """
    w = reads(ELEMENTS[name])
    if name in quantised.SHAPES:
        return Operation(quantised_part, f"linear_{name}_{key()}", (
            reads(types.int8), VECTOR, reads(types.int32), INT, INT, w, reads(types.int16), INT, VECTOR, F32_1, INT,
            F32_1))
    return Operation(linear_part, f"linear_{name}", (
        VECTOR, VECTOR, INT, INT, w, VECTOR, INT, VECTOR, F32_1, INT, F32_1))


@lru_cache(None)
def quantise_operation() -> Operation:
    """Activations to q8_0: int8 codes, float32 scales of 32-blocks, int32 sums of the codes of 16."""
    return Operation(quantise_part, "quantise", (VECTOR, INT, INT, types.int8[::1], F32_1, types.int32[::1]))


NOTHING = np.zeros(0, np.float32)
