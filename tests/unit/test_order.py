"""The order of lines: nothing is lost, common beginnings stand together, long lines come early."""

import json

from hypothesis import given
from hypothesis import strategies as st

from mpillm.engine.order import SHARED, Sketch, arrange, sketch

HEADS = st.sampled_from(["", "a", "b" * SHARED, "b" * SHARED + "x", "c" * (SHARED + 5), "c" * SHARED + "y"])


def line(**body):
    return json.dumps(body).encode()


@given(st.lists(st.builds(Sketch, HEADS, new=st.integers(0, 50)), max_size=30))
def test_every_line_once_and_groups_stay_together(sketches):
    order = arrange(sketches)
    assert sorted(order) == list(range(len(sketches)))
    groups = [sketches[i].head[:SHARED] for i in order if len(sketches[i].head) >= SHARED]
    starts = [head for at, head in enumerate(groups) if at == 0 or groups[at - 1] != head]
    assert len(starts) == len(set(starts)), "a group was torn"


@given(st.lists(st.integers(0, 50), max_size=30))
def test_lines_of_their_own_run_the_longest_first(costs):
    order = arrange([Sketch(str(i), new=cost) for i, cost in enumerate(costs)])
    assert [costs[i] for i in order] == sorted(costs, reverse=True)


def test_a_group_stands_where_its_longest_line_does():
    shared = "s" * SHARED
    sketches = [Sketch(shared + "1", new=1), Sketch("alone", new=5), Sketch(shared + "2", new=9)]
    assert arrange(sketches) == [2, 0, 1]


def test_cost_counts_what_is_generated_and_the_default():
    assert sketch(line(prompt="x", max_tokens=7), 100).cost < 8 < sketch(line(prompt="x"), 100).cost
    assert sketch(line(prompt="x", max_tokens=7, n=3), 100).cost > 20
    assert sketch(line(body={"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}), 1).head == "hello"
    assert sketch(line(prompt_token_ids=[1, 2, 3]), 0).head == "1,2,3"


def test_what_is_no_request_costs_nothing():
    for raw in (b"", b"{", b"[1]", b"5", b'{"body":5}', b'{"prompt":5,"max_tokens":"x"}', b"\xff", b"[" * 30000):
        assert sketch(raw, 0).head == ""
    assert sketch(line(prompt="x", max_tokens=-5), 3).cost > 2
