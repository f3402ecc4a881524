"""Columns of cached keys turned into rows of values: a tile of 64 positions and 32 columns, which stays in L1.

Keys stand in panels of 16 positions, positions side by side (see jit/attention.py). Moving bits only, so that what a
position holds is never read as a number here. Offsets are in elements of the array that they belong to.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpillm.jit.isa import vector as v
from mpillm.jit.isa.vector import F32, I8, I32, I64, LANES, V16F, V16H, V16I

COLUMNS = 32           # of a tile
_V4I = ir.VectorType(I32, 4)
#: of four vectors of four words, the words side by side
_ACROSS = [4 * i + k for k in range(4) for i in range(4)]


@intrinsic
def interleave_numbers(typingctx, keys, start, size, column, first, stop, tile):
    """tile f32 [2][64][16] = columns ``column`` ... + 31 of panels ``first`` ... ``stop`` - 1 of keys [4 panels][size].

    ``start``: of the block. Columns beyond ``size`` repeat the last. Of f32 and f16 the halves of the tile have 16
    columns each in order; of bf16 the first has the even ones, the second the odd.
    """
    name = v.FORMAT_OF[keys.dtype]

    def codegen(context, b, signature, arguments):
        keys, start, size, column, first, stop, tile = arguments
        keys, tile = (v.data(context, b, signature.args[i], arguments[i]) for i in (0, 6))
        pair = 2 if name == "bf16" else 1
        last = b.sub(b.sdiv(size, I64(pair)), I64(1))
        with cgutils.for_range_slice(b, first, stop, I64(1), I64) as (panel, _):
            base = b.add(start, b.mul(b.mul(panel, I64(LANES)), size))
            for half in range(1 if name == "bf16" else 2):
                rows = [_row(b, name, keys, base, b.add(b.sdiv(column, I64(pair)), I64(16 * half + i)), last)
                        for i in range(LANES)]
                for number, values in enumerate(_transposed(b, name, rows)):
                    to = b.add(b.mul(b.add(b.mul(panel, I64(LANES)), I64(number)), I64(LANES)), I64(1024 * half))
                    for i, vector in enumerate(values):
                        v.store(b, vector, v.at(b, tile, b.add(to, I64(1024 * i)), F32), 4)
        return context.get_dummy_value()

    i = types.intp
    return types.void(keys, i, i, i, i, i, tile), codegen


def _row(b: ir.IRBuilder, name: str, keys: Any, base: Any, row: Any, last: Any) -> Any:
    """The address of 16 positions of a column (of bf16: of two), at most of the last."""
    row = b.select(b.icmp_signed("<", row, last), row, last)
    pair = 2 if name == "bf16" else 1
    return v.at(b, keys, b.add(base, b.mul(row, I64(LANES * pair))), v.ELEMENT[name])


def _transposed(b: ir.IRBuilder, name: str, rows: list[Any]) -> list[list[Any]]:
    """For each of 16 positions the 16 rows' elements as float32; of bf16 two vectors, of even and odd columns."""
    word = {"f32": I32, "bf16": I32, "f16": v.I16}[name]
    four = ir.VectorType(word, 4)
    found: list[list[Any]] = []
    for lane in range(0, LANES, 4):
        # Vector i has rows i, 4 + i, 8 + i and 12 + i in its quarters, four positions of each.
        parts = [_joined(b, [v.load(b, four, v.at(b, rows[4 * g + i], I64(lane), word), 2) for g in range(4)])
                 for i in range(4)]
        for vector in _quarters_turned(b, parts):
            if name == "bf16":
                halves = b.shl(vector, v.constant(V16I, 16)), b.and_(vector, v.constant(V16I, 0xFFFF0000))
                found.append([b.bitcast(half, V16F) for half in halves])
            else:
                found.append([b.bitcast(vector, V16F) if name == "f32" else b.fpext(b.bitcast(vector, V16H), V16F)])
    return found


def _quarters_turned(b: ir.IRBuilder, parts: list[Any]) -> list[Any]:
    """Four vectors of 16 turned within each quarter: vector k has element k of each of the four."""
    def order(picks: list[int]) -> ir.Constant:
        lanes = [pick % 4 + 4 * quarter + 16 * (pick // 4) for quarter in range(4) for pick in picks]
        return ir.Constant(ir.VectorType(I32, LANES), lanes)

    low, high = order([0, 4, 1, 5]), order([2, 6, 3, 7])
    pairs = [b.shuffle_vector(parts[i], parts[i + 1], o) for i in (0, 2) for o in (low, high)]
    first, second = order([0, 1, 4, 5]), order([2, 3, 6, 7])
    return [b.shuffle_vector(pairs[i], pairs[i + 2], o) for i in (0, 1) for o in (first, second)]


def _joined(b: ir.IRBuilder, fours: list[Any]) -> Any:
    """Four vectors of four, one after the other."""
    eights = [b.shuffle_vector(fours[i], fours[i + 1], ir.Constant(ir.VectorType(I32, 8), list(range(8))))
              for i in (0, 2)]
    return b.shuffle_vector(*eights, ir.Constant(ir.VectorType(I32, LANES), list(range(LANES))))


@intrinsic
def interleave_codes(typingctx, keys, start, size, block, first, stop, tile):
    """tile int8 [2][64][16] = codes of columns 32 ``block`` ... + 31 of panels ``first`` ... ``stop`` - 1.

    Keys are int8 [4 panels][size / 32][8][16][4], see jit/attention.py; ``start``: of the cache block's codes.
    """
    def codegen(context, b, signature, arguments):
        keys, start, size, block, first, stop, tile = arguments
        keys, tile = (v.data(context, b, signature.args[i], arguments[i]) for i in (0, 6))
        across = ir.Constant(ir.VectorType(I32, LANES), _ACROSS)
        with cgutils.for_range_slice(b, first, stop, I64(1), I64) as (panel, _):
            base = b.add(b.mul(b.mul(panel, I64(LANES)), size), b.mul(block, I64(512)))
            source, target = v.at(b, keys, b.add(start, base), I8), v.at(b, tile, b.mul(panel, I64(256)), I8)
            for half in range(2):
                for lane in range(0, LANES, 4):
                    parts = [v.load(b, _V4I, v.at(b, source, I64(64 * (4 * half + quad) + 4 * lane), I8), 1)
                             for quad in range(4)]
                    joined = _joined(b, parts)
                    turned = b.shuffle_vector(joined, joined, across)
                    v.store(b, turned, v.at(b, target, I64(1024 * half + 16 * lane), I8), 1)
        return context.get_dummy_value()

    i = types.intp
    return types.void(keys, i, i, i, i, i, tile), codegen
