"""Small pieces of LLVM IR on vectors of 16 lanes, from which the intrinsics are put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

LANES = 16
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, F32, F64, PTR = ir.HalfType(), ir.FloatType(), ir.DoubleType(), ir.PointerType()
V16F, V16I, V16H, V16D = (ir.VectorType(kind, LANES) for kind in (F32, I32, HALF, F64))
V32S = ir.VectorType(I16, 2 * LANES)

#: numba's element type -> the number format that such an array holds (numba has no float16: words instead)
FORMAT_OF = {types.float32: "f32", types.uint16: "bf16", types.int16: "f16", types.int8: "s8"}
#: the type in memory of one element of a format
ELEMENT = {"f32": F32, "bf16": I16, "f16": HALF, "s8": I8}


def call(b: ir.IRBuilder, name: str, result: Any, arguments: list) -> Any:
    """Call an LLVM intrinsic or function by its name."""
    kind = ir.FunctionType(result, [value.type for value in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)


def fma(b: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
    return call(b, f"llvm.fma.v{x.type.count}f32", x.type, [x, y, z])


def constant(kind: ir.VectorType, value: float | int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def splat(b: ir.IRBuilder, scalar: Any, kind: ir.VectorType) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    lane0 = b.insert_element(undefined, scalar, I32(0))
    return b.shuffle_vector(lane0, undefined, constant(ir.VectorType(I32, kind.count), 0))


def at(b: ir.IRBuilder, base: Any, offset: Any, element: Any) -> Any:
    """The address of element ``offset`` after ``base``."""
    return b.gep(base, [offset], source_etype=element)


def load(b: ir.IRBuilder, kind: Any, address: Any, align: int) -> Any:
    """Load with the alignment of one element: arrays may start at any element."""
    instruction = b.load(address, typ=kind)
    instruction.align = align
    return instruction


def prefetch(b: ir.IRBuilder, address: Any, ahead: int, level: int = 1) -> None:
    """Ask for the cache line ``ahead`` bytes after ``address``, into the cache of this level; never faults."""
    line = at(b, b.bitcast(address, I8.as_pointer()), I64(ahead), I8)
    call(b, "llvm.prefetch.p0", ir.VoidType(), [line, I32(0), I32(4 - level), I32(1)])


def store(b: ir.IRBuilder, value: Any, address: Any, align: int) -> None:
    b.store(value, b.bitcast(address, value.type.as_pointer())).align = align


def data(context: Any, b: ir.IRBuilder, kind: Any, array: Any) -> Any:
    """The address of an array's first element."""
    return context.make_array(kind)(context, b, array).data


def tree(b: ir.IRBuilder, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Reduce 16 lanes to one in a fixed order: halves, quarters, ..."""
    width = vector.type.count
    while width > 1:
        width //= 2
        order = ir.Constant(ir.VectorType(I32, width), list(range(width)))
        upper = ir.Constant(ir.VectorType(I32, width), list(range(width, 2 * width)))
        undefined = ir.Constant(vector.type, ir.Undefined)
        low, high = b.shuffle_vector(vector, undefined, order), b.shuffle_vector(vector, undefined, upper)
        vector = combine(low, high)
    return b.extract_element(vector, I32(0))


def larger(b: ir.IRBuilder) -> Callable[[Any, Any], Any]:
    """Lane by lane maximum; a NaN on the right is passed over."""
    return lambda x, y: b.select(b.fcmp_ordered(">", y, x), y, x)


def lane_numbers() -> ir.Constant:
    return ir.Constant(V16I, list(range(LANES)))


def for_lanes(b: ir.IRBuilder, n: Any, body: Callable[[Any, Callable, Callable], None]) -> None:
    """Run ``body(offset, load, store)`` for 16 elements at a time, the rest under a mask.

    ``load(address, absent)`` gives ``absent`` in lanes beyond ``n``; ``store(value, address)`` leaves
    memory beyond ``n`` alone. Both work on float32.
    """
    full = b.and_(n, I64(-LANES))
    with cgutils.for_range_slice(b, I64(0), full, I64(LANES), I64) as (offset, _):
        body(offset, lambda address, absent: load(b, V16F, address, 4),
             lambda value, address: store(b, value, address, 4))
    rest = b.trunc(b.sub(n, full), I32)
    with b.if_then(b.icmp_signed(">", rest, I32(0))):
        mask = b.icmp_signed("<", lane_numbers(), splat(b, rest, V16I))
        body(full, lambda address, absent: call(b, "llvm.masked.load.v16f32.p0", V16F,
                                                [address, I32(4), mask, constant(V16F, absent)]),
             lambda value, address: call(b, "llvm.masked.store.v16f32.p0", ir.VoidType(),
                                         [value, address, I32(4), mask]))


def exponential(b: ir.IRBuilder, x: Any) -> Any:
    """e to the power of 16 floats, the same bits on every processor, at most 1 ulp off or so.

    -inf and whatever is below the smallest subnormal give 0, whatever is above 88.72 inf, NaN NaN.
    """
    low, high = constant(V16F, -104.0), constant(V16F, 89.0)
    # These comparisons are false for NaN, so that it stays. What gives 0 is not computed: processors are slow where a
    # product falls below the normal numbers, and every masked score would be one.
    nothing = b.fcmp_ordered("<", x, low)
    x = b.select(nothing, constant(V16F, 0.0), x)
    x = b.select(b.fcmp_ordered(">", x, high), high, x)
    result, _, n = power_parts(b, x)
    # Scale by 2**n in two steps, so that subnormal results and n = 128 come out.
    first = b.ashr(n, constant(V16I, 1))
    for power in (first, b.sub(n, first)):
        scale = b.shl(b.add(power, constant(V16I, 127)), constant(V16I, 23))
        result = b.fmul(result, b.bitcast(scale, V16F))
    return b.select(nothing, constant(V16F, 0.0), result)


def power_parts(b: ir.IRBuilder, x: Any) -> tuple[Any, Any, Any]:
    """(r, n as a float, n) with e**x = r * 2**n."""
    # Adding 1.5 * 2**23 rounds to an integer and leaves it in the low bits.
    magic = constant(V16F, 12582912.0)
    shifted = fma(b, x, constant(V16F, 1.4426950408889634), magic)
    count = b.fsub(shifted, magic)
    rest = fma(b, count, constant(V16F, -0.693145751953125), x)
    rest = fma(b, count, constant(V16F, -1.428606765330187e-06), rest)
    # e**r = 1 + r + r**2 * p(r) for |r| <= ln(2) / 2 (Cephes expf).
    series = constant(V16F, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        series = fma(b, series, rest, constant(V16F, coefficient))
    result = fma(b, b.fmul(rest, rest), series, rest)
    result = b.fadd(result, constant(V16F, 1.0))
    return result, count, b.sub(b.bitcast(shifted, V16I), constant(V16I, 0x4B400000))


def rounded_to_bf16(b: ir.IRBuilder, value: Any) -> Any:
    """float32, one or a vector, to the 16 bits of bfloat16."""
    words, halves = (I32, I16) if value.type == F32 else (V16I, ir.VectorType(I16, LANES))

    def number(n):
        return I32(n) if words == I32 else constant(words, n)

    bits = b.bitcast(value, words)
    upper = b.lshr(bits, number(16))
    odd = b.and_(upper, number(1))
    rounded = b.lshr(b.add(bits, b.add(odd, number(0x7FFF))), number(16))
    # Rounding may carry a NaN's payload into infinity: keep NaN as NaN.
    is_nan = b.fcmp_unordered("uno", value, value)
    return b.trunc(b.select(is_nan, b.or_(upper, number(0x40)), rounded), halves)
