"""Packing rows of f32, f16 and bf16 into panels of 16 outputs, and looking rows up; others: pack_blocks.py."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.gemm import ELEMENTS, F32_2, ROWS, VECTOR, reads
from mpillm.jit.isa.generic import flat, load_number, pack_sixteen, store_number
from mpillm.jit.isa.interleave import SPREAD, spread_panel
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


@policy.helper
def _pack_words_part(part, parts, x, rows, words, first, every, shift, w, panel_stride, low, high, counts):
    """Move rows of words into their lanes, as they are; counts [parts]: values not finite.

    ``low`` and ``high``: the bits that such values have set, of a word's one value, or of its two.
    """
    first_panel, stop_panel = first // 16, (first + rows + 15) // 16
    panels, bad = stop_panel - first_panel, 0
    for p in range(first_panel + part * panels // parts, first_panel + (part + 1) * panels // parts):
        top, bottom, to = max(first, 16 * p), min(first + rows, 16 * p + 16), (p * every + shift) * panel_stride
        done = 0
        if bottom - top == 16:
            bad, done = bad + spread_panel(x, (top - first) * words, words, w, to, low, high), words // SPREAD * SPREAD
        for n in range(top, bottom):
            for i in range(done, words):
                word = x[(n - first) * words + i]
                w[to + 16 * i + n - 16 * p] = word
                bad += ((word & low) == low) + (high != 0 and (word & high) == high)
    counts[part] = bad


_run_pack_words = in_parts(_pack_words_part)


def pack_words(x_RK, first, every, shift, w, panel_stride, low, high, counts, threads):
    """Pack rows ``first`` and following that hold what the panels hold; panel_stride in words."""
    rows, words = x_RK.shape
    _run_pack_words((flat(x_RK), rows, words, first, every, shift, w, panel_stride, low, high, counts), threads)


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
def pack_words_kernel(bits: int) -> Any:
    """``pack_words`` of words of 16 or 32 bits."""
    word: Any = {16: types.uint16, 32: types.uint32}[bits]
    return policy.kernel(pack_words, f"pack_words_{bits}", (
        reads(word, 2), INT, INT, INT, word[::1], INT, word, word, COUNTS, INT))


@lru_cache(None)
def lookup_kernel(name: str) -> Any:
    signature = (reads(ELEMENTS[name]), VECTOR, INT, INT, INT, reads(types.int64), F32_2)
    return policy.kernel(lookup, f"lookup_{name}", signature)
