"""Building blocks of tier amx: tile products of bf16 and of quantisation codes, with packed panels.

A tile is 16 rows of 64 bytes. Tiles 0-3 hold sums (2 x row of tiles + panel), 4 and 5 rows of activations, 6 and 7
panels of weights. How many rows the tiles have is configured (:func:`configure`), by each thread itself.
Source: Intel 64 and IA-32 Architectures Software Developer's Manual, vol. 2 (LDTILECFG, TDPBF16PS, TDPBSSD, TDPBSUD).

``Tiles`` emits the instructions; ``EmulatedTiles`` keeps tiles in memory and does exactly their arithmetic, for tests.
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
from mpillm.jit.isa.avx512 import flush, four_products, halves
from mpillm.jit.isa.vector import F32, I8, I16, I32, I64, LANES, V16F, V16I

VOID = ir.VoidType()
TILE, CONFIG_BYTES = 1024, 64
#: a thread's scratch, bytes from its start, 64-byte aligned: tiles and configuration that an emulation keeps,
#: the configuration as it is loaded, and from ROOM on what amx_codes.py says, or sums of bf16 products, 4096 bytes
#: for 32 rows of two panels
LIVE, CONFIG, ROOM = 8192, 8256, 8320
SCRATCH = ROOM + (512 << 10)
SUM, ROWS, PANELS = 0, 4, 6
#: bytes of weights asked for in advance, in each panel
AHEAD = 4096


class Tiles:
    """Emitters of the instructions; ``room`` is the thread's scratch, which the hardware does not need."""

    def __init__(self, b: ir.IRBuilder, room: Any) -> None:
        self.b, self.room = b, room

    def configure(self, address: Any) -> None:
        v.call(self.b, "llvm.x86.ldtilecfg", VOID, [address])

    def release(self) -> None:
        v.call(self.b, "llvm.x86.tilerelease", VOID, [])

    def zero(self, tile: int) -> None:
        v.call(self.b, "llvm.x86.tilezero", VOID, [I8(tile)])

    def load(self, tile: int, address: Any, stride: Any) -> None:
        v.call(self.b, "llvm.x86.tileloadd64", VOID, [I8(tile), address, stride])

    def stream(self, tile: int, address: Any, stride: Any) -> None:
        """Load what is not soon wanted again, without a place in the first cache for long."""
        v.call(self.b, "llvm.x86.tileloaddt164", VOID, [I8(tile), address, stride])

    def store(self, tile: int, address: Any, stride: Any) -> None:
        v.call(self.b, "llvm.x86.tilestored64", VOID, [I8(tile), address, stride])

    def multiply(self, kind: str, into: int, rows: int, panel: int) -> None:
        """``kind`` is tdpbf16ps, tdpbssd (signed x signed) or tdpbsud (signed x unsigned)."""
        v.call(self.b, f"llvm.x86.{kind}", VOID, [I8(into), I8(rows), I8(panel)])


class EmulatedTiles(Tiles):
    """The same in memory, by functions that a module holds once."""

    def configure(self, address: Any) -> None:
        to = v.at(self.b, self.room, I64(LIVE), I8)
        v.store(self.b, v.load(self.b, V16I, address, 1), to, 1)

    def release(self) -> None:
        v.store(self.b, v.constant(V16I, 0), v.at(self.b, self.room, I64(LIVE), I8), 1)

    def zero(self, tile: int) -> None:
        with cgutils.for_range(self.b, I64(LANES)) as row:
            v.store(self.b, v.constant(V16I, 0), _line(self.b, self.room, I64(tile), row.index), 1)

    def load(self, tile: int, address: Any, stride: Any) -> None:
        self._call("load", _emit_load, [self.room, I64(tile), address, stride])

    def stream(self, tile: int, address: Any, stride: Any) -> None:
        self.load(tile, address, stride)

    def store(self, tile: int, address: Any, stride: Any) -> None:
        self._call("store", _emit_store, [self.room, I64(tile), address, stride])

    def multiply(self, kind: str, into: int, rows: int, panel: int) -> None:
        self._call(kind, lambda b, *a: _emit_multiply(b, kind, *a), [self.room, I64(into), I64(rows), I64(panel)])

    def _call(self, name: str, emit: Callable, arguments: list) -> None:
        module, symbol = self.b.module, f"mpillm_emulated_tile_{name}"
        if symbol not in module.globals:
            kinds = [v.PTR if value.type.is_pointer else I64 for value in arguments]
            function = ir.Function(module, ir.FunctionType(VOID, kinds), symbol)
            function.linkage = "linkonce_odr"
            function.attributes.add("noinline")
            b = ir.IRBuilder(function.append_basic_block("entry"))
            emit(b, *function.args)
            b.ret_void()
        values = [self.b.bitcast(value, v.PTR) if value.type.is_pointer else value for value in arguments]
        self.b.call(module.globals[symbol], values)


def tiles(b: ir.IRBuilder, room: Any, emulate: bool) -> Tiles:
    return (EmulatedTiles if emulate else Tiles)(b, room)


def _line(b: ir.IRBuilder, room: Any, tile: Any, row: Any) -> Any:
    """The address of a row of an emulated tile."""
    return v.at(b, room, b.add(b.mul(tile, I64(TILE)), b.mul(row, I64(64))), I8)


def _shape(b: ir.IRBuilder, room: Any, tile: Any) -> tuple[Any, Any]:
    """(rows, words of a row) as configured."""
    rows = b.zext(v.load(b, I8, v.at(b, room, b.add(tile, I64(LIVE + 48)), I8), 1), I64)
    at = v.at(b, room, b.add(b.mul(tile, I64(2)), I64(LIVE + 16)), I8)
    return rows, b.lshr(b.zext(v.load(b, I16, at, 1), I64), I64(2))


def _emit_load(b: ir.IRBuilder, room: Any, tile: Any, address: Any, stride: Any) -> None:
    rows, words = _shape(b, room, tile)
    with cgutils.for_range(b, I64(LANES)) as row:
        v.store(b, v.constant(V16I, 0), _line(b, room, tile, row.index), 1)
    _copy(b, rows, words, lambda row: (v.at(b, address, b.mul(row, stride), I8), _line(b, room, tile, row)))


def _emit_store(b: ir.IRBuilder, room: Any, tile: Any, address: Any, stride: Any) -> None:
    rows, words = _shape(b, room, tile)
    _copy(b, rows, words, lambda row: (_line(b, room, tile, row), v.at(b, address, b.mul(row, stride), I8)))


def _copy(b: ir.IRBuilder, rows: Any, words: Any, ends: Callable) -> None:
    with cgutils.for_range(b, rows) as row:
        source, target = ends(row.index)
        with cgutils.for_range(b, words) as word:
            value = v.load(b, I32, v.at(b, source, word.index, I32), 1)
            v.store(b, value, v.at(b, target, word.index, I32), 1)


def _emit_multiply(b: ir.IRBuilder, kind: str, room: Any, into: Any, left: Any, right: Any) -> None:
    """For every row of ``into``; what a tile does not hold beyond its shape is 0."""
    rows, _ = _shape(b, room, into)
    steps = _shape(b, room, left)[1]
    sums = [cgutils.alloca_once(b, V16F) for _ in range(2)] if kind == "tdpbf16ps" else [cgutils.alloca_once(b, V16I)]
    with cgutils.for_range(b, rows) as row:
        at = _line(b, room, into, row.index)
        for total in sums:
            b.store(v.constant(V16F, 0.0) if kind == "tdpbf16ps" else v.load(b, V16I, at, 1), total)
        with cgutils.for_range(b, steps) as k:
            x = v.load(b, I32, v.at(b, _line(b, room, left, row.index), k.index, I32), 1)
            x, w = v.splat(b, x, V16I), v.load(b, V16I, _line(b, room, right, k.index), 1)
            if kind == "tdpbf16ps":
                # Even and odd halves are summed apart, each product by one fma.
                for total, one, other in zip(sums, halves(b, x), halves(b, w), strict=True):
                    b.store(flush(b, v.fma(b, one, other, b.load(total, typ=V16F))), total)
            else:
                signed = (True, kind == "tdpbssd")
                b.store(four_products(b, b.load(sums[0], typ=V16I), x, w, signed), sums[0])
        if kind == "tdpbf16ps":
            both = flush(b, b.fadd(*(b.load(total, typ=V16F) for total in sums)))
            before = flush(b, v.load(b, V16F, at, 1))
            v.store(b, flush(b, b.fadd(before, both)), at, 1)
        else:
            v.store(b, b.load(sums[0], typ=V16I), at, 1)


@intrinsic
def configure(typingctx, room, offset, size_0, size_1, row_bytes, panel_rows):
    """Load this thread's tile configuration: the rows of both row tiles (0: unused) and their bytes, rows of a panel's.

    ``room`` uint8 [offset:offset + SCRATCH] is the thread's scratch. All tiles become zero.
    """
    def codegen(context, b, signature, arguments):
        room, offset, size_0, size_1, row_bytes, panel_rows = arguments
        room = v.at(b, v.data(context, b, signature.args[0], room), offset, I8)
        config = v.at(b, room, I64(CONFIG), I8)
        v.store(b, v.constant(V16I, 0), config, 1)
        v.store(b, I8(1), config, 1)                     # palette 1
        unused = b.icmp_signed("==", size_1, I64(0))
        sizes = [b.trunc(size, I8) for size in (size_0, b.select(unused, I64(LANES), size_1), panel_rows)]
        wide, narrow = I16(64), b.trunc(row_bytes, I16)
        shapes = [(sizes[0], wide)] * 2 + [(sizes[1], wide)] * 2 + [(sizes[0], narrow), (sizes[1], narrow)]
        for tile, (rows, columns) in enumerate(shapes + [(sizes[2], wide)] * 2):
            v.store(b, columns, v.at(b, config, I64(16 + 2 * tile), I8), 1)
            v.store(b, rows, v.at(b, config, I64(48 + tile), I8), 1)
        tiles(b, room, select.emulated()).configure(b.bitcast(config, v.PTR))
        return context.get_dummy_value()

    integer = types.intp
    return types.void(room, integer, integer, integer, integer, integer), codegen


@intrinsic
def release(typingctx, room, offset):
    """Give this thread's tiles back at the end of an operation."""
    def codegen(context, b, signature, arguments):
        room = v.at(b, v.data(context, b, signature.args[0], arguments[0]), arguments[1], I8)
        tiles(b, room, select.emulated()).release()
        return context.get_dummy_value()

    return types.void(room, types.intp), codegen


def shapes_function(module: ir.Module, symbol: str, kinds: list, shapes: list, emit: Callable) -> ir.Function:
    """A function whose first argument chooses one of ``shapes``, for each of which ``emit`` fills a block."""
    if symbol in module.globals:
        return module.globals[symbol]
    function = ir.Function(module, ir.FunctionType(VOID, [I64, *kinds]), symbol)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    b = ir.IRBuilder(function.append_basic_block("entry"))
    done = function.append_basic_block("done")
    choice = b.switch(function.args[0], done)
    for number, shape in enumerate(shapes):
        block = function.append_basic_block(f"shape{number}")
        choice.add_case(I64(number), block)
        b.position_at_end(block)
        emit(b, shape, *function.args[1:])
        b.branch(done)
    b.position_at_end(done)
    b.ret_void()
    return function


def bf16_function(module: ir.Module, emulate: bool) -> ir.Function:
    """The LLVM function of :func:`bf16_block`: shapes (row tiles, panels, whether to prefetch).

    (shape, fresh, x of both row tiles, bytes from k tile to k tile in each, w, panel_stride, k tiles, y, y_stride,
    room); strides in bytes.
    """
    kinds = [I64, v.PTR, v.PTR, I64, I64, v.PTR, I64, I64, v.PTR, I64, v.PTR]
    shapes = [(r, p, ahead) for r in (1, 2) for p in (1, 2) for ahead in (False, True)]
    return shapes_function(module, "mpillm_bf16_block_amx", kinds, shapes,
                           lambda b, shape, *a: _emit_bf16(b, shape, emulate, *a))


def _emit_bf16(b: ir.IRBuilder, shape: tuple, emulate: bool, fresh: Any, x_0: Any, x_1: Any, step_0: Any, step_1: Any,
               w: Any, panel_stride: Any, k_tiles: Any, y: Any, y_stride: Any, room: Any) -> None:
    row_tiles, panels, ahead = shape
    t = tiles(b, room, emulate)
    xs, steps = (x_0, x_1)[:row_tiles], (step_0, step_1)
    ws = [v.at(b, w, b.mul(panel_stride, I64(p)), I8) for p in range(panels)]
    below = b.mul(y_stride, I64(LANES))
    sums = [(SUM + 2 * r + p, b.bitcast(v.at(b, y, b.add(b.mul(below, I64(r)), I64(64 * p)), I8), v.PTR))
            for r in range(row_tiles) for p in range(panels)]
    with b.if_else(b.icmp_signed("!=", fresh, I64(0))) as (sets, again):
        with sets:
            for tile, _ in sums:
                t.zero(tile)
        with again:
            for tile, address in sums:
                t.load(tile, address, y_stride)
    with cgutils.for_range(b, k_tiles) as loop:
        w_at = [v.at(b, panel, b.mul(loop.index, I64(TILE)), I8) for panel in ws]
        places = {ROWS + r: v.at(b, x, b.mul(loop.index, steps[r]), I8) for r, x in enumerate(xs)}
        places |= {PANELS + p: address for p, address in enumerate(w_at)}
        for address in w_at if ahead else ():
            for line in range(0, TILE, 64):
                v.prefetch(b, address, AHEAD + line)
        # A tile is loaded just before its first product, so that loads and products take turns.
        for r in range(row_tiles):
            for p in range(panels):
                for tile in (PANELS + p, ROWS + r):
                    if tile in places:
                        load = t.stream if tile < PANELS else t.load
                        load(tile, b.bitcast(places.pop(tile), v.PTR), I64(64))
                t.multiply("tdpbf16ps", SUM + 2 * r + p, ROWS + r, PANELS + p)
    for tile, address in sums:
        t.store(tile, address, y_stride)


@intrinsic
def bf16_block(typingctx, size_0, size_1, panels, fresh, ahead, x, row, k, w, panel, panel_stride, k_start, k_stop, y,
               y_offset, y_stride, room, offset):
    """y[size_0 + size_1, 16 * panels] (+)= x[row:, k_start:k_stop] @ bf16 panels; as tiles are configured.

    size_0 of 1 to 16 rows, size_1 of 0 to 16, then with 16 in size_0; 1 or 2 panels; ``row`` a multiple of 16.
    x uint16 [row tile][ceil(k / 32)][its rows][32], w uint16 [panels][k/2][16][2], k_start and k_stop in 32s, a
    panel_stride of elements that covers them. ``fresh``: 1 sets y, 0 adds to it; ``ahead``: 1 asks for weights in
    advance.
    """
    def codegen(context, b, signature, arguments):
        (size_0, size_1, panels, fresh, ahead, x, row, k, w, panel, panel_stride, k_start, k_stop, y, y_offset,
         y_stride, room, offset) = arguments
        x, w, y, room = (v.data(context, b, signature.args[i], arguments[i]) for i in (5, 8, 13, 16))
        row_length = b.and_(b.add(k, I64(31)), I64(-32))
        xs = []
        for above, size in ((row, size_0), (b.add(row, I64(LANES)), size_1)):
            at = b.add(b.mul(above, row_length), b.mul(k_start, size))
            xs.append(b.bitcast(v.at(b, x, at, I16), v.PTR))
        steps = [b.mul(size, I64(64)) for size in (size_0, size_1)]
        w_at = b.add(b.mul(panel, panel_stride), b.mul(k_start, I64(LANES)))
        two = b.zext(b.icmp_signed("!=", size_1, I64(0)), I64)
        shape = b.add(b.add(b.mul(two, I64(4)), b.mul(b.sub(panels, I64(1)), I64(2))), ahead)
        b.call(bf16_function(b.module, select.emulated()), [
            shape, fresh, *xs, *steps, b.bitcast(v.at(b, w, w_at, I16), v.PTR),
            b.mul(panel_stride, I64(2)), b.sdiv(b.sub(k_stop, k_start), I64(32)),
            b.bitcast(v.at(b, y, y_offset, F32), v.PTR), b.mul(y_stride, I64(4)),
            b.bitcast(v.at(b, room, offset, I8), v.PTR)])
        return context.get_dummy_value()

    i = types.intp
    return types.void(i, i, i, i, i, x, i, i, w, i, i, i, i, y, i, i, room, i), codegen
