"""The scripts of benchmarks/: a made model is the same model in every file, and the table says who was faster."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpillm.models.parse import open_model
from mpillm.models.weights import Weights

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import make_model  # noqa: E402
import peers  # noqa: E402


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
