"""The cost model of layouts: which one wins, and what can never happen, whatever was measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm.engine import cost
from mpillm.engine.cost import Candidate, LayoutChoice, Machine, Work
from mpillm.partition import Layout

WEIGHTS, PRODUCTS = 16 << 30, 8e9         # of the whole model: 16 GiB in bf16
FAST = Machine(20e9, 2e12)
PLENTY = 1 << 40


def even(tp: int, ranks: int, free: int = PLENTY) -> Candidate:
    """A model that divides evenly, its KV heads too."""
    return Candidate(tp, ranks // tp, ranks % tp, WEIGHTS // tp, WEIGHTS / tp, PRODUCTS / tp, 5e8 / tp, 131072 // tp,
                     free, 65, 16384)


def divisors(ranks: int, free: int = PLENTY) -> list[Candidate]:
    return [even(tp, ranks, free) for tp in range(1, ranks + 1) if ranks % tp == 0]


machines = st.builds(
    Machine, st.floats(1e8, 1e12), st.floats(1e9, 1e14),
    st.lists(st.tuples(st.sampled_from([2, 4, 16]), st.sampled_from([4096, 1 << 20]), st.floats(1e-7, 1e-1)),
             max_size=6).map(tuple))
works = st.builds(Work, st.one_of(st.none(), st.integers(0, 10**6)), st.floats(1, 1e5), st.floats(0, 1e4),
                  st.integers(1, 512), st.integers(1, 4096))
candidates = st.lists(st.builds(
    Candidate, st.integers(1, 64), st.integers(1, 64), st.integers(0, 9), st.integers(1, 1 << 40),
    st.floats(1, 1e12), st.floats(1, 1e12), st.floats(1, 1e10), st.integers(0, 1 << 20),
    st.integers(-(1 << 40), 1 << 44), st.integers(1, 300), st.integers(4, 1 << 17)), min_size=1, max_size=6)


@settings(max_examples=50)
@given(candidates, machines, works, st.floats(1, 100))
def test_more_of_anything_is_never_slower(found, machine, work, more):
    quicker = tuple((ranks, nbytes, seconds / more) for ranks, nbytes, seconds in machine.exchanges)
    for better in (replace(machine, read=machine.read * more), replace(machine, operations=machine.operations * more),
                   replace(machine, exchanges=quicker)):
        for candidate in found:
            before = cost.tokens_per_second(candidate, machine, work)
            after = cost.tokens_per_second(candidate, better, work)
            assert (before is None) == (after is None)
            assert before is None or after >= before * (1 - 1e-9)


@settings(max_examples=50)
@given(candidates, machines, works)
def test_what_does_not_fit_is_never_before_what_does(found, machine, work):
    rated = cost.rate(found, machine, work)
    assert sorted(map(id, found)) == sorted(id(rating.candidate) for rating in rated)
    fit = [rating.speed is not None for rating in rated]
    assert fit == sorted(fit, reverse=True)
    assert sum(fit) == len(cost.fitting(found, work))
    assert all(rating.candidate.free >= 0 and rating.speed > 0 for rating in rated if rating.speed is not None)
    speeds = [rating.speed for rating in rated if rating.speed is not None]
    assert speeds == sorted(speeds, reverse=True)


@given(st.integers(1, 128), st.floats(1, 1e4), st.floats(1, 1e3))
def test_one_prompt_without_latency_takes_the_largest_tp(ranks, prompt, new):
    best = cost.rate(divisors(ranks), FAST, Work(1, prompt, new))[0]
    assert best.candidate.tp == ranks


@given(st.integers(1, 128), st.floats(1e-7, 1e-3), st.one_of(st.none(), st.integers(10**5, 10**6)))
def test_many_prompts_that_fit_take_replicas(ranks, latency, sequences):
    machine = replace(FAST, exchanges=((2, 16384, latency), (2, 1 << 20, 3 * latency)))
    sequences = None if sequences is None else sequences // (32 * ranks) * 32 * ranks
    best = cost.rate(divisors(ranks), machine, Work(sequences))[0]
    assert best.candidate.dp == ranks


def test_a_cache_too_small_for_a_batch_makes_room_by_more_ranks_per_replica():
    """Each rank has 16 GiB and 100 MiB: alone it holds the weights and a cache of one sequence."""
    machine = replace(FAST, exchanges=((2, 16384, 1e-5), (8, 16384, 4e-5)))
    found = [even(tp, 8, WEIGHTS + (100 << 20) - WEIGHTS // tp) for tp in (1, 2, 4, 8)]
    rated = cost.rate(found, machine, Work())
    assert rated[0].candidate.tp > 1 and cost.batch_of(found[0], Work()) == 1 and rated[-1].candidate.tp == 1
    assert cost.batch_of(found[0], Work(prompt=1000)) == 0, "not even one sequence"


def test_exchanges_are_interpolated():
    machine = Machine(1, 1, ((2, 1000, 1.0), (2, 3000, 2.0), (6, 1000, 5.0), (6, 3000, 4.0)))
    assert machine.exchange(1, 9999) == 0
    assert [machine.exchange(2, n) for n in (0, 1000, 2000, 5000)] == [1, 1, 1.5, 3]
    assert [machine.exchange(6, n) for n in (0, 9000)] == [5, 5], "a larger message never costs less"
    assert machine.exchange(4, 1000) == 3 and machine.exchange(50, 0) == 5
    assert machine.exchange(3, 3000) == pytest.approx(2.75)


def test_few_prompts_leave_replicas_idle():
    idle, busy = (cost.tokens_per_second(even(1, 8), FAST, Work(n)) for n in (1, 8))
    assert busy == pytest.approx(8 * idle)


@given(st.integers(1, 600), st.integers(1, 16), st.integers(1, 16))
def test_the_sizes_tried_are_few_and_have_all_divisors(ranks, n_kv_heads, group):
    tried = cost.sizes_to_try(ranks, n_kv_heads * group, n_kv_heads)
    assert tried == sorted(set(tried)) and tried[0] == 1 and tried[-1] == ranks
    assert {tp for tp in range(1, ranks + 1) if ranks % tp == 0} <= set(tried)
    assert len(tried) <= 4 * ranks ** 0.5 + 2


def test_sizes_with_even_heads_are_tried():
    """Seven ranks: one replica of seven, or of six with a head each."""
    assert cost.sizes_to_try(7, 6, 2) == [1, 2, 3, 6, 7]


@given(st.lists(st.integers(1, 64), unique=True))
def test_the_sizes_measured_are_the_ends_and_some_between(sizes):
    measured = cost.sizes_to_measure([even(tp, 64) for tp in sizes])
    several = sorted(tp for tp in sizes if tp > 1)
    assert len(measured) == min(4, len(several)) and set(measured) <= set(several)
    assert not several or (measured[0], measured[-1]) == (several[0], several[-1])


def test_a_choice_is_plain_json_and_reads_back():
    choice = LayoutChoice(Layout(8, 4, 0), "auto", {"read": 1e10, "exchanges": [[2, 4096, 1e-6]]},
                          (("4x8", 412.3), ("8x4", 371.0), ("32x1", None), ("2x16", 99.96)))
    written = json.loads(json.dumps(choice.to_dict()))
    assert LayoutChoice.from_dict({**written, "rows": 3}) == choice
    assert (written["tp"], written["dp"], written["idle"]) == (8, 4, 0)
    assert choice.line() == ("layout: 4 replica(s) x 8 rank(s) (auto): 412 tokens/s expected; 8x4 371, 2x16 100, "
                             "32x1 does not fit")
    assert LayoutChoice(Layout(2, 2, 1), "--tp 2").line() == (
        "layout: 2 replica(s) x 2 rank(s), the last 1 rank(s) stay idle (--tp 2)")
