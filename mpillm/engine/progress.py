"""Progress of a run: a bar on a terminal, a line every so often elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

LOG = logging.getLogger("mpillm.progress")


class RunProgress:
    """Counts requests and tokens of all replicas; ``done``: requests that an earlier attempt finished."""

    def __init__(self, total: int, every: float, done: int = 0) -> None:
        self.total, self.every, self.done = total, every, done
        self.prefilled = self.generated = 0
        self.finished = done
        self._start = time.perf_counter()
        self._said = self._start - every      # the first step is worth a line: the run has begun
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(TextColumn("{task.description}"), BarColumn(bar_width=12),
                                 TextColumn("{task.completed}/{task.total}"), TextColumn("{task.fields[rate]}"),
                                 TimeElapsedColumn(), console=Console(stderr=True))
            self._task = self._bar.add_task("requests", total=total, rate="")
            self._bar.start()

    def add(self, prefilled: int, generated: int, finished: int) -> None:
        """Account for a step."""
        self.prefilled += prefilled
        self.generated += generated
        self.finished += finished
        now = time.perf_counter()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.finished, rate=self._brief(now))
        elif now - self._said >= self.every:
            LOG.info("%d of %d requests, %s", self.finished, self.total, self._rate(now))
            self._said = now

    def _brief(self, now: float) -> str:
        """For the bar, which has little room."""
        text = f"{self.generated / max(now - self._start, 1e-9):.1f} t/s"
        if self.done < self.finished < self.total:
            text += f", {_clock(self._left(now))} left"
        return text

    def _left(self, now: float) -> float:
        return (now - self._start) / (self.finished - self.done) * (self.total - self.finished)

    def _rate(self, now: float) -> str:
        seconds = max(now - self._start, 1e-9)
        text = f"{self.generated / seconds:.1f} tokens/s generated, {self.prefilled / seconds:.1f} prefilled"
        if self.done < self.finished < self.total:
            text += f", about {_clock(self._left(now))} left"
        return text

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
