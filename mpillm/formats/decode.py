"""Stored numbers to float32: the common types here, every other GGUF type by the gguf package.

A quantised block of the types q4_0, q4_1 and q8_0 holds 32 values and a float16 scale ``d``
(ggml-common.h): q8_0 is d, 32 int8; q4_0 is d, 16 bytes of two codes each, offset 8; q4_1 is d, minimum,
16 bytes. The low nibbles of the bytes are the first 16 values, the high ones the last 16. The results
have the bits of the gguf package's dequantisers; these are here because they take a third of the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

SLICE_VALUES = 1 << 15       # decoded at a time, so that temporaries stay in the cache

_PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_BYTES = ("F8_E4M3", "F8_E8M0")      # types of one byte, by a table


def decodable(dtype: str) -> bool:
    """Whether ``decode`` knows the type."""
    return dtype in _PLAIN or dtype in _BYTES or dtype in _OWN or _gguf_decodes(dtype)


def decode(dtype: str, raw: np.ndarray, block_bytes: int, out: np.ndarray) -> None:
    """Raw rows uint8 [n, bytes] to ``out`` float32 [n, values]; both C-contiguous, the type ``decodable``.

    Types other than F32, F16, BF16 and those of one byte are stored in blocks of ``block_bytes``.
    """
    if dtype in _BYTES:
        codes, flat, table = raw.reshape(-1), out.reshape(-1), _table(dtype)
        for at in range(0, len(flat), SLICE_VALUES):
            part = slice(at, at + SLICE_VALUES)
            np.take(table, codes[part], out=flat[part], mode="clip")     # "raise" would copy
        return
    if dtype in _PLAIN:
        stored, flat = raw.reshape(-1).view(_PLAIN[dtype]), out.reshape(-1)
        for at in range(0, len(flat), SLICE_VALUES):
            if dtype == "BF16":
                bits = flat[at:at + SLICE_VALUES].view(np.uint32)
                bits[:] = stored[at:at + SLICE_VALUES]
                bits <<= 16
            else:
                flat[at:at + SLICE_VALUES] = stored[at:at + SLICE_VALUES]
        return
    blocks = raw.reshape(-1, block_bytes)
    values = out.reshape(len(blocks), -1)
    step = max(1, SLICE_VALUES // values.shape[1])
    function = _OWN.get(dtype) or functools.partial(_by_gguf, dtype)
    with np.errstate(all="ignore"):      # damaged scales give NaN, which whoever loads them names
        for at in range(0, len(blocks), step):
            function(blocks[at:at + step], values[at:at + step])


@functools.cache
def _table(dtype: str) -> np.ndarray:
    """float32 [256]: the values of a type of one byte (OCP's 8-bit and microscaling formats).

    E4M3 (the finite-only one): sign, 4 bits of exponent with bias 7, 3 of mantissa, no infinity, NaN where all but
    the sign is set. E8M0: a power of two with bias 127, NaN where all is set.
    """
    codes = np.arange(256)
    if dtype == "F8_E8M0":
        return np.append(np.ldexp(np.float32(1), codes[:255] - 127), np.float32(np.nan))
    exponent, mantissa = codes >> 3 & 15, codes & 7
    values = np.ldexp((mantissa + np.where(exponent, 8, 0)).astype(np.float32), np.maximum(exponent, 1) - 10)
    values[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -values, values).astype(np.float32)


def _half(column: np.ndarray) -> np.ndarray:
    """float32 [n, 1] of little-endian float16 in uint8 [n, 2]."""
    return np.ascontiguousarray(column).view("<f2").astype(np.float32)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks[:, :2]), out=out)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    scale, codes = _half(blocks[:, :2]), blocks[:, 2:]
    np.multiply((codes & 15).view(np.int8) - np.int8(8), scale, out=out[:, :16])
    np.multiply((codes >> 4).view(np.int8) - np.int8(8), scale, out=out[:, 16:])


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    scale, codes = _half(blocks[:, :2]), blocks[:, 4:]
    np.multiply(codes & 15, scale, out=out[:, :16])
    np.multiply(codes >> 4, scale, out=out[:, 16:])
    out += _half(blocks[:, 2:4])


def _by_gguf(dtype: str, blocks: np.ndarray, out: np.ndarray) -> None:
    from gguf import GGMLQuantizationType, quants
    # The package works through rows in groups of 16; one long row saves that.
    flat = np.ascontiguousarray(blocks).reshape(1, -1)
    out[...] = quants.dequantize(flat, GGMLQuantizationType[dtype]).reshape(out.shape)


@functools.cache
def _gguf_decodes(dtype: str) -> bool:
    """Whether the gguf package has a dequantiser for a quantised type: tried on one block."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    kind = GGMLQuantizationType.__members__.get(dtype)
    if kind is None or kind not in GGML_QUANT_SIZES:
        return False
    block, size = GGML_QUANT_SIZES[kind]
    try:
        _by_gguf(dtype, np.zeros((1, size), np.uint8), np.empty((1, block), np.float32))
    except NotImplementedError:
        return False
    return True


_OWN: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}
