"""A mixture of experts: rows choose experts, stand together by them, and each row's results are added.

Legend: T rows of a step, E experts held here, K experts of a row, S <= T * K slots: a slot is a row at one of its
experts. Slots stand by expert and, within an expert, by row; ``starts`` [E + 1] (jit/routing) says where each expert's
begin and the last one's end. A row's additions follow its experts' numbers: its bits do not depend on other rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from numba import types

from mpillm.jit import policy, routing
from mpillm.jit.fused import ACTIVATIONS, INTS, PAIRS, activation, product
from mpillm.jit.gemm import ELEMENTS, F32_1, INT, VECTOR, reads
from mpillm.jit.isa import quantised, select
from mpillm.jit.isa.amx import SCRATCH
from mpillm.jit.isa.generic import store_number
from mpillm.jit.isa.lanes import silu_mul_row
from mpillm.jit.isa.quantised import quantise_row
from mpillm.jit.tape import Operation

FEW = 16      # rows of an expert up to which reading its weights takes longer than multiplying


@policy.helper
def _source(gathered, sources, slot):
    return types.intp(sources[slot]) if gathered else slot


@policy.helper
def _take_numbers_part(part, parts, k, x, gathered, sources, starts, experts, taken):
    slots = starts[experts]
    for s in range(part * slots // parts, (part + 1) * slots // parts):
        start = _source(gathered, sources, s) * k
        for i in range(k):
            taken[s * k + i] = x[start + i]


@policy.helper
def _take_codes_part(part, parts, k, x, gathered, sources, starts, experts, codes, scales, sums):
    slots = starts[experts]
    for s in range(part * slots // parts, (part + 1) * slots // parts):
        quantise_row(x, _source(gathered, sources, s) * k, k, codes, s * k, scales, s * (k // 32), sums, s * (k // 16))


@policy.helper
def _take_pairs_part(part, parts, k, x, gathered, sources, starts, experts, pairs):
    """As round_rows_part has them."""
    slots, stride = starts[experts], (k + 1) // 2 * 2
    for s in range(part * slots // parts, (part + 1) * slots // parts):
        start = _source(gathered, sources, s) * k
        for i in range(k):
            store_number(pairs, s * stride + i, x[start + i])
        if k < stride:
            pairs[s * stride + k] = 0


@policy.helper
def _take_tiles_part(part, parts, k, x, gathered, sources, starts, experts, tiles):
    """As tile_rows_part has them, the slots of each expert by themselves."""
    slots, k_tiles = starts[experts], (k + 31) // 32
    begin, end = part * slots // parts, (part + 1) * slots // parts
    for e in range(experts):
        base = starts[e]
        for s in range(max(begin, base), min(end, starts[e + 1])):
            first = (s - base) // 16 * 16
            size = min(16, starts[e + 1] - base - first)
            start = _source(gathered, sources, s) * k
            for t in range(k_tiles):
                to = (base + first) * k_tiles * 32 + (t * size + s - base - first) * 32
                width = min(32, k - t * 32)
                for i in range(width):
                    store_number(tiles, to + i, x[start + t * 32 + i])
                for i in range(width, 32):
                    tiles[to + i] = 0


@policy.helper
def _total(starts, experts):
    """What an output panel costs over all experts that have rows."""
    total = 0
    for e in range(experts):
        rows = starts[e + 1] - starts[e]
        if rows > 0:
            total += max(rows, FEW)
    return total


@policy.helper
def _until(border, base, cost, units):
    """How many of an expert's units begin before ``border``; they begin at ``base`` and cost ``cost`` each."""
    return max(0, min(units, (border - base + cost - 1) // cost))


def _gate_up_core(multiply: Any) -> Any:
    @policy.helper
    def gate_up_part(part, parts, x, x_scales, x_sums, x_stride, starts, experts, k, w, w_scales, stride, scale_stride,
                     phase, none, words, room, each, tail, tiles, out, out_stride, n):
        """out [S, n] = silu(gate) * up: pairs of panels of all experts that have rows, a thread its stretch of them."""
        y, scratch, pairs, base = room[part * each:], tiles[part * SCRATCH:], n // 16, 0
        total = _total(starts, experts) * pairs
        begin, end = part * total // parts, (part + 1) * total // parts
        for e in range(experts):
            first, rows = starts[e], starts[e + 1] - starts[e]
            if rows == 0:
                continue
            cost = max(rows, FEW)
            stop = _until(end, base, cost, pairs)
            for pair in range(_until(begin, base, cost, pairs), stop, PAIRS):
                beside = min(PAIRS, stop - pair)
                width, panel = 32 * beside, 2 * (e * pairs + pair)
                multiply(x[first * x_stride:], x_scales[first * (k // 32):], x_sums[first * (k // 16):], words, rows, k,
                         w[panel * stride:], w_scales[panel * scale_stride:], stride, phase, none, y, width, tail,
                         scratch, words)
                for m in range(rows):
                    for i in range(beside):
                        gate = m * width + 32 * i
                        silu_mul_row(y, gate, gate + 16, out, (first + m) * out_stride + 16 * (pair + i), 16)
            base += cost * pairs

    return gate_up_part


def _down_core(multiply: Any) -> Any:
    @policy.helper
    def down_part(part, parts, x, x_scales, x_sums, x_stride, starts, experts, k, w, w_scales, stride, scale_stride,
                  phase, none, words, room, each, tail, tiles, out, out_stride, n):
        """out [S, n] = x @ w of the slots' experts: panels of all experts that have rows, a thread its stretch."""
        y, scratch, panels, base = room[part * each:], tiles[part * SCRATCH:], (n + 15) // 16, 0
        total = _total(starts, experts) * panels
        begin, end = part * total // parts, (part + 1) * total // parts
        for e in range(experts):
            first, rows = starts[e], starts[e + 1] - starts[e]
            if rows == 0:
                continue
            cost = max(rows, FEW)
            stop = _until(end, base, cost, panels)
            for p in range(_until(begin, base, cost, panels), stop, 2 * PAIRS):
                beside = min(2 * PAIRS, stop - p)
                width, panel = 16 * beside, e * panels + p
                multiply(x[first * x_stride:], x_scales[first * (k // 32):], x_sums[first * (k // 16):], words, rows, k,
                         w[panel * stride:], w_scales[panel * scale_stride:], stride, phase, none, y, width, tail,
                         scratch, words)
                columns = min(width, n - 16 * p)
                for m in range(rows):
                    to = (first + m) * out_stride + 16 * p
                    for i in range(columns):
                        out[to + i] = y[m * width + i]
            base += cost * panels

    return down_part


@policy.helper
def _combine_part(part, parts, rows, n, count, slots, weights, y, added, beside, out):
    """out [T, n] = sum over a row's experts of weight * y, by ascending expert, those elsewhere left out.

    Zeros for a ``count`` of 0; then ``beside`` [T, n], if it is ``added``.
    """
    for m in range(part * rows // parts, (part + 1) * rows // parts):
        for i in range(n):
            out[m * n + i] = 0
        for j in range(m * count, (m + 1) * count):
            weight, start = weights[j], types.intp(slots[j]) * n
            if start >= 0:
                for i in range(n):
                    out[m * n + i] += weight * y[start + i]
        if added:
            for i in range(n):
                out[m * n + i] += beside[m * n + i]


_COMBINED = (INT, INT, INT, reads(types.int32), VECTOR, VECTOR, INT, VECTOR, F32_1)
_TAKEN = (INT, VECTOR, INT, reads(types.int32), reads(types.int64), INT)


@lru_cache(None)
def combine_operation() -> Operation:
    """The weighted sum of what a row's experts made of it."""
    return Operation(_combine_part, "moe_combine", _COMBINED)


def kind_of(name: str) -> str:
    """How slots are prepared for weights ``name``: numbers (as they are), codes, pairs or tiles."""
    kind = activation(name)
    if kind == "bf16":
        return "tiles" if select.tier() == "amx" else "pairs"
    return "numbers" if kind == "f32" else kind


@lru_cache(None)
def take_operation(kind: str) -> Operation:
    """Rows into slots (``gathered``), or slots in place, as products take them."""
    core, kept = {"numbers": (_take_numbers_part, (F32_1,)), "pairs": (_take_pairs_part, (types.uint16[::1],)),
                  "tiles": (_take_tiles_part, (types.uint16[::1],)),
                  "codes": (_take_codes_part, (types.int8[::1], F32_1, types.int32[::1]))}[kind]
    return Operation(core, f"moe_take_{kind}", (*_TAKEN, *kept))


def _kinds(name: str) -> tuple:
    w_scales = reads(types.int16) if name in quantised.SHAPES else VECTOR
    return (ACTIVATIONS[activation(name)], VECTOR, INTS, INT, reads(types.int64), INT, INT, reads(ELEMENTS[name]),
            w_scales, INT, INT, INT, VECTOR, types.uint16[::1], F32_1, INT, F32_1, types.uint8[::1], F32_1, INT, INT)


@lru_cache(None)
def gate_up_operation(name: str) -> Operation:
    """Gate and up with SiLU of the experts that have rows, of weights ``name``."""
    return Operation(_gate_up_core(product(name)), f"moe_gate_up_{name}_{select.key()}", _kinds(name))


@lru_cache(None)
def down_operation(name: str) -> Operation:
    """The down projection of the experts that have rows, of weights ``name``."""
    return Operation(_down_core(product(name)), f"moe_down_{name}_{select.key()}", _kinds(name))


def warm_up(names: list[str]) -> list[Any]:
    """What makes each kernel of experts whose weights have these formats."""
    kinds = {kind_of(name) for name in names}
    return [*(lambda name=name: gate_up_operation(name) for name in names),
            *(lambda name=name: down_operation(name) for name in names),
            *(lambda kind=kind: take_operation(kind) for kind in sorted(kinds)),
            routing.route_operation, routing.group_operation, combine_operation]
