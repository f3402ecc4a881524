"""A thread that makes exchanges, one after the other, while others compute; no MPI here."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol


class Polite(Protocol):
    """Awaits messages asleep while ``computing()``, so that the core is left to the thread that does."""

    computing: Callable[[], bool] | None


class Courier:
    """Does what it is sent in that order, in one thread, which the first job starts and which ends with the process.

    ``waited``: seconds that senders waited for it; ``worked``: seconds that the jobs took. What one of them raises
    is raised in whoever waits, and no later job is begun: others may already be waiting for what will not come.
    """

    def __init__(self) -> None:
        self.waited = self.worked = 0.0
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._awaited = False

    @contextlib.contextmanager
    def sending(self, groups: Iterable[Polite]) -> Iterator[Callable[[Callable[[], None]], Callable[[], None]]]:
        """``send``, with groups that leave the core to the sender while it does not wait itself."""
        for group in groups:
            group.computing = lambda: not self._awaited
        try:
            yield self.send
        finally:
            for group in groups:
                group.computing = None

    def send(self, job: Callable[[], None]) -> Callable[[], None]:
        """Have ``job`` done; the result is to be called where it has to be."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="exchanges", daemon=True)
            self._thread.start()
        done = threading.Event()
        self._jobs.put((job, done))

        def wait() -> None:
            began, self._awaited = time.perf_counter(), True
            done.wait()
            self._awaited = False
            self.waited += time.perf_counter() - began
            if self._failure is not None:
                raise self._failure

        return wait

    def _work(self) -> None:
        while True:
            job, done = self._jobs.get()
            began = time.perf_counter()
            try:
                if self._failure is None:
                    job()
            except BaseException as error:  # also what would end the process: the main thread says so
                self._failure = error
            self.worked += time.perf_counter() - began
            done.set()
