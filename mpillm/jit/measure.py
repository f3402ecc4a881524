"""What this processor can do at most: reading memory, multiplying in registers. For `mpillm bench` alone.

Every loop works in registers and on one buffer, so that nothing but the memory or the arithmetic units binds it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpillm.jit import policy
from mpillm.jit.gemm import reads
from mpillm.jit.isa import vector as v
from mpillm.jit.isa.select import amx_permission
from mpillm.jit.isa.vector import I8, I16, I32, I64, V16F, V16I
from mpillm.jit.parallel import in_parts

LINES = 8                     # cache lines of 64 bytes that a round of the reading loop takes
V32B, V16S, V8I, V64B = ir.VectorType(I8, 32), ir.VectorType(I16, 16), ir.VectorType(I32, 8), ir.VectorType(I8, 64)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no class for."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


V32BF = ir.VectorType(_BFloat(), 32)


@intrinsic
def _read_lines(typingctx, data, start, stop):
    """XOR of the 64-byte lines start ... stop - 1 of a uint8 array, ``LINES`` at a time, into one word."""
    def codegen(context, b, signature, arguments):
        base, (_, start, stop) = v.data(context, b, signature.args[0], arguments[0]), arguments
        sums = [cgutils.alloca_once_value(b, v.constant(V16I, 0)) for _ in range(4)]
        with cgutils.for_range_slice(b, start, stop, I64(LINES), I64) as (line, _):
            address = v.at(b, base, b.mul(line, I64(64)), I8)
            for i in range(LINES):
                value = v.load(b, V16I, v.at(b, address, I64(64 * i), I8), 1)
                b.store(b.xor(b.load(sums[i % 4], typ=V16I), value), sums[i % 4])
        total = v.constant(V16I, 0)
        for part in sums:
            total = b.xor(total, b.load(part, typ=V16I))
        return b.zext(v.tree(b, total, b.xor), I64)

    return types.int64(data, types.intp, types.intp), codegen


@policy.helper
def _read_part(part, parts, data, lines, repeats, out):
    own = lines // parts // 8 * 8
    word = 0
    for _ in range(repeats):
        word ^= _read_lines(data, part * own, (part + 1) * own)
    out[8 * part] += word


@policy.helper
def _touch_part(part, parts, data, lines, seed):
    own = lines // parts // 8 * 8
    for i in range(64 * part * own, 64 * (part + 1) * own):
        data[i] = np.uint8(i + seed)


def _chains(count: int, words: Any, kind: Any, operand: Any, step: Callable[..., Any]) -> Any:
    """An intrinsic ``run(n, seed)``: n rounds of ``count`` independent chains ``acc = step(b, acc, x)``.

    ``words``: the accumulators of LLVM type ``kind`` and the operands as vectors of int32.
    """
    @intrinsic
    def run(typingctx, n, seed):
        def codegen(context, b, signature, arguments):
            seed = v.splat(b, b.trunc(arguments[1], I32), words)
            x = b.bitcast(seed, operand)
            sums = [cgutils.alloca_once_value(b, b.bitcast(b.add(seed, v.constant(words, i)), kind))
                    for i in range(count)]
            with cgutils.for_range(b, arguments[0]):
                for chain in sums:
                    b.store(step(b, b.load(chain, typ=kind), x), chain)
            total = v.constant(words, 0)
            for chain in sums:
                total = b.xor(total, b.bitcast(b.load(chain, typ=kind), words))
            return b.zext(v.tree(b, total, b.xor), I64)

        return types.int64(types.intp, types.int64), codegen

    return run


def _maddubs(b: ir.IRBuilder, acc: Any, x: Any) -> Any:
    """The three instructions of an int8 dot product on AVX2: u8 x s8 pairs, pairs of those, the sum."""
    pairs = v.call(b, "llvm.x86.avx2.pmadd.ub.sw", V16S, [b.bitcast(acc, V32B), x])
    fours = v.call(b, "llvm.x86.avx2.pmadd.wd", V8I, [pairs, v.constant(V16S, 1)])
    return b.add(acc, fours)


def _dpbusd(b: ir.IRBuilder, acc: Any, x: Any) -> Any:
    return v.call(b, "llvm.x86.avx512.vpdpbusd.512", V16I, [acc, x, x])


def _dpbf16(b: ir.IRBuilder, acc: Any, x: Any) -> Any:
    return v.call(b, "llvm.x86.avx512bf16.dpbf16ps.512", V16F, [acc, x, x])


def _tiles(instruction: str) -> Any:
    """An intrinsic ``run(n, config)``: n rounds of four tile products into four tiles."""
    @intrinsic
    def run(typingctx, n, config):
        def codegen(context, b, signature, arguments):
            void = ir.VoidType()
            v.call(b, "llvm.x86.ldtilecfg", void, [v.data(context, b, signature.args[1], arguments[1])])
            for tile in range(8):
                v.call(b, "llvm.x86.tilezero", void, [I8(tile)])
            with cgutils.for_range(b, arguments[0]):
                for tile, left, right in ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)):
                    v.call(b, f"llvm.x86.{instruction}", void, [I8(tile), I8(left), I8(right)])
            v.call(b, "llvm.x86.tilerelease", void, [])
            return context.get_dummy_value()

        return types.void(types.intp, config), codegen

    return run


_HOST = binding.get_host_cpu_features()
_WIDE = 12 if _HOST.get("avx512f") else 6        # chains of 16 floats that the registers hold
_run_fma = _chains(_WIDE, V16I, V16F, V16F, lambda b, acc, x: v.fma(b, acc, x, x))
_run_maddubs = _chains(10, V8I, V8I, V32B, _maddubs)
_run_dpbusd = _chains(12, V16I, V16I, V64B, _dpbusd)
_run_dpbf16 = _chains(12, V16I, V16F, V32BF, _dpbf16)
_run_tile_bf16, _run_tile_int8 = _tiles("tdpbf16ps"), _tiles("tdpbssd")


@policy.helper
def _fma_part(part, parts, n, config, out):
    out[8 * part] += _run_fma(n, 0x3F803F80)


@policy.helper
def _maddubs_part(part, parts, n, config, out):
    out[8 * part] += _run_maddubs(n, 0x3F803F80)


@policy.helper
def _dpbusd_part(part, parts, n, config, out):
    out[8 * part] += _run_dpbusd(n, 0x3F803F80)


@policy.helper
def _dpbf16_part(part, parts, n, config, out):
    out[8 * part] += _run_dpbf16(n, 0x3F803F80)


@policy.helper
def _tile_bf16_part(part, parts, n, config, out):
    _run_tile_bf16(n, config)


@policy.helper
def _tile_int8_part(part, parts, n, config, out):
    _run_tile_int8(n, config)


_read, _touch, _fma, _maddubs_all, _dpbusd_all, _dpbf16_all, _tile_bf16, _tile_int8 = map(in_parts, (
    _read_part, _touch_part, _fma_part, _maddubs_part, _dpbusd_part, _dpbf16_part, _tile_bf16_part,
    _tile_int8_part))


def measure_read(data, lines, repeats, out, threads):
    _read((data, lines, repeats, out), threads)


def measure_touch(data, lines, seed, threads):
    _touch((data, lines, seed), threads)


def measure_fma(n, config, out, threads):
    _fma((n, config, out), threads)


def measure_maddubs(n, config, out, threads):
    _maddubs_all((n, config, out), threads)


def measure_dpbusd(n, config, out, threads):
    _dpbusd_all((n, config, out), threads)


def measure_dpbf16(n, config, out, threads):
    _dpbf16_all((n, config, out), threads)


def measure_tile_bf16(n, config, out, threads):
    _tile_bf16((n, config, out), threads)


def measure_tile_int8(n, config, out, threads):
    _tile_int8((n, config, out), threads)


#: (tier, type of the factors) -> loop, operations of one round, features of the processor that it needs
PEAKS: dict[tuple[str, str], tuple[Any, int, tuple[str, ...]]] = {
    ("amx", "bf16"): (measure_tile_bf16, 4 * 2 * 16 * 16 * 32, ("amx-tile", "amx-bf16")),
    ("amx", "int8"): (measure_tile_int8, 4 * 2 * 16 * 16 * 64, ("amx-tile", "amx-int8")),
    ("avx512", "bf16"): (measure_dpbf16, 12 * 2 * 32, ("avx512bf16",)),
    ("avx512", "int8"): (measure_dpbusd, 12 * 2 * 64, ("avx512vnni",)),
    ("avx2", "int8"): (measure_maddubs, 10 * 2 * 32, ("avx2",)),
    ("any", "f32"): (measure_fma, _WIDE * 2 * 16, ()),
}


@lru_cache(None)
def tiles_permitted() -> bool:
    """Whether Linux lets this process use AMX's tiles; asked once, before threads are started."""
    return amx_permission() is None


def available_peaks() -> list[tuple[str, str]]:
    """The keys of ``PEAKS`` whose instructions this processor has, and may use."""
    return [key for key, (_, _, needs) in PEAKS.items()
            if all(_HOST.get(name) for name in needs) and (key[0] != "amx" or tiles_permitted())]


def tile_config() -> np.ndarray:
    """Eight tiles of 16 rows of 64 bytes, as ldtilecfg reads them (Intel SDM, palette 1)."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32].view(np.uint16)[:] = 64
    config[48:56] = 16
    return config


INT, BYTES = types.intp, types.uint8[::1]


@lru_cache(None)
def read_kernel() -> Any:
    """``run(data uint8, lines of 64 bytes, repeats, out int64 [8 * threads], threads)``: read them all."""
    return policy.kernel(measure_read, "measure_read", (reads(types.uint8), INT, INT, types.int64[::1], INT))


@lru_cache(None)
def touch_kernel() -> Any:
    """``run(data uint8, lines, seed, threads)``: write every line from the thread that will read it."""
    return policy.kernel(measure_touch, "measure_touch", (BYTES, INT, INT, INT))


@lru_cache(None)
def peak_kernel(key: tuple[str, str]) -> Any:
    """``run(rounds, tile configuration, out int64 [8 * threads], threads)`` of one of ``PEAKS``."""
    function = PEAKS[key][0]
    return policy.kernel(function, function.__name__, (INT, reads(types.uint8), types.int64[::1], INT))
