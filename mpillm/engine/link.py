"""A few words that ride on what the ranks of a replica exchange in each step anyway.

Each rank tells the root whether it heard a signal; the root tells all whether to stop and which requests
are new. So every rank knows the same at the end of a step, and none decides by its own clock.
"""

from __future__ import annotations

import pickle
from typing import Any, Protocol

import numpy as np

from mpillm.machine import signals

STOP, NEWS, CLOSED = range(3)      # words of the root: why to stop, bytes of new requests, none will follow
_WORDS = 3


class Exchange(Protocol):
    """Small arrays to the root of a replica and back."""

    is_root: bool

    def gather(self, array: np.ndarray) -> list[np.ndarray] | None: ...

    def bcast(self, array: np.ndarray) -> None: ...


class Source(Protocol):
    """On the root: where requests come from."""

    closed: bool                   # none will follow

    def poll(self, heard: int) -> tuple[int, list[Any]]:
        """(why to stop, 0: go on; new requests); ``heard``: the signal that a rank of the replica heard, or 0."""
        ...


class Link:
    """An ``Exchange`` whose messages carry the words; the root's first answer of a step decides them."""

    def __init__(self, exchange: Exchange, source: Source | None) -> None:
        """``source``: on the root alone."""
        assert (source is not None) == exchange.is_root, "the root, and no other rank, has a source"
        self._exchange, self._source, self.is_root = exchange, source, exchange.is_root
        self._words = np.zeros(_WORDS, np.int64)
        self._packed = np.zeros(0, np.uint8)
        self._heard, self._decided = 0, False
        self.stop, self.closed = 0, False

    def gather(self, array: np.ndarray) -> list[np.ndarray] | None:
        """As the exchange's own; arrays of 8-byte numbers."""
        message = np.concatenate([np.array([signals.heard()], np.int64).view(np.uint8),
                                  np.ascontiguousarray(array).reshape(-1).view(np.uint8)])
        parts = self._exchange.gather(message)
        if parts is None:
            return None
        self._heard = max([self._heard, *(int(part[:8].view(np.int64)[0]) for part in parts)])
        return [part[8:].view(array.dtype).reshape(array.shape) for part in parts]

    def bcast(self, array: np.ndarray) -> None:
        """As the exchange's own."""
        if self.is_root and not self._decided:
            self._decide()
        flat = array.reshape(-1).view(np.uint8)
        message = np.concatenate([self._words.view(np.uint8), flat])
        self._exchange.bcast(message)
        self._words = message[:8 * _WORDS].view(np.int64).copy()
        flat[:] = message[8 * _WORDS:]
        self._decided = True

    def turn(self) -> None:
        """The words alone: for a step without decisions."""
        if not self._decided:
            self.gather(np.zeros(0, np.int64))
            self.bcast(np.zeros(0, np.int64))

    def news(self) -> list[Any]:
        """Close the step: take note of the words; the new requests, the same on every rank."""
        self.turn()
        self.stop, self.closed = int(self._words[STOP]), bool(self._words[CLOSED])
        count, self._decided, found = int(self._words[NEWS]), False, []
        if count:
            packed = self._packed if self.is_root else np.empty(count, np.uint8)
            self._exchange.bcast(packed)
            found = pickle.loads(packed.data)
        return found

    def _decide(self) -> None:
        assert self._source is not None, "the root decides"
        stop, found = self._source.poll(self._heard)
        self._packed = np.zeros(0, np.uint8)
        if found:
            self._packed = np.frombuffer(bytearray(pickle.dumps(found, pickle.HIGHEST_PROTOCOL)), np.uint8)
        self._words = np.array([stop, self._packed.size, self._source.closed], np.int64)
