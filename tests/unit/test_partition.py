"""Properties of the split: everything owned once, KV heads where needed, bytes even, exchanges right."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm.cli.report import describe
from mpillm.collectives import row_parts
from mpillm.errors import ResourceError, UsageError
from mpillm.partition import (
    KV_MODES,
    Layout,
    Sizes,
    Span,
    balance,
    kv_rows,
    layout,
    level_out,
    local_groups,
    partition,
    phase_bytes,
    spread,
    step_bytes,
)

SMOLLM2_135M = Sizes(hidden=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64, intermediate=1536,
                     vocab=49152)
LLAMA3_70B = Sizes(hidden=8192, n_layers=80, n_heads=64, n_kv_heads=8, head_dim=128, intermediate=28672,
                   vocab=128256)
BYTES = st.sampled_from([4.0, 2.0, 34 / 32, 18 / 32, 20 / 32, 0.1])


@st.composite
def sizes(draw) -> Sizes:
    n_kv_heads = draw(st.integers(1, 12))
    return Sizes(hidden=draw(st.integers(1, 300)), n_layers=draw(st.integers(1, 4)),
                 n_heads=n_kv_heads * draw(st.integers(1, 9)), n_kv_heads=n_kv_heads,
                 head_dim=2 * draw(st.integers(1, 16)), intermediate=draw(st.integers(1, 1500)),
                 vocab=draw(st.integers(1, 3000)), column_unit=draw(st.sampled_from([1, 16, 32])),
                 panel=draw(st.sampled_from([1, 16])), bytes_attn=draw(BYTES), bytes_ffn=draw(BYTES),
                 bytes_vocab=draw(BYTES))


# A busy machine is no fault of the code: no deadline
quick = settings(deadline=None, max_examples=80)
RANKS = st.one_of(st.integers(1, 16), st.integers(1, 40))
MODES = st.sampled_from(KV_MODES)


def naive_level_out(loads, price, units) -> list[int]:
    """Hand out the pieces one at a time to the least loaded, the lower rank first."""
    counts, heap = [0] * len(loads), [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(units):
        load, rank = heap[0]
        counts[rank] += 1
        heapq.heapreplace(heap, (load + price, rank))
    return counts


def assert_tiles(spans, total, unit=1) -> None:
    """The spans, in order, cover 0 to total exactly once and meet only at multiples of the unit."""
    assert spans[0].start == 0 and spans[-1].stop == total
    for left, right in zip(spans, spans[1:], strict=False):
        assert left.stop == right.start
        assert left.stop % unit == 0 or left.stop == total


# Ownership

@quick
@given(sizes(), RANKS, MODES)
def test_everything_is_owned_exactly_once(s, tp, mode):
    p = partition(s, tp, mode)
    assert (p.tp, p.kv_mode, len(p.shares), p.rows * p.width) == (tp, mode, tp, tp)
    assert_tiles([share.heads for share in p.shares], s.n_heads)
    assert_tiles([share.columns for share in p.shares], s.intermediate, s.column_unit)
    assert_tiles([share.vocab for share in p.shares], s.vocab, s.panel)
    assert [share.rank for share in p.shares] == list(range(tp))


@quick
@given(sizes(), RANKS, MODES)
def test_a_rank_holds_the_kv_heads_of_its_queries_or_of_its_row(s, tp, mode):
    p = partition(s, tp, mode)
    assert p.places == (p.width if mode == "sharded" else 1)
    for share in p.shares:
        serves = [share] if p.places == 1 else [p.shares[r] for r in p.row_ranks(share.row)]
        assert set(share.kv_heads.range()) == {
            h // (s.n_heads // s.n_kv_heads) for other in serves for h in other.heads.range()}
    assert {kv for share in p.shares for kv in share.kv_heads.range()} == set(range(s.n_kv_heads))


@quick
@given(sizes(), RANKS, MODES)
def test_rows_share_no_kv_head_and_split_their_queries_evenly(s, tp, mode):
    p = partition(s, tp, mode)
    seen: set[int] = set()
    for row in range(p.rows):
        shares = [p.shares[r] for r in p.row_ranks(row)]
        assert [(x.row, x.row_rank) for x in shares] == [(row, i) for i in range(p.width)]
        mine = {kv for x in shares for kv in x.kv_heads.range()}
        assert mine and not mine & seen
        seen |= mine
        counts = [x.heads.size for x in shares]
        assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)
    if tp <= s.n_kv_heads:
        counts = [x.kv_heads.size for x in p.shares]
        assert p.width == 1 and sum(counts) == s.n_kv_heads and max(counts) - min(counts) <= 1
        assert counts == sorted(counts, reverse=True)
    else:
        assert len({sum(p.shares[r].heads.size for r in p.row_ranks(row)) for row in range(p.rows)}) == 1


@quick
@given(sizes(), RANKS)
def test_redundant_computes_what_it_needs(s, tp):
    for share in partition(s, tp, "redundant").shares:
        assert share.kv_columns == Span(share.kv_heads.start * s.head_dim, share.kv_heads.stop * s.head_dim)


@quick
@given(sizes(), RANKS, st.sampled_from(["allgather", "sharded"]))
def test_the_other_modes_compute_every_kv_column_once(s, tp, mode):
    p = partition(s, tp, mode)
    assert_tiles([share.kv_columns for share in p.shares], s.n_kv_heads * s.head_dim)
    for row in range(p.rows):
        counts = [p.shares[r].kv_columns.size for r in p.row_ranks(row)]
        assert max(counts) - min(counts) <= 1


@quick
@given(sizes(), RANKS)
def test_modes_coincide_where_rows_are_one_rank_wide(s, tp):
    redundant, allgather, sharded = (partition(s, tp, mode) for mode in KV_MODES)
    assert (redundant.shares == allgather.shares == sharded.shares) or redundant.width > 1
    for a, b, c in zip(redundant.shares, allgather.shares, sharded.shares, strict=True):
        assert (a.heads, a.kv_heads, a.row, a.row_rank) == (b.heads, b.kv_heads, b.row, b.row_rank)
        assert (a.heads, a.row, a.row_rank, b.kv_columns) == (c.heads, c.row, c.row_rank, c.kv_columns)


@pytest.mark.parametrize(("heads", "kv", "tp", "rows", "counts"), [
    (64, 8, 32, 8, [2] * 32),
    (9, 3, 5, 1, [2, 2, 2, 2, 1]),
    (9, 3, 2, 2, [6, 3]),
    (9, 3, 6, 3, [2, 1] * 3),
    (9, 3, 12, 3, [1, 1, 1, 0] * 3),
    (9, 3, 32, 1, [1] * 9 + [0] * 23),
    (32, 8, 12, 4, [3, 3, 2] * 4),
    (14, 2, 4, 2, [4, 3, 4, 3]),
    (28, 4, 7, 1, [4] * 7),
    (28, 4, 3, 3, [14, 7, 7]),
    (52, 52, 7, 7, [8, 8, 8, 7, 7, 7, 7]),
    (6, 1, 13, 1, [1] * 6 + [0] * 7),
    (40, 8, 1, 1, [40]),
])
def test_heads_of_known_models(heads, kv, tp, rows, counts):
    p = partition(replace(SMOLLM2_135M, n_heads=heads, n_kv_heads=kv), tp)
    assert [share.heads.size for share in p.shares] == counts
    assert (p.rows, p.width) == kv_rows(tp, kv) == (rows, tp // rows)


def test_a_rank_whose_queries_straddle_two_kv_heads_holds_both():
    p = partition(SMOLLM2_135M, 5)
    assert [str(share.kv_heads) for share in p.shares] == ["0", "0-1", "1", "2", "2"]
    assert local_groups(p.shares[1], p.sizes.group) == (Span(0, 1), Span(1, 2))
    assert local_groups(p.shares[3], p.sizes.group) == (Span(0, 2),)


@quick
@given(sizes(), RANKS)
def test_local_groups_pair_each_query_with_its_kv_head(s, tp):
    p = partition(s, tp)
    for share in p.shares:
        groups = local_groups(share, s.group)
        assert len(groups) == share.kv_heads.size
        pairs = {(share.heads.start + q, share.kv_heads.start + kv)
                 for kv, span in enumerate(groups) for q in span.range()}
        assert pairs == {(h, h // s.group) for h in share.heads.range()}


# Bytes

@quick
@given(st.lists(st.integers(0, 200), min_size=1, max_size=20), st.integers(1, 40), st.integers(0, 200))
def test_level_out_is_the_greedy_hand_out(loads, price, units):
    assert level_out(loads, price, units) == naive_level_out(loads, price, units)


@quick
@given(sizes(), RANKS)
def test_no_unit_could_move_to_a_rank_with_less(s, tp):
    """Columns as even as whole units allow after attention, vocabulary as even as panels allow after both."""
    p = partition(s, tp)
    phases = [phase_bytes(p, rank) for rank in range(tp)]
    layers = [attention + ffn for attention, ffn, _ in phases]
    unit = 3 * s.hidden * s.n_layers * s.bytes_ffn * s.column_unit
    panel = s.hidden * s.bytes_vocab * s.panel
    short_columns, short_rows = -s.intermediate % s.column_unit, -s.vocab % s.panel
    last = max(rank for rank in range(tp) if p.shares[rank].columns)
    full = layers[:]
    full[last] += short_columns * unit / s.column_unit
    assert all(full[r] - unit <= min(full) + 1e-9 * unit for r in range(tp) if p.shares[r].columns)
    last = max(rank for rank in range(tp) if p.shares[rank].vocab)
    full = [sum(phase) for phase in phases]
    full[last] += short_rows * panel / s.panel
    assert all(full[r] - panel <= min(full) + 1e-9 * (unit + panel) for r in range(tp) if p.shares[r].vocab)


@quick
@given(sizes(), RANKS)
def test_all_modes_cut_columns_and_vocabulary_alike(s, tp):
    """The order of every sum over ranks is the same in all."""
    redundant, allgather, sharded = ([(a.heads, a.columns, a.vocab) for a in partition(s, tp, mode).shares]
                                     for mode in KV_MODES)
    assert redundant == allgather == sharded


@quick
@given(sizes(), RANKS)
def test_bytes_are_within_two_panels_where_units_are_plentiful(s, tp):
    # Enough columns to level the heads, enough panels to level the columns
    attention = [phase_bytes(partition(s, tp), rank)[0] for rank in range(tp)]
    unit = 3 * s.hidden * s.n_layers * s.bytes_ffn * s.column_unit
    panel = s.hidden * s.bytes_vocab * s.panel
    units = int(tp * ((max(attention) - min(attention)) / unit + 2))
    panels = int(tp * (2 * unit / panel + 2))
    p = partition(replace(s, intermediate=units * s.column_unit, vocab=panels * s.panel), tp)
    loads = [step_bytes(p, rank) for rank in range(tp)]
    assert max(loads) - min(loads) <= panel * (1 + 1e-9)
    odd = partition(replace(s, intermediate=units * s.column_unit - s.column_unit // 2,
                            vocab=panels * s.panel - s.panel // 2), tp)
    loads = [step_bytes(odd, rank) for rank in range(tp)]
    assert max(loads) - min(loads) <= 2 * panel * (1 + 1e-9)


@quick
@given(sizes(), RANKS, MODES)
def test_step_bytes_count_every_matrix(s, tp, mode):
    p = partition(s, tp, mode)
    kv_columns = sum(share.kv_columns.size for share in p.shares)
    attention = (2 * s.n_heads * s.head_dim + 2 * kv_columns) * s.hidden * s.n_layers * s.bytes_attn
    ffn = 3 * s.intermediate * s.hidden * s.n_layers * s.bytes_ffn
    loads = [step_bytes(p, rank) for rank in range(tp)]
    assert sum(loads) == pytest.approx(attention + ffn + s.vocab * s.hidden * s.bytes_vocab, rel=1e-12)
    assert [sum(phase_bytes(p, rank)) for rank in range(tp)] == pytest.approx(loads, rel=1e-12)
    assert balance(p) == pytest.approx(sum(loads) / tp / max(loads), rel=1e-12) and 0 < balance(p) <= 1


@quick
@given(sizes(), RANKS, MODES, BYTES)
def test_spans_depend_on_ratios_of_bytes_only(s, tp, mode, stored):
    """Ties are decided by exact arithmetic: equal ratios of bytes give equal spans, whatever the figure."""
    plain = partition(replace(s, bytes_attn=1.0, bytes_ffn=1.0, bytes_vocab=1.0), tp, mode)
    other = partition(replace(s, bytes_attn=stored, bytes_ffn=stored, bytes_vocab=stored), tp, mode)
    assert plain.shares == other.shares


def test_fewer_heads_are_made_up_for_by_columns():
    p = partition(SMOLLM2_135M, 5)
    assert p.shares[4].heads.size < p.shares[0].heads.size
    assert p.shares[4].columns.size > p.shares[0].columns.size
    assert balance(p) > 0.999 and balance(partition(SMOLLM2_135M, 5, "allgather")) > 0.98
    # A head weighs more than all of the others' columns here: those that have one get no columns at all
    p = partition(SMOLLM2_135M, 32, "redundant")
    assert not any(share.columns for share in p.shares[:9]) and all(share.columns for share in p.shares[9:])
    assert balance(p) > 0.99 and balance(partition(SMOLLM2_135M, 32, "allgather")) > 0.85


@pytest.mark.parametrize(("tp", "even_mb", "extra"), [(8, 335.5, 0.0), (16, 167.8, 1.9), (32, 83.9, 5.8),
                                                      (64, 41.9, 13.5)])
def test_llama_70b_figures(tp, even_mb, extra):
    """K/V weights a rank in bf16, and what redundancy adds to the weight reads of a step, in per cent."""
    redundant, even = (partition(LLAMA3_70B, tp, mode) for mode in KV_MODES[:2])
    kv_mb = [2 * p.shares[0].kv_columns.size * 8192 * 80 * 2 / 1e6 for p in (redundant, even)]
    assert kv_mb == pytest.approx([335.5, even_mb], abs=0.06)
    total = [sum(step_bytes(p, rank) for rank in range(tp)) for p in (redundant, even)]
    assert 100 * (total[0] / total[1] - 1) == pytest.approx(extra, abs=0.06)
    per_head = 2 * 128 * 2 * 80
    assert {d["cache_bytes_per_token"] for d in describe(redundant, None, per_head)} == {40960}


@pytest.mark.parametrize("mode", KV_MODES)
def test_tiny_models_leave_ranks_without_columns_or_rows(mode):
    tiny = Sizes(hidden=8, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=4, intermediate=20, vocab=17)
    p = partition(tiny, 7, mode)
    assert sorted((x.columns.size for x in p.shares), reverse=True) == [16, 4, 0, 0, 0, 0, 0]
    assert sorted((x.vocab.size for x in p.shares), reverse=True) == [16, 1, 0, 0, 0, 0, 0]
    assert sum(bool(x.heads) for x in p.shares) == 1


@pytest.mark.parametrize("mode", KV_MODES)
@pytest.mark.parametrize("model", [SMOLLM2_135M, LLAMA3_70B])
def test_512_ranks(model, mode):
    p = partition(model, 512, mode)
    assert_tiles([x.heads for x in p.shares], model.n_heads)
    assert_tiles([x.columns for x in p.shares], model.intermediate, 16)
    assert_tiles([x.vocab for x in p.shares], model.vocab, 16)
    # With fewer column units than ranks, those that have a head get none of them
    assert not any(x.heads and x.columns for x in p.shares) or model is LLAMA3_70B


# Exchange within a row

@quick
@given(sizes(), RANKS, MODES)
def test_the_exchange_delivers_what_redundant_would_compute(s, tp, mode):
    p = partition(s, tp, mode)
    before, _, after = row_parts(p, p.rows - 1)
    assert bool(before) == (mode != "redundant" and p.width > 1) and bool(after) == (p.places > 1)
    row = [p.shares[rank] for rank in p.row_ranks(p.rows - 1)]
    for part in before[-2:]:                    # K and V
        for receiver, me in enumerate(row):
            found = []
            for sender, other in enumerate(row):
                start, count, to = part.message(sender, receiver)
                assert not count or other.kv_columns.start <= start <= start + count <= other.kv_columns.stop
                assert not count or to == len(found)
                found += range(start, start + count)
            assert found == list(me.kv_heads.times(s.head_dim).range())


@quick
@given(sizes(), RANKS)
def test_shards_bring_all_queries_to_all_and_parts_to_their_heads(s, tp):
    p = partition(s, tp, "sharded")
    before, queries, after = row_parts(p, 0)
    assert not queries, "they travel with keys and values"
    if not after:
        return
    heads, row = s.n_heads // p.rows, [p.shares[rank] for rank in p.row_ranks(0)]
    for place, share in enumerate(row):
        assert [part.width(place) for part in before] == [
            share.heads.size * s.head_dim, share.kv_columns.size, share.kv_columns.size]
        assert [part.result(place) for part in before] == [
            n * s.head_dim for n in (heads, share.kv_heads.size, share.kv_heads.size)]
        assert [part.width(place) for part in after] == [heads * s.head_dim, heads]
        assert [part.result(place) for part in after] == [
            p.width * share.heads.size * n for n in (s.head_dim, 1)]


@pytest.mark.parametrize("tp", [2, 5, 8, 130])
def test_shards_of_latents_bring_all_absorbed_queries_to_all_and_parts_to_their_heads(tp):
    """DeepSeek-V3's attention: q_a's outputs with the latent row, absorbed queries, what heads find in latents."""
    s = Sizes(hidden=7168, n_layers=61, n_heads=128, n_kv_heads=1, head_dim=1536 + 576, intermediate=2048, vocab=129280,
              latent_head=1, latent_query=576, latent_value=512)
    p = partition(s, tp, "sharded")
    (latents,), (queries,), merge = row_parts(p, 0)
    assert p.places == tp and latents.for_all and queries.for_all
    for place, share in enumerate(p.shares):
        assert share.kv_heads == Span(0, 1), "each holds latents, those without heads too"
        assert (latents.width(place), latents.result(place)) == (share.kv_columns.size, 2112)
        assert (queries.width(place), queries.result(place)) == (share.heads.size * 576, 128 * 576)
        assert [part.width(place) for part in merge] == [128 * 512, 128]
        assert [part.result(place) for part in merge] == [tp * share.heads.size * n for n in (512, 1)]


def test_what_is_exchanged_in_known_models():
    def all_need_all(p):
        return row_parts(p, 0)[0][0].for_all

    assert all_need_all(partition(LLAMA3_70B, 32, "allgather"))
    assert not all_need_all(partition(LLAMA3_70B, 12, "allgather"))
    assert not all_need_all(partition(SMOLLM2_135M, 5, "allgather"))
    assert all_need_all(partition(SMOLLM2_135M, 5, "sharded"))
    assert row_parts(partition(SMOLLM2_135M, 3, "allgather"), 0) == ((), (), ())
    # A rank without queries still computes its columns and sends them, but receives none
    part = row_parts(partition(SMOLLM2_135M, 32, "allgather"), 0)[0][0]
    assert any(part.message(31, other)[1] for other in range(32)) and part.result(31) == 0



# Layout

def naive_layout(ranks, n_heads, fits) -> Layout | None:
    fitting = [tp for tp in range(1, ranks + 1) if fits(tp)]
    clean = [tp for tp in fitting if tp <= n_heads and ranks % tp == 0]
    headed = [tp for tp in fitting if tp <= n_heads]
    tp = max(clean) if clean else max(headed) if headed else min(fitting) if fitting else None
    return None if tp is None else Layout(tp, ranks // tp, ranks % tp)


@quick
@given(st.integers(1, 100), st.integers(1, 70), st.sets(st.integers(1, 100), max_size=60))
def test_layout_picks_the_best_that_fits(ranks, n_heads, fitting):
    expected = naive_layout(ranks, n_heads, fitting.__contains__)
    if expected is None:
        with pytest.raises(ResourceError, match=f"{ranks} ranks"):
            layout(ranks, n_heads, fitting.__contains__)
    else:
        found = layout(ranks, n_heads, fitting.__contains__, None)
        assert found == expected and found.tp * found.dp + found.idle == ranks and found.dp >= 1


@pytest.mark.parametrize(("ranks", "heads", "least", "expected"), [
    (32, 9, 1, Layout(8, 4, 0)), (5, 9, 1, Layout(5, 1, 0)), (13, 9, 1, Layout(1, 13, 0)),
    (13, 9, 2, Layout(9, 1, 4)), (32, 64, 1, Layout(32, 1, 0)), (24, 9, 9, Layout(9, 2, 6)),
    (24, 9, 10, Layout(10, 2, 4)), (1, 9, 1, Layout(1, 1, 0)),
])
def test_layouts_when_the_model_needs_at_least_so_many_ranks(ranks, heads, least, expected):
    assert layout(ranks, heads, lambda tp: tp >= least) == expected


def test_a_given_tp_is_taken_as_it_is():
    def never(tp: int) -> bool:
        raise AssertionError("fits is not asked")
    assert layout(7, 9, never, 3) == Layout(3, 2, 1)
    assert layout(32, 9, never, 32) == Layout(32, 1, 0)
    for tp in (8, 0, -1):
        with pytest.raises(UsageError, match=f"tp {tp} .*1 to 7"):
            layout(7, 9, never, tp)


# Small things

def test_wrong_arguments_are_named_with_the_remedy():
    with pytest.raises(UsageError, match="tp 0 .*1 or more"):
        partition(SMOLLM2_135M, 0)
    with pytest.raises(UsageError, match="'sideways' is unknown: use redundant or allgather"):
        partition(SMOLLM2_135M, 2, "sideways")
    with pytest.raises(AssertionError, match="9 query heads do not divide over 2 KV heads"):
        replace(SMOLLM2_135M, n_kv_heads=2)
    with pytest.raises(AssertionError, match="vocab must be 1 or more, not 0"):
        replace(SMOLLM2_135M, vocab=0)
    with pytest.raises(AssertionError, match="bytes_ffn must be positive and finite, not nan"):
        replace(SMOLLM2_135M, bytes_ffn=float("nan"))
    with pytest.raises(AssertionError, match="runs upwards"):
        Span(3, 2)


@quick
@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_spans_are_sets_of_neighbours(a, b, c, d):
    one, two = Span(min(a, b), max(a, b)), Span(min(c, d), max(c, d))
    assert set(one.overlap(two).range()) == set(one.range()) & set(two.range())
    assert one.size == len(one.range()) and bool(one) == (one.size > 0)
    assert list(one.times(3).range()) == [3 * i + j for i in one.range() for j in range(3)]
    if one.start <= two.start:
        assert list(two.relative_to(one.start).range()) == [i - one.start for i in two.range()]


@quick
@given(st.integers(0, 200), st.integers(1, 40))
def test_spread_is_even_and_the_first_get_one_more(total, parts):
    spans = spread(total, parts)
    assert_tiles(spans, total)
    assert [x.size for x in spans] == [total // parts + (i < total % parts) for i in range(parts)]


def test_describe_prints_spans_as_people_count():
    rows = describe(partition(SMOLLM2_135M, 32), list(range(100, 132)), 7680)
    first = {"rank": 0, "row": 0, "heads": "0", "kv_heads": "0", "kv_columns": "0-63"}
    assert {k: rows[0][k] for k in first} == first
    assert rows[31]["heads"] == rows[31]["kv_heads"] == rows[31]["kv_columns"] == "-"
    assert rows[31]["columns"].endswith("-1535") and rows[31]["vocab"].endswith("-49151")
    assert (rows[3]["weight_bytes"], rows[3]["cache_bytes_per_token"]) == (103, 7680)
    assert rows[31]["cache_bytes_per_token"] == 0
    straddling = describe(partition(SMOLLM2_135M, 5), None, 7680)[1]
    assert straddling["heads"] == "2-3" and straddling["kv_heads"] == "0-1"
    assert straddling["cache_bytes_per_token"] == 15360
    assert straddling["weight_bytes"] == step_bytes(partition(SMOLLM2_135M, 5), 1)
    with pytest.raises(AssertionError, match="2 ranks given for tp 5"):
        describe(partition(SMOLLM2_135M, 5), [1, 2], 1)
