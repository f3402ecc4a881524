"""The scripts of benchmarks/: a made model is the same model in every file, and the table says who was faster."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpillm.models.parse import open_model
from mpillm.models.weights import Weights

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import batch  # noqa: E402
import latent  # noqa: E402
import make_model  # noqa: E402
import peers  # noqa: E402
import shards  # noqa: E402
import workload  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "tiny"
    subprocess.run([sys.executable, str(ROOT / "benchmarks/make_model.py"), "--out", str(out), "--shape", "tiny",
                    "--types", "bf16,q8_0,q4_0"], check=True, capture_output=True)
    return out


def opened(path):
    config, checkpoint = open_model(str(path), False)
    return config, Weights(checkpoint, config)


def test_every_file_holds_the_same_model(folder):
    config, weights = opened(folder / "hf")
    for kind, worst in (("bf16", 0.0), ("q8_0", 0.01), ("q4_0", 0.2)):
        other, found = opened(folder / f"{kind}.gguf")
        assert other.rms_eps == pytest.approx(config.rms_eps)         # GGUF has float32
        for name in ("hidden", "n_layers", "n_heads", "n_kv_heads", "head_dim", "intermediate", "vocab", "rope_theta",
                     "tied", "context"):
            assert getattr(other, name) == getattr(config, name), name
        for name, shape in make_model.shapes_of(make_model.config_of("tiny")).items():
            x, y = np.asarray(weights.read(name)), np.asarray(found.read(name))
            assert x.shape == shape
            assert np.abs(x - y).max() <= worst * np.abs(x).max(), (kind, name)


def test_a_model_is_written_anew_from_its_own_file(folder, tmp_path):
    config, source = make_model.model_of(str(folder / "bf16.gguf"))
    make_model.write_folder(tmp_path, config, source)
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "hf/model.safetensors").read_bytes()


def test_an_unknown_figure_is_refused():
    with pytest.raises(SystemExit, match="unknown figures: depth"):
        make_model.config_of(make_model.SHAPES["tiny"] + ",depth=3")


def given(**changes):
    values = {"folder": Path("models/m"), "types": "bf16,q8_0", "llama_python": "llama", "transformers_python": "torch",
              "vllm_python": None, "threads": "2", "batch": "1,8", "prompt": 512, "tokens": 128, "rounds": 1,
              "seconds": 5.0}
    return argparse.Namespace(**{**values, **changes})


def test_who_is_run_on_what():
    cases = peers.cases_of(given())
    assert [(case.program, case.weights, case.ranks) for case in cases] == [
        ("mpillm", "bf16", 1), ("mpillm", "bf16", 2), ("llama.cpp", "bf16", 1), ("transformers", "bf16", 1),
        ("transformers", "f32", 1), ("mpillm", "q8_0", 1), ("mpillm", "q8_0", 2), ("llama.cpp", "q8_0", 1)]
    ours = [case.command for case in cases if case.program == "mpillm"]
    assert [command[command.index("--threads-per-rank") + 1] for command in ours] == ["2", "1"] * 2


def test_the_table_compares_the_best_with_the_best():
    cases, found = peers.cases_of(given()), peers.Found()
    speeds = {("mpillm", 1): [30, 10, 20], ("mpillm", 2): [40, 40, 50], ("llama.cpp", 1): [16, 16, 900],
              ("transformers", 1): [5]}
    for case in cases:
        if case.weights in ("bf16", "f32"):
            found.speeds[case, "tg128"] += speeds[case.program, case.ranks]
    found.limits["bf16", 2, "tg128"] += [80, 100, 80]
    assert peers.table(cases, found) == [
        "| weights | program | ranks x threads | tg128 |", "|---|---|---|---|",
        "| bf16 | mpillm | 1 x 2 | 20.0 (25 %) |", "| bf16 | mpillm | 2 x 1 | 40.0 (50 %) |",
        "| bf16 | llama.cpp | 1 x 2 | 16.0 (20 %) |", "| bf16 | transformers | 1 x 2 | 5.0 (6 %) |",
        "| bf16 | **ours / best other** | 2 cores | **2.50** |",
        "| f32 | transformers | 1 x 2 | 5.0 (12 %) |"]


def test_a_program_that_fails_is_named():
    found = peers.Found()
    peers.run(peers.Case("llama.cpp", "bf16", 1, 1, (sys.executable, "-c", "raise SystemExit('no llama_cpp')")), found)
    assert found.failures == {"llama.cpp bf16": "exit code 1: no llama_cpp"} and not found.speeds


def test_lines_are_mixed_and_the_same_for_all(tmp_path):
    lines = workload.mixed(200, 1000, seed=3)
    workload.write(tmp_path / "lines.jsonl", lines)
    assert workload.read(tmp_path / "lines.jsonl") == lines == workload.mixed(200, 1000, seed=3)
    assert lines != workload.mixed(200, 1000, seed=4)
    behind = [line for line in lines if line.shared]
    assert len(behind) == 60 and {line.shared for line in behind} == {workload.COMMON}
    assert len({tuple(line.prompt[:workload.COMMON]) for line in behind}) == 1
    for values, (least, most) in (([len(line.prompt) for line in lines], workload.PROMPT),
                                  ([line.max_tokens for line in lines], workload.NEW)):
        assert least <= min(values) < 20 and most - 10 < max(values) <= most
    assert all(workload.FIRST_ID <= token < 1000 for line in lines for token in line.prompt)


def test_the_lines_are_input_of_this_program(tmp_path):
    workload.write(tmp_path / "lines.jsonl", [workload.Line([300, 301], 9)])
    line, = map(json.loads, (tmp_path / "lines.jsonl").read_text().splitlines())
    assert line == {"custom_id": "0-shared-0", "prompt_token_ids": [300, 301], "max_tokens": 9, "temperature": 0,
                    "ignore_eos": True}


def test_a_common_beginning_counts_once():
    lines = [workload.Line([1] * 30, 8, 20), workload.Line([1] * 25, 8, 20), workload.Line([2] * 10, 8)]
    assert workload.prompt_tokens(lines) == (65, 45)
    assert workload.prompt_tokens(lines[2:]) == (10, 10)


def test_groups_are_of_equal_lengths_and_lose_nothing():
    lines = workload.mixed(50, 1000)
    groups = list(workload.groups(lines, 16))
    assert sorted(map(len, groups)) == [2, 16, 16, 16]
    assert sorted(id(line) for group in groups for line in group) == sorted(map(id, lines))
    spans = sorted((min(sizes), max(sizes)) for sizes in (
        [len(line.prompt) + line.max_tokens for line in group] for group in groups))
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_a_cut_run_says_what_it_did():
    assert workload.Cut(0.0).over() and not workload.Cut(math.inf).over()
    cut = workload.Cut()
    cut.lines, cut.tokens = 2, 30
    cut.end()
    row = cut.row()
    assert (row["lines"], row["tokens"]) == (2, 30) and row["seconds"] >= 0


def test_torch_computes_in_bf16_only_where_the_processor_does():
    assert batch.dtypes()[0] == ("float32", "f32") and len(batch.dtypes()) in (1, 2)


def test_who_gets_the_batch(monkeypatch):
    monkeypatch.setattr(batch, "dtypes", lambda: [("float32", "f32"), ("bfloat16", "bf16")])
    cases = batch.cases_of(given(threads=2, seconds=60.0), "lines.jsonl")
    assert [(case.program, case.weights, case.ranks) for case in cases] == [
        ("mpillm", "bf16", 2), ("llama.cpp, batch", "bf16", 1), ("llama.cpp, alone", "bf16", 1),
        ("transformers", "f32", 1), ("transformers", "bf16", 1), ("mpillm", "bf16", 1),
        ("mpillm, 2 replicas", "bf16", 2), (batch.STATIC, "bf16", 2),
        ("mpillm", "q8_0", 2), ("llama.cpp, batch", "q8_0", 1), ("llama.cpp, alone", "q8_0", 1),
        ("mpillm", "q8_0", 1), ("mpillm, 2 replicas", "q8_0", 2), (batch.STATIC, "q8_0", 2)]
    for case in cases:
        assert "lines.jsonl" in case.command
        if case.ours:
            threads = case.command[case.command.index("--threads-per-rank") + 1]
            assert int(threads) * case.ranks == case.cores == 2


def test_the_batch_table_holds_our_best_against_each(monkeypatch):
    monkeypatch.setattr(batch, "dtypes", lambda: [("float32", "f32"), ("bfloat16", "bf16")])
    lines = [workload.Line([1] * 100, 50), workload.Line([2] * 100, 150)]
    cases, found = batch.cases_of(given(types="bf16", threads=2), "lines.jsonl"), batch.Found()
    speeds = {"mpillm": [40, 60, 50], "mpillm, 2 replicas": [80], batch.STATIC: [90], "llama.cpp, batch": [20],
              "transformers": [10]}
    for case in cases:
        if case.program in speeds:
            found.speeds[case] += speeds[case.program]
            found.whole[case] += [7.4]
            found.lines[case] = 1 if case.program.startswith("llama") else 2
    found.limits["bf16", "pp"] += [200, 100, 200]
    found.limits["bf16", "tg"] += [200]
    assert batch.limit_of("bf16", lines, found) == 100.0        # a second of prompts, a second of tokens
    assert batch.table(cases, lines, found) == [
        "| weights | program | ranks x threads | tokens/s | of limit | ours / theirs | whole, s |",
        "|---|---|---|---|---|---|---|",
        "| bf16 | mpillm | 2 x 1 | 50.0 | 50 % |  | 7 |",
        "| bf16 | llama.cpp, batch (cut after 1 lines) | 1 x 2 | 20.0 | 20 % | 4.00 | 7 |",
        "| f32 | transformers | 1 x 2 | 10.0 | 10 % | 8.00 | 7 |",
        "| bf16 | transformers | 1 x 2 | 10.0 | 10 % | 8.00 | 7 |",
        "| bf16 | mpillm | 1 x 2 | 50.0 | 50 % |  | 7 |",
        "| bf16 | mpillm, 2 replicas | 2 x 1 | 80.0 | 80 % |  | 7 |",
        "| bf16 | mpillm --batching static | 2 x 1 | 90.0 | 90 % | 0.89 | 7 |"]


def test_without_limits_the_table_has_none():
    lines, found = [workload.Line([1] * 100, 50)], batch.Found()
    case = batch.cases_of(given(types="bf16", threads=2), "lines.jsonl")[0]
    found.speeds[case], found.whole[case], found.lines[case] = [4.0], [1.0], 1
    assert batch.table([case], lines, found)[2:] == ["| bf16 | mpillm | 2 x 1 | 4.0 | - |  | 1 |"]


# Latent attention and sharded caches against the context

def test_bytes_and_operations_of_latent_attention():
    """16 heads at 16k positions: what facts of the modes say by hand."""
    own, copied, once, third = (latent.Case(mode, "bf16", 16, 16383) for mode in range(4))
    assert own.cache_nbytes == 16384 * 16 * 320 * 2 and once.cache_nbytes == third.cache_nbytes == 16384 * 576 * 2
    assert copied.cache_nbytes == 16384 * (576 + 512) * 2
    weights = 16 * 2 * 256 * 512
    assert once.operations - weights == 2 * 16 * 16384 * (576 + 512) == copied.operations - weights
    assert own.operations - weights == 2 * 16 * 16384 * 320
    chunk, made = (latent.Case(mode, "q8_0", 16, 16384, 4096) for mode in (0, 3))
    again = 2 * 16 * 16384 * 256 * 512
    assert made.operations == chunk.operations + again and again / chunk.operations == pytest.approx(0.09, abs=0.01)
    assert made.cache_nbytes == 20480 * 18 * 34


def test_the_table_of_latent_attention_compares_with_mode_0():
    found = [latent.result(latent.Case(mode, "bf16", 16, 1023), seconds, 1e10, 1e11)
             for mode, seconds in ((2, 0.001), (0, 0.003))]
    rows = latent.table(found, 1e10, 1e11).splitlines()[-2:]
    assert [row.split(" | ")[1] for row in rows] == ["0", "2"]
    assert rows[0].endswith("1.00 |") and rows[1].endswith("3.00 |")
    assert found[0]["read_share"] == pytest.approx(1024 * 576 * 2 / 0.001 / 1e10)


def test_where_sharded_overtakes():
    one, cut = {"64": 1.0, "1024": 2.0, "640": 1.5}, {"64": 0.9, "640": 1.6, "1024": 1.9}
    assert shards.overtakes(one, cut) == "from 1024 positions on"
    assert shards.overtakes(cut, {n: 9.0 for n in cut}) == "at none of these contexts"
    subject = shards.open_subject(str(ROOT / "examples/models/Llama-3.3-70B"), "auto")[0]

    def crossing(microseconds: float) -> int | None:
        points = shards.estimate.exchange_figures([4, 32], 1e-6 * microseconds, 1e10)
        return shards.crossing(subject, 32, shards.Machine(5e10, 1e12, points), 8, "allgather")

    near, far = crossing(2), crossing(20)
    assert near is not None and far is not None and 64 <= near < far and far % 64 == 0
    assert crossing(1e6) is None
    subject = shards.open_subject(str(ROOT / "examples/models/DeepSeek-V3"), "auto")[0]
    assert [shards.mode_of(subject, mode).mla for mode in shards.MODES] == [3, 3, 2]


def test_the_table_of_shards_has_a_column_for_each_context():
    row = {"ranks": 2, "mode": "sharded", "cache_bytes": 512, "exchange_bytes": 96,
           "seconds": {"16384": 0.002, "1024": 0.001}}
    assert shards.table([row]).splitlines()[0].endswith("1024: ms | 16384: ms |")
    assert shards.table([row]).splitlines()[2] == "| 2 | sharded | 512 B | 96 B | 1.00 | 2.00 |"
