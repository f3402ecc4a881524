"""Columns that travel between the ranks of a KV row within a step: what layers need to know of the exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mpillm import kernels


class Swap(Protocol):
    """Brings columns of up to three arrays to the ranks that want them; ``got``: how many of each arrive here."""

    got: list[int]

    def run(self, arrays: Sequence[np.ndarray], out: Sequence[np.ndarray]) -> None: ...

    def exchange_arguments(self) -> tuple[np.ndarray, ...] | None: ...


class KVGather(Protocol):
    """The exchanges of K and V in a row of ranks: see collectives.KVExchange."""

    place: int
    width: int      # 1: the cache is not sharded
    heads: int      # query heads of the row

    @property
    def gather(self) -> Swap: ...

    @property
    def queries(self) -> Swap | None: ...

    @property
    def merge(self) -> Swap | None: ...


def record_swap(plan: kernels.Plan, swap: Swap, arrays: Sequence[np.ndarray], names: Sequence[str]) -> list[np.ndarray]:
    """Record an exchange of ``arrays``; what arrives of each [T, got] is the buffer of its name."""
    out = [plan.buffer(name, n) for name, n in zip(names, swap.got, strict=True)]
    memory = swap.exchange_arguments()
    if memory is not None:
        plan.swap_columns(memory, arrays, out)
    else:
        plan.call("exchange", lambda rows: swap.run([x[:rows] for x in arrays], [x[:rows] for x in out]),
                  elsewhere=True)
    return out
