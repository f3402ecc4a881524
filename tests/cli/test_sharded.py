"""`--kv-mode sharded` through the program: what it answers, keeps and says; killed and resumed."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from program import launch, mpirun, write_lines
from program import run as run_program

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "unit")]

from made_deepseek import V2, tensors  # noqa: E402
from made_models import write_folder  # noqa: E402
from reliability import Job, results_of, send, undisturbed, write_prompts  # noqa: E402

MODEL = ROOT / "tests" / "reference" / "data" / "saved_tiny"       # 6 query heads on 2 KV heads
RANKS = 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(options, results) of a run that nobody disturbed: one row of 3 ranks."""
    folder = tmp_path_factory.mktemp("sharded")
    write_prompts(folder / "in.jsonl", 60, 307, 100)
    options = ["--prompts", str(folder / "in.jsonl"), "--model", str(MODEL), "--tp", str(RANKS), "--kv-mode", "sharded",
               "--max-batch", "2", "--flush-every", "0.1", "--logits", "last"]
    (folder / "whole").mkdir()
    return options, undisturbed(folder / "whole", mpirun(), options, ranks=RANKS)[1]


def begun(whole, folder: Path, *more: str) -> Job:
    """A job that has begun to run."""
    job = Job(mpirun(), RANKS, folder / "out.h5", [*whole[0], "--results", str(folder / "out.results.jsonl"), *more])
    job.await_begin()
    return job


def test_a_killed_rank_and_a_resumed_run(whole, tmp_path):
    job = begun(whole, tmp_path)
    job.await_lines(1)
    send(job.found()["workers"][1], signal.SIGKILL)
    assert job.end(60) in (9, 137) and "was killed by SIGKILL" in job.log.read_text()
    other = begun(whole, tmp_path, "--resume", "--kv-mode", "allgather")
    assert other.end(60) == 2, other.log.read_text()[-2000:]
    assert '--kv-mode is "redundant or allgather", the run began with "sharded"' in other.log.read_text()
    again = begun(whole, tmp_path, "--resume")
    assert again.end(120) == 0 and " of 60 lines are done" in again.log.read_text()
    assert results_of(tmp_path / "out.results.jsonl") == whole[1]


def test_what_is_recorded_and_said(tmp_path):
    """4 ranks in two rows of two: each holds one of two KV heads, and half of the positions."""
    lines = [{"id": f"p{i}", "prompt_token_ids": [(7 * i + k) % 300 + 3 for k in range(5 + 60 * i)], "max_tokens": 70}
             for i in range(4)]
    found = {}
    for mode in ("redundant", "sharded"):
        more = ("--weights", "f32", "--kv-type", "f32", "--temperature", "0", "--ignore-eos", "--tp", 4, "--logits",
                "generated", "--logits-type", "f32", "--kv-mode", mode)
        found[mode] = run_program(tmp_path, 4, MODEL, lines, *more, name=mode)
    for i in range(4):
        ids, logits = zip(*((own.ids(f"p{i}"), own.logits(f"p{i}")) for own in found.values()), strict=True)
        assert ids[0] == ids[1]
        np.testing.assert_allclose(logits[1], logits[0], atol=2e-5 * float(np.abs(logits[0]).max()))
    whole, shared = (h5py.File(own.hdf5) for own in found.values())
    with whole, shared:
        described = json.loads(shared.attrs["layout"])
        assert (described["kv_mode"], described["rows"], described["width"]) == ("sharded", 2, 2)
        ranks = shared["ranks"]
        assert (2 * ranks["kv_bytes_per_token"] == whole["ranks"]["kv_bytes_per_token"]).all()
        assert ranks["kv_bytes_per_token"].tolist() == [2 * 2 * 16 * 4 // 2] * 4       # K and V, layers, head, f32
        assert (ranks["kv_head_stop"] - ranks["kv_head_start"] == 1).all()
        assert json.loads(shared.attrs["identity"])["options"]["kv_mode"] == "sharded"


def test_latent_attention(tmp_path):
    """4 heads on 6 ranks, two of which have none: all hold latents of a sixth of the positions, and attend."""
    config = {**V2, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = write_folder(tmp_path / "model", config, {
        name: x / np.sqrt(x.shape[-1]).astype(np.float32) if x.ndim > 1 else x / 5 + 1
        for name, x in tensors(config).items()})
    lines = [{"id": f"p{i}", "prompt_token_ids": [(7 * i + k) % 200 + 3 for k in range(5 + 60 * i)], "max_tokens": 70}
             for i in range(4)]
    found = {}
    for mode, mla, experts in (("redundant", "2", "columns"), ("sharded", "auto", "experts")):
        more = ("--moe-split", experts,
                "--weights", "f32", "--kv-type", "f32", "--temperature", "0", "--ignore-eos", "--tp", 6, "--logits",
                "generated", "--logits-type", "f32", "--kv-mode", mode, "--mla", mla)
        found[mode] = run_program(tmp_path, 6, model, lines, *more, name=mode)
    for i in range(4):
        ids, logits = zip(*((own.ids(f"p{i}"), own.logits(f"p{i}")) for own in found.values()), strict=True)
        assert ids[0] == ids[1]
        np.testing.assert_allclose(logits[1], logits[0], atol=2e-5 * float(np.abs(logits[0]).max()))
    with h5py.File(found["sharded"].hdf5) as cut:
        described, ranks = json.loads(cut.attrs["layout"]), cut["ranks"]
        assert (described["kv_mode"], described["rows"], described["width"]) == ("sharded", 1, 6)
        assert ranks["kv_bytes_per_token"].tolist() == [round(2 * (72 + 8) * 4 / 6)] * 6       # layers, columns, f32
        starts, stops = ranks["expert_start"].tolist(), ranks["expert_stop"].tolist()
        assert [*starts, V2["n_routed_experts"]] == [0, *stops] and min(stops) > 0
    with h5py.File(found["redundant"].hdf5) as by_columns:
        assert (by_columns["ranks"]["expert_stop"] == V2["n_routed_experts"]).all()


def test_a_prompt_beyond_all_places_fails_alone_and_one_beyond_one_place_does_not(tmp_path):
    """Room for 2 blocks at each of 3 places: 384 positions, though a rank alone holds 128."""
    block = 64 * 2 * 2 * 2 * 16 * 2                         # positions, K and V, layers, heads, size, bf16
    lines = [{"id": name, "prompt_token_ids": [5 + k % 300 for k in range(length)], "max_tokens": 5}
             for name, length in (("long", 370), ("longer", 390))]
    prompts = write_lines(tmp_path / "in.jsonl", lines)
    ended = launch(3, ["--prompts", prompts, "--model", MODEL, "--output", tmp_path / "o.h5", "--results",
                       tmp_path / "o.jsonl", "--tp", 3, "--kv-mode", "sharded", "--kv-type", "bf16", "--kv-memory",
                       str(2 * block + 5), "--ignore-eos"])
    assert ended.code == 0, ended.stderr[-3000:]
    found = {line["custom_id"]: line for line in map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines())}
    assert len(found["long"]["response"]["body"]["choices"][0]["token_ids"]) == 5
    assert "needs 7 cache blocks, the whole cache has 6 (384 positions)" in json.dumps(found["longer"])
