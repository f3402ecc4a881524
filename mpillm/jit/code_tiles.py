"""Linear layers of quantised weights over tiles of codes (tier amx).

Legend: M rows, N outputs, K inputs; a panel is 16 outputs, a block 32 inputs. All arrays are flat.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from mpillm.jit import policy
from mpillm.jit.gemm import clear, finish
from mpillm.jit.isa import amx_codes
from mpillm.jit.isa.amx import SCRATCH, configure, release
from mpillm.jit.isa.amx_codes import MOST_BLOCKS, MOST_ROWS, pack_rows

GROUP = 16             # panels that one packing of rows serves, and whose weights stay in the second cache meanwhile
ROW_CHUNK = 512        # rows that share one pass over the weights


@lru_cache(None)
def codes_tiles_core(name: str) -> Any:
    """The core of y = x @ w + bias in tier amx: arguments as for ``tiles.tiles_core``."""
    block, wide = amx_codes.codes_block(name), amx_codes.FORMATS[name].wide

    @policy.helper
    def stretch(x, x_scales, x_sums, rows, blocks, w, w_scales, phase, p, panels, start, stop, y, offset, stride,
                room, at, configured):
        """Some blocks of K for all rows; returns the rows for which the tiles stand."""
        for row in range(0, rows, MOST_ROWS):
            size = min(MOST_ROWS, rows - row)
            size_0, size_1 = min(16, size), max(0, size - 16)
            if configured != size:
                configure(room, at, size_0, size_1, 32, 8)
                configured = size
            pack_rows(x, x_scales, x_sums, row, size_0, size_1, blocks, start, stop, room, at)
            for q in range(0, panels, wide):
                block(size_0, size_1, min(wide, panels - q), start == 0, row == 0, blocks, w, w_scales, p + q, phase,
                      start, stop, y, offset + row * stride + 16 * q, stride, room, at)
        return configured

    @policy.helper
    def chunk_part(part, parts, x, x_scales, x_sums, rows, k, w, w_scales, phase, bias, y, n, tail, room):
        all_panels, blocks, at, configured = (n + 15) // 16, k // 32, part * SCRATCH, 0
        stretches = (blocks + MOST_BLOCKS - 1) // MOST_BLOCKS
        p, end = part * all_panels // parts, (part + 1) * all_panels // parts
        while p < end:
            panels = min(GROUP, end - p)
            partial = 16 * (p + panels) > n
            if partial and panels > 1:
                panels, partial = panels - 1, False
            target, offset, stride = (tail, 0, 16) if partial else (y, 16 * p, n)
            if k == 0:
                clear(rows, 16 * panels, target, offset, stride)
            for s in range(stretches):
                configured = stretch(x, x_scales, x_sums, rows, blocks, w, w_scales, phase, p, panels,
                                     s * blocks // stretches, (s + 1) * blocks // stretches, target, offset, stride,
                                     room, at, configured)
            finish(rows, p, panels, partial, bias, y, n, tail)
            p += panels
        if configured:
            release(room, at)

    @policy.helper
    def codes_amx_part(part, parts, x, x_scales, x_sums, rows, k, w, w_scales, phase, bias, y, n, tail, room):
        for first in range(0, rows, ROW_CHUNK):
            chunk_part(part, parts, x[first * k:], x_scales[first * (k // 32):], x_sums[first * (k // 16):],
                       min(ROW_CHUNK, rows - first), k, w, w_scales, phase, bias, y[first * n:], n, tail[16 * first:],
                       room)

    return codes_amx_part
