"""Packing blocks of quantised formats, as GGUF files hold them, into panels of 16 outputs, and looking rows up.

``kind`` is the number of a format (``SHAPES[name].number``): one kernel serves all of them. Blocks in a file:
``isa/lanes_of_blocks.py``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.gemm import F32_2, ROWS, reads
from mpillm.jit.isa.generic import flat, half_to_float, store_number
from mpillm.jit.isa.lanes_of_blocks import put_sixteen
from mpillm.jit.isa.quantised import SHAPES, quantise_row
from mpillm.jit.parallel import in_parts

Q8_0, Q4_0, Q4_1, Q4_K, Q6_K = (SHAPES[name].number for name in ("q8_0", "q4_0", "q4_1", "q4_K", "q6_K"))
#: bytes of a block in a file; those of the K-quants hold 256 values
STORED = {"q8_0": 34, "q4_0": 18, "q4_1": 20, "q4_K": 144, "q6_K": 210}
_BEYOND = np.float32(65520)            # the smallest size that rounds to infinity in f16


@policy.helper
def _pack_blocks_part(part, parts, raw, rows, row_bytes, first, every, shift, kind, per, block_bytes, blocks, phase, w,
                      code_bytes, scales, own_bytes, above_bytes, counts):
    """Rows into their lanes; ``per`` blocks of 32 in a stored block; counts [parts]: values not finite.

    Panel p of these rows is panel p * every + shift of w.
    """
    first_panel, stop_panel = first // 16, (first + rows + 15) // 16
    panels, bad = stop_panel - first_panel, 0
    behind = blocks * own_bytes
    stride = behind + (phase + blocks + 7) // 8 * above_bytes
    for p in range(first_panel + part * panels // parts, first_panel + (part + 1) * panels // parts):
        low, high, to = max(first - 16 * p, 0), min(first + rows - 16 * p, 16), p * every + shift
        for block in range(blocks):
            number = (phase + block) // per
            own = to * stride + block * own_bytes
            above = to * stride + behind + number * above_bytes
            bad += 32 * put_sixteen(kind, raw, number * block_bytes, row_bytes, 16 * p - first, low, high,
                                    (phase + block) % per, w, (to * blocks + block) * code_bytes, scales, own,
                                    above)
    counts[part] = bad


_run_pack = in_parts(_pack_blocks_part)


def pack_blocks(raw_RB, first, every, shift, kind, per, block_bytes, blocks, phase, w, code_bytes, scales, own_bytes,
                above_bytes, counts, threads):
    """Pack rows ``first`` and following of a matrix; w and scales uint8; the parts' counts add up."""
    rows, row_bytes = raw_RB.shape
    _run_pack((flat(raw_RB), rows, row_bytes, first, every, shift, kind, per, block_bytes, blocks, phase, w, code_bytes,
               scales, own_bytes, above_bytes, counts), threads)


@policy.helper
def _encode_8(x, start, raw, halves, at, codes, scales, sums):
    """A block to q8_0; whether f16 holds its scale."""
    quantise_row(x, start, 32, codes, 0, scales, 0, sums, 0)
    store_number(halves, at // 2, scales[0])
    for i in range(32):
        raw[at + 2 + i] = codes[i]
    return scales[0] < _BEYOND


@policy.helper
def _encode_4(kind, x, start, raw, halves, at):
    """A block of finite values to q4_0 or q4_1; whether f16 holds its scales."""
    low = high = largest = x[start]
    for i in range(start + 1, start + 32):
        low, high = min(low, x[i]), max(high, x[i])
        largest = x[i] if abs(x[i]) > abs(largest) else largest
    if kind == Q4_0:
        d, base, half, codes = largest / np.float32(-8), np.float32(0), 8.5, at + 2
    else:
        d, base, half, codes = (high - low) / np.float32(15), low, 0.5, at + 4
        store_number(halves, at // 2 + 1, low)
    store_number(halves, at // 2, d)
    inverse = np.float32(0) if d == 0 else np.float32(1) / d
    for i in range(16):
        byte = 0
        for j in range(2):
            # The product and the sum are rounded once, as where ggml's are one fma.
            scaled = np.float32(np.float64(x[start + i + 16 * j] - base) * np.float64(inverse) + half)
            byte |= min(15, max(0, int(scaled))) << 4 * j if scaled < 100 else 15 << 4 * j
        raw[codes + i] = byte
    return abs(d) < _BEYOND and abs(base) < _BEYOND


@policy.helper
def _encode_part(part, parts, x, rows, k, kind, block_bytes, raw, halves, counts):
    codes, scales, sums = np.empty(32, np.int8), np.empty(1, np.float32), np.empty(2, np.int32)
    blocks, nonfinite, beyond = k // 32, 0, 0
    for m in range(part * rows // parts, (part + 1) * rows // parts):
        for block in range(blocks):
            start, at = m * k + 32 * block, (m * blocks + block) * block_bytes
            bad = 0
            for i in range(start, start + 32):
                bad += not abs(x[i]) < np.inf
            if bad:
                nonfinite += bad
            elif kind == Q8_0:
                beyond += 32 * (not _encode_8(x, start, raw, halves, at, codes, scales, sums))
            else:
                beyond += 32 * (not _encode_4(kind, x, start, raw, halves, at))
    counts[2 * part], counts[2 * part + 1] = nonfinite, beyond


_run_encode = in_parts(_encode_part)


def encode(x_RK, kind, block_bytes, raw, halves, counts, threads):
    """Round rows to blocks of q8_0, q4_0 or q4_1 as ggml's reference does; ``halves`` are ``raw``'s words.

    counts [parts, 2]: values not finite (their blocks are left as they were), values of blocks whose
    scales are beyond f16.
    """
    rows, k = x_RK.shape
    _run_encode((flat(x_RK), rows, k, kind, block_bytes, raw, halves, counts), threads)


@policy.helper
def _code(kind, w, at, i):
    """Value ``i`` of the block of a lane, whose first byte is ``at``, as an integer without its scale."""
    if kind == Q8_0:
        return np.int64(np.int8(w[at + i // 4 * 64 + i % 4]))
    byte = np.int64(w[at + i % 16 // 4 * 64 + i % 4])
    code = byte & 15 if i < 16 else byte >> 4
    if kind == Q6_K:
        upper = np.int64(w[at + 256 + i // 16 * 64 + i % 4])
        return (code | (upper >> 2 * (i % 16 // 4) & 3) << 4) - 32
    return code - 8 if kind == Q4_0 else code


def lookup_blocks(kind, w, codes, scales, small, own, above, phase, n, ids, y_MK):
    """Rows ``ids`` of a packed matrix as f32, rounded as the gguf package does; the number of ids out of range.

    w uint8; scales int16 and the same as uint8; ``codes``: bytes of a block, ``own`` and ``above``: words of
    scales of a block and a super-block.
    """
    k, y, bad = y_MK.shape[1], flat(y_MK), 0
    blocks = k // 32
    behind = blocks * own
    stride = behind + (phase + blocks + 7) // 8 * above
    for m in range(ids.size):
        if not 0 <= ids[m] < n:
            bad += 1
            continue
        p, lane = ids[m] // 16, ids[m] % 16
        for block in range(blocks):
            at = (p * blocks + block) * codes + 4 * lane
            mine = p * stride + block * own
            upper = p * stride + behind + (phase + block) // 8 * above + lane
            d, least = half_to_float(scales, upper if above else mine + lane), np.float32(0)
            first = second = d
            if kind == Q4_1:
                least = half_to_float(scales, mine + 16 + lane)
            elif kind == Q4_K:
                first = second = d * np.float32(small[2 * mine + lane])
                least = -(half_to_float(scales, upper + 16) * np.float32(small[2 * mine + 16 + lane]))
            elif kind == Q6_K:
                first = d * np.float32(np.int8(small[2 * mine + lane]))
                second = d * np.float32(np.int8(small[2 * mine + 16 + lane]))
            for i in range(32):
                value = (first if i < 16 else second) * np.float32(_code(kind, w, at, i))
                y[m * k + 32 * block + i] = value + least if kind == Q4_1 or kind == Q4_K else value
    return bad


INT, COUNTS, BYTES = types.intp, types.int64[::1], types.uint8[::1]


@lru_cache(None)
def pack_blocks_kernel() -> Any:
    signature = (reads(types.uint8, 2), *[INT] * 8, BYTES, INT, BYTES, INT, INT, COUNTS, INT)
    return policy.kernel(pack_blocks, "pack_blocks", signature)


@lru_cache(None)
def encode_kernel() -> Any:
    return policy.kernel(encode, "encode", (ROWS, INT, INT, BYTES, types.int16[::1], COUNTS, INT))


@lru_cache(None)
def lookup_blocks_kernel() -> Any:
    signature = (INT, reads(types.uint8), INT, reads(types.int16), reads(types.uint8), INT, INT, INT, INT,
                 reads(types.int64), F32_2)
    return policy.kernel(lookup_blocks, "lookup_blocks", signature)
