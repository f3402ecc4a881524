"""Sums over ranks of several nodes in two levels: shared memory inside a node, messages between nodes.

The sum of every element is ((p0 + p1) + p2) + ... in rank order, wherever the ranks are: one order, which depends
neither on the nodes nor on the message's size, and the same bits on every rank. So the sums of nodes cannot be
added: whoever adds an element needs every rank's part of it.

Ranks write their parts, encoded for the wire, into their node's memory. Each element has one *owner* in a node
(small messages) or in the whole job (large ones). For an owner, one rank of each other node, its *peer*, packs the
parts of all ranks of that node into one message. The owner adds all parts in rank order and leaves the result in
its node's memory; of a large message the results go to a peer in each other node, as float32.

With R ranks, m of them on each of N nodes, n elements of w bytes, a node receives (R - m) n w bytes of a small
message in one hop; of a large one (R - m) (n / N) w, and in a second hop (N - 1) / N of 4 n. Summing inside the
nodes first would bring that to 2 (N - 1) / N of n w, at the price of an order that depends on the nodes.

With another wire type than f32 every rank's part is rounded before it is added, inside the own node too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpillm.jit import exchange
from mpillm.machine.segment import Segment, shares
from mpillm.quant import wire as formats

SMALL = 1 << 18                 # bytes that enter a node: up to here one hop beats fewer bytes


class TwoLevels:
    """The plan of a group's sums: ``nodes[rank]`` names each rank's node; ``comm`` joins all, ``segment`` a node.

    ``finish`` waits for messages.
    """

    def __init__(self, comm: Any, rank: int, nodes: Sequence[int], segment: Segment, wire: str,
                 finish: Callable[[Sequence[Any]], None]) -> None:
        self._comm, self._segment, self._wire, self._rank = comm, segment, wire, rank
        self._size, self._finish = len(nodes), finish
        members = [[r for r in range(self._size) if nodes[r] == node] for node in dict.fromkeys(nodes)]
        self._mine = next(ranks for ranks in members if rank in ranks)
        self._others = [ranks for ranks in members if ranks is not self._mine]
        self._node_of = {r: ranks for ranks in members for r in ranks}
        self._outside = self._size - min(len(ranks) for ranks in members)
        self.received = 0               # bytes from other nodes, on this rank

    def all_reduce(self, x_MN: np.ndarray) -> None:
        """Sum the rows of float32 [M, n] (contiguous) over all ranks, in place."""
        values = formats.blocks(x_MN)
        step = self._segment.slot_nbytes // formats.NBYTES["f32"]
        for begin in range(0, len(values), step):
            self._piece(values[begin:begin + step])
        if not np.may_share_memory(values, x_MN):
            x_MN[:] = values.reshape(len(x_MN), -1)[:, :x_MN.shape[1]]

    def _owned(self, n_blocks: int, large: bool) -> list[tuple[int, int]]:
        """First and last + 1 of each rank's blocks: dealt out over its node, or over all."""
        spans = [(0, 0)] * self._size
        for ranks in [list(range(self._size))] if large else [self._mine, *self._others]:
            counts, offsets = shares(n_blocks, len(ranks))
            for r, count, offset in zip(ranks, counts, offsets, strict=True):
                spans[r] = offset, offset + count
        return spans

    def _peer(self, owner: int, ranks: list[int]) -> int:
        """The rank of another node that speaks with ``owner`` for its node."""
        return ranks[self._node_of[owner].index(owner) % len(ranks)]

    def _piece(self, values: np.ndarray) -> None:
        n_blocks, width = len(values), formats.NBYTES[self._wire]
        large = self._outside * n_blocks * width > SMALL
        owned = self._owned(n_blocks, large)
        slots = self._segment.flip()
        parts = slots[:len(self._mine), :n_blocks * width].reshape(-1, n_blocks, width)
        results = slots[len(self._mine), :n_blocks * 128].view(np.float32).reshape(n_blocks, formats.BLOCK)
        parts[self._segment.rank] = formats.encode(self._wire, values)
        self._segment.meet()

        # Every rank's part of what is owned here, added in rank order
        low, high = owned[self._rank]
        gathered = np.empty((self._size, high - low, width), np.uint8)
        gathered[self._mine] = parts[:, low:high]
        self._fetch_parts(parts, owned, gathered)
        result = np.empty((high - low, formats.BLOCK), np.float32)
        if result.size:
            numbers = formats.decode(self._wire, gathered).reshape(self._size, -1)
            exchange.exchange_kernel(exchange.run_sum)(result.reshape(-1), numbers)
        results[low:high] = result
        if large:
            self._fetch_results(result, owned, results)
        self._segment.meet()
        values[:] = results

    def _fetch_parts(self, parts: np.ndarray, owned: list[tuple[int, int]], gathered: np.ndarray) -> None:
        """Send this node's parts to the owners elsewhere whose peer this rank is; receive from the own peers."""
        sends = {owner: np.ascontiguousarray(parts[:, slice(*owned[owner])]) for ranks in self._others
                 for owner in ranks if self._peer(owner, self._mine) == self._rank}
        arriving = {self._peer(self._rank, ranks): np.empty((len(ranks), *gathered.shape[1:]), np.uint8)
                    for ranks in self._others}
        self._swap(sends, arriving)
        for ranks in self._others:
            gathered[ranks] = arriving[self._peer(self._rank, ranks)]

    def _fetch_results(self, result: np.ndarray, owned: list[tuple[int, int]], results: np.ndarray) -> None:
        """Send the own result to a peer in each other node; receive those of the owners whose peer this is."""
        sends = {self._peer(self._rank, ranks): result for ranks in self._others}
        arriving = {owner: results[slice(*owned[owner])] for ranks in self._others for owner in ranks
                    if self._peer(owner, self._mine) == self._rank}
        self._swap(sends, arriving)

    def _swap(self, sends: dict[int, np.ndarray], arriving: dict[int, np.ndarray]) -> None:
        requests = [self._comm.Irecv(array, rank) for rank, array in arriving.items() if array.size]
        requests += [self._comm.Isend(array, rank) for rank, array in sends.items() if array.size]
        self._finish(requests)
        self.received += sum(array.nbytes for array in arriving.values())
