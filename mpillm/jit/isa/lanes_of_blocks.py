"""Blocks of quantised formats, as GGUF files hold them, gathered from 16 rows into the lanes of a panel.

Bytes of a stored block (ggml-common.h): q8_0 is d, 32 int8; q4_0 d, 16 of two codes; q4_1 d, m, 16; q4_K d,
dmin, 12 of scales of six bits, 128; q6_K 128 of low nibbles, 64 of two high bits, 16 int8 scales, d.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpillm.jit.isa import vector as v
from mpillm.jit.isa.interleave import turned_words
from mpillm.jit.isa.quantised import SHAPES
from mpillm.jit.isa.vector import I8, I16, I32, I64, LANES, V16I

V16B, V16W = ir.VectorType(I8, LANES), ir.VectorType(I16, LANES)


class _Lanes:
    """Reads from 16 rows at once and writes those lanes of a panel that are ``wanted``, None for all."""

    def __init__(self, b: ir.IRBuilder, rows: list[Any], wanted: Any) -> None:
        self.b, self.rows, self.wanted = b, rows, wanted
        self.bad = v.constant(ir.VectorType(v.I1, LANES), 0)

    def gather(self, kind: ir.VectorType, offset: Any) -> Any:
        """An element at byte ``offset`` of each row."""
        b, values = self.b, ir.Constant(kind, ir.Undefined)
        for lane, row in enumerate(self.rows):
            values = b.insert_element(values, v.load(b, kind.element, v.at(b, row, offset, I8), 1), I32(lane))
        return values

    def put(self, values: Any, address: Any) -> None:
        """Store the lanes that are wanted; what stands in the others stays."""
        if self.wanted is not None:
            values = self.b.select(self.wanted, values, v.load(self.b, values.type, address, 1))
        v.store(self.b, values, address, 1)

    def words(self, offset: Any, count: int) -> list[Any]:
        """``count`` words from byte ``offset`` of each row on."""
        return turned_words(self.b, [v.at(self.b, row, offset, I8) for row in self.rows], count)

    def copy(self, offset: int, count: int, address: Any) -> None:
        """``count`` words from byte ``offset`` of each wanted row to its lane, word i 64 * i bytes on."""
        for i, word in enumerate(self.words(I64(offset), count)):
            self.put(word, v.at(self.b, address, I64(64 * i), I8))

    def put_half(self, offset: Any, address: Any) -> None:
        """Copy a float16, and mark lanes where it is not finite."""
        b, halves = self.b, self.gather(V16W, offset)
        upper = v.constant(V16W, 0x7C00)
        self.bad = b.or_(self.bad, b.icmp_unsigned("==", b.and_(halves, upper), upper))
        self.put(halves, address)


@intrinsic
def put_sixteen(typingctx, kind, raw, at, row_bytes, row, low, high, sub, w, to, scales, own, above):
    """Block ``sub`` of the (super-)block at byte ``at`` of rows into lanes low ... high - 1 of a panel.

    ``kind`` is a format's number; lane i is row ``row`` + i of ``raw``, uint8 rows of ``row_bytes``. Codes go to
    bytes ``to`` and following of ``w``, scales to bytes ``own`` of ``scales``, those of the super-block to
    ``above``. Returns how many lanes have a scale that is not finite.
    """
    def codegen(context, b, signature, arguments):
        (kind, raw, at, row_bytes, row, low, high, sub, w, to, scales, own, above) = arguments
        raw, w, scales = (v.data(context, b, signature.args[i], arguments[i]) for i in (1, 8, 10))
        rows = []
        for lane in range(LANES):
            # Lanes outside read a row that is there.
            inside = b.select(b.icmp_signed("<", I64(lane), low), low, I64(lane))
            inside = b.select(b.icmp_signed(">=", inside, high), b.sub(high, I64(1)), inside)
            rows.append(v.at(b, raw, b.add(b.mul(b.add(row, inside), row_bytes), at), I8))
        numbers, (first, stop) = v.lane_numbers(), [v.splat(b, b.trunc(end, I32), V16I) for end in (low, high)]
        wanted = b.and_(b.icmp_signed(">=", numbers, first), b.icmp_signed("<", numbers, stop))
        places = v.at(b, w, to, I8), v.at(b, scales, own, I8), v.at(b, scales, above, I8)
        whole, found = b.icmp_signed("==", b.sub(high, low), I64(LANES)), cgutils.alloca_once_value(b, I64(0))
        done = b.append_basic_block("done")
        choice = b.switch(kind, done)
        for name, shape in SHAPES.items():
            case = b.append_basic_block(name)
            choice.add_case(I64(shape.number), case)
            b.position_at_end(case)
            # All lanes is what is usual, and stores of some are slow.
            with b.if_else(whole, likely=True) as branches:
                for branch, some in zip(branches, (None, wanted), strict=True):
                    with branch:
                        lanes = _Lanes(b, rows, some)
                        _FORMATS[name](b, lanes, sub, *places)
                        bad = lanes.bad if some is None else b.and_(lanes.bad, some)
                        b.store(b.sext(v.tree(b, b.zext(bad, V16I), b.add), I64), found)
            b.branch(done)
        b.position_at_end(done)
        return b.load(found, typ=I64)

    i = types.intp
    return types.intp(i, raw, i, i, i, i, i, i, w, i, scales, i, i), codegen


def _bytes(b: ir.IRBuilder, address: Any, offset: int) -> Any:
    return v.at(b, address, I64(offset), I8)


def _plain(first: int, vectors: int, minimum: bool) -> Callable[..., None]:
    """q8_0, q4_0, q4_1: codes from byte ``first`` on are a panel's words already."""
    def emit(b: ir.IRBuilder, lanes: _Lanes, sub: Any, w: Any, own: Any, above: Any) -> None:
        lanes.copy(first, vectors, w)
        lanes.put_half(I64(0), own)
        if minimum:
            lanes.put_half(I64(2), _bytes(b, own, 2 * LANES))

    return emit


def _nibbles(b: ir.IRBuilder, lanes: _Lanes, first: Any, shift: Any, w: Any) -> None:
    """32 codes of four bits from bytes ``first`` ... + 31, shifted by ``shift``."""
    shifts, mask = v.splat(b, b.trunc(shift, I32), V16I), v.constant(V16I, 0x0F0F0F0F)
    words = lanes.words(first, 8)
    for i in range(4):
        low, high = (b.and_(b.lshr(words[i + j], shifts), mask) for j in (0, 4))
        lanes.put(b.or_(low, b.shl(high, v.constant(V16I, 4))), _bytes(b, w, 64 * i))


def _q4_k(b: ir.IRBuilder, lanes: _Lanes, sub: Any, w: Any, own: Any, above: Any) -> None:
    first = b.add(I64(16), b.mul(b.lshr(sub, I64(1)), I64(32)))
    _nibbles(b, lanes, first, b.mul(b.and_(sub, I64(1)), I64(4)), w)
    # Four bytes of scales, four of minima, four with the low four bits of both for blocks 4 to 7.
    shift = v.splat(b, b.trunc(b.mul(b.and_(sub, I64(3)), I64(8)), I32), V16I)
    scale, least, lower = (b.and_(b.lshr(word, shift), v.constant(V16I, 255)) for word in lanes.words(I64(0), 4)[1:])
    early = b.icmp_unsigned("<", sub, I64(4))

    def number(six: Any, four: Any) -> Any:
        upper = b.shl(b.lshr(six, v.constant(V16I, 6)), v.constant(V16I, 4))
        return b.select(early, b.and_(six, v.constant(V16I, 63)), b.or_(upper, four))

    lanes.put(b.trunc(number(scale, b.and_(lower, v.constant(V16I, 15))), V16B), own)
    lanes.put(b.trunc(number(least, b.lshr(lower, v.constant(V16I, 4))), V16B), _bytes(b, own, LANES))
    lanes.put_half(I64(0), above)
    lanes.put_half(I64(2), _bytes(b, above, 2 * LANES))


def _q6_k(b: ir.IRBuilder, lanes: _Lanes, sub: Any, w: Any, own: Any, above: Any) -> None:
    half, quarter = b.lshr(sub, I64(2)), b.and_(sub, I64(3))
    first = b.add(b.mul(half, I64(64)), b.mul(b.and_(sub, I64(1)), I64(32)))
    _nibbles(b, lanes, first, b.mul(b.lshr(quarter, I64(1)), I64(4)), w)
    first = b.add(I64(128), b.mul(half, I64(32)))
    shift = v.splat(b, b.trunc(b.mul(quarter, I64(2)), I32), V16I)
    words = lanes.words(first, 8)
    for i in range(2):
        bits = v.constant(V16I, 0)
        for quad in range(4):
            two = b.lshr(words[4 * i + quad], shift)
            two = b.and_(two, v.constant(V16I, 0x03030303))
            bits = b.or_(bits, b.shl(two, v.constant(V16I, 2 * quad)))
        lanes.put(bits, _bytes(b, w, 64 * (4 + i)))
    both = lanes.gather(V16W, b.add(I64(192), b.mul(sub, I64(2))))
    lanes.put(b.trunc(both, V16B), own)
    lanes.put(b.trunc(b.lshr(both, v.constant(V16W, 8)), V16B), _bytes(b, own, LANES))
    lanes.put_half(I64(208), above)


_FORMATS: dict[str, Callable[..., None]] = {
    "q8_0": _plain(2, 8, False), "q4_0": _plain(2, 4, False), "q4_1": _plain(4, 4, True),
    "q4_K": _q4_k, "q6_K": _q6_k}
