"""`python -m mpillm.main`: run the program so that no rank ever waits for one that failed.

An error on which all ranks agreed is one line from rank 0, and every rank leaves by itself with its code. Any
other exception is printed by the rank that has it, and MPI_Abort ends the job at once.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from mpillm.errors import MpillmError, OutputError, ResourceError, Stopped

FAULT = 70                      # exit code of an unexpected exception
INTERRUPTED = 130
GUARDED = ("run", "perplexity", "bench")
FRAMES = 6                      # of a traceback: the innermost ones


def main(argv: list[str] | None = None, run: Callable[[list[str]], int] | None = None) -> int:
    """Run ``run(argv)`` (default: ``mpillm run``) under the abort guard; the exit code."""
    sys.excepthook = _last_resort
    threading.excepthook = _thread_failed
    try:
        if run is None:
            from mpillm.cli import command
            run = command
        code = run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except BaseException as error:
        return end(error)


def end(error: BaseException) -> int:
    """Print what a user should read of ``error``; the exit code, unless the whole job has to be aborted."""
    code = exit_code(error)
    world = _world()
    alone = world is None or world.size == 1
    agreed = alone or getattr(error, "agreed", False)
    if isinstance(error, BrokenPipeError):
        _abandon_stdout()
    if not agreed and world.rank:
        # Ranks that fail alike at once: let the first say it, its abort ends the others
        time.sleep(min(0.4 * world.rank, 3.0))
    if not getattr(error, "quiet", False):
        _print(message(error, "" if agreed else f"rank {world.rank} ({world.host}): "))
    _flush()
    if not agreed:
        world.abort(code)
    return code


def exit_code(error: BaseException) -> int:
    """The code with which the program ends for ``error``; see mpillm/errors.py."""
    if isinstance(error, MpillmError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return OutputError.exit_code
    if _lacks_memory(error):
        return ResourceError.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return FAULT


def message(error: BaseException, who: str) -> str:
    """The text for standard error; empty when the error has been explained already."""
    if isinstance(error, Stopped):
        return f"mpillm: {who}" + " ".join(str(error).split())
    if isinstance(error, MpillmError):
        return f"mpillm: {who}error: " + " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        return f"mpillm: {who}interrupted"
    if isinstance(error, BrokenPipeError):
        return f"mpillm: {who}error: the reader of the output went away"
    if _lacks_memory(error):
        return (f"mpillm: {who}error: memory ran out{_doing()}: use more nodes, or a smaller --kv-memory, --max-batch, "
                "--prefill-chunk or --weights; what had finished is kept: start again with --resume")
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            return f"mpillm: {who}{error.code}"
        return f"mpillm: {who}left with code {error.code}" if who and error.code else ""
    lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-FRAMES)
    summary = " ".join(f"{type(error).__name__}: {error}".split())
    return "".join(lines) + f"mpillm: {who}fault of the program: {summary}"


def _lacks_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or isinstance(error, OSError) and error.errno == errno.ENOMEM


def _doing() -> str:
    """What this rank's board says, if it has one."""
    guard = sys.modules.get("mpillm.machine.guard")
    text = "" if guard is None else guard.board().read()[1]
    return f" while {text}" if text else ""


def _world():
    """The started MPI world, without importing what has not been needed yet."""
    collectives = sys.modules.get("mpillm.collectives")
    return None if collectives is None else collectives.current()


def _print(text: str) -> None:
    if not text:
        return
    try:
        sys.stderr.write(text + "\n")      # one write, so that ranks' lines do not mix
    except (OSError, ValueError, AttributeError):
        return


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue


def _abandon_stdout() -> None:
    """Point stdout at nothing: the flush when Python ends would fail once more."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        return


def _last_resort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    end(error.with_traceback(trace))


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """A helper thread's exception ends the process too: somebody waits for its work."""
    error = failure.exc_value
    if error is None or isinstance(error, SystemExit):
        return
    if isinstance(error, MpillmError):
        error.agreed = False
    os._exit(end(error))


def as_module() -> int:
    """`python -m mpillm.main` is `mpillm run`, unless it names another sub-command."""
    from mpillm.cli import COMMANDS, VERSION

    given = sys.argv[1:]
    return program(given if given and given[0] in (*COMMANDS, VERSION) else ["run", *given])


def program(argv: list[str] | None = None) -> int:
    """`mpillm`: a command of the command line, with a guard beside it where it computes on ranks."""
    given = sys.argv[1:] if argv is None else argv
    if not given or given[0] not in GUARDED or "-h" in given or "--help" in given:
        return main(given)
    from mpillm.machine.guard import guarded

    return guarded(lambda: main(given))


if __name__ == "__main__":
    sys.exit(as_module())
