"""A small parent process beside a rank, which stays when the rank is killed, hangs or is stopped, and says so.

A launcher kills all ranks as soon as one is gone, so no other rank could tell what it was doing. The guard is
made by a fork before anything else is loaded; a page of memory that both share (``Board``) holds what the rank
does at the moment. It passes signals on; a second one, ``signals.AGAIN`` seconds later, ends the rank at once,
even inside a kernel.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import socket
import time
from collections.abc import Callable

from mpillm.errors import ExchangeError
from mpillm.machine import signals

OFF = "MPILLM_NO_GUARD"        # set: no guard, for debuggers
TICK = 0.5                     # seconds between looks
STOPPED = 600.0                # seconds that a process may stand still before it knows its own limit
_TEXT, _WHO = slice(64, 2048), slice(2048, 4096)
_WHY: dict[int, str] = {
    signal.SIGKILL: "by kill -9, or by the kernel because memory ran out",
    signal.SIGSEGV: "a fault of the program",
    signal.SIGBUS: "a file or shared memory was cut off while it was in use",
    signal.SIGILL: "an instruction that this processor lacks: see mpillm doctor"}


class Board:
    """What a process does at the moment, in memory that its guard reads."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, 4096)
        # Each figure is one store of 8 bytes: the guard must never see half of one, nor a moment without
        self._figures = memoryview(self._page).cast("d")

    def name(self, who: str) -> None:
        """Who this process is, as messages should call it."""
        self._put(_WHO, who)

    def limit(self, working: float, stopped: float) -> None:
        """Seconds after which a doing that does not change is a hang: of a process that runs, of a stopped one."""
        self._figures[1], self._figures[2] = working, stopped

    def say(self, text: str) -> None:
        """Begin to do something else."""
        self._put(_TEXT, text)
        self._figures[0] = time.monotonic()

    def _put(self, place: slice, text: str) -> None:
        data = text.encode()[:place.stop - place.start - 1]
        self._page[place.start:place.start + len(data) + 1] = data + b"\0"

    def read(self) -> tuple[str, str, float, tuple[float, float]]:
        """(who, what, since when on the monotonic clock, limits)."""
        who, text = (self._page[place].split(b"\0")[0].decode("utf-8", "replace") for place in (_WHO, _TEXT))
        return who, text, self._figures[0], (self._figures[1], self._figures[2])


_board = Board()               # of this process; its guard holds the same page


def board() -> Board:
    """The board of this process."""
    return _board


def guarded(work: Callable[[], int]) -> int:
    """``work()`` in a child of this process; in the child its value is returned, the parent never returns.

    Call before threads exist. Where ``MPILLM_NO_GUARD`` is set, there is no guard.
    """
    if os.environ.get(OFF) or not hasattr(signal, "sigtimedwait"):
        signals.listen()
        return work()
    _board.name(f"process {os.getpid()} (host {socket.gethostname().split('.')[0]})")
    watched = {*signals.NUMBERS, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    _board.limit(0, STOPPED)
    parent, child = os.getpid(), os.fork()
    if child:
        _end(_Guard(child, watched).run())
    _die_with(parent)
    signals.listen()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
    _board.say("starting")
    return work()


def _die_with(parent: int) -> None:
    """Who kills the guard means this process."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)      # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


class _Guard:
    """The parent's side."""

    def __init__(self, child: int, watched: set[signal.Signals]) -> None:
        self.child, self.watched = child, watched
        self.asked = 0.0           # when the first signal came
        self.stopped = 0.0         # since when the child is stopped
        self.resumed = 0.0         # when the job, or the child, last went on after it was suspended

    def run(self) -> int:
        """Wait for the child; the exit code of both, or minus the signal that ended it."""
        looked = time.monotonic()
        while True:
            got = signal.sigtimedwait(self.watched, TICK)
            now = time.monotonic()
            if now - looked > 10 * TICK:
                self.resumed = now
            looked = now
            if got is not None and got.si_signo != signal.SIGCHLD:
                if self._pass_on(got.si_signo, now):
                    return -got.si_signo
            code = self._look(now)
            if code is not None:
                return code
            if self._hangs(now):
                return ExchangeError.exit_code

    def _pass_on(self, number: int, now: float) -> bool:
        """Tell the child; True when it was the second signal, and the child is gone."""
        if self.asked and now - self.asked >= signals.AGAIN:
            _print(f"{_board.read()[0]}: a second signal, leaving at once; what had been written is kept")
            self._kill()
            return True
        self.asked = self.asked or now
        os.kill(self.child, number)
        return False

    def _look(self, now: float) -> int | None:
        """The exit code of a child that ended, minus a signal's number if one ended it, else None."""
        while True:
            pid, status = os.waitpid(self.child, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not pid:
                return None
            if os.WIFSTOPPED(status):
                self.stopped = now
            elif os.WIFCONTINUED(status):
                self.stopped, self.resumed = 0.0, now
            elif os.WIFSIGNALED(status):
                number = os.WTERMSIG(status)
                who, text, since, _ = _board.read()
                why = f" ({_WHY[number]})" if number in _WHY else ""
                _print(f"{who} was killed by {signals.name(number)}{why} while {text}, "
                       f"begun {now - since:.1f} s before; what had finished is kept: start again with --resume")
                return -number
            else:
                return os.WEXITSTATUS(status)

    def _hangs(self, now: float) -> bool:
        """Whether the child was ended because its doing did not change for too long."""
        who, text, since, (working, stopped) = _board.read()
        began, limit = (self.stopped, stopped) if self.stopped else (since, working)
        spent = now - max(began, self.resumed)
        if not limit or spent <= limit:
            return False
        how = "stands still (stopped by SIGSTOP or a debugger)" if self.stopped else "does not go on"
        _print(f"{who} {how} since {spent:.0f} s while {text}: the run ends (--exchange-timeout); "
               "what had finished is kept: start again with --resume")
        self._kill()
        return True

    def _kill(self) -> None:
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)


def _end(code: int) -> None:
    """End this process as the child ended: launchers clean up after a signal even where MPI was not up yet."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))       # the rank's own core file is the one of interest
        number = -code
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
        code = 128 + number
    os._exit(code)


def _print(text: str) -> None:
    try:
        os.write(2, f"mpillm: {text}\n".encode())
    except OSError:
        return
    time.sleep(0.25)           # launchers forward last words late, or drop them
