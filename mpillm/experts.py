"""Behind kernels: a mixture of experts as operations of a step's plan.

Shape suffixes: T rows of a step, E experts; a slot is a row at one of its experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpillm.jit import moe as _moe
from mpillm.jit import routing as _routing
from mpillm.jit.gemm import NOTHING as _NOTHING
from mpillm.plan import ROOM_WIDTH, ROWS, Plan
from mpillm.quant.layout import PANEL, allocate
from mpillm.quant.packed import PackedMatrix


@dataclass
class Router:
    """How rows choose among E experts; the words are those of jit/routing.

    ``weight`` float32 [E, k]; ``correction`` float32 [E] is added to sigmoids for the choice. Only the experts of the
    ``groups_kept`` best of ``groups`` can be chosen (0: all), a group being as good as its two best if ``both``.
    """

    weight: PackedMatrix
    chosen: int
    normed: bool = True
    scale: float = 1.0
    sigmoid: bool = False
    correction: np.ndarray | None = None
    groups: int = 0
    groups_kept: int = 0
    both: bool = False

    def __post_init__(self) -> None:
        count, size = self.weight.n, self.weight.n // max(1, self.groups)
        assert 1 <= self.chosen <= count, f"{self.chosen} of {count} experts"
        assert self.weight.format == "f32", f"router of {self.weight.format}"
        assert self.correction is None or self.correction.shape == (count,), "a correction for each expert"
        assert not self.groups or size * self.groups == count and self.chosen <= self.groups_kept * size, \
            f"{self.chosen} of {count} experts in {self.groups} groups, {self.groups_kept} kept"


@dataclass
class Experts:
    """Experts of one layer, ``held`` of them from ``first`` on, and how rows choose among all.

    Of each a slice of ``width`` columns, in whole panels. ``gate_up`` has the experts below each other, of each
    ``2 * width`` outputs, panels of gate and up in turn; ``down`` likewise, of each the ``hidden`` outputs filled up to
    whole panels, ``width`` inputs or more, the others zeros. Behind them stand ``shared`` ones that every row goes to.
    """

    router: Router
    gate_up: PackedMatrix
    down: PackedMatrix
    width: int
    hidden: int
    held: int
    first: int = 0
    shared: int = 0

    def __post_init__(self) -> None:
        here, height = self.held + self.shared, -(-self.hidden // PANEL) * PANEL
        assert self.first + self.held <= self.router.weight.n, f"experts {self.first} + {self.held}"
        assert self.width % PANEL == 0 and self.gate_up.n == 2 * here * self.width, f"gate and up {self.gate_up.n}"
        assert self.down.n == here * height and self.down.k >= self.width, f"down {self.down.n} x {self.down.k}"
        assert self.router.weight.k == self.gate_up.k, f"router of {self.router.weight.k} inputs"

    @property
    def count(self) -> int:
        """Experts that a row goes to."""
        return self.router.chosen + self.shared

    @property
    def idle(self) -> bool:
        """Whether nothing of any expert is held here."""
        return self.width == 0 or self.held + self.shared == 0


def record_experts(plan: Plan, x: np.ndarray, experts: Experts, out: np.ndarray,
                   beside: np.ndarray | None = None) -> None:
    """out [T, hidden] = sum over each row's experts of weight * down(silu(gate(x)) * up(x)), x [T, k], plus ``beside``.

    Only experts that have rows are read, each once. Quantised formats quantise x, and each expert's columns, first;
    they do so with ``fast`` too.
    """
    router, here, count = experts.router, experts.held + experts.shared, experts.count
    assert out.shape == (plan.capacity, experts.hidden) and out.flags.c_contiguous, f"experts: out {out.shape}"
    assert beside is None or beside.shape == out.shape and beside.flags.c_contiguous, "experts: beside"
    slots, every = plan.capacity * count, router.weight.n
    picked, weights = _room(plan, "picked", slots, np.int32), _room(plan, "weights", slots, np.float32)
    where, sources = _room(plan, "where", slots, np.int32), _room(plan, "sources", slots, np.int32)
    last = (beside is not None, _NOTHING if beside is None else beside, out)
    if experts.idle:                     # such a rank adds nothing to the sum
        plan.tape.add("experts", _moe.combine_operation(), ROWS, experts.hidden, 0, where, weights, _NOTHING, *last)
        return
    starts = _room(plan, "starts", here + 1, np.int64)
    logits, keys = plan.buffer("router", every), plan.buffer("router's keys", every + router.groups)
    correction = np.zeros(every, np.float32) if router.correction is None else router.correction
    plan.linear(x, router.weight, None, logits)
    plan.tape.add("experts", _routing.route_operation(), ROWS, logits, every, router.chosen, experts.shared,
                  router.sigmoid, correction, router.groups, router.groups_kept, router.both, router.normed,
                  router.scale, keys, picked, weights)
    plan.tape.add("experts", _routing.group_operation(), ROWS, every, experts.shared, experts.first, experts.held,
                  count, picked, starts, where, sources)
    middle = _room(plan, "columns", slots * experts.down.k, np.float32)
    _product(plan, _moe.gate_up_operation, x, True, experts, experts.gate_up, middle, experts.down.k, experts.width)
    made = _room(plan, "made", slots * experts.hidden, np.float32)
    _product(plan, _moe.down_operation, middle, False, experts, experts.down, made, experts.hidden, experts.hidden)
    plan.tape.add("experts", _moe.combine_operation(), ROWS, experts.hidden, count, where, weights, made, *last)


def _product(plan: Plan, operation: Callable[[str], Any], x: np.ndarray, gathered: bool, experts: Experts,
             w: PackedMatrix, out: np.ndarray, stride: int, n: int) -> None:
    """A product of slots with their experts' matrices; ``x`` is rows if ``gathered``, else slots."""
    slots, kind, here = plan.capacity * experts.count, _moe.kind_of(w.format), experts.held + experts.shared
    sources, starts = _room(plan, "sources", slots, np.int32), _room(plan, "starts", here + 1, np.int64)
    given: tuple[np.ndarray, ...]
    if kind == "codes":
        given = (_room(plan, "codes", slots * w.k, np.int8), _room(plan, "scales", slots * (w.k // 32), np.float32),
                 _room(plan, "sums", slots * (w.k // 16), np.int32))
    elif kind == "numbers":
        given = (_room(plan, "numbers", slots * w.k, np.float32),) if gathered else (x,)
    else:
        given = (_room(plan, "bf16", slots * (-(-w.k // 32) * 32), np.uint16),)
    if kind != "numbers" or gathered:
        plan.tape.add("experts", _moe.take_operation(kind), w.k, x, gathered, sources, starts, here, *given)
    x_stride = {"tiles": -(-w.k // 32) * 32, "pairs": -(-w.k // 2) * 2}.get(kind, w.k)
    values, scales, sums = (*given, _NOTHING, np.zeros(0, np.int32)) if len(given) == 1 else given
    w_scales = _NOTHING if w.scales is None else w.scales
    room, each = plan.thread_room(ROOM_WIDTH)
    plan.tape.add("experts", operation(w.format), values, scales, sums, x_stride, starts, here, w.k, w.data, w_scales,
                  w.stride, len(w_scales) // (w.n // PANEL), w.phase, _NOTHING, np.zeros(0, np.uint16), room, each,
                  plan.buffer("tail", 16), plan.scratch(), out, stride, n)


def _room(plan: Plan, name: str, size: int, dtype: Any) -> np.ndarray:
    """Room that all layers of a plan share."""
    return plan.kept((f"experts' {name}", size), lambda: allocate(size, dtype))


def slot_bytes(hidden: int, columns: int) -> int:
    """Bytes of room for one slot, at most: its input and its output, columns before and after they are prepared."""
    return 4 * (2 * hidden + 2 * columns + 128) + 12


def warm_up(formats: list[str]) -> list[Callable[[], Any]]:
    """What makes each kernel of experts with weights of these formats."""
    return _moe.warm_up(formats)


__all__ = ["Experts", "Router", "record_experts", "slot_bytes", "warm_up"]
