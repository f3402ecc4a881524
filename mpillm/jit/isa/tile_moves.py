"""Moving what tile products of attention take: blocks turned, copied without what is not seen, packed from float32.

Layouts: jit/attention.py. Offsets are in elements.
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
from mpillm.jit.isa.avx512 import V16BF
from mpillm.jit.isa.vector import F32, I1, I8, I16, I32, I64, LANES, V16F, V16I

SCORES = 512 + 16       # floats from a query's scores to the next's: a power of two would share few sets of the cache
_V16B, _V16S = ir.VectorType(I1, LANES), ir.VectorType(I16, LANES)


@intrinsic
def address_of(typingctx, array, offset):
    """The address of an element."""
    def codegen(context, b, signature, arguments):
        array = v.data(context, b, signature.args[0], arguments[0])
        return b.ptrtoint(v.at(b, array, arguments[1], v.ELEMENT[v.FORMAT_OF[signature.args[0].dtype]]), I64)

    return types.int64(array, types.intp), codegen


@intrinsic
def fetch(typingctx, address, nbytes):
    """Ask for memory that is soon wanted."""
    def codegen(context, b, signature, arguments):
        start = b.inttoptr(arguments[0], v.PTR)
        with cgutils.for_range_slice(b, I64(0), arguments[1], I64(64), I64) as (line, _):
            v.prefetch(b, v.at(b, start, line, I8), 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.intp), codegen


def rounded(b: ir.IRBuilder, values: Any) -> Any:
    """16 floats, none of them subnormal, to the 16 bits of bf16."""
    if select.emulated():
        return v.rounded_to_bf16(b, values)
    return b.bitcast(v.call(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", V16BF, [values]), _V16S)


def _turned(b: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """A matrix of 16 x 16 words turned: single words, pairs, then quarters of the vectors change places."""
    def mix(vectors: list[Any], apart: int, order: Callable[[int], list[int]]) -> list[Any]:
        picks = [ir.Constant(ir.VectorType(I32, LANES), order(upper)) for upper in (0, 1)]
        mixed = list(vectors)
        for i in range(LANES):
            if not i & apart:
                for upper in (0, 1):
                    mixed[i | upper * apart] = b.shuffle_vector(vectors[i], vectors[i | apart], picks[upper])
        return mixed

    for apart in (1, 2, 4, 8):
        def order(upper, apart=apart):
            return [(lane & ~apart) | upper * apart | (LANES if lane & apart else 0) for lane in range(LANES)]

        rows = mix(rows, apart, order)
    return rows


@intrinsic
def turn_probabilities(typingctx, scores, offset, p, to, odd):
    """A block of 16 queries x 16 positions to tiles [16 positions][16 queries][2] at p[to:] and p[to + odd:].

    ``scores`` float32 with rows ``SCORES`` apart, rounded to bf16: the first tile has them as the even of two, the
    second as the odd.
    """
    def codegen(context, b, signature, arguments):
        scores, offset, p, to, odd = arguments
        scores, p = v.data(context, b, signature.args[0], scores), v.data(context, b, signature.args[2], p)
        rows = [v.load(b, V16I, v.at(b, scores, b.add(offset, I64(SCORES * i)), F32), 4) for i in range(LANES)]
        for position, words in enumerate(_turned(b, rows)):
            at = b.add(to, I64(2 * LANES * position))
            v.store(b, b.lshr(words, v.constant(V16I, 16)), v.at(b, p, at, I16), 2)
            v.store(b, words, v.at(b, p, b.add(at, odd), I16), 2)
        return context.get_dummy_value()

    i = types.intp
    return types.void(scores, i, p, i, i), codegen


@intrinsic
def turn_sums(typingctx, x, start, y, to, stride):
    """y[to + stride * j + i] = x[start + 16 * i + j] for 16 x 16 float32."""
    def codegen(context, b, signature, arguments):
        x, start, y, to, stride = arguments
        x, y = v.data(context, b, signature.args[0], x), v.data(context, b, signature.args[2], y)
        rows = [v.load(b, V16F, v.at(b, x, b.add(start, I64(LANES * i)), F32), 4) for i in range(LANES)]
        for j, values in enumerate(_turned(b, rows)):
            v.store(b, values, v.at(b, y, b.add(to, b.mul(stride, I64(j))), F32), 4)
        return context.get_dummy_value()

    i = types.intp
    return types.void(x, i, y, i, i), codegen


def _numbers_only(b: ir.IRBuilder, words: Any, keep: list[Any]) -> tuple[Any, list[Any]]:
    """(words whose halves are 0 where they are NaN or not kept, which halves were kept and NaN)."""
    found, masks = [], []
    for half in (0, 1):
        bits = b.and_(b.lshr(words, v.constant(V16I, 16 * half)), v.constant(V16I, 0x7FFF))
        number = b.icmp_unsigned("<=", bits, v.constant(V16I, 0x7F80))
        found.append(b.and_(keep[half], b.not_(number)))
        inside = b.and_(keep[half], number)
        masks.append(b.select(inside, v.constant(V16I, 0xFFFF << 16 * half), v.constant(V16I, 0)))
    return b.and_(words, b.or_(*masks)), found


@intrinsic
def copy_values(typingctx, values, start, panels, low, high, out, to):
    """A block's values [panels][32][16][2], 0 outside positions low ... high - 1; the NaN among these 0 too.

    Its second half is left out where ``high`` is not beyond 32.

    Returns the positions of those, a bit each.
    """
    def codegen(context, b, signature, arguments):
        values, start, columns, low, high, out, to = arguments
        panels = b.sdiv(b.add(columns, I64(LANES - 1)), I64(LANES))
        values, out = v.data(context, b, signature.args[0], values), v.data(context, b, signature.args[5], out)
        bad = cgutils.alloca_once_value(b, I64(0))
        rows = b.select(b.icmp_signed(">", high, I64(32)), I64(32), I64(16))
        with cgutils.for_range(b, rows) as loop:
            positions = [b.add(b.mul(loop.index, I64(2)), I64(half)) for half in (0, 1)]
            keep = []
            for position in positions:
                inside = b.and_(b.icmp_signed(">=", position, low), b.icmp_signed("<", position, high))
                keep.append(v.splat(b, inside, _V16B))
            with cgutils.for_range(b, panels) as panel:
                at = b.add(b.mul(panel.index, I64(1024)), b.mul(loop.index, I64(32)))
                words = v.load(b, V16I, v.at(b, values, b.add(start, at), I16), 2)
                kept, found = _numbers_only(b, words, keep)
                v.store(b, kept, v.at(b, out, b.add(to, at), I16), 2)
                left = b.trunc(b.sub(columns, b.mul(panel.index, I64(LANES))), I32)
                filled = b.icmp_signed("<", v.lane_numbers(), v.splat(b, left, V16I))
                for position, lanes in zip(positions, found, strict=True):
                    some = b.zext(b.icmp_unsigned("!=", b.bitcast(b.and_(lanes, filled), I16), I16(0)), I64)
                    b.store(b.or_(b.load(bad, typ=I64), b.shl(some, position)), bad)
        return b.load(bad, typ=I64)

    i = types.intp
    return types.int64(values, i, i, i, i, out, i), codegen


@intrinsic
def copy_keys(typingctx, keys, start, size, low, high, out, to):
    """A block's keys [4][size / 2][16][2], 0 outside positions low ... high - 1 and where they are NaN."""
    def codegen(context, b, signature, arguments):
        keys, start, size, low, high, out, to = arguments
        keys, out = v.data(context, b, signature.args[0], keys), v.data(context, b, signature.args[5], out)
        low, high = (v.splat(b, b.trunc(bound, I32), V16I) for bound in (low, high))
        with cgutils.for_range(b, I64(4)) as panel:
            lanes = b.add(v.lane_numbers(), v.splat(b, b.trunc(b.mul(panel.index, I64(LANES)), I32), V16I))
            keep = [b.and_(b.icmp_signed(">=", lanes, low), b.icmp_signed("<", lanes, high))] * 2
            base = b.mul(b.mul(panel.index, size), I64(LANES))
            with cgutils.for_range_slice(b, I64(0), b.mul(size, I64(LANES)), I64(2 * LANES), I64) as (row, _):
                at = b.add(base, row)
                words = v.load(b, V16I, v.at(b, keys, b.add(start, at), I16), 2)
                v.store(b, _numbers_only(b, words, keep)[0], v.at(b, out, b.add(to, at), I16), 2)
        return context.get_dummy_value()

    i = types.intp
    return types.void(keys, i, i, i, i, out, i), codegen


@intrinsic
def pack_keys(typingctx, x, start, stride, n, count, keys, to):
    """Columns x[start + i * stride:][:n] of ``count`` positions, at most 16, to a panel bf16 [n / 2][16][2].

    ``n`` is a multiple of 32. Positions beyond repeat the last.
    """
    def codegen(context, b, signature, arguments):
        x, start, stride, n, count, keys, to = arguments
        x, keys = v.data(context, b, signature.args[0], x), v.data(context, b, signature.args[5], keys)
        last = b.sub(count, I64(1))
        own = [b.select(b.icmp_signed("<", I64(i), count), I64(i), last) for i in range(LANES)]
        starts = [b.add(start, b.mul(i, stride)) for i in own]
        with cgutils.for_range_slice(b, I64(0), n, I64(2 * LANES), I64) as (column, _):
            rows = []
            for at in starts:
                halves = [rounded(b, v.load(b, V16F, v.at(b, x, b.add(b.add(at, column), I64(i)), F32), 4))
                          for i in (0, LANES)]
                both = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES)))
                rows.append(b.bitcast(b.shuffle_vector(*halves, both), V16I))
            for pair, words in enumerate(_turned(b, rows)):
                at = b.add(to, b.add(b.mul(column, I64(LANES)), I64(2 * LANES * pair)))
                v.store(b, words, v.at(b, keys, at, I16), 2)
        return context.get_dummy_value()

    i = types.intp
    return types.void(x, i, i, i, i, keys, i), codegen


@intrinsic
def pack_values(typingctx, x, even, odd, n, values, to):
    """Columns x[even:even + n] and x[odd:odd + n] of two positions to a row of a block's values [n / 16][32][16][2].

    ``n`` is a multiple of 16.
    """
    def codegen(context, b, signature, arguments):
        x, even, odd, n, values, to = arguments
        x, values = v.data(context, b, signature.args[0], x), v.data(context, b, signature.args[4], values)
        with cgutils.for_range_slice(b, I64(0), n, I64(LANES), I64) as (column, _):
            low, high = (b.zext(rounded(b, v.load(b, V16F, v.at(b, x, b.add(at, column), F32), 4)), V16I)
                         for at in (even, odd))
            words = b.or_(low, b.shl(high, v.constant(V16I, 16)))
            v.store(b, words, v.at(b, values, b.add(to, b.mul(column, I64(64))), I16), 2)
        return context.get_dummy_value()

    i = types.intp
    return types.void(x, i, i, i, values, i), codegen
