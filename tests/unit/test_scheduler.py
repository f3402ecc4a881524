"""The ledger and the scheduler: nothing is held twice, everything ends, whatever the lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm.engine.blocks import BlockLedger, blocks_for
from mpillm.engine.request import Request, Sampling
from mpillm.engine.scheduler import Limits, Scheduler, Sequence


def make(prompt_len, max_tokens, index=0):
    request = Request(1, index, "a", "completion", True, ((1,) * prompt_len,), Sampling(max_tokens=max_tokens), "m")
    return Sequence(request, 0, 0, np.arange(prompt_len, dtype=np.int32), max_tokens, 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60), st.integers(0, 20))
def test_ledger_hands_out_each_block_once(moves, n_blocks):
    ledger, held = BlockLedger(n_blocks), []
    for take, count in moves:
        if take and count <= ledger.n_free:
            held.append(ledger.take(count))
        elif not take and held:
            ledger.give_back(held.pop(count % len(held)))
        flat = [block for blocks in held for block in blocks]
        assert len(set(flat)) == len(flat) and set(flat) <= set(range(n_blocks))
        assert ledger.n_free == n_blocks - len(flat)


def test_ledger_refuses_what_nobody_holds():
    ledger = BlockLedger(3)
    blocks = ledger.take(2)
    ledger.give_back(blocks)
    with pytest.raises(AssertionError, match="nobody holds"):
        ledger.give_back(blocks)
    with pytest.raises(AssertionError, match="asked"):
        ledger.take(4)


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12), st.integers(0, 12)), max_size=12),
       max_batch=st.integers(1, 5), chunk=st.integers(1, 64), block=st.integers(1, 16), n_blocks=st.integers(1, 12))
def test_every_sequence_runs_to_its_end_and_is_computed_once(lengths, max_batch, chunk, block, n_blocks):
    sequences = [make(p, m, i) for i, (p, m, _) in enumerate(lengths)]
    early = {id(s): min(e, m) for s, (_, m, e) in zip(sequences, lengths, strict=True)}
    scheduler = Scheduler(sequences, BlockLedger(n_blocks), Limits(max_batch, chunk, block))
    refused = {id(s) for s, need in scheduler.refused() if need > n_blocks}
    scheduler.drop({s.request.index for s in sequences if id(s) in refused})
    seen = {id(s): [] for s in sequences}
    for _ in range(5000):
        parts = scheduler.plan()
        if not parts:
            break
        assert len(parts) <= max_batch
        assert sum(p.count for p in parts if not p.sequence.generated) <= chunk
        in_use = [b for s in scheduler.running for b in s.blocks]
        assert len(set(in_use)) == len(in_use)
        for part in parts:
            seen[id(part.sequence)] += range(part.start, part.start + part.count)
            assert blocks_for(part.start + part.count, block) <= len(part.sequence.blocks)
            if part.completes:
                if part.sequence.max_tokens:
                    part.sequence.generated.append(9)
                done = len(part.sequence.generated) >= max(early[id(part.sequence)], 1)
                part.sequence.finished = done or not part.sequence.max_tokens
        scheduler.done(parts)
    else:
        pytest.fail("the scheduler does not end")
    assert scheduler.ledger.n_free == n_blocks and not scheduler.running and not scheduler.waiting
    for sequence in sequences:
        if id(sequence) in refused:
            assert not seen[id(sequence)]
        else:
            assert sequence.finished and seen[id(sequence)] == list(range(sequence.computed))
            assert sequence.computed == len(sequence.prompt) + max(len(sequence.generated) - 1, 0)


def test_tokens_cross_the_end_of_the_prompt():
    sequence = make(3, 5)
    sequence.generated += [7, 8]
    assert sequence.tokens(1, 5).tolist() == [1, 2, 7, 8]
    assert sequence.tokens(4, 5).tolist() == [8]
    assert sequence.tokens(0, 2).dtype == np.int64
