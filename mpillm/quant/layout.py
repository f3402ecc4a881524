"""Number formats in memory: how many bytes, and in which order.

Legend: P panels of 16 outputs, K inputs, L = 16 lanes (the outputs of a panel).

========  =====================================  =========================================
format    data                                   rounding
========  =====================================  =========================================
f32       [P, K, L] float32                      none
f16       [P, K, L] float16, as int16 words      nearest even
bf16      [P, ceil(K/2), L, 2] as uint16 words   nearest even; the last half is 0 for odd K
q8_0      [P, K/32, 8, L, 4] int8 and scales     ggml's: d = max/127 in f16, q = round(x/d)
          [P, K/32, L] float16, as int16 words
========  =====================================  =========================================
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from mpillm.errors import UsageError

PANEL, QUANT_BLOCK = 16, 32
FORMATS = ("f32", "bf16", "f16", "q8_0")
WORDS: dict[str, Any] = {"f32": np.float32, "bf16": np.uint16, "f16": np.int16, "q8_0": np.int8}
#: values k that stand together in a panel
PAIR = {"f32": 1, "f16": 1, "bf16": 2, "q8_0": 1}
#: the smallest size that rounds to infinity
LIMIT = {"f32": np.float32(np.inf), "f16": np.float32(65520.0), "bf16": np.float32(3.3961775e38)}
_HUGE = 2 << 20


def check_format(name: str, k: int) -> None:
    """UsageError for a format without a kernel, or a K that q8_0's blocks do not divide."""
    if name not in FORMATS:
        raise UsageError(f"weights cannot be {name!r} in memory: use one of {', '.join(FORMATS)}")
    if name == "q8_0" and k % QUANT_BLOCK:
        raise UsageError(f"weights q8_0 need inputs in blocks of {QUANT_BLOCK}, a matrix here has {k}: "
                         f"use bf16")


def panels_of(n: int) -> int:
    return -(-n // PANEL)


def panel_stride(name: str, k: int) -> int:
    """Elements of one panel."""
    return -(-k // PAIR[name]) * PAIR[name] * PANEL


def scales_of(name: str, n: int, k: int) -> int:
    return panels_of(n) * PANEL * (k // QUANT_BLOCK) if name == "q8_0" else 0


def packed_nbytes(name: str, n: int, k: int) -> int:
    """Exact bytes of a packed [n, k] matrix, scales and the last panel's empty lanes included."""
    check_format(name, k)
    words = panels_of(n) * panel_stride(name, k) * np.dtype(WORDS[name]).itemsize
    return words + 2 * scales_of(name, n, k)


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
