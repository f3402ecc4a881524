"""Attention over a bf16 cache in tier amx: a stretch of positions for a tile of rows, by tile products.

One order for any rows beside a query: scores add up the products of ascending 32s of columns, as a bf16 linear layer
does; the softmax of a stretch has one maximum, and its sum is that of the rounded probabilities; outputs add up the
products of ascending positions, 32 at a time where values stand for themselves and 16 at a time where they are columns
of keys. Queries (scaled) and probabilities are rounded to bf16. Where a block holds positions that not all rows see,
its values are copied and those positions set to 0, which adds nothing, whatever stood there.

A thread's scratch holds queries in tile order, scores of the stretch, probabilities, copied values, and keys of head
sizes that do not fill tiles.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from mpillm.jit import policy
from mpillm.jit.cache_rows import BLOCK
from mpillm.jit.isa import select
from mpillm.jit.isa.amx import ROOM, SCRATCH, bf16_block, configure, release
from mpillm.jit.isa.attention_amx import soften_in_place, soften_to_tiles, values_of_blocks, values_of_keys
from mpillm.jit.isa.generic import round_sixteen, store_number
from mpillm.jit.isa.tile_moves import (
    SCORES,
    address_of,
    copy_keys,
    copy_values,
    fetch,
    turn_probabilities,
    turn_sums,
)

STRETCH = 512           # positions that share one softmax before it is merged with those before
TOGETHER = 32           # queries of two tiles
HALF = 32               # positions of a tile of values
_S_BYTES = 4 * TOGETHER * SCORES
_P_BYTES = 2 * TOGETHER * STRETCH
_KEYS_P_BYTES = 8 * TOGETHER * STRETCH    # twice, a zero beside each
_COPIES, _KEYS_COPIES = 4, 2        # blocks that rows see in part, at either end of a window; without one
_SUMS_BYTES = 4096


def _room_nbytes(size: int, value_dim: int, of_keys: bool) -> int:
    queries, columns = 2 * TOGETHER * (-(-size // 32) * 32), -(-value_dim // 16) * 16
    if of_keys:
        return queries + _S_BYTES + _KEYS_P_BYTES + _SUMS_BYTES + _KEYS_COPIES * 2 * BLOCK * size
    return queries + _S_BYTES + _P_BYTES + _COPIES * 2 * BLOCK * columns + 2 * BLOCK * (-(-size // 32) * 32)


def by_tiles(kv_type: str, kv_type_v: str, size: int, value_dim: int, window: int) -> bool:
    """Whether attention over such a cache runs on tiles; ``kv_type_v`` "": values are columns of the keys."""
    of_keys = not kv_type_v
    return (select.tier() == "amx" and kv_type == "bf16" and kv_type_v in ("bf16", "")
            and not (of_keys and (size % 32 or window))
            and _room_nbytes(size, value_dim, of_keys) <= SCRATCH - ROOM)


@policy.helper
def _round_queries(q, queries, rows, size, tiles):
    """q f32 [queries][size] to bf16 [tile of 16][k tile of 32][its rows][32], zeros beyond; ``rows`` of both tiles."""
    k_tiles = (size + 31) // 32
    for i in range(queries):
        first = i // 16 * 16
        height = min(16, rows - first)
        for t in range(k_tiles):
            to = first * k_tiles * 32 + (t * height + i - first) * 32
            count = min(32, size - t * 32)
            if count == 32:
                round_sixteen(q, i * size + t * 32, tiles, to)
                round_sixteen(q, i * size + t * 32 + 16, tiles, to + 16)
                continue
            for d in range(count):
                store_number(tiles, to + d, q[i * size + t * 32 + d])
            for d in range(count, 32):
                tiles[to + d] = 0


@policy.helper
def _pad_keys(keys, start, size, padded):
    """A block's keys [4][size / 2][16][2] with zeros behind the columns, up to whole tiles."""
    whole = (size + 31) // 32 * 32
    for panel in range(4):
        for i in range(size * 16):
            padded[panel * whole * 16 + i] = keys[start + panel * size * 16 + i]
        for i in range(size * 16, whole * 16):
            padded[panel * whole * 16 + i] = 0


@policy.helper
def _score_block(size_0, size_1, queries, size, keys, start, high, padded, scores, column, room, at):
    """Scores of a block's positions up to ``high``, and of some behind, from ``scores[column]`` on."""
    for panel in range(0, (high + 15) // 16, 2):
        if size % 32:
            bf16_block(size_0, size_1, 2, 1, 0, queries, 0, size, padded, panel, (size + 31) // 32 * 512, 0,
                       (size + 31) // 32 * 32, scores, column + 16 * panel, SCORES, room, at)
        else:
            bf16_block(size_0, size_1, 2, 1, 0, queries, 0, size, keys, start // (16 * size) + panel, 16 * size, 0,
                       size, scores, column + 16 * panel, SCORES, room, at)


@policy.helper
def _spoil(bad, base, group, rows, begin, window, total):
    """What attends to one of the ``bad`` positions of a block has NaN for a sum."""
    for r in range(rows):
        first = max(0, begin + r - window + 1 - base) if window > 0 else 0
        for position in range(first, min(BLOCK, begin + r + 1 - base)):
            if bad >> position & 1:
                for i in range(r * group, (r + 1) * group):
                    total[i] = np.nan


@policy.helper
def prepare_tiles(q, queries, size, codes, code_scales, code_sums, room, at):
    """Queries to bf16 tiles in the thread's scratch, and tiles configured for them."""
    _round_queries(q, queries, queries, size, room[at + ROOM:at + SCRATCH].view(np.uint16))
    configure(room, at, min(16, queries), max(0, queries - 16), 64, 16)


@policy.helper
def prepare_whole_tiles(q, queries, size, codes, code_scales, code_sums, room, at):
    """The same with tiles of 16 queries, whatever stands in those beyond."""
    _round_queries(q, queries, (queries + 15) // 16 * 16, size, room[at + ROOM:at + SCRATCH].view(np.uint16))
    configure(room, at, 16, 16, 64, 16)


@policy.helper
def release_tiles(room, at):
    """Give the tiles back."""
    release(room, at)


@policy.inlined
def _blocks_of(begin, rows, window, stretch):
    """First and last block of the stretch that the rows see."""
    seen = max(0, begin - window + 1) if window > 0 else 0
    return max(seen, stretch * STRETCH) // BLOCK, min(begin + rows - 1, stretch * STRETCH + STRETCH - 1) // BLOCK


@policy.inlined
def _seen_by_row(position, window, start):
    """Positions of the stretch from ``start`` on that a row at ``position`` sees: first and stop."""
    return max(0, position - window + 1 - start) if window > 0 else 0, min(STRETCH, position + 1 - start)


@policy.inlined
def _hide(scores, queries, column):
    """Scores of a block that is held elsewhere."""
    for i in range(queries):
        for position in range(column, column + BLOCK):
            scores[i * SCORES + position] = -np.inf


@policy.helper
def _keys_of(block, sequence, j, kv_heads, table, table_width, size, otherwise):
    """Where the keys of a sequence's block begin, or ``otherwise`` if it is held elsewhere."""
    number = np.int64(table[sequence * table_width + block])
    return (number * kv_heads + j) * BLOCK * size if number >= 0 else otherwise


@policy.helper
def first_keys(item, kv_heads, group_parts, pieces, run, row_seq, positions, tiles, n_tiles, window, table, table_width,
               size):
    """Where the keys of a work item begin, so that they can be fetched early; 0 if there is no such item."""
    if item >= n_tiles * kv_heads * group_parts * pieces:
        return 0
    pair = item // group_parts // pieces
    row = tiles[pair // kv_heads]
    begin, block = positions[row], item // group_parts % pieces * run * (STRETCH // BLOCK)
    if window > 0:
        block = max(block, max(0, begin - window + 1) // BLOCK)
    return _keys_of(min(block, begin // BLOCK), row_seq[row], pair % kv_heads, kv_heads, table, table_width, size, 0)


@policy.helper
def stretch_of_tiles(q, codes, code_scales, code_sums, group, rows, begin, sequence, j, kv_heads, k_cache, k_words,
                     v_cache, v_words, table, table_width, first_block_at, place, shards, size, v_size, width, window,
                     stretch, scores, weighted, tile, tile_codes, most, total, acc, room, at, following):
    """A stretch's blocks for a tile of rows over keys and values that stand for themselves."""
    queries, start = rows * group, stretch * STRETCH
    size_0, size_1, panels = min(16, queries), max(0, queries - 16), (v_size + 15) // 16
    wide, words = room[at + ROOM:at + SCRATCH].view(np.float32), room[at + ROOM:at + SCRATCH].view(np.uint16)
    at_scores = TOGETHER * ((size + 31) // 32 * 16)
    at_p = 2 * at_scores + _S_BYTES // 2
    at_copies = at_p + _P_BYTES // 2
    at_padded = at_copies + _COPIES * BLOCK * 16 * panels
    s, p, padded = wide[at_scores:], words[at_p:], words[at_padded:]
    addresses, places = np.empty(STRETCH // HALF, np.int64), np.empty(STRETCH // HALF, np.int64)
    bad, bad_at = np.empty(_COPIES, np.int64), np.empty(_COPIES, np.int64)
    first_block, last_block = _blocks_of(begin, rows, window, stretch)
    count, copies, seen, end = 0, 0, max(0, begin - window + 1) if window > 0 else 0, begin + rows
    for block in range(first_block, last_block + 1):
        base = block * BLOCK
        if shards > 1 and (first_block_at[sequence] + block) % shards != place:
            _hide(s, queries, base - start)
            continue
        keys = _keys_of(block, sequence, j, kv_heads, table, table_width, size, 0)
        high, values = min(BLOCK, end - base), keys // size * 16 * panels
        if rows == 1:
            # These are read once: the values while scores are computed, and the keys that come next.
            fetch(address_of(v_cache, values), BLOCK * 32 * panels)
            if base + BLOCK < end:
                following_keys = _keys_of(block + 1, sequence, j, kv_heads, table, table_width, size, keys)
            else:
                following_keys = following
            fetch(address_of(k_cache, following_keys), BLOCK * 2 * size)
        if size % 32:
            _pad_keys(k_cache, keys, size, padded)
        _score_block(size_0, size_1, words, size, k_cache, keys, high, padded, s, base - start, room, at)
        address = address_of(v_cache, values)
        if base + BLOCK > begin + 1 or (window > 0 and base < end - window):
            to = at_copies + copies * BLOCK * 16 * panels
            bad[copies] = copy_values(v_cache, values, v_size, max(0, seen - base), high, words, to)
            bad_at[copies] = base
            address, copies = address_of(words, to), copies + 1
        for half in range((high + HALF - 1) // HALF):
            addresses[count], places[count] = address + 2 * HALF * 16 * half, (base - start + HALF * half) * queries
            count += 1
    low, behind = first_block - start // BLOCK, last_block + 1 - start // BLOCK
    for i in range(queries):
        first, stop = _seen_by_row(begin + i // group, window, start)
        most[i], total[i] = soften_to_tiles(s, i * SCORES, low, behind, first, stop, p, i * HALF, queries * HALF)
    for i in range(copies):
        if bad[i]:
            _spoil(bad[i], bad_at[i], group, rows, begin, window, total)
    for panel in range(0, panels, 2):
        values_of_blocks(size_0, size_1, min(2, panels - panel), p, addresses, places, count, panel, acc, 16 * panel,
                         width, room, at)


@policy.helper
def stretch_of_key_tiles(q, codes, code_scales, code_sums, group, rows, begin, sequence, j, kv_heads, k_cache, k_words,
                         v_cache, v_words, table, table_width, first_block_at, place, shards, size, v_size, width,
                         window, stretch, scores, weighted, tile, tile_codes, most, total, acc, room, at, following):
    """The same over keys whose first columns are the values; ``acc`` gets even and odd columns of 32 apart."""
    queries, start = rows * group, stretch * STRETCH
    query_tiles = (queries + 15) // 16
    wide, words = room[at + ROOM:at + SCRATCH].view(np.float32), room[at + ROOM:at + SCRATCH].view(np.uint16)
    at_scores = TOGETHER * (size // 2)
    at_p = 2 * at_scores + _S_BYTES // 2
    at_sums, at_copies = (at_p + _KEYS_P_BYTES // 2) // 2, at_p + (_KEYS_P_BYTES + _SUMS_BYTES) // 2
    s, p = wide[at_scores:], words[at_p:]
    addresses, places = np.empty(STRETCH // BLOCK, np.int64), np.empty(STRETCH // BLOCK, np.int64)
    first_block, last_block = _blocks_of(begin, rows, 0, stretch)
    count, copies = 0, 0
    for block in range(first_block, last_block + 1):
        base = block * BLOCK
        if shards > 1 and (first_block_at[sequence] + block) % shards != place:
            _hide(s, queries, base - start)
            continue
        keys = _keys_of(block, sequence, j, kv_heads, table, table_width, size, 0)
        high = min(BLOCK, begin + rows - base)
        if base + BLOCK < begin + rows:
            following_keys = _keys_of(block + 1, sequence, j, kv_heads, table, table_width, size, keys)
        else:
            following_keys = following
        fetch(address_of(k_cache, following_keys), BLOCK * 2 * size)
        _score_block(16, 16 * (query_tiles - 1), words, size, k_cache, keys, high, words, s, base - start, room, at)
        if base + BLOCK <= begin + 1:
            addresses[count] = address_of(k_cache, keys)
        else:
            to = at_copies + copies * BLOCK * size
            copy_keys(k_cache, keys, size, 0, high, words, to)
            addresses[count], copies = address_of(words, to), copies + 1
        places[count], count = (base - start) // 16 * query_tiles * 1024, count + 1
    low, high = first_block - start // BLOCK, last_block + 1 - start // BLOCK
    for i in range(queries):
        first, stop = _seen_by_row(begin + i // group, 0, start)
        most[i], total[i] = soften_in_place(s, i * SCORES, low, high, first, stop)
    for panel in range(4 * low, 4 * high):
        for t in range(query_tiles):
            turn_probabilities(s, 16 * t * SCORES + 16 * panel, p, (panel * query_tiles + t) * 1024, 512)
    for g in range(width // 32):
        values_of_keys(query_tiles, p, addresses, places, count, size, g, wide, at_sums, room, at)
        for t in range(query_tiles):
            for odd in range(2):
                turn_sums(wide, at_sums + (2 * t + odd) * 256, acc, 16 * t * width + 32 * g + 16 * odd, width)


@lru_cache(None)
def stretch_by_tiles(of_keys: bool) -> tuple[Any, Any]:
    """(what prepares a tile of rows' queries, what runs a stretch)."""
    if of_keys:
        return prepare_whole_tiles, stretch_of_key_tiles
    return prepare_tiles, stretch_of_tiles


__all__ = ["STRETCH", "TOGETHER", "by_tiles", "first_keys", "release_tiles", "stretch_by_tiles"]
