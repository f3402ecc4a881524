"""Lines from rank 0 to replicas: each once, whoever asks, however the messages fall."""

from __future__ import annotations

import copy
import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm.engine import feed, link
from mpillm.engine.feed import TIME_LIMIT, Desk, Feed, Line, Tally
from mpillm.engine.request import FailedLine, Request, Sampling
from mpillm.machine import signals


class Post:
    """Mail between ranks of one process; letters of one sender keep their order, others overtake."""

    def __init__(self, ranks):
        self.boxes = {rank: [] for rank in ranks}

    def at(self, rank):
        return Box(self, rank)


class Box:
    def __init__(self, post, rank):
        self.post, self.rank = post, rank

    def send(self, to, thing):
        self.post.boxes[to].append((self.rank, copy.deepcopy(thing)))     # as they are when they are sent

    def receive(self):
        box = self.post.boxes[self.rank]
        return box.pop(0) if box else None


def lines_of(count):
    return [Line(i, i + 1, json.dumps({"prompt": f"p{i}", "max_tokens": i % 7}).encode()) for i in range(count)]


def read(line):
    if line.index % 5 == 4:
        return FailedLine(line.number, line.index, None, "bad")
    return Request(line.number, line.index, None, "completion", True, ((1,),), Sampling(), "m")


class Shown:
    def __init__(self, told):
        self.told = told

    def add(self, *told):
        self.told.append(told)


class Replica:
    """A root that finishes what it was given, some a turn."""

    def __init__(self, post, rank, desk, most):
        self.tally, self.failed, self.done, self.open, self.most = Tally(), [], [], [], most
        self.feed = Feed(post.at(rank), desk, read, self.failed.append, lambda: self.most - len(self.open), self.tally)

    def turn(self, finish):
        stop, news = self.feed.poll(0)
        self.open += news
        for request in self.open[:finish]:
            self.done.append(request.index)
            self.tally.finished += 1
        del self.open[:finish]
        return stop


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(feed, "AGAIN", 0.0)
    monkeypatch.setattr(feed, "TELL", 0.0)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 60), st.integers(1, 4), st.integers(1, 9), st.integers(1, 20), st.integers(0, 2**32))
def test_every_line_goes_to_one_replica(count, dp, most, window, seed):
    before, feed.WINDOW_LINES = feed.WINDOW_LINES, window
    try:
        rng, post, shown = random.Random(seed), Post(range(dp)), []
        desk = Desk(iter(lines_of(count)), post.at(0), list(range(dp)), 16, Shown(shown))
        replicas = [Replica(post, rank, desk if rank == 0 else None, most) for rank in range(dp)]
        alive = set(range(dp))
        for _ in range(20000):
            rank = rng.choice(sorted(alive | {0}))
            if rank not in alive:
                desk.serve()
                if not desk.waits:
                    break
                continue
            replica = replicas[rank]
            replica.turn(rng.randint(0, 3))
            if replica.feed.closed and not replica.open:
                replica.feed.leave()
                alive.discard(rank)
        assert not alive and not desk.waits, "a replica never ended"
        seen = [i for replica in replicas for i in [*replica.done, *(f.index for f in replica.failed)]]
        assert sorted(seen) == list(range(count))
        assert sum(finished for _, _, finished in shown) == count == desk.n_finished
    finally:
        feed.WINDOW_LINES = before


def test_the_last_lines_are_shared_evenly():
    post = Post(range(4))
    desk = Desk(iter(lines_of(12)), post.at(0), [0, 1, 2, 3], 16, Shown([]))
    got = [len(desk.take(root, 100, Tally())[0]) for root in range(4)]
    assert got == [3, 3, 3, 3]


def test_a_wish_to_stop_reaches_all_replicas():
    post = Post(range(3))
    desk = Desk(iter(lines_of(50)), post.at(0), [0, 1, 2], 16, Shown([]))
    first, second, third = (Replica(post, rank, desk if rank == 0 else None, 4) for rank in range(3))
    assert second.feed.poll(15)[0] == 15            # a rank of replica 1 heard it
    assert first.turn(0) == 15 and desk.stop == 15
    assert third.turn(0) == 15
    assert second.turn(0) == 15


def test_time_is_up():
    post, left = Post(range(2)), [5.0]
    desk = Desk(iter(lines_of(5)), post.at(0), [0, 1], 16, Shown([]), lambda: left[0])
    first, second = (Replica(post, rank, desk if rank == 0 else None, 4) for rank in range(2))
    assert first.turn(0) == 0
    left[0] = -math.inf
    assert first.turn(0) == second.turn(0) == TIME_LIMIT


class Ranks:
    """The exchange of a replica whose ranks take turns in one process: what the root sends waits for the others."""

    def __init__(self, size):
        self.size, self.waiting, self.sent = size, {}, []

    def of(self, rank):
        return RankOf(self, rank)


class RankOf:
    def __init__(self, ranks, rank):
        self.ranks, self.rank, self.is_root, self.at = ranks, rank, rank == 0, 0

    def gather(self, array):
        self.ranks.waiting.setdefault(self.rank, []).append(array)
        if not self.is_root:
            return None
        return [self.ranks.waiting[rank].pop(0) for rank in range(self.ranks.size)]

    def bcast(self, array):
        if self.is_root:
            self.ranks.sent.append(array.copy())
        else:
            array[:] = self.ranks.sent[self.at]
            self.at += 1


class Scripted:
    def __init__(self, answers):
        self.answers, self.heard, self.closed = answers, [], False

    def poll(self, heard):
        self.heard.append(heard)
        stop, news, self.closed = self.answers.pop(0)
        return stop, news


def test_words_ride_on_the_messages(monkeypatch):
    source = Scripted([(0, ["a", "b"], False), (0, [], True), (15, [], True)])
    ranks = Ranks(2)
    root, other = link.Link(ranks.of(0), source), link.Link(ranks.of(1), None)
    heard = {"now": 0}
    monkeypatch.setattr(signals, "heard", lambda: heard["now"])

    # A step with a decision that goes round twice
    for start in (0.0, 10.0):
        assert other.gather(np.array([[start + 1.0]])) is None
        parts = root.gather(np.array([[start]]))
        assert [part.tolist() for part in parts] == [[[start]], [[start + 1.0]]]
        told, seen = np.array([[7, 8]]), np.zeros((1, 2), np.int64)
        root.bcast(told)
        other.bcast(seen)
        assert seen.tolist() == [[7, 8]]
    assert root.news() == other.news() == ["a", "b"]
    assert source.heard == [0], "the source is asked once a step"

    # Steps without one
    for expected in ((0, True), (15, True)):
        heard["now"] = 15
        other.gather(np.zeros(0, np.int64))
        heard["now"] = 0
        assert root.news() == []
        assert other.news() == []
        assert (root.stop, root.closed) == (other.stop, other.closed) == expected
        ranks.waiting[1].clear()
    assert source.heard == [0, 15, 15], "the root knows what another rank heard"
