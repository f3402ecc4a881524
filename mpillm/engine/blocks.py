"""The ledger of cache blocks: who holds which, in pure integers; the arrays are in ``kvcache``.

Every rank of a replica keeps the same ledger without asking: it depends on the order of calls alone.
"""

from __future__ import annotations

import heapq


class BlockLedger:
    """``n_blocks`` numbered blocks, handed out lowest number first."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._free = list(range(n_blocks))
        self._held: set[int] = set()

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` free blocks; the caller has looked at ``n_free``."""
        assert 0 <= count <= self.n_free, f"{count} blocks asked, {self.n_free} free"
        taken = [heapq.heappop(self._free) for _ in range(count)]
        self._held.update(taken)
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Blocks that ``take`` handed out become free."""
        for block in blocks:
            assert block in self._held, f"block {block} is given back but nobody holds it"
            self._held.remove(block)
            heapq.heappush(self._free, block)


def blocks_for(positions: int, block: int) -> int:
    """Blocks that hold ``positions`` positions."""
    return -(-positions // block)
