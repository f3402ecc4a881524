"""`mpillm plan` against a run: what it says of each rank is what the run recorded of it."""

from __future__ import annotations

import json

import h5py
import pytest
from program import launch, run
from tiny_text import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("plan") / "model")


def test_the_bytes_of_each_rank_are_those_of_a_run(model, tmp_path):
    """Two KV heads over three ranks: no two ranks hold the same."""
    ranks, path = 3, tmp_path / "plan.json"
    options = ("--tp", ranks, "--kv-mode", "allgather", "--weights", "f32", "--kv-type", "f32")
    outputs = run(tmp_path, ranks, model, [{"prompt": "DEF", "max_tokens": 1}], *options)
    done = launch(1, ["plan", "--model", model / "config.json", "--ranks", ranks, "--json", path, *options])
    assert done.code == 0 and "Traceback" not in done.stderr, done.stderr
    planned = json.loads(path.read_text())["per_rank"]
    with h5py.File(outputs.hdf5) as file:
        recorded = file["ranks"][:]
    assert len(planned) == len(recorded) == ranks
    for name in ("weight_bytes", "kv_bytes_per_token"):
        assert [row[name] for row in planned] == recorded[name].tolist(), name
    assert len({row["weight_bytes"] for row in planned}) > 1, "the ranks differ, so equal lists say something"


def test_the_command_says_what_it_cannot_plan(model):
    done = launch(1, ["plan", "--model", model, "--ranks", 2, "--mla", 3])
    assert done.code == 2 and len(done.errors) == 1 and "--mla 3 is for models with latent attention" in done.errors[0]
    full = launch(1, ["plan", "--model", model, "--ranks", 2, "--memory-per-rank", "100MiB"])
    assert full.code == 6 and "ranks of a replica" in full.stdout and "needs" in full.errors[0]
