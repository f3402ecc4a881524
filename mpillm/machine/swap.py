"""Columns of a step's rows, brought by those ranks of a group that have them to those that want them.

The communicator is given by collectives.py. An exchange is planned once, from who has and who wants which columns,
and its size follows from the rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpillm.jit import exchange
from mpillm.machine.group import PIECE, Group

Columns = tuple[int, int]        # first and behind the last


@dataclass(frozen=True)
class Part:
    """One array of an exchange: columns that each rank has and wants, counted over the whole array.

    ``stacked``: ranks have different values for the same columns, and whoever wants some gets those of every rank,
    beside each other in rank order. Otherwise a column comes from the only rank that has it.
    """

    owned: tuple[Columns, ...]
    wanted: tuple[Columns, ...]
    stacked: bool = False

    def message(self, sender: int, receiver: int, chunk: Columns | None = None) -> tuple[int, int, int]:
        """(first column, counted over the whole array, how many, where they begin in what the receiver gets)."""
        (low, high), (first, stop) = self.owned[sender] if chunk is None else chunk, self.wanted[receiver]
        start = max(low, first)
        count = max(0, min(high, stop) - start)
        return start, count, start - first + (sender * (stop - first) if self.stacked else 0)

    @property
    def for_all(self) -> bool:
        """Whether every rank wants what all have."""
        low, high = min(low for low, _ in self.owned), max(high for _, high in self.owned)
        return not self.stacked and all(wanted == (low, high) for wanted in self.wanted)

    def width(self, rank: int) -> int:
        """Columns that the rank has."""
        return self.owned[rank][1] - self.owned[rank][0]

    def result(self, rank: int) -> int:
        """Columns that the rank gets."""
        first, stop = self.wanted[rank]
        return (stop - first) * (len(self.owned) if self.stacked else 1)


class Swap:
    """A planned exchange of up to ``exchange.ARRAYS`` arrays float32 among the ranks of a group, together.

    They travel as they are, whatever --wire says. ``doing``: what a missing rank is waited for in, of
    ``exchange.DOINGS``; ``timed``: calls what ``run`` does, and keeps the time.
    """

    def __init__(self, group: Group, parts: Sequence[Part], doing: int,
                 timed: Callable[[Callable[[], None]], None] = lambda exchange: exchange()) -> None:
        assert 1 <= len(parts) <= exchange.ARRAYS, f"{len(parts)} arrays in an exchange"
        self._group, self.parts, self._timed = group, tuple(parts), timed
        me, ranks = group.rank, range(group.size)
        for part in parts:
            assert len(part.owned) == len(part.wanted) == group.size, "each rank has and wants something"
            delivered = sum(part.message(sender, me)[1] for sender in ranks)
            assert delivered == part.result(me), f"{part.result(me) - delivered} columns that no rank has"
        self.given, self.got = [part.width(me) for part in parts], [part.result(me) for part in parts]
        self._row = max(sum(part.width(rank) for part in parts) for rank in ranks)      # columns, of the fullest rank
        self._everything = all(part.for_all for part in parts)
        self._plan = _plan(parts, me, group.size, doing, group.segment.slot_nbytes // 4) if group.segment else None

    def exchange_arguments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
        """(flags, slots, state, plan) for the core swap_columns of jit/exchange.py; None when ``run`` is needed."""
        if self._group.segment is None or self._plan is None:
            return None
        return (*self._group.segment.arguments, self._plan)

    def run(self, arrays: Sequence[np.ndarray], out: Sequence[np.ndarray]) -> None:
        """Of each part this rank's columns float32 [M, given] into float32 [M, got], which may be strided by rows."""
        rows = len(arrays[0])
        assert [x.shape for x in arrays] == [(rows, n) for n in self.given], f"{[x.shape for x in arrays]} are given"
        assert [x.shape for x in out] == [(rows, n) for n in self.got], f"{[x.shape for x in out]} to be filled"
        self._timed(lambda: self._bring(arrays, out))

    def _bring(self, arrays: Sequence[np.ndarray], out: Sequence[np.ndarray]) -> None:
        if self._group.segment is not None and self._plan is not None:
            self._group.segment.swap_columns(self._plan, arrays, out)
            return
        step = max(1, PIECE // (4 * max(self._row, *self.got, 1)))
        for begin in range(0, len(arrays[0]), step):
            self._messages([x[begin:begin + step] for x in arrays], [x[begin:begin + step] for x in out])

    def _messages(self, arrays: Sequence[np.ndarray], out: Sequence[np.ndarray]) -> None:
        rows, me, ranks = len(arrays[0]), self._group.rank, range(self._group.size)
        arriving = [rows * sum(part.message(sender, me)[1] for part in self.parts) for sender in ranks]
        starts = np.cumsum([0, *arriving]).tolist()
        buffer = self._group.scratch(starts[-1])
        if self._everything:
            own = np.concatenate([x.reshape(-1) for x in arrays])
            self._group.together("Allgatherv", own, [buffer, (arriving, starts[:-1])])
        else:
            leaving = [[x[:, start - part.owned[me][0]:][:, :count].reshape(-1)
                        for x, part in zip(arrays, self.parts, strict=True)
                        for start, count, _ in [part.message(me, receiver)]] for receiver in ranks]
            counts = [sum(x.size for x in pieces) for pieces in leaving]
            own = np.concatenate([x for pieces in leaving for x in pieces])
            self._group.together("Alltoallv", [own, (counts, np.cumsum([0, *counts])[:-1].tolist())],
                                 [buffer, (arriving, starts[:-1])])
        for sender in ranks:
            at = starts[sender]
            for part, target in zip(self.parts, out, strict=True):
                _, count, to = part.message(sender, me)
                target[:, to:to + count] = buffer[at:at + rows * count].reshape(rows, count)
                at += rows * count


def _plan(parts: Sequence[Part], me: int, ranks: int, doing: int, slot: int) -> np.ndarray:
    """What the core swap_columns takes: see there. In several passes where a row does not fit a slot."""
    passes = 1
    while True:
        widths = [[sum(high - low for low, high in chunk) for chunk in _chunks(parts, rank, passes)]
                  for rank in range(ranks)]
        widest = max(max(own) for own in widths)
        if widest <= slot:
            break
        passes += 1
    plan = [passes, doing]
    for at in range(passes):
        mine = _chunks(parts, me, passes)[at]
        plan.append(slot // max(widest, 1))
        for part, (low, high) in zip(parts, mine, strict=True):
            plan += [low - part.owned[me][0], high - low]
        plan += [0, 0] * (exchange.ARRAYS - len(parts))
        for sender in range(ranks):
            chunks, offset = _chunks(parts, sender, passes)[at], 0
            plan.append(widths[sender][at])
            for part, (low, high) in zip(parts, chunks, strict=True):
                start, count, to = part.message(sender, me, (low, high))
                plan += [offset + start - low if count else 0, to, count]
                offset += high - low
            plan += [0, 0, 0] * (exchange.ARRAYS - len(parts))
    return np.array(plan, np.int64)


def _chunks(parts: Sequence[Part], rank: int, passes: int) -> list[list[Columns]]:
    """For each pass the columns of each part that the rank sends in it."""
    found = []
    for at in range(passes):
        own = [(low + at * (high - low) // passes, low + (at + 1) * (high - low) // passes)
               for low, high in (part.owned[rank] for part in parts)]
        found.append(own)
    return found
