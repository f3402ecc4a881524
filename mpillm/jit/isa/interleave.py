"""Rows turned into columns: words of 16 stored rows into the lanes of a panel, columns of cached keys into values.

Keys stand in panels of 16 positions, positions side by side (see jit/attention.py); a tile of 64 positions and 32
columns stays in L1. Moving bits only, so that what a position holds is never read as a number here. Offsets are in
elements of the array that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpillm.jit.isa import vector as v
from mpillm.jit.isa.select import at_least
from mpillm.jit.isa.vector import F32, HALF, I8, I32, I64, LANES

COLUMNS = 32           # of a tile
SPREAD, TURNED = 64, 8           # words that are read of each row at a time, and that are turned at a time
PAIR = {"bf16": 2}     # columns that stand together in a row of a panel
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
        step, last = I64(LANES * PAIR.get(name, 1)), b.sub(b.sdiv(size, I64(PAIR.get(name, 1))), I64(1))
        row = b.sdiv(column, I64(PAIR.get(name, 1)))
        inside = b.icmp_signed("<=", b.add(column, I64(COLUMNS)), size)
        with cgutils.for_range_slice(b, first, stop, I64(1), I64) as (panel, _):
            base = b.add(start, b.mul(b.mul(panel, I64(LANES)), size))
            target = v.at(b, tile, b.mul(panel, I64(LANES * LANES)), F32)
            with b.if_else(inside, likely=True) as (usual, at_the_end):
                with usual:
                    front = v.at(b, keys, b.add(base, b.mul(row, step)), v.ELEMENT[name])
                    _turn_panel(b, name, lambda i: v.at(b, front, I64(i * step.constant), v.ELEMENT[name]), target)
                with at_the_end:
                    def clamped(i):
                        at = b.add(row, I64(i))
                        at = b.select(b.icmp_signed("<", at, last), at, last)
                        return v.at(b, keys, b.add(base, b.mul(at, step)), v.ELEMENT[name])

                    _turn_panel(b, name, clamped, target)
        return context.get_dummy_value()

    i = types.intp
    return types.void(keys, i, i, i, i, i, tile), codegen


def _turn_panel(b: ir.IRBuilder, name: str, row: Callable[[int], Any], target: Any) -> None:
    """A panel's 16 positions of 32 columns, into both halves of the tile; ``row(i)``: address of the panel's row i."""
    for half in range(1 if name == "bf16" else 2):
        rows = [row(16 * half + i) for i in range(LANES)]
        # As many lanes at a time as a register has: what is turned stays in registers.
        lanes = LANES if at_least("avx512") else 8
        for column in range(0, LANES, lanes):
            for position, values in enumerate(_transposed(b, name, rows[column:column + lanes])):
                for i, vector in enumerate(values):
                    to = I64(1024 * (half + i) + LANES * position + column)
                    v.store(b, vector, v.at(b, target, to, F32), 4)


def _transposed(b: ir.IRBuilder, name: str, rows: list[Any]) -> Iterator[list[Any]]:
    """For each of 16 positions the rows' elements as float32; of bf16 two vectors, of even and odd columns."""
    word = v.I16 if name == "f16" else I32
    four, floats = ir.VectorType(word, 4), ir.VectorType(F32, len(rows))
    for lane in range(0, LANES, 4):
        # Vector i has rows i, 4 + i ... in its quarters, four positions of each.
        parts = [_joined(b, [v.load(b, four, v.at(b, row, I64(lane), word), 2) for row in rows[i::4]])
                 for i in range(4)]
        for vector in _quarters_turned(b, parts):
            if name == "bf16":
                words = vector.type
                halves = b.shl(vector, v.constant(words, 16)), b.and_(vector, v.constant(words, 0xFFFF0000))
                yield [b.bitcast(half, floats) for half in halves]
            elif name == "f32":
                yield [b.bitcast(vector, floats)]
            else:
                yield [b.fpext(b.bitcast(vector, ir.VectorType(HALF, len(rows))), floats)]


def _quarters_turned(b: ir.IRBuilder, parts: list[Any]) -> list[Any]:
    """Four vectors turned within each four lanes: vector k has element k of each of the four."""
    lanes = parts[0].type.count

    def order(picks: list[int]) -> ir.Constant:
        numbers = [pick % 4 + quarter + lanes * (pick // 4) for quarter in range(0, lanes, 4) for pick in picks]
        return ir.Constant(ir.VectorType(I32, lanes), numbers)

    low, high = order([0, 4, 1, 5]), order([2, 6, 3, 7])
    pairs = [b.shuffle_vector(parts[i], parts[i + 1], o) for i in (0, 2) for o in (low, high)]
    first, second = order([0, 1, 4, 5]), order([2, 3, 6, 7])
    return [b.shuffle_vector(pairs[i], pairs[i + 2], o) for i in (0, 1) for o in (first, second)]


def _joined(b: ir.IRBuilder, vectors: list[Any]) -> Any:
    """Vectors one after the other."""
    while len(vectors) > 1:
        order = ir.Constant(ir.VectorType(I32, 2 * vectors[0].type.count), list(range(2 * vectors[0].type.count)))
        vectors = [b.shuffle_vector(*vectors[i:i + 2], order) for i in range(0, len(vectors), 2)]
    return vectors[0]


def turned_words(b: ir.IRBuilder, rows: list[Any], count: int) -> list[Any]:
    """Words 0 ... ``count`` - 1, a multiple of 4, of 16 rows of bytes: of each a vector of 16, a lane of every row."""
    lanes, found = LANES if at_least("avx512") else 8, []       # as many at a time as a register has
    for first in range(0, count, 4):
        halves = []
        for column in range(0, LANES, lanes):
            parts = [_joined(b, [v.load(b, _V4I, v.at(b, row, I64(4 * first), I8), 1)
                                 for row in rows[column + i:column + lanes:4]]) for i in range(4)]
            halves.append(_quarters_turned(b, parts))
        found += [_joined(b, list(parts)) for parts in zip(*halves, strict=True)]
    return found


@intrinsic
def spread_panel(typingctx, x, start, words, w, to, low, high):
    """w[to + 16 * i + n] = x[start + n * words + i] for 16 rows n and i < words // SPREAD * SPREAD, of 16 or 32 bits.

    Returns how many have all bits of ``low`` set, and how many those of ``high`` if it is not 0.
    """
    def codegen(context, b, signature, arguments):
        x, w = (v.data(context, b, signature.args[i], arguments[i]) for i in (0, 3))
        start, words, to = (arguments[i] for i in (1, 2, 4))
        word = context.get_value_type(signature.args[0].dtype)
        pairs = word.width == 16
        size, each = word.width // 8, ir.VectorType(word, LANES)
        # Rows may lie a power of two apart, where few of their lines stay in cache: each line is read at once.
        lines = cgutils.alloca_once(b, I8, size=LANES * SPREAD * size)
        near = [v.at(b, lines, I64(SPREAD * size * lane), I8) for lane in range(LANES)]
        rows = [v.at(b, x, b.add(start, b.mul(words, I64(lane))), word) for lane in range(LANES)]
        counts = cgutils.alloca_once_value(b, v.constant(v.V16I, 0))
        wanted = [v.splat(b, bits, each) for bits in arguments[5:]]
        some = v.splat(b, b.sext(b.icmp_unsigned("!=", arguments[6], word(0)), I32), v.V16I)
        line = ir.VectorType(I8, SPREAD * size)
        with cgutils.for_range_slice(b, I64(0), b.and_(words, I64(-SPREAD)), I64(SPREAD), I64) as (i, _):
            for row, own in zip(rows, near, strict=True):
                v.store(b, v.load(b, line, v.at(b, row, b.mul(i, I64(size)), I8), 2), own, 2)
            with cgutils.for_range_slice(b, I64(0), I64(SPREAD), I64(TURNED), I64) as (j, _):
                # Words of 16 bits are turned in pairs.
                turned = turned_words(b, [v.at(b, own, b.mul(j, I64(size)), I8) for own in near], TURNED * size // 4)
                if pairs:
                    turned = [b.trunc(part, each) for pair in turned
                              for part in (pair, b.lshr(pair, v.constant(v.V16I, 16)))]
                for k, values in enumerate(turned):
                    first, second = (b.sext(b.icmp_unsigned("==", b.and_(values, bits), bits), v.V16I)
                                     for bits in wanted)
                    found = b.add(first, b.and_(second, some))
                    b.store(b.sub(b.load(counts, typ=v.V16I), found), counts)
                    target = b.add(to, b.mul(b.add(b.add(i, j), I64(k)), I64(LANES)))
                    v.store(b, values, v.at(b, w, target, word), 2)
        return b.sext(v.tree(b, b.load(counts, typ=v.V16I), b.add), I64)

    i = types.intp
    return types.intp(x, i, i, w, i, x.dtype, x.dtype), codegen


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
