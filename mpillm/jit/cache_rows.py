"""Rows of keys and values, rounded into the blocks of the KV cache; its layout is described in jit/attention.py.

A block number below 0 in the table says that the block is held elsewhere: nothing is written there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.elementwise import norm_row, rotate_row
from mpillm.jit.gemm import ELEMENTS, F32_1, VECTOR, reads
from mpillm.jit.isa.generic import store_apart, store_number, store_pairs
from mpillm.jit.isa.lanes import all_below
from mpillm.jit.isa.quantised import quantise_row
from mpillm.jit.tape import Operation

BLOCK = 64
Q8_BYTES = 68           # of 64 positions of a column: codes, and two bytes for 32 of them
HALF_LIMIT = np.float32(65520)
#: positions (of keys: columns) that stand together, and the smallest size that rounds to infinity; compiled in, and so
#: kept here, where a change makes kernels anew
HELD = {"f32": (1, np.float32(np.inf)), "f16": (1, HALF_LIMIT), "bf16": (2, np.float32(3.3961775e38))}


@policy.helper
def _store_row(cache, to, together, step, stride, x, start, size, poison):
    """Round a head's row into the cache, as NaN where ``poison``.

    Groups of ``together`` values lie ``step`` elements apart, their values ``stride``.
    """
    for d in range(size):
        value = np.float32(np.nan) if poison else x[start + d]
        store_number(cache, to + d // together * step + d % together * stride, value)


@policy.helper
def _store_singles(cache, to, x, start, size):
    """A key of f32 or f16, a multiple of 16 wide."""
    store_apart(cache, to, 16, 256, x, start, size)


@policy.helper
def _write_codes(cache, words, values, j, kv_heads, size, x, start, row_seq, position, table, table_width):
    """The writer of a cache of q8_0; ``words`` is its memory as 16-bit words. A scale that f16 cannot hold is NaN."""
    block, within = np.int64(table[row_seq * table_width + position // BLOCK]), position % BLOCK
    if block < 0:
        return
    codes, scales, sums = np.empty(size, np.int8), np.empty(size // 32, np.float32), np.empty(size // 16, np.int32)
    quantise_row(x, start, size, codes, 0, scales, 0, sums, 0)
    at, blocks = (block * kv_heads + j) * Q8_BYTES * size, size // 32
    behind = (at + BLOCK * size) // 2
    for i in range(blocks):
        scale = scales[i] if scales[i] < HALF_LIMIT else np.float32(np.nan)
        where = i * BLOCK + within if values else (within // 16 * blocks + i) * 16 + within % 16
        store_number(words, behind + where, scale)
    if values:
        for d in range(size):
            cache[at + d // 16 * BLOCK * 16 + within * 16 + d % 16] = codes[d]
    else:
        to = at + within // 16 * 16 * size + within % 16 * 4
        for d in range(size):
            cache[to + d // 4 * 64 + d % 4] = codes[d]


@lru_cache(None)
def writer(kind: str) -> Any:
    """``write(cache, words, values, j, kv_heads, size, x, start, row_seq, position, table, table_width)``.

    Rounds head ``j``'s key (or with ``values`` its value), the ``size`` numbers from x[start] on, into a cache of this
    type. A number that the type cannot hold, or one that is not finite, makes the head NaN at this position, and so
    all that attends to it, on every rank by the sums.
    """
    if kind == "q8_0":
        return _write_codes
    pair, limit = HELD[kind]
    store_key = store_pairs if pair == 2 else _store_singles

    @policy.helper
    def write_numbers(cache, words, values, j, kv_heads, size, x, start, row_seq, position, table, table_width):
        block, within = np.int64(table[row_seq * table_width + position // BLOCK]), position % BLOCK
        if block < 0:
            return
        lost = not all_below(x, start, size, limit)
        at, slow = (block * kv_heads + j) * BLOCK, lost or size % 16 > 0
        if values:
            to = at * ((size + 15) // 16) * 16 + within // pair * pair * 16 + within % pair
            if slow:
                _store_row(cache, to, 16, BLOCK * 16, pair, x, start, size, lost)
            else:
                store_apart(cache, to, pair, BLOCK * 16, x, start, size)
        else:
            to = (at + within // 16 * 16) * size + within % 16 * pair
            if slow:
                _store_row(cache, to, pair, pair * 16, 1, x, start, size, lost)
            else:
                store_key(cache, to, x, start, size)

    return write_numbers


def _rope_write_core(write_key: Any, write_value: Any) -> Any:
    @policy.helper
    def rope_write_part(part, parts, rows, q, q_stride, k, k_stride, v, v_stride, heads, kv_heads, size, v_size, cos,
                        sin, q_norm, k_norm, eps, k_cache, k_words, v_cache, v_words, row_seq, positions, table,
                        table_width):
        """Norm (if there are norms) and rotate queries and keys in place, and round keys and values into the cache.

        A work item is a head of a row.
        """
        both = heads + kv_heads
        for item in range(part * rows * both // parts, (part + 1) * rows * both // parts):
            m, head = item // both, item % both
            angle = m * (size // 2)
            if head < heads:
                start = m * q_stride + head * size
                if q_norm.size:
                    norm_row(q, start, q_norm, size, eps, q, start)
                rotate_row(q, start, cos, sin, angle, size, q, start)
                continue
            j = head - heads
            start = m * k_stride + j * size
            if k_norm.size:
                norm_row(k, start, k_norm, size, eps, k, start)
            rotate_row(k, start, cos, sin, angle, size, k, start)
            write_key(k_cache, k_words, False, j, kv_heads, size, k, start, row_seq[m], positions[m], table,
                      table_width)
            write_value(v_cache, v_words, True, j, kv_heads, v_size, v, m * v_stride + j * v_size, row_seq[m],
                        positions[m], table, table_width)

    return rope_write_part


def _cache_write_core(write_key: Any, write_value: Any) -> Any:
    @policy.helper
    def cache_write_part(part, parts, rows, k, k_stride, v, v_stride, kv_heads, size, v_size, k_cache, k_words, v_cache,
                         v_words, row_seq, positions, table, table_width):
        """Round keys, and values if ``v_size``, into the cache as they are; a work item is a head of a row."""
        for item in range(part * rows * kv_heads // parts, (part + 1) * rows * kv_heads // parts):
            m, j = item // kv_heads, item % kv_heads
            write_key(k_cache, k_words, False, j, kv_heads, size, k, m * k_stride + j * size, row_seq[m], positions[m],
                      table, table_width)
            if v_size:
                write_value(v_cache, v_words, True, j, kv_heads, v_size, v, m * v_stride + j * v_size, row_seq[m],
                            positions[m], table, table_width)

    return cache_write_part


@lru_cache(None)
def finish_head(kv_type: str, kv_type_v: str) -> Any:
    """Norms, rotation and the write of one head of q, k and v in order, whose rows [rows, size] stand in x.

    Queries end in q.
    """
    write_key, write_value = writer(kv_type), writer(kv_type_v)

    @policy.helper
    def finish(rows, head, x, stride, q, q_stride, heads, kv_heads, size, cos, sin, q_norm, k_norm, eps, k_cache,
               k_words, v_cache, v_words, row_seq, positions, table, table_width):
        keys = heads <= head < heads + kv_heads
        for m in range(rows):
            start = m * stride
            if head < heads:
                if q_norm.size:
                    norm_row(x, start, q_norm, size, eps, x, start)
                rotate_row(x, start, cos, sin, m * (size // 2), size, q, m * q_stride + head * size)
                continue
            if keys and k_norm.size:
                norm_row(x, start, k_norm, size, eps, x, start)
            if keys:
                rotate_row(x, start, cos, sin, m * (size // 2), size, x, start)
                write_key(k_cache, k_words, False, head - heads, kv_heads, size, x, start, row_seq[m], positions[m],
                          table, table_width)
            else:
                write_value(v_cache, v_words, True, head - heads - kv_heads, kv_heads, size, x, start, row_seq[m],
                            positions[m], table, table_width)

    return finish


INT, INTS = types.intp, reads(types.int32)


def cache_kinds(kv_type: str, kv_type_v: str) -> tuple:
    """The types of LayerCache.arguments(); without ``kv_type_v`` the keys stand for the values."""
    return tuple(one for name in (kv_type, kv_type_v or kv_type) for one in (ELEMENTS[name][::1], types.int16[::1]))


def _named(kind: str, kv_type: str, kv_type_v: str) -> str:
    return "_".join(filter(None, (kind, kv_type, kv_type_v)))


@lru_cache(None)
def rope_write_operation(kv_type: str, kv_type_v: str) -> Operation:
    """The operation on a cache of these types."""
    core = _rope_write_core(writer(kv_type), writer(kv_type_v))
    return Operation(core, _named("rope_write", kv_type, kv_type_v), (
        INT, F32_1, INT, F32_1, INT, VECTOR, INT, INT, INT, INT, INT, VECTOR, VECTOR, VECTOR, VECTOR, types.float32,
        *cache_kinds(kv_type, kv_type_v), INTS, INTS, INTS, INT))


@lru_cache(None)
def cache_write_operation(kv_type: str, kv_type_v: str) -> Operation:
    """The operation on a cache of these types; ``kv_type_v`` "": of keys alone."""
    core = _cache_write_core(writer(kv_type), writer(kv_type_v or kv_type))
    return Operation(core, _named("cache_write", kv_type, kv_type_v), (
        INT, VECTOR, INT, VECTOR, INT, INT, INT, INT, *cache_kinds(kv_type, kv_type_v), INTS, INTS, INTS, INT))
