"""Two halves of a step in flight: one computes while the sums of the other travel between nodes.

A step that is cut reads each weight twice. So it pays where its products are bound by arithmetic, which is with many
rows, and where messages take as long as computing; decode steps, bound by reading weights, rarely gain. Which it is
depends on the machine, the network and the model: ``auto`` tries both ways on the first steps of each size.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from mpillm import kernels
from mpillm.config import RunConfig
from mpillm.kernels import Plan, Rows
from mpillm.layers.linear import Reducer

LOG = logging.getLogger("mpillm.exchange")
LEAST = 64              # rows of a step that is cut: halves of fewer read as many weights as the whole for less work
EVEN = 16               # rows of which the first half is a multiple: products take so many together
FIRST = 2               # steps of each size that are tried and not counted: they record plans and touch memory
COUNTED = 8             # steps of each size that are
WAYS = "whole", "in halves"
Send = Callable[[Callable[[], None]], Callable[[], None]]


class Ranks(Reducer, Protocol):
    """What is asked of a replica."""

    index: int
    is_root: bool

    def sends(self, inside: bool) -> bool: ...

    def sending(self) -> AbstractContextManager[Send]: ...

    def gather(self, array: np.ndarray) -> list[np.ndarray] | None: ...

    def bcast(self, array: np.ndarray) -> None: ...


@dataclass
class _Trial:
    """Steps of one size, cut and whole in the turn whole, cut, cut, whole, so that neither has the longer context."""

    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))     # a row, by whether cut
    steps: int = 0
    cut: bool | None = None         # what was found

    @property
    def turn(self) -> bool:
        return (self.steps + 1) // 2 % 2 == 1

    def took(self, seconds: float) -> bool:
        """Count a step's seconds a row; whether it was the last one."""
        if self.steps >= FIRST:
            self.seconds[self.turn].append(seconds)
        self.steps += 1
        return self.steps == FIRST + COUNTED


class Overlap:
    """Which steps are cut, the same on every rank of the replica, and how halves are run."""

    def __init__(self, mode: str, ranks: Ranks, least: int = LEAST) -> None:
        """``mode``: 'on' cuts every step of ``least`` rows and more, 'auto' where that is found to be quicker."""
        self._mode, self._ranks, self._least = mode, ranks, least
        self._trials: dict[int, _Trial] = {}
        self.cut_steps = 0

    def cut(self, rows: Rows) -> int:
        """Rows of the first half; 0: the step is not cut."""
        n = len(rows.tokens)
        if n < self._least or not rows.in_order or not (self._mode == "on" or self._trying(n)):
            return 0
        half = -(-n // 2)
        if n >= 4 * EVEN:
            half = -(-half // EVEN) * EVEN
        return half

    def _trying(self, n: int) -> bool:
        trial = self._trials.setdefault(n.bit_length(), _Trial())
        return trial.turn if trial.cut is None else trial.cut

    def run(self, halves: Sequence[tuple[Plan, Rows]]) -> None:
        """Run a step's halves in turns."""
        self.cut_steps += 1
        with self._ranks.sending() as send:
            kernels.run_in_turns(halves, send)

    def took(self, rows: Rows, seconds: float) -> None:
        """What a step took; every rank says so after every step."""
        n = len(rows.tokens)
        trial = self._trials.get(n.bit_length())
        if self._mode == "on" or trial is None or trial.cut is not None or n < self._least or not rows.in_order:
            return
        if trial.took(seconds / n):
            self._decide(trial, 1 << n.bit_length() - 1)

    def _decide(self, trial: _Trial, low: int) -> None:
        """The quicker way, by the slowest rank's median of each. All ranks come here after the same step."""
        medians = np.array([statistics.median(trial.seconds[cut]) for cut in (False, True)])
        found = self._ranks.gather(medians)
        if found is not None:
            medians = np.max(found, axis=0)
        self._ranks.bcast(medians)
        best = int(medians[1] < medians[0])
        trial.cut = best == 1
        if self._ranks.is_root:
            LOG.info("replica %d: steps of %d to %d rows are computed %s: %.0f rows/s, %.0f %s (--overlap auto)",
                     self._ranks.index, max(low, self._least), 2 * low - 1, WAYS[best], 1 / medians[best],
                     1 / medians[1 - best], WAYS[1 - best])


def planned(run: RunConfig, tp: int, rows: int) -> bool:
    """Whether steps of so many rows may be cut, if the ranks turn out to be on several nodes."""
    return run.overlap != "off" and tp > 1 and rows >= LEAST


def chosen(mode: str, ranks: Ranks) -> Overlap | None:
    """For a run with ``--overlap mode``; None where no step is cut: off, in shared memory, auto inside a node."""
    if ranks.tp == 1 or mode == "off":
        return None
    if not ranks.sends(inside=mode == "on"):
        if mode == "on" and ranks.is_root:
            LOG.info("--overlap on: the ranks of replica %d share memory, or this MPI serves one thread alone: steps "
                     "are computed whole", ranks.index)
        return None
    return Overlap(mode, ranks)
