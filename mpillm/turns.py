"""Behind kernels: plans for the parts of a step's rows, and such plans run in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpillm.cache import Rows
from mpillm.jit import policy as _policy
from mpillm.jit import tape as _tape
from mpillm.plan import Plan


class PlanPart(Plan):
    """A plan whose rows lie in the buffers of ``whole`` from row ``first`` on.

    All other room is used within an operation, or between two that stand beside each other: ``whole`` and its parts
    share it, although parts are run in turns.
    """

    def __init__(self, whole: Plan, first: int, capacity: int) -> None:
        assert first + capacity <= whole.capacity, f"rows {first} ... {first + capacity} of {whole.capacity}"
        super().__init__(capacity, whole._fast, whole.scratch_nbytes)
        self._whole, self._first, self.prompts = whole, first, whole.prompts
        self._branches = whole.part_branches.setdefault(capacity, {})

    def rows_of(self, name: str, n: int, dtype: Any) -> np.ndarray:
        return self._whole.rows_of(name, n, dtype)[self._first:self._first + self.capacity]

    def kept(self, key: tuple, make: Callable[[], np.ndarray]) -> np.ndarray:
        return self._whole.kept(key, make)

    def thread_room(self, width: int) -> tuple[np.ndarray, int]:
        return self._whole.thread_room(width)

    def sums_room(self, n: int) -> np.ndarray:
        return self._whole.sums_room(n)


def run_in_turns(work: Sequence[tuple[Plan, Rows]], send: _tape.Send) -> None:
    """Run plans for these rows, each going on while what another one sent (``Plan.call``) is on its way.

    They are parts of one plan, recorded alike. In every layer the first has written its rows into the cache before
    the next attends, and what they send keeps one order. ``send`` has something done by another thread; what it
    returns waits for that.
    """
    none = np.zeros(0, np.int64)
    for _ in range(2):      # the room that they share for sums of attention grows in the first turn
        held = [plan.begin(rows, none) for plan, rows in work]
    _tape.run_in_turns([plan.tape for plan, _ in work], _policy.threads(), send)
    del held


__all__ = ["PlanPart", "run_in_turns"]
