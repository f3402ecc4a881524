"""What a user reads of an exception, and the code that the program ends with."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from mpillm import kernels, main
from mpillm.errors import MpillmError
from mpillm.machine import guard


def lacking() -> MemoryError:
    try:
        np.empty(1 << 60, np.uint8)
    except MemoryError as error:
        return error
    raise AssertionError("an exabyte was given")


@pytest.mark.parametrize("error", [lacking(), MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_memory_that_ran_out_says_while_doing_what(error, monkeypatch):
    board = guard.Board()
    board.say("reading layer 3")
    monkeypatch.setattr(guard, "_board", board)
    assert main.exit_code(error) == 6
    said = main.message(error, "rank 1 (host h): ")
    assert said.startswith("mpillm: rank 1 (host h): error: memory ran out while reading layer 3: ")
    assert "--kv-memory" in said and "--resume" in said and "\n" not in said


@pytest.mark.parametrize("kind", MpillmError.__subclasses__())
def test_errors_of_users_have_their_codes(kind):
    error = kind("a b\n c")
    assert main.exit_code(error) == kind.exit_code
    assert main.message(error, "").endswith("a b c") and "fault of the program" not in main.message(error, "")


def test_anything_else_is_a_fault():
    assert main.exit_code(OSError(errno.EIO, "Input/output error")) == main.exit_code(KeyError("x")) == 70
    assert "fault of the program: KeyError: 'x'" in main.message(KeyError("x"), "")


def test_kernels_are_made_until_a_stop_is_heard(monkeypatch):
    made: list[int] = []
    monkeypatch.setattr(kernels, "_needed", lambda *_: [lambda i=i: made.append(i) for i in range(5)])
    monkeypatch.setattr(kernels, "_fused_with_cache", lambda *_: [])
    kernels.warm_up(["bf16"], "bf16", stop=lambda: len(made) == 2)
    assert made == [0, 1]
    kernels.warm_up(["bf16"], "bf16", part=1, parts=2)
    assert made == [0, 1, 1, 3]
