"""Sampling on split logits against one plain loop over the whole row."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm import kernels
from mpillm.engine.request import Sampling
from mpillm.engine.sampling import (
    CONTINUE,
    GREEDY,
    NONE_ALLOWED,
    NOT_FINITE,
    WIDEN,
    Merged,
    Row,
    Sampler,
    apply_processors,
)


class _Alone:
    """An exchange of one rank."""

    is_root = True

    def gather(self, array):
        return [array]

    def bcast(self, array):
        pass


def decide_split(logits, row, borders):
    """The decision that ranks with the given vocabulary borders come to, without MPI."""
    samplers = [Sampler(_Alone(), start, max(np.diff(borders))) for start in borders[:-1]]
    slices = [np.ascontiguousarray(logits[None, a:b]) for a, b in zip(borders, borders[1:], strict=False)]
    count, rounds = row.candidates(), 0
    while True:
        messages = [s._message(x, [row], count, row.alternatives)[0] for s, x in zip(samplers, slices, strict=True)]
        decision = Merged(np.array(messages)[:, None], count, row.alternatives).decision(row, 0)
        rounds += 1
        assert rounds < 12, "widening does not end"
        if decision.flag != WIDEN:
            return decision, rounds
        count *= 8


def plain_choice(logits, row):
    """The slow twin: sort the whole row, cut, add noise."""
    s = row.sampling
    values = logits.astype(np.float64)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    order = [i for i in order if values[i] > -np.inf]
    if not order:
        return None
    if s.temperature < GREEDY:
        return order[0]
    top = values[order[0]]
    weight = {i: math.exp((values[i] - top) / s.temperature) for i in order}
    if s.min_p > 0:
        order = [i for i in order if (values[i] - top) / s.temperature >= math.log(s.min_p)]
    if s.top_k > 0:
        order = order[:s.top_k]
    if s.top_p < 1:
        whole, mass, kept = sum(weight[i] for i in order), 0.0, []
        for i in order:
            kept.append(i)
            mass += weight[i]
            if mass >= s.top_p * whole:
                break
        order = kept
    noise = kernels.gumbel_noise(row.seed, row.position, np.array(order, np.int64))
    scores = [values[i] / s.temperature + n for i, n in zip(order, noise, strict=True)]
    return order[int(np.argmax(scores))]


def make_row(sampling, seed=1, position=5, **more):
    return Row(sampling, position, seed, np.array([1, 2, 3], np.int32), [], True, **more)


BORDERS = ([0, 700], [0, 16, 700], [0, 0, 350, 350, 700], [0, 100, 200, 300, 400, 500, 600, 700])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), spread=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
       temperature=st.sampled_from([0.0, 1e-45, 1e-4, 0.5, 1.0, 3.0]),
       top_p=st.sampled_from([0.0, 1e-9, 0.3, 0.9, 0.9999, 1.0]),
       top_k=st.sampled_from([0, 1, 5, 200, 10**9]), min_p=st.sampled_from([0.0, 0.05, 1.0]))
def test_every_split_chooses_the_plain_choice(seed, spread, temperature, top_p, top_k, min_p):
    rng = np.random.default_rng(seed)
    logits = np.round(rng.standard_normal(700) * spread, 2).astype(np.float32)   # rounded: with ties
    row = make_row(Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p), seed=seed)
    expected = plain_choice(logits, row)
    for borders in BORDERS:
        decision, _ = decide_split(logits, row, borders)
        assert decision.flag == CONTINUE
        assert decision.token == expected, borders
        true = logits.astype(np.float64)
        true = true[expected] - np.log(np.exp(true - true.max()).sum()) - true.max()
        assert decision.logprob == pytest.approx(true, abs=1e-5)


def test_flat_logits_make_top_p_widen_until_the_mass_is_reached():
    logits = np.zeros(700, np.float32)
    row = make_row(Sampling(temperature=1.0, top_p=0.95))
    decision, rounds = decide_split(logits, row, [0, 350, 700])
    assert rounds > 1 and decision.token == plain_choice(logits, row)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), at=st.integers(1, 899))
def test_a_row_is_cut_alike_whatever_its_neighbours_ask_for(seed, at):
    """top_p on the very border of a cumulative mass: 64 candidates or all of them keep the same tokens."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(900).astype(np.float32)
    exact = np.sort(np.exp(logits.astype(np.float64) - logits.max()))[::-1]
    row = make_row(Sampling(temperature=1.0, top_p=float(exact[:at].sum() / exact.sum())), seed=seed)
    found = []
    for count in (64, 256, 450):
        while True:
            halves = [(first, logits[None, first:first + 450].copy()) for first in (0, 450)]
            messages = [Sampler(_Alone(), first, 450)._message(half, [row], count, 0)[0] for first, half in halves]
            decision = Merged(np.array(messages)[:, None], count, 0).decision(row, 0)
            if decision.flag != WIDEN:
                break
            count = min(8 * count, 450)
        found.append(decision.token)
    assert len(set(found)) == 1


def test_sampling_follows_the_distribution():
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    counts = np.zeros(4)
    for position in range(4000):
        row = make_row(Sampling(temperature=1.0), seed=3, position=position)
        counts[decide_split(logits, row, [0, 2, 4])[0].token] += 1
    # Within five standard deviations of a binomial.
    expected = 4000 * np.array([0.5, 0.25, 0.125, 0.125])
    assert (abs(counts - expected) < 5 * np.sqrt(expected * (1 - expected / 4000))).all(), counts


def test_alternatives_are_the_best_raw_tokens_with_their_logprobs():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(700).astype(np.float32)
    row = make_row(Sampling(temperature=0.0, logit_bias=((3, 100.0),), logprobs=4), alternatives=4)
    decision, _ = decide_split(logits, row, [0, 300, 700])
    assert decision.token == 3
    best = np.argsort(-logits, kind="stable")[:4]
    assert [token for token, _ in decision.top] == list(best)
    exact = logits.astype(np.float64)
    log_sum = np.log(np.exp(exact).sum())
    np.testing.assert_allclose([p for _, p in decision.top], exact[best] - log_sum, atol=1e-5)
    assert decision.logprob == pytest.approx(exact[3] - log_sum, abs=1e-5)


def test_a_target_is_scored_wherever_it_lies():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal(700).astype(np.float32)
    exact = logits.astype(np.float64)
    for target in (0, 15, 16, 349, 350, 699):
        row = make_row(Sampling(prompt_logprobs=0), target=target)
        row.choose = False
        decision, _ = decide_split(logits, row, [0, 16, 350, 700])
        assert decision.logprob == pytest.approx(exact[target] - np.log(np.exp(exact).sum()), abs=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_fail_the_row(bad):
    logits = np.zeros(700, np.float32)
    logits[600] = bad
    decision, _ = decide_split(logits, make_row(Sampling(temperature=0.0)), [0, 300, 700])
    assert decision.flag == NOT_FINITE


def test_nothing_allowed_fails_the_row():
    row = make_row(Sampling(temperature=1.0, allowed_token_ids=(7,)), banned=(7,))
    assert decide_split(np.zeros(700, np.float32), row, [0, 300, 700])[0].flag == NONE_ALLOWED


def test_processors_on_slices_equal_those_on_the_row():
    rng = np.random.default_rng(2)
    logits = rng.standard_normal(700).astype(np.float32)
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.3,
                        logit_bias=((0, 2.0), (699, -3.0)), allowed_token_ids=tuple(range(0, 700, 3)) + (1, 2))
    row = Row(sampling, 9, 1, np.array([1, 2, 600], np.int32), [2, 2, 5, 699], True, banned=(3, 300))
    whole = logits.copy()
    apply_processors(whole, row, 0)
    for borders in BORDERS:
        parts = [logits[a:b].copy() for a, b in zip(borders, borders[1:], strict=False)]
        for part, first in zip(parts, borders, strict=False):
            apply_processors(part, row, first)
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    # By hand: token 2 was in the prompt and twice in the text.
    value = logits[2] / np.float32(1.3) if logits[2] > 0 else logits[2] * np.float32(1.3)
    assert whole[2] == pytest.approx(value - 2 * 0.25 - 0.5, rel=1e-6)
    assert whole[3] == -np.inf and whole[300] == -np.inf and whole[4] == -np.inf


@given(st.lists(st.lists(st.sampled_from([-np.inf, -3.0, -1e-45, -0.0, 0.0, 1e-45, 2.5, np.nan, np.inf]),
                         min_size=150, max_size=150), min_size=1, max_size=3), st.integers(1, 150))
def test_one_pass_finds_what_the_sums_and_the_best_of_one_find(rows, n):
    logits = np.ascontiguousarray(np.array(rows, np.float32)[:, :n])
    maxima, sums, places = kernels.best_parts(logits)
    expected_maxima, expected_sums = kernels.log_sum_exp_parts(logits)
    np.testing.assert_array_equal(maxima, expected_maxima)
    np.testing.assert_array_equal(sums, expected_sums)
    values, ids = kernels.top_k(logits, 1)
    finite = np.isfinite(sums)          # the others fail their row
    np.testing.assert_array_equal(places[finite], ids[finite, 0])
    np.testing.assert_array_equal(maxima[finite], values[finite, 0])
