"""Exceptions that a user may see, and the exit codes of the program.

=====  =================================================================
code   meaning
=====  =================================================================
0      the run finished (lines that failed are error lines in the results)
2      usage: an option is wrong or conflicts with another
3      the model cannot be used: missing, damaged, unknown, unsupported
4      the prompts file cannot be read
5      an output cannot be written, or exists already
6      the memory of the ranks does not suffice, or ran out
7      the launch is wrong: MPI, ranks, cores
8      a rank did not come to an exchange in time: stuck or killed
9      `--on-stop expire`: stopped before the end; unfinished lines are in the errors file
70     a fault of the program itself (a rank's unexpected exception)
75     stopped by a signal or --time-limit before the end: start again with --resume
128+N  a rank was killed by signal N, or a second signal came (some launchers: N)
=====  =================================================================
"""

from __future__ import annotations


class MpillmError(Exception):
    """Base of all errors with a message for the user; ``exit_code`` ends the program.

    ``agreed``: every rank has raised it alike, so that each leaves by itself; ``quiet``: another rank prints it.
    """

    exit_code = 70
    agreed = False
    quiet = False


class UsageError(MpillmError):
    """An option has a wrong value or conflicts with another."""

    exit_code = 2


class ModelError(MpillmError):
    """The model is missing, damaged, of an unknown kind or unsupported."""

    exit_code = 3


class InputError(MpillmError):
    """The prompts file cannot be read."""

    exit_code = 4


class OutputError(MpillmError):
    """An output cannot be written, or exists and may not be overwritten."""

    exit_code = 5


class ResourceError(MpillmError):
    """The memory that the ranks have does not suffice."""

    exit_code = 6


class LaunchError(MpillmError):
    """The job was started in a way that cannot work."""

    exit_code = 7


class ExchangeError(MpillmError):
    """A rank did not come to an exchange before the deadline: it is stuck, or was killed."""

    exit_code = 8


class Stopped(MpillmError):
    """A signal or the time limit asked to stop before everything was done; EX_TEMPFAIL of sysexits.h."""

    exit_code = 75


class LineError(MpillmError):
    """One input line cannot be served; it alone gets an error result.

    ``status`` is the HTTP-like code of the result line, ``param`` the field at fault
    (or None), ``code`` a short machine-readable word.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400,
                 code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code
