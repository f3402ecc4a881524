"""The tiers avx512 and amx prove themselves at start: a small product each, compared bit by bit.

A processor on which an instruction rounds or adds otherwise, or fails, gets the next lower tier, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from mpillm.errors import MpillmError
from mpillm.jit import policy
from mpillm.jit.gemm import reads
from mpillm.jit.isa import select
from mpillm.jit.isa.amx import SCRATCH
from mpillm.jit.isa.avx512 import dot_block
from mpillm.jit.tiles import bf16_avx512_part, tile_rows_part, tiles_core

ROWS, OUTPUTS, INPUTS = 19, 40, 64

_bf16_core, _q8_0_core = tiles_core("bf16"), tiles_core("q8_0")


def _tile_rows(x, rows, k, tiles):
    tile_rows_part(0, 1, x, rows, k, tiles)


def _bf16_avx512(x, rows, k, w, panel_stride, bias, y, n, tail):
    bf16_avx512_part(0, 1, x, rows, k, w, panel_stride, bias, y, n, tail)


def _bf16_amx(x, rows, k, w, panel_stride, bias, y, n, tail, room):
    _bf16_core(0, 1, x, rows, k, w, panel_stride, bias, y, n, tail, room)


def _q8_0_amx(x, x_scales, x_sums, rows, k, w, w_scales, bias, y, n, tail, room):
    _q8_0_core(0, 1, x, x_scales, x_sums, rows, k, w, w_scales, 0, bias, y, n, tail, room)


def _dot_signed(codes, x, x_sum, sums):
    dot_block(codes, x, x_sum, sums)


def _dot_unsigned(codes, x, x_sum, sums):
    dot_block(codes, x, x_sum, sums)


_I, _F, _X, _Y = types.intp, reads(types.float32), reads(types.uint16), types.float32[::1]
_PLACES = (_F, _Y, _I, _Y)
_SIGNATURES: dict[Any, tuple] = {
    _tile_rows: (_F, _I, _I, types.uint16[::1]),
    _bf16_avx512: (_X, _I, _I, _X, _I, *_PLACES),
    _bf16_amx: (_X, _I, _I, _X, _I, *_PLACES, types.uint8[::1]),
    _q8_0_amx: (reads(types.int8), _F, reads(types.int32), _I, _I, reads(types.int8), reads(types.int16), *_PLACES,
                types.uint8[::1]),
    _dot_signed: (reads(types.int8), reads(types.int8), types.int32, types.int32[::1]),
    _dot_unsigned: (reads(types.uint8), reads(types.int8), types.int32, types.int32[::1]),
}


@lru_cache(None)
def _kernel(function: Any, key: str) -> Any:
    return policy.kernel(function, f"selftest{function.__name__}_{key}", _SIGNATURES[function])


def run(function: Any, *arguments: Any) -> None:
    _kernel(function, select.key())(*arguments)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """f32 values that bf16 holds exactly as its words."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def in_panels(w: np.ndarray, together: int) -> np.ndarray:
    """[n, k] as panels [ceil(n / 16)][k / together][16][together], flat; zeros in lanes beyond n."""
    n, k = w.shape
    whole = np.zeros((-(-n // 16) * 16, k), w.dtype)
    whole[:n] = w
    panels = whole.reshape(-1, 16, k // together, together).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(panels).reshape(-1)


def _aligned(count: int) -> np.ndarray:
    raw = np.zeros(count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + count]


def _fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """One rounding, as float64 holds these products and sums exactly."""
    return (x.astype(np.float64) * y + z).astype(np.float32)


def _numbers() -> tuple[np.ndarray, np.ndarray]:
    """(x [ROWS, INPUTS], w [OUTPUTS, INPUTS]): bf16 numbers of sizes between 1/16 and 16, as f32."""
    made = np.random.default_rng(1)
    words = made.integers(0x3D80, 0x4180, (ROWS + OUTPUTS, INPUTS)) | made.integers(0, 2, (ROWS + OUTPUTS, 1)) << 15
    values = (words.astype(np.uint32) << 16).view(np.float32)
    return values[:ROWS].copy(), values[ROWS:].copy()


def _check_bf16_avx512() -> bool:
    x, w = _numbers()
    expected = np.zeros((ROWS, OUTPUTS), np.float32)
    for k in range(0, INPUTS, 2):
        for i in (k + 1, k):
            expected = _fma(x[:, i, None], w[None, :, i], expected)
    y, tail = np.empty((ROWS, OUTPUTS), np.float32), np.empty(16 * ROWS, np.float32)
    run(_bf16_avx512, to_bf16(x).reshape(-1), ROWS, INPUTS, in_panels(to_bf16(w), 2), 16 * INPUTS,
        np.zeros(0, np.float32), y.reshape(-1), OUTPUTS, tail)
    return np.array_equal(y.view(np.uint32), expected.view(np.uint32))


def _check_bf16_amx() -> bool:
    x, w = _numbers()
    expected = np.zeros((ROWS, OUTPUTS), np.float32)
    for k in range(0, INPUTS, 32):
        even_odd = np.zeros((2, ROWS, OUTPUTS), np.float32)
        for i in range(k, k + 32):
            even_odd[i % 2] = _fma(x[:, i, None], w[None, :, i], even_odd[i % 2])
        expected += even_odd[0] + even_odd[1]
    tiles = np.empty(ROWS * INPUTS, np.uint16)
    run(_tile_rows, x.reshape(-1), ROWS, INPUTS, tiles)
    y, tail = np.empty((ROWS, OUTPUTS), np.float32), np.empty(16 * ROWS, np.float32)
    run(_bf16_amx, tiles, ROWS, INPUTS, in_panels(to_bf16(w), 2), 16 * INPUTS, np.zeros(0, np.float32),
        y.reshape(-1), OUTPUTS, tail, _aligned(SCRATCH))
    return np.array_equal(y.view(np.uint32), expected.view(np.uint32))


def _check_codes_amx() -> bool:
    made = np.random.default_rng(2)
    x, w = (made.integers(-127, 128, (count, INPUTS), np.int8) for count in (ROWS, OUTPUTS))
    x_scales, w_scales = (made.integers(1, 32, (count, INPUTS // 32)).astype(np.float32) for count in (ROWS, OUTPUTS))
    expected = np.zeros((ROWS, OUTPUTS), np.float32)
    for block in range(INPUTS // 32):
        part = slice(32 * block, 32 * block + 32)
        sums = (x[:, part].astype(np.int32) @ w[:, part].astype(np.int32).T).astype(np.float32)
        expected = _fma(sums, x_scales[:, block, None] * w_scales[None, :, block], expected)
    sums = x.reshape(ROWS, -1, 16).sum(2, dtype=np.int32)
    y, tail = np.empty((ROWS, OUTPUTS), np.float32), np.empty(16 * ROWS, np.float32)
    run(_q8_0_amx, x.reshape(-1), x_scales.reshape(-1), sums.reshape(-1), ROWS, INPUTS, in_panels(w, 4),
        in_panels(w_scales.astype(np.float16), 1).view(np.int16), np.zeros(0, np.float32), y.reshape(-1),
        OUTPUTS, tail, _aligned(SCRATCH))
    return np.array_equal(y.view(np.uint32), expected.view(np.uint32))


def _check_codes_avx512() -> bool:
    """Signed and unsigned codes of a block, without saturation at the largest."""
    made = np.random.default_rng(3)
    right = []
    for function, low, high, kind in ((_dot_signed, -128, 128, np.int8), (_dot_unsigned, 0, 256, np.uint8)):
        codes, x = made.integers(low, high, (8, 16, 4), kind), made.integers(-127, 128, (8, 4), np.int8)
        codes[:4], x[:2], x[2:4] = high - 1, 127, -127
        sums, total = np.zeros(16, np.int32), int(x.sum(dtype=np.int64))
        run(function, codes.reshape(-1), x.reshape(-1), total, sums)
        expected = np.einsum("qlj,qj->l", codes.astype(np.int32), x.astype(np.int32))
        right.append(np.array_equal(sums, expected))
    return all(right)


_AVX512 = {"VDPBF16PS": _check_bf16_avx512, "VPDPBUSD": _check_codes_avx512}
#: what each tier has to compute rightly, by the instruction
CHECKS: dict[str, dict[str, Callable[[], bool]]] = {
    "avx512": _AVX512,
    "amx": {**_AVX512, "TDPBF16PS": _check_bf16_amx, "TDPBSSD": _check_codes_amx},
}


def failure(name: str) -> str | None:
    """What is wrong with a tier on this processor, or None. The tier has to be the chosen one."""
    for instruction, check in CHECKS.get(name, {}).items():
        try:
            right = check()
        except MpillmError:
            raise
        except Exception as error:
            return f"its self-test failed ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        if not right:
            return f"its self-test failed: {instruction} gives other bits than it should"
    return None


def tested_tier() -> str:
    """The highest tier that passes its self-test; before the ranks agree on one, and before models' kernels are made.

    Raises LaunchError when MPILLM_ISA forces a tier that this machine lacks or that fails.
    """
    name = select.tier()
    while (problem := failure(name)) is not None:
        name = select.decline(name, problem)
    return name


def compiling() -> str | None:
    """Whether a kernel can be made, of any tier, and rounds numbers rightly; what is wrong, or None."""
    x = np.arange(33, dtype=np.float32) - np.float32(16.5)
    tiles = np.full(64, 0xFFFF, np.uint16)
    try:
        run(_tile_rows, x, 1, 33, tiles)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    right = np.array_equal(tiles, to_bf16(np.append(x, np.zeros(31, np.float32))))
    return None if right else "a test kernel gives other numbers than it should"
