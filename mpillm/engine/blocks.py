"""The ledger of cache blocks: who holds which, and what is in them; the arrays are in ``kvcache``.

Pure integers and digests. Every rank of a replica keeps the same ledger without asking: it depends on the order
of calls alone. A full block may be published under a key that stands for its own tokens and all those before it
(`chain`); then others share it, and it stays findable after its last holder left, until its place is needed.

Where a sharded cache lies on several ranks, each has a *pool* of blocks, and is called a *place*. A sequence's
blocks go round the places in turn, from one that follows from its tokens (`first_place`).
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

KEY_BYTES = 16


class BlockLedger:
    """``n_blocks`` numbered blocks at each of ``width`` places, each free, held by one or more, or idle.

    Idle blocks are held by nobody, but findable. Of a place, free blocks are handed out first, lowest number first;
    then idle ones, those first that are idle longest. Block ``place * n_blocks + i`` is the i-th of its place.
    """

    def __init__(self, n_blocks: int, width: int = 1) -> None:
        self.n_blocks, self.width = n_blocks, width
        self._free = [list(range(place * n_blocks, (place + 1) * n_blocks)) for place in range(width)]
        self._holders = [0] * (n_blocks * width)
        self._keys: list[bytes | None] = [None] * (n_blocks * width)
        self._published: dict[bytes, int] = {}
        # In the order in which they became idle
        self._idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(width)]

    @property
    def n_free(self) -> int:
        """Blocks that ``take`` can hand out, at all places: the idle ones count."""
        return sum(map(self.free_at, range(self.width)))

    def free_at(self, place: int) -> int:
        """Of a place."""
        return len(self._free[place]) + len(self._idle[place])

    def place(self, block: int) -> int:
        """Where the block is."""
        return block // self.n_blocks

    def at(self, block: int, place: int) -> int:
        """Its number among the blocks of this place; -1 where it is at another one."""
        return block % self.n_blocks if block // self.n_blocks == place else -1

    def holders(self, block: int) -> int:
        """How many hold the block."""
        return self._holders[block]

    def take(self, count: int, place: int = 0) -> list[int]:
        """``count`` blocks of a place for one holder, their contents lost; the caller has looked at ``free_at``."""
        assert 0 <= count <= self.free_at(place), f"{count} blocks asked, {self.free_at(place)} free at place {place}"
        taken, free, idle = [], self._free[place], self._idle[place]
        for _ in range(count):
            if free:
                block = heapq.heappop(free)
            else:
                block, _ = idle.popitem(last=False)
                self._withdraw(block)
            self._holders[block] = 1
            taken.append(block)
        return taken

    def take_turns(self, first: int, start: int, stop: int) -> list[int]:
        """A sequence's blocks ``start`` ... ``stop - 1``, the first of all at place ``first``, the others in turn."""
        if self.width == 1:
            return self.take(stop - start)
        return [self.take(1, (first + at) % self.width)[0] for at in range(start, stop)]

    def publish(self, block: int, key: bytes) -> bool:
        """Make a held, full block findable; False, and nothing done, when another block has the key."""
        assert self._holders[block], f"block {block} is published but nobody holds it"
        assert self._keys[block] is None, f"block {block} is published twice"
        if key in self._published:
            return False
        self._keys[block] = key
        self._published[key] = block
        return True

    def find(self, keys: Sequence[bytes], most: int) -> list[int]:
        """The blocks of the first keys, ``most`` at most, as far as all are there; ``share`` them before taking."""
        found = []
        for at in range(min(most, len(keys))):
            block = self._published.get(keys[at])
            if block is None:
                break
            found.append(block)
        return found

    def n_idle(self, blocks: list[int], place: int = 0) -> int:
        """How many of these blocks nobody holds at a place: sharing them makes ``free_at`` smaller by so many."""
        return sum(not self._holders[block] and block // self.n_blocks == place for block in blocks)

    def share(self, blocks: list[int]) -> None:
        """One more holder for each of these published blocks."""
        for block in blocks:
            assert self._keys[block] is not None, f"block {block} is shared but not published"
            if not self._holders[block]:
                del self._idle[self.place(block)][block]
            self._holders[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """One holder less for each block. The last one first: a prefix stays longer than what builds on it."""
        for block in reversed(blocks):
            assert self._holders[block], f"block {block} is given back but nobody holds it"
            self._holders[block] -= 1
            if not self._holders[block]:
                if self._keys[block] is None:
                    heapq.heappush(self._free[self.place(block)], block)
                else:
                    self._idle[self.place(block)][block] = None

    def forget(self, blocks: list[int]) -> None:
        """Of these held blocks, let nobody find those that have a single holder."""
        for block in blocks:
            if self._holders[block] == 1 and self._keys[block] is not None:
                self._withdraw(block)

    def _withdraw(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None, f"block {block} has no key"
        del self._published[key]
        self._keys[block] = None


def blocks_for(positions: int, block: int) -> int:
    """Blocks that hold ``positions`` positions."""
    return -(-positions // block)


def turns_of(place: int, first: int, start: int, stop: int, width: int) -> int:
    """How many of a sequence's blocks ``start`` ... ``stop - 1`` are at a place; its first one is at ``first``."""
    ahead = (place - first - start) % width
    return max(0, -(-(stop - start - ahead) // width))


def first_place(prompt: np.ndarray, sample: int, block: int, width: int) -> int:
    """The place of a sequence's first block: by its tokens, so that who can share it has it at the same one.

    The samples of a prompt too short to be shared are dealt out in turn.
    """
    if width == 1:
        return 0
    digest = hashlib.blake2b(prompt[:block].astype("<i4").tobytes(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + (sample if len(prompt) < block else 0)) % width


def root_key(salt: bytes) -> bytes:
    """The key before the first block: ``salt`` is what keys and values depend on beside the token ids."""
    return hashlib.blake2b(salt, digest_size=KEY_BYTES).digest()


def chain(previous: bytes, tokens: np.ndarray) -> bytes:
    """The key of a block of ``tokens`` (int ids) behind the block of key ``previous``.

    A digest, the same on every rank and in every process, where Python's ``hash`` is not.
    """
    return hashlib.blake2b(previous + tokens.astype("<i4").tobytes(), digest_size=KEY_BYTES).digest()


def prompt_keys(prompt: np.ndarray, block: int, salt: bytes) -> list[bytes]:
    """Keys of the full blocks of a prompt (int ids)."""
    keys, key = [], root_key(salt)
    for start in range(0, len(prompt) - block + 1, block):
        key = chain(key, prompt[start:start + block])
        keys.append(key)
    return keys
