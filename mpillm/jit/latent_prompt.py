"""Attention of a prompt's rows over keys and values that are made of cached latents, a stretch of positions at a time.

A stretch's latents are read from the cache; products (of jit/gemm and the others) make each head's key and value parts
of them; these are laid out as blocks of float32 keys and values (jit/attention), and a softmax over the stretch is
folded into those of the stretches before. A row goes through the stretches in order, whatever rows are beside it, and
never reads positions behind its own.

Legend: P positions of a stretch, H heads, R rows of a prompt.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.attention import QUERIES, STRETCH, fold_core, prepare_numbers, release_nothing, stretch_core
from mpillm.jit.attention_tiles import release_tiles, stretch_by_tiles
from mpillm.jit.block_steps import TILE, block_step
from mpillm.jit.cache_rows import BLOCK, Q8_BYTES
from mpillm.jit.gemm import ELEMENTS, F32_1, INT, VECTOR, reads
from mpillm.jit.isa.amx import SCRATCH
from mpillm.jit.isa.generic import load_number, store_number
from mpillm.jit.isa.lanes import divide_row, times_row
from mpillm.jit.isa.select import key
from mpillm.jit.isa.tile_moves import pack_keys, pack_values
from mpillm.jit.tape import Operation

BLOCKS = STRETCH // BLOCK       # of the cache in a stretch


def _take_core(quantised: bool) -> Any:
    @policy.helper
    def take_part(part, parts, positions, cache, words, table, first_block, pair, rank, rope, latents, stride, rotated):
        """latents [P] with rows ``stride`` apart, and rotated [P][rope], of cached latent rows.

        They lie in the blocks that ``table`` names from ``first_block`` on.
        """
        size = rank + rope
        for m in range(part * positions // parts, (part + 1) * positions // parts):
            block, within = np.int64(table[first_block + m // BLOCK]), m % BLOCK
            panel, blocks = within // 16, size // 32
            at = block * BLOCK * size + panel * 16 * size + within % 16 * pair
            behind = (block * Q8_BYTES * size + BLOCK * size) // 2 + panel * 16 * blocks + within % 16
            codes = block * Q8_BYTES * size + panel * 16 * size + within % 16 * 4
            for d in range(size):
                if quantised:
                    value = np.float32(cache[codes + d // 4 * 64 + d % 4]) * load_number(words, behind + d // 32 * 16)
                else:
                    value = load_number(cache, at + d // pair * pair * 16 + d % pair)
                if d < rank:
                    latents[m * stride + d] = value
                else:
                    rotated[m * rope + d - rank] = value

    return take_part


@policy.helper
def _fill_part(part, parts, positions, heads, nope, rope, value, k, k_stride, k_step, v, v_stride, v_step, rotated,
               keys, values):
    """Blocks of keys [BLOCKS][H][4][nope + rope][16] and values [BLOCKS][H][C][64][16] of the products k and v.

    Rows of these stand ``k_stride`` and ``v_stride`` apart, heads ``k_step`` and ``v_step``.
    """
    size, width, panels = nope + rope, (value + 15) // 16 * 16, (positions + 15) // 16
    for item in range(part * heads * panels // parts, (part + 1) * heads * panels // parts):
        head, panel = item // panels, item % panels
        count = min(16, positions - 16 * panel)
        block, within = panel // 4 * heads + head, panel % 4 * 16
        base = block * BLOCK * size + within * size
        for i in range(count):
            start = (16 * panel + i) * k_stride + head * k_step
            for d in range(nope):
                keys[base + d * 16 + i] = k[start + d]
            start = (16 * panel + i) * rope
            for d in range(rope):
                keys[base + (nope + d) * 16 + i] = rotated[start + d]
            start = (16 * panel + i) * v_stride + head * v_step
            to = block * BLOCK * width + (within + i) * 16
            for d in range(value):
                values[to + d // 16 * BLOCK * 16 + d % 16] = v[start + d]


@policy.helper
def _fill_key(x, start, stride, n, count, keys, to):
    """Columns of up to 16 positions to their places in a panel of bf16 keys; see isa/attention_amx.py."""
    whole = n // 32 * 32
    pack_keys(x, start, stride, whole, count, keys, to)
    for i in range(count):
        for d in range(whole, n):
            store_number(keys, to + d // 2 * 32 + i * 2 + d % 2, x[start + i * stride + d])


@policy.helper
def _fill_tiles_part(part, parts, positions, heads, nope, rope, value, k, k_stride, k_step, v, v_stride, v_step,
                     rotated, keys, values):
    """The same in bf16, for products of tiles: keys [BLOCKS][H][4][D / 2][16][2], values [BLOCKS][H][C][32][16][2]."""
    size, width, panels = nope + rope, (value + 15) // 16 * 16, (positions + 15) // 16
    for item in range(part * heads * panels // parts, (part + 1) * heads * panels // parts):
        head, panel = item // panels, item % panels
        count = min(16, positions - 16 * panel)
        block, within = panel // 4 * heads + head, panel % 4 * 16
        base = block * BLOCK * size + within * size
        _fill_key(k, 16 * panel * k_stride + head * k_step, k_stride, nope, count, keys, base)
        _fill_key(rotated, 16 * panel * rope, rope, rope, count, keys, base + nope * 16)
        for i in range(0, count, 2):
            even = (16 * panel + i) * v_stride + head * v_step
            odd, to = even + v_stride if i + 1 < count else even, block * BLOCK * width + (within + i) * 16
            pack_values(v, even, odd, value // 16 * 16, values, to)
            for d in range(value // 16 * 16, value):
                at = to + d // 16 * BLOCK * 16 + d % 16 * 2
                store_number(values, at, v[even + d])
                store_number(values, at + 1, v[odd + d])


def _attend_core(tiled: bool) -> Any:
    fold = fold_core(tiled)
    if tiled:
        (prepare, stretch_of_blocks), finish = stretch_by_tiles(False), release_tiles
    else:
        stretch_of_blocks = stretch_core(block_step("f32", "f32"))
        prepare, finish = prepare_numbers, release_nothing

    @policy.helper
    def attend_part(part, parts, rows, begin, stretch, heads, scale, size, v_size, q_in, q_at, q_stride, keys, values,
                    none, table, ones, most, total, acc, row_state, out, out_at, out_stride, scratch):
        """Rows at positions ``begin`` ... attend to ``stretch``, whose sums are folded into most, total and acc.

        These are [rows of the prompt][H] and [..][H][width], from row ``row_state`` on. A row whose last stretch this
        is gets its output. Heads one after the other, so that a head's keys and values stay in the cache.
        """
        width, tiles, at = (v_size + 15) // 16 * 16, (rows + QUERIES - 1) // QUERIES, part * SCRATCH
        q, scores = np.empty(QUERIES * size, np.float32), np.empty(QUERIES * BLOCK, np.float32)
        weighted, tile, tile_codes = np.empty(1, np.float32), np.empty(TILE, np.float32), np.empty(TILE, np.int8)
        codes, code_scales, code_sums = np.empty(1, np.int8), np.empty(1, np.float32), np.empty(1, np.int32)
        own_most, own_total = np.empty(QUERIES, np.float32), np.empty(QUERIES, np.float32)
        own_acc = np.empty(QUERIES * width, np.float32)
        for item in range(part, tiles * heads, parts):
            head, row = item // tiles, item % tiles * QUERIES
            count = min(QUERIES, rows - row)
            for i in range(count):
                times_row(q_in, q_at + (row + i) * q_stride + head * size, scale, q, i * size, size)
            prepare(q, count, size, codes, code_scales, code_sums, scratch, at)
            stretch_of_blocks(q, codes, code_scales, code_sums, 1, count, begin + row, 0, head, heads, keys, none,
                              values, none, table, 0, ones, 0, 1, size, v_size, width, 0, stretch, scores, weighted,
                              tile, tile_codes, own_most, own_total, own_acc, scratch, at, 0)
            fold(stretch == 0, most, total, acc, (row_state + row) * heads + head, heads, own_most, 0, own_total, 0,
                 own_acc, 0, count, width)
            for i in range(count):
                state = (row_state + row + i) * heads + head
                if (begin + row + i) // STRETCH == stretch:
                    to = out_at + (row + i) * out_stride + head * v_size
                    divide_row(acc, state * width, total[state], out, to, v_size)
        finish(scratch, at)

    return attend_part


_INTS = reads(types.int32)


@lru_cache(None)
def take_operation(kv_type: str) -> Operation:
    """Cached latent rows as numbers."""
    cache = (reads(ELEMENTS[kv_type]), reads(types.int16))
    return Operation(_take_core(kv_type == "q8_0"), f"latent_read_{kv_type}", (
        INT, *cache, _INTS, INT, INT, INT, INT, F32_1, INT, F32_1))


@lru_cache(None)
def fill_operation(tiled: bool) -> Operation:
    """Keys and values of a stretch in blocks, float32 or, for products of tiles, bf16."""
    core, kept = (_fill_tiles_part, types.uint16[::1]) if tiled else (_fill_part, F32_1)
    return Operation(core, "latent_fill" + (f"_tiles_{key()}" if tiled else ""), (
        INT, INT, INT, INT, INT, VECTOR, INT, INT, VECTOR, INT, INT, VECTOR, kept, kept))


@lru_cache(None)
def attend_operation(tiled: bool) -> Operation:
    """A prompt's rows over a stretch."""
    kept = types.uint16[::1] if tiled else F32_1
    return Operation(_attend_core(tiled), f"latent_attend_{'tiles_' if tiled else ''}{key()}", (
        INT, INT, INT, INT, types.float32, INT, INT, VECTOR, INT, INT, kept, kept, types.int16[::1], _INTS, _INTS,
        F32_1, F32_1, F32_1, INT, F32_1, INT, INT, types.uint8[::1]))


def warm_up(kv_type: str, tiled: bool) -> list[Any]:
    """What makes each kernel."""
    return [lambda: take_operation(kv_type), lambda: fill_operation(tiled), lambda: attend_operation(tiled)]
