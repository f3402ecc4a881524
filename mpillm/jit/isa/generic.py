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
from mpillm.jit.isa.vector import F32, HALF, I8, I16, I32, I64, LANES, V16F, V16H, V16I


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
      int8                  w [k][16]             x f32, weights as they are
      uint16 (bf16)         w [k/2][16][2]        x f32; an odd k_start or k_stop uses half a pair only
    (quantised formats: quantised.py). x_scales and w_scales are not used.
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
        stretches = [(I64(0), wide, widest), (wide, panels, 1)]
        for start, stop, width in stretches if widest > 1 else stretches[:1]:
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
    emit = _emit_pairs if name == "bf16" else _emit_plain
    emit(b, name, (x, x_scales, x_starts), (w, w_scales, w_starts), k_start, k_stop, totals)
    for r in range(count_r):
        for i in range(count_p):
            v.store(b, b.load(totals[r][i], typ=V16F), y_at[r][i], 4)


def _accumulate(b: ir.IRBuilder, total: Any, scalar: Any, weights: Any) -> None:
    b.store(v.fma(b, v.splat(b, scalar, V16F), weights, b.load(total, typ=V16F)), total)


def _emit_plain(b, name, x, w, k_start, k_stop, totals) -> None:
    """f32, f16 and s8: one vector of 16 weights per k."""
    element, align, kind = {"f32": (F32, 4, V16F), "f16": (HALF, 2, V16H),
                            "s8": (I8, 1, ir.VectorType(I8, LANES))}[name]
    x_rows = [v.at(b, x[0], start, F32) for start in x[2]]
    w_panels = [v.at(b, w[0], start, element) for start in w[2]]
    with cgutils.for_range_slice(b, k_start, k_stop, I64(1), I64) as (k, _):
        for p, panel in enumerate(w_panels):
            address = v.at(b, panel, b.mul(k, I64(LANES)), element)
            v.prefetch(b, address, AHEAD)
            weights = v.load(b, kind, address, align)
            weights = {"f32": lambda w, _: w, "f16": b.fpext, "s8": b.sitofp}[name](weights, V16F)
            for r, row in enumerate(x_rows):
                _accumulate(b, totals[r][p], v.load(b, F32, v.at(b, row, k, F32), 4), weights)


def _emit_pairs(b, name, x, w, k_start, k_stop, totals) -> None:
    """bf16: a vector of 16 words holds two k; at odd ends the other half is never read as a number."""
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
    """Round a float32 to nearest even into element ``offset`` of an f32, f16 or bf16 array."""
    name = v.FORMAT_OF[array.dtype]

    def codegen(context, b, signature, arguments):
        array, offset, value = arguments
        address = v.at(b, v.data(context, b, signature.args[0], array), offset, v.ELEMENT[name])
        if name == "f16":
            value = b.fptrunc(value, HALF)
        elif name == "bf16":
            value = v.rounded_to_bf16(b, value)
        v.store(b, value, address, 4 if name == "f32" else 2)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), codegen


@intrinsic
def pack_sixteen(typingctx, x, start, stride, k, w, to, limit):
    """Pack 16 rows x[start + row * stride:][:k] into one panel of an f32, f16 (int16) or bf16 (uint16) array.

    Returns (values not finite, finite values of size >= ``limit``).
    """
    name = v.FORMAT_OF[w.dtype]

    def codegen(context, b, signature, arguments):
        x, start, stride, k, w, to, limit = arguments
        x, w = (v.data(context, b, signature.args[i], arguments[i]) for i in (0, 4))
        rows = [v.at(b, x, b.add(start, b.mul(stride, I64(row))), F32) for row in range(LANES)]
        counts = [cgutils.alloca_once_value(b, v.constant(V16I, 0)) for _ in range(2)]
        infinite, bound = v.constant(V16F, float("inf")), v.splat(b, limit, V16F)

        def gather(i):
            values = ir.Constant(V16F, ir.Undefined)
            for lane, row in enumerate(rows):
                values = b.insert_element(values, v.load(b, F32, v.at(b, row, i, F32), 4), I32(lane))
            size = v.call(b, "llvm.fabs.v16f32", V16F, [values])
            finite = b.fcmp_ordered("<", size, infinite)
            beyond = b.and_(finite, b.fcmp_ordered(">=", size, bound))
            for count, found in zip(counts, (b.not_(finite), beyond), strict=True):
                b.store(b.add(b.load(count, typ=V16I), b.zext(found, V16I)), count)
            return values

        if name == "bf16":
            with cgutils.for_range(b, b.ashr(k, I64(1))) as loop:
                even = b.mul(loop.index, I64(2))
                low, high = (b.zext(v.rounded_to_bf16(b, gather(b.add(even, I64(i)))), V16I) for i in (0, 1))
                words = b.or_(low, b.shl(high, v.constant(V16I, 16)))
                v.store(b, words, v.at(b, w, b.add(to, b.mul(even, I64(LANES))), I16), 2)
            with b.if_then(b.trunc(k, v.I1)):
                last = b.sub(k, I64(1))
                words = b.zext(v.rounded_to_bf16(b, gather(last)), V16I)
                v.store(b, words, v.at(b, w, b.add(to, b.mul(last, I64(LANES))), I16), 2)
        else:
            with cgutils.for_range(b, k) as loop:
                values = gather(loop.index)
                values = values if name == "f32" else b.fptrunc(values, V16H)
                address = v.at(b, w, b.add(to, b.mul(loop.index, I64(LANES))), v.ELEMENT[name])
                v.store(b, values, address, 4 if name == "f32" else 2)
        sums = [b.sext(v.tree(b, b.load(count, typ=V16I), b.add), I64) for count in counts]
        return context.make_tuple(b, signature.return_type, sums)

    result = types.UniTuple(types.intp, 2)
    return result(x, types.intp, types.intp, types.intp, w, types.intp, types.float32), codegen


def _rounded(b: ir.IRBuilder, name: str, values: Any) -> Any:
    """16 floats as the elements of an f32, f16 or bf16 array."""
    if name == "f32":
        return values
    return b.fptrunc(values, V16H) if name == "f16" else v.rounded_to_bf16(b, values)


@intrinsic
def store_apart(typingctx, array, to, stride, distance, x, start, n):
    """Round n floats of x, a multiple of 16, into an f32, f16 or bf16 array, as store_number does.

    16 of them stand ``stride`` elements apart, the next 16 ``distance`` elements on.
    """
    name = v.FORMAT_OF[array.dtype]

    def codegen(context, b, signature, arguments):
        array, to, stride, distance, x, start, n = arguments
        array, x = v.data(context, b, signature.args[0], array), v.data(context, b, signature.args[4], x)
        with cgutils.for_range_slice(b, I64(0), n, I64(LANES), I64) as (i, _):
            values = _rounded(b, name, v.load(b, V16F, v.at(b, x, b.add(start, i), F32), 4))
            target = b.add(to, b.mul(b.lshr(i, I64(4)), distance))
            for lane in range(LANES):
                at = v.at(b, array, b.add(target, b.mul(stride, I64(lane))), v.ELEMENT[name])
                v.store(b, b.extract_element(values, I32(lane)), at, 2)
        return context.get_dummy_value()

    i = types.intp
    return types.void(array, i, i, i, x, i, i), codegen


@intrinsic
def store_pairs(typingctx, array, to, x, start, n):
    """Round n floats of x, a multiple of 16, into a bf16 array: pairs, 32 elements apart."""
    def codegen(context, b, signature, arguments):
        array, to, x, start, n = arguments
        array, x = v.data(context, b, signature.args[0], array), v.data(context, b, signature.args[2], x)
        with cgutils.for_range_slice(b, I64(0), n, I64(LANES), I64) as (i, _):
            values = v.rounded_to_bf16(b, v.load(b, V16F, v.at(b, x, b.add(start, i), F32), 4))
            words = b.bitcast(values, ir.VectorType(I32, LANES // 2))
            target = b.add(to, b.mul(i, I64(LANES)))
            for pair in range(LANES // 2):
                at = v.at(b, array, b.add(target, I64(2 * LANES * pair)), I16)
                v.store(b, b.extract_element(words, I32(pair)), at, 2)
        return context.get_dummy_value()

    i = types.intp
    return types.void(array, i, x, i, i), codegen


@intrinsic
def round_sixteen(typingctx, x, start, words, to):
    """words[to:to + 16] uint16 = x[start:start + 16] float32 in bf16, as store_number rounds."""
    def codegen(context, b, signature, arguments):
        x, words = (v.data(context, b, signature.args[i], arguments[i]) for i in (0, 2))
        values = v.load(b, V16F, v.at(b, x, arguments[1], F32), 4)
        v.store(b, v.rounded_to_bf16(b, values), v.at(b, words, arguments[3], I16), 2)
        return context.get_dummy_value()

    return types.void(x, types.intp, words, types.intp), codegen


@intrinsic
def copy_block(typingctx, x, start, y, to, y_stride, rows):
    """y[to + m * y_stride:][:32] = x[start + 32 * m:][:32] for m < rows, float32."""
    def codegen(context, b, signature, arguments):
        x, start, y, to, stride, rows = arguments
        x, y = (v.data(context, b, signature.args[i], array) for i, array in ((0, x), (2, y)))
        with cgutils.for_range(b, rows) as loop:
            for half in (0, LANES):
                source = v.at(b, x, b.add(start, b.add(b.mul(loop.index, I64(2 * LANES)), I64(half))), F32)
                target = v.at(b, y, b.add(to, b.add(b.mul(loop.index, stride), I64(half))), F32)
                v.store(b, v.load(b, V16F, source, 4), target, 4)
        return context.get_dummy_value()

    return types.void(x, types.intp, y, types.intp, types.intp, types.intp), codegen


@intrinsic
def half_to_float(typingctx, array, offset):
    """Element ``offset`` of a float16 array (int16 words) as float32."""
    def codegen(context, b, signature, arguments):
        address = v.at(b, v.data(context, b, signature.args[0], arguments[0]), arguments[1], HALF)
        return b.fpext(v.load(b, HALF, address, 2), F32)

    return types.float32(array, types.intp), codegen
