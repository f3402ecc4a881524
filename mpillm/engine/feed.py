"""Requests on their way to the replicas: rank 0 reads the lines, the root of each replica asks for the next ones.

So replicas balance themselves: whoever is quick asks more often. Only a window of lines is in memory. What a root
tells when it asks (how much it has finished) is the progress of the whole job.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mpillm.engine.order import arrange, sketch
from mpillm.engine.request import FailedLine, Request

WINDOW_LINES, WINDOW_BYTES = 8192, 32 << 20
MESSAGE_BYTES = 16 << 20
AGAIN = 0.05           # seconds until a root that got nothing asks again
TELL = 1.0             # seconds after which a root tells what it has done
TIME_LIMIT = -1        # why a run stops, beside the number of a signal


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the prompts file: its index among those that are not blank, its number, its bytes."""

    index: int
    number: int
    raw: bytes


@dataclass
class Tally:
    """What a replica has done so far."""

    finished: int = 0
    generated: int = 0
    prefilled: int = 0


class Letters(Protocol):
    """Messages that nobody waits for; see machine/mail.py."""

    rank: int

    def send(self, to: int, thing: Any) -> None: ...

    def receive(self) -> tuple[int, Any] | None: ...


class Progress(Protocol):
    """What is shown of a run; see progress.py."""

    def add(self, prefilled: int, generated: int, finished: int) -> None: ...

    def close(self) -> None: ...


@dataclass
class _Customer:
    given: int = 0
    tally: Tally = field(default_factory=Tally)
    gone: bool = False

    @property
    def busy(self) -> int:
        return self.given - self.tally.finished


class Desk:
    """On rank 0: hands out lines, in an order of its own within a window; passes the wish to stop on."""

    def __init__(self, lines: Iterator[Line], mail: Letters, roots: list[int], max_tokens: int,
                 progress: Progress, time_left: Callable[[], float] = lambda: math.inf) -> None:
        """``roots``: ranks of the replicas' roots, this one first. ``progress``: of the whole job."""
        self._lines, self._mail, self._max_tokens = lines, mail, max_tokens
        self._customers = {root: _Customer() for root in roots}
        self._window: deque[Line] = deque()
        self._exhausted = False
        self._progress, self._time_left = progress, time_left
        self.stop = 0

    @property
    def closed(self) -> bool:
        """Nothing is left to hand out."""
        self._fill()
        return self._exhausted and not self._window

    def _fill(self) -> None:
        if self._window or self._exhausted:
            return
        read: list[Line] = []
        size = 0
        for line in self._lines:
            read.append(line)
            size += len(line.raw)
            if len(read) == WINDOW_LINES or size >= WINDOW_BYTES:
                break
        else:
            self._exhausted = True
        order = arrange([sketch(line.raw, self._max_tokens) for line in read])
        self._window.extend(read[i] for i in order)

    def take(self, root: int, wanted: int, tally: Tally) -> tuple[list[Line], bool]:
        """(the next lines for a replica that would like ``wanted``, no more will follow)."""
        customer = self._customers[root]
        self.note(root, tally)
        self._fill()
        if self._exhausted:
            # The last lines are shared evenly: nobody holds more than its part of what is not done.
            here = [one for one in self._customers.values() if not one.gone]
            open_lines = len(self._window) + sum(one.busy for one in here)
            wanted = min(wanted, math.ceil(open_lines / len(here)) - customer.busy)
        found: list[Line] = []
        size = 0
        while self._window and len(found) < wanted and (not found or size + len(self._window[0].raw) < MESSAGE_BYTES):
            found.append(self._window.popleft())
            size += len(found[-1].raw)
            self._fill()
        customer.given += len(found)
        return found, self.closed

    def note(self, root: int, tally: Tally) -> None:
        """What a replica has done by now."""
        customer = self._customers[root]
        before, customer.tally = customer.tally, tally
        self._progress.add(tally.prefilled - before.prefilled, tally.generated - before.generated,
                           tally.finished - before.finished)

    def serve(self) -> None:
        """Answer what the other roots have sent."""
        if not self.stop and self._time_left() <= 0:
            self.ask_to_stop(TIME_LIMIT)
        while (received := self._mail.receive()) is not None:
            sender, (kind, *rest) = received
            if kind == "ask":
                self._mail.send(sender, ("lines", *self.take(sender, *rest)))
            elif kind == "stop":
                self.ask_to_stop(*rest)
            elif kind == "tally":
                self.note(sender, *rest)
            else:
                assert kind == "bye", f"a message of kind {kind!r}"
                self.leave(sender, *rest)

    def ask_to_stop(self, why: int) -> None:
        """All replicas stop after their step."""
        if self.stop:
            return
        self.stop = why
        for root, customer in self._customers.items():
            if root != self._mail.rank and not customer.gone:
                self._mail.send(root, ("stop", why))

    def leave(self, root: int, tally: Tally) -> None:
        """A replica is done."""
        self.note(root, tally)
        self._customers[root].gone = True

    def close(self) -> None:
        """The run is over."""
        self._progress.close()

    @property
    def n_finished(self) -> int:
        """Lines that are done, as far as it has been told."""
        return sum(customer.tally.finished for customer in self._customers.values())

    @property
    def waits(self) -> bool:
        """Some replica still works."""
        return any(not customer.gone for customer in self._customers.values())


class Feed:
    """On the root of a replica: the ``link.Source`` of its requests."""

    def __init__(self, mail: Letters, desk: Desk | None, read: Callable[[Line], Request | FailedLine],
                 reject: Callable[[FailedLine], None], room: Callable[[], int], tally: Tally) -> None:
        """``desk``: on rank 0. ``room()``: how many more requests should wait; ``tally`` is kept by the caller."""
        self._mail, self._desk, self._read, self._reject = mail, desk, read, reject
        self._room, self._tally = room, tally
        self._asked, self._pause, self._stop, self._told = False, 0.0, 0, 0.0
        self._incoming: list[Line] = []
        self.closed = False

    def poll(self, heard: int) -> tuple[int, list[Request]]:
        if self._desk is not None:
            self._desk.serve()
        else:
            self._receive()
        if heard and not self._stop:
            self._ask_to_stop(heard)
        if self._desk is not None:
            self._stop = self._desk.stop
        if not self._stop:
            self._order()
        self._tell()
        lines, self._incoming = self._incoming, []
        return self._stop, [] if self._stop else self._requests(lines)

    def _ask_to_stop(self, why: int) -> None:
        self._stop = why
        if self._desk is not None:
            self._desk.ask_to_stop(why)
        else:
            self._mail.send(0, ("stop", why))

    def _order(self) -> None:
        wanted = self._room()
        if self._asked or self.closed or wanted <= 0 or time.monotonic() < self._pause:
            return
        if self._desk is not None:
            self._arrive(*self._desk.take(self._mail.rank, wanted, replace(self._tally)))
        else:
            self._mail.send(0, ("ask", wanted, self._tally))
            self._asked = True

    def _tell(self) -> None:
        now = time.monotonic()
        if self._desk is not None:
            self._desk.note(self._mail.rank, replace(self._tally))
        elif now - self._told >= TELL:
            self._mail.send(0, ("tally", self._tally))
            self._told = now

    def _receive(self) -> None:
        while (received := self._mail.receive()) is not None:
            _, (kind, *rest) = received
            if kind == "stop":
                self._stop = self._stop or rest[0]
            else:
                assert kind == "lines", f"a message of kind {kind!r}"
                self._arrive(*rest)
                self._asked = False

    def _arrive(self, lines: list[Line], closed: bool) -> None:
        self._incoming += lines
        self.closed = closed
        if not lines and not closed:
            self._pause = time.monotonic() + AGAIN

    def _requests(self, lines: list[Line]) -> list[Request]:
        found = []
        for line in lines:
            request = self._read(line)
            if isinstance(request, Request):
                found.append(request)
            else:
                self._reject(request)
                self._tally.finished += 1
        return found

    def leave(self) -> None:
        """The replica is done, or stops."""
        if self._desk is not None:
            self._desk.leave(self._mail.rank, self._tally)
        else:
            self._mail.send(0, ("bye", self._tally))
