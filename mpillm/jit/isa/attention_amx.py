"""Building blocks of attention in tier amx: softmax of a stretch of scores to bf16, and tile products with values.

A stretch has 512 positions. A score's e to its
power is taken apart into r * 2**n, and the probability is r * 2**(n - most) in bf16, where most is the n of the largest
score: so how it is rounded does not depend on what scores are beside it. Their sum is that of the rounded ones: 16 sums
of every sixteenth position in order, then a tree. Values come in one of two forms (layouts: jit/attention.py):

  their own       tiles of 32 positions x 16 columns; probabilities stand in tiles of queries x 32 positions
  columns of keys tiles of 16 pairs of columns x 16 positions, the keys' own. Probabilities stand in tiles of 16
                  positions x 16 queries twice, once with zeros beside them for the even column of each pair and once
                  for the odd one: the sums come out turned, [pair][query], and no value is moved.

Source of the instructions: see isa/amx.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpillm.jit.isa import select
from mpillm.jit.isa import vector as v
from mpillm.jit.isa.amx import PANELS, ROWS, SUM, TILE, shapes_function, tiles
from mpillm.jit.isa.tile_moves import rounded
from mpillm.jit.isa.vector import F32, I8, I16, I32, I64, LANES, V16F, V16I

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453


@intrinsic
def two_to(typingctx, n):
    """2 to the power of a whole number n <= 0, 0 below the normal numbers and of -inf."""
    def codegen(context, b, signature, arguments):
        n = arguments[0]
        small = b.fcmp_ordered("<", n, F32(-126.0))
        whole = b.fptosi(b.select(b.or_(small, b.fcmp_unordered("uno", n, n)), F32(0.0), n), I32)
        power = b.bitcast(b.shl(b.add(whole, I32(127)), I32(23)), F32)
        return b.select(small, F32(0.0), b.fmul(power, b.fadd(F32(1.0), b.fsub(n, n))))

    return types.float32(types.float32), codegen


@intrinsic
def soften_to_tiles(typingctx, scores, offset, low, high, first, stop, p, at, half_step):
    """Softmax of a row's scores in the blocks of 64 low ... high - 1, to bf16.

    Those of a block's halves begin at p[at + (2 * block + half) * half_step:]. Positions outside first ... stop - 1
    get 0, whatever stands there. Returns (most, -inf if there is no score, sum of the probabilities).
    """
    def codegen(context, b, signature, arguments):
        scores, offset, low, high, first, stop, p, at, half_step = arguments
        p = v.data(context, b, signature.args[6], p)

        def write(block, part, halves, _):
            half = b.add(b.mul(block, I64(2)), I64(part // 2))
            to = b.add(b.add(at, b.mul(half, half_step)), I64(part % 2 * LANES))
            v.store(b, halves, v.at(b, p, to, I16), 2)

        row = v.at(b, v.data(context, b, signature.args[0], scores), offset, F32)
        result = _soften(b, row, low, high, first, stop, write)
        return context.make_tuple(b, signature.return_type, result)

    i = types.intp
    return types.UniTuple(types.float32, 2)(scores, i, i, i, i, i, p, i, i), codegen


@intrinsic
def soften_in_place(typingctx, scores, offset, low, high, first, stop):
    """The same, to float32 in the scores' place."""
    def codegen(context, b, signature, arguments):
        scores, offset, low, high, first, stop = arguments
        row = v.at(b, v.data(context, b, signature.args[0], scores), offset, F32)

        def write(block, part, _, numbers):
            v.store(b, numbers, v.at(b, row, b.add(b.mul(block, I64(64)), I64(part * LANES)), F32), 4)

        result = _soften(b, row, low, high, first, stop, write)
        return context.make_tuple(b, signature.return_type, result)

    i = types.intp
    return types.UniTuple(types.float32, 2)(scores, i, i, i, i, i), codegen


def _soften(b: ir.IRBuilder, row: Any, low: Any, high: Any, first: Any, stop: Any, write: Callable) -> list:
    nothing, larger = v.constant(V16F, float("-inf")), v.larger(b)
    low_lane, high_lane = (v.splat(b, b.trunc(bound, I32), V16I) for bound in (first, stop))

    def parts(block, masked):
        """The block's scores, -inf where they do not count."""
        base = b.add(v.splat(b, b.trunc(b.mul(block, I64(64)), I32), V16I), v.lane_numbers())
        for part in range(4):
            at = v.at(b, row, b.add(b.mul(block, I64(64)), I64(part * LANES)), F32)
            values = v.load(b, V16F, at, 4)
            if masked:
                lanes = b.add(base, v.constant(V16I, part * LANES))
                inside = b.and_(b.icmp_signed(">=", lanes, low_lane), b.icmp_signed("<", lanes, high_lane))
                values = b.select(inside, values, nothing)
            yield values

    def each_block(body):
        """``body(block, its parts)``, which are masked only where the row does not see all of it."""
        with cgutils.for_range_slice(b, low, high, I64(1), I64) as (block, _):
            start = b.mul(block, I64(64))
            whole = b.and_(b.icmp_signed("<=", first, start), b.icmp_signed(">=", stop, b.add(start, I64(64))))
            with b.if_else(whole, likely=True) as (usual, at_an_end):
                with usual:
                    body(block, parts(block, False))
                with at_an_end:
                    body(block, parts(block, True))

    most = [cgutils.alloca_once_value(b, nothing) for _ in range(4)]

    def raise_most(_, values):
        for highest, part in zip(most, values, strict=True):
            b.store(larger(b.load(highest, typ=V16F), part), highest)

    each_block(raise_most)
    seen = [b.load(highest, typ=V16F) for highest in most]
    top = v.tree(b, larger(larger(seen[0], seen[1]), larger(seen[2], seen[3])), larger)
    k, most_power = _power_of(b, top)
    total = cgutils.alloca_once_value(b, v.constant(V16F, 0.0))
    taken, limit = (v.splat(b, number, V16F) for number in (k, b.fsub(most_power, F32(124.0))))
    exponent = v.splat(b, b.sub(I32(127), b.fptosi(most_power, I32)), V16I)

    def to_probabilities(block, values):
        for part, scores in enumerate(values):
            result, count, n = v.power_parts(b, v.fma(b, taken, v.constant(V16F, -LN_2), scores))
            scale = b.bitcast(b.shl(b.add(n, exponent), v.constant(V16I, 23)), V16F)
            # False for NaN, which stays.
            nothing = b.fcmp_ordered("<", count, limit)
            halves = rounded(b, b.select(nothing, v.constant(V16F, 0.0), b.fmul(result, scale)))
            numbers = b.bitcast(b.shl(b.zext(halves, V16I), v.constant(V16I, 16)), V16F)
            b.store(b.fadd(b.load(total, typ=V16F), numbers), total)
            write(block, part, halves, numbers)

    each_block(to_probabilities)
    return [b.select(b.fcmp_ordered("==", top, F32(float("-inf"))), top, b.fadd(k, most_power)),
            v.tree(b, b.load(total, typ=V16F), b.fadd)]


def _power_of(b: ir.IRBuilder, top: Any) -> tuple[Any, Any]:
    """(k, n) of the largest score: powers of 2 that are taken off all scores before they are taken apart, and its n.

    k is 0 but for scores so large that the rest could not tell their n.
    """
    huge = b.fcmp_ordered(">", v.call(b, "llvm.fabs.f32", F32, [top]), F32(65536.0))
    nothing = b.fcmp_ordered("==", top, F32(float("-inf")))
    k = v.call(b, "llvm.rint.f32", F32, [b.fmul(top, F32(LOG2_E))])
    k = b.select(b.and_(huge, b.not_(nothing)), k, F32(0.0))
    rest = v.splat(b, v.call(b, "llvm.fma.f32", F32, [k, F32(-LN_2), b.select(nothing, F32(0.0), top)]), V16F)
    return k, b.extract_element(v.power_parts(b, rest)[1], I32(0))


@intrinsic
def values_of_blocks(typingctx, size_0, size_1, panels, p, addresses, places, n, panel, y, to, y_stride, room,
                     offset):
    """y[size_0 + size_1, 16 * panels] = probabilities times values of n times 32 positions, in order.

    Of a block's values bf16 [columns / 16][32][16][2] half of the pairs begin at ``addresses[i]``, their probabilities
    [size_0 + size_1][32] at ``p[places[i]:]``. ``panel``: the first of 1 or 2. As tiles are configured.
    """
    def codegen(context, b, signature, arguments):
        size_0, size_1, panels, p, addresses, places, n, panel, y, to, y_stride, room, offset = arguments
        p, addresses, places, y, room = (v.data(context, b, signature.args[i], arguments[i]) for i in (3, 4, 5, 8, 11))
        two = b.zext(b.icmp_signed("!=", size_1, I64(0)), I64)
        shape = b.add(b.mul(two, I64(2)), b.sub(panels, I64(1)))
        kinds = [v.PTR, I64, I64, v.PTR, v.PTR, I64, I64, v.PTR, I64, v.PTR]
        shapes = [(r, q) for r in (1, 2) for q in (1, 2)]
        function = shapes_function(b.module, "mpillm_values_of_blocks_amx", kinds, shapes,
                                   lambda b, shape, *a: _emit_values(b, shape, select.emulated(), *a))
        b.call(function, [
            shape, b.bitcast(p, v.PTR), size_0, size_1, b.bitcast(addresses, v.PTR), b.bitcast(places, v.PTR), n,
            b.mul(panel, I64(2 * TILE)), b.bitcast(v.at(b, y, to, F32), v.PTR), b.mul(y_stride, I64(4)),
            b.bitcast(v.at(b, room, offset, I8), v.PTR)])
        return context.get_dummy_value()

    i = types.intp
    return types.void(i, i, i, p, addresses, places, i, i, y, i, i, room, i), codegen


def _emit_values(b: ir.IRBuilder, shape: tuple, emulate: bool, p: Any, size_0: Any, size_1: Any, addresses: Any,
                 places: Any, n: Any, panel_at: Any, y: Any, y_stride: Any, room: Any) -> None:
    row_tiles, panels = shape
    t = tiles(b, room, emulate)
    sums = [SUM + 2 * r + q for r in range(row_tiles) for q in range(panels)]
    for tile in sums:
        t.zero(tile)
    with cgutils.for_range(b, n) as loop:
        w = b.inttoptr(v.load(b, I64, v.at(b, addresses, loop.index, I64), 8), v.PTR)
        w = v.at(b, w, panel_at, I8)
        x = v.at(b, p, v.load(b, I64, v.at(b, places, loop.index, I64), 8), I16)
        left = {ROWS: x, ROWS + 1: v.at(b, x, b.mul(size_0, I64(64)), I8)}
        left |= {PANELS + q: v.at(b, w, I64(2 * TILE * q), I8) for q in range(panels)}
        for r in range(row_tiles):
            for q in range(panels):
                for tile in (PANELS + q, ROWS + r):
                    if tile in left:
                        t.load(tile, b.bitcast(left.pop(tile), v.PTR), I64(64))
                t.multiply("tdpbf16ps", SUM + 2 * r + q, ROWS + r, PANELS + q)
    for tile in sums:
        r, q = (tile - SUM) // 2, (tile - SUM) % 2
        at = b.add(b.mul(y_stride, I64(LANES * r)), I64(64 * q))
        t.store(tile, b.bitcast(v.at(b, y, at, I8), v.PTR), y_stride)


@intrinsic
def values_of_keys(typingctx, query_tiles, p, addresses, places, n, size, group, y, to, room, offset):
    """y[query tile][even, odd][16 pairs][16 queries] = columns of keys times probabilities of n blocks, in order.

    The columns are 32 ``group`` ... + 31. Block i has keys bf16 [4][size / 2][16][2] at ``addresses[i]`` and
    probabilities at ``p[places[i]:]``, [4][query tile][even, odd][16 positions][16 queries][2]. All tiles are
    configured whole.
    """
    def codegen(context, b, signature, arguments):
        query_tiles, p, addresses, places, n, size, group, y, to, room, offset = arguments
        p, addresses, places, y, room = (v.data(context, b, signature.args[i], arguments[i]) for i in (1, 2, 3, 7, 9))
        kinds = [v.PTR, v.PTR, v.PTR, I64, I64, I64, v.PTR, v.PTR]
        function = shapes_function(b.module, "mpillm_values_of_keys_amx", kinds, [1, 2],
                                   lambda b, shape, *a: _emit_keys(b, shape, select.emulated(), *a))
        b.call(function, [
            b.sub(query_tiles, I64(1)), b.bitcast(p, v.PTR), b.bitcast(addresses, v.PTR), b.bitcast(places, v.PTR), n,
            b.mul(size, I64(2 * LANES)), b.mul(group, I64(TILE)), b.bitcast(v.at(b, y, to, F32), v.PTR),
            b.bitcast(v.at(b, room, offset, I8), v.PTR)])
        return context.get_dummy_value()

    i = types.intp
    return types.void(i, p, addresses, places, i, i, i, y, i, room, i), codegen


def _emit_keys(b: ir.IRBuilder, query_tiles: int, emulate: bool, p: Any, addresses: Any, places: Any, n: Any,
               panel_bytes: Any, group_at: Any, y: Any, room: Any) -> None:
    t, sums = tiles(b, room, emulate), range(2 * query_tiles)
    for tile in sums:
        t.zero(SUM + tile)
    keys, others = ROWS, (ROWS + 1, PANELS, PANELS + 1)
    with cgutils.for_range(b, n) as loop:
        w = b.inttoptr(v.load(b, I64, v.at(b, addresses, loop.index, I64), 8), v.PTR)
        w = v.at(b, w, group_at, I8)
        x = v.at(b, p, v.load(b, I64, v.at(b, places, loop.index, I64), 8), I16)
        for panel in range(4):
            t.load(keys, b.bitcast(v.at(b, w, b.mul(panel_bytes, I64(panel)), I8), v.PTR), I64(64))
            for tile in sums:
                number = panel * len(sums) + tile
                other = others[number % 3]
                t.load(other, b.bitcast(v.at(b, x, I64(TILE * number), I8), v.PTR), I64(64))
                t.multiply("tdpbf16ps", SUM + tile, keys, other)
    for tile in sums:
        t.store(SUM + tile, b.bitcast(v.at(b, y, I64(TILE * tile), I8), v.PTR), I64(64))


