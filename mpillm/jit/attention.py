"""The KV cache in blocks of 64 positions, and attention over it with an online softmax.

A block of K is 4 panels of 16 positions, one of V head_dim / 16 panels of 16 columns, in the same
order of elements as packed weights: scores and outputs are products of queries with panels.

  K  f32, f16 [blocks, kv, 4, D, 16]     bf16 [blocks, kv, 4, D/2, 16, 2]
  V  f32, f16 [blocks, kv, C, 64, 16]    bf16 [blocks, kv, C, 32, 16, 2]    C = ceil(D / 16)

Each query goes through the blocks of absolute positions in order, whatever rows are beside it.
Positions that a row does not attend to are never read as numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.gemm import ELEMENTS, F32_2, STRIDED, multiply, reads
from mpillm.jit.isa.generic import flat, store_number
from mpillm.jit.isa.lanes import softmax_step
from mpillm.jit.parallel import in_parts

BLOCK = 64
QUERIES = 24            # queries that go through a block together, at most, when there are several rows


@policy.helper
def _store(cache, to, step, value, limit, largest):
    """Round one value into the cache; 1 if it is not finite or of size >= ``limit``, else 0."""
    lost = 0
    if not abs(value) < limit:
        lost = 1
        if value == value:
            value = np.float32(np.copysign(largest, value))
    store_number(cache, to + step, value)
    return lost


@policy.helper
def _cache_write_part(part, parts, k_cache, v_cache, pair, limit, largest, k_ME, v_ME, size, row_seq,
                      positions, table, n_blocks, losses):
    """A thread's rows; losses [parts]: values lost, -1 if a row has no block."""
    heads, columns = k_ME.shape[1] // size, (size + 15) // 16
    k, v = flat(k_ME), flat(v_ME)
    k_stride, v_stride = k_ME.strides[0] // 4, v_ME.strides[0] // 4
    lost = 0
    for m in range(part * positions.size // parts, (part + 1) * positions.size // parts):
        position = positions[m]
        if not (0 <= row_seq[m] < table.shape[0] and 0 <= position < BLOCK * table.shape[1]):
            losses[part] = -1
            return
        block, within = np.int64(table[row_seq[m], position // BLOCK]), position % BLOCK
        if not 0 <= block < n_blocks:
            losses[part] = -1
            return
        for j in range(heads):
            at = (block * heads + j) * BLOCK
            k_to = (at + within // 16 * 16) * size + within % 16 * pair
            v_to = at * columns * 16 + within // pair * pair * 16 + within % pair
            for d in range(size):
                lost += _store(k_cache, k_to, d // pair * pair * 16 + d % pair,
                               k[m * k_stride + j * size + d], limit, largest)
            for d in range(size):
                lost += _store(v_cache, v_to, d // 16 * BLOCK * 16 + d % 16 * pair,
                               v[m * v_stride + j * size + d], limit, largest)
    losses[part] = lost


_run_cache_write = in_parts(_cache_write_part)


def cache_write(k_cache, v_cache, pair, limit, largest, k_ME, v_ME, size, row_seq, positions, table, n_blocks,
                losses):
    """Round new K and V into their places; losses [parts]: values not finite or of size >= ``limit``.

    Such values are stored as +-``largest`` (NaN as NaN). -1: a row without a block in the table.
    """
    _run_cache_write((k_cache, v_cache, pair, limit, largest, k_ME, v_ME, size, row_seq, positions, table,
                      n_blocks, losses), losses.size)


@policy.inlined
def _block_step(q, query, count, k_cache, k_at, v_cache, v_at, size, first, stop, scores, most, total, acc):
    """One block for queries ``query`` ... : scores, softmax over positions first ... stop - 1, times V."""
    low, panels = first // 16, (stop + 15) // 16 - first // 16
    width = (size + 15) // 16 * 16
    for i in range(count * BLOCK):
        scores[i] = 0
    multiply(q, most, query * size, size, count, k_cache, most, k_at + low * 16 * size, 16 * size, panels,
             0, size, scores, 16 * low, BLOCK)
    for i in range(count):
        now, factor, added = softmax_step(scores, i * BLOCK, first, stop, most[query + i])
        most[query + i], total[query + i] = now, total[query + i] * factor + added
        if factor != 1:
            for c in range((query + i) * width, (query + i + 1) * width):
                acc[c] *= factor
    multiply(scores, most, 0, BLOCK, count, v_cache, most, v_at, BLOCK * 16, width // 16,
             first, stop, acc, query * width, width)


@policy.helper
def _attention_part(part, parts, q_MH, out_MH, k_cache, v_cache, head_start, head_stop, row_seq, positions,
                    table, tiles, n_tiles, scale, size, window, most_queries):
    """A thread's share of the (tile of rows, KV head) pairs."""
    heads, width = head_start.size, (size + 15) // 16 * 16
    q_in, out = flat(q_MH), flat(out_MH)
    q_stride, out_stride = q_MH.strides[0] // 4, out_MH.shape[1]
    q, acc = np.empty(most_queries * size, np.float32), np.empty(most_queries * width, np.float32)
    scores = np.empty(most_queries * BLOCK, np.float32)
    most, total = np.empty(most_queries, np.float32), np.empty(most_queries, np.float32)
    for item in range(part, n_tiles * heads, parts):
        row, j = tiles[item // heads], item % heads
        rows, group = tiles[item // heads + 1] - row, head_stop[j] - head_start[j]
        queries = rows * group
        # Collect the tile's queries, scaled.
        for i in range(queries):
            start = (row + i // group) * q_stride + (head_start[j] + i % group) * size
            for d in range(size):
                q[i * size + d] = q_in[start + d] * scale
            most[i], total[i] = -np.inf, 0
        for i in range(queries * width):
            acc[i] = 0
        # Blocks that all rows see whole go in one step, the others row by row.
        begin, end = positions[row], positions[row] + rows
        seen = max(0, begin - window + 1) if window > 0 else 0
        for block in range(seen // BLOCK, (end - 1) // BLOCK + 1):
            base = block * BLOCK
            stored = np.int64(table[row_seq[row], block]) * heads + j
            k_at, v_at = stored * BLOCK * size, stored * BLOCK * width
            whole = base + BLOCK <= begin + 1 and (window <= 0 or base >= end - window)
            for r in range(1 if whole else rows):
                first, stop = 0, BLOCK
                if not whole:
                    first = max(0, begin + r - window + 1 - base) if window > 0 else 0
                    stop = min(BLOCK, begin + r + 1 - base)
                if first < stop:
                    _block_step(q, r * group, queries if whole else group, k_cache, k_at, v_cache, v_at, size,
                                first, stop, scores, most, total, acc)
        for i in range(queries):
            start = (row + i // group) * out_stride + (head_start[j] + i % group) * size
            for d in range(size):
                out[start + d] = acc[i * width + d] / total[i]


_run_attention = in_parts(_attention_part)


@policy.helper
def _make_tiles(row_seq, positions, table, n_blocks, window, most_rows, tiles):
    """Cut rows into tiles of consecutive positions of one sequence; -1 if a block is not in the table."""
    n_tiles = 0
    for m in range(positions.size):
        follows = m > 0 and row_seq[m] == row_seq[m - 1] and positions[m] == positions[m - 1] + 1
        if not follows or m - tiles[n_tiles - 1] >= most_rows:
            tiles[n_tiles] = m
            n_tiles += 1
            position = positions[m]
            if not (0 <= row_seq[m] < table.shape[0] and position >= 0):
                return -1
        position = positions[m]
        if position >= BLOCK * table.shape[1]:
            return -1
        seen = max(0, position - window + 1) if window > 0 else 0
        if follows:
            seen = max(seen, position - 1)      # the row before has looked at the others
        for block in range(seen // BLOCK, position // BLOCK + 1):
            if not 0 <= table[row_seq[m], block] < n_blocks:
                return -1
    tiles[n_tiles] = positions.size
    return n_tiles


def attention(q_MH, k_cache, v_cache, head_start, head_stop, row_seq, positions, table, n_blocks, scale,
              size, window, out_MH, threads):
    """softmax(scale * q K) V of every row over its own sequence.

    -1: a block is not in the table; -2: the KV heads' queries are not all query heads.
    """
    group, heads, covered = 1, q_MH.shape[1] // size, 0
    for j in range(head_start.size):
        if not 0 <= head_start[j] <= head_stop[j] <= heads:
            return -2
        group = max(group, head_stop[j] - head_start[j])
        covered += head_stop[j] - head_start[j]
    if covered != heads:
        return -2
    most_rows = max(1, QUERIES // group)
    tiles = np.empty(positions.size + 1, np.int64)
    n_tiles = _make_tiles(row_seq, positions, table, n_blocks, window, most_rows, tiles)
    if n_tiles > 0:
        parts = min(threads, n_tiles * head_start.size)
        _run_attention((q_MH, out_MH, k_cache, v_cache, head_start, head_stop, row_seq, positions, table,
                        tiles, n_tiles, scale, size, window, most_rows * group), parts)
    return n_tiles


INT, REAL = types.intp, types.float32
INTS_1, INTS_2 = reads(types.int32), reads(types.int32, 2)


@lru_cache(None)
def cache_write_kernel(name: str) -> Any:
    cache = ELEMENTS[name][::1]
    signature = (cache, cache, INT, REAL, REAL, STRIDED, STRIDED, INT, INTS_1, INTS_1, INTS_2, INT,
                 types.int64[::1])
    return policy.kernel(cache_write, f"cache_write_{name}", signature)


@lru_cache(None)
def attention_kernel(name: str) -> Any:
    cache = ELEMENTS[name][::1]
    indices = (INTS_1, INTS_1, INTS_1, INTS_1, INTS_2)
    signature = (STRIDED, cache, cache, *indices, INT, REAL, INT, INT, F32_2, INT)
    return policy.kernel(attention, f"attention_{name}", signature)
