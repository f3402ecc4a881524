"""Tile products of quantised weights: exact integer sums of a block of 32, scaled in float32, blocks ascending.

The integer sums of a block for 16 rows and 16 outputs come from one tile product (or two, where a block has two
scales); they go through the thread's scratch and are scaled 16 outputs at a time, in the arithmetic of the other
tiers. Scaling takes longer than multiplying: a conversion, a product and an fma for each 16 sums. So a few blocks form
a group: their sums are added to an output while it is in a register, and between the rows that are scaled the tiles
make the sums of the next group.
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
from mpillm.jit.isa.amx import PANELS, ROOM, ROWS, SCRATCH, SUM, TILE, shapes_function, tiles
from mpillm.jit.isa.vector import F32, I8, I16, I32, I64, LANES, V16F, V16H, V16I

BLOCK, SUPER = 32, 8           # values of a block, blocks of a super-block
MOST_ROWS, MOST_BLOCKS = 32, 20     # of a call
#: bytes of codes asked for in advance, in each panel
AHEAD = 2048
#: a row's sums of both columns of tiles; those of a block, which do not fall on the same cache lines as the next one's
LINE = 2 * 64
PLANE = MOST_ROWS * LINE + LINE
#: the scratch behind amx.ROOM: packed rows, their scales and sums of codes, [block][MOST_ROWS], f32 outputs, unpacked
#: codes of two blocks, integer sums of two groups
PACKED = ROOM
X_SCALES = PACKED + MOST_ROWS * BLOCK * MOST_BLOCKS
X_SUMS = X_SCALES + 4 * MOST_ROWS * MOST_BLOCKS
TOTALS = X_SUMS + 4 * MOST_ROWS * MOST_BLOCKS
CODES = TOTALS + PLANE
SUMS = CODES + 2 * TILE
assert SUMS + 2 * 4 * PLANE <= SCRATCH, "the scratch is too small"
V64B, V32B, V16B = (ir.VectorType(I8, count) for count in (64, 32, LANES))


@dataclass(frozen=True)
class XBlock:
    """A row's block of activations: its scale, and the sum of its codes (i32, loaded when asked), in 16 lanes."""

    scale: Any
    total: Callable[[], Any]


@dataclass(frozen=True)
class Place:
    """Scales of a panel's block: words from ``own`` on; of its super-block: from ``above`` on."""

    own: Any
    above: Any


@dataclass(frozen=True)
class Codes:
    """A format of codes in panels (layouts: quant/layout.py), for :func:`codes_block`.

    A block of 32 k takes ``block_bytes`` of a panel and ``words`` of its scales (16 bits each); ``super_words`` of a
    super-block stand behind those of all blocks. ``parts`` tile products make its sums. ``signed``: how the tile's
    bytes are meant. ``tile(b, codes, room)`` gives the addresses of the parts' tiles [8][16][4], 64 bytes a row: in
    place, or unpacked into ``room`` (1024 bytes for all parts of all panels). ``scales(b, place)`` loads what the
    block needs, once for all rows; ``add(b, total, sums, scales, x)`` adds one row's block to 16 outputs.
    ``group`` blocks are scaled together, as far as their scales stay in registers.
    """

    name: str
    block_bytes: int
    words: int
    super_words: int
    tile: Callable[[ir.IRBuilder, Any, Any], list]
    scales: Callable[[ir.IRBuilder, Place], list]
    add: Callable[[ir.IRBuilder, Any, list, list, XBlock], Any]
    parts: int = 1
    signed: bool = True
    group: int = 2

    @property
    def wide(self) -> int:
        """Panels beside each other: two, unless their parts take the tiles."""
        return 2 // self.parts


def _halves(b: ir.IRBuilder, words: Any, count: int) -> list:
    """``count`` times 16 f16 as floats."""
    return [b.fpext(v.load(b, V16H, v.at(b, words, I64(LANES * i), I16), 2), V16F) for i in range(count)]


def _small(b: ir.IRBuilder, words: Any, signed: bool) -> list:
    """Twice 16 bytes as i32."""
    parts = [v.load(b, V16B, v.at(b, words, I64(LANES * i), I8), 1) for i in (0, 1)]
    return [(b.sext if signed else b.zext)(part, V16I) for part in parts]


def _add_scaled(b: ir.IRBuilder, total: Any, whole: Any, scale: Any, x: XBlock) -> Any:
    """total + f32(whole) * (d * xs), one fma."""
    return v.fma(b, b.sitofp(whole, V16F), b.fmul(scale, x.scale), total)


def _add_plain(b: ir.IRBuilder, total: Any, sums: list, scales: list, x: XBlock) -> Any:
    """q8_0, q4_0."""
    return _add_scaled(b, total, sums[0], scales[0], x)


def _add_with_minimum(b: ir.IRBuilder, total: Any, sums: list, scales: list, x: XBlock) -> Any:
    """q4_1: then + (f32(X) * xs) * m, with X the sum of the row's codes."""
    total = _add_scaled(b, total, sums[0], scales[0], x)
    return v.fma(b, b.fmul(b.sitofp(x.total(), V16F), x.scale), scales[1], total)


def _add_q4_k(b: ir.IRBuilder, total: Any, sums: list, scales: list, x: XBlock) -> Any:
    """f32(S sc) * (d * xs), then f32(X mn) * -(dmin * xs)."""
    small, minimum, d, d_min = scales
    total = _add_scaled(b, total, b.mul(sums[0], small), d, x)
    least = b.mul(x.total(), minimum)
    return v.fma(b, b.sitofp(least, V16F), b.fneg(b.fmul(d_min, x.scale)), total)


def _add_q6_k(b: ir.IRBuilder, total: Any, sums: list, scales: list, x: XBlock) -> Any:
    """f32(sc0 S0 + sc1 S1) * (d * xs): 16 values a scale."""
    whole = b.add(b.mul(sums[0], scales[0]), b.mul(sums[1], scales[1]))
    return _add_scaled(b, total, whole, scales[2], x)


def _load_codes(b: ir.IRBuilder, codes: Any, count: int) -> list:
    return [v.load(b, V64B, v.at(b, codes, I64(64 * i), I8), 1) for i in range(count)]


def _quads(b: ir.IRBuilder, codes: list) -> list:
    """Vectors of nibbles to quads 0-7: the low ones, then the high ones."""
    low, four = v.constant(V64B, 15), v.constant(V64B, 4)
    return [b.and_(both, low) for both in codes] + [b.lshr(both, four) for both in codes]


def _store_quads(b: ir.IRBuilder, quads: list, room: Any, first: int, minus: int) -> None:
    for i, quad in enumerate(quads):
        quad = b.sub(quad, v.constant(V64B, minus)) if minus else quad
        v.store(b, quad, v.at(b, room, I64(64 * (first + i)), I8), 1)


def _tile_of_nibbles(minus: int) -> Callable[[ir.IRBuilder, Any, Any], list]:
    def tile(b: ir.IRBuilder, codes: Any, room: Any) -> list:
        _store_quads(b, _quads(b, _load_codes(b, codes, 4)), room, 0, minus)
        return [room]

    return tile


def _tiles_of_q6_k(b: ir.IRBuilder, codes: Any, room: Any) -> list:
    """Codes less 32, the first four quads before four of zeros, the last four after them."""
    vectors, bits, quads = _load_codes(b, codes, 6), v.constant(V64B, 48), []
    for quad, nibble in enumerate(_quads(b, vectors[:4])):
        # Two bits of each byte to where 4 and 5 are.
        upper, left = vectors[4 + quad // 4], 4 - 2 * (quad % 4)
        by = v.constant(V64B, abs(left))
        upper = b.shl(upper, by) if left > 0 else b.lshr(upper, by)
        quads.append(b.or_(nibble, b.and_(upper, bits)))
    _store_quads(b, quads[:4], room, 0, 32)
    _store_quads(b, [v.constant(V64B, 0)] * 4, room, 4, 0)
    _store_quads(b, quads[4:], room, 8, 32)
    return [room, b.bitcast(v.at(b, room, I64(256), I8), v.PTR)]


FORMATS = {codes.name: codes for codes in (
    Codes("q8_0", 512, 16, 0, lambda b, codes, room: [codes], lambda b, at: _halves(b, at.own, 1), _add_plain),
    Codes("q4_0", 256, 16, 0, _tile_of_nibbles(8), lambda b, at: _halves(b, at.own, 1), _add_plain),
    Codes("q4_1", 256, 32, 0, _tile_of_nibbles(0), lambda b, at: _halves(b, at.own, 2), _add_with_minimum,
          signed=False),
    Codes("q4_K", 256, 16, 32, _tile_of_nibbles(0),
          lambda b, at: [*_small(b, at.own, False), *_halves(b, at.above, 2)], _add_q4_k, signed=False, group=2),
    Codes("q6_K", 384, 16, 16, _tiles_of_q6_k,
          lambda b, at: [*_small(b, at.own, True), *_halves(b, at.above, 1)], _add_q6_k, parts=2, group=4),
)}


@dataclass(frozen=True)
class _Operands:
    """The arguments of the LLVM function; addresses of the first panel in question, y_stride in bytes."""

    fresh: Any
    ahead: Any
    rows_0: Any
    rows_1: Any
    blocks: Any
    phase: Any
    w: Any
    scales: Any
    start: Any
    stop: Any
    y: Any
    y_stride: Any
    room: Any


POINTERS = ("w", "scales", "y", "room")


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
        self.rows = b.add(o.rows_0, o.rows_1)
        self.stride, self.behind = scale_words(b, codes, o.blocks, o.phase)

    def emit(self) -> None:
        b, o, group = self.b, self.o, self.codes.group
        self._totals(load=True)
        whole = b.sub(b.sub(o.stop, o.start), b.srem(b.sub(o.stop, o.start), I64(group)))
        middle = b.add(o.start, whole)
        with b.if_then(b.icmp_signed("<", o.start, middle)):
            for i in range(group):
                self._products(b.add(o.start, I64(i)), i, self._buffer(o.start))
            with cgutils.for_range_slice(b, b.add(o.start, I64(group)), middle, I64(group), I64) as (block, _):
                self._scale(b.sub(block, I64(group)), group, block)
            self._scale(b.sub(middle, I64(group)), group, None)
        with cgutils.for_range_slice(b, middle, o.stop, I64(1), I64) as (block, _):
            self._products(block, 0, self._buffer(middle))
            self._scale(block, 1, None, self._buffer(middle))
        self._totals(load=False)

    def _at(self, base: Any, *offsets: Any) -> Any:
        for offset in offsets:
            base = v.at(self.b, base, I64(offset) if isinstance(offset, int) else offset, I8)
        return self.b.bitcast(base, v.PTR)

    def _buffer(self, block: Any) -> Any:
        """Where the sums of the group from ``block`` on go: two places, taken in turn."""
        b, group = self.b, self.codes.group
        turn = b.and_(b.sdiv(b.sub(block, self.o.start), I64(group)), I64(1))
        return self._at(self.o.room, SUMS, b.mul(turn, I64(group * PLANE)))

    def _totals(self, load: bool) -> None:
        """y to the scratch (zeros where it is fresh), or back."""
        b, o = self.b, self.o
        with cgutils.for_range(b, self.rows) as row:
            for p in range(self.panels):
                here = self._at(o.room, TOTALS + 64 * p, b.mul(row.index, I64(LINE)))
                there = self._at(o.y, b.mul(row.index, o.y_stride), 64 * p)
                if not load:
                    v.store(b, v.load(b, V16F, here, 4), there, 4)
                    continue
                with b.if_else(b.icmp_signed("!=", o.fresh, I64(0))) as (sets, adds):
                    with sets:
                        v.store(b, v.constant(V16F, 0.0), here, 4)
                    with adds:
                        v.store(b, v.load(b, V16F, there, 4), here, 4)

    def _products(self, block: Any, plane: int, buffer: Any) -> None:
        """The integer sums of a block for all rows and panels, stored."""
        b, o, t, parts = self.b, self.o, self.tiles, self.codes.parts
        packed = self._at(o.room, PACKED)
        here = b.sub(block, o.start)
        for r, rows in enumerate((o.rows_0, o.rows_1)[:self.row_tiles]):
            before = b.mul(b.sub(o.stop, o.start), I64(LANES * BLOCK * r))
            t.load(ROWS + r, self._at(packed, before, b.mul(here, b.mul(rows, I64(BLOCK)))), I64(BLOCK))
        for p in range(self.panels):
            along = b.mul(block, I64(self.codes.block_bytes))
            codes = self._at(o.w, b.mul(o.blocks, I64(self.codes.block_bytes * p)), along)
            with b.if_then(b.icmp_signed("!=", o.ahead, I64(0))):
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
                t.store(tile, self._at(buffer, plane * PLANE + r * LANES * LINE + 64 * column), I64(LINE))

    def _scale(self, first: Any, count: int, following: Any, buffer: Any = None) -> None:
        """Add the sums of ``count`` blocks to the totals; between the rows make those of the ``following`` group."""
        b = self.b
        buffer = self._buffer(first) if buffer is None else buffer
        blocks = [b.add(first, I64(i)) for i in range(count)]
        scales = [[self.codes.scales(b, self._place(p, block)) for p in range(self.panels)] for block in blocks]
        steps = 1 if following is None else count
        for step in range(steps):
            if following is not None:
                self._products(b.add(following, I64(step)), step, self._buffer(following))
            begin, end = (b.sdiv(b.mul(self.rows, I64(i)), I64(steps)) for i in (step, step + 1))
            with cgutils.for_range_slice(b, begin, end, I64(1), I64) as (row, _):
                self._scale_row(row, blocks, scales, buffer)

    def _scale_row(self, row: Any, blocks: list, scales: list, buffer: Any) -> None:
        b, parts = self.b, self.codes.parts
        along = b.mul(row, I64(LINE))
        places = [self._at(self.o.room, TOTALS + 64 * p, along) for p in range(self.panels)]
        totals = [v.load(b, V16F, place, 4) for place in places]
        for plane, block in enumerate(blocks):
            x = self._x(b.add(b.mul(b.sub(block, self.o.start), I64(MOST_ROWS)), row))
            for p in range(self.panels):
                sums = [v.load(b, V16I, self._at(buffer, plane * PLANE + 64 * (p * parts + part), along), 4)
                        for part in range(parts)]
                totals[p] = self.codes.add(b, totals[p], sums, scales[plane][p], x)
        for place, total in zip(places, totals, strict=True):
            v.store(b, total, place, 4)

    def _place(self, p: int, block: Any) -> Place:
        b, o, codes = self.b, self.o, self.codes
        panel = v.at(b, o.scales, b.mul(self.stride, I64(p)), I16)
        number = b.sdiv(b.add(o.phase, block), I64(SUPER))
        return Place(v.at(b, panel, b.mul(block, I64(codes.words)), I16),
                     v.at(b, panel, b.add(self.behind, b.mul(number, I64(codes.super_words))), I16))

    def _x(self, number: Any) -> XBlock:
        b, room = self.b, self.o.room
        scale = v.load(b, F32, v.at(b, self._at(room, X_SCALES), number, F32), 4)
        return XBlock(v.splat(b, scale, V16F), lambda: v.splat(
            b, v.load(b, I32, v.at(b, self._at(room, X_SUMS), number, I32), 4), V16I))


def scale_words(b: ir.IRBuilder, codes: Codes, blocks: Any, phase: Any) -> tuple[Any, Any]:
    """Words of a panel's scales, and how many of them stand before those of super-blocks."""
    behind = b.mul(blocks, I64(codes.words))
    supers = b.sdiv(b.add(b.add(phase, blocks), I64(SUPER - 1)), I64(SUPER))
    return b.add(behind, b.mul(supers, I64(codes.super_words))), behind


@intrinsic
def pack_rows(typingctx, x, x_scales, x_sums, row, size_0, size_1, blocks, start, stop, room, offset):
    """Rows ``row`` ... of x, blocks start ... stop - 1 of ``blocks``, into a thread's scratch for :func:`codes_block`.

    x int8 codes [rows][k], x_scales f32 [rows][k/32], x_sums i32 [rows][k/16], sums of 16 codes each. Codes become
    [row tile][block][its rows][32], scales and sums of 32 codes [block][MOST_ROWS].
    """
    def codegen(context, b, signature, arguments):
        x, x_scales, x_sums, row, size_0, size_1, blocks, start, stop, room, offset = arguments
        x, x_scales, x_sums, room = (v.data(context, b, signature.args[i], arguments[i]) for i in (0, 1, 2, 9))
        room, count = v.at(b, room, offset, I8), b.sub(stop, start)
        scales, sums = (v.at(b, room, I64(place), I8) for place in (X_SCALES, X_SUMS))
        with cgutils.for_range(b, b.add(size_0, size_1)) as turn:
            second = b.icmp_signed(">=", turn.index, I64(LANES))
            size = b.select(second, size_1, size_0)
            base = b.select(second, b.mul(count, I64(LANES * BLOCK)), I64(0))
            line = b.add(base, b.mul(b.and_(turn.index, I64(LANES - 1)), I64(BLOCK)))
            first = b.add(b.mul(b.add(row, turn.index), blocks), start)
            with cgutils.for_range(b, count) as loop:
                number = b.add(first, loop.index)
                codes = v.load(b, V32B, v.at(b, x, b.mul(number, I64(BLOCK)), I8), 1)
                to = b.add(line, b.mul(loop.index, b.mul(size, I64(BLOCK))))
                v.store(b, codes, v.at(b, room, b.add(I64(PACKED), to), I8), 1)
                to = b.add(b.mul(loop.index, I64(MOST_ROWS)), turn.index)
                v.store(b, v.load(b, F32, v.at(b, x_scales, number, F32), 4), v.at(b, scales, to, F32), 4)
                halves = [v.load(b, I32, v.at(b, x_sums, b.add(b.mul(number, I64(2)), I64(i)), I32), 4) for i in (0, 1)]
                v.store(b, b.add(*halves), v.at(b, sums, to, I32), 4)
        return context.get_dummy_value()

    i = types.intp
    return types.void(x, x_scales, x_sums, i, i, i, i, i, i, room, i), codegen


def codes_block(name: str) -> Any:
    """The intrinsic of a format: y[size_0 + size_1, 16 * panels] (+)= packed rows @ panels of codes, as configured.

    size_0 of 1 to 16 rows, size_1 of 0 to 16, then with 16 in size_0, of :func:`pack_rows`; blocks start ... stop - 1
    of ``blocks``, MOST_BLOCKS at most. w and w_scales (int16 words) are whole matrices, of which panels ``panel`` ...
    are used, ``Codes.wide`` at most; ``phase``: the number of their first block within a super-block. ``fresh``: 1
    sets y, 0 adds to it; ``ahead``: 1 asks for weights in advance. ``room`` uint8 [offset:offset + SCRATCH].
    """
    codes = FORMATS[name]

    @intrinsic
    def block(typingctx, size_0, size_1, panels, fresh, ahead, blocks, w, w_scales, panel, phase, start, stop, y,
              y_offset, y_stride, room, offset):
        def codegen(context, b, signature, arguments):
            (size_0, size_1, panels, fresh, ahead, blocks, w, w_scales, panel, phase, start, stop, y, y_offset,
             y_stride, room, offset) = arguments
            w, w_scales, y, room = (v.data(context, b, signature.args[i], arguments[i]) for i in (6, 7, 12, 15))
            w_start = b.mul(b.mul(panel, blocks), I64(codes.block_bytes))
            scale_start = b.mul(panel, scale_words(b, codes, blocks, phase)[0])
            places = {"w": (w, w_start, I8), "scales": (w_scales, scale_start, I16), "y": (y, y_offset, F32),
                      "room": (room, offset, I8)}
            values = {name: b.bitcast(v.at(b, *place), v.PTR) for name, place in places.items()}
            operands = _Operands(fresh=fresh, ahead=ahead, rows_0=size_0, rows_1=size_1, blocks=blocks, phase=phase,
                                 start=start, stop=stop, y_stride=b.mul(y_stride, I64(4)), **values)
            two = b.zext(b.icmp_signed("!=", size_1, I64(0)), I64)
            shape = b.add(b.mul(two, I64(codes.wide)), b.sub(panels, I64(1)))
            fields = [getattr(operands, field) for field in _Operands.__dataclass_fields__]
            b.call(codes_function(b.module, codes, select.emulated()), [shape, *fields])
            return context.get_dummy_value()

        i = types.intp
        return types.void(i, i, i, i, i, i, w, w_scales, i, i, i, i, y, i, i, room, i), codegen

    return block
