"""The wish that a run should stop: signals that are noted, and acted on when a step is complete.

SIGTERM and SIGUSR1 are what SLURM, ``scancel`` and launchers send before they kill; Ctrl-C is SIGINT. The
first is noted; one more that comes ``AGAIN`` seconds later ends the process at once. Launchers may pass one
signal on twice within moments, which counts once.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from mpillm.errors import Stopped

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
AGAIN = 1.0            # seconds

_heard = 0             # a process has one set of signal handlers
_when = 0.0


def listen() -> None:
    """Note signals from now on; call in the main thread."""
    for number in NUMBERS:
        signal.signal(number, _note)


def heard() -> int:
    """The number of the signal that asked to stop; 0: none did."""
    return _heard


def check(where: str) -> None:
    """Raises Stopped when a signal came; ``where`` says what is left unfinished."""
    if _heard:
        raise Stopped(f"stopped by {name(_heard)} {where}: nothing is lost, start again with --resume")


def name(number: int) -> str:
    """SIGTERM for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _note(number: int, frame: FrameType | None) -> None:
    global _heard, _when
    now = time.monotonic()
    if not _heard:
        _heard, _when = number, now
    elif now - _when >= AGAIN:
        os._exit(128 + number)
