"""Who decides the layout: options, a recorded choice, the only one that fits, or what was measured."""

from __future__ import annotations

import dataclasses

import pytest
from made_models import random_tensors, tiny, write_folder

from mpillm.config import RunConfig
from mpillm.engine import cost, layout, probe, setup
from mpillm.engine.order import Sketch
from mpillm.errors import ResourceError, UsageError
from mpillm.models import registry
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import Layout, partition

PLENTY = 1 << 40
SLOW_SUMS = (1e10, 1e11, [(2, 384, 1.0), (8, 384, 1.0)])
FREE_SUMS = (1e6, 1e11, [(2, 384, 0.0), (8, 384, 0.0)])


class _Rank0:
    """A job of which this is rank 0 and does all the deciding."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def agree(self, function):
        return function()


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    config = tiny()
    model, checkpoint = open_model(write_folder(tmp_path_factory.mktemp("layout") / "model", config,
                                                random_tensors(config)))
    with checkpoint:
        yield model, Weights(checkpoint, model)


@pytest.fixture
def measured(monkeypatch):
    """What a measurement will find, and how often it was made."""
    calls: list[tuple] = []

    def figures(*arguments):
        calls.append(arguments)
        return measured.found

    measured = figures
    measured.calls, measured.found = calls, SLOW_SUMS
    monkeypatch.setattr(probe, "quick_figures", figures)
    return measured


def asked(**options) -> RunConfig:
    return RunConfig("in.jsonl", **options)


def choose(opened, ranks: int, memory: int = PLENTY, given=None, work=layout.GUESS, **options) -> cost.LayoutChoice:
    return layout.choose(_Rank0(ranks), asked(**options), *opened, memory, 1, lambda: work, given)


def most(opened, tp: int) -> int:
    """Bytes that the fullest of ``tp`` ranks needs, the cache left out."""
    sizes = registry.sizes(*opened, "auto")
    split = partition(sizes, tp)
    beside = setup.LOADING_BYTES + setup.RUNTIME_BYTES
    return beside + max(registry.weight_bytes(*opened, split, "auto", rank) for rank in range(tp))


def test_what_was_asked_is_taken_without_measuring(opened, measured):
    assert choose(opened, 5, tp=2) == cost.LayoutChoice(Layout(2, 2, 1), "--tp 2")
    assert choose(opened, 9, layout="2x3") == cost.LayoutChoice(Layout(3, 2, 3), "--layout 2x3")
    assert choose(opened, 1) == cost.LayoutChoice(Layout(1, 1, 0), "one rank")
    assert not measured.calls
    with pytest.raises(UsageError, match="--layout 4x2 needs 8 ranks, the job has 7"):
        choose(opened, 7, layout="4x2")
    with pytest.raises(UsageError, match="tp 9 does not go into 8 ranks"):
        choose(opened, 8, tp=9)


def test_what_is_measured_decides(opened, measured):
    many = choose(opened, 8)
    assert (many.layout, many.chosen_by) == (Layout(1, 8, 0), "auto")
    measured.found = FREE_SUMS
    one = choose(opened, 8, work=cost.Work(1, 10, 100))
    assert one.layout.dp == 1 and len(measured.calls) == 2
    assert one.measured["read"] == 1e6 and one.measured["work"]["sequences"] == 1
    assert [name for name, _ in one.expected][0] == f"1x{one.layout.tp}"
    assert {"8x1", "4x2", "2x4", "1x8"} <= {name for name, _ in one.expected}
    for _, threads, kind, sizes, row_bytes, mode, wire in measured.calls:
        assert (threads, kind, row_bytes, mode, wire) == (1, "f32", 4 * 96, "shm", "f32") and sizes[-1] == 8


def test_a_recorded_choice_is_taken_over_at_the_same_rank_count(opened, measured):
    recorded = cost.LayoutChoice(Layout(2, 4, 0), "auto", {"read": 1.0}, (("4x2", 3.0),))
    again = choose(opened, 8, given=recorded)
    assert (again.layout, again.measured) == (recorded.layout, recorded.measured) and not measured.calls
    assert again.line() == "layout: 4 replica(s) x 2 rank(s) (the interrupted run)"
    assert choose(opened, 6, given=recorded).chosen_by == "auto"
    assert choose(opened, 8, given=recorded, tp=1).chosen_by == "--tp 1", "an option wins"


def test_memory_for_one_layout_alone_needs_no_measuring(opened, measured):
    fullest = {tp: most(opened, tp) for tp in (1, 2, 4)}
    assert fullest[4] < fullest[2] < fullest[1]
    assert choose(opened, 4, fullest[4]) == cost.LayoutChoice(Layout(4, 1, 0), "what holds the weights")
    small = {"prefill_chunk": 1, "max_batch": 1}
    four, two = (fullest[tp] + setup.activation_bytes(
        asked(**small), opened[0], partition(registry.sizes(*opened, "auto"), tp).shares[-1]) for tp in (4, 2))
    memory = four + (20 << 10)
    assert memory < two, "else the memory tells nothing"
    only = choose(opened, 4, memory, work=cost.Work(None, 10, 10), **small)
    assert only == cost.LayoutChoice(Layout(4, 1, 0), "the only one that fits")
    with pytest.raises(ResourceError, match="fits the memory of no split over 4 ranks"):
        choose(opened, 4, fullest[4] - 1)
    assert not measured.calls


def test_a_layout_that_does_not_fit_is_named_and_not_chosen(opened, measured):
    """Alone a rank lacks a byte for the weights and what a step takes; two have that, and a cache."""
    model, weights = opened
    run = asked(prefill_chunk=1, max_batch=1)
    share = partition(registry.sizes(model, weights, "auto"), 1).shares[0]
    memory = most(opened, 1) + setup.activation_bytes(run, model, share) - 1
    choice = choose(opened, 8, memory, prefill_chunk=1, max_batch=1, work=cost.Work(None, 100, 20, 1, 1))
    assert choice.layout.tp == 2 and ("8x1", None) in choice.expected
    assert choice.line().endswith("8x1 does not fit")


def test_the_batch_is_what_its_lines_ask():
    sample = [Sketch("", prompt=20, new=50, samples=2), Sketch("", prompt=100, new=1000)]
    found = layout.work_of(sample, 20, asked(max_batch=7, prefill_chunk=9))
    assert found == cost.Work(30, (2 * 20 + 100) / 3, (2 * 50 + 256) / 3, 7, 9)
    assert layout.work_of([], 0, asked()) == dataclasses.replace(layout.GUESS, max_batch=32, chunk=512)
