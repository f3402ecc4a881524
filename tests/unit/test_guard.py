"""The guard beside a rank: codes passed on, deaths and hangs explained, signals that are noted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import os, signal, sys, time
from mpillm.machine import guard, signals
def work():
    board = guard.board()
    board.name("rank 3 (host h)")
    board.say("adding numbers")
    {body}
sys.exit(guard.guarded(work))
"""


def start(body):
    return subprocess.Popen([sys.executable, "-c", PROGRAM.format(body=body)], stderr=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True)


def end(process):
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.mark.parametrize("code", [0, 3, 75])
def test_the_code_is_passed_on(code):
    assert end(start(f"return {code}")) == (code, "", "")


def test_a_killed_rank_is_named_with_what_it_did():
    code, _, err = end(start("os.kill(os.getpid(), signal.SIGKILL)"))
    assert code == -signal.SIGKILL
    assert "rank 3 (host h) was killed by SIGKILL" in err and "while adding numbers" in err and "--resume" in err


def test_a_rank_that_does_not_go_on_is_ended():
    code, _, err = end(start("board.limit(0.5, 0); board.say('waiting'); time.sleep(60)"))
    assert code == 8 and "rank 3 (host h) does not go on" in err and "while waiting" in err


def test_a_stopped_rank_is_ended_and_named():
    code, _, err = end(start("board.limit(0, 0.5); board.say('waiting'); os.kill(os.getpid(), signal.SIGSTOP)"))
    assert code == 8 and "rank 3 (host h) stands still" in err


def test_what_goes_on_is_left_alone():
    body = "board.limit(1.5, 1)\n    for i in range(8):\n        board.say(str(i)); time.sleep(0.3)\n    return 4"
    assert end(start(body))[0] == 4


WAIT = ("print('up', flush=True)\n    for _ in range(200):\n        time.sleep(0.05)\n        "
        "if signals.heard(): print(signals.heard(), flush=True); {then}\n    return 1")


def test_a_signal_is_noted_by_the_child():
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        process = start(WAIT.format(then="return 75"))
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert end(process)[:2] == (75, f"{int(number)}\n")


def test_a_second_signal_leaves_at_once():
    process = start(WAIT.format(then="time.sleep(60)"))
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)          # the same once more, as launchers do
    assert process.stdout.readline() == "15\n"
    time.sleep(1.2)
    process.send_signal(signal.SIGUSR1)
    began = time.monotonic()
    code, _, err = end(process)
    assert code == -signal.SIGUSR1 and "second signal" in err and time.monotonic() - began < 5


def test_a_killed_guard_takes_the_rank_along():
    process = start("print(os.getpid(), flush=True); time.sleep(60)")
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    for _ in range(100):
        try:
            os.kill(child, 0)
            with open(f"/proc/{child}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    break
        except (ProcessLookupError, FileNotFoundError):
            break
        time.sleep(0.05)
    else:
        pytest.fail("the rank lives on without its guard")


def test_no_guard_where_it_is_not_wanted(monkeypatch):
    monkeypatch.setenv("MPILLM_NO_GUARD", "1")
    monkeypatch.setenv("PARENT", str(os.getpid()))
    assert end(start("return 4 if os.getppid() == int(os.environ['PARENT']) else 9"))[0] == 4
