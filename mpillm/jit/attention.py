"""The KV cache in blocks of 64 positions, and attention over it with an online softmax.

A block of K is 4 panels of 16 positions, one of V head_dim / 16 panels of 16 columns, in the same
order of elements as packed weights: scores and outputs are products of queries with panels.

  K  f32, f16 [blocks, kv, 4, D, 16]     bf16 [blocks, kv, 4, D/2, 16, 2]
  V  f32, f16 [blocks, kv, C, 64, 16]    bf16 [blocks, kv, C, 32, 16, 2]    C = ceil(D / 16)
  q8_0 int8 [blocks, kv, 68 D]: K codes [4, D/32, 8, 16, 4] and float16 scales [4, D/32, 16], packed weights' order;
                                V codes [C, 64, 16] and float16 scales [D/32, 64]

Each query goes through the blocks of absolute positions in order, whatever rows are beside it: a softmax of
its own for every stretch of ``STRETCH`` positions, merged in order. So one thread can do all stretches of a
head, or many threads one each, with the same bits. Positions that a row does not attend to are never read as
numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.elementwise import norm_row, rotate_row
from mpillm.jit.gemm import ELEMENTS, F32_1, VECTOR, multiply, reads
from mpillm.jit.isa.generic import load_number, store_number
from mpillm.jit.isa.lanes import exponential_of, softmax_step
from mpillm.jit.isa.quantised import MOST_ROWS, blocks_by_panels, quantise_row
from mpillm.jit.isa.select import key
from mpillm.jit.tape import Operation

BLOCK = 64
Q8_BYTES = 68           # of 64 positions of a column: codes, and two bytes for 32 of them
HALF_LIMIT = np.float32(65520)
STRETCH = 512           # positions that share one softmax before it is merged with those before
QUERIES = 24            # queries that go through a block together, at most, when there are several rows


@policy.helper
def _store_row(cache, to, together, step, stride, x, start, size, poison):
    """Round a head's row into the cache, as NaN where ``poison``.

    Groups of ``together`` values lie ``step`` elements apart, their values ``stride``.
    """
    for d in range(size):
        value = np.float32(np.nan) if poison else x[start + d]
        store_number(cache, to + d // together * step + d % together * stride, value)


@policy.helper
def _write_number(cache, words, values, j, kv_heads, size, x, start, pair, limit, row_seq, position, table,
                  table_width):
    """Round a head's key (or with ``values`` its value) of one position into a cache of f32, f16 or bf16.

    A number of size >= ``limit``, or one that is not finite, cannot be held: then the head is NaN at this position,
    and so is all that attends to it, on every rank by the sums.
    """
    lost = False
    for d in range(size):
        lost |= not abs(x[start + d]) < limit
    block, within = np.int64(table[row_seq * table_width + position // BLOCK]), position % BLOCK
    at = (block * kv_heads + j) * BLOCK
    if values:
        to = at * ((size + 15) // 16) * 16 + within // pair * pair * 16 + within % pair
        _store_row(cache, to, 16, BLOCK * 16, pair, x, start, size, lost)
    else:
        to = (at + within // 16 * 16) * size + within % 16 * pair
        _store_row(cache, to, pair, pair * 16, 1, x, start, size, lost)


@policy.helper
def _write_codes(cache, words, values, j, kv_heads, size, x, start, pair, limit, row_seq, position, table,
                 table_width):
    """The same into a cache of q8_0; ``words`` is its memory as 16-bit words. A scale that f16 cannot hold is NaN."""
    codes, scales, sums = np.empty(size, np.int8), np.empty(size // 32, np.float32), np.empty(size // 16, np.int32)
    quantise_row(x, start, size, codes, 0, scales, 0, sums, 0)
    block, within = np.int64(table[row_seq * table_width + position // BLOCK]), position % BLOCK
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


def _rope_write_core(write: Any) -> Any:
    @policy.helper
    def rope_write_part(part, parts, rows, q, q_stride, k, k_stride, v, v_stride, heads, kv_heads, size, cos, sin,
                        q_norm, k_norm, eps, k_cache, k_words, v_cache, v_words, pair, limit, row_seq, positions,
                        table, table_width):
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
                rotate_row(q, start, cos, sin, angle, size)
                continue
            j = head - heads
            start, v_start = m * k_stride + j * size, m * v_stride + j * size
            if k_norm.size:
                norm_row(k, start, k_norm, size, eps, k, start)
            rotate_row(k, start, cos, sin, angle, size)
            write(k_cache, k_words, False, j, kv_heads, size, k, start, pair, limit, row_seq[m], positions[m], table,
                  table_width)
            write(v_cache, v_words, True, j, kv_heads, size, v, v_start, pair, limit, row_seq[m], positions[m], table,
                  table_width)

    return rope_write_part


@lru_cache(None)
def finish_head(kv_type: str) -> Any:
    """The same for rows [rows, size] of one head of q, k and v in order, that stand in x: queries end in q."""
    write = _write_codes if kv_type == "q8_0" else _write_number

    @policy.helper
    def finish(rows, head, x, stride, q, q_stride, heads, kv_heads, size, cos, sin, q_norm, k_norm, eps, k_cache,
               k_words, v_cache, v_words, pair, limit, row_seq, positions, table, table_width):
        keys = heads <= head < heads + kv_heads
        for m in range(rows):
            start = m * stride
            if head < heads:
                if q_norm.size:
                    norm_row(x, start, q_norm, size, eps, x, start)
                rotate_row(x, start, cos, sin, m * (size // 2), size)
                for d in range(size):
                    q[m * q_stride + head * size + d] = x[start + d]
                continue
            if keys and k_norm.size:
                norm_row(x, start, k_norm, size, eps, x, start)
            if keys:
                rotate_row(x, start, cos, sin, m * (size // 2), size)
                write(k_cache, k_words, False, head - heads, kv_heads, size, x, start, pair, limit, row_seq[m],
                      positions[m], table, table_width)
            else:
                write(v_cache, v_words, True, head - heads - kv_heads, kv_heads, size, x, start, pair, limit,
                      row_seq[m], positions[m], table, table_width)

    return finish


@policy.inlined
def _soften(count, query, first, stop, scores, most, total, acc, width):
    """A block's scores to probabilities of positions first ... stop - 1; what was summed before is scaled down."""
    for i in range(count):
        now, factor, added = softmax_step(scores, i * BLOCK, first, stop, most[query + i])
        most[query + i], total[query + i] = now, total[query + i] * factor + added
        if factor != 1:
            for c in range((query + i) * width, (query + i + 1) * width):
                acc[c] *= factor


@policy.helper
def _step_numbers(q, codes, code_scales, code_sums, query, count, k_cache, k_words, v_cache, v_words, stored, size,
                  first, stop, scores, weighted, most, total, acc):
    """One block for queries ``query`` ... : scores, softmax over positions first ... stop - 1, times V."""
    low, panels = first // 16, (stop + 15) // 16 - first // 16
    width = (size + 15) // 16 * 16
    for i in range(count * BLOCK):
        scores[i] = 0
    multiply(q, most, query * size, size, count, k_cache, most, stored * BLOCK * size + low * 16 * size, 16 * size,
             panels, 0, size, scores, 16 * low, BLOCK)
    _soften(count, query, first, stop, scores, most, total, acc, width)
    multiply(scores, most, 0, BLOCK, count, v_cache, most, stored * BLOCK * width, BLOCK * 16, width // 16,
             first, stop, acc, query * width, width)


@policy.helper
def _step_codes(q, codes, code_scales, code_sums, query, count, k_cache, k_words, v_cache, v_words, stored, size,
                first, stop, scores, weighted, most, total, acc):
    """The same with a cache of q8_0: exact sums of codes with quantised queries; V's scales go to the probabilities."""
    at, low = stored * Q8_BYTES * size, first // 16
    behind = (at + BLOCK * size) // 2
    for i in range(count * BLOCK):
        scores[i] = 0
    for i in range(0, count, MOST_ROWS):
        blocks_by_panels(min(MOST_ROWS, count - i), query + i, size, codes, code_scales, code_sums, k_cache[at:],
                         k_words[behind:], 0, low, (stop + 15) // 16 - low, 0, size, scores, i * BLOCK + 16 * low,
                         BLOCK)
    _soften(count, query, first, stop, scores, most, total, acc, size)
    for i in range(size // 32):
        for j in range(count):
            for position in range(first, stop):
                scale = load_number(v_words, behind + i * BLOCK + position)
                weighted[j * BLOCK + position] = scores[j * BLOCK + position] * scale
        multiply(weighted, most, 0, BLOCK, count, v_cache, most, at + 2 * i * BLOCK * 16, BLOCK * 16, 2, first, stop,
                 acc, query * size + 32 * i, size)


@policy.inlined
def _merge(most, total, acc, query, other_most, other_total, other, at, width):
    """Add a later stretch's softmax, whose sums begin at ``other[at]``, to that of the stretches before."""
    now = max(most[query], other_most)
    base = np.float32(0) if now == -np.inf else now
    mine, its = exponential_of(most[query] - base), exponential_of(other_most - base)
    total[query] = total[query] * mine + other_total * its
    most[query] = now
    for c in range(width):
        acc[query * width + c] = acc[query * width + c] * mine + other[at + c] * its


def _stretch_core(step: Any) -> Any:
    @policy.helper
    def stretch_of_blocks(q, codes, code_scales, code_sums, group, rows, begin, sequence, j, kv_heads, k_cache,
                          k_words, v_cache, v_words, table, table_width, size, window, stretch, scores, weighted, most,
                          total, acc):
        """A stretch's blocks for a tile of rows: those that all rows see whole in one step, others row by row."""
        width, queries, end = (size + 15) // 16 * 16, rows * group, begin + rows
        for i in range(queries):
            most[i], total[i] = -np.inf, 0
        for i in range(queries * width):
            acc[i] = 0
        seen = max(0, begin - window + 1) if window > 0 else 0
        first_block = max(seen, stretch * STRETCH) // BLOCK
        for block in range(first_block, min(end - 1, stretch * STRETCH + STRETCH - 1) // BLOCK + 1):
            base = block * BLOCK
            stored = np.int64(table[sequence * table_width + block]) * kv_heads + j
            whole = base + BLOCK <= begin + 1 and (window <= 0 or base >= end - window)
            for r in range(1 if whole else rows):
                first, stop = 0, BLOCK
                if not whole:
                    first = max(0, begin + r - window + 1 - base) if window > 0 else 0
                    stop = min(BLOCK, begin + r + 1 - base)
                if first < stop:
                    step(q, codes, code_scales, code_sums, r * group, queries if whole else group, k_cache, k_words,
                         v_cache, v_words, stored, size, first, stop, scores, weighted, most, total, acc)

    return stretch_of_blocks


def _attention_core(quantised: bool) -> Any:
    stretch_of_blocks = _stretch_core(_step_codes if quantised else _step_numbers)

    @policy.helper
    def attention_part(part, parts, q_in, q_stride, out, out_stride, k_cache, k_words, v_cache, v_words, head_start,
                       head_stop, kv_heads, row_seq, positions, table, table_width, tiles, n_tiles, scale, size, window,
                       most_queries, stretches, split, room):
        """A thread's share of the (tile of rows, KV head) pairs, or with ``split`` of their stretches as well.

        Then ``room`` [tiles, kv_heads, stretches, most_queries, width + 2] gets the stretches' sums, most and total
        last.
        """
        width = (size + 15) // 16 * 16
        q, acc = np.empty(most_queries * size, np.float32), np.empty(most_queries * width, np.float32)
        scores, most = np.empty(most_queries * BLOCK, np.float32), np.empty(most_queries, np.float32)
        total, all_acc = np.empty(most_queries, np.float32), np.empty(most_queries * width, np.float32)
        codes = np.empty(most_queries * size if quantised else 0, np.int8)
        code_scales = np.empty(most_queries * (size // 32), np.float32)
        code_sums = np.empty(most_queries * (size // 16), np.int32)
        weighted = np.empty(most_queries * BLOCK, np.float32)
        all_most, all_total = np.empty(most_queries, np.float32), np.empty(most_queries, np.float32)
        pieces = stretches if split else 1
        for item in range(part, n_tiles * kv_heads * pieces, parts):
            pair, piece = item // pieces, item % pieces
            row, j = tiles[pair // kv_heads], pair % kv_heads
            rows, group = tiles[pair // kv_heads + 1] - row, head_stop[j] - head_start[j]
            queries, begin = rows * group, positions[row]
            seen = max(0, begin - window + 1) if window > 0 else 0
            first, last = seen // STRETCH, (begin + rows - 1) // STRETCH
            if split:
                first, last = max(first, piece), min(last, piece)
            if first > last:
                continue
            for i in range(queries):
                start = (row + i // group) * q_stride + (head_start[j] + i % group) * size
                for d in range(size):
                    q[i * size + d] = q_in[start + d] * scale
                if quantised:
                    quantise_row(q, i * size, size, codes, i * size, code_scales, i * (size // 32), code_sums,
                                 i * (size // 16))
            for stretch in range(first, last + 1):
                stretch_of_blocks(q, codes, code_scales, code_sums, group, rows, begin, row_seq[row], j, kv_heads,
                                  k_cache, k_words, v_cache, v_words, table, table_width, size, window, stretch,
                                  scores, weighted, most, total, acc)
                for i in range(queries):
                    if split:
                        to = (item * most_queries + i) * (width + 2)
                        for c in range(width):
                            room[to + c] = acc[i * width + c]
                        room[to + width], room[to + width + 1] = most[i], total[i]
                    elif stretch == first:
                        all_most[i], all_total[i] = most[i], total[i]
                        for c in range(i * width, (i + 1) * width):
                            all_acc[c] = acc[c]
                    else:
                        _merge(all_most, all_total, all_acc, i, most[i], total[i], acc, i * width, width)
            if not split:
                for i in range(queries):
                    start = (row + i // group) * out_stride + (head_start[j] + i % group) * size
                    for d in range(size):
                        out[start + d] = all_acc[i * width + d] / all_total[i]

    return attention_part


@policy.helper
def _merge_part(part, parts, out, out_stride, head_start, head_stop, kv_heads, positions, tiles, n_tiles, size, window,
                most_queries, stretches, split, room):
    """After a split: a thread's share of the merged heads; the stretches of each in order."""
    if not split:
        return
    width = (size + 15) // 16 * 16
    acc, most, total = np.empty(width, np.float32), np.empty(1, np.float32), np.empty(1, np.float32)
    for pair in range(part, n_tiles * kv_heads, parts):
        row, j = tiles[pair // kv_heads], pair % kv_heads
        rows, group = tiles[pair // kv_heads + 1] - row, head_stop[j] - head_start[j]
        begin = positions[row]
        seen = max(0, begin - window + 1) if window > 0 else 0
        for i in range(rows * group):
            for stretch in range(seen // STRETCH, (begin + rows - 1) // STRETCH + 1):
                at = ((pair * stretches + stretch) * most_queries + i) * (width + 2)
                if stretch == seen // STRETCH:
                    most[0], total[0] = room[at + width], room[at + width + 1]
                    for c in range(width):
                        acc[c] = room[at + c]
                else:
                    _merge(most, total, acc, 0, room[at + width], room[at + width + 1], room, at, width)
            start = (row + i // group) * out_stride + (head_start[j] + i % group) * size
            for d in range(size):
                out[start + d] = acc[d] / total[0]


def make_tiles(row_seq, positions, table, table_width, n_sequences, n_blocks, most_rows, tiles):
    """Cut rows into tiles of consecutive positions of one sequence; their number.

    ``tiles`` [rows + 1] gets their first rows and the number of rows. -1: a position has no block in the table.
    """
    n_tiles = 0
    for m in range(positions.size):
        follows = m > 0 and row_seq[m] == row_seq[m - 1] and positions[m] == positions[m - 1] + 1
        position, checked = positions[m], 0
        if not (0 <= row_seq[m] < n_sequences and 0 <= position < BLOCK * table_width):
            return -1
        if follows:
            checked = position // BLOCK         # the row before has looked at the others
        for block in range(checked, position // BLOCK + 1):
            if not 0 <= table[row_seq[m] * table_width + block] < n_blocks:
                return -1
        if not follows or m - tiles[n_tiles - 1] >= most_rows:
            tiles[n_tiles] = m
            n_tiles += 1
    tiles[n_tiles] = positions.size
    return n_tiles


INT, REAL = types.intp, types.float32
INTS, TILES = reads(types.int32), types.int64[::1]


@lru_cache(None)
def tiles_kernel() -> Any:
    return policy.kernel(make_tiles, "make_tiles", (INTS, INTS, INTS, INT, INT, INT, INT, TILES))


@lru_cache(None)
def rope_write_operation(name: str) -> Operation:
    """The operation on a cache of this type."""
    cache = (ELEMENTS[name][::1], types.int16[::1])
    return Operation(_rope_write_core(_write_codes if name == "q8_0" else _write_number), f"rope_write_{name}", (
        INT, F32_1, INT, F32_1, INT, VECTOR, INT, INT, INT, INT, VECTOR, VECTOR, VECTOR, VECTOR, REAL, *cache, *cache,
        INT, REAL, INTS, INTS, INTS, INT))


@lru_cache(None)
def attention_operation(name: str) -> Operation:
    cache = (ELEMENTS[name][::1], types.int16[::1])
    return Operation(_attention_core(name == "q8_0"), f"attention_{name}_{key()}", (
        VECTOR, INT, F32_1, INT, *cache, *cache, INTS, INTS, INT, INTS, INTS, INTS, INT, TILES, INT, REAL, INT, INT,
        INT, INT, INT, F32_1))


@lru_cache(None)
def merge_operation() -> Operation:
    return Operation(_merge_part, "attention_merge", (
        F32_1, INT, INTS, INTS, INT, INTS, TILES, INT, INT, INT, INT, INT, INT, F32_1))
