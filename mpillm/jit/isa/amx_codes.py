"""Tile products of quantised weights: exact integer sums of a block of 32, scaled in float32, blocks ascending.

The integer sums of a block for 16 rows and 16 outputs come from one tile product (or two, where a block has two
scales); they go through the thread's scratch and are scaled 16 outputs at a time, in the arithmetic of the other
tiers. The next block's product is started before the sums of the one before are scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpillm.jit.isa import select
from mpillm.jit.isa import vector as v
from mpillm.jit.isa.amx import CODES, PANELS, ROWS, SUM, SUMS, TILE, TOTALS, shapes_function, tiles
from mpillm.jit.isa.vector import F32, HALF, I8, I16, I32, I64, LANES, V16F, V16H, V16I

BLOCK = 32
#: bytes of codes asked for in advance, in each panel
AHEAD = 2048


@dataclass(frozen=True)
class XBlock:
    """A row's block of activations: its scale in 16 lanes, and the sum of the codes of its k-th half (i32)."""

    scale: Any
    half: Callable[[int], Any]


@dataclass(frozen=True)
class Codes:
    """A format of codes in panels, for :func:`codes_block`.

    ``block_bytes`` of a panel hold 32 k. ``parts`` tile products make its sums. ``signed``: how the tile's bytes are
    meant. ``tile(b, codes, room)`` gives the addresses of the parts' tiles [8][16][4], 64 bytes a row: in place, or
    unpacked into ``room`` (512 bytes a part). ``scales(b, scales, start, block)`` loads what the block needs of the
    panel's scales (i16 words from element ``start``), once for all rows; ``add(b, total, sums, scales, x)`` adds one
    row's block to 16 outputs.
    """

    name: str
    block_bytes: int
    tile: Callable[..., list]
    scales: Callable[..., Any]
    add: Callable[..., Any]
    parts: int = 1
    signed: bool = True

    @property
    def wide(self) -> int:
        """Panels beside each other: two, unless their parts take the tiles."""
        return 2 // self.parts


def half_scales(b: ir.IRBuilder, scales: Any, start: Any) -> Any:
    """16 f16 scales from element ``start`` as floats."""
    return b.fpext(v.load(b, V16H, v.at(b, scales, start, HALF), 2), V16F)


def _scale_of_block(b: ir.IRBuilder, scales: Any, start: Any, block: Any) -> Any:
    return half_scales(b, scales, b.add(start, b.mul(block, I64(LANES))))


def _two_scales_of_block(b: ir.IRBuilder, scales: Any, start: Any, block: Any) -> tuple[Any, Any]:
    at = b.add(start, b.mul(block, I64(2 * LANES)))
    return half_scales(b, scales, at), half_scales(b, scales, b.add(at, I64(LANES)))


def _add_scaled(b: ir.IRBuilder, total: Any, sums: list, scale: Any, x: XBlock) -> Any:
    """total + f32(S) * (d * xs), one fma."""
    return v.fma(b, b.sitofp(sums[0], V16F), b.fmul(scale, x.scale), total)


def _add_with_minimum(b: ir.IRBuilder, total: Any, sums: list, scales: Any, x: XBlock) -> Any:
    """The same, then + (f32(X) * xs) * m: X is the sum of the row's codes."""
    total = _add_scaled(b, total, sums, scales[0], x)
    whole = v.splat(b, b.sitofp(b.add(x.half(0), x.half(1)), F32), V16F)
    return v.fma(b, b.fmul(whole, x.scale), scales[1], total)


def nibbles(b: ir.IRBuilder, codes: Any, room: Any, minus: int = 0) -> list:
    """Unpack [4][16][4] bytes: low nibbles are quads 0-3, high ones quads 4-7; each less ``minus``."""
    vector = ir.VectorType(I8, 64)
    for i in range(4):
        both = v.load(b, vector, v.at(b, codes, I64(64 * i), I8), 1)
        for half, quad in ((b.and_(both, v.constant(vector, 15)), i), (b.lshr(both, v.constant(vector, 4)), i + 4)):
            half = b.sub(half, v.constant(vector, minus)) if minus else half
            v.store(b, half, v.at(b, room, I64(64 * quad), I8), 1)
    return [room]


#: layouts as in quant/layout.py: q8_0 [K/32][8][16][4] s8, q4_0 and q4_1 [K/32][4][16][4] nibbles a panel;
#: f16 scales [K/32][16], of q4_1 [K/32][2][16] (scale, minimum)
FORMATS = {codes.name: codes for codes in (
    Codes("q8_0", 512, lambda b, codes, room: [codes], _scale_of_block, _add_scaled),
    Codes("q4_0", 256, lambda b, codes, room: nibbles(b, codes, room, 8), _scale_of_block, _add_scaled),
    Codes("q4_1", 256, nibbles, _two_scales_of_block, _add_with_minimum, signed=False),
)}


@dataclass(frozen=True)
class _Operands:
    """The arguments of the LLVM function; strides in bytes, but scale_stride and x_scales in elements."""

    fresh: Any
    rows_0: Any
    rows_1: Any
    x: Any
    x_stride: Any
    x_scales: Any
    x_sums: Any
    x_blocks: Any
    w: Any
    panel_stride: Any
    scales: Any
    scale_start: Any
    scale_stride: Any
    start: Any
    stop: Any
    phase: Any
    y: Any
    y_stride: Any
    room: Any


POINTERS = ("x", "x_scales", "x_sums", "w", "scales", "y", "room")


def codes_function(module: ir.Module, codes: Codes, emulate: bool) -> ir.Function:
    """The LLVM function of :func:`codes_block`: the shape (row tiles, panels), then ``_Operands``."""
    kinds = [v.PTR if name in POINTERS else I64 for name in _Operands.__dataclass_fields__]
    shapes = [(r, p) for r in (1, 2) for p in range(1, codes.wide + 1)]

    def emit(b, shape, *arguments):
        _Block(b, codes, shape, emulate, _Operands(*arguments)).emit()

    return shapes_function(module, f"mpillm_{codes.name}_block_amx", kinds, shapes, emit)


class _Block:
    """Emits one shape of the function."""

    def __init__(self, b: ir.IRBuilder, codes: Codes, shape: tuple, emulate: bool, o: _Operands) -> None:
        self.b, self.codes, self.o = b, codes, o
        self.row_tiles, self.panels = shape
        self.tiles = tiles(b, o.room, emulate)

    def emit(self) -> None:
        b, o = self.b, self.o
        self._totals(load=True)
        with b.if_then(b.icmp_signed("<", o.start, o.stop)):
            self._products(o.start)
            with cgutils.for_range_slice(b, b.add(o.start, I64(1)), o.stop, I64(1), I64) as (block, _):
                self._products(block)
                self._scale(b.sub(block, I64(1)))
            self._scale(b.sub(o.stop, I64(1)))
        self._totals(load=False)

    def _rows(self, row_tile: int) -> Any:
        return (self.o.rows_0, self.o.rows_1)[row_tile]

    def _at(self, base: Any, *offsets: Any) -> Any:
        for offset in offsets:
            base = v.at(self.b, base, I64(offset) if isinstance(offset, int) else offset, I8)
        return self.b.bitcast(base, v.PTR)

    def _sums(self, block: Any, tile: int) -> Any:
        """Where a tile's integer sums go: two places, taken in turn."""
        turn = self.b.mul(self.b.and_(block, I64(1)), I64(4 * TILE))
        return self._at(self.o.room, SUMS + tile * TILE, turn)

    def _totals(self, load: bool) -> None:
        """y to the scratch (zeros where it is fresh), or back."""
        b, o = self.b, self.o
        for r in range(self.row_tiles):
            for p in range(self.panels):
                with cgutils.for_range(b, self._rows(r)) as row:
                    here = self._at(o.room, TOTALS + (2 * r + p) * TILE, b.mul(row.index, I64(64)))
                    there = self._at(o.y, b.mul(b.add(row.index, I64(LANES * r)), o.y_stride), 64 * p)
                    if not load:
                        v.store(b, v.load(b, V16F, here, 4), there, 4)
                        continue
                    with b.if_else(b.icmp_signed("!=", o.fresh, I64(0))) as (sets, adds):
                        with sets:
                            v.store(b, v.constant(V16F, 0.0), here, 4)
                        with adds:
                            v.store(b, v.load(b, V16F, there, 4), here, 4)

    def _products(self, block: Any) -> None:
        """The integer sums of a block for all rows and panels, stored."""
        b, o, t, parts = self.b, self.o, self.tiles, self.codes.parts
        for r in range(self.row_tiles):
            x = self._at(o.x, b.mul(o.x_stride, I64(LANES * r)), b.mul(block, I64(BLOCK)))
            t.load(ROWS + r, x, o.x_stride)
        for p in range(self.panels):
            along = b.mul(block, I64(self.codes.block_bytes))
            codes = self._at(o.w, b.mul(o.panel_stride, I64(p)), along)
            for line in range(0, self.codes.block_bytes, 64):
                v.prefetch(b, codes, AHEAD + line)
            room = self._at(o.room, CODES + p * 512)
            for part, address in enumerate(self.codes.tile(b, codes, room)):
                t.load(PANELS + p * parts + part, address, I64(64))
        for r in range(self.row_tiles):
            for column in range(self.panels * parts):
                tile = SUM + 2 * r + column
                t.zero(tile)
                t.multiply("tdpbssd" if self.codes.signed else "tdpbsud", tile, ROWS + r, PANELS + column)
                t.store(tile, self._sums(block, tile), I64(64))

    def _scale(self, block: Any) -> None:
        """Add a block's sums to the totals."""
        b, o, parts = self.b, self.o, self.codes.parts
        for p in range(self.panels):
            start = b.add(o.scale_start, b.mul(o.scale_stride, I64(p)))
            scales = self.codes.scales(b, o.scales, start, b.add(block, o.phase))
            for r in range(self.row_tiles):
                with cgutils.for_range(b, self._rows(r)) as row:
                    along = b.mul(row.index, I64(64))
                    sums = [v.load(b, V16I, v.at(b, self._sums(block, SUM + 2 * r + p * parts + part), along, I8), 4)
                            for part in range(parts)]
                    at = self._at(o.room, TOTALS + (2 * r + p) * TILE, along)
                    x = self._x(b.add(b.mul(b.add(row.index, I64(LANES * r)), o.x_blocks), block))
                    v.store(b, self.codes.add(b, v.load(b, V16F, at, 4), sums, scales, x), at, 4)

    def _x(self, number: Any) -> XBlock:
        b, o = self.b, self.o
        scale = v.splat(b, v.load(b, F32, v.at(b, o.x_scales, number, F32), 4), V16F)
        first = b.mul(number, I64(2))
        return XBlock(scale, lambda i: v.load(b, I32, v.at(b, o.x_sums, b.add(first, I64(i)), I32), 4))


def codes_block(name: str) -> Any:
    """The intrinsic of a format: y[rows, 16 * panels] (+)= x[row:, k_start:k_stop] @ panels of codes.

    Arguments and shapes as for amx.bf16_block, but: x int8 codes [rows][k], x_scales f32 and x_sums i32
    [rows][k/32] and [rows][k/16] (sums of 16 codes each), w uint8 or int8, panel_stride in bytes, w_scales int16
    words with scale_stride a panel, ``phase``: the number of the first block among those of w_scales; at most
    ``Codes.wide`` panels.
    """
    codes = FORMATS[name]

    @intrinsic
    def block(typingctx, size_0, size_1, panels, fresh, ahead, x, x_scales, x_sums, row, k, w, w_scales, panel,
              panel_stride, scale_stride, phase, k_start, k_stop, y, y_offset, y_stride, room, offset):
        def codegen(context, b, signature, arguments):
            (size_0, size_1, panels, fresh, _, x, x_scales, x_sums, row, k, w, w_scales, panel, panel_stride,
             scale_stride, phase, k_start, k_stop, y, y_offset, y_stride, room, offset) = arguments
            x, x_scales, x_sums, w, w_scales, y, room = (
                v.data(context, b, signature.args[i], arguments[i]) for i in (5, 6, 7, 10, 11, 18, 21))
            blocks = b.sdiv(k, I64(BLOCK))
            first = b.mul(row, blocks)
            starts = {"x": (x, b.mul(row, k), I8), "x_scales": (x_scales, first, F32),
                      "x_sums": (x_sums, b.mul(first, I64(2)), I32), "w": (w, b.mul(panel, panel_stride), I8),
                      "scales": (w_scales, I64(0), I16), "y": (y, y_offset, F32), "room": (room, offset, I8)}
            values = {name: b.bitcast(v.at(b, *place), v.PTR) for name, place in starts.items()}
            operands = _Operands(
                fresh=fresh, rows_0=size_0, rows_1=size_1, x_stride=k, x_blocks=blocks, panel_stride=panel_stride,
                scale_start=b.mul(panel, scale_stride), scale_stride=scale_stride, start=b.sdiv(k_start, I64(BLOCK)),
                stop=b.sdiv(k_stop, I64(BLOCK)), phase=phase, y_stride=b.mul(y_stride, I64(4)), **values)
            two = b.zext(b.icmp_signed("!=", size_1, I64(0)), I64)
            shape = b.add(b.mul(two, I64(codes.wide)), b.sub(panels, I64(1)))
            fields = [getattr(operands, field) for field in _Operands.__dataclass_fields__]
            b.call(codes_function(b.module, codes, select.emulated()), [shape, *fields])
            return context.get_dummy_value()

        i = types.intp
        return types.void(i, i, i, i, i, x, x_scales, x_sums, i, i, w, w_scales, i, i, i, i, i, i, y, i, i, room,
                          i), codegen

    return block
