"""How fast a job would run under each layout: pure arithmetic over figures that were measured before.

A decode step reads a rank's weights once, whatever the number of rows, and each sequence's cache; products take
the longer of reading and multiplying; between them all ranks of the replica wait for sums. So more ranks per
replica make a step shorter and add exchanges; more replicas add sequences that run together, and leave each rank
less memory for its cache. Seconds, bytes; rates per second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpillm.partition import Layout, Share

STEP_SECONDS = 0.5e-3      # of a step outside kernels and exchanges: scheduling, sampling, Python
REACHED = 0.4              # of the arithmetic peak in products of many rows (docs/performance.md: 0.3 to 0.6)
SHOWN = 3                  # other layouts that the one line names


@dataclass(frozen=True)
class Machine:
    """What one rank can do while all ranks of its node do the same, and how long a sum over ranks takes."""

    read: float                                          # bytes/s from memory
    operations: float                                    # operations/s at most, in products of the weights' format
    exchanges: tuple[tuple[int, int, float], ...] = ()   # (ranks, bytes, seconds) of sums that were measured

    def exchange(self, ranks: int, nbytes: float) -> float:
        """Seconds of a sum of ``nbytes`` over ``ranks``, from the measured ones; 0 for one rank.

        Linear in the bytes (never falling, constant below the least) and in the ranks (constant beyond the ends).
        """
        if ranks == 1 or not self.exchanges:
            return 0.0
        known = sorted({count for count, _, _ in self.exchanges})
        below = max((count for count in known if count <= ranks), default=known[0])
        above = min((count for count in known if count >= ranks), default=known[-1])
        low, high = self._of_bytes(below, nbytes), self._of_bytes(above, nbytes)
        return low if below == above else low + (high - low) * (ranks - below) / (above - below)

    def _of_bytes(self, ranks: int, nbytes: float) -> float:
        points = sorted((size, seconds) for count, size, seconds in self.exchanges if count == ranks)
        (size, seconds), (larger, longer) = points[0], points[-1]
        slope = max(0.0, longer - seconds) / (larger - size) if larger > size else 0.0
        return seconds + slope * max(0.0, nbytes - size)


@dataclass(frozen=True)
class Work:
    """The batch. ``sequences`` None: more than the replicas run together."""

    sequences: int | None = None
    prompt: float = 512.0        # tokens of a sequence, on average
    new: float = 256.0           # tokens generated for it
    max_batch: int = 32          # sequences that a replica runs together
    chunk: int = 512             # prompt tokens in a step

    @property
    def context(self) -> float:
        """Mean positions of a sequence that decodes."""
        return self.prompt + self.new / 2

    @property
    def tokens(self) -> float:
        """Those that are counted: generated, or the prompt's where none is."""
        return self.new or self.prompt


@dataclass(frozen=True)
class Candidate:
    """One layout, and what the rank of a replica that has the most to do would hold and do."""

    tp: int
    dp: int
    idle: int
    weight_bytes: int            # held
    read_bytes: float            # of weights that a step reads
    products: float              # multiply-adds of one row, without the output head
    head_products: float         # those of the output head
    cache_bytes: int             # of one position
    free: int                    # bytes that are left for the cache with the weights loaded; negative: they do not fit
    sums: int                    # over the ranks, in a step
    row_bytes: int               # of a row in such a sum
    attention_products: float = 0.0    # multiply-adds of one row and one position; 0: as fast as the cache is read
    swaps: int = 0               # exchanges within a KV row, in a step
    swap_ranks: int = 1          # that take part in one
    swap_bytes: float = 0.0      # of a row in one, on average

    @property
    def name(self) -> str:
        return f"{self.dp}x{self.tp}"


def batch_of(candidate: Candidate, work: Work) -> int:
    """Sequences that a replica runs together; 0 where its cache does not hold one."""
    own = work.max_batch
    if work.sequences is not None:
        own = min(own, max(1, -(-work.sequences // candidate.dp)))
    if candidate.free < 0:
        return 0
    each = candidate.cache_bytes * (work.prompt + work.new)
    return own if not each else min(own, int(candidate.free // each))


def step_terms(candidate: Candidate, machine: Machine, rows: float, heads: float, context: float,
               pairs: float | None = None) -> dict[str, float]:
    """Seconds of a step by what it has to do: see ``step_seconds``, which adds them.

    'weights' (reading them) and 'products' happen together, so do 'cache' (reading it) and 'attention'.
    ``pairs``: of a row and a position that it attends to; None: one row for each position.
    """
    multiplying = 2 * (rows * candidate.products + heads * candidate.head_products) / (machine.operations * REACHED)
    attending = 2 * (context if pairs is None else pairs) * candidate.attention_products
    sums = candidate.sums * machine.exchange(candidate.tp, rows * candidate.row_bytes)
    sampling = 2 * machine.exchange(candidate.tp, 0)
    swaps = candidate.swaps * machine.exchange(candidate.swap_ranks, rows * candidate.swap_bytes)
    return {"weights": candidate.read_bytes / machine.read, "products": multiplying,
            "cache": context * candidate.cache_bytes / machine.read,
            "attention": attending / (machine.operations * REACHED),
            "exchanges": sums + sampling + swaps, "rest": STEP_SECONDS}


def step_seconds(candidate: Candidate, machine: Machine, rows: float, heads: float, context: float) -> float:
    """A step of ``rows`` rows, of which ``heads`` want logits, over ``context`` positions in the cache together."""
    return total_seconds(step_terms(candidate, machine, rows, heads, context))


def total_seconds(terms: dict[str, float]) -> float:
    """Of ``step_terms``: what happens together counts once, by the longer of the two."""
    return (max(terms["weights"], terms["products"]) + max(terms["cache"], terms["attention"]) + terms["exchanges"]
            + terms["rest"])


def tokens_per_second(candidate: Candidate, machine: Machine, work: Work) -> float | None:
    """Of the whole job, loading left out; None where weights or the cache of one sequence do not fit."""
    batch = batch_of(candidate, work)
    if not batch:
        return None
    chunk = max(1.0, min(work.chunk, work.prompt * batch))
    prefill = step_seconds(candidate, machine, chunk, 1, work.prompt / 2) / chunk * work.prompt
    decode = work.new * step_seconds(candidate, machine, batch, batch, batch * work.context) / batch
    if work.sequences is None:
        return candidate.dp * work.tokens / (prefill + decode)
    own = max(1, -(-work.sequences // candidate.dp))
    return max(1, work.sequences) * work.tokens / (own * (prefill + decode))


@dataclass(frozen=True)
class Rated:
    """A layout and its expected tokens/s; None: it does not fit."""

    candidate: Candidate
    speed: float | None


def rate(candidates: Iterable[Candidate], machine: Machine, work: Work) -> list[Rated]:
    """All of them, the fastest first; of equals the one with the larger tp, whose ranks hold less."""
    rated = [Rated(candidate, tokens_per_second(candidate, machine, work)) for candidate in candidates]
    return sorted(rated, key=lambda r: (r.speed is None, -(r.speed or 0.0), -r.candidate.tp))


def fitting(candidates: Iterable[Candidate], work: Work) -> list[Candidate]:
    """Those whose ranks hold the weights and the cache of one sequence."""
    return [candidate for candidate in candidates if batch_of(candidate, work)]


def sizes_to_try(ranks: int, n_heads: int, n_kv_heads: int) -> list[int]:
    """Numbers of ranks per replica worth comparing, ascending.

    For each number of replicas the largest there is room for, and the largest at which heads fall evenly.
    """
    most = [ranks // dp for dp in range(1, ranks + 1)]
    return sorted({*most, *(_even(tp, n_heads, n_kv_heads) for tp in set(most))})


def _even(most: int, n_heads: int, n_kv_heads: int) -> int:
    """The largest number of ranks up to ``most`` that all have as many query heads of as many KV heads."""
    return max((tp for tp in range(1, min(most, n_heads) + 1)
                if n_heads % tp == 0 and (n_kv_heads % tp == 0 or tp % n_kv_heads == 0)), default=1)


def sizes_to_measure(candidates: Sequence[Candidate], most: int = 4) -> list[int]:
    """Numbers of ranks whose sums are measured: at most ``most`` of the candidates' own, evenly over their order."""
    sizes = sorted({candidate.tp for candidate in candidates if candidate.tp > 1})
    if len(sizes) <= most:
        return sizes
    return sorted({sizes[round(i * (len(sizes) - 1) / (most - 1))] for i in range(most)})


@dataclass(frozen=True)
class LayoutChoice:
    """A layout, and why: what a resumed run takes over. ``to_dict`` is plain JSON.

    ``chosen_by``: 'auto' is the cost model; anything else says itself why nothing was measured.
    ``measured``: the figures of ``cost.Machine`` with the batch that was assumed, of 'auto' alone.
    ``expected``: (name as 4x8, tokens/s or None where it does not fit), the fastest first.
    """

    layout: Layout
    chosen_by: str
    measured: dict[str, Any] | None = None
    expected: tuple[tuple[str, float | None], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, read back by ``from_dict``."""
        return {**dataclasses.asdict(self.layout), "chosen_by": self.chosen_by, "measured": self.measured,
                "expected": [list(pair) for pair in self.expected]}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> LayoutChoice:
        """Of ``to_dict``, further keys left alone. KeyError where one is missing."""
        return cls(Layout(found["tp"], found["dp"], found["idle"]), found["chosen_by"], found["measured"],
                   tuple((name, speed) for name, speed in found["expected"]))

    def line(self) -> str:
        """The layout and its reason in one line."""
        own = self.layout
        text = f"layout: {own.dp} replica(s) x {own.tp} rank(s)"
        text += f", the last {own.idle} rank(s) stay idle" if own.idle else ""
        text += f" ({self.chosen_by})"
        if self.chosen_by != "auto":
            return text
        (_, speed), *others = self.expected
        fit = [f"{name} {other:.3g}" for name, other in others if other is not None][:SHOWN]
        unfit = [name for name, other in others if other is None]
        parts = fit + ([f"{' '.join(unfit[:SHOWN])} does not fit"] if unfit else [])
        return f"{text}: {speed:.3g} tokens/s expected" + ("; " + ", ".join(parts) if parts else "")


def row_columns(s: Share, experts: int, chosen: int, shared: int) -> float:
    """Columns of a layer's feed-forward that a row multiplies on a rank, of its experts all together, on the mean."""
    if not experts:
        return s.columns.size
    beside = s.columns.size * shared if s.experts.size == experts else s.shared_columns.size
    return s.experts.size * s.columns.size * chosen / experts + beside
