"""Building blocks on rows of float32: sums, exponentials, softmax, comparisons, 16 lanes at a time.

Portable like generic.py; sums go over 16 lanes in one order. Offsets are in elements.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpillm.jit.isa import vector as v
from mpillm.jit.isa.vector import F32, I16, I32, I64, LANES, V16D, V16F, V16I


@intrinsic
def sum_squares(typingctx, x, offset, n):
    """Sum of n squares: 16 sums of every sixteenth element, then a tree over them."""
    def codegen(context, b, signature, arguments):
        x = v.data(context, b, signature.args[0], arguments[0])
        total = cgutils.alloca_once_value(b, v.constant(V16F, 0.0))

        def body(i, load, _):
            values = load(v.at(b, x, b.add(arguments[1], i), F32), 0.0)
            b.store(v.fma(b, values, values, b.load(total, typ=V16F)), total)

        v.for_lanes(b, arguments[2], body)
        return v.tree(b, b.load(total, typ=V16F), b.fadd)

    return types.float32(x, types.intp, types.intp), codegen


@intrinsic
def scale_row(typingctx, x, start, scale, weight, y, to, n):
    """y[to:to + n] = x[start:start + n] * scale * weight; y may be x itself."""
    def codegen(context, b, signature, arguments):
        x, start, scale, weight, y, to, n = arguments
        x, weight, y = (v.data(context, b, signature.args[i], arguments[i]) for i in (0, 3, 4))
        wide = v.splat(b, scale, V16F)

        def body(i, load, store):
            scaled = b.fmul(load(v.at(b, x, b.add(start, i), F32), 0.0), wide)
            store(b.fmul(scaled, load(v.at(b, weight, i, F32), 0.0)), v.at(b, y, b.add(to, i), F32))

        v.for_lanes(b, n, body)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.float32, weight, y, types.intp, types.intp), codegen


@intrinsic
def add_row(typingctx, x, start, y, other, n):
    """x[start:start + n] += y[other:other + n]."""
    def codegen(context, b, signature, arguments):
        x, start, y, other, n = arguments
        x, y = v.data(context, b, signature.args[0], x), v.data(context, b, signature.args[2], y)

        def body(i, load, store):
            to = v.at(b, x, b.add(start, i), F32)
            store(b.fadd(load(to, 0.0), load(v.at(b, y, b.add(other, i), F32), 0.0)), to)

        v.for_lanes(b, n, body)
        return context.get_dummy_value()

    return types.void(x, types.intp, y, types.intp, types.intp), codegen


@intrinsic
def exponential_of(typingctx, value):
    """The exponential of one float, with the bits of :func:`exponential_rows`."""
    def codegen(context, b, signature, arguments):
        return b.extract_element(v.exponential(b, v.splat(b, arguments[0], V16F)), I32(0))

    return types.float32(types.float32), codegen


@intrinsic
def silu_mul_row(typingctx, x, gate, up, y, offset, n):
    """y[offset:offset + n] = silu(x[gate:gate + n]) * x[up:up + n]."""
    def codegen(context, b, signature, arguments):
        x, gate, up, y, offset, n = arguments
        x, y = v.data(context, b, signature.args[0], x), v.data(context, b, signature.args[3], y)
        one = v.constant(V16F, 1.0)

        def body(i, load, store):
            g, u = (load(v.at(b, x, b.add(start, i), F32), 0.0) for start in (gate, up))
            sigmoid = b.fdiv(one, b.fadd(one, v.exponential(b, b.fneg(g))))
            store(b.fmul(b.fmul(g, sigmoid), u), v.at(b, y, b.add(offset, i), F32))

        v.for_lanes(b, n, body)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, y, types.intp, types.intp), codegen


@intrinsic
def softmax_step(typingctx, scores, offset, first, stop, before):
    """One step of an online softmax over a block of 64 scores, in place.

    Positions outside first ... stop - 1 get probability 0, whatever stands there.
    Returns (maximum so far, factor for what was summed before, sum of the block).
    """
    def codegen(context, b, signature, arguments):
        scores, offset, first, stop, before = arguments
        scores = v.data(context, b, signature.args[0], scores)
        nothing = F32(float("-inf"))
        parts, addresses = [], []
        for i in range(0, 64, LANES):
            addresses.append(v.at(b, scores, b.add(offset, I64(i)), F32))
            lanes = b.add(v.lane_numbers(), v.constant(V16I, i))
            low, high = (v.splat(b, b.trunc(bound, I32), V16I) for bound in (first, stop))
            inside = b.and_(b.icmp_signed(">=", lanes, low), b.icmp_signed("<", lanes, high))
            parts.append(b.select(inside, v.load(b, V16F, addresses[-1], 4), v.splat(b, nothing, V16F)))
        larger = v.larger(b)
        highest = v.tree(b, larger(larger(parts[0], parts[1]), larger(parts[2], parts[3])), larger)
        now = larger(before, highest)
        # All scores -inf: subtract 0, or the difference would be NaN.
        base = b.select(b.fcmp_ordered("==", now, nothing), F32(0.0), now)
        wide = v.splat(b, base, V16F)
        powers = [v.exponential(b, b.fsub(part, wide)) for part in parts]
        for power, address in zip(powers, addresses, strict=True):
            v.store(b, power, address, 4)
        total = v.tree(b, b.fadd(b.fadd(powers[0], powers[1]), b.fadd(powers[2], powers[3])), b.fadd)
        factor = v.exponential(b, v.splat(b, b.fsub(before, base), V16F))
        factor = b.extract_element(factor, I32(0))
        return context.make_tuple(b, signature.return_type, [now, factor, total])

    result = types.UniTuple(types.float32, 3)
    return result(scores, types.intp, types.intp, types.intp, types.float32), codegen


@intrinsic
def row_maximum(typingctx, x, offset, n):
    """The largest of n values, -inf for none; NaN values are passed over."""
    def codegen(context, b, signature, arguments):
        x = v.data(context, b, signature.args[0], arguments[0])
        most = cgutils.alloca_once_value(b, v.constant(V16F, float("-inf")))

        def body(i, load, _):
            values = load(v.at(b, x, b.add(arguments[1], i), F32), float("-inf"))
            b.store(v.larger(b)(b.load(most, typ=V16F), values), most)

        v.for_lanes(b, arguments[2], body)
        return v.tree(b, b.load(most, typ=V16F), v.larger(b))

    return types.float32(x, types.intp, types.intp), codegen


@intrinsic
def sum_exponentials(typingctx, x, offset, n, base):
    """Sum of exp(x - base) over n values in float64: 16 sums of every sixteenth, then a tree."""
    def codegen(context, b, signature, arguments):
        x = v.data(context, b, signature.args[0], arguments[0])
        wide = v.splat(b, arguments[3], V16F)
        total = cgutils.alloca_once_value(b, v.constant(V16D, 0.0))

        def body(i, load, _):
            values = load(v.at(b, x, b.add(arguments[1], i), F32), float("-inf"))
            power = v.exponential(b, b.fsub(values, wide))
            b.store(b.fadd(b.load(total, typ=V16D), b.fpext(power, V16D)), total)

        v.for_lanes(b, arguments[2], body)
        return v.tree(b, b.load(total, typ=V16D), b.fadd)

    return types.float64(x, types.intp, types.intp, types.float32), codegen


@intrinsic
def times_row(typingctx, x, start, factor, y, to, n):
    """y[to:to + n] = x[start:start + n] * factor."""
    return _by_one_number(lambda b: b.fmul, x, y)


@intrinsic
def divide_row(typingctx, x, start, divisor, y, to, n):
    """y[to:to + n] = x[start:start + n] / divisor."""
    return _by_one_number(lambda b: b.fdiv, x, y)


@intrinsic
def pair_columns(typingctx, x, start, y, to, n):
    """y[to:to + n] = x[start:start + n] with the halves of each 32 in turn; ``n`` is a multiple of 32."""
    def codegen(context, b, signature, arguments):
        x, start, y, to, n = arguments
        x, y = v.data(context, b, signature.args[0], x), v.data(context, b, signature.args[2], y)
        with cgutils.for_range_slice(b, I64(0), n, I64(2 * LANES), I64) as (at, _):
            halves = [v.load(b, V16F, v.at(b, x, b.add(b.add(start, at), I64(i)), F32), 4) for i in (0, LANES)]
            for half in range(2):
                turns = [LANES * odd + LANES // 2 * half + i for i in range(LANES // 2) for odd in range(2)]
                both = b.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, LANES), turns))
                v.store(b, both, v.at(b, y, b.add(b.add(to, at), I64(LANES * half)), F32), 4)
        return context.get_dummy_value()

    i = types.intp
    return types.void(x, i, y, i, i), codegen


def _by_one_number(operation, x, y):
    """What an intrinsic on (x, start, number, y, to, n) returns."""
    def codegen(context, b, signature, arguments):
        x, start, number, y, to, n = arguments
        x, y = v.data(context, b, signature.args[0], x), v.data(context, b, signature.args[3], y)
        wide = v.splat(b, number, V16F)

        def body(i, load, store):
            values = load(v.at(b, x, b.add(start, i), F32), 0.0)
            store(operation(b)(values, wide), v.at(b, y, b.add(to, i), F32))

        v.for_lanes(b, n, body)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.float32, y, types.intp, types.intp), codegen


@intrinsic
def rotate_pairs(typingctx, x, start, cos, sin, angle, half, y, to):
    """Rotate the pairs (i, i + half) of x[start:] by the angles from ``angle`` on, into y[to:], which may be x."""
    def codegen(context, b, signature, arguments):
        x, start, cos, sin, angle, half, y, to = arguments
        x, cos, sin, y = (v.data(context, b, signature.args[i], array)
                          for i, array in ((0, x), (2, cos), (3, sin), (6, y)))

        def body(i, load, store):
            left, right = (load(v.at(b, x, b.add(place, i), F32), 0.0) for place in (start, b.add(start, half)))
            c, s = (load(v.at(b, table, b.add(angle, i), F32), 0.0) for table in (cos, sin))
            store(b.fsub(b.fmul(left, c), b.fmul(right, s)), v.at(b, y, b.add(to, i), F32))
            store(b.fadd(b.fmul(right, c), b.fmul(left, s)), v.at(b, y, b.add(b.add(to, half), i), F32))

        v.for_lanes(b, half, body)
        return context.get_dummy_value()

    i = types.intp
    return types.void(x, i, cos, sin, i, i, y, i), codegen


@intrinsic
def all_below(typingctx, x, start, n, limit):
    """Whether the sizes of x[start:start + n] are below ``limit``; those of NaN are not."""
    def codegen(context, b, signature, arguments):
        x, start, n, limit = arguments
        x, wide = v.data(context, b, signature.args[0], x), v.splat(b, limit, V16F)
        beyond = cgutils.alloca_once_value(b, v.constant(ir.VectorType(v.I1, LANES), 0))

        def body(i, load, _):
            size = v.call(b, "llvm.fabs.v16f32", V16F, [load(v.at(b, x, b.add(start, i), F32), 0.0)])
            found = b.not_(b.fcmp_ordered("<", size, wide))
            b.store(b.or_(b.load(beyond, typ=found.type), found), beyond)

        v.for_lanes(b, n, body)
        found = b.bitcast(b.load(beyond, typ=ir.VectorType(v.I1, LANES)), I16)
        return b.icmp_unsigned("==", found, I16(0))

    return types.boolean(x, types.intp, types.intp, types.float32), codegen


@intrinsic
def any_above(typingctx, x, offset, bound):
    """Whether one of 64 values is above ``bound``."""
    def codegen(context, b, signature, arguments):
        x = v.data(context, b, signature.args[0], arguments[0])
        wide = v.splat(b, arguments[2], V16F)
        found = None
        for i in range(0, 64, LANES):
            values = v.load(b, V16F, v.at(b, x, b.add(arguments[1], I64(i)), F32), 4)
            above = b.fcmp_ordered(">", values, wide)
            found = above if found is None else b.or_(found, above)
        return b.icmp_unsigned("!=", b.bitcast(found, I16), I16(0))

    return types.boolean(x, types.intp, types.float32), codegen


@intrinsic
def bits_of(typingctx, value):
    """The 64 bits of a float64."""
    def codegen(context, b, signature, arguments):
        return b.bitcast(arguments[0], I64)

    return types.int64(types.float64), codegen


@intrinsic
def exponential_rows(typingctx, x, y, n):
    """y = exp(x) for n values: the exponential of softmax and SiLU by itself."""
    def codegen(context, b, signature, arguments):
        x, y = (v.data(context, b, signature.args[i], arguments[i]) for i in (0, 1))

        def body(i, load, store):
            store(v.exponential(b, load(v.at(b, x, i, F32), 0.0)), v.at(b, y, i, F32))

        v.for_lanes(b, arguments[2], body)
        return context.get_dummy_value()

    return types.void(x, y, types.intp), codegen
