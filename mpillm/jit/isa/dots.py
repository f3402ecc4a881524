"""Exact integer products of a row's block of 32 codes with a panel's weights, one class for each tier.

A quad is four values along K of several outputs: bytes [lanes][4]. A class takes one row's codes of a block
and adds up quads; whatever the tier, the sum of int32 is exact and so the same.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from mpillm.jit.isa import vector as v
from mpillm.jit.isa.avx512 import Vnni
from mpillm.jit.isa.vector import I8, I16, I32, I64

#: kinds of codes (s8: -128 ... 127, u6: 0 ... 63, u4: 0 ... 15) -> quads whose sums of two products each
#: fit 16 bits beside |x| <= 127: 2 * 128 * 127, 2 * 2 * 63 * 127 and 8 * 2 * 15 * 127
FITTING = {"s8": 1, "u6": 2, "u4": 8}


class _Pairs:
    """Sums of two products in 16 bits, as many as fit, then of 32 bits; subclasses have the instructions."""

    lanes = 8            # outputs that are worked on together: the codes of a block stay in registers for all rows

    def __init__(self, b: ir.IRBuilder, kind: str, x: Any) -> None:
        """``x`` is the address of 32 codes of type int8 in natural order, of size 127 at most."""
        self.b, self.kind, self.x = b, kind, x
        self.bytes, self.words, self.totals = (ir.VectorType(element, count * self.lanes)
                                               for element, count in ((I8, 4), (I16, 2), (I32, 1)))
        self._words: Any = None
        self._total: Any = None
        self._count = 0

    def add(self, quad: int, weights: Any) -> None:
        """Add the products of quad ``quad`` of the row with ``weights`` <4 * lanes x i8>."""
        pairs = self._multiply(quad, weights)
        self._words = pairs if self._words is None else self.b.add(self._words, pairs)
        self._count += 1
        if self._count == FITTING[self.kind]:
            self._flush()

    def take(self, offset: int, x_sum: Any) -> Any:
        """The sum <lanes x i32> of (weight - ``offset``) * x since the last call; ``x_sum`` i32 is that of x."""
        if self._count:
            self._flush()
        total, self._total = self._total, None
        if offset:
            total = self.b.add(total, v.splat(self.b, self.b.mul(x_sum, I32(-offset)), total.type))
        return total

    def _flush(self) -> None:
        sums = self._widened(self._words)
        self._total = sums if self._total is None else self.b.add(self._total, sums)
        self._words, self._count = None, 0

    def _multiply(self, quad: int, weights: Any) -> Any:
        raise NotImplementedError

    def _widened(self, words: Any) -> Any:
        raise NotImplementedError


class Generic(_Pairs):
    """Portable vectors: even and odd bytes are multiplied apart, in 16 bits."""

    lanes = 16

    def __init__(self, b: ir.IRBuilder, kind: str, x: Any) -> None:
        super().__init__(b, kind, x)
        # Each four codes as i16 in the order 0, 2, 1, 3: two words to be spread over the lanes.
        order = [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(32)]
        block = ir.VectorType(I8, 32)
        codes = v.load(b, block, x, 1)
        codes = b.shuffle_vector(codes, ir.Constant(block, ir.Undefined), ir.Constant(ir.VectorType(I32, 32), order))
        wide = ir.VectorType(I16, 32)
        self._wide = cgutils.alloca_once(b, wide)
        v.store(b, b.sext(codes, wide), self._wide, 2)

    def _multiply(self, quad: int, weights: Any) -> Any:
        b, eight = self.b, v.constant(self.words, 8)
        words = b.bitcast(weights, self.words)
        if self.kind == "s8":
            even, odd = b.ashr(b.shl(words, eight), eight), b.ashr(words, eight)
        else:
            even, odd = b.and_(words, v.constant(self.words, 255)), b.lshr(words, eight)
        left, right = (v.load(b, I32, v.at(b, self._wide, I64(2 * quad + i), I32), 2) for i in (0, 1))
        left, right = (b.bitcast(v.splat(b, pair, self.totals), self.words) for pair in (left, right))
        return b.add(b.mul(even, left), b.mul(odd, right))

    def _widened(self, words: Any) -> Any:
        b, sixteen = self.b, v.constant(self.totals, 16)
        words = b.bitcast(words, self.totals)
        return b.add(b.ashr(b.shl(words, sixteen), sixteen), b.ashr(words, sixteen))


class Avx2(_Pairs):
    """VPMADDUBSW on 32 bytes: unsigned codes as they are, signed ones as |w| times x with w's sign."""

    def _multiply(self, quad: int, weights: Any) -> Any:
        b = self.b
        four = v.load(b, I32, v.at(b, self.x, I64(4 * quad), I8), 1)
        x = b.bitcast(v.splat(b, four, self.totals), self.bytes)
        if self.kind == "s8":
            x = v.call(b, "llvm.x86.avx2.psign.b", self.bytes, [x, weights])
            weights = v.call(b, "llvm.abs.v32i8", self.bytes, [weights, v.I1(0)])
        return v.call(b, "llvm.x86.avx2.pmadd.ub.sw", self.words, [weights, x])

    def _widened(self, words: Any) -> Any:
        return v.call(self.b, "llvm.x86.avx2.pmadd.wd", self.totals, [words, v.constant(self.words, 1)])


#: by tier; where amx has few rows it takes the instructions of avx512
DOTS: dict[str, type[_Pairs] | type[Vnni]] = {"generic": Generic, "avx2": Avx2, "avx512": Vnni, "amx": Vnni}
