"""Behind kernels: latent attention as operations of a step's plan.

Shape suffixes: T rows of a step, H heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpillm.jit import latent as _latent
from mpillm.jit import moe as _moe
from mpillm.jit.gemm import NOTHING as _NOTHING
from mpillm.jit.tape import Cell
from mpillm.plan import ROOM_WIDTH, ROWS, Plan
from mpillm.quant.layout import PANEL
from mpillm.quant.packed import PackedMatrix


def record_by_heads(plan: Plan, x: np.ndarray, x_step: int, k: int, w: PackedMatrix, heads: int, out: np.ndarray,
                    out_step: int, n: int, rows: Cell = ROWS) -> None:
    """out[t, h * out_step + i] = sum over j < k of x[t, h * x_step + j] * W_h[i, j], i < n, of every head h.

    ``w`` has the heads' matrices below each other, of each ``n`` outputs filled up to whole panels, its ``k`` inputs
    filled up with zeros to those of ``w``. Quantised formats quantise x first.
    """
    panels = -(-n // PANEL)
    assert w.n == heads * panels * PANEL and w.k >= k and w.phase == 0, f"{heads} matrices: {w.n} x {w.k}, {n} x {k}"
    if not heads:
        return
    assert x.shape[1] >= (heads - 1) * x_step + k and out.shape[1] >= (heads - 1) * out_step + n, \
        f"{heads} heads of x {x.shape}, out {out.shape}"
    kind = _moe.kind_of(w.format)
    slots = plan.capacity * heads
    given: tuple[np.ndarray, ...]
    if kind == "codes":
        given = (_room(plan, "codes", slots * w.k, np.int8), _room(plan, "scales", slots * (w.k // 32), np.float32),
                 _room(plan, "sums", slots * (w.k // 16), np.int32))
    elif kind == "numbers":
        given = (_room(plan, "numbers", slots * w.k, np.float32),)
    else:
        given = (_room(plan, "bf16", slots * (-(-w.k // 32) * 32), np.uint16),)
    plan.tape.add("latent", _latent.take_operation(kind), rows, heads, k, w.k, x, _stride(x), x_step, *given)
    x_stride = {"tiles": -(-w.k // 32) * 32, "pairs": -(-w.k // 2) * 2}.get(kind, w.k)
    values, scales, sums = (*given, _NOTHING, np.zeros(0, np.int32)) if len(given) == 1 else given
    w_scales = _NOTHING if w.scales is None else w.scales
    room, each = plan.thread_room(ROOM_WIDTH)
    plan.tape.add("latent", _latent.product_operation(w.format), rows, heads, values, scales, sums, x_stride, w.k,
                  w.data, w_scales, w.stride, len(w_scales) // max(1, w.n // PANEL), _NOTHING, np.zeros(0, np.uint16),
                  room, each, plan.buffer("tail", 16), plan.scratch(), out, _stride(out), out_step, n)


def _stride(x: np.ndarray) -> int:
    assert x.dtype == np.float32 and (x.strides[1] == 4 or x.shape[1] <= 1), f"rows of {x.dtype}, strides {x.strides}"
    return x.strides[0] // 4


def _room(plan: Plan, name: str, size: int, dtype: Any) -> np.ndarray:
    """Room that all layers of a plan share."""
    return plan.kept((f"latent {name}", size), lambda: np.zeros(size, dtype))
