"""Linear layers whose outputs are used at once: gate and up with SiLU; queries, keys and values with the cache.

Each thread computes some outputs of all rows in room of its own, and finishes them there. A product is the linear
layer of a format and tier on some panels; what it adds up, and in which order, is the same as by itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from numba import types

from mpillm.jit import policy
from mpillm.jit.cache_rows import cache_kinds, finish_head
from mpillm.jit.gemm import (
    ELEMENTS,
    F32_1,
    INT,
    VECTOR,
    linear_part,
    quantise_operation,
    quantise_part,
    quantised_part,
    reads,
)
from mpillm.jit.isa import quantised, select
from mpillm.jit.isa.amx import SCRATCH
from mpillm.jit.isa.lanes import add_row, silu_mul_row
from mpillm.jit.isa.quantised import dequantise_panels
from mpillm.jit.tape import Operation
from mpillm.jit.tiles import bf16_avx512_part, codes_core, tiles_core

FAST_ROWS = 32         # from here on fast products widen quantised weights to bf16
PAIRS = 8              # panels of gate and of up that a thread takes at a time

INTS = reads(types.int32)
#: of x: what prepares it (Plan.prepared), its scales and sums where the format is quantised
ACTIVATIONS = {"f32": VECTOR, "bf16": reads(types.uint16), "codes": reads(types.int8)}


def activation(name: str) -> str:
    """What a product with weights ``name`` takes: f32, bf16 or codes."""
    if name in quantised.SHAPES:
        return "codes"
    return "bf16" if name == "bf16" and select.at_least("avx512") else "f32"


@lru_cache(None)
def product(name: str, fast: bool = False) -> Any:
    """``product(x, x_scales, x_sums, x_bf16, rows, k, w, w_scales, stride, phase, none, y, n, tail, tiles, panels)``.

    y [rows, n] = x @ w; ``none`` is an empty bias.

    ``fast`` ones of quantised weights widen them to bf16 in ``panels`` once rows are many, and take ``x_bf16``.
    """
    tier = select.tier()
    if name in quantised.SHAPES:
        codes = codes_core(name) if tier == "amx" else None

        @policy.helper
        def with_tiles(x, x_scales, x_sums, x_bf16, rows, k, w, w_scales, stride, phase, none, y, n, tail, tiles,
                       panels):
            codes(0, 1, x, x_scales, x_sums, rows, k, w, w_scales, phase, none, y, n, tail, tiles)

        @policy.helper
        def of_codes(x, x_scales, x_sums, x_bf16, rows, k, w, w_scales, stride, phase, none, y, n, tail, tiles, panels):
            quantised_part(0, 1, x, x_scales, x_sums, rows, k, w, w_scales, phase, none, y, n, tail)

        usual = of_codes if codes is None else with_tiles
        return _widened(usual, product("bf16")) if fast else usual
    if activation(name) == "bf16":
        whole = tiles_core("bf16") if tier == "amx" else None

        @policy.helper
        def of_tiles(x, x_scales, x_sums, x_bf16, rows, k, w, w_scales, stride, phase, none, y, n, tail, tiles, panels):
            whole(0, 1, x, rows, k, w, stride, none, y, n, tail, tiles)

        @policy.helper
        def of_pairs(x, x_scales, x_sums, x_bf16, rows, k, w, w_scales, stride, phase, none, y, n, tail, tiles, panels):
            bf16_avx512_part(0, 1, x, rows, k, w, stride, none, y, n, tail)

        return of_pairs if whole is None else of_tiles

    @policy.helper
    def of_numbers(x, x_scales, x_sums, x_bf16, rows, k, w, w_scales, stride, phase, none, y, n, tail, tiles, panels):
        linear_part(0, 1, x, x_scales, rows, k, w, x_scales, stride, none, y, n, tail)

    return of_numbers


def _widened(few: Any, many: Any) -> Any:
    @policy.helper
    def widened(x, x_scales, x_sums, x_bf16, rows, k, w, w_scales, stride, phase, none, y, n, tail, tiles, panels):
        if rows < FAST_ROWS:
            few(x, x_scales, x_sums, x_bf16, rows, k, w, w_scales, stride, phase, none, y, n, tail, tiles, panels)
        else:
            dequantise_panels(n // 16, k, w, w_scales, phase, panels)
            many(x_bf16, x_scales, x_sums, x_bf16, rows, k, panels, x_scales, 16 * k, 0, none, y, n, tail, tiles,
                 panels)

    return widened


@policy.helper
def _few_quantised_part(part, parts, x, rows, k, codes, scales, sums):
    """Codes of x where fast products take them: while rows are few."""
    if rows < FAST_ROWS:
        quantise_part(part, parts, x, rows, k, codes, scales, sums)


@lru_cache(None)
def few_quantised() -> Operation:
    """Activations to q8_0 for fast products."""
    return Operation(_few_quantised_part, "quantise_few", quantise_operation().kinds)


def _linear_core(multiply: Any) -> Any:
    @policy.helper
    def linear_by_panels(part, parts, x, x_scales, x_sums, x_bf16, rows, k, w, w_scales, stride, scale_stride, phase,
                         bias, room, each, tail, tiles, widened, each_widened, out, n):
        """out [rows, n] = x @ w + bias, some panels at a time in the thread's room."""
        y, scratch, panels = room[part * each:], tiles[part * SCRATCH:], widened[part * each_widened:]
        all_panels = (n + 15) // 16
        stop = (part + 1) * all_panels // parts
        for p in range(part * all_panels // parts, stop, 2 * PAIRS):
            count = min(2 * PAIRS, stop - p)
            width = 16 * count
            multiply(x, x_scales, x_sums, x_bf16, rows, k, w[p * stride:], w_scales[p * scale_stride:], stride, phase,
                     bias[:0], y, width, tail, scratch, panels)
            columns = min(width, n - 16 * p)
            for m in range(rows):
                for i in range(columns):
                    out[m * n + 16 * p + i] = y[m * width + i]
                if bias.size:
                    add_row(out, m * n + 16 * p, bias, 16 * p, columns)

    return linear_by_panels


def _gated_core(multiply: Any) -> Any:
    @policy.helper
    def gated_part(part, parts, x, x_scales, x_sums, x_bf16, rows, k, w, w_scales, stride, scale_stride, phase, bias,
                   room, each, tail, tiles, widened, each_widened, out, out_stride, n):
        """out [rows, n] = silu(gate) * up; panels of gate and up in turn. ``room`` f32 [parts][each]."""
        y, scratch, panels = room[part * each:], tiles[part * SCRATCH:], widened[part * each_widened:]
        stop = (part + 1) * (n // 16) // parts
        for pair in range(part * (n // 16) // parts, stop, PAIRS):
            pairs = min(PAIRS, stop - pair)
            width = 32 * pairs
            multiply(x, x_scales, x_sums, x_bf16, rows, k, w[2 * pair * stride:], w_scales[2 * pair * scale_stride:],
                     stride, phase, bias[:0], y, width, tail, scratch, panels)
            for m in range(rows):
                if bias.size:
                    add_row(y, m * width, bias, 32 * pair, width)
                for i in range(pairs):
                    gate = m * width + 32 * i
                    silu_mul_row(y, gate, gate + 16, out, m * out_stride + 16 * (pair + i), 16)

    return gated_part


def _heads_core(multiply: Any, finish: Any) -> Any:
    @policy.helper
    def heads_part(part, parts, x, x_scales, x_sums, x_bf16, rows, k, w, w_scales, stride, scale_stride, phase, bias,
                   room, each, tail, tiles, widened, each_widened, q, q_stride, heads, kv_heads, size, cos, sin,
                   q_norm, k_norm, eps, k_cache, k_words, v_cache, v_words, row_seq, positions, table, table_width):
        """Heads of queries, keys and values, of ``size`` outputs each, a thread its share; see finish_head."""
        y, scratch, panels = room[part * each:], tiles[part * SCRATCH:], widened[part * each_widened:]
        total = heads + 2 * kv_heads
        for head in range(part * total // parts, (part + 1) * total // parts):
            panel = head * (size // 16)
            multiply(x, x_scales, x_sums, x_bf16, rows, k, w[panel * stride:], w_scales[panel * scale_stride:], stride,
                     phase, bias[:0], y, size, tail, scratch, panels)
            if bias.size:
                for m in range(rows):
                    add_row(y, m * size, bias, head * size, size)
            finish(rows, head, y, size, q, q_stride, heads, kv_heads, size, cos, sin, q_norm, k_norm, eps, k_cache,
                   k_words, v_cache, v_words, row_seq, positions, table, table_width)

    return heads_part


def _shared(name: str) -> tuple:
    w_scales = reads(types.int16) if name in quantised.SHAPES else VECTOR
    return (ACTIVATIONS[activation(name)], VECTOR, INTS, types.uint16[::1], INT, INT, reads(ELEMENTS[name]), w_scales,
            INT, INT, INT, VECTOR, F32_1, INT, F32_1, types.uint8[::1], types.uint16[::1], INT)


def _named(kind: str, name: str, fast: bool) -> str:
    return f"{kind}_{name}_{select.key()}" + ("_fast" if fast else "")


@lru_cache(None)
def linear_operation(name: str) -> Operation:
    """A fast product of quantised weights ``name``."""
    return Operation(_linear_core(product(name, True)), _named("linear", name, True), (*_shared(name), F32_1, INT))


@lru_cache(None)
def gated_operation(name: str, fast: bool = False) -> Operation:
    """Gate and up of weights ``name``."""
    return Operation(_gated_core(product(name, fast)), _named("gated", name, fast), (*_shared(name), F32_1, INT, INT))


@lru_cache(None)
def heads_operation(name: str, kv_type: str, kv_type_v: str, fast: bool = False) -> Operation:
    """Queries, keys and values of weights ``name``, with a cache of these types."""
    core = _heads_core(product(name, fast), finish_head(kv_type, kv_type_v))
    return Operation(core, _named("heads", f"{name}_{kv_type}_{kv_type_v}", fast), (
        *_shared(name), F32_1, INT, INT, INT, INT, VECTOR, VECTOR, VECTOR, VECTOR, types.float32,
        *cache_kinds(kv_type, kv_type_v), INTS, INTS, INTS, INT))
