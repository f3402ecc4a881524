"""One block of the KV cache for some queries: scores, softmax, and the values times it.

Scores come from numbers or from codes of q8_0, values from numbers, from codes, or from the first columns of the keys;
each is a helper of its own, put together by :func:`block_step`. ``stored``: the block's number times the KV heads, and
the head. Layouts: jit/attention.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from mpillm.jit import policy
from mpillm.jit.cache_rows import BLOCK, Q8_BYTES
from mpillm.jit.gemm import multiply
from mpillm.jit.isa.generic import load_number
from mpillm.jit.isa.interleave import COLUMNS, interleave_codes, interleave_numbers
from mpillm.jit.isa.lanes import softmax_step
from mpillm.jit.isa.quantised import MOST_ROWS, blocks_by_panels

TILES = 2                          # groups of columns that are interleaved before they are multiplied: half of an L1
TILE = TILES * BLOCK * COLUMNS     # elements of ``tile`` and ``tile_codes``, a thread's room for interleaved values


@policy.helper
def _score_numbers(q, codes, code_scales, code_sums, query, count, k_cache, k_words, stored, size, low, panels, scores):
    """scores [count, 64] of panels ``low`` ... of the block's keys, with queries ``query`` ... ."""
    multiply(q, code_scales, query * size, size, count, k_cache, code_scales, stored * BLOCK * size + low * 16 * size,
             16 * size, panels, 0, size, scores, 16 * low, BLOCK)


@policy.helper
def _score_codes(q, codes, code_scales, code_sums, query, count, k_cache, k_words, stored, size, low, panels, scores):
    """The same of q8_0: exact sums of codes with quantised queries."""
    at = stored * Q8_BYTES * size
    behind = (at + BLOCK * size) // 2
    for i in range(0, count, MOST_ROWS):
        blocks_by_panels(min(MOST_ROWS, count - i), query + i, size, codes, code_scales, code_sums, k_cache[at:],
                         k_words[behind:], 0, low, panels, 0, size, scores, i * BLOCK + 16 * low, BLOCK)


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
def _add_numbers(scores, weighted, tile, tile_codes, query, count, k_cache, k_words, v_cache, v_words, stored, size,
                 v_size, width, first, stop, acc):
    """acc [count, width] of queries ``query`` ... += probabilities of positions first ... stop - 1 times values."""
    panels = (v_size + 15) // 16
    multiply(scores, weighted, 0, BLOCK, count, v_cache, weighted, stored * BLOCK * 16 * panels, BLOCK * 16, panels,
             first, stop, acc, query * width, width)


@policy.inlined
def _weigh(scores, scales, count, first, stop, weighted):
    """Probabilities times the scales of 32 columns at each position."""
    for j in range(count):
        for position in range(first, stop):
            weighted[j * BLOCK + position] = scores[j * BLOCK + position] * scales[position]


@policy.helper
def _add_codes(scores, weighted, tile, tile_codes, query, count, k_cache, k_words, v_cache, v_words, stored, size,
               v_size, width, first, stop, acc):
    """The same of q8_0: the values' scales go to the probabilities."""
    at = stored * Q8_BYTES * v_size
    behind = (at + BLOCK * v_size) // 2
    for i in range(v_size // 32):
        for position in range(first, stop):
            tile[position] = load_number(v_words, behind + i * BLOCK + position)
        _weigh(scores, tile, count, first, stop, weighted)
        multiply(weighted, tile, 0, BLOCK, count, v_cache, tile, at + 2 * i * BLOCK * 16, BLOCK * 16, 2, first, stop,
                 acc, query * width + 32 * i, width)


@policy.helper
def _add_columns(scores, weighted, tile, tile_codes, query, count, k_cache, k_words, v_cache, v_words, stored, size,
                 v_size, width, first, stop, acc):
    """The same of the first columns of keys that are numbers."""
    low, high = first // 16, (stop + 15) // 16
    for column in range(0, width, TILES * COLUMNS):
        tiles = min(TILES, (width - column) // COLUMNS)
        for i in range(tiles):
            interleave_numbers(k_cache, stored * BLOCK * size, size, column + i * COLUMNS, low, high,
                               tile[i * BLOCK * COLUMNS:])
        multiply(scores, weighted, 0, BLOCK, count, tile, weighted, 0, BLOCK * 16, 2 * tiles, first, stop, acc,
                 query * width + column, width)


@policy.helper
def _add_code_columns(scores, weighted, tile, tile_codes, query, count, k_cache, k_words, v_cache, v_words, stored,
                      size, v_size, width, first, stop, acc):
    """The same of the first columns of keys in q8_0."""
    at, low, high = stored * Q8_BYTES * size, first // 16, (stop + 15) // 16
    behind, blocks = (at + BLOCK * size) // 2, size // 32
    for i in range((v_size + 31) // 32):
        interleave_codes(k_cache, at, size, i, low, high, tile_codes)
        for position in range(first, stop):
            tile[position] = load_number(k_words, behind + (position // 16 * blocks + i) * 16 + position % 16)
        _weigh(scores, tile, count, first, stop, weighted)
        multiply(weighted, tile, 0, BLOCK, count, tile_codes, tile, 0, BLOCK * 16, 2, first, stop, acc,
                 query * width + 32 * i, width)


@lru_cache(None)
def block_step(kv_type: str, kv_type_v: str) -> Any:
    """The step of a cache of these types; ``kv_type_v`` "": the values are columns of the keys."""
    score = _score_codes if kv_type == "q8_0" else _score_numbers
    if kv_type_v:
        add = _add_codes if kv_type_v == "q8_0" else _add_numbers
    else:
        add = _add_code_columns if kv_type == "q8_0" else _add_columns

    @policy.helper
    def step(q, codes, code_scales, code_sums, query, count, k_cache, k_words, v_cache, v_words, stored, size, v_size,
             width, first, stop, scores, weighted, tile, tile_codes, most, total, acc):
        """One block for queries ``query`` ... : positions first ... stop - 1 are attended to."""
        low = first // 16
        for i in range(count * BLOCK):
            scores[i] = 0
        score(q, codes, code_scales, code_sums, query, count, k_cache, k_words, stored, size, low,
              (stop + 15) // 16 - low, scores)
        _soften(count, query, first, stop, scores, most, total, acc, width)
        add(scores, weighted, tile, tile_codes, query, count, k_cache, k_words, v_cache, v_words, stored, size, v_size,
            width, first, stop, acc)

    return step
