"""Linear layers in the tiers amx and avx512, and the activations in the order that they read.

Legend: M rows, N outputs, K inputs; a panel is 16 outputs, a row tile at most 16 rows. All arrays are flat.

One order of additions for every number of rows, of threads and of panels, for each (format, tier):
  bf16 amx     ascending 32s of K: even and odd k summed apart, each by fma from 0, added, then added to the output
  bf16 avx512  ascending pairs of K: fma of the odd k, then of the even one
  codes amx    ascending blocks of 32: the arithmetic of the other tiers
x is rounded to bf16 (nearest even) for bf16 weights; both instructions take subnormal numbers as 0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.code_tiles import codes_tiles_core
from mpillm.jit.gemm import ELEMENTS, F32_1, INT, VECTOR, quantised_part, reads
from mpillm.jit.isa import select
from mpillm.jit.isa.amx import ROOM, SCRATCH, bf16_block, configure, release
from mpillm.jit.isa.avx512 import MOST_ROWS, bf16_rows
from mpillm.jit.isa.generic import copy_block, round_sixteen, store_number
from mpillm.jit.isa.lanes import add_row
from mpillm.jit.tape import Operation

GROUP = 16             # panels whose outputs stay in the second cache while K goes by
K_STRETCH = 512        # of K that several blocks of rows share in tier avx512
BF16_STRETCH = 320     # of K, at most: two panels of it and 32 rows stay in the first cache
ROW_CHUNK = 512        # rows that share one pass over the weights
FEW_PANELS = 4         # panels that a thread of avx512 takes at a time


def tile_words(rows: int, k: int) -> int:
    """Elements of rows x k activations in tile order (:func:`tile_rows_part`)."""
    return rows * (-(-k // 32) * 32)


@policy.helper
def tile_rows_part(part, parts, x, rows, k, tiles):
    """x f32 [rows][k] to bf16 [row tile of 16][k tile of 32][rows in it][32], zeros beyond k."""
    blocks, k_tiles = (rows + 15) // 16, (k + 31) // 32
    for m in range(part * blocks // parts * 16, min(rows, (part + 1) * blocks // parts * 16)):
        first = m // 16 * 16
        size = min(16, rows - first)
        for t in range(k_tiles):
            to = first * k_tiles * 32 + (t * size + m - first) * 32
            start, count = m * k + t * 32, min(32, k - t * 32)
            if count == 32:
                round_sixteen(x, start, tiles, to)
                round_sixteen(x, start + 16, tiles, to + 16)
                continue
            for i in range(count):
                store_number(tiles, to + i, x[start + i])
            for i in range(count, 32):
                tiles[to + i] = 0


@policy.helper
def round_rows_part(part, parts, x, rows, k, pairs):
    """x f32 [rows][k] to bf16 [rows][k made even], a zero beyond an odd k."""
    stride = (k + 1) // 2 * 2
    for m in range(part * rows // parts, (part + 1) * rows // parts):
        for i in range(0, k - 15, 16):
            round_sixteen(x, m * k + i, pairs, m * stride + i)
        for i in range(k // 16 * 16, k):
            store_number(pairs, m * stride + i, x[m * k + i])
        if k < stride:
            pairs[m * stride + k] = 0


@policy.helper
def _finish(y, n, first, panels, rows_from, rows, tail, partial, bias):
    """Move a partly filled panel from its room to y, and add the bias."""
    columns = min(16 * panels, n - 16 * first)
    for m in range(rows_from, rows_from + rows):
        if partial:
            for i in range(columns):
                y[m * n + 16 * first + i] = tail[16 * m + i]
        if bias.size:
            for i in range(columns):
                y[m * n + 16 * first + i] += bias[16 * first + i]


@policy.helper
def bf16_avx512_part(part, parts, x, rows, k, w, panel_stride, bias, y, n, tail):
    """A thread's panels; x bf16 from :func:`round_rows_part`, ``tail`` takes the last, partly filled panel."""
    all_panels, x_stride = (n + 15) // 16, (k + 1) // 2 * 2
    p, stop = part * all_panels // parts, (part + 1) * all_panels // parts
    stretch = max(2, x_stride) if rows <= MOST_ROWS else K_STRETCH
    blocks = (rows + MOST_ROWS - 1) // MOST_ROWS
    while p < stop:
        panels = min(FEW_PANELS, stop - p)
        partial = 16 * (p + panels) > n
        if partial and panels > 1:
            panels, partial = panels - 1, False
        target, offset, stride = (tail, 0, 16) if partial else (y, 16 * p, n)
        for m in range(rows):
            for i in range(16 * panels):
                target[offset + m * stride + i] = 0
        for k_start in range(0, x_stride, stretch):
            pairs = (min(x_stride, k_start + stretch) - k_start) // 2
            for block in range(blocks):
                m = block * rows // blocks
                bf16_rows((block + 1) * rows // blocks - m, panels, x, m * x_stride + k_start, x_stride,
                          w, p * panel_stride + k_start * 16, panel_stride, pairs, target, offset + m * stride, stride)
        _finish(y, n, p, panels, 0, rows, tail, partial, bias)
        p += panels


@policy.helper
def _blocks_of_rows(full, leads, x, first_row, rows, k, w, p, panels, panel_stride, k_start, k_stop, sums, at_block,
                    blocks, room, at):
    """Blocks of 32 rows, or (``full`` 0) the one block of fewer; ``leads`` when nothing read the weights before."""
    step = 32 if full else rows
    for q in range(0, panels, 2):
        for row in range(0, rows, step):
            place = (q // 2 * blocks + at_block + row // 32) * 1024
            bf16_block(min(16, step), max(0, step - 16), min(2, panels - q), k_start == 0, leads and row == 0, x,
                       first_row + row, k, w, p + q, panel_stride, k_start, k_stop, sums, place, 32, room, at)


@policy.helper
def _write_out(sums, blocks, y, n, p, panels, first_row, rows, bias):
    """Sums [pair of panels][block of 32 rows][32][32] to their places in y, with the bias."""
    for row in range(0, rows, 32):
        count = min(32, rows - row)
        for q in range(0, panels, 2):
            start, column = (q // 2 * blocks + row // 32) * 1024, 16 * (p + q)
            to, columns = (first_row + row) * n + column, min(32, 16 * (panels - q), n - column)
            if columns == 32:
                copy_block(sums, start, y, to, n, count)
            else:
                for m in range(count):
                    for i in range(columns):
                        y[to + m * n + i] = sums[start + 32 * m + i]
            if bias.size:
                for m in range(count):
                    add_row(y, to + m * n, bias, column, columns)


@policy.helper
def bf16_amx_part(part, parts, x, rows, k, w, panel_stride, bias, y, n, tail, room):
    """The core of a linear layer of bf16 weights in tier amx; see tiles_core.

    Sums stay block by block in the thread's scratch while K goes by: in y their rows would be a power of two apart
    and share few sets of the cache.
    """
    all_panels, k_whole, at = (n + 15) // 16, (k + 31) // 32 * 32, part * SCRATCH
    sums = room[at + ROOM:at + SCRATCH].view(np.float32)
    # One block of rows reads each panel once, from end to end; more share a stretch that stays in cache.
    stretches = max(1, (k_whole + BF16_STRETCH - 1) // BF16_STRETCH) if rows > 32 else 1
    configured = 0                   # rows for which the tiles stand
    for first_row in range(0, rows, ROW_CHUNK):
        chunk = min(ROW_CHUNK, rows - first_row)
        rest, blocks = chunk % 32, (chunk + 31) // 32
        p, stop = part * all_panels // parts, (part + 1) * all_panels // parts
        while p < stop:
            panels = min(GROUP, stop - p)
            if k == 0:
                sums[:] = 0
            for stretch in range(stretches):
                k_start = stretch * (k_whole // 32) // stretches * 32
                k_stop = (stretch + 1) * (k_whole // 32) // stretches * 32
                for full in (1, 0):
                    count = chunk - rest if full else rest
                    if count == 0 or k == 0:
                        continue
                    size = 32 if full else rest
                    if configured != size:
                        configure(room, at, min(16, size), max(0, size - 16), 64, 16)
                        configured = size
                    before = 0 if full else chunk - rest
                    _blocks_of_rows(full, full or chunk == rest, x, first_row + before, count, k, w, p, panels,
                                    panel_stride, k_start, k_stop, sums, before // 32, blocks, room, at)
            _write_out(sums, blocks, y, n, p, panels, first_row, chunk, bias)
            p += panels
    if configured:
        release(room, at)


@lru_cache(None)
def tiles_core(name: str) -> Any:
    """The core of y = x @ w + bias in tier amx, for weights ``name``: bf16, or a format of amx_codes:

    ``core(part, parts, x, rows, k, w, panel_stride, bias, y, n, tail, room)`` for bf16, x as tile_rows_part makes
    it, panels of ceil(k / 32) * 32 inputs, those beyond k finite;
    ``core(part, parts, x, x_scales, x_sums, rows, k, w, w_scales, phase, bias, y, n, tail, room)`` for codes, as
    codes_block has them.

    ``bias`` empty if there is none, ``tail`` room for f32 [rows][16], ``room`` uint8 [parts][SCRATCH], 64-byte aligned.
    """
    if name == "bf16":
        return bf16_amx_part
    return codes_tiles_core(name)


FEW_ROWS = 8           # of quantised activations: up to here VPDPBUSD is quicker than tiles
_WORDS, _PLACES = types.uint16[::1], (VECTOR, F32_1, INT, F32_1)


@lru_cache(None)
def bf16_operations(tier: str) -> tuple[Operation, Operation]:
    """(activations to bf16, linear layer) of bf16 weights in tier avx512 or amx."""
    given = (reads(types.uint16), INT, INT, reads(types.uint16), INT, *_PLACES)
    key = select.key()
    if tier == "avx512":
        return (Operation(round_rows_part, "round_rows", (VECTOR, INT, INT, _WORDS)),
                Operation(bf16_avx512_part, f"linear_bf16_{key}", given))
    return (Operation(tile_rows_part, "tile_rows", (VECTOR, INT, INT, _WORDS)),
            Operation(tiles_core("bf16"), f"linear_bf16_{key}", (*given, types.uint8[::1])))


@lru_cache(None)
def codes_core(name: str) -> Any:
    """The core of a linear layer of quantised weights in tier amx, for few rows and for many."""
    many = tiles_core(name)

    @policy.helper
    def codes_part(part, parts, x, x_scales, x_sums, rows, k, w, w_scales, phase, bias, y, n, tail, room):
        if rows <= FEW_ROWS:
            quantised_part(part, parts, x, x_scales, x_sums, rows, k, w, w_scales, phase, bias, y, n, tail)
        else:
            many(part, parts, x, x_scales, x_sums, rows, k, w, w_scales, phase, bias, y, n, tail, room)

    return codes_part


@lru_cache(None)
def codes_operation(name: str) -> Operation:
    """A linear layer of quantised weights in tier amx."""
    return Operation(codes_core(name), f"linear_{name}_{select.key()}", (
        reads(types.int8), VECTOR, reads(types.int32), INT, INT, reads(ELEMENTS[name]), reads(types.int16), INT,
        *_PLACES, types.uint8[::1]))
