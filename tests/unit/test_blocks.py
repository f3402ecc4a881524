"""The ledger of blocks against an obvious model, and the keys by which blocks are found."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpillm.engine.blocks import BlockLedger, blocks_for, chain, first_place, prompt_keys, root_key, turns_of

MOVES = st.lists(st.tuples(st.sampled_from(["take", "publish", "share", "give", "forget"]), st.integers(0, 7),
                           st.integers(0, 7)), min_size=20, max_size=80)


class Twin:
    """What the ledger should know: holders and key of each block, and when it became idle."""

    def __init__(self, each, width=1):
        self.each, n_blocks = each, each * width
        self.holders = [0] * n_blocks
        self.keys = [None] * n_blocks
        self.idle_since = [None] * n_blocks
        self.clock = 0

    def takeable(self, place=0):
        """Blocks of a place without a holder, in the order in which they are taken."""
        loose = [b for b, n in enumerate(self.holders) if not n and b // self.each == place]
        return sorted(loose, key=lambda b: (self.keys[b] is not None, self.idle_since[b] or 0, b))

    def take(self, count, place=0):
        taken = self.takeable(place)[:count]
        for block in taken:
            self.holders[block], self.keys[block] = 1, None
        return taken

    def find(self, keys):
        found = []
        for key in keys:
            if key not in self.keys:
                break
            found.append(self.keys.index(key))
        return found

    def give_back(self, blocks):
        for block in reversed(blocks):
            self.holders[block] -= 1
            self.clock += 1
            if not self.holders[block]:
                self.idle_since[block] = self.clock if self.keys[block] is not None else None


def key_of(number):
    return bytes([number % 3])


@settings(max_examples=150, deadline=None)
@given(moves=MOVES, each=st.integers(0, 12), width=st.integers(1, 4))
def test_the_ledger_is_its_obvious_twin(moves, each, width):
    ledger, twin, held, n_blocks = BlockLedger(each, width), Twin(each, width), [], each * width
    for move, at, number in moves:
        place = at % width
        if move == "take" and number <= ledger.free_at(place):
            taken = ledger.take(number, place)
            assert taken == twin.take(number, place)
            held.append(taken)
        elif move == "share":
            keys = [key_of(number + i) for i in range(at)]
            found = ledger.find(keys, 3)
            assert found == twin.find(keys[:3])
            for place in range(width):
                assert ledger.n_idle(found, place) == sum(not twin.holders[b] for b in found if b // each == place)
            ledger.share(found)
            for block in found:
                twin.holders[block] += 1
            held.append(found)
        elif held:
            blocks = held[at % len(held)]
            if move == "give":
                del held[at % len(held)]
                ledger.give_back(blocks)
                twin.give_back(blocks)
            elif move == "forget":
                ledger.forget(blocks)
                for block in blocks:
                    twin.keys[block] = None if twin.holders[block] == 1 else twin.keys[block]
            elif move == "publish" and blocks and twin.keys[blocks[0]] is None:
                fresh = key_of(number) not in twin.keys
                assert ledger.publish(blocks[0], key_of(number)) is fresh
                if fresh:
                    twin.keys[blocks[0]] = key_of(number)
        assert [ledger.holders(b) for b in range(n_blocks)] == twin.holders
        assert twin.holders == [sum(blocks.count(b) for blocks in held) for b in range(n_blocks)]
        for place in range(width):
            assert ledger.free_at(place) == len(twin.takeable(place))
        for number in range(3):
            assert ledger.find([key_of(number)], 1) == twin.find([key_of(number)])
    for blocks in held:
        ledger.give_back(blocks)
        twin.give_back(blocks)
    assert ledger.n_free == n_blocks
    for place in range(width):
        taken = ledger.take(each, place)
        assert taken == twin.take(each, place), "all can be taken, free ones first"
        assert [ledger.at(b, place) for b in taken] == [b - place * each for b in taken]
        assert all(ledger.at(b, other) == -1 for b in taken for other in range(width) if other != place)


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    ledger = BlockLedger(4)
    blocks = ledger.take(3)
    keys = [key_of(block) for block in blocks]
    for block, key in zip(blocks, keys, strict=True):
        ledger.publish(block, key)
    ledger.give_back(blocks)
    assert ledger.take(1) == [3], "the free one first"
    assert ledger.take(1) == [2] and ledger.find(keys, 3) == [0, 1]
    ledger.share([0])
    assert ledger.take(1) == [1] and ledger.find(keys, 3) == [0]
    assert ledger.n_free == 0


def test_a_wrong_call_is_noticed():
    ledger = BlockLedger(3)
    blocks = ledger.take(2)
    with pytest.raises(AssertionError, match="shared but not published"):
        ledger.share(blocks)
    ledger.publish(blocks[0], b"a")
    with pytest.raises(AssertionError, match="published twice"):
        ledger.publish(blocks[0], b"b")
    ledger.give_back(blocks)
    with pytest.raises(AssertionError, match="nobody holds"):
        ledger.give_back(blocks)
    with pytest.raises(AssertionError, match="nobody holds"):
        ledger.publish(blocks[1], b"b")
    with pytest.raises(AssertionError, match="asked"):
        ledger.take(4)


def test_a_key_stands_for_its_block_all_before_it_and_the_salt():
    ids = np.arange(1, 13, dtype=np.int32)
    keys = prompt_keys(ids, 4, b"")
    assert len(keys) == 3 and len(set(keys)) == 3
    assert keys == prompt_keys(np.append(ids, 99), 4, b""), "a block that is not full has no key"
    assert prompt_keys(ids[:3], 4, b"") == []
    for at in range(12):
        other = ids.copy()
        other[at] += 1000
        same = [a == b for a, b in zip(keys, prompt_keys(other, 4, b""), strict=True)]
        assert same == [block < at // 4 for block in range(3)]
    assert not set(keys) & set(prompt_keys(ids, 4, b"long"))
    assert chain(keys[1], ids[8:12].astype(np.int64)) == keys[2], "whatever the integer type"
    assert chain(root_key(b""), ids[:4]) == keys[0]


def test_keys_are_the_same_in_every_process():
    code = ("import numpy as np; from mpillm.engine.blocks import prompt_keys as k; "
            "print(k(np.arange(8, dtype=np.int32), 4, b's')[1].hex())")
    found = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                            env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in "12"}
    assert found == {prompt_keys(np.arange(8, dtype=np.int32), 4, b"s")[1].hex() + "\n"}


@given(st.integers(0, 1000), st.integers(1, 70))
def test_blocks_hold_their_positions(positions, block):
    count = blocks_for(positions, block)
    assert count * block >= positions > (count - 1) * block or count == positions == 0


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 30), st.integers(0, 30), st.integers(0, 5))
def test_blocks_go_round_the_places(width, first, start, more, place):
    first, place = first % width, place % width
    expected = sum((first + block) % width == place for block in range(start, start + more))
    assert turns_of(place, first, start, start + more, width) == expected
    ledger = BlockLedger(40, width)
    taken = ledger.take_turns(first, start, start + more)
    assert [ledger.place(block) for block in taken] == [(first + at) % width for at in range(start, start + more)]


def test_the_first_place_follows_from_the_first_block():
    ids = np.random.default_rng(1).integers(0, 1000, (600, 8)).astype(np.int32)
    for width in (2, 3, 7):
        found = [first_place(prompt, 0, 4, width) for prompt in ids]
        assert min(np.bincount(found, minlength=width)) > 0.7 * 600 / width, "they pile up"
        assert found == [first_place(np.append(prompt[:4], 99).astype(np.int64), 5, 4, width) for prompt in ids], \
            "who could share the first block has it elsewhere"
    assert sorted(first_place(ids[0, :3], sample, 4, 5) for sample in range(5)) == list(range(5))
    assert first_place(ids[0], 3, 4, 1) == 0
