"""The KV cache in blocks of 64 positions, and attention over it with an online softmax.

A block of K is 4 panels of 16 positions, one of V value_dim / 16 panels of 16 columns, in the same
order of elements as packed weights: scores and outputs are products of queries with panels.

  K  f32, f16 [blocks, kv, 4, D, 16]     bf16 [blocks, kv, 4, D/2, 16, 2]
  V  f32, f16 [blocks, kv, C, 64, 16]    bf16 [blocks, kv, C, 32, 16, 2]    C = ceil(value_dim / 16)
  q8_0 int8 [blocks, kv, 68 D]: K codes [4, D/32, 8, 16, 4] and float16 scales [4, D/32, 16], packed weights' order;
                                V codes [C, 64, 16] and float16 scales [value_dim/32, 64]

K and V have types of their own. Where the values are the first columns of K (a latent that is cached once), K's panels
are turned into V's order 32 columns at a time, in a tile that stays in L1 and serves all queries of a block.

Each query goes through the blocks of absolute positions in order, whatever rows are beside it: a softmax of
its own for every stretch of ``STRETCH`` positions, merged in order into spans of ``SPAN`` stretches, and these in
order. So one thread can do all stretches of a head, or many threads one each or a span each, with the same bits.
Positions that a row does not attend to, and blocks held elsewhere, are never read as numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.block_steps import TILE, block_step
from mpillm.jit.cache_rows import BLOCK, Q8_BYTES, cache_kinds
from mpillm.jit.gemm import F32_1, VECTOR, reads
from mpillm.jit.isa.interleave import COLUMNS
from mpillm.jit.isa.lanes import exponential_of
from mpillm.jit.isa.quantised import quantise_row
from mpillm.jit.isa.select import key
from mpillm.jit.tape import Operation

STRETCH = 512           # positions that share one softmax before it is merged with those before
SPAN = 8                # stretches that are merged before they are merged with those before
QUERIES = 24            # queries that go through a block together, at most


def padded(value_dim: int, of_keys: bool) -> int:
    """Columns that the threads' room has for ``value_dim`` values, with ``of_keys`` for columns of the keys."""
    unit = COLUMNS if of_keys else 16
    return -(-value_dim // unit) * unit


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


@policy.inlined
def _fold(begins, most, total, acc, query, other_most, other_total, other, at, width):
    """The same, or with ``begins`` a copy: there are none before."""
    if begins:
        most[query], total[query] = other_most, other_total
        for c in range(width):
            acc[query * width + c] = other[at + c]
    else:
        _merge(most, total, acc, query, other_most, other_total, other, at, width)


@policy.inlined
def _finish(most, total, acc, query, width, paired, out, to, size, lse, lse_at):
    """A head's output from its sums, and its log-sum-exp if ``lse`` has room for it.

    ``paired``: even and odd columns of 32 stand apart. Nothing was seen only where blocks are held elsewhere.
    """
    nothing, start = total[query] == 0 and most[query] == -np.inf and lse.size > 0, query * width
    for d in range(size):
        at = start + (d // 32 * 32 + d % 2 * 16 + d % 32 // 2 if paired else d)
        out[to + d] = np.float32(0) if nothing else acc[at] / total[query]
    if lse.size:
        lse[lse_at] = -np.inf if nothing else most[query] + np.log(total[query])


def _stretch_core(kv_type: str, kv_type_v: str) -> Any:
    step = block_step(kv_type, kv_type_v)

    @policy.variant(kv_type, kv_type_v or "keys")
    def stretch_of_blocks(q, codes, code_scales, code_sums, group, rows, begin, sequence, j, kv_heads, k_cache,
                          k_words, v_cache, v_words, table, table_width, first_block_at, place, shards, size, v_size,
                          width, window, stretch, scores, weighted, tile, tile_codes, most, total, acc):
        """A stretch's blocks for a tile of rows: those that all rows see whole in one step, others row by row."""
        queries, end = rows * group, begin + rows
        for i in range(queries):
            most[i], total[i] = -np.inf, 0
        for i in range(queries * width):
            acc[i] = 0
        seen = max(0, begin - window + 1) if window > 0 else 0
        first_block = max(seen, stretch * STRETCH) // BLOCK
        for block in range(first_block, min(end - 1, stretch * STRETCH + STRETCH - 1) // BLOCK + 1):
            if shards > 1 and (first_block_at[sequence] + block) % shards != place:
                continue
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
                         v_cache, v_words, stored, size, v_size, width, first, stop, scores, weighted, tile, tile_codes,
                         most, total, acc)

    return stretch_of_blocks


def _attention_core(kv_type: str, kv_type_v: str) -> Any:
    stretch_of_blocks = _stretch_core(kv_type, kv_type_v)
    quantised, paired = kv_type == "q8_0", kv_type == "bf16" and not kv_type_v

    @policy.variant(kv_type, kv_type_v or "keys")
    def attention_part(part, parts, q_in, q_stride, out, out_stride, lse, lse_stride, k_cache, k_words, v_cache,
                       v_words, row_seq, table, table_width, first_block_at, place, shards, scale, size, head_start,
                       head_stop, kv_heads, group_parts, most_queries, v_size, width, window, positions, tiles, n_tiles,
                       run, pieces, room_queries, room):
        """A thread's share of the (tile of rows, KV head, part of its group), or with ``run`` of their stretches too.

        ``run`` stretches are a piece. Then ``room`` [tiles, kv_heads, group_parts, pieces, room_queries, width + 2]
        gets their sums, most and total last; else ``out`` gets the merged heads.
        """
        q, codes = np.empty(most_queries * size, np.float32), np.empty(most_queries * size if quantised else 0, np.int8)
        code_scales = np.empty(most_queries * (size // 32), np.float32)
        code_sums = np.empty(most_queries * (size // 16), np.int32)
        scores, weighted = np.empty(most_queries * BLOCK, np.float32), np.empty(most_queries * BLOCK, np.float32)
        tile, tile_codes = np.empty(TILE, np.float32), np.empty(TILE, np.int8)
        # Of a stretch, of a span, of all.
        most, total = np.empty(most_queries, np.float32), np.empty(most_queries, np.float32)
        span_most, span_total = np.empty(most_queries, np.float32), np.empty(most_queries, np.float32)
        all_most, all_total = np.empty(most_queries, np.float32), np.empty(most_queries, np.float32)
        acc, span_acc = np.empty(most_queries * width, np.float32), np.empty(most_queries * width, np.float32)
        all_acc = np.empty(most_queries * width, np.float32)
        for item in range(part, n_tiles * kv_heads * group_parts * pieces, parts):
            g, piece, pair = item % group_parts, item // group_parts % pieces, item // group_parts // pieces
            row, j = tiles[pair // kv_heads], pair % kv_heads
            rows, begin, heads = tiles[pair // kv_heads + 1] - row, positions[row], head_stop[j] - head_start[j]
            head = head_start[j] + g * heads // group_parts
            group = head_start[j] + (g + 1) * heads // group_parts - head
            queries = rows * group
            seen = max(0, begin - window + 1) if window > 0 else 0
            first, last = seen // STRETCH, (begin + rows - 1) // STRETCH
            if run:
                first, last = max(first, piece * run), min(last, piece * run + run - 1)
            if first > last:
                continue
            for i in range(queries):
                start = (row + i // group) * q_stride + (head + i % group) * size
                for d in range(size):
                    q[i * size + d] = q_in[start + d] * scale
                if quantised:
                    quantise_row(q, i * size, size, codes, i * size, code_scales, i * (size // 32), code_sums,
                                 i * (size // 16))
            to = ((pair * group_parts + g) * pieces + piece) * room_queries
            for stretch in range(first, last + 1):
                stretch_of_blocks(q, codes, code_scales, code_sums, group, rows, begin, row_seq[row], j, kv_heads,
                                  k_cache, k_words, v_cache, v_words, table, table_width, first_block_at, place, shards,
                                  size, v_size, width, window, stretch, scores, weighted, tile, tile_codes, most,
                                  total, acc)
                begins, ends = stretch == first or stretch % SPAN == 0, stretch == last or (stretch + 1) % SPAN == 0
                for i in range(queries):
                    _fold(begins, span_most, span_total, span_acc, i, most[i], total[i], acc, i * width, width)
                    if ends and run:
                        _keep(room, (to + i) * (width + 2), span_most[i], span_total[i], span_acc, i * width, width)
                    elif ends:
                        _fold(stretch // SPAN == first // SPAN, all_most, all_total, all_acc, i, span_most[i],
                              span_total[i], span_acc, i * width, width)
            if not run:
                for i in range(queries):
                    m, h = row + i // group, head + i % group
                    _finish(all_most, all_total, all_acc, i, width, paired, out, m * out_stride + h * v_size, v_size,
                            lse, m * lse_stride + h)

    return attention_part


@policy.inlined
def _keep(room, at, most, total, acc, start, width):
    for c in range(width):
        room[at + c] = acc[start + c]
    room[at + width], room[at + width + 1] = most, total


def _merge_core(paired: bool) -> Any:
    @policy.variant("paired" if paired else "")
    def merge_part(part, parts, out, out_stride, lse, lse_stride, head_start, head_stop, kv_heads, group_parts,
                   most_queries, v_size, width, window, positions, tiles, n_tiles, run, pieces, room_queries, room):
        """After a split: a thread's share of the merged heads, the pieces of each in order."""
        if not run:
            return
        acc, most, total = np.empty(width, np.float32), np.empty(1, np.float32), np.empty(1, np.float32)
        span, span_most, span_total = np.empty(width, np.float32), np.empty(1, np.float32), np.empty(1, np.float32)
        for item in range(part, n_tiles * kv_heads * group_parts * room_queries, parts):
            i, g, pair = item % room_queries, item // room_queries % group_parts, item // room_queries // group_parts
            row, j = tiles[pair // kv_heads], pair % kv_heads
            rows, begin, heads = tiles[pair // kv_heads + 1] - row, positions[row], head_stop[j] - head_start[j]
            head = head_start[j] + g * heads // group_parts
            group = head_start[j] + (g + 1) * heads // group_parts - head
            if i >= rows * group:
                continue
            seen = max(0, begin - window + 1) if window > 0 else 0
            first, last = seen // STRETCH // run, (begin + rows - 1) // STRETCH // run
            of_span = SPAN // run
            for piece in range(first, last + 1):
                at = (((pair * group_parts + g) * pieces + piece) * room_queries + i) * (width + 2)
                _fold(piece == first or piece % of_span == 0, span_most, span_total, span, 0, room[at + width],
                      room[at + width + 1], room, at, width)
                if piece == last or (piece + 1) % of_span == 0:
                    _fold(piece // of_span == first // of_span, most, total, acc, 0, span_most[0], span_total[0], span,
                          0, width)
            m, h = row + i // group, head + i % group
            _finish(most, total, acc, 0, width, paired, out, m * out_stride + h * v_size, v_size, lse,
                    m * lse_stride + h)

    return merge_part


@policy.helper
def _shards_part(part, parts, rows, shards, heads, size, parts_in, lses, part_step, part_stride, lse_step, lse_stride,
                 out, out_stride):
    """out = sum of exp(lse_i - lse) part_i over the shards in order, a thread its share of the heads of rows."""
    for item in range(part * rows * heads // parts, (part + 1) * rows * heads // parts):
        m, h = item // heads, item % heads
        at, to, most, total = m * lse_stride + h, m * out_stride + h * size, np.float32(-np.inf), np.float32(0)
        for shard in range(shards):
            most = max(most, lses[shard * lse_step + at])
        base = np.float32(0) if most == -np.inf else most
        for d in range(size):
            out[to + d] = 0
        for shard in range(shards):
            lse = lses[shard * lse_step + at]
            if lse == -np.inf:
                continue
            share, start = exponential_of(lse - base), shard * part_step + m * part_stride + h * size
            total += share
            for d in range(size):
                out[to + d] += share * parts_in[start + d]
        for d in range(size):
            out[to + d] /= total


def make_tiles(row_seq, positions, table, table_width, n_sequences, n_blocks, first_block_at, place, shards, most_rows,
               tiles):
    """Cut rows into tiles of consecutive positions of one sequence; their number.

    ``tiles`` [rows + 1] gets their first rows and the number of rows. -1: a position has no block in the table, or
    one that is held elsewhere has.
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
            own = shards == 1 or (first_block_at[row_seq[m]] + block) % shards == place
            number = table[row_seq[m] * table_width + block]
            if number >= n_blocks or (number >= 0) != own:
                return -1
        if not follows or m - tiles[n_tiles - 1] >= most_rows:
            tiles[n_tiles] = m
            n_tiles += 1
    tiles[n_tiles] = positions.size
    return n_tiles


INT, REAL = types.intp, types.float32
INTS, TILES = reads(types.int32), types.int64[::1]
_WRITTEN = (F32_1, INT, F32_1, INT)
_FORM = (INTS, INTS, INT, INT, INT, INT, INT, INT, INTS, TILES, INT, INT, INT, INT, F32_1)


@lru_cache(None)
def tiles_kernel() -> Any:
    return policy.kernel(make_tiles, "make_tiles", (INTS, INTS, INTS, INT, INT, INT, INTS, INT, INT, INT, TILES))


@lru_cache(None)
def attention_operation(kv_type: str, kv_type_v: str) -> Operation:
    """Attention over keys and values of these types; ``kv_type_v`` "": the values are columns of the keys."""
    return Operation(_attention_core(kv_type, kv_type_v), f"attention_{kv_type}_{kv_type_v or 'keys'}_{key()}", (
        VECTOR, INT, *_WRITTEN, *cache_kinds(kv_type, kv_type_v), INTS, INTS, INT, INTS, INT, INT, REAL, INT, *_FORM))


@lru_cache(None)
def merge_operation(kv_type: str, kv_type_v: str) -> Operation:
    """What merges the pieces of attention over a cache of these types."""
    paired = kv_type == "bf16" and not kv_type_v
    return Operation(_merge_core(paired), "attention_merge" + ("_paired" if paired else ""), (*_WRITTEN, *_FORM))


@lru_cache(None)
def shards_operation() -> Operation:
    """What merges the shards of a cache, see Plan.merge_shards."""
    return Operation(_shards_part, "merge_shards", (INT, INT, INT, INT, VECTOR, VECTOR, INT, INT, INT, INT, F32_1, INT))


__all__ = ["BLOCK", "Q8_BYTES", "QUERIES", "SPAN", "STRETCH", "attention_operation", "merge_operation", "padded",
           "shards_operation", "tiles_kernel"]
