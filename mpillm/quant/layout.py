"""Number formats in memory: how many bytes, and in which order.

Legend: P panels of 16 outputs, K inputs, L = 16 lanes (the outputs of a panel), B = K/32 blocks, S super-blocks
of 8 blocks.

========  ==============================================  ===============================================
format    data                                            rounding
========  ==============================================  ===============================================
f32       [P, K, L] float32                               none
f16       [P, K, L] float16, as int16 words               nearest even
bf16      [P, K'/2, L, 2] as uint16 words                 nearest even; zeros from K to K', a multiple of 32
q8_0      [P, B, 8, L, 4] int8                            ggml's: d = max/127 in f16, q = round(x/d)
q4_0      [P, B, 4, L, 4] nibbles                         ggml's: d = (value of most size)/-8, codes + 8
q4_1      as q4_0                                         ggml's: d = (max - min)/15, minimum m
q4_K      as q4_0                                         none here: packed as GGUF files have it
q6_K      [P, B, 6, L, 4]: four of nibbles, two of bits   none here: packed as GGUF files have it
========  ==============================================  ===============================================

A quad is four inputs beside each other. Byte i of nibbles holds a code of quad i (low) and one of quad i + 4;
bytes of bits hold the upper two bits of the codes of four quads, the first quad's lowest.

Scales, 16-bit words, d, m and dmin as float16: q8_0, q4_0 [P, B, L] d; q4_1 [P, B, 2, L] d, m. K-quants have
for each panel bytes of all blocks and then float16 of all super-blocks: q4_K [B, 2, L] uint8 scale and minimum,
[S, 2, L] d, dmin; q6_K [B, 2, L] int8 scales of 16 values each, [S, L] d.

A slice of a matrix of K-quants may begin at any block: its *phase* is the number of its first block within
that block's super-block, and S counts the super-blocks that it touches.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from mpillm.errors import UsageError
from mpillm.jit.isa.quantised import SHAPES
from mpillm.jit.pack_blocks import STORED

PANEL, QUANT_BLOCK, SUPER_BLOCK = 16, 32, 256
QUANTISED = tuple(SHAPES)
FORMATS = ("f32", "bf16", "f16", *QUANTISED)
#: quantised formats that float32 is rounded to here
ROUNDED = ("q8_0", "q4_0", "q4_1")
#: numpy's element type of packed data; that of a quantised format only says which one it is
WORDS: dict[str, Any] = {"f32": np.float32, "bf16": np.uint16, "f16": np.int16, "q8_0": np.int8, "q4_0": np.uint8,
                         "q4_1": np.int32, "q4_K": np.uint32, "q6_K": np.int64}
#: values k that stand together in a panel
PAIR = {"f32": 1, "f16": 1, "bf16": 2}
#: a panel holds a multiple of so many inputs, zeros beyond K: whole tiles of AMX for bf16
MULTIPLE = {"f32": 1, "f16": 1, "bf16": 32}
#: the smallest size that rounds to infinity
LIMIT = {"f32": np.float32(np.inf), "f16": np.float32(65520.0), "bf16": np.float32(3.3961775e38)}
#: the bits that are all set in what is not finite
EXPONENT = {"f32": 0x7F800000, "f16": 0x7C00, "bf16": 0x7F80}
_HUGE = 2 << 20


def check_format(name: str, k: int) -> None:
    """UsageError for a format without a kernel, or a K that its blocks do not divide."""
    if name not in FORMATS:
        raise UsageError(f"weights cannot be {name!r} in memory: use one of {', '.join(FORMATS)}")
    if name in QUANTISED and k % QUANT_BLOCK:
        raise UsageError(f"weights {name} need inputs in blocks of {QUANT_BLOCK}, a matrix here has {k}: "
                         f"use bf16")


def panels_of(n: int) -> int:
    return -(-n // PANEL)


def panel_stride(name: str, k: int) -> int:
    """Elements of one panel's data."""
    if name in QUANTISED:
        return k // QUANT_BLOCK * SHAPES[name].codes // np.dtype(WORDS[name]).itemsize
    return -(-k // MULTIPLE[name]) * MULTIPLE[name] * PANEL


def word_bits(name: str) -> int:
    """Bits of what stands in one lane of a panel's row, of formats that are not quantised."""
    return 8 * PAIR[name] * np.dtype(WORDS[name]).itemsize


def stored_per(name: str) -> int:
    """Blocks of 32 in a stored block of a quantised format."""
    return SUPER_BLOCK // QUANT_BLOCK if SHAPES[name].super_words else 1


def stored_bytes(name: str, k: int, phase: int = 0) -> int:
    """Bytes of the stored blocks that cover a row of k values of a quantised format."""
    return -(-(phase + k // QUANT_BLOCK) // stored_per(name)) * STORED[name]


def scales_of(name: str, n: int, k: int, phase: int = 0) -> int:
    """Words of scales of a whole matrix."""
    if name not in QUANTISED or k == 0:
        return 0
    blocks, shape = k // QUANT_BLOCK, SHAPES[name]
    supers = -(-(phase + blocks) // (SUPER_BLOCK // QUANT_BLOCK))
    return panels_of(n) * (blocks * shape.words + supers * shape.super_words)


def packed_nbytes(name: str, n: int, k: int, phase: int = 0) -> int:
    """Exact bytes of a packed [n, k] matrix, scales and the last panel's empty lanes included."""
    check_format(name, k)
    words = panels_of(n) * panel_stride(name, k) * np.dtype(WORDS[name]).itemsize
    return words + 2 * scales_of(name, n, k, phase)


def allocate(count: int, dtype: Any) -> np.ndarray:
    """Zeros, 64-byte aligned; large ones in private pages, huge ones where the kernel allows."""
    nbytes = count * np.dtype(dtype).itemsize
    if nbytes < _HUGE:
        raw = np.zeros(nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start:start + nbytes].view(dtype)
    pages = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:                  # a kernel without huge pages
            pass
    raw = np.frombuffer(pages, np.uint8)
    start = -raw.ctypes.data % _HUGE
    return raw[start:start + nbytes].view(dtype)
