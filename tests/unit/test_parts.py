"""Parts of runs that were interrupted and resumed: what counts as finished, and what the fold makes of them."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_parts import HEADER, SLICES, VOCAB, add_logits, logit, logits_keys, make_request, names, rank_row, write_parts

from mpillm.engine.output import ReplicaOutput
from mpillm.engine.request import Choice, FailedLine, Request, Result, Sampling, Timing
from mpillm.errors import OutputError
from mpillm.formats.hdf5 import check_output, fold
from mpillm.formats.part_scan import choose, read_parts
from mpillm.formats.parts import RankPart, RequestsPart, finished, rank_path, requests_path
from mpillm.formats.results import Target

# Ways to split the vocabulary over the ranks of a replica
SPLITS = (((0, 50),), ((0, 16), (16, 50)), ((0, 32), (32, 48), (48, 48), (48, 50)))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


class MadeRun:
    """A run of some attempts, each killed at a point of its own; a plain account of what is whole on disk."""

    def __init__(self, folder: str, seed: int, attempts: int, total: int, kept: bool) -> None:
        self.random, self.folder, self.total, self.kept = np.random.default_rng(seed), folder, total, kept
        self.whole: dict[int, dict] = {}         # the first finished record of each request
        for attempt in range(attempts):
            # Some requests are done again although they were finished: an attempt whose folder was late to be seen
            todo = [index for index in range(total) if index not in self.whole or self.random.random() < 0.2]
            self._attempt(attempt, todo)

    def _attempt(self, attempt: int, todo: list[int]) -> None:
        split, dp = SPLITS[self.random.integers(len(SPLITS))], int(self.random.integers(1, 3))
        done = []
        for replica in range(dp):
            requests = [make_request(self.random, index, 0, logits=self.kept) | dict(replica=replica, tp=len(split))
                        for index in todo[replica::dp]]
            lost = [int(self.random.integers(0, 4)) for _ in split] if self.random.random() < 0.5 else [0] * len(split)
            keys = logits_keys(requests, self.random)
            for tp_rank, (low, high) in enumerate(split):
                with RankPart(self.folder, attempt, replica * len(split) + tp_rank, replica, tp_rank, 1e9,
                              logits=(low, high, "f32") if self.kept else None) as part:
                    part.describe(rank_row(replica * len(split) + tp_rank, replica, tp_rank))
                    # What a kill takes: the last rows, as many as the rank had in memory
                    if self.kept:
                        add_logits(part, keys[:len(keys) - lost[tp_rank]], low, high)
            known = min(len(keys) - n for n, (low, high) in zip(lost, split, strict=True) if high > low)
            rows = {tuple(key[:3]) for key in keys[:known].tolist()}
            recorded = requests[:int(self.random.integers(0, len(requests) + 1))]
            with RequestsPart(self.folder, attempt, replica, 1e9) as part:
                for request in recorded:
                    part.add(**request)
            wanted: dict[int, set] = defaultdict(set)
            for key in logits_keys(recorded, self.random).tolist():
                wanted[key[0]].add(tuple(key[:3]))
            done += [request | dict(attempt=attempt) for request in recorded
                     if not self.kept or wanted[request["index"]] <= rows]
        for request in done:
            self.whole.setdefault(request["index"], request)

    def complete(self, attempt: int) -> None:
        """The last attempt does what is missing, undisturbed."""
        requests = [make_request(self.random, index, 0, logits=self.kept) | dict(replica=0, tp=1)
                    for index in range(self.total) if index not in self.whole]
        with RankPart(self.folder, attempt, 0, 0, 0, 1e9, logits=(0, VOCAB, "f32") if self.kept else None) as part:
            if self.kept:
                add_logits(part, logits_keys(requests, self.random), 0, VOCAB)
        with RequestsPart(self.folder, attempt, 0, 1e9) as part:
            for request in requests:
                part.add(**request)
                self.whole[request["index"]] = request | dict(attempt=attempt)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(0, 8), st.booleans())
def test_any_history_ends_with_the_first_finished_record_of_each_request(base, seed, attempts, total, kept):
    folder = base / f"run{len(os.listdir(base))}"
    folder.mkdir()
    made = MadeRun(str(folder), seed, attempts, total, kept)
    done = finished(str(folder))
    assert done.indices.tolist() == sorted(made.whole) and done.indices.dtype == np.int64
    assert done.next_attempt == attempts and done.cut == []
    made.complete(done.next_attempt)

    found = read_parts(str(folder))
    target = Target(str(folder / "r.jsonl"), False)
    assert target.fill(found, choose(found)) == total
    target.commit()
    summary = fold(folder / "out.h5", str(folder), HEADER, False, discard=False, slab_bytes=300)
    requests = [made.whole[index] for index in range(total)]
    assert [json.loads(line) for line in open(folder / "r.jsonl")] == [request["result"] for request in requests]
    assert summary["requests"] == total and summary["failed"] == 0
    with h5py.File(folder / "out.h5") as file:
        table = file["requests"][:]
        for name in ("line", "attempt", "replica", "tp"):
            assert table[name].tolist() == [request[name] for request in requests], name
        choices = [choice for request in requests for choice in sorted(request["choices"], key=lambda c: c.choice)]
        assert [text.decode() for text in file["sequences"]["text"]] == [choice.text for choice in choices]
        assert file["tokens"][:].tolist() == [token for choice in choices for token in choice.token_ids]
        if kept:
            keys = [(request["index"], choice.choice, len(request["prompts"][choice.item]) - 1 + step)
                    for request in requests for choice in sorted(request["choices"], key=lambda c: c.choice)
                    for step in range(len(choice.token_ids))]
            expected = np.array([logit(*key) for key in keys], np.float32).reshape(-1, VOCAB)
            np.testing.assert_array_equal(file["logits"][:], expected)


# What counts as finished


def whole_run(folder: Path) -> tuple[str, list[dict]]:
    parts = check_output(folder / "out.h5", False)
    random = np.random.default_rng(3)
    requests = [make_request(random, index, index % len(SLICES), logits=True) for index in range(12)]
    write_parts(parts, requests)
    return parts, requests


def with_rows(requests: list[dict], replica: int) -> list[int]:
    """Indices of the requests that do not depend on logits of this replica."""
    return [request["index"] for request in requests if request["replica"] != replica or not request["logits_rows"]]


def test_a_folder_without_anything_is_a_first_attempt(tmp_path):
    done = finished(str(tmp_path))
    assert done.indices.tolist() == [] and (done.next_attempt, done.cut) == (0, [])
    with pytest.raises(OutputError, match="cannot read the folder"):
        finished(str(tmp_path / "none"))


def test_all_of_an_undisturbed_run_is_finished(tmp_path):
    parts, requests = whole_run(tmp_path)
    done = finished(parts)
    assert done.indices.tolist() == list(range(12)) and (done.next_attempt, done.cut) == (1, [])


@pytest.mark.parametrize("rank", [0, 2])
def test_the_loss_of_one_rank_s_logits_undoes_its_replica_s_requests(tmp_path, rank):
    """The last of three ranks too: that one cannot be missed in the columns alone."""
    parts, requests = whole_run(tmp_path)
    os.unlink(rank_path(parts, 0, rank))
    assert 2 < len(with_rows(requests, 0)) < 12
    assert finished(parts).indices.tolist() == with_rows(requests, 0)


def test_a_torn_tail_of_logits_undoes_the_last_requests(tmp_path, caplog):
    parts, requests = whole_run(tmp_path)
    path = Path(rank_path(parts, 0, 6))              # the only rank of replica 2
    path.write_bytes(path.read_bytes()[:-300])       # the last step and some rows before it
    done = finished(parts)
    assert done.cut == [f"{path}: {done.cut[0].split()[1]} bytes of an interrupted write cut off"]
    assert set(with_rows(requests, 2)) <= set(done.indices.tolist()) < set(range(12))
    assert finished(parts).indices.tolist() == done.indices.tolist() and finished(parts).cut == []


def test_a_row_that_came_twice_does_not_stand_in_for_one_that_is_missing(tmp_path):
    request = make_request(np.random.default_rng(0), 4, 0) | dict(tp=1, logits_rows=2)
    for attempt, positions in enumerate(([5, 5], [5, 6])):
        with RequestsPart(str(tmp_path), attempt, 0, 1.0) as part:
            part.add(**request)
        with RankPart(str(tmp_path), attempt, 0, 0, 0, 1.0, logits=(0, VOCAB, "f32")) as part:
            for position in positions:
                part.add_logits(np.array([[4, 0, position, 0]]), np.zeros((1, VOCAB), np.float32))
        assert finished(str(tmp_path)).indices.tolist() == [4][:attempt]


def test_a_torn_record_of_a_request_is_done_again(tmp_path):
    parts, requests = whole_run(tmp_path)
    path = Path(requests_path(parts, 0, 1))
    data = path.read_bytes()
    last = int(np.frombuffer(data, "<i8", 1, data.rindex(b"MPLJ") + 8)[0])
    path.write_bytes(data[:-1])
    assert finished(parts).indices.tolist() == [index for index in range(12) if index != last]


def test_a_journal_that_cannot_be_read_is_set_aside_and_the_rest_counts(tmp_path):
    parts, requests = whole_run(tmp_path)
    path = Path(requests_path(parts, 0, 1))
    path.write_bytes(b"\0" * 5000)
    done = finished(parts)
    assert done.indices.tolist() == [request["index"] for request in requests if request["replica"] != 1]
    assert done.cut == [f"{path} has no whole record: set aside as {path}.damaged"] and done.next_attempt == 1
    assert Path(f"{path}.damaged").read_bytes() == b"\0" * 5000 and path.name not in names(parts)
    os.rename(f"{path}.damaged", str(path).replace("-0000-", "-0007-") + ".damaged")
    assert finished(parts).next_attempt == 8, "no name is used again"


def test_a_journal_of_another_version_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("mpillm.formats.part_records.VERSION", 99)
    parts, _ = whole_run(tmp_path)
    monkeypatch.undo()
    before = {name: (Path(parts) / name).read_bytes() for name in names(parts)}
    with pytest.raises(OutputError, match="another version of mpillm"):
        finished(parts)
    assert {name: (Path(parts) / name).read_bytes() for name in names(parts)} == before


def test_many_records_take_little_memory(tmp_path, monkeypatch):
    """Compaction in batches: the same places as without."""
    parts, _ = whole_run(tmp_path)
    expected = read_parts(parts).places
    monkeypatch.setattr("mpillm.formats.part_scan._BATCH", 2)
    np.testing.assert_array_equal(read_parts(parts).places, expected)
    assert expected.dtype.itemsize <= 136


# The engine's side


def made_result(index: int, items: int = 1, n: int = 2) -> Result:
    prompts = tuple((1, 2, 3) for _ in range(items))
    request = Request(index + 1, index, f"id{index}", "completion", False, prompts, Sampling(n=n), "m")
    choices = [Choice(at // n, at % n, at, [4, 5], [-0.5, -0.25], None, "x", "length", None) for at in range(items * n)]
    return Result(request, choices, [Timing(0.0, 1.0, 1.0, 2.0)] * len(choices), 3, None)


def replica_output(folder: Path, own: RankPart, root: bool, keeps: bool = True) -> ReplicaOutput:
    return ReplicaOutput(str(folder), 2, 3, 2, own, is_root=root, flush_every=0.0, keeps_logits=keeps, tokenizer=None,
                         run_seed=1, created=0)


def test_a_replica_s_output_is_two_kinds_of_journals(tmp_path):
    owns = [RankPart(str(tmp_path), 2, rank, 3, rank, 0.0, logits=(rank * 4, rank * 4 + 4, "f16")) for rank in (0, 1)]
    # The sequences of a request side by side; a row that is computed anew counts once
    keys = np.array([[7, 0, 2, 0], [8, 0, 2, 0], [7, 1, 2, 0], [7, 0, 3, 0], [7, 1, 2, 0], [7, 1, 3, 0], [8, 0, 3, 0]])
    for rank, own in enumerate(owns):
        with replica_output(tmp_path, own, root=rank == 0) as output:
            own.describe(rank_row(rank, 3, rank))
            for begin in range(len(keys)):
                output.logits(keys[begin:begin + 1], np.full((1, 4), begin, np.float32))
            output.step((1, 0, 0.0, 0.5, 0.1, 0.0))
            output.step((0, 1, 0.5, 0.5, 0.1, 0.0))
            if rank == 0:
                output.result(made_result(7))
                output.failed(made_result(8).request, "it broke", "broken", 500)
                output.reject(FailedLine(1, 0, None, "line 1: bad", None, "bad", 400))
            output.progress(1, 1, 1)
            if rank == 0:
                assert output.paths == [rank_path(str(tmp_path), 2, 0), requests_path(str(tmp_path), 2, 3)]
                assert len(read_parts(str(tmp_path)).places) == 3, "flushed by progress"
    places = read_parts(str(tmp_path)).places
    assert places["logits_rows"].tolist() == [4, 0, 0]
    assert [tuple(row) for row in places[["index", "status", "replica", "tp", "attempt"]]] == [
        (7, 0, 3, 2, 2), (8, 500, -1, 0, 2), (0, 400, -1, 0, 2)]
    done = finished(str(tmp_path))
    assert done.indices.tolist() == [0, 7, 8] and done.next_attempt == 3
    summary = fold(tmp_path / "o.h5", str(tmp_path), HEADER, False, discard=False)
    assert summary["first_error"] == "line 1: bad" and (summary["logits_rows"], summary["logits_dropped"]) == (4, 2)
    with h5py.File(tmp_path / "o.h5") as file:
        assert file["logits"][:, 0].tolist() == [0, 3, 2, 5] and file["logits"].shape == (4, 8)
        assert len(file["steps"]) == 4


def test_an_error_of_the_engine_keeps_what_was_finished(tmp_path):
    own = RankPart(str(tmp_path), 2, 0, 3, 0, 1e9)
    with pytest.raises(ZeroDivisionError), replica_output(tmp_path, own, root=True, keeps=False) as output:
        output.result(made_result(0))
        output.logits(np.zeros((1, 4), np.int64), np.zeros((1, 4), np.float32))
        raise ZeroDivisionError
    assert finished(str(tmp_path)).indices.tolist() == [0]


def test_choices_have_to_be_complete(tmp_path):
    with RequestsPart(str(tmp_path), 0, 0, 1.0) as part, pytest.raises(AssertionError, match="choices are 0 .. n-1"):
        part.add(index=0, line=1, custom_id=None, replica=0, tp=1, prompts=[[1]], result={},
                 choices=[replace(make_request(np.random.default_rng(0), 0, 0)["choices"][0], choice=1)])
