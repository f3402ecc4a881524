"""Building blocks of the generic tier: portable LLVM vector code, as numba intrinsics.

Whatever the number of rows and panels in a block, each output is one chain of additions along K,
ascending; so the bits of an output do not depend on how rows, panels and K were cut into blocks.
Offsets and strides are in elements of the array that they belong to.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpillm.jit.isa import vector as v
from mpillm.jit.isa.vector import F32, F64, HALF, I8, I16, I32, I64, LANES, V16D, V16F, V16H, V16I, V32S

QUANT_BLOCK = 32


@intrinsic
def flat(typingctx, array):
    """The elements of an array, from its first on, as one contiguous row without bounds."""
    result = types.Array(array.dtype, 1, "C")

    def codegen(context, b, signature, arguments):
        source = context.make_array(signature.args[0])(context, b, arguments[0])
        target = context.make_array(result)(context, b)
        size = context.get_constant(types.intp, array.dtype.bitwidth // 8)
        context.populate_array(target, data=source.data, shape=[I64(2**62)], strides=[size],
                               itemsize=size, meminfo=None)
        return target._getvalue()

    return result(array), codegen


#: rows of a register block -> panels beside each other in it. Five rows and one panel are ten sums in the 16
#: registers of AVX2: more than the latency of fma needs, with room for two bf16 vectors and their halves.
SHAPES = {1: 4, 2: 1, 3: 1, 4: 1, 5: 1}
MOST_ROWS = max(SHAPES)
#: bytes of weights asked for in advance: one panel's stream by itself does not fill the memory's bandwidth
AHEAD = 2048


@intrinsic
def rows_by_panels(typingctx, rows, panels, x, x_scales, x_offset, x_stride, w, w_scales, w_offset,
                   panel_stride, k_start, k_stop, y, y_offset, y_stride):
    """y[rows, 16 * panels] += x[rows, k_start:k_stop] @ packed panels; 1 to 5 rows, any panels.

    The format follows from w's element type:
      float32, int16 (f16)  w [k][16]             x f32
      uint16 (bf16)         w [k/2][16][2]        x f32; an odd k_start or k_stop uses half a pair only
      int8 (q8_0)           w [k/32][8][16][4], w_scales f16 [k/32][16];
                            x i16, each four as (x0, x2, x1, x3), x_scales f32 [k/32]
    x_offset is that of k = 0 in the first row, w_offset that of k = 0 in the first panel.
    """
    name = v.FORMAT_OF[w.dtype]

    def codegen(context, b, signature, arguments):
        values = [v.data(context, b, kind, value) if isinstance(kind, types.Array) else value
                  for kind, value in zip(signature.args, arguments, strict=True)]
        b.call(_rows_by_panels_function(b.module, name, [value.type for value in values]), values)
        return context.get_dummy_value()

    integer = types.intp
    return types.void(integer, integer, x, x_scales, integer, integer, w, w_scales, integer, integer,
                      integer, integer, y, integer, integer), codegen


def _rows_by_panels_function(module: ir.Module, name: str, kinds: list) -> ir.Function:
    """One function a module holds all shapes: it is compiled once, however often it is called."""
    symbol = f"mpillm_rows_by_panels_{name}"
    if symbol in module.globals:
        return module.globals[symbol]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), symbol)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    b = ir.IRBuilder(function.append_basic_block("entry"))
    rows, panels = function.args[:2]
    done = function.append_basic_block("done")
    choice = b.switch(rows, done)
    for count, widest in SHAPES.items():
        block = function.append_basic_block(f"rows{count}")
        choice.add_case(I64(count), block)
        b.position_at_end(block)
        wide = b.mul(b.sdiv(panels, I64(widest)), I64(widest))
        for start, stop, width in ((I64(0), wide, widest), (wide, panels, 1)):
            if width == widest or widest > 1:
                with cgutils.for_range_slice(b, start, stop, I64(width), I64) as (p, _):
                    _emit_block(b, name, count, width, p, function.args[2:])
        b.branch(done)
    b.position_at_end(done)
    b.ret_void()
    return function


def _emit_block(b: ir.IRBuilder, name: str, count_r: int, count_p: int, p: Any, arguments: Any) -> None:
    """One register block: panels p ... p + count_p - 1."""
    (x, x_scales, x_offset, x_stride, w, w_scales, w_offset, panel_stride, k_start, k_stop, y, y_offset,
     y_stride) = arguments
    x_starts = [b.add(x_offset, b.mul(x_stride, I64(r))) for r in range(count_r)]
    w_starts = [b.add(w_offset, b.mul(panel_stride, b.add(p, I64(i)))) for i in range(count_p)]
    y_start = b.add(y_offset, b.mul(p, I64(LANES)))
    y_at = [[v.at(b, y, b.add(b.add(y_start, b.mul(y_stride, I64(r))), I64(LANES * i)), F32)
             for i in range(count_p)] for r in range(count_r)]
    totals = [[cgutils.alloca_once_value(b, v.load(b, V16F, address, 4)) for address in row] for row in y_at]
    emit = {"q8_0": _emit_q8, "bf16": _emit_pairs}.get(name, _emit_plain)
    emit(b, name, (x, x_scales, x_starts), (w, w_scales, w_starts), k_start, k_stop, totals)
    for r in range(count_r):
        for i in range(count_p):
            v.store(b, b.load(totals[r][i], typ=V16F), y_at[r][i], 4)


def _accumulate(b: ir.IRBuilder, total: Any, scalar: Any, weights: Any) -> None:
    b.store(v.fma(b, v.splat(b, scalar, V16F), weights, b.load(total, typ=V16F)), total)


def _emit_plain(b, name, x, w, k_start, k_stop, totals) -> None:
    """f32 and f16: one vector of 16 weights per k."""
    element, align, kind = (F32, 4, V16F) if name == "f32" else (HALF, 2, V16H)
    x_rows = [v.at(b, x[0], start, F32) for start in x[2]]
    w_panels = [v.at(b, w[0], start, element) for start in w[2]]
    with cgutils.for_range_slice(b, k_start, k_stop, I64(1), I64) as (k, _):
        for p, panel in enumerate(w_panels):
            address = v.at(b, panel, b.mul(k, I64(LANES)), element)
            v.prefetch(b, address, AHEAD)
            weights = v.load(b, kind, address, align)
            weights = weights if name == "f32" else b.fpext(weights, V16F)
            for r, row in enumerate(x_rows):
                _accumulate(b, totals[r][p], v.load(b, F32, v.at(b, row, k, F32), 4), weights)


def _emit_pairs(b, name, x, w, k_start, k_stop, totals) -> None:
    """bf16: two weights of 16 columns in a vector of 16 words; halves at odd ends are never read as numbers."""
    x_rows = [v.at(b, x[0], start, F32) for start in x[2]]
    w_panels = [v.at(b, w[0], start, I16) for start in w[2]]

    def both(pair, halves):
        for p, panel in enumerate(w_panels):
            address = v.at(b, panel, b.mul(pair, I64(2 * LANES)), I16)
            v.prefetch(b, address, AHEAD)
            words = v.load(b, V16I, address, 2)
            for half in halves:
                bits = b.and_(words, v.constant(V16I, 0xFFFF0000)) if half else \
                    b.shl(words, v.constant(V16I, 16))
                weights = b.bitcast(bits, V16F)
                k = b.add(b.mul(pair, I64(2)), I64(half))
                for r, row in enumerate(x_rows):
                    _accumulate(b, totals[r][p], v.load(b, F32, v.at(b, row, k, F32), 4), weights)

    odd_start = b.and_(k_start, I64(1))
    nonempty = b.icmp_signed("<", k_start, k_stop)
    with b.if_then(b.and_(nonempty, b.trunc(odd_start, v.I1)), likely=False):
        both(b.ashr(k_start, I64(1)), (1,))
    first, last = b.ashr(b.add(k_start, odd_start), I64(1)), b.ashr(k_stop, I64(1))
    with cgutils.for_range_slice(b, first, last, I64(1), I64) as (pair, _):
        both(pair, (0, 1))
    odd_stop = b.trunc(b.and_(k_stop, I64(1)), v.I1)
    with b.if_then(b.and_(b.icmp_signed("<=", first, last), odd_stop), likely=False):
        both(last, (0,))


def _emit_q8(b, name, x, w, k_start, k_stop, totals) -> None:
    """q8_0: exact integer sums of 32 products, then one fma with the product of both scales."""
    blocks = [b.sdiv(k, I64(QUANT_BLOCK)) for k in (k_start, k_stop)]
    rows, bytewise = range(len(totals)), I64(LANES)
    eight, sixteen = v.constant(V32S, 8), v.constant(V16I, 16)
    with cgutils.for_range_slice(b, blocks[0], blocks[1], I64(1), I64) as (block, _):
        along = b.mul(block, I64(QUANT_BLOCK))
        for p, w_start in enumerate(w[2]):
            codes = b.add(w_start, b.mul(along, bytewise))
            sums = [cgutils.alloca_once(b, V16I) for _ in rows]
            for total in sums:
                b.store(v.constant(V16I, 0), total)
            with cgutils.for_range(b, I64(QUANT_BLOCK // 4)) as quad:
                address = v.at(b, w[0], b.add(codes, b.mul(quad.index, I64(64))), I8)
                v.prefetch(b, address, AHEAD)
                words = v.load(b, V32S, address, 1)
                even, odd = b.ashr(b.shl(words, eight), eight), b.ashr(words, eight)
                for r in rows:
                    four = b.add(b.add(x[2][r], along), b.mul(quad.index, I64(4)))
                    two = [v.load(b, I32, v.at(b, x[0], b.add(four, I64(i)), I16), 2) for i in (0, 2)]
                    left, right = (b.bitcast(v.splat(b, pair, V16I), V32S) for pair in two)
                    # At most 2 * 128 * 127: two products fit 16 bits; then widen to 32.
                    pairs = b.bitcast(b.add(b.mul(even, left), b.mul(odd, right)), V16I)
                    low = b.ashr(b.shl(pairs, sixteen), sixteen)
                    dot = b.add(low, b.ashr(pairs, sixteen))
                    b.store(b.add(b.load(sums[r], typ=V16I), dot), sums[r])
            scale_at = b.add(b.sdiv(w_start, I64(QUANT_BLOCK)), b.mul(block, I64(LANES)))
            w_scale = b.fpext(v.load(b, V16H, v.at(b, w[1], scale_at, HALF), 2), V16F)
            for r in rows:
                x_at = b.add(b.sdiv(x[2][r], I64(QUANT_BLOCK)), block)
                x_scale = v.splat(b, v.load(b, F32, v.at(b, x[1], x_at, F32), 4), V16F)
                whole = b.sitofp(b.load(sums[r], typ=V16I), V16F)
                total = b.load(totals[r][p], typ=V16F)
                b.store(v.fma(b, whole, b.fmul(w_scale, x_scale), total), totals[r][p])


@intrinsic
def quantise_row(typingctx, x, x_offset, k, codes, code_offset, scales, scale_offset):
    """q8_0 as ggml's reference: d = max|x| / 127 rounded to f16, q = round(x / d), halves away from 0.

    Codes are written as i16, each four as (q0, q2, q1, q3), scales as f32. A d beyond f16 stays as it
    is; a block with a value that is not finite gets a scale of NaN.
    """
    def codegen(context, b, signature, arguments):
        x, x_offset, k, codes, code_offset, scales, scale_offset = arguments
        x, codes, scales = (v.data(context, b, signature.args[i], arguments[i]) for i in (0, 3, 5))
        with cgutils.for_range(b, b.sdiv(k, I64(QUANT_BLOCK))) as loop:
            along = b.mul(loop.index, I64(QUANT_BLOCK))
            parts = [v.load(b, V16F, v.at(b, x, b.add(b.add(x_offset, along), I64(i)), F32), 4)
                     for i in (0, LANES)]
            sizes = [v.call(b, "llvm.fabs.v16f32", V16F, [part]) for part in parts]
            largest = v.tree(b, v.larger(b)(*sizes), v.larger(b))
            # 0 where all is finite, NaN otherwise.
            poison = v.tree(b, b.fadd(*(b.fsub(part, part) for part in parts)), b.fadd)
            d = b.fdiv(largest, F32(127.0))
            inverse = b.select(b.fcmp_ordered("==", d, F32(0.0)), F32(0.0), b.fdiv(F32(1.0), d))
            rounded = b.fpext(b.fptrunc(d, HALF), F32)
            rounded = b.select(b.fcmp_ordered("==", rounded, F32(float("inf"))), d, rounded)
            v.store(b, b.fadd(rounded, poison), v.at(b, scales, b.add(scale_offset, loop.index), F32), 4)
            for i, part in zip((0, LANES), parts, strict=True):
                q = v.call(b, "llvm.round.v16f32", V16F, [b.fmul(part, v.splat(b, inverse, V16F))])
                q = v.call(b, "llvm.fptosi.sat.v16i32.v16f32", V16I, [q])
                for sign, limit in ((">", 127), ("<", -127)):
                    bound = v.constant(V16I, limit)
                    q = b.select(b.icmp_signed(sign, q, bound), bound, q)
                order = [4 * (lane // 4) + (0, 2, 1, 3)[lane % 4] for lane in range(LANES)]
                q = b.shuffle_vector(q, ir.Constant(V16I, ir.Undefined), ir.Constant(V16I, order))
                target = v.at(b, codes, b.add(b.add(code_offset, along), I64(i)), I16)
                v.store(b, b.trunc(q, ir.VectorType(I16, LANES)), target, 2)
        return context.get_dummy_value()

    return types.void(x, types.intp, types.intp, codes, types.intp, scales, types.intp), codegen


@intrinsic
def load_number(typingctx, array, offset):
    """Element ``offset`` of an f32, f16 (int16) or bf16 (uint16) array as float32, exactly."""
    name = v.FORMAT_OF[array.dtype]

    def codegen(context, b, signature, arguments):
        address = v.at(b, v.data(context, b, signature.args[0], arguments[0]), arguments[1], v.ELEMENT[name])
        value = v.load(b, v.ELEMENT[name], address, 4 if name == "f32" else 2)
        if name == "bf16":
            return b.bitcast(b.shl(b.zext(value, I32), I32(16)), F32)
        return value if name == "f32" else b.fpext(value, F32)

    return types.float32(array, types.intp), codegen


@intrinsic
def store_number(typingctx, array, offset, value):
    """Round a float32 to nearest even into element ``offset`` of an f32, f16 (int16) or bf16 (uint16) array."""
    name = v.FORMAT_OF[array.dtype]

    def codegen(context, b, signature, arguments):
        array, offset, value = arguments
        address = v.at(b, v.data(context, b, signature.args[0], array), offset, v.ELEMENT[name])
        if name == "f16":
            value = b.fptrunc(value, HALF)
        elif name == "bf16":
            value = _round_to_bf16(b, value)
        v.store(b, value, address, 4 if name == "f32" else 2)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), codegen


def _round_to_bf16(b: ir.IRBuilder, value: Any) -> Any:
    bits = b.bitcast(value, I32)
    odd = b.and_(b.lshr(bits, I32(16)), I32(1))
    rounded = b.lshr(b.add(bits, b.add(odd, I32(0x7FFF))), I32(16))
    # Rounding may carry a NaN's payload into infinity: keep NaN as NaN.
    quiet = b.or_(b.lshr(bits, I32(16)), I32(0x40))
    return b.trunc(b.select(b.fcmp_unordered("uno", value, value), quiet, rounded), I16)


@intrinsic
def half_to_float(typingctx, array, offset):
    """Element ``offset`` of a float16 array (int16 words) as float32."""
    def codegen(context, b, signature, arguments):
        address = v.at(b, v.data(context, b, signature.args[0], arguments[0]), arguments[1], HALF)
        return b.fpext(v.load(b, HALF, address, 2), F32)

    return types.float32(array, types.intp), codegen


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

    return types.UniTuple(types.float32, 3)(scores, types.intp, types.intp, types.intp, types.float32), codegen


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
def exponential_rows(typingctx, x, y, n):
    """y = exp(x) for n values: the exponential of softmax and SiLU by itself."""
    def codegen(context, b, signature, arguments):
        x, y = (v.data(context, b, signature.args[i], arguments[i]) for i in (0, 1))

        def body(i, load, store):
            store(v.exponential(b, load(v.at(b, x, i, F32), 0.0)), v.at(b, y, i, F32))

        v.for_lanes(b, arguments[2], body)
        return context.get_dummy_value()

    return types.void(x, y, types.intp), codegen


__all__ = ["F64", "any_above", "exponential_rows", "flat", "half_to_float", "load_number", "quantise_row",
           "row_maximum", "rows_by_panels", "silu_mul_row", "softmax_step", "store_number", "sum_exponentials",
           "sum_squares"]
