"""Who owns what: pure integer arithmetic over the rank grid, no arrays and no communication.

A model is split over ``tp`` ranks along whole query heads, along feed-forward columns and along vocabulary
rows.  Heads first:

* ``tp <= n_kv_heads``: each rank has whole KV heads with all their query heads, the first ranks one more.
* ``tp > n_kv_heads``: *KV rows*.  ``rows = gcd(tp, n_kv_heads)`` rows of ``width = tp / rows`` neighbouring
  ranks; a row owns ``n_kv_heads / rows`` KV heads and all their query heads, which are dealt contiguously
  to the row's ranks, the first ones one more; a rank may get none.  Where the cache is sharded, each rank
  of a row holds all its KV heads, and of the positions every width-th block.

Experts are split along their columns, all in the same places, or dealt to the ranks whole (``moe_split``).

Then feed-forward columns and vocabulary rows, in whole units, go to the ranks that read the fewest bytes in
a step so far.  Everything is exact and the same on every rank: no float decides where something lands.

Spans are half-open and absolute (counted over the whole model) unless a docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, isfinite, lcm

from mpillm.errors import ResourceError, UsageError

KV_MODES = ("redundant", "allgather", "sharded")
MOE_SPLITS = ("columns", "experts", "auto")
QUANT_BLOCK = 32             # columns in a quantisation block


@dataclass(frozen=True)
class Span:
    """The integers ``start <= i < stop``; false when empty."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop, f"a span runs upwards from 0, not {self.start}:{self.stop}"

    def __bool__(self) -> bool:
        return self.stop > self.start

    def __str__(self) -> str:
        """First and last, as people count: ``0-2``, ``7``, or ``-`` for none."""
        if not self:
            return "-"
        return str(self.start) if self.size == 1 else f"{self.start}-{self.stop - 1}"

    @property
    def size(self) -> int:
        return self.stop - self.start

    def range(self) -> range:
        return range(self.start, self.stop)

    def times(self, factor: int) -> Span:
        """The same stretch in a finer unit, such as heads in elements."""
        return Span(self.start * factor, self.stop * factor)

    def relative_to(self, origin: int) -> Span:
        """The same stretch counted from ``origin``, as an index into a rank's own slice."""
        return Span(self.start - origin, self.stop - origin)

    def overlap(self, other: Span) -> Span:
        """What both have; where they share nothing, an empty span."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))


@dataclass(frozen=True)
class Sizes:
    """A model's figures that matter for splitting it: counts, and bytes per stored weight."""

    hidden: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate: int            # feed-forward columns of a layer, or of each expert of one
    vocab: int
    column_unit: int = 16        # feed-forward columns are cut at multiples of it; the last unit may be short
    panel: int = 16              # vocabulary rows are cut at multiples of it
    bytes_attn: float = 2.0      # q, k, v and o: f32 4, bf16 and f16 2, q8_0 34/32, ...
    bytes_ffn: float = 2.0       # gate, up and down
    bytes_vocab: float = 2.0     # the output head, which a step reads once
    experts: int = 0             # of a layer; 0: one dense feed-forward
    experts_chosen: int = 0      # of them for each row
    shared: int = 0              # experts beside them that every row goes to
    dense_layers: int = 0        # that have no experts among layers that do
    dense_intermediate: int = 0  # feed-forward columns of these
    latent_head: int = 0         # latent attention: weights of a query head; head_dim counts the columns that all
                                 # heads share, the one KV head's; 0: K and V of each KV head
    latent_query: int = 0        # columns of a head's query in the latent's space, where it attends there
    latent_value: int = 0        # and of what it finds there

    def __post_init__(self) -> None:
        for name in ("hidden", "n_layers", "n_heads", "n_kv_heads", "head_dim", "intermediate", "vocab",
                     "column_unit", "panel"):
            assert getattr(self, name) >= 1, f"{name} must be 1 or more, not {getattr(self, name)}"
        for name in ("bytes_attn", "bytes_ffn", "bytes_vocab"):
            value = getattr(self, name)
            assert isfinite(value) and value > 0, f"{name} must be positive and finite, not {value}"
        assert self.experts_chosen <= self.experts and self.dense_layers <= self.n_layers, "experts"
        assert self.n_heads % self.n_kv_heads == 0, (
            f"{self.n_heads} query heads do not divide over {self.n_kv_heads} KV heads")

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.n_heads // self.n_kv_heads


@dataclass(frozen=True)
class Share:
    """What one rank owns.  Spans of heads, columns and vocabulary rows may be empty."""

    rank: int
    row: int            # which KV row; with tp <= n_kv_heads every rank is a row of its own
    row_rank: int       # place within the row
    heads: Span         # query heads
    kv_heads: Span      # KV heads whose cache it holds: those that its queries need, or if sharded its row's
    kv_columns: Span    # rows of k_proj and of v_proj that it computes, in elements of n_kv_heads * head_dim
    columns: Span       # feed-forward columns; where there are experts, of each one that it holds
    vocab: Span         # vocabulary rows, of the embedding and of the output head
    dense_columns: Span = Span(0, 0)    # feed-forward columns of dense layers among those with experts
    experts: Span = Span(0, 0)          # those that it holds, or a slice of
    shared_columns: Span = Span(0, 0)   # of the shared experts taken as one feed-forward, where they are not among them


@dataclass(frozen=True)
class Partition:
    """A model's split over ``tp`` ranks: ``shares[rank]``; ``rows * width == tp``."""

    sizes: Sizes
    tp: int
    kv_mode: str
    rows: int
    width: int
    shares: tuple[Share, ...]
    moe_split: str = "columns"

    @property
    def places(self) -> int:
        """Ranks over which the positions of a KV row's cache are dealt out: 1 unless they are sharded."""
        return self.width if self.kv_mode == "sharded" else 1

    def row_ranks(self, row: int) -> range:
        """The ranks of a KV row, by place within the row."""
        assert 0 <= row < self.rows, f"row {row} of {self.rows}"
        return range(row * self.width, (row + 1) * self.width)


@dataclass(frozen=True)
class Layout:
    """``dp`` replicas of ``tp`` ranks each; the last ``idle`` ranks have nothing to do."""

    tp: int
    dp: int
    idle: int


def spread(total: int, parts: int) -> tuple[Span, ...]:
    """``total`` things cut into ``parts`` neighbouring spans, the first ``total % parts`` one longer."""
    quotient, remainder = divmod(total, parts)
    borders = [i * quotient + min(i, remainder) for i in range(parts + 1)]
    return tuple(map(Span, borders, borders[1:]))


def level_out(loads: Sequence[int], price: int, units: int) -> list[int]:
    """How many of ``units`` pieces that cost ``price`` each go to every rank, given its load so far.

    The result is that of handing out the pieces one by one to whoever has the least, the lower rank where
    two are equal.  So the highest load is as low as whole pieces allow, and the lowest as high.
    """
    # Count in the largest common unit: the search below takes as many rounds as the figures have bits
    common = gcd(price, *loads)
    price, loads = price // common, [load // common for load in loads]

    # A rank with load b takes its pieces at levels b, b + price, ...; the `units` lowest levels win
    def taken(level: int) -> list[int]:
        return [max(0, -((load - level) // price)) for load in loads]

    low, high = min(loads), max(loads) + units * price + 1
    while high - low > 1:
        middle = (low + high) // 2
        if sum(taken(middle)) <= units:
            low = middle
        else:
            high = middle

    # What is left goes to ranks exactly at the water's level, the lower ones first
    counts = taken(low)
    left = units - sum(counts)
    for rank, (load, count) in enumerate(zip(loads, counts, strict=True)):
        if left and load + count * price == low:
            counts[rank] += 1
            left -= 1
    assert left == 0, f"{left} of {units} units found no rank"
    return counts


def partition(sizes: Sizes, tp: int, kv_mode: str = "redundant", moe_split: str = "columns") -> Partition:
    """Split a model over ``tp`` ranks; ``moe_split`` auto deals whole experts where slices would be too narrow.

    Raises UsageError for ``tp`` below 1, for an unknown ``kv_mode`` or ``moe_split``, and for a model without experts
    whose experts are to be dealt.  ``tp`` may exceed the query heads:
    the ranks that get none still own columns and vocabulary rows.
    """
    if tp < 1:
        raise UsageError(f"tp {tp} is not a number of ranks: use 1 or more")
    if kv_mode not in KV_MODES:
        raise UsageError(f"kv-mode {kv_mode!r} is unknown: use {' or '.join(KV_MODES)}")
    moe_split = _moe_split(sizes, tp, moe_split)
    rows, width = kv_rows(tp, sizes.n_kv_heads)
    heads = _split_heads(sizes, tp)
    kv_heads = [_needed_kv_heads(span, sizes.group) for span in heads]
    kv_columns = [span.times(sizes.head_dim) for span in kv_heads]
    # All modes cut columns and vocabulary alike, or their sums over ranks would differ in the last bit
    rest = _split_by_bytes(sizes, heads, kv_columns, moe_split)
    if kv_mode != "redundant" and width > 1:
        kv_columns = _even_kv_columns(sizes, rows, width)
    if kv_mode == "sharded" and width > 1:
        each = sizes.n_kv_heads // rows
        kv_heads = [Span(rank // width, rank // width + 1).times(each) for rank in range(tp)]
    owned = zip(heads, kv_heads, kv_columns, *rest, strict=True)
    shares = tuple(Share(rank, rank // width, rank % width, *spans) for rank, spans in enumerate(owned))
    return Partition(sizes, tp, kv_mode, rows, width, shares, moe_split)


def _moe_split(sizes: Sizes, tp: int, asked: str) -> str:
    """columns or experts: whole experts where a rank's slice of one would be less than a quantisation block."""
    if asked not in MOE_SPLITS:
        raise UsageError(f"moe-split {asked!r} is unknown: use {', '.join(MOE_SPLITS[:-1])} or {MOE_SPLITS[-1]}")
    if asked == "experts" and not sizes.experts:
        raise UsageError("moe-split experts is for models with experts, this one has none: leave it out")
    if asked == "auto":
        return "experts" if sizes.experts and sizes.intermediate < QUANT_BLOCK * tp else "columns"
    return asked


def kv_rows(tp: int, n_kv_heads: int) -> tuple[int, int]:
    """How many KV rows there are, and how many ranks are in one; a row is one rank while KV heads suffice."""
    rows = tp if tp <= n_kv_heads else gcd(tp, n_kv_heads)
    return rows, tp // rows


def _split_heads(sizes: Sizes, tp: int) -> list[Span]:
    """The query heads of every rank."""
    if tp <= sizes.n_kv_heads:
        return [span.times(sizes.group) for span in spread(sizes.n_kv_heads, tp)]
    rows, width = kv_rows(tp, sizes.n_kv_heads)
    per_row = sizes.n_heads // rows
    return [Span(row * per_row + span.start, row * per_row + span.stop)
            for row in range(rows) for span in spread(per_row, width)]


def _needed_kv_heads(heads: Span, group: int) -> Span:
    """The KV heads of a span of query heads: those of its first to its last, none for none."""
    first = heads.start // group
    return Span(first, -(-heads.stop // group)) if heads else Span(first, first)


def _even_kv_columns(sizes: Sizes, rows: int, width: int) -> list[Span]:
    """An even share of its row's KV columns for every rank, those without queries included."""
    per_row = sizes.n_kv_heads // rows * sizes.head_dim
    return [Span(row * per_row + span.start, row * per_row + span.stop)
            for row in range(rows) for span in spread(per_row, width)]


@dataclass(frozen=True)
class _Prices:
    """Weight bytes that a step reads for one thing, over all layers, as integers of ``1 / scale`` bytes."""

    head: int        # a query head: its rows of q_proj, its columns of o_proj
    kv_column: int   # a row of k_proj and one of v_proj
    column: int      # a row of gate_proj, one of up_proj, a column of down_proj; where there are experts, of one
    dense: int       # the same in dense layers among those with experts
    token: int       # a row of the output head
    scale: int

    @staticmethod
    @lru_cache(maxsize=16)
    def of(sizes: Sizes) -> _Prices:
        attn, ffn, vocab = (Fraction(b) for b in (sizes.bytes_attn, sizes.bytes_ffn, sizes.bytes_vocab))
        scale = lcm(attn.denominator, ffn.denominator, vocab.denominator) * max(1, sizes.experts)
        stacked = scale * sizes.hidden * sizes.n_layers
        return _Prices(head=int((sizes.latent_head * scale * sizes.n_layers or 2 * sizes.head_dim * stacked) * attn),
                       kv_column=int((1 if sizes.latent_head else 2) * stacked * attn),
                       column=int(3 * scale * sizes.hidden * ffn) * (sizes.n_layers - sizes.dense_layers),
                       dense=int(3 * scale * sizes.hidden * ffn) * sizes.dense_layers,
                       token=int(scale * sizes.hidden * vocab), scale=scale)


def _split_by_bytes(sizes: Sizes, heads: Sequence[Span], kv_columns: Sequence[Span],
                    moe_split: str) -> tuple[Sequence[Span], ...]:
    """Share's spans from ``columns`` on, of every rank, so that a step's bytes are even.

    A step of one row counts, which reads the experts that the row chooses; of experts that are dealt whole, the mean.

    Columns level what the heads left uneven, vocabulary panels what the columns left: being the finer ones,
    they go last.  (The columns count on an even share of the vocabulary; a share that all have alike moves
    nothing, so it does not appear.)  Of experts that are dealt whole only the shared ones' columns can level.
    """
    price, ranks, unit = _Prices.of(sizes), len(heads), sizes.column_unit
    loads = [h.size * price.head + kv.size * price.kv_column for h, kv in zip(heads, kv_columns, strict=True)]

    def even(total: int) -> list[Span]:
        return _deal([0] * ranks, 1, total, unit)

    def loaded(spans: Sequence[Span], each: int) -> list[int]:
        return [load + span.size * each for load, span in zip(loads, spans, strict=True)]

    dense, shared = even(sizes.dense_intermediate), even(sizes.shared * sizes.intermediate)
    loads = loaded(dense, price.dense)
    if moe_split == "experts":
        experts: Sequence[Span] = spread(sizes.experts, ranks)
        columns = [Span(0, sizes.intermediate)] * ranks
        loads = loaded(experts, _routed(sizes, price, 1, sizes.intermediate))
        shared = _deal(loads, price.column, sizes.shared * sizes.intermediate, unit)
        loads = loaded(shared, price.column)
    else:
        experts = [Span(0, sizes.experts)] * ranks
        each = price.column * (max(1, sizes.experts_chosen) + sizes.shared)
        columns = _deal(loads, each, sizes.intermediate, unit)
        loads = loaded(columns, each)
    return columns, _deal(loads, price.token, sizes.vocab, sizes.panel), dense, experts, shared


def _routed(sizes: Sizes, price: _Prices, held: int, columns: int) -> int:
    """What a step of one row reads of ``columns`` of ``held`` experts on the mean, in the unit of ``price``."""
    if not sizes.experts:
        return columns * price.column
    return held * columns * price.column * sizes.experts_chosen // sizes.experts


def _deal(loads: Sequence[int], price: int, total: int, unit: int) -> list[Span]:
    """``total`` things of ``price`` each as spans in rank order, cut at multiples of ``unit``; evenly if it is 0."""
    loads, price = (loads, price) if price else ([0] * len(loads), 1)
    counts = level_out(loads, price * unit, -(-total // unit))
    spans, start = [], 0
    for count in counts:
        stop = min(total, start + count * unit)
        spans.append(Span(start, stop))
        start = stop
    return spans


def _phases(p: Partition, rank: int, price: _Prices) -> tuple[int, int, int]:
    """Attention, feed-forward and vocabulary bytes of a rank, in the unit of ``price``."""
    s = p.shares[rank]
    attention = s.heads.size * price.head + s.kv_columns.size * price.kv_column
    shared = s.columns.size * p.sizes.shared if p.moe_split == "columns" else s.shared_columns.size
    feed_forward = _routed(p.sizes, price, s.experts.size, s.columns.size) + shared * price.column + \
        s.dense_columns.size * price.dense
    return attention, feed_forward, s.vocab.size * price.token


def phase_bytes(p: Partition, rank: int) -> tuple[float, float, float]:
    """Weight bytes that ``rank`` reads in one decode step: for attention, feed-forward and output head.

    All layers together.  Between the phases of a layer all ranks wait for each other in an all-reduce.
    """
    price = _Prices.of(p.sizes)
    attention, feed_forward, vocab = (n / price.scale for n in _phases(p, rank, price))
    return attention, feed_forward, vocab


def step_bytes(p: Partition, rank: int, rows: int = 1) -> float:
    """Weight bytes that ``rank`` reads in one decode step: its matrices without norms, biases and padding.

    ``rows`` count where there are experts: those that one row chooses, else the mean of free and even choices.
    """
    price, s = _Prices.of(p.sizes), p.sizes
    total = sum(_phases(p, rank, price)) / price.scale
    if s.experts and rows > 1:
        read = s.experts * (1 - (1 - s.experts_chosen / s.experts) ** rows)
        share = p.shares[rank]
        once = _routed(s, price, share.experts.size, share.columns.size) / price.scale
        total += once * (read / s.experts_chosen - 1)
    return total


def balance(p: Partition) -> float:
    """Mean over maximum of the ranks' step bytes: 1.0 when every rank reads the same."""
    price = _Prices.of(p.sizes)
    loads = [sum(_phases(p, rank, price)) for rank in range(p.tp)]
    return sum(loads) / (p.tp * max(loads))


def local_groups(s: Share, group: int) -> tuple[Span, ...]:
    """For each KV head that a share holds, which of its own query heads (counted from 0) use it.

    The first and the last may be shorter than ``group``: the rest of the group lives on a neighbour.
    """
    return tuple(Span(kv, kv + 1).times(group).overlap(s.heads).relative_to(s.heads.start)
                 for kv in s.kv_heads.range())


def layout(ranks: int, n_heads: int, fits: Callable[[int], bool], tp: int | None = None) -> Layout:
    """How many ranks serve one replica, how many replicas there are, how many ranks are left over.

    ``tp`` given is taken as it is (``fits`` is not asked); UsageError unless 1 <= tp <= ranks.  Otherwise, in
    this order, the first that ``fits(tp)``: the divisors of ``ranks`` up to ``n_heads``, largest first, so
    that no rank idles and each owns a query head; any tp up to ``n_heads``, largest first; then those beyond,
    smallest first, so that few ranks lack heads.  ResourceError when none fits.
    """
    assert ranks >= 1 and n_heads >= 1, f"a layout needs ranks and heads, not {ranks} and {n_heads}"
    if tp is not None:
        if not 1 <= tp <= ranks:
            raise UsageError(f"tp {tp} does not go into {ranks} ranks: use 1 to {ranks}, or start more ranks")
        return Layout(tp, ranks // tp, ranks % tp)
    downwards = range(min(ranks, n_heads), 0, -1)
    choices = [n for n in downwards if ranks % n == 0]
    choices += [n for n in downwards if ranks % n]
    choices += range(n_heads + 1, ranks + 1)
    for choice in choices:
        if fits(choice):
            return Layout(choice, ranks // choice, ranks % choice)
    raise ResourceError(f"the model fits the memory of no split over {ranks} ranks: start more ranks on more"
                        " nodes, or store smaller --weights")
