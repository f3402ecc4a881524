"""The ledger of cache blocks: who holds which, and what is in them; the arrays are in ``kvcache``.

Pure integers and digests. Every rank of a replica keeps the same ledger without asking: it depends on the order
of calls alone. A full block may be published under a key that stands for its own tokens and all those before it
(`chain`); then others share it, and it stays findable after its last holder left, until its place is needed.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

KEY_BYTES = 16


class BlockLedger:
    """``n_blocks`` numbered blocks, each free, held by one or more, or idle: held by nobody, but findable.

    Free blocks are handed out first, lowest number first; then idle ones, those first that are idle longest.
    """

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._free = list(range(n_blocks))
        self._holders = [0] * n_blocks
        self._keys: list[bytes | None] = [None] * n_blocks
        self._published: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()      # in the order in which they became idle

    @property
    def n_free(self) -> int:
        """Blocks that ``take`` can hand out: the idle ones count."""
        return len(self._free) + len(self._idle)

    def holders(self, block: int) -> int:
        """How many hold the block."""
        return self._holders[block]

    def take(self, count: int) -> list[int]:
        """``count`` blocks for one holder, their contents lost; the caller has looked at ``n_free``."""
        assert 0 <= count <= self.n_free, f"{count} blocks asked, {self.n_free} free"
        taken = []
        for _ in range(count):
            if self._free:
                block = heapq.heappop(self._free)
            else:
                block, _ = self._idle.popitem(last=False)
                self._withdraw(block)
            self._holders[block] = 1
            taken.append(block)
        return taken

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

    def n_idle(self, blocks: list[int]) -> int:
        """How many of these blocks nobody holds: sharing them makes ``n_free`` smaller by so many."""
        return sum(not self._holders[block] for block in blocks)

    def share(self, blocks: list[int]) -> None:
        """One more holder for each of these published blocks."""
        for block in blocks:
            assert self._keys[block] is not None, f"block {block} is shared but not published"
            if not self._holders[block]:
                del self._idle[block]
            self._holders[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """One holder less for each block. The last one first: a prefix stays longer than what builds on it."""
        for block in reversed(blocks):
            assert self._holders[block], f"block {block} is given back but nobody holds it"
            self._holders[block] -= 1
            if not self._holders[block]:
                if self._keys[block] is None:
                    heapq.heappush(self._free, block)
                else:
                    self._idle[block] = None

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
