"""Packing rows of a weight matrix into panels of 16 outputs, and looking rows up again."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.gemm import ELEMENTS, F32_2, ROWS, VECTOR, reads
from mpillm.jit.isa.generic import flat, half_to_float, load_number, pack_sixteen, quantise_row, store_number
from mpillm.jit.parallel import in_parts

LARGEST_HALF = np.float32(65504)


@policy.helper
def _pack_part(part, parts, x, rows, k, first, w, panel_stride, pair, limit, counts):
    """Round rows into their lanes; counts [parts, 2]: values not finite, values beyond ``limit``.

    ``pair`` is 1 for formats with 16 values per k, 2 where two k stand together (bf16).
    """
    first_panel, stop_panel = first // 16, (first + rows + 15) // 16
    panels = stop_panel - first_panel
    nonfinite, beyond = 0, 0
    for p in range(first_panel + part * panels // parts, first_panel + (part + 1) * panels // parts):
        low, high = max(first, 16 * p), min(first + rows, 16 * p + 16)
        if high - low == 16:
            counted = pack_sixteen(x, (low - first) * k, k, k, w, p * panel_stride, limit)
            nonfinite, beyond = nonfinite + counted[0], beyond + counted[1]
            continue
        for i in range(k):
            start = p * panel_stride + (i // pair) * 16 * pair + i % pair
            for n in range(low, high):
                value = x[(n - first) * k + i]
                size = abs(value)
                if not size < np.inf:
                    nonfinite += 1
                elif size >= limit:
                    beyond += 1
                store_number(w, start + (n - 16 * p) * pair, value)
    counts[2 * part], counts[2 * part + 1] = nonfinite, beyond


_run_pack = in_parts(_pack_part)


def pack(x_RK, first, w, panel_stride, pair, limit, counts, threads):
    """Pack rows ``first`` and following; values of size ``limit`` and more would round to infinity."""
    rows, k = x_RK.shape
    _run_pack((flat(x_RK), rows, k, first, w, panel_stride, pair, limit, counts), threads)


@policy.helper
def _pack_q8_part(part, parts, x, rows, k, first, words, scales, row_codes, row_scales, counts):
    """Quantise rows into q8_0 panels; a block whose scale is beyond f16 counts as 32 values."""
    first_panel, stop_panel = first // 16, (first + rows + 15) // 16
    panels, blocks = stop_panel - first_panel, k // 32
    nonfinite, beyond = 0, 0
    for p in range(first_panel + part * panels // parts, first_panel + (part + 1) * panels // parts):
        for n in range(max(first, 16 * p), min(first + rows, 16 * p + 16)):
            start, lane = (n - first) * k, n - 16 * p
            quantise_row(x, start, k, row_codes, part * k, row_scales, part * blocks)
            for block in range(blocks):
                scale = row_scales[part * blocks + block]
                if not scale <= LARGEST_HALF:
                    for i in range(start + block * 32, start + block * 32 + 32):
                        nonfinite += not abs(x[i]) < np.inf
                    beyond += 32 * (scale > LARGEST_HALF)
                store_number(scales, (p * blocks + block) * 16 + lane, scale)
                to = (p * blocks + block) * 128 + lane
                for at in range(part * k + block * 32, part * k + block * 32 + 32, 4):
                    # Codes 0, 2, 1, 3 of a row become the four bytes of a word.
                    words[to] = ((row_codes[at] & 255) | (row_codes[at + 2] & 255) << 8
                                 | (row_codes[at + 1] & 255) << 16 | (row_codes[at + 3] & 255) << 24)
                    to += 16
    counts[2 * part], counts[2 * part + 1] = nonfinite, beyond


_run_pack_q8 = in_parts(_pack_q8_part)


def pack_q8(x_RK, first, codes, scales, counts, threads):
    """The same for q8_0."""
    rows, k = x_RK.shape
    row_codes = np.empty(threads * k, np.int16)
    row_scales = np.empty(threads * (k // 32), np.float32)
    _run_pack_q8((flat(x_RK), rows, k, first, codes.view(np.uint32), scales, row_codes, row_scales, counts),
                 threads)


def pack_codes(codes_RK, first, codes):
    """Copy rows of q8_0 codes into their lanes."""
    rows, k = codes_RK.shape
    source = flat(codes_RK)
    for r in range(rows):
        p, lane = (first + r) // 16, (first + r) % 16
        for i in range(k):
            codes[p * 16 * k + (i // 4) * 64 + lane * 4 + i % 4] = source[r * k + i]


def lookup(w, scales, panel_stride, pair, n, ids, y_MK):
    """Rows ``ids`` of a packed f32, f16 or bf16 matrix as f32; the number of ids out of range."""
    k, y = y_MK.shape[1], flat(y_MK)
    bad = 0
    for m in range(ids.size):
        if not 0 <= ids[m] < n:
            bad += 1
            continue
        start = (ids[m] // 16) * panel_stride + (ids[m] % 16) * pair
        for i in range(k):
            y[m * k + i] = load_number(w, start + (i // pair) * 16 * pair + i % pair)
    return bad


def lookup_q8(w, scales, panel_stride, pair, n, ids, y_MK):
    """As :func:`lookup` for q8_0: code times scale, which is exact in f32."""
    k, y = y_MK.shape[1], flat(y_MK)
    bad = 0
    for m in range(ids.size):
        if not 0 <= ids[m] < n:
            bad += 1
            continue
        p, lane = ids[m] // 16, ids[m] % 16
        for i in range(k):
            scale = half_to_float(scales, (p * (k // 32) + i // 32) * 16 + lane)
            y[m * k + i] = scale * w[p * 16 * k + (i // 4) * 64 + lane * 4 + i % 4]
    return bad


INT, COUNTS = types.intp, types.int64[::1]
HALF_1 = types.int16[::1]


@lru_cache(None)
def pack_kernel(name: str) -> Any:
    if name == "q8_0":
        return policy.kernel(pack_q8, "pack_q8_0", (ROWS, INT, types.int8[::1], HALF_1, COUNTS, INT))
    signature = (ROWS, INT, ELEMENTS[name][::1], INT, INT, types.float32, COUNTS, INT)
    return policy.kernel(pack, f"pack_{name}", signature)


@lru_cache(None)
def pack_codes_kernel() -> Any:
    return policy.kernel(pack_codes, "pack_codes", (reads(types.int8, 2), INT, types.int8[::1]))


@lru_cache(None)
def lookup_kernel(name: str) -> Any:
    function, scales = (lookup_q8, reads(types.int16)) if name == "q8_0" else (lookup, VECTOR)
    signature = (reads(ELEMENTS[name]), scales, INT, INT, INT, reads(types.int64), F32_2)
    return policy.kernel(function, f"lookup_{name}", signature)
