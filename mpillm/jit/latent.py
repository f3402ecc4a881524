"""Latent attention (MLA, arXiv 2405.04434): products of every head with a matrix of its own.

Legend: T rows, H heads, K inputs and N outputs of each head. A head's outputs are whole panels in the packed matrix,
heads below each other. Inputs are taken head by head, [H][T][K], as the product of the weights' format has them; what
is added up, and in which order, is that of a linear layer, so that a row's bits depend on nothing but the row.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.elementwise import norm_row, rotate_row
from mpillm.jit.fused import ACTIVATIONS, INTS, PAIRS, activation, product
from mpillm.jit.gemm import ELEMENTS, F32_1, INT, VECTOR, reads
from mpillm.jit.isa import quantised, select
from mpillm.jit.isa.amx import SCRATCH
from mpillm.jit.isa.generic import store_number
from mpillm.jit.isa.quantised import quantise_row
from mpillm.jit.moe import kind_of
from mpillm.jit.tape import Operation


@policy.helper
def _take_numbers_part(part, parts, rows, heads, n, k, x, x_stride, x_step, taken):
    """``n`` values of each head, zeros up to ``k``. Heads of a row stand ``x_step`` apart."""
    for item in range(part * heads * rows // parts, (part + 1) * heads * rows // parts):
        start = item % rows * x_stride + item // rows * x_step
        for i in range(n):
            taken[item * k + i] = x[start + i]
        for i in range(n, k):
            taken[item * k + i] = 0


@policy.helper
def _take_codes_part(part, parts, rows, heads, n, k, x, x_stride, x_step, codes, scales, sums):
    """The same in q8_0."""
    row = np.zeros(k, np.float32)
    for item in range(part * heads * rows // parts, (part + 1) * heads * rows // parts):
        start = item % rows * x_stride + item // rows * x_step
        for i in range(n):
            row[i] = x[start + i]
        quantise_row(row, 0, k, codes, item * k, scales, item * (k // 32), sums, item * (k // 16))


@policy.helper
def _take_pairs_part(part, parts, rows, heads, n, k, x, x_stride, x_step, pairs):
    """The same in bf16, as round_rows_part of jit/tiles.py has it."""
    stride = (k + 1) // 2 * 2
    for item in range(part * heads * rows // parts, (part + 1) * heads * rows // parts):
        start = item % rows * x_stride + item // rows * x_step
        for i in range(n):
            store_number(pairs, item * stride + i, x[start + i])
        for i in range(n, stride):
            pairs[item * stride + i] = 0


@policy.helper
def _take_tiles_part(part, parts, rows, heads, n, k, x, x_stride, x_step, tiles):
    """The same as tile_rows_part of jit/tiles.py has it, the rows of each head by themselves."""
    k_tiles = (k + 31) // 32
    for item in range(part * heads * rows // parts, (part + 1) * heads * rows // parts):
        m, head = item % rows, item // rows
        first = m // 16 * 16
        size, start = min(16, rows - first), m * x_stride + head * x_step
        for t in range(k_tiles):
            to = (head * rows + first) * k_tiles * 32 + (t * size + m - first) * 32
            count = max(0, min(32, n - t * 32))
            for i in range(count):
                store_number(tiles, to + i, x[start + t * 32 + i])
            for i in range(count, 32):
                tiles[to + i] = 0


def _product_core(multiply: Any) -> Any:
    @policy.helper
    def by_heads(part, parts, rows, heads, x, x_scales, x_sums, x_stride, k, w, w_scales, stride, scale_stride, none,
                 words, room, each, tail, tiles, out, out_stride, out_step, n):
        """out [T][H * step] = x of each head @ its matrix: panels of all heads in a row, a thread its stretch."""
        y, scratch, panels = room[part * each:], tiles[part * SCRATCH:], (n + 15) // 16
        unit, stop = part * heads * panels // parts, (part + 1) * heads * panels // parts
        while unit < stop:
            head, p = unit // panels, unit % panels
            beside = min(2 * PAIRS, panels - p, stop - unit)
            width, first = 16 * beside, head * rows
            multiply(x[first * x_stride:], x_scales[first * (k // 32):], x_sums[first * (k // 16):], words, rows, k,
                     w[unit * stride:], w_scales[unit * scale_stride:], stride, 0, none, y, width, tail, scratch, words)
            columns = min(width, n - 16 * p)
            for m in range(rows):
                to = m * out_stride + head * out_step + 16 * p
                for i in range(columns):
                    out[to + i] = y[m * width + i]
            unit += beside

    return by_heads


_TAKEN = (INT, INT, INT, INT, VECTOR, INT, INT)
_TAKE = {"numbers": (_take_numbers_part, (F32_1,)), "pairs": (_take_pairs_part, (types.uint16[::1],)),
         "tiles": (_take_tiles_part, (types.uint16[::1],)),
         "codes": (_take_codes_part, (types.int8[::1], F32_1, types.int32[::1]))}


@lru_cache(None)
def take_operation(kind: str) -> Operation:
    """Inputs of every head as products take them; ``kind`` as jit/moe.py's kind_of says."""
    core, kept = _TAKE[kind]
    return Operation(core, f"latent_take_{kind}", (*_TAKEN, *kept))


@lru_cache(None)
def product_operation(name: str) -> Operation:
    """The product of every head with its matrix, of weights ``name``."""
    w_scales = reads(types.int16) if name in quantised.SHAPES else VECTOR
    return Operation(_product_core(product(name)), f"latent_product_{name}_{select.key()}", (
        INT, INT, ACTIVATIONS[activation(name)], VECTOR, INTS, INT, INT, reads(ELEMENTS[name]), w_scales, INT, INT,
        VECTOR, types.uint16[::1], F32_1, INT, F32_1, types.uint8[::1], F32_1, INT, INT, INT))


@policy.helper
def _rows_part(part, parts, rows, rank, rope, x, x_stride, weight, eps, cos, sin, heads, nope, q, q_stride, absorbed,
               normed, normed_stride):
    """Norm each row's latent and rotate what stands behind it, and the last columns of each query head, in place.

    ``absorbed`` [T][H][rank + rope], if there is room, gets the rotated ones behind its first ``rank`` columns;
    ``normed``, likewise, a copy of the latent.
    """
    for item in range(part * rows * (heads + 1) // parts, (part + 1) * rows * (heads + 1) // parts):
        m, head = item // (heads + 1), item % (heads + 1)
        angle = m * (rope // 2)
        if head == heads:
            start = m * x_stride
            norm_row(x, start, weight, rank, eps, x, start)
            rotate_row(x, start + rank, cos, sin, angle, rope, x, start + rank)
            if normed.size:
                for i in range(rank):
                    normed[m * normed_stride + i] = x[start + i]
            continue
        start = m * q_stride + head * (nope + rope) + nope
        rotate_row(q, start, cos, sin, angle, rope, q, start)
        if absorbed.size:
            to = (m * heads + head) * (rank + rope) + rank
            for i in range(rope):
                absorbed[to + i] = q[start + i]


@policy.helper
def _spread_part(part, parts, rows, heads, nope, rope, value, k, k_stride, k_step, v, v_stride, v_step, rotated,
                 rotated_stride, keys, values):
    """keys [T][H][nope + rope], values [T][H][value] of each head's parts and the rotated columns that all share."""
    for item in range(part * rows * heads // parts, (part + 1) * rows * heads // parts):
        m, head = item // heads, item % heads
        start, to = m * k_stride + head * k_step, item * (nope + rope)
        for i in range(nope):
            keys[to + i] = k[start + i]
        start, to = m * rotated_stride, to + nope
        for i in range(rope):
            keys[to + i] = rotated[start + i]
        start, to = m * v_stride + head * v_step, item * value
        for i in range(value):
            values[to + i] = v[start + i]


@lru_cache(None)
def rows_operation() -> Operation:
    """Latents normed, rotated columns rotated."""
    return Operation(_rows_part, "latent_rows", (
        INT, INT, INT, F32_1, INT, VECTOR, types.float32, VECTOR, VECTOR, INT, INT, F32_1, INT, F32_1,
        F32_1, INT))


@lru_cache(None)
def spread_operation() -> Operation:
    """Keys and values of every head."""
    return Operation(_spread_part, "latent_spread", (
        INT, INT, INT, INT, INT, VECTOR, INT, INT, VECTOR, INT, INT, VECTOR, INT, F32_1, F32_1))


def warm_up(names: list[str]) -> list[Any]:
    """What makes each kernel of latent attention whose weights have these formats."""
    kinds = sorted({kind_of(name) for name in names})
    return [*(lambda name=name: product_operation(name) for name in names),
            *(lambda kind=kind: take_operation(kind) for kind in kinds), rows_operation, spread_operation]
