"""Routing against its slow twin: scores, corrections, groups, ties, shared experts, and slots of what is held here."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm.jit import routing


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def best(keys: np.ndarray, count: int) -> np.ndarray:
    """The largest, of equal ones the lower, ascending."""
    return np.sort(np.argsort(-keys, kind="stable")[:count])


def slow(logits: np.ndarray, r: dict) -> tuple[np.ndarray, np.ndarray]:
    """(chosen, weights) of one row in float64, as DeepSeek's papers have it."""
    powers = np.exp(logits.astype(np.float64) - logits.max())
    scores = sigmoid(logits) if r["sigmoid"] else powers / powers.sum()
    keys = scores + r["correction"] if r["sigmoid"] else logits.astype(np.float64)
    if r["groups"]:
        by_group = keys.reshape(r["groups"], -1)
        goodness = np.sort(by_group, axis=1)[:, -2:].sum(axis=1) if r["both"] else by_group.max(axis=1)
        kept = np.zeros(r["groups"], bool)
        kept[best(goodness, r["kept"])] = True
        keys = np.where(np.repeat(kept, by_group.shape[1]), keys, -np.inf)
    chosen = best(keys, r["count"])
    weights = scores[chosen]
    if r["normed"]:
        weights = weights / (weights.sum() + (1e-20 if r["sigmoid"] else 0))
    return (np.concatenate([chosen, len(logits) + np.arange(r["shared"])]),
            np.concatenate([weights * r["scale"], np.ones(r["shared"])]))


def route(logits: np.ndarray, r: dict) -> tuple[np.ndarray, np.ndarray]:
    rows, experts = logits.shape
    count = r["count"] + r["shared"]
    chosen, weights = np.full(rows * count, -1, np.int32), np.zeros(rows * count, np.float32)
    keys = np.zeros((rows, experts + r["groups"]), np.float32)
    arguments = (rows, logits, experts, r["count"], r["shared"], r["sigmoid"], r["correction"], r["groups"], r["kept"],
                 r["both"], r["normed"], r["scale"], keys, chosen, weights)
    routing.route_operation()(*arguments)
    return chosen.reshape(rows, count), weights.reshape(rows, count)


@st.composite
def routings(draw) -> tuple[np.ndarray, dict]:
    """Logits with clear leads, and how to route by them."""
    groups, size = draw(st.sampled_from([(0, 7), (1, 6), (2, 3), (4, 2), (3, 4), (8, 4)]))
    experts = max(1, groups) * size
    kept = draw(st.integers(1, groups)) if groups else 0
    most = kept * size if groups else experts
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    logits = np.stack([rng.permutation(experts) for _ in range(5)]).astype(np.float32) * draw(
        st.sampled_from([0.25, 1.0, 9.0])) - 3
    sigmoids = draw(st.booleans()) and logits.max() < 20
    correction = rng.permutation(experts).astype(np.float32) * np.float32(0.013 if sigmoids else 0)
    return logits, {"sigmoid": sigmoids, "correction": correction, "groups": groups, "kept": kept,
                    "both": draw(st.booleans()), "normed": draw(st.booleans()), "count": draw(st.integers(1, most)),
                    "scale": draw(st.sampled_from([1.0, 2.5, 16.0])), "shared": draw(st.integers(0, 2))}


@settings(max_examples=150, deadline=None)
@given(routings())
def test_choices_and_weights_are_the_slow_twins(case):
    logits, r = case
    chosen, weights = route(logits, r)
    for row, found, weighed in zip(logits, chosen, weights, strict=True):
        wanted, by = slow(row, r)
        assert found.tolist() == wanted.tolist(), r
        np.testing.assert_allclose(weighed, by, rtol=3e-6, atol=1e-38)     # subnormal ones have fewer digits


def plain(**changes) -> dict:
    return {"sigmoid": False, "correction": np.zeros(8, np.float32), "groups": 0, "kept": 0, "both": False,
            "normed": True, "count": 2, "scale": 1.0, "shared": 0} | changes


@pytest.mark.parametrize("sigmoid", [False, True])
def test_of_equal_scores_the_lower_expert_is_chosen_and_of_equal_groups_the_lower(sigmoid):
    logits = np.zeros((1, 8), np.float32)
    logits[0, 0] = -1
    chosen, weights = route(logits, plain(sigmoid=sigmoid))
    assert chosen.tolist() == [[1, 2]] and weights.tolist() == [[0.5, 0.5]]
    logits[0, 1] = -1        # of four groups of two the first is worse
    chosen, _ = route(logits, plain(sigmoid=sigmoid, groups=4, kept=2, both=True, count=3))
    assert chosen.tolist() == [[2, 3, 4]]


def test_a_correction_chooses_but_does_not_weigh():
    correction = np.zeros(8, np.float32)
    correction[5] = 0.9
    chosen, weights = route(np.array([[0, 1, 2, 3, 0, -2, 0, 0]], np.float32),
                            plain(sigmoid=True, correction=correction, normed=False, scale=2.0))
    assert chosen.tolist() == [[3, 5]]
    np.testing.assert_allclose(weights[0], 2 * sigmoid(np.array([3.0, -2.0])), rtol=1e-6)


def test_a_group_by_its_best_expert_is_another_than_by_its_two_best():
    logits = np.array([[9, 0, 0, 0, 8, 8, 0, 0]], np.float32)
    by_one, by_two = (route(logits, plain(groups=2, kept=1, both=both))[0].tolist() for both in (False, True))
    assert by_one == [[0, 1]] and by_two == [[4, 5]]


def test_sigmoids_of_far_logits_are_numbers():
    logits = np.array([[-1e30, -200, -90, 0, 90, 200, 1e30, -5]], np.float32)
    chosen, weights = route(logits, plain(sigmoid=True, count=8, normed=False))
    assert chosen.tolist() == [list(range(8))]
    np.testing.assert_allclose(weights[0], [0, 0, sigmoid(np.array(-90.0)), 0.5, 1, 1, 1, sigmoid(np.array(-5.0))],
                               rtol=2e-6, atol=1e-38)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 2), st.data(), st.integers(0, 99))
def test_slots_are_of_the_experts_held_here_by_expert_and_row(rows, experts, shared, data, seed):
    count = data.draw(st.integers(1, experts))
    first = data.draw(st.integers(0, experts))
    held = data.draw(st.integers(0, experts - first))
    rng = np.random.default_rng(seed)
    own = np.stack([np.sort(rng.permutation(experts)[:count]) for _ in range(rows)])
    chosen = np.concatenate([own, np.tile(experts + np.arange(shared), (rows, 1))], axis=1).astype(np.int32)
    total, here = count + shared, held + shared
    starts, slots = np.zeros(here + 1, np.int64), np.full(rows * total, -7, np.int32)
    sources = np.full(rows * total, -7, np.int32)
    routing.group_operation()(rows, experts, shared, first, held, total, chosen.reshape(-1), starts, slots, sources)
    wanted = [(number, row) for number, e in enumerate([*range(first, first + held), *range(experts, experts + shared)])
              for row in range(rows) if e in chosen[row]]
    assert sources[:starts[-1]].tolist() == [row for _, row in wanted]
    assert starts.tolist() == [sum(number < e for number, _ in wanted) for e in range(here + 1)]
    for row in range(rows):
        for j, e in enumerate(chosen[row]):
            place = held + e - experts if e >= experts else e - first if first <= e < first + held else -1
            slot = slots[row * total + j]
            assert slot == -1 if place < 0 else wanted[slot] == (place, row)
