"""Products of quantised rows with quantised panels, as numba intrinsics; the tier supplies the dot products.

Activations are rounded as q8_0, per row and block of 32: int8 codes, an f32 scale xs, and int32 sums X of the
codes per 16. With S the exact integer sum over a block, each output is one chain of fma along K, ascending:

  q8_0  t = fma(S(w x), d xs, t)
  q4_0  t = fma(S(c x) - 8 X, d xs, t)
  q4_1  t = fma(S(c x), d xs, t);       t = fma(X xs, m, t)
  q4_K  t = fma(S(c x) sc, d xs, t);    t = fma(X mn, -(dmin xs), t)
  q6_K  t = fma(sc0 (S0 - 32 X0) + sc1 (S1 - 32 X1), d xs, t)

so its bits depend neither on the tier nor on how rows, panels and K were cut into blocks. All integers are
exact in float32. Layouts: ``mpillm/quant/layout.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpillm.jit.isa import vector as v
from mpillm.jit.isa.dots import DOTS
from mpillm.jit.isa.select import tier
from mpillm.jit.isa.vector import F32, HALF, I8, I16, I32, I64, LANES, V16F, V16I

BLOCK, SUPER = 32, 8           # values of a block, blocks of a super-block


@dataclass(frozen=True)
class Shape:
    """How a format lies in memory, for a panel: bytes of codes, and 16-bit words of scales."""

    number: int                # of the format in compiled code
    codes: int                 # bytes of a block
    words: int                 # of scales of a block
    super_words: int           # of scales of a super-block, behind those of all blocks
    kind: str                  # of codes, see dots.py
    offset: int                # what is taken from a code


SHAPES = {"q8_0": Shape(0, 512, 16, 0, "s8", 0), "q4_0": Shape(1, 256, 16, 0, "u4", 8),
          "q4_1": Shape(2, 256, 32, 0, "u4", 0), "q4_K": Shape(3, 256, 16, 32, "u4", 0),
          "q6_K": Shape(4, 384, 16, 16, "u6", 32)}
#: the element type of an array of packed codes says which format it holds
FORMAT_OF = {types.int8: "q8_0", types.uint8: "q4_0", types.int32: "q4_1", types.uint32: "q4_K",
             types.int64: "q6_K"}
AHEAD = 2048                   # bytes of weights asked for in advance
MOST_ROWS = 16                 # that each weight is decoded for


@intrinsic
def blocks_by_panels(typingctx, rows, first_row, k, x, x_scales, x_sums, w, w_scales, phase, first_panel,
                     panels, k_start, k_stop, y, y_offset, y_stride):
    """y[rows, 16 * panels] += x[rows, k_start:k_stop] @ packed panels; 1 to MOST_ROWS rows, any panels.

    x int8 [*, k], x_scales f32 [*, k/32], x_sums int32 [*, k/16], of which rows first_row ... are used. Each block of
    a panel is decoded once for all rows.
    w (the format follows from its element type) and w_scales int16 are a whole matrix, see layout.py;
    ``phase`` is the number of its first block within a super-block. Offsets of y are in elements.
    """
    name = FORMAT_OF[w.dtype]

    def codegen(context, b, signature, arguments):
        values = [v.data(context, b, kind, value) if isinstance(kind, types.Array) else value
                  for kind, value in zip(signature.args, arguments, strict=True)]
        b.call(_function(b.module, name, [value.type for value in values]), values)
        return context.get_dummy_value()

    i = types.intp
    return types.void(i, i, i, x, x_scales, x_sums, w, w_scales, i, i, i, i, i, y, i, i), codegen


def _function(module: ir.Module, name: str, kinds: list) -> ir.Function:
    """One function of a module: it is compiled once, however often it is called."""
    symbol = f"mpillm_blocks_by_panels_{name}"
    if symbol in module.globals:
        return module.globals[symbol]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), symbol)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    b = ir.IRBuilder(function.append_basic_block("entry"))
    (rows, first_row, k, x, x_scales, x_sums, w, w_scales, phase, first_panel, panels, k_start, k_stop, y,
     y_offset, y_stride) = function.args
    shape, blocks = SHAPES[name], b.sdiv(k, I64(BLOCK))
    supers = b.sdiv(b.add(b.add(phase, blocks), I64(SUPER - 1)), I64(SUPER))
    behind = b.mul(blocks, I64(shape.words))
    stride = b.add(behind, b.mul(supers, I64(shape.super_words)))
    start, stop = (b.sdiv(end, I64(BLOCK)) for end in (k_start, k_stop))
    sums = cgutils.alloca_once(b, F32, I64(MOST_ROWS * LANES))
    with cgutils.for_range(b, panels) as loop:
        panel = b.add(first_panel, loop.index)
        codes = v.at(b, w, b.mul(b.mul(panel, blocks), I64(shape.codes)), I8)
        scales = v.at(b, w_scales, b.mul(panel, stride), I16)
        column = b.add(y_offset, b.mul(loop.index, I64(LANES)))
        # Rows of y are often a power of two apart and would push each other out of the cache.
        _copy(b, rows, y, column, y_stride, sums, I64(0), I64(LANES))
        with cgutils.for_range_slice(b, start, stop, I64(1), I64) as (block, _):
            own = v.at(b, codes, b.mul(block, I64(shape.codes)), I8)
            # To the second cache: the first has few places for lines that are on their way, which loads need too.
            # The processor finds the few lines of scales by itself.
            for line in range(0, shape.codes, 64):
                v.prefetch(b, v.at(b, own, I64(line), I8), AHEAD, 2)
            for lane in range(0, LANES, DOTS[tier()].lanes):
                place = _Place(scales, behind, phase, block, lane)
                quads, scale = _decoded(b, name, own, lane), _Scales(b, name, place)
                with cgutils.for_range(b, rows) as turn:
                    row = b.add(b.mul(b.add(first_row, turn.index), blocks), block)
                    at = v.at(b, sums, b.add(b.mul(turn.index, I64(LANES)), I64(lane)), F32)
                    _emit_row(b, name, row, (x, x_scales, x_sums), quads, scale, at)
        _copy(b, rows, sums, I64(0), I64(LANES), y, column, y_stride)
    b.ret_void()
    return function


def _copy(b: ir.IRBuilder, rows: Any, source: Any, start: Any, stride: Any, target: Any, to: Any, step: Any) -> None:
    """16 floats of each row."""
    with cgutils.for_range(b, rows) as turn:
        values = v.load(b, V16F, v.at(b, source, b.add(start, b.mul(turn.index, stride)), F32), 4)
        v.store(b, values, v.at(b, target, b.add(to, b.mul(turn.index, step)), F32), 4)


def _emit_row(b: ir.IRBuilder, name: str, row: Any, x: tuple, quads: list, scale: _Scales, y: Any) -> None:
    """A block of one row, the number ``row`` of all blocks, with several outputs at address ``y``."""
    shape = SHAPES[name]
    dot = DOTS[tier()](b, shape.kind, v.at(b, x[0], b.mul(row, I64(BLOCK)), I8))
    sums = v.at(b, x[2], b.mul(row, I64(2)), I32)
    halves = [v.load(b, I32, v.at(b, sums, I64(i), I32), 4) for i in (0, 1)]
    both, whole = b.add(*halves), []
    for quad, weights in quads:
        dot.add(quad, weights)
        # q6_K has a scale for each half of a block.
        if name == "q6_K" and quad in (3, 7):
            whole.append(dot.take(shape.offset, halves[quad // 4]))
    if name != "q6_K":
        whole.append(dot.take(shape.offset, both))
    x_scale = v.load(b, F32, v.at(b, x[1], row, F32), 4)
    before = v.load(b, ir.VectorType(F32, dot.lanes), y, 4)
    v.store(b, scale.applied(whole, both, x_scale, before), y, 4)


def _decoded(b: ir.IRBuilder, name: str, codes: Any, lane: int) -> list[tuple[int, Any]]:
    """The quads of a block, of the tier's number of lanes from ``lane`` on, as bytes."""
    kind = ir.VectorType(I8, 4 * DOTS[tier()].lanes)

    def vector(i: int) -> Any:
        return v.load(b, kind, v.at(b, codes, I64(64 * i + 4 * lane), I8), 1)

    if name == "q8_0":
        return [(quad, vector(quad)) for quad in range(8)]
    low, four = v.constant(kind, 15), v.constant(kind, 4)
    nibbles = [vector(i) for i in range(4)]
    quads = [b.and_(part, low) for part in nibbles] + [b.lshr(part, four) for part in nibbles]
    if name == "q6_K":
        for quad, nibble in enumerate(quads):
            # Two bits of each byte to where 4 and 5 are.
            upper, left = vector(4 + quad // 4), 4 - 2 * (quad % 4)
            by = v.constant(kind, abs(left))
            upper = b.shl(upper, by) if left > 0 else b.lshr(upper, by) if left < 0 else upper
            quads[quad] = b.or_(nibble, b.and_(upper, v.constant(kind, 48)))
    return list(enumerate(quads))


@dataclass
class _Place:
    """A panel's scales; ``behind``: words before those of super-blocks; a block, and the first lane."""

    scales: Any
    behind: Any
    phase: Any
    block: Any
    lane: int


class _Scales:
    """A block's scales of several outputs in registers, and what they do to the integer sums of a row."""

    def __init__(self, b: ir.IRBuilder, name: str, place: _Place) -> None:
        self.b, self.name, lanes = b, name, DOTS[tier()].lanes
        self.floats, self.integers = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        own = v.at(b, place.scales, b.mul(place.block, I64(SHAPES[name].words)), I16)

        def halves(address: Any, i: int) -> Any:
            address = v.at(b, address, I64(LANES * i + place.lane), HALF)
            return b.fpext(v.load(b, ir.VectorType(HALF, lanes), address, 2), self.floats)

        def small(i: int) -> Any:
            return v.load(b, ir.VectorType(I8, lanes), v.at(b, own, I64(LANES * i + place.lane), I8), 1)

        if SHAPES[name].super_words:
            number = b.sdiv(b.add(place.phase, place.block), I64(SUPER))
            above = b.add(place.behind, b.mul(number, I64(SHAPES[name].super_words)))
            upper = v.at(b, place.scales, above, I16)
            self.d = halves(upper, 0)
            widen = b.zext if name == "q4_K" else b.sext
            self.small = [widen(small(i), self.integers) for i in (0, 1)]
            if name == "q4_K":
                self.minimum = halves(upper, 1)
        else:
            self.d = halves(own, 0)
            if name == "q4_1":
                self.minimum = halves(own, 1)

    def value(self, codes: Any, quad: int) -> Any:
        """The weights of 16 outputs from their codes in quad ``quad``."""
        b, d = self.b, self.d
        if self.name == "q4_1":
            return v.fma(b, codes, d, self.minimum)
        if self.name == "q4_K":
            least = b.fmul(self.minimum, b.sitofp(self.small[1], self.floats))
            return v.fma(b, codes, b.fmul(d, b.sitofp(self.small[0], self.floats)), b.fneg(least))
        if self.name == "q6_K":
            d = b.fmul(d, b.sitofp(self.small[quad // 4], self.floats))
        return b.fmul(codes, d)

    def applied(self, sums: list[Any], x_sum: Any, x_scale: Any, total: Any) -> Any:
        """``total`` <lanes x float> and the block; ``sums`` <lanes x i32>, x_sum i32 and x_scale f32 of the row."""
        b, wide = self.b, v.splat(self.b, x_scale, self.floats)
        whole = sums[0]
        if self.name == "q4_K":
            whole = b.mul(whole, self.small[0])
        elif self.name == "q6_K":
            whole = b.add(b.mul(sums[0], self.small[0]), b.mul(sums[1], self.small[1]))
        total = v.fma(b, b.sitofp(whole, self.floats), b.fmul(self.d, wide), total)
        if self.name == "q4_1":
            scaled = b.fmul(b.sitofp(x_sum, F32), x_scale)
            total = v.fma(b, v.splat(b, scaled, self.floats), self.minimum, total)
        elif self.name == "q4_K":
            least = b.mul(v.splat(b, x_sum, self.integers), self.small[1])
            total = v.fma(b, b.sitofp(least, self.floats), b.fneg(b.fmul(self.minimum, wide)), total)
        return total


@intrinsic
def dequantise_panels(typingctx, panels, k, w, w_scales, phase, out):
    """The first panels of a packed matrix as bf16 [panels][k/2][16][2] in ``out`` uint16, rounded to nearest even.

    For tiers that work on 16 outputs at a time. w, w_scales and ``phase`` as in :func:`blocks_by_panels`.
    """
    name = FORMAT_OF[w.dtype]

    def codegen(context, b, signature, arguments):
        panels, k, w, w_scales, phase, out = arguments
        w, w_scales, out = (v.data(context, b, signature.args[i], arguments[i]) for i in (2, 3, 5))
        shape, blocks = SHAPES[name], b.sdiv(k, I64(BLOCK))
        supers = b.sdiv(b.add(b.add(phase, blocks), I64(SUPER - 1)), I64(SUPER))
        behind = b.mul(blocks, I64(shape.words))
        stride = b.add(behind, b.mul(supers, I64(shape.super_words)))
        with cgutils.for_range(b, panels) as turn, cgutils.for_range(b, blocks) as loop:
            number = b.add(b.mul(turn.index, blocks), loop.index)
            scales = v.at(b, w_scales, b.mul(turn.index, stride), I16)
            scale = _Scales(b, name, _Place(scales, behind, phase, loop.index, 0))
            to = v.at(b, out, b.mul(number, I64(BLOCK * LANES)), I16)
            for quad, codes in _decoded(b, name, v.at(b, w, b.mul(number, I64(shape.codes)), I8), 0):
                words = b.bitcast(codes, V16I)
                halves = [b.zext(v.rounded_to_bf16(b, scale.value(_byte(b, shape, words, i), quad)), V16I)
                          for i in range(4)]
                for pair in (0, 1):
                    both = b.or_(halves[2 * pair], b.shl(halves[2 * pair + 1], v.constant(V16I, 16)))
                    v.store(b, both, v.at(b, to, I64((2 * quad + pair) * 2 * LANES), I16), 2)
        return context.get_dummy_value()

    i = types.intp
    return types.void(i, i, w, w_scales, i, out), codegen


def _byte(b: ir.IRBuilder, shape: Shape, words: Any, i: int) -> Any:
    """Byte ``i`` of 16 words as float32 codes, their offset taken off."""
    if shape.kind == "s8":
        return b.sitofp(b.ashr(b.shl(words, v.constant(V16I, 24 - 8 * i)), v.constant(V16I, 24)), V16F)
    code = b.and_(b.lshr(words, v.constant(V16I, 8 * i)), v.constant(V16I, 255))
    return b.sitofp(b.sub(code, v.constant(V16I, shape.offset)), V16F)


def _nearest_code(b: ir.IRBuilder, value: Any) -> Any:
    """16 floats to the nearest i32, halves away from 0, at most 127 in size; NaN gives 0."""
    value = v.call(b, "llvm.round.v16f32", V16F, [value])
    # In range before it is converted: a conversion that saturates goes lane by lane.
    value = b.select(b.fcmp_ordered("ord", value, value), value, v.constant(V16F, 0.0))
    for sign, limit in ((">", 127.0), ("<", -127.0)):
        bound = v.constant(V16F, limit)
        value = b.select(b.fcmp_ordered(sign, value, bound), bound, value)
    return b.fptosi(value, V16I)


@intrinsic
def quantise_row(typingctx, x, x_offset, k, codes, code_offset, scales, scale_offset, sums, sum_offset):
    """q8_0 as ggml's reference: d = max|x| / 127 rounded to f16, q = round(x / d), halves away from 0.

    Codes int8, scales f32 [k/32], sums int32 of the codes [k/16]. A d beyond f16 stays as it is; a block
    with a value that is not finite gets a scale of NaN.
    """
    def codegen(context, b, signature, arguments):
        x, x_offset, k, codes, code_offset, scales, scale_offset, sums, sum_offset = arguments
        x, codes, scales, sums = (v.data(context, b, signature.args[i], arguments[i]) for i in (0, 3, 5, 7))
        with cgutils.for_range(b, b.sdiv(k, I64(BLOCK))) as loop:
            along = b.mul(loop.index, I64(BLOCK))
            parts = [v.load(b, V16F, v.at(b, x, b.add(b.add(x_offset, along), I64(i)), F32), 4)
                     for i in (0, LANES)]
            sizes = [v.call(b, "llvm.fabs.v16f32", V16F, [part]) for part in parts]
            largest = v.tree(b, v.larger(b)(*sizes), v.larger(b))
            # 0 where a value is finite, NaN otherwise.
            differences = b.fadd(*(b.fsub(part, part) for part in parts))
            strange = b.bitcast(b.fcmp_unordered("uno", differences, differences), I16)
            d = b.fdiv(largest, F32(127.0))
            inverse = b.select(b.fcmp_ordered("==", d, F32(0.0)), F32(0.0), b.fdiv(F32(1.0), d))
            rounded = b.fpext(b.fptrunc(d, HALF), F32)
            rounded = b.select(b.fcmp_ordered("==", rounded, F32(float("inf"))), d, rounded)
            rounded = b.select(b.icmp_unsigned("==", strange, I16(0)), rounded, F32(float("nan")))
            v.store(b, rounded, v.at(b, scales, b.add(scale_offset, loop.index), F32), 4)
            for i, part in enumerate(parts):
                q = _nearest_code(b, b.fmul(part, v.splat(b, inverse, V16F)))
                target = v.at(b, codes, b.add(b.add(code_offset, along), I64(LANES * i)), I8)
                v.store(b, b.trunc(q, ir.VectorType(I8, LANES)), target, 1)
                number = b.add(b.mul(loop.index, I64(2)), I64(i))
                v.store(b, v.tree(b, q, b.add), v.at(b, sums, b.add(sum_offset, number), I32), 4)
        return context.get_dummy_value()

    i = types.intp
    return types.void(x, i, i, codes, i, scales, i, sums, i), codegen
