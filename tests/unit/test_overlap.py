"""Two halves of a step in flight: in which order they go on, which steps are cut, and what is found to be quicker."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from test_setup import _Alone

from mpillm.cache import Rows
from mpillm.engine import overlap
from mpillm.engine.overlap import COUNTED, FIRST, LEAST, Overlap
from mpillm.errors import ExchangeError
from mpillm.jit.tape import Tape, run_in_turns
from mpillm.machine.courier import Courier


def rows_of(sequences, generated=0):
    n = len(sequences)
    return Rows(np.arange(n), np.arange(n, dtype=np.int32), np.array(sequences, np.int32), np.zeros((9, 1), np.int32),
                np.zeros((n, 2), np.float32), np.ones((n, 2), np.float32), None, generated)


class Ranks(_Alone):
    """One rank of two: what the other one measured is ``factor`` times of it, for whole steps and for halves."""

    tp, index, is_root = 2, 0, True

    def __init__(self, factor=(1.0, 1.0)):
        self.factor, self.gathered = np.array(factor), 0

    def gather(self, array):
        self.gathered += 1
        return [array, array * self.factor]

    def bcast(self, array):
        pass

    def sends(self, inside):
        return True


def test_one_half_computes_while_the_other_waits():
    said, tapes = [], []
    for name in "AB":
        tape = Tape()
        for i in range(3):
            tape.call("python", lambda text=f"{name}{i}": said.append(text))
            if i < 2:
                tape.call("exchange", lambda text=f"{name}{i} travels": said.append(text), elsewhere=True)
        tape.set({})
        tapes.append(tape)

    def send(job):
        said.append("sent")
        return job                 # as late as can be: when it is waited for

    run_in_turns(tapes, 1, send)
    assert said == ["A0", "sent", "B0", "sent", "A0 travels", "A1", "sent", "B0 travels", "B1", "sent", "A1 travels",
                    "A2", "B1 travels", "B2"]
    assert all(tape.seconds()["exchange"] > 0 for tape in tapes)


def test_a_courier_keeps_the_order_and_counts():
    courier, said, gate = Courier(), [], threading.Event()
    first = courier.send(lambda: (gate.wait(5), said.append(threading.current_thread())))
    second = courier.send(lambda: said.append("second"))
    assert not said
    gate.set()
    second()
    first()
    assert said[0] is not threading.main_thread() and said[0].daemon and said[1] == "second"
    assert courier.worked > 0 and courier.waited > 0


def test_messages_are_awaited_asleep_while_the_sender_computes():
    """What waits for them looks now and then; it waits as MPI does as soon as the sender itself has to wait."""
    courier, group, seen = Courier(), SimpleNamespace(computing=None), []
    begun, computed = threading.Event(), threading.Event()

    def job():
        seen.append(group.computing())
        begun.set()
        computed.wait(5)
        while group.computing():
            time.sleep(1e-4)

    with courier.sending([group]) as send:
        wait = send(job)
        assert begun.wait(5)
        computed.set()
        wait()
    assert seen == [True] and group.computing is None


def test_what_fails_elsewhere_is_raised_here_and_ends_all():
    courier, begun = Courier(), []

    def fail():
        raise ExchangeError("rank 1 did not come")

    first, second = courier.send(fail), courier.send(lambda: begun.append(1))
    for wait in (first, second, courier.send(lambda: begun.append(2))):
        with pytest.raises(ExchangeError, match="rank 1 did not come"):
            wait()
    assert not begun, "others wait for what will not come"


def test_which_steps_are_cut():
    always = Overlap("on", Ranks())
    assert always.cut(rows_of([0] * (LEAST - 1))) == 0
    for n in (LEAST, 65, 100, 128, 512, 544, 545):
        cut = always.cut(rows_of([0] * n))
        assert cut % 16 == 0 and 0 <= cut - n / 2 < 16
        first, second = rows_of([0] * n).part(0, cut), rows_of([0] * n).part(cut, n)
        assert np.concatenate([first.positions, second.positions]).tolist() == list(range(n))
        assert len(second.cos) == n - cut and second.cos.flags.c_contiguous
    assert Overlap("on", Ranks(), least=2).cut(rows_of([0, 1, 2])) == 2


def test_rows_that_attend_to_later_ones_are_not_cut():
    """A sequence computed again, where what it generated stands before its prompt."""
    again, others = rows_of([3] * 30 + [1] * 40 + [3] * 20, 30), rows_of([3] * 30 + [1] * 40 + [2] * 20, 30)
    assert not again.in_order and others.in_order
    always = Overlap("on", Ranks())
    assert always.cut(again) == 0 and always.cut(others) == 48
    assert rows_of([3] * 30 + [1] * 40, 70).in_order
    assert [others.part(*own).generated for own in ((0, 20), (20, 48), (48, 90))] == [20, 10, 0]


@pytest.mark.parametrize(("seconds", "factor", "wanted"), [
    ((2.0, 1.0), (1.0, 1.0), True), ((1.0, 2.0), (1.0, 1.0), False),
    ((2.0, 1.0), (1.0, 3.0), False)])         # the slowest rank counts
def test_the_quicker_way_is_kept(caplog, seconds, factor, wanted):
    caplog.set_level("INFO")
    ranks = Ranks(factor)
    auto, way = Overlap("auto", ranks), []
    for i in range(FIRST + COUNTED):
        rows = rows_of([0] * (64 + i))
        way.append(auto.cut(rows) > 0)
        auto.took(rows, 100.0 if i < FIRST else len(rows.tokens) * seconds[way[-1]])
        auto.took(rows_of([0] * 63), 5.0)        # too small to be tried
    assert way == [False, True, True, False] * 2 + [False, True] and ranks.gathered == 1
    assert all(bool(auto.cut(rows_of([0] * 90))) == wanted for _ in range(4))
    (said,) = caplog.messages
    assert said.startswith("replica 0: steps of 64 to 127 rows are computed " + ("in halves" if wanted else "whole"))
    auto.took(rows_of([0] * 90), 1.0)
    assert ranks.gathered == 1
    # Other sizes are tried for themselves
    assert not auto.cut(rows_of([0] * 512)) and 512 .bit_length() in auto._trials


def test_where_no_step_is_cut():
    class InMemory(Ranks):
        def sends(self, inside):
            return False

    class OneNode(Ranks):
        def sends(self, inside):
            return inside

    assert overlap.chosen("off", Ranks()) is None and overlap.chosen("auto", _Alone()) is None
    assert overlap.chosen("on", InMemory()) is None and overlap.chosen("auto", OneNode()) is None
    assert overlap.chosen("on", OneNode()) and overlap.chosen("auto", Ranks())


def test_halves_go_through_what_sends():
    sent = []

    class Sending(Ranks):
        @contextlib.contextmanager
        def sending(self):
            yield sent.append

    always = Overlap("on", Sending())
    with pytest.raises(AttributeError):         # of the plan that is none
        always.run([(SimpleNamespace(), rows_of([0]))])
    assert always.cut_steps == 1
