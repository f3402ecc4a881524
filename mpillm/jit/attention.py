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
from mpillm.jit.attention_tiles import STRETCH, TOGETHER, by_tiles, first_keys, release_tiles, stretch_by_tiles
from mpillm.jit.block_steps import TILE, block_step
from mpillm.jit.cache_rows import BLOCK, Q8_BYTES, cache_kinds
from mpillm.jit.gemm import F32_1, VECTOR, reads
from mpillm.jit.isa.amx import SCRATCH
from mpillm.jit.isa.attention_amx import LN_2, two_to
from mpillm.jit.isa.interleave import COLUMNS
from mpillm.jit.isa.lanes import divide_row, exponential_of, pair_columns, times_row
from mpillm.jit.isa.quantised import quantise_row
from mpillm.jit.isa.select import key
from mpillm.jit.tape import Operation

SPAN = 8                # stretches that are merged before they are merged with those before
QUERIES = TOGETHER      # queries that go through a block together, at most


def padded(value_dim: int, of_keys: bool) -> int:
    """Columns that the threads' room has for ``value_dim`` values, with ``of_keys`` for columns of the keys."""
    unit = COLUMNS if of_keys else 16
    return -(-value_dim // unit) * unit


@lru_cache(None)
def fold_core(tiled: bool) -> Any:
    """What merges softmaxes; ``tiled``: their maxima are powers of 2, and so is what scales them to each other."""
    power = two_to if tiled else exponential_of

    @policy.helper
    def fold(begins, most, total, acc, to, step, other_most, most_at, other_total, total_at, other, at, count, width):
        """Fold the softmax of later positions, of ``count`` queries, into that of the positions before.

        Query i is number ``to + i * step`` there, its sums begin at ``other[at + i * width]``. With ``begins`` there
        are none before.
        """
        for i in range(count):
            query, start = to + i * step, at + i * width
            if begins:
                most[query], total[query] = other_most[most_at + i], other_total[total_at + i]
                for c in range(width):
                    acc[query * width + c] = other[start + c]
                continue
            now = max(most[query], other_most[most_at + i])
            base = np.float32(0) if now == -np.inf else now
            mine, its = power(most[query] - base), power(other_most[most_at + i] - base)
            total[query] = total[query] * mine + other_total[total_at + i] * its
            most[query] = now
            for c in range(width):
                acc[query * width + c] = acc[query * width + c] * mine + other[start + c] * its

    return fold


@policy.helper
def _finish(most, total, acc, count, group, width, paired, out, row, out_stride, head, size, lse, lse_stride, unit):
    """Outputs of ``count`` queries of ``group`` heads a row from their sums, and log-sum-exps if ``lse`` has room.

    ``unit``: of ``most``, in natural logarithms. ``paired``: even and odd columns of 32 stand apart. Nothing was seen
    only where blocks are held elsewhere.
    """
    for i in range(count):
        m, h = row + i // group, head + i % group
        nothing, start, to = total[i] == 0 and most[i] == -np.inf and lse.size > 0, i * width, m * out_stride + h * size
        if nothing:
            out[to:to + size] = 0
        elif paired:
            divide_row(acc, start, total[i], acc, start, width)
            pair_columns(acc, start, out, to, size // 32 * 32)
            for d in range(size // 32 * 32, size):
                out[to + d] = acc[start + d // 32 * 32 + d % 2 * 16 + d % 32 // 2]
        else:
            divide_row(acc, start, total[i], out, to, size)
        if lse.size:
            lse[m * lse_stride + h] = -np.inf if nothing else most[i] * unit + np.log(total[i])


def stretch_core(step: Any) -> Any:
    @policy.helper
    def stretch_of_blocks(q, codes, code_scales, code_sums, group, rows, begin, sequence, j, kv_heads, k_cache,
                          k_words, v_cache, v_words, table, table_width, first_block_at, place, shards, size, v_size,
                          width, window, stretch, scores, weighted, tile, tile_codes, most, total, acc, tiles, at,
                          following):
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


@policy.helper
def prepare_numbers(q, queries, size, codes, code_scales, code_sums, tiles, at):
    """Queries are taken as they are."""


@policy.helper
def _prepare_codes(q, queries, size, codes, code_scales, code_sums, tiles, at):
    """Queries in q8_0."""
    for i in range(queries):
        quantise_row(q, i * size, size, codes, i * size, code_scales, i * (size // 32), code_sums, i * (size // 16))


@policy.helper
def release_nothing(tiles, at):
    """Nothing was taken."""


def _attention_core(kv_type: str, kv_type_v: str, tiled: bool) -> Any:
    quantised, paired = kv_type == "q8_0", kv_type == "bf16" and not kv_type_v
    fold, unit = fold_core(tiled), np.float32(LN_2 if tiled else 1)
    if tiled:
        (prepare, stretch_of_blocks), finish = stretch_by_tiles(not kv_type_v), release_tiles
    else:
        prepare, stretch_of_blocks = prepare_numbers, stretch_core(block_step(kv_type, kv_type_v))
        prepare, finish = _prepare_codes if quantised else prepare, release_nothing

    @policy.helper
    def attention_part(part, parts, q_in, q_stride, out, out_stride, lse, lse_stride, k_cache, k_words, v_cache,
                       v_words, row_seq, table, table_width, first_block_at, place, shards, scale, size, head_start,
                       head_stop, kv_heads, group_parts, most_queries, v_size, width, window, positions, tiles, n_tiles,
                       run, pieces, room_queries, room, scratch):
        """A thread's share of the (tile of rows, KV head, part of its group), or with ``run`` of their stretches too.

        ``run`` stretches are a piece. Then ``room`` [tiles, kv_heads, group_parts, pieces, room_queries, width + 2]
        gets their sums, most and total last; else ``out`` gets the merged heads.
        """
        at, rounded = part * SCRATCH, (most_queries + 15) // 16 * 16
        q, codes = np.empty(most_queries * size, np.float32), np.empty(most_queries * size if quantised else 0, np.int8)
        code_scales = np.empty(most_queries * (size // 32), np.float32)
        code_sums = np.empty(most_queries * (size // 16), np.int32)
        scores, weighted = np.empty(most_queries * BLOCK, np.float32), np.empty(most_queries * BLOCK, np.float32)
        tile, tile_codes = np.empty(TILE, np.float32), np.empty(TILE, np.int8)
        # Of a stretch, of a span, of all.
        most, total = np.empty(most_queries, np.float32), np.empty(most_queries, np.float32)
        span_most, span_total = np.empty(most_queries, np.float32), np.empty(most_queries, np.float32)
        all_most, all_total = np.empty(most_queries, np.float32), np.empty(most_queries, np.float32)
        acc, span_acc = np.empty(rounded * width, np.float32), np.empty(most_queries * width, np.float32)
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
            if first > last or queries == 0:
                continue
            for i in range(queries):
                start = (row + i // group) * q_stride + (head + i % group) * size
                times_row(q_in, start, scale, q, i * size, size)
            prepare(q, queries, size, codes, code_scales, code_sums, scratch, at)
            to = ((pair * group_parts + g) * pieces + piece) * room_queries
            following = first_keys(item + parts, kv_heads, group_parts, pieces, run, row_seq, positions, tiles, n_tiles,
                                   window, table, table_width, size)
            for stretch in range(first, last + 1):
                stretch_of_blocks(q, codes, code_scales, code_sums, group, rows, begin, row_seq[row], j, kv_heads,
                                  k_cache, k_words, v_cache, v_words, table, table_width, first_block_at, place, shards,
                                  size, v_size, width, window, stretch, scores, weighted, tile, tile_codes, most,
                                  total, acc, scratch, at, following)
                begins, ends = stretch == first or stretch % SPAN == 0, stretch == last or (stretch + 1) % SPAN == 0
                fold(begins, span_most, span_total, span_acc, 0, 1, most, 0, total, 0, acc, 0, queries, width)
                if ends and run:
                    _keep(room, to, span_most, span_total, span_acc, queries, width)
                elif ends:
                    fold(stretch // SPAN == first // SPAN, all_most, all_total, all_acc, 0, 1, span_most, 0, span_total,
                         0, span_acc, 0, queries, width)
            if not run:
                _finish(all_most, all_total, all_acc, queries, group, width, paired, out, row, out_stride, head, v_size,
                        lse, lse_stride, unit)
        finish(scratch, at)

    return attention_part


@policy.helper
def _keep(room, to, most, total, acc, count, width):
    """Sums of ``count`` queries to rows ``to`` ... of the room."""
    for i in range(count):
        at = (to + i) * (width + 2)
        for c in range(width):
            room[at + c] = acc[i * width + c]
        room[at + width], room[at + width + 1] = most[i], total[i]


def _merge_core(paired: bool, tiled: bool) -> Any:
    fold, unit = fold_core(tiled), np.float32(LN_2 if tiled else 1)

    @policy.helper
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
                fold(piece == first or piece % of_span == 0, span_most, span_total, span, 0, 1, room, at + width, room,
                     at + width + 1, room, at, 1, width)
                if piece == last or (piece + 1) % of_span == 0:
                    fold(piece // of_span == first // of_span, most, total, acc, 0, 1, span_most, 0, span_total, 0,
                         span, 0, 1, width)
            _finish(most, total, acc, 1, 1, width, paired, out, row + i // group, out_stride, head + i % group, v_size,
                    lse, lse_stride, unit)

    return merge_part


@policy.helper
def _shards_part(part, parts, rows, shards, heads, size, parts_in, lses, part_step, part_stride, lse_step, lse_stride,
                 row_seq, first_block_at, out, out_stride):
    """out = sum of exp(lse_i - lse) part_i over the shards in the order of their first blocks.

    So it does not depend on where a sequence begins. A thread has its share of the heads of rows.
    """
    for item in range(part * rows * heads // parts, (part + 1) * rows * heads // parts):
        m, h = item // heads, item % heads
        at, to, most, total = m * lse_stride + h, m * out_stride + h * size, np.float32(-np.inf), np.float32(0)
        for shard in range(shards):
            most = max(most, lses[shard * lse_step + at])
        base = np.float32(0) if most == -np.inf else most
        for d in range(size):
            out[to + d] = 0
        for turn in range(shards):
            shard = (first_block_at[row_seq[m]] + turn) % shards
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
def attention_operation(kv_type: str, kv_type_v: str, tiled: bool) -> Operation:
    """Attention over keys and values of these types; ``kv_type_v`` "": the values are columns of the keys.

    ``tiled``: by products of tiles, see :func:`by_tiles`.
    """
    name = f"attention_{kv_type}_{kv_type_v or 'keys'}_{'tiles_' if tiled else ''}{key()}"
    return Operation(_attention_core(kv_type, kv_type_v, tiled), name, (
        VECTOR, INT, *_WRITTEN, *cache_kinds(kv_type, kv_type_v), INTS, INTS, INT, INTS, INT, INT, REAL, INT, *_FORM,
        types.uint8[::1]))


@lru_cache(None)
def merge_operation(kv_type: str, kv_type_v: str, tiled: bool) -> Operation:
    """What merges the pieces of attention over a cache of these types."""
    paired = kv_type == "bf16" and not kv_type_v
    name = "attention_merge" + ("_paired" if paired else "") + ("_tiles" if tiled else "")
    return Operation(_merge_core(paired, tiled), name, (*_WRITTEN, *_FORM))


@lru_cache(None)
def shards_operation() -> Operation:
    """What merges the shards of a cache, see Plan.merge_shards."""
    return Operation(_shards_part, "merge_shards", (
        INT, INT, INT, INT, VECTOR, VECTOR, INT, INT, INT, INT, INTS, INTS, F32_1, INT))


__all__ = ["BLOCK", "Q8_BYTES", "QUERIES", "SPAN", "STRETCH", "attention_operation", "by_tiles", "merge_operation",
           "padded", "shards_operation", "tiles_kernel"]
