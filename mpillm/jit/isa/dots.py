"""Exact integer products of a row's block of 32 codes with a panel's weights, one class for each tier.

A quad is four values along K of the 16 outputs of a panel: 64 bytes [16][4]. A class takes one row's
codes of a block and adds up quads; whatever the tier, the sum of int32 is exact and so the same.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from mpillm.jit.isa import vector as v
from mpillm.jit.isa.vector import I8, I16, I32, I64, V16I, V32S

V8I, V16S = ir.VectorType(I32, 8), ir.VectorType(I16, 16)
V32B, V64B = ir.VectorType(I8, 32), ir.VectorType(I8, 64)

#: kinds of codes (s8: -128 ... 127, u6: 0 ... 63, u4: 0 ... 15) -> quads whose sums of two products each
#: fit 16 bits beside |x| <= 127: 2 * 128 * 127, 2 * 2 * 63 * 127 and 8 * 2 * 15 * 127
FITTING = {"s8": 1, "u6": 2, "u4": 8}


class _Pairs:
    """Sums of two products in 16 bits, as many as fit, then of 32 bits; subclasses have the instructions."""

    rows = 4             # rows of a register block

    def __init__(self, b: ir.IRBuilder, kind: str, x: Any) -> None:
        """``x`` is the address of 32 codes of type int8 in natural order, of size 127 at most."""
        self.b, self.kind, self.x = b, kind, x
        self._words: list[Any] = []
        self._totals: list[Any] = []
        self._count = 0

    def add(self, quad: int, weights: Any) -> None:
        """Add the products of quad ``quad`` of the row with ``weights`` <64 x i8>."""
        pairs = self._multiply(quad, weights)
        self._words = self._plus(self._words, pairs)
        self._count += 1
        if self._count == FITTING[self.kind]:
            self._flush()

    def take(self, offset: int, x_sum: Any) -> Any:
        """The sum <16 x i32> of (weight - ``offset``) * x since the last call; ``x_sum`` i32 is that of x."""
        if self._words:
            self._flush()
        total, self._totals = self._joined(self._totals), []
        if offset:
            total = self.b.add(total, v.splat(self.b, self.b.mul(x_sum, I32(-offset)), V16I))
        return total

    def _flush(self) -> None:
        self._totals = self._plus(self._totals, [self._widened(words) for words in self._words])
        self._words, self._count = [], 0

    def _plus(self, left: list[Any], right: list[Any]) -> list[Any]:
        return [self.b.add(x, y) for x, y in zip(left, right, strict=True)] if left else right

    def _multiply(self, quad: int, weights: Any) -> list[Any]:
        raise NotImplementedError

    def _widened(self, words: Any) -> Any:
        raise NotImplementedError

    def _joined(self, totals: list[Any]) -> Any:
        raise NotImplementedError


class Generic(_Pairs):
    """Portable vectors: even and odd bytes are multiplied apart, in 16 bits."""

    def __init__(self, b: ir.IRBuilder, kind: str, x: Any) -> None:
        super().__init__(b, kind, x)
        # Each four codes as i16 in the order 0, 2, 1, 3: two words to be spread over the lanes.
        order = [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(32)]
        codes = v.load(b, V32B, x, 1)
        codes = b.shuffle_vector(codes, ir.Constant(V32B, ir.Undefined), ir.Constant(ir.VectorType(I32, 32), order))
        self._wide = cgutils.alloca_once(b, V32S)
        v.store(b, b.sext(codes, V32S), self._wide, 2)

    def _multiply(self, quad: int, weights: Any) -> list[Any]:
        b, eight = self.b, v.constant(V32S, 8)
        words = b.bitcast(weights, V32S)
        if self.kind == "s8":
            even, odd = b.ashr(b.shl(words, eight), eight), b.ashr(words, eight)
        else:
            even, odd = b.and_(words, v.constant(V32S, 255)), b.lshr(words, eight)
        left, right = (b.bitcast(v.splat(b, v.load(b, I32, v.at(b, self._wide, I64(2 * quad + i), I32), 2), V16I),
                                 V32S) for i in (0, 1))
        return [b.add(b.mul(even, left), b.mul(odd, right))]

    def _widened(self, words: Any) -> Any:
        b, sixteen = self.b, v.constant(V16I, 16)
        words = b.bitcast(words, V16I)
        return b.add(b.ashr(b.shl(words, sixteen), sixteen), b.ashr(words, sixteen))

    def _joined(self, totals: list[Any]) -> Any:
        return totals[0]


class Avx2(_Pairs):
    """VPMADDUBSW on 32 bytes: unsigned codes as they are, signed ones as |w| times x with w's sign."""

    def _multiply(self, quad: int, weights: Any) -> list[Any]:
        b = self.b
        four = v.load(b, I32, v.at(b, self.x, I64(4 * quad), I8), 1)
        x = b.bitcast(v.splat(b, four, V8I), V32B)
        pairs = []
        for first in (0, 32):
            order = ir.Constant(ir.VectorType(I32, 32), list(range(first, first + 32)))
            half, factor = b.shuffle_vector(weights, ir.Constant(V64B, ir.Undefined), order), x
            if self.kind == "s8":
                factor = v.call(b, "llvm.x86.avx2.psign.b", V32B, [x, half])
                half = v.call(b, "llvm.abs.v32i8", V32B, [half, v.I1(0)])
            pairs.append(v.call(b, "llvm.x86.avx2.pmadd.ub.sw", V16S, [half, factor]))
        return pairs

    def _widened(self, words: Any) -> Any:
        return v.call(self.b, "llvm.x86.avx2.pmadd.wd", V8I, [words, v.constant(V16S, 1)])

    def _joined(self, totals: list[Any]) -> Any:
        return self.b.shuffle_vector(*totals, v.lane_numbers())


DOTS: dict[str, type[_Pairs]] = {"generic": Generic, "avx2": Avx2}
