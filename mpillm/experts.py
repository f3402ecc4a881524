"""Behind kernels: a mixture of experts as operations of a step's plan.

Shape suffixes: T rows of a step, E experts, K experts of a row; a slot is a row at one of its experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpillm.jit import moe as _moe
from mpillm.jit.gemm import NOTHING as _NOTHING
from mpillm.plan import ROOM_WIDTH, ROWS, Plan
from mpillm.quant.layout import PANEL
from mpillm.quant.packed import PackedMatrix


@dataclass
class Experts:
    """The experts of one layer: of each a slice of ``width`` columns, in whole panels, and how rows choose among them.

    ``router`` float32 [E, k]; ``gate_up`` has the experts below each other, of each ``2 * width`` outputs, panels of
    gate and up in turn; ``down`` likewise, of each the ``hidden`` outputs filled up to whole panels, ``width`` inputs
    or more, the others zeros. A row goes to its ``chosen`` best experts, weighted by softmax over these if ``normed``,
    else over all.
    """

    router: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix
    chosen: int
    normed: bool
    width: int
    hidden: int

    def __post_init__(self) -> None:
        count, height = self.router.n, -(-self.hidden // PANEL) * PANEL
        assert 1 <= self.chosen <= count, f"{self.chosen} of {count} experts"
        assert self.width % PANEL == 0 and self.gate_up.n == 2 * count * self.width, f"gate and up {self.gate_up.n}"
        assert self.down.n == count * height and self.down.k >= self.width, f"down {self.down.n} x {self.down.k}"
        assert self.router.format == "f32" and self.router.k == self.gate_up.k, f"router of {self.router.k} inputs"


def record_experts(plan: Plan, x: np.ndarray, experts: Experts, out: np.ndarray) -> None:
    """out [T, hidden] = sum over each row's experts of weight * down(silu(gate(x)) * up(x)), x [T, k].

    Only experts that have rows are read, each once. Quantised formats quantise x, and each expert's columns, first;
    they do so with ``fast`` too.
    """
    count, chosen = experts.router.n, experts.chosen
    assert out.shape == (plan.capacity, experts.hidden) and out.flags.c_contiguous, f"experts: out {out.shape}"
    slots = plan.capacity * chosen
    picked, weights = _room(plan, "picked", slots, np.int32), _room(plan, "weights", slots, np.float32)
    where, sources = _room(plan, "where", slots, np.int32), _room(plan, "sources", slots, np.int32)
    starts = _room(plan, "starts", count + 1, np.int64)
    if experts.width == 0:               # a rank that owns no columns adds nothing to the sum
        plan.tape.add("experts", _moe.combine_operation(), ROWS, experts.hidden, 0, where, weights, _NOTHING, out)
        return
    logits = plan.buffer("router", count)
    plan.linear(x, experts.router, None, logits)
    plan.tape.add("experts", _moe.route_operation(), ROWS, logits, count, chosen, experts.normed, picked, weights)
    plan.tape.add("experts", _moe.group_operation(), ROWS, count, chosen, picked, starts, where, sources)
    middle = _room(plan, "columns", slots * experts.down.k, np.float32)
    _product(plan, _moe.gate_up_operation, x, True, experts, experts.gate_up, middle, experts.down.k, experts.width)
    made = _room(plan, "made", slots * experts.hidden, np.float32)
    _product(plan, _moe.down_operation, middle, False, experts, experts.down, made, experts.hidden, experts.hidden)
    plan.tape.add("experts", _moe.combine_operation(), ROWS, experts.hidden, chosen, where, weights, made, out)


def _product(plan: Plan, operation: Callable[[str], Any], x: np.ndarray, gathered: bool, experts: Experts,
             w: PackedMatrix, out: np.ndarray, stride: int, n: int) -> None:
    """A product of slots with their experts' matrices; ``x`` is rows if ``gathered``, else slots."""
    slots, kind, count = plan.capacity * experts.chosen, _moe.kind_of(w.format), experts.router.n
    sources, starts = _room(plan, "sources", slots, np.int32), _room(plan, "starts", count + 1, np.int64)
    given: tuple[np.ndarray, ...]
    if kind == "codes":
        given = (_room(plan, "codes", slots * w.k, np.int8), _room(plan, "scales", slots * (w.k // 32), np.float32),
                 _room(plan, "sums", slots * (w.k // 16), np.int32))
    elif kind == "numbers":
        given = (_room(plan, "numbers", slots * w.k, np.float32),) if gathered else (x,)
    else:
        given = (_room(plan, "bf16", slots * (-(-w.k // 32) * 32), np.uint16),)
    if kind != "numbers" or gathered:
        plan.tape.add("experts", _moe.take_operation(kind), ROWS, experts.chosen, w.k, x, gathered, sources, starts,
                      count, *given)
    x_stride = {"tiles": -(-w.k // 32) * 32, "pairs": -(-w.k // 2) * 2}.get(kind, w.k)
    values, scales, sums = (*given, _NOTHING, np.zeros(0, np.int32)) if len(given) == 1 else given
    w_scales = _NOTHING if w.scales is None else w.scales
    room, each = plan.thread_room(ROOM_WIDTH)
    plan.tape.add("experts", operation(w.format), values, scales, sums, x_stride, starts, count, w.k, w.data, w_scales,
                  w.stride, len(w_scales) // (w.n // PANEL), w.phase, _NOTHING, np.zeros(0, np.uint16), room, each,
                  plan.buffer("tail", 16), plan.scratch(), out, stride, n)


def _room(plan: Plan, name: str, size: int, dtype: Any) -> np.ndarray:
    """Room that all layers of a plan share."""
    return plan.kept((f"experts' {name}", size), lambda: np.zeros(size, dtype))


def slot_bytes(hidden: int, columns: int) -> int:
    """Bytes of room for one slot, at most: its input and its output, columns before and after they are prepared."""
    return 4 * (2 * hidden + 2 * columns + 128) + 12


def warm_up(formats: list[str]) -> list[Callable[[], Any]]:
    """What makes each kernel of experts with weights of these formats."""
    return _moe.warm_up(formats)


__all__ = ["Experts", "record_experts", "slot_bytes", "warm_up"]
