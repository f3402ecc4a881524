"""Behind kernels: latent attention as operations of a step's plan.

Shape suffixes: T rows of a step, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpillm.cache import Heads
from mpillm.jit import latent as _latent
from mpillm.jit import moe as _moe
from mpillm.jit.gemm import NOTHING as _NOTHING
from mpillm.jit.tape import Cell
from mpillm.plan import ROOM_WIDTH, ROWS, Plan
from mpillm.quant.layout import PANEL, allocate
from mpillm.quant.packed import PackedMatrix


@dataclass(frozen=True)
class LatentHeads:
    """Latent attention's widths, and the query heads that are held here.

    A cached row has ``kv_rank`` normed latent columns and ``rope`` rotated ones; a head's query and key have ``nope``
    columns and ``rope`` rotated ones, its value has ``value``.
    """

    n_heads: int
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def row(self) -> int:
        return self.kv_rank + self.rope

    @property
    def query(self) -> int:
        return self.nope + self.rope

    @property
    def together(self) -> Heads:
        """All heads over the one latent row, of which the values are the first columns."""
        starts, stops = (np.array([end] if self.n_heads else [], np.int32) for end in (0, self.n_heads))
        return Heads(self.row, self.n_heads, starts, stops, self.kv_rank)

    @property
    def apart(self) -> Heads:
        """Each head over keys and values of its own."""
        starts = np.arange(self.n_heads, dtype=np.int32)
        return Heads(self.query, self.n_heads, starts, starts + 1, self.value)


def record_rows(plan: Plan, latents: np.ndarray, weight: np.ndarray, eps: float, heads: LatentHeads, q: np.ndarray,
                absorbed: np.ndarray | None, normed: np.ndarray | None = None) -> None:
    """Norm the first columns of ``latents`` [T, row] and rotate the others, and those of queries [T, H * query].

    They stay where they are. The queries' rotated columns also go to ``absorbed`` [T, H * row], behind the first
    ``kv_rank`` of each head; the normed latents to ``normed`` [T, kv_rank].
    """
    assert latents.shape == (plan.capacity, heads.row) and weight.shape == (heads.kv_rank,), f"latents {latents.shape}"
    assert q.shape == (plan.capacity, heads.n_heads * heads.query), f"queries {q.shape}"
    assert absorbed is None or (absorbed.shape == (plan.capacity, heads.n_heads * heads.row)
                                and absorbed.flags.c_contiguous), "absorbed queries of other widths"
    plan.rotate(heads.rope)
    plan.tape.add("rope", _latent.rows_operation(), ROWS, heads.kv_rank, heads.rope, latents, _stride(latents), weight,
                  eps, *plan.angles(), heads.n_heads, heads.nope, q, _stride(q),
                  _NOTHING if absorbed is None else absorbed,
                  *((_NOTHING, 0) if normed is None else (normed, _stride(normed))))


def record_spread(plan: Plan, k: tuple[np.ndarray, int], v: tuple[np.ndarray, int], rotated: np.ndarray,
                  heads: LatentHeads, keys: np.ndarray, values: np.ndarray) -> None:
    """keys [T, H * query] and values [T, H * value] of each head's parts and the ``rotated`` columns that all share.

    ``k``, ``v``: rows, and how far apart the heads' columns stand in them.
    """
    for made, width in ((keys, heads.query), (values, heads.value)):
        assert made.shape == (plan.capacity, heads.n_heads * width) and made.flags.c_contiguous, f"{made.shape}"
    plan.tape.add("latent", _latent.spread_operation(), ROWS, heads.n_heads, heads.nope, heads.rope, heads.value,
                  k[0], _stride(k[0]), k[1], v[0], _stride(v[0]), v[1], rotated, _stride(rotated), keys, values)


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
    return plan.kept((f"latent {name}", size), lambda: allocate(size, dtype))


def warm_up(formats: list[str]) -> list[Callable[[], Any]]:
    """What makes each kernel of latent attention with weights of these formats."""
    return _latent.warm_up(formats)


__all__ = ["LatentHeads", "record_by_heads", "record_rows", "record_spread", "warm_up"]
