"""Logging that knows its rank: rank 0 informs, the others only warn, all on standard error."""

from __future__ import annotations

import logging
import sys

from mpillm.errors import UsageError

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
NAME = "mpillm"


class _Formatter(logging.Formatter):
    def __init__(self, rank: int, host: str) -> None:
        super().__init__("%(message)s")
        self._who = f"[rank {rank} {host}] " if rank else ""

    def format(self, record: logging.LogRecord) -> str:
        kind = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{self._who}{kind}{super().format(record)}"


class _Stderr(logging.StreamHandler):
    """Writes to whatever sys.stderr is at the moment: tests and progress bars replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def setup(rank: int, host: str, level: str = "info") -> logging.Logger:
    """Set up the logger ``mpillm`` for this rank; ranks above 0 stay silent below a warning unless debugging.

    UsageError for an unknown ``level``.
    """
    if level not in LEVELS:
        raise UsageError(f"--log-level {level}: use one of {', '.join(LEVELS)}")
    logger = logging.getLogger(NAME)
    for old in list(logger.handlers):
        logger.removeHandler(old)
    handler = _Stderr()
    handler.setFormatter(_Formatter(rank, host))
    logger.addHandler(handler)
    threshold = LEVELS[level]
    logger.setLevel(max(threshold, logging.WARNING) if rank and threshold > logging.DEBUG else threshold)
    logger.propagate = False
    return logger
