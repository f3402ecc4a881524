"""Building blocks of tier avx512: VNNI and BF16 dot products, and bf16 rows by panels.

Each instruction has an emulated twin that does exactly its arithmetic on any processor, for tests.
Source: Intel 64 and IA-32 Architectures Software Developer's Manual, vol. 2 (VPDPBUSD, VDPBF16PS).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpillm.jit.isa import select
from mpillm.jit.isa import vector as v
from mpillm.jit.isa.vector import F32, I8, I16, I32, I64, LANES, V16F, V16I


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite's IR has no class for; only ever the element of a bitcast vector."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


V64B, V32BF, V16BF = ir.VectorType(I8, 64), ir.VectorType(_BFloat(), 32), ir.VectorType(_BFloat(), 16)
#: bytes of weights asked for in advance, in each panel
AHEAD = 1024
#: rows of a register block -> panels beside each other: at most 24 of the 32 registers are sums
SHAPES = {1: 4, 2: 4, 3: 4, 4: 4, 5: 4, 6: 4, 7: 2, 8: 2, 9: 2, 10: 2, 11: 2, 12: 2}
MOST_ROWS = max(SHAPES)


def flush(b: ir.IRBuilder, value: Any) -> Any:
    """16 floats with subnormal ones as zeros of their sign: DAZ and FTZ of the dot product instructions."""
    bits = b.bitcast(value, V16I)
    zero = b.icmp_signed("==", b.and_(bits, v.constant(V16I, 0x7F800000)), v.constant(V16I, 0))
    return b.bitcast(b.select(zero, b.and_(bits, v.constant(V16I, 0x80000000)), bits), V16F)


def halves(b: ir.IRBuilder, words: Any) -> tuple[Any, Any]:
    """The low and the high bf16 of 16 words as floats, subnormal ones as 0."""
    low = b.bitcast(b.shl(words, v.constant(V16I, 16)), V16F)
    high = b.bitcast(b.and_(words, v.constant(V16I, 0xFFFF0000)), V16F)
    return flush(b, low), flush(b, high)


def _twin(b: ir.IRBuilder, name: str, total: Any, words: Any, four: Any, emit: Any) -> Any:
    """Call a function of the module that emulates an instruction; made when first called."""
    symbol = f"mpillm_emulated_{name}"
    if symbol not in b.module.globals:
        kind = ir.FunctionType(total.type, [total.type, V16I, V16I])
        function = ir.Function(b.module, kind, symbol)
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        inner.ret(emit(inner, *function.args))
    return b.call(b.module.globals[symbol], [total, words, four])


def _emulate_bf16(b: ir.IRBuilder, total: Any, left: Any, right: Any) -> Any:
    """VDPBF16PS: one fma with the high halves, then one with the low, each rounded to nearest even."""
    (low, high), (x_low, x_high) = halves(b, left), halves(b, right)
    total = flush(b, v.fma(b, high, x_high, flush(b, total)))
    return flush(b, v.fma(b, low, x_low, total))


def byte(b: ir.IRBuilder, words: Any, i: int, signed: bool) -> Any:
    """Byte i of 16 words, each as i32."""
    up = b.shl(words, v.constant(V16I, 24 - 8 * i))
    return (b.ashr if signed else b.lshr)(up, v.constant(V16I, 24))


def four_products(b: ir.IRBuilder, total: Any, left: Any, right: Any, signed: tuple[bool, bool]) -> Any:
    """total + the four products of bytes of each lane, modulo 2**32."""
    for i in range(4):
        total = b.add(total, b.mul(byte(b, left, i, signed[0]), byte(b, right, i, signed[1])))
    return total


def _emulate_vnni(b: ir.IRBuilder, total: Any, left: Any, right: Any) -> Any:
    return four_products(b, total, left, right, (False, True))


def dot_bf16(b: ir.IRBuilder, total: Any, words: Any, pair: Any, emulate: bool | None = None) -> Any:
    """total <16 x float> + words <16 x i32 of two bf16> . pair (i32 of two bf16), as VDPBF16PS rounds.

    ``emulate``: None for what the chosen tier does.
    """
    right = v.splat(b, pair, V16I)
    if select.emulated() if emulate is None else emulate:
        return _twin(b, "vdpbf16ps", total, words, right, _emulate_bf16)
    left, right = b.bitcast(words, V32BF), b.bitcast(right, V32BF)
    return v.call(b, "llvm.x86.avx512bf16.dpbf16ps.512", V16F, [total, left, right])


def dot_u8s8(b: ir.IRBuilder, total: Any, codes: Any, four: Any, emulate: bool | None = None) -> Any:
    """total <16 x i32> + codes <64 x i8, unsigned> . four (i32 of four signed bytes), exactly (VPDPBUSD)."""
    left, right = b.bitcast(codes, V16I), v.splat(b, four, V16I)
    if select.emulated() if emulate is None else emulate:
        return _twin(b, "vpdpbusd", total, left, right, _emulate_vnni)
    # LLVM 22 takes <64 x i8>; it reads the older form, with <16 x i32>, as well.
    return v.call(b, "llvm.x86.avx512.vpdpbusd.512", V16I, [total, left, right])


class Vnni:
    """Exact integer products of a row's block of 32 codes with 16 outputs' weights, as the other tiers' classes.

    Signed weights w go in as w + 128, unsigned; 128 times the row's sum is taken off again.
    """

    lanes = LANES

    def __init__(self, b: ir.IRBuilder, kind: str, x: Any) -> None:
        """``kind`` is s8 for signed weights; ``x`` the address of 32 codes of type int8 in natural order."""
        self.b, self.signed, self.x = b, kind == "s8", x
        self._total: Any = v.constant(V16I, 0)

    def add(self, quad: int, weights: Any) -> None:
        """Add the products of quad ``quad`` of the row with ``weights`` <64 x i8>."""
        b = self.b
        four = v.load(b, I32, v.at(b, self.x, I64(4 * quad), I8), 1)
        weights = b.xor(weights, v.constant(V64B, 128)) if self.signed else weights
        self._total = dot_u8s8(b, self._total, weights, four)

    def take(self, offset: int, x_sum: Any) -> Any:
        """The sum <16 x i32> of (weight - ``offset``) * x since the last call; ``x_sum`` i32 is that of x."""
        total, self._total = self._total, v.constant(V16I, 0)
        offset += 128 if self.signed else 0
        return self.b.add(total, v.splat(self.b, self.b.mul(x_sum, I32(-offset)), V16I)) if offset else total


def rows_function(module: ir.Module, emulate: bool) -> ir.Function:
    """The LLVM function of :func:`bf16_rows`; one a module holds all shapes.

    (rows, panels, x, x_stride, w, panel_stride, pairs, y, y_stride), pointers to the first element in question.
    """
    symbol = "mpillm_bf16_rows_avx512"
    if symbol in module.globals:
        return module.globals[symbol]
    pointers = {2: v.PTR, 4: v.PTR, 7: v.PTR}
    kinds = [pointers.get(i, I64) for i in range(9)]
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
            with cgutils.for_range_slice(b, start, stop, I64(width), I64) as (p, _):
                _emit_block(b, count, width, p, function.args[2:], emulate)
        b.branch(done)
    b.position_at_end(done)
    b.ret_void()
    return function


def _emit_block(b: ir.IRBuilder, count_r: int, count_p: int, p: Any, arguments: Any, emulate: bool) -> None:
    """One register block: each output is one chain over the pairs of K, ascending."""
    x, x_stride, w, panel_stride, pairs, y, y_stride = arguments
    x_rows = [v.at(b, x, b.mul(x_stride, I64(r)), I16) for r in range(count_r)]
    w_panels = [v.at(b, w, b.mul(panel_stride, b.add(p, I64(i))), I16) for i in range(count_p)]
    y_at = [[v.at(b, y, b.add(b.mul(y_stride, I64(r)), b.mul(b.add(p, I64(i)), I64(LANES))), F32)
             for i in range(count_p)] for r in range(count_r)]
    totals = [[cgutils.alloca_once_value(b, v.load(b, V16F, address, 4)) for address in row] for row in y_at]
    with cgutils.for_range(b, pairs) as loop:
        words = []
        for panel in w_panels:
            address = v.at(b, panel, b.mul(loop.index, I64(2 * LANES)), I16)
            v.prefetch(b, address, AHEAD)
            words.append(v.load(b, V16I, address, 2))
        for row, chain in zip(x_rows, totals, strict=True):
            pair = v.load(b, I32, v.at(b, row, b.mul(loop.index, I64(2)), I16), 2)
            for word, total in zip(words, chain, strict=True):
                b.store(dot_bf16(b, b.load(total, typ=V16F), word, pair, emulate), total)
    for row, chain in zip(y_at, totals, strict=True):
        for address, total in zip(row, chain, strict=True):
            v.store(b, b.load(total, typ=V16F), address, 4)


@intrinsic
def bf16_rows(typingctx, rows, panels, x, x_offset, x_stride, w, w_offset, panel_stride, pairs, y, y_offset, y_stride):
    """y[rows, 16 * panels] += x[rows, 2 * pairs] @ packed bf16 panels; 1 to 12 rows, any panels.

    x uint16 bf16 rows, w uint16 [pairs][16][2] a panel, y f32. Offsets and strides in elements, even for x and w.
    """
    def codegen(context, b, signature, arguments):
        rows, panels, x, x_offset, x_stride, w, w_offset, panel_stride, pairs, y, y_offset, y_stride = arguments
        x, w, y = (v.data(context, b, signature.args[i], arguments[i]) for i in (2, 5, 9))
        function = rows_function(b.module, select.emulated())
        b.call(function, [rows, panels, b.bitcast(v.at(b, x, x_offset, I16), v.PTR), x_stride,
                          b.bitcast(v.at(b, w, w_offset, I16), v.PTR), panel_stride, pairs,
                          b.bitcast(v.at(b, y, y_offset, F32), v.PTR), y_stride])
        return context.get_dummy_value()

    integer = types.intp
    return types.void(integer, integer, x, integer, integer, w, integer, integer, integer, y, integer,
                      integer), codegen


@intrinsic
def dot_block(typingctx, codes, x, x_sum, sums):
    """sums[16] i32 = codes [8][16][4] . x int8 [32], codes int8, or uint8 without the top bit's meaning as a sign.

    ``x_sum`` is the sum of x. ``Vnni`` by itself, for tests.
    """
    kind = "s8" if codes.dtype == types.int8 else "u8"

    def codegen(context, b, signature, arguments):
        codes, x, sums = (v.data(context, b, signature.args[i], arguments[i]) for i in (0, 1, 3))
        dot = Vnni(b, kind, x)
        for quad in range(8):
            dot.add(quad, v.load(b, V64B, v.at(b, codes, I64(64 * quad), I8), 1))
        v.store(b, dot.take(0, arguments[2]), sums, 4)
        return context.get_dummy_value()

    return types.void(codes, x, types.int32, sums), codegen
