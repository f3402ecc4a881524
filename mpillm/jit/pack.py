"""Packing rows of f32, f16 and bf16 into panels of 16 outputs, and looking rows up; others: pack_blocks.py."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.gemm import ELEMENTS, F32_2, ROWS, VECTOR, reads
from mpillm.jit.isa.generic import flat, load_number, pack_sixteen, store_number
from mpillm.jit.parallel import in_parts


@policy.helper
def _pack_part(part, parts, x, rows, k, first, every, shift, w, panel_stride, pair, limit, counts):
    """Round rows into their lanes; counts [parts, 2]: values not finite, values beyond ``limit``.

    Panel p of these rows is panel p * every + shift of w. ``pair`` is 1 for formats with 16 values per k, 2 where
    two k stand together (bf16).
    """
    first_panel, stop_panel = first // 16, (first + rows + 15) // 16
    panels = stop_panel - first_panel
    nonfinite, beyond = 0, 0
    for p in range(first_panel + part * panels // parts, first_panel + (part + 1) * panels // parts):
        low, high = max(first, 16 * p), min(first + rows, 16 * p + 16)
        if high - low == 16:
            counted = pack_sixteen(x, (low - first) * k, k, k, w, (p * every + shift) * panel_stride, limit)
            nonfinite, beyond = nonfinite + counted[0], beyond + counted[1]
            continue
        for i in range(k):
            start = (p * every + shift) * panel_stride + (i // pair) * 16 * pair + i % pair
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


def pack(x_RK, first, every, shift, w, panel_stride, pair, limit, counts, threads):
    """Pack rows ``first`` and following; values of size ``limit`` and more would round to infinity."""
    rows, k = x_RK.shape
    _run_pack((flat(x_RK), rows, k, first, every, shift, w, panel_stride, pair, limit, counts), threads)


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


INT, COUNTS = types.intp, types.int64[::1]


@lru_cache(None)
def pack_kernel(name: str) -> Any:
    signature = (ROWS, INT, INT, INT, ELEMENTS[name][::1], INT, INT, types.float32, COUNTS, INT)
    return policy.kernel(pack, f"pack_{name}", signature)


@lru_cache(None)
def lookup_kernel(name: str) -> Any:
    signature = (reads(ELEMENTS[name]), VECTOR, INT, INT, INT, reads(types.int64), F32_2)
    return policy.kernel(lookup, f"lookup_{name}", signature)
