"""What runs in each step: every decoding sequence one row, and prefill chunks under a token budget.

Pure bookkeeping, the same on every rank of a replica: it sees only the requests and the decided tokens.

Sequences take cache blocks as they need them. When none is left, the youngest running sequence gives all of its
back and waits again; later it is recomputed, prompt and generated tokens, as prefill, with the same bits. Full
blocks are shared by all sequences that begin with the same tokens. While one sequence computes blocks that a waiting
one could share, that one is held back, and others pass it; so a common prefix is computed once.

Why it ends: age is the order in which sequences were added. The oldest running sequence is never preempted for a
younger one, and alone it fits the cache, so it advances in every step and finishes. None passes a sequence that
waits for room; one that is held back is let go when what it waits for is computed or given up, and nobody can
hold it back again before it had its turn, unless somebody older does.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from mpillm.engine.blocks import BlockLedger, blocks_for, chain, prompt_keys, root_key
from mpillm.engine.request import Request

_AGE = attrgetter("age")


@dataclass(eq=False)
class Sequence:
    """One prompt of a request with one of its samples, while it waits and runs."""

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
    whole_prompt: bool = False     # logits of all its rows are wanted: none may come from the cache uncomputed
    salt: bytes = b""              # what its keys and values depend on beside the token ids
    salt_behind: bytes = b""       # and those of blocks that reach behind the prompt
    scored: int = 0                # positions that were in the cache at some time: their logits were dealt with
    # The scheduler's own
    age: int = -1                  # number in the order of adding
    need: int = 0                  # cache blocks of its whole length
    keys: list[bytes] = field(default_factory=list)    # of its full blocks, as far as they are known
    published: int = 0             # leading blocks that are full, and findable where their key was free

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.generated)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Token ids int64 of positions ``start .. stop``."""
        split = len(self.prompt)
        head = self.prompt[start:min(stop, split)]
        tail = self.generated[max(start - split, 0):max(stop - split, 0)]
        return np.concatenate([head, np.asarray(tail, np.int64)]).astype(np.int64)


@dataclass(slots=True)
class Part:
    """Positions ``start .. start + count`` of one sequence in a step."""

    sequence: Sequence
    start: int
    count: int
    completes: bool      # the last row is the sequence's last token so far: its logits choose the next
    decodes: bool        # one row, of a generated token, that completes


@dataclass
class Limits:
    """Budgets of a step and of the cache."""

    max_batch: int       # sequences that run together
    prefill_chunk: int   # prompt tokens in a step
    block: int           # positions in a cache block


class Scheduler:
    """Admits waiting sequences, plans steps, preempts where the cache is full, shares common prefixes.

    Admission: the oldest waiting sequence that is not held back starts when the cache has room for all its tokens
    so far and, for it and for each running sequence that may still grow by a block, one block more. None passes
    one that waits for room. ``share`` False: no block is shared. ``continuous`` False: sequences start only when
    none runs, up to ``max_batch`` together, and none is held back.
    """

    def __init__(self, ledger: BlockLedger, limits: Limits, *, context_blocks: int, share: bool = True,
                 continuous: bool = True) -> None:
        """``context_blocks``: the most blocks that a sequence may have, the width of the block table."""
        self.ledger, self.limits, self.share, self.continuous = ledger, limits, share, continuous
        self.running: list[Sequence] = []                       # oldest first
        self.block_table = np.zeros((limits.max_batch, context_blocks), np.int32)
        self.preempted = 0               # times that a sequence gave back its blocks
        self.shared_positions = 0        # positions that were not computed because another sequence had done it
        self.computed_positions = 0      # rows of all steps
        self.recomputed_positions = 0    # of them those that had been in the cache before a preemption
        self._waiting: list[tuple[int, Sequence]] = []          # a heap by age
        self._pending: dict[bytes, Sequence] = {}               # key of a block -> who is computing it
        self._held: dict[bytes, list[Sequence]] = {}            # key of a block -> who waits for it
        self._n_held = 0
        self._slots = list(range(limits.max_batch - 1, -1, -1))
        self._added = 0
        self._no_room = False            # the oldest waiting sequence did not fit, and nothing changed since

    def add(self, sequences: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
        """Let sequences wait behind those that do; all those of a request come in one call.

        Returns of each request that cannot run the first sequence that the empty cache could not hold, with the
        blocks that it needs; no sequence of such a request is added.
        """
        sequences = list(sequences)
        refused: dict[int, tuple[Sequence, int]] = {}
        for sequence in sequences:
            # The last generated token is never fed back, so its position needs no place
            sequence.need = blocks_for(len(sequence.prompt) + max(sequence.max_tokens - 1, 0), self.limits.block)
            if sequence.need > self.ledger.n_blocks:
                refused.setdefault(sequence.request.index, (sequence, sequence.need))
        last: Sequence | None = None
        for sequence in sequences:
            if sequence.request.index in refused:
                continue
            assert sequence.need <= self.block_table.shape[1], \
                f"{sequence.need} blocks, {self.block_table.shape[1]} are in the context"
            if self.share:
                same = last is not None and last.prompt is sequence.prompt and last.salt == sequence.salt
                sequence.keys = list(last.keys) if last is not None and same else prompt_keys(
                    sequence.prompt, self.limits.block, sequence.salt)
            sequence.age, last = self._added, sequence
            self._added += 1
            heapq.heappush(self._waiting, (sequence.age, sequence))
        return list(refused.values())

    @property
    def n_waiting(self) -> int:
        return len(self._waiting) + self._n_held

    @property
    def waiting(self) -> list[Sequence]:
        """All that wait, oldest first."""
        held = [sequence for group in self._held.values() for sequence in group]
        return sorted([sequence for _, sequence in self._waiting] + held, key=_AGE)

    def plan(self) -> list[Part]:
        """The parts of the next step, oldest sequence first; empty when nothing waits or runs."""
        if self._waiting and self._slots and not self._no_room and (self.continuous or not self.running):
            self._admit()
        parts, budget, block = [], self.limits.prefill_chunk, self.limits.block
        for sequence in self.running:          # a preemption shortens the list at its end, behind this sequence
            start = sequence.computed
            missing = len(sequence.prompt) + len(sequence.generated) - start
            if missing == 1 and sequence.generated:
                if start >= len(sequence.blocks) * block and not self._grow(sequence):
                    break
                parts.append(Part(sequence, start, 1, True, True))
            elif budget:
                assert missing > 0, "a sequence runs that has nothing left to compute"
                count = min(missing, budget)
                budget -= count
                parts.append(Part(sequence, start, count, count == missing, False))
        assert parts or not self.running and not self.n_waiting, "sequences wait but none can run"
        return parts

    def done(self, parts: list[Part]) -> None:
        """Account for a computed step; sequences marked finished leave the batch and give back their blocks."""
        block = self.limits.block if self.share else 1 << 60
        for part in parts:
            sequence, stop = part.sequence, part.start + part.count
            self.computed_positions += part.count
            sequence.computed = stop
            if part.start < sequence.scored:
                self.recomputed_positions += min(stop, sequence.scored) - part.start
            if stop > sequence.scored:
                sequence.scored = stop
            if stop // block > sequence.published:
                self._publish(sequence)
        for sequence in [s for s in self.running if s.finished]:
            self.running.remove(sequence)
            # Who else would go on from a prompt as this sequence did?
            self.ledger.forget(sequence.blocks[len(sequence.prompt) // self.limits.block:])
            self._leave(sequence)

    # Admission

    def _admit(self) -> None:
        """Start waiting sequences, oldest first; move those aside that had better wait for a shared prefix."""
        growing = sum(len(s.blocks) < s.need for s in self.running)
        looks = 4 * self.limits.max_batch          # bounds the time of a step; the others are looked at later
        while self._waiting and self._slots and looks:
            looks -= 1
            sequence = self._waiting[0][1]
            found, awaited = self._shared(sequence)
            if awaited is not None:
                heapq.heappop(self._waiting)
                self._held.setdefault(awaited, []).append(sequence)
                self._n_held += 1
                continue
            count = blocks_for(sequence.length, self.limits.block)
            grows = count < sequence.need
            if count - len(found) + grows + growing > self.ledger.n_free - self.ledger.n_idle(found):
                self._no_room = True
                return
            heapq.heappop(self._waiting)
            growing += grows
            self._start(sequence, found, count)

    def _shared(self, sequence: Sequence) -> tuple[list[int], bytes | None]:
        """Blocks of the cache that it can begin with, and the key of the last one that others are computing for it."""
        if not self.share:
            return [], None
        # Its last token's row is computed in any case, and of one whose logits are all wanted every new row
        most = sequence.length - 1
        if sequence.whole_prompt:
            most = min(most, sequence.scored)
        most //= self.limits.block
        found, awaited = self.ledger.find(sequence.keys, most), None
        if self.continuous:
            for key in sequence.keys[len(found):most]:
                if key not in self._pending:
                    break
                awaited = key
        return found, awaited

    def _start(self, sequence: Sequence, found: list[int], count: int) -> None:
        self.ledger.share(found)
        sequence.blocks = found + self.ledger.take(count - len(found))
        sequence.slot = self._slots.pop()
        self.block_table[sequence.slot, :count] = sequence.blocks
        sequence.published = len(found)
        ready = len(found) * self.limits.block
        if ready:
            sequence.computed = ready
            self.shared_positions += max(0, ready - sequence.scored)
            sequence.scored = max(sequence.scored, ready)
        if self.share and self.continuous:
            for key in sequence.keys[len(found):len(sequence.prompt) // self.limits.block]:
                self._pending.setdefault(key, sequence)
        insort(self.running, sequence, key=_AGE)

    # Growth and preemption

    def _grow(self, sequence: Sequence) -> bool:
        """One block more for a running sequence, by preempting younger ones; False when it was itself the youngest."""
        while not self.ledger.n_free:
            youngest = self.running.pop()
            assert youngest is not sequence or self.running, "a sequence alone does not fit the cache"
            self.preempted += 1
            self._leave(youngest)
            youngest.computed = 0
            heapq.heappush(self._waiting, (youngest.age, youngest))
            if youngest is sequence:
                return False
        block, = self.ledger.take(1)
        self.block_table[sequence.slot, len(sequence.blocks)] = block
        sequence.blocks.append(block)
        return True

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence's blocks and slot, and let go those that waited for what it was computing."""
        for key in sequence.keys[sequence.published:]:
            self._settle(key, sequence)
        self.ledger.give_back(sequence.blocks)
        self._slots.append(sequence.slot)
        sequence.blocks, sequence.slot = [], -1
        self._no_room = False

    # Sharing

    def _publish(self, sequence: Sequence) -> None:
        """Make the blocks findable that a sequence has filled."""
        block = self.limits.block
        for at in range(sequence.published, sequence.computed // block):
            if at == len(sequence.keys):           # of generated tokens: for itself, when it is preempted
                previous = sequence.keys[-1] if at else root_key(sequence.salt)
                if at == len(sequence.prompt) // block and sequence.salt_behind:
                    previous = root_key(previous + sequence.salt_behind)
                sequence.keys.append(chain(previous, sequence.tokens(at * block, at * block + block)))
            self.ledger.publish(sequence.blocks[at], sequence.keys[at])
            self._settle(sequence.keys[at], sequence)
        sequence.published = sequence.computed // block

    def _settle(self, key: bytes, sequence: Sequence) -> None:
        """A block that this sequence was computing is there, or will not be: those that waited for it wait no more."""
        if self._pending.get(key) is not sequence:
            return
        del self._pending[key]
        self._no_room = False
        for waiter in self._held.pop(key, ()):
            self._n_held -= 1
            heapq.heappush(self._waiting, (waiter.age, waiter))
