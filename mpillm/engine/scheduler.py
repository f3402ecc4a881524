"""What runs in each step: every decoding sequence one row, and prefill chunks under a token budget.

Pure bookkeeping, the same on every rank of a replica: it sees only the requests and the decided tokens.
A sequence reserves its whole length in the cache when it is admitted, so that a running one never waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from mpillm.engine.blocks import BlockLedger, blocks_for
from mpillm.engine.request import Request


@dataclass(eq=False)
class Sequence:
    """One prompt of a request with one of its samples, while it runs."""

    request: Request
    item: int
    sample: int
    prompt: np.ndarray             # int32
    max_tokens: int                # resolved against the context
    seed: int
    generated: list[int] = field(default_factory=list)
    computed: int = 0              # positions that are in the cache
    blocks: list[int] = field(default_factory=list)
    slot: int = -1                 # row of the block table
    finished: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.generated)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Token ids int64 of positions ``start .. stop``."""
        split = len(self.prompt)
        head = self.prompt[start:min(stop, split)]
        tail = self.generated[max(start - split, 0):max(stop - split, 0)]
        return np.concatenate([head, np.asarray(tail, np.int64)]).astype(np.int64)


@dataclass
class Part:
    """Positions ``start .. start + count`` of one sequence in a step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """The last row is the sequence's last token: its logits choose the next."""
        return self.start + self.count == self.sequence.length


@dataclass
class Limits:
    """Budgets of a step and of the cache."""

    max_batch: int       # sequences that run together
    prefill_chunk: int   # prompt tokens in a step
    block: int           # positions in a cache block


class Scheduler:
    """Admits waiting sequences in order, plans steps, frees the cache of finished sequences."""

    def __init__(self, ledger: BlockLedger, limits: Limits, *, context_blocks: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.ledger, self.limits = ledger, limits
        slots = limits.max_batch
        self._slots = list(range(slots - 1, -1, -1))
        self.block_table = np.zeros((slots, context_blocks), np.int32)

    @property
    def n_waiting(self):
        return len(self.waiting)

    def add(self, sequences):
        refused = {}
        for s in sequences:
            if self._need(s) > self.ledger.n_blocks:
                refused.setdefault(s.request.index, (s, self._need(s)))
        self.waiting.extend(s for s in sequences if s.request.index not in refused)
        return list(refused.values())

    def _need(self, sequence: Sequence) -> int:
        # The last generated token is never fed back, so its position needs no place.
        positions = len(sequence.prompt) + max(sequence.max_tokens - 1, 0)
        return blocks_for(positions, self.limits.block)

    def refused(self) -> list[tuple[Sequence, int]]:
        """Waiting sequences that the empty cache could not hold, with the blocks that they need."""
        return [(s, self._need(s)) for s in self.waiting if self._need(s) > self.ledger.n_blocks]

    def drop(self, requests: set[int]) -> None:
        """Take out the waiting sequences of these requests (by index)."""
        self.waiting = deque(s for s in self.waiting if s.request.index not in requests)

    def _admit(self) -> None:
        while self.waiting and self._slots and self._need(self.waiting[0]) <= self.ledger.n_free:
            sequence = self.waiting.popleft()
            sequence.blocks = self.ledger.take(self._need(sequence))
            sequence.slot = self._slots.pop()
            self.block_table[sequence.slot, :len(sequence.blocks)] = sequence.blocks
            self.running.append(sequence)

    def plan(self) -> list[Part]:
        """The parts of the next step; empty when everything is done."""
        self._admit()
        parts, budget = [], self.limits.prefill_chunk
        for sequence in self.running:
            missing = sequence.length - sequence.computed
            if sequence.generated:
                assert missing == 1, f"a decoding sequence has {missing} tokens that are not in the cache"
                parts.append(Part(sequence, sequence.computed, 1))
            elif budget:
                count = min(missing, budget)
                budget -= count
                parts.append(Part(sequence, sequence.computed, count))
        assert parts or not self.running and not self.waiting, "sequences wait but none can run"
        return parts

    def done(self, parts: list[Part]) -> None:
        """Account for a computed step; sequences marked finished leave the batch and free their blocks."""
        for part in parts:
            part.sequence.computed = part.start + part.count
        for sequence in [s for s in self.running if s.finished]:
            self.running.remove(sequence)
            self.ledger.give_back(sequence.blocks)
            self._slots.append(sequence.slot)
            sequence.blocks, sequence.slot = [], -1
