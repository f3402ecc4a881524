"""Whole runs over unlike layouts: replicas, idle ranks, more ranks than heads, a small cache, threads, formats."""

from __future__ import annotations

import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from comparing import same_bits
from program import Ended, Outputs, launch, write_lines

from mpillm import __version__, kernels
from mpillm.engine.cost import LayoutChoice
from mpillm.machine.launch import processor_name

MODEL = Path(__file__).parents[1] / "reference" / "data" / "saved_tiny"     # 6 query and 2 KV heads of 16, 2 layers
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
BLOCK = 64 * 2 * 2 * 16 * 2          # bytes of a cache block of one KV head: K and V, layers, head, bf16
HOT = ("--temperature", 1, "--ignore-eos", "--max-tokens", 6)
LINES = [{"id": f"p{i}", "prompt_token_ids": [(7 * i + 3 * k) % 300 + 4 for k in range(count)], "seed": i}
         for i, count in enumerate((3, 20, 1, 9, 5))]
NAMES = [line["id"] for line in LINES]
TOO_LONG = {"id": "too long", "prompt_token_ids": [5] * 150, "max_tokens": 4}


def start(folder: Path, name: str, ranks: int, lines: list, *options) -> tuple[Outputs, Ended]:
    """A run that succeeds, with all that it said."""
    outputs = Outputs(folder / f"{name}.results.jsonl", folder / f"{name}.h5")
    ended = launch(ranks, ["--model", MODEL, "--prompts", write_lines(folder / f"{name}.jsonl", lines), "--results",
                           outputs.results, "--output", outputs.hdf5, *options], timeout=300)
    assert ended.code == 0, ended.stderr[-4000:]
    assert not ended.errors and "Traceback" not in ended.stderr, ended.stderr[-4000:]
    return outputs, ended


def ids(outputs: Outputs) -> dict[str, list[int]]:
    return {name: outputs.ids(name) for name in NAMES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def one(folder) -> tuple[Outputs, Ended]:
    """One replica of two ranks, whose cache has two blocks."""
    return start(folder, "one", 2, [*LINES, TOO_LONG], *HOT, "--tp", 2, "--kv-memory", 2 * BLOCK + 100)


@pytest.fixture(scope="module")
def two(folder) -> tuple[Outputs, Ended]:
    """Two replicas of two ranks and an idle one, the same lines and cache."""
    return start(folder, "two", 5, [*LINES, TOO_LONG], *HOT, "--tp", 2, "--kv-memory", 2 * BLOCK + 100)


@pytest.fixture(scope="module")
def many(folder) -> tuple[Outputs, Ended]:
    """Eight replicas of four ranks for five prompts."""
    return start(folder, "many", 32, LINES, *HOT, "--layout", "8x4")


@pytest.fixture(scope="module")
def chosen(folder) -> tuple[Outputs, Ended]:
    """Two ranks, the layout left to the program."""
    return start(folder, "chosen", 2, LINES, *HOT)


# Layouts


def test_32_ranks_answer_all_in_the_layout_that_is_asked(many):
    outputs, ended = many
    assert "layout: 8 replica(s) x 4 rank(s) (--layout 8x4)\n" in ended.stderr
    assert [len(outputs.ids(name)) for name in NAMES] == [6] * 5
    with h5py.File(outputs.hdf5) as file:
        layout, ranks = json.loads(file.attrs["layout"]), file["ranks"][:]
        took, stepped = set(file["requests"]["replica"].tolist()), set(file["steps"]["replica"].tolist())
    assert took == stepped <= set(range(8)), "replicas take lines as they come; who has none takes no step"
    assert (layout["tp"], layout["dp"], layout["idle"]) == (4, 8, 0)
    assert ranks["rank"].tolist() == list(range(32))
    assert ranks["replica"].tolist() == [rank // 4 for rank in range(32)]


def test_a_layout_that_is_chosen_is_measured_said_and_recorded(chosen):
    outputs, ended = chosen
    assert [len(outputs.ids(name)) for name in NAMES] == [6] * 5
    with h5py.File(outputs.hdf5) as file:
        found = json.loads(file.attrs["layout"])
    choice = LayoutChoice.from_dict(found)
    assert choice.chosen_by == "auto" and choice.line() + "\n" in ended.stderr
    assert sorted(name for name, _ in choice.expected) == ["1x2", "2x1"]
    assert f"{found['dp']}x{found['tp']}" == choice.expected[0][0]
    assert found["measured"]["read"] > 1e7 and found["measured"]["operations"] > 1e8
    assert [(ranks, nbytes) for ranks, nbytes, _ in found["measured"]["exchanges"]] == [(2, 384), (2, 32 * 384)]
    assert all(0 < seconds < 1 for _, _, seconds in found["measured"]["exchanges"])
    assert found["measured"]["work"]["sequences"] == 5 and found["measured"]["work"]["new"] == 6


def test_spare_ranks_are_said_to_be_idle(one, two):
    outputs, ended = two
    assert "layout: 2 replica(s) x 2 rank(s), the last 1 rank(s) stay idle (--tp 2)\n" in ended.stderr
    assert [len(outputs.ids(name)) for name in NAMES] == [6] * 5
    with h5py.File(outputs.hdf5) as file:
        ranks, replicas = file["ranks"][:], file["requests"]["replica"].tolist()
        assert set(file["steps"]["rank"].tolist()) <= {0, 1, 2, 3}
    assert set(replicas[:5]) <= {0, 1}
    assert ranks["replica"].tolist() == [0, 0, 1, 1, -1] and ranks["tp_rank"].tolist() == [0, 1, 0, 1, -1]
    assert ranks["weight_bytes"][4] == 0 == ranks["head_stop"][4] and ranks["threads"][4] >= 1
    assert "idle" not in one[1].stderr


def test_draws_do_not_depend_on_the_number_of_replicas(one, two):
    assert ids(one[0]) == ids(two[0])
    assert len({tuple(found) for found in ids(one[0]).values()}) == len(NAMES), "unlike prompts, unlike draws"


def test_a_prompt_beyond_the_cache_fails_alone(one, two):
    for outputs, ended in (one, two):
        line = outputs.by_id["too long"]
        assert line["response"]["status_code"] == 400 and line["error"]["code"] == "cache_too_small"
        message = line["error"]["message"]
        assert message.startswith("line 6: prompt of 150 tokens with max_tokens 4 needs 3 cache blocks, ")
        assert "the whole cache has 2 (128 positions)" in message and "--kv-memory" in message
        assert "cache: 2 blocks of 64 positions" in ended.stderr
        assert "5 request(s) answered, 1 failed" in ended.stderr
        with h5py.File(outputs.hdf5) as file:
            assert file["requests"]["status"].tolist() == [0] * 5 + [400]
            assert file["requests"]["error"][5].decode() == message


# What is recorded of a run


def test_the_header_says_what_the_results_depend_on(one, two):
    for outputs, ranks, dp, idle in ((one[0], 2, 1, 0), (two[0], 5, 2, 1)):
        with h5py.File(outputs.hdf5) as file:
            attributes = dict(file.attrs)
            assert len(file["ranks"]) == ranks
        config, layout, model, versions = (json.loads(attributes[name])
                                           for name in ("config", "layout", "model", "versions"))
        assert attributes["mpillm_version"] == __version__ and attributes["processor"] == processor_name()
        assert config["tp"] == 2 and config["temperature"] == 1 and config["kv_memory"] == 2 * BLOCK + 100
        assert config["prompts"].endswith(".jsonl") and config["max_batch"] == 32 and config["kv_type"] == "bf16"
        assert layout == {"tp": 2, "dp": dp, "idle": idle, "kv_mode": "redundant", "rows": 2, "width": 1,
                          "collectives": "shm", "wire": "f32", "instructions": kernels.tier(), "chosen_by": "--tp 2",
                          "measured": None, "expected": [], "moe_split": "columns"}
        assert model["weight_formats"] == ["f32"] and model["kv_type"] == "bf16"
        assert (model["architecture"], model["hidden"], model["n_heads"], model["vocab"]) == ("llama", 96, 6, 307)
        assert model["name"] == "saved_tiny" and model["path"] == str(MODEL)
        assert {"python", "numpy", "numba", "mpi4py", "mpi"} <= versions.keys()


def test_ranks_own_the_model_between_them(one, many):
    for outputs, tp in ((one[0], 2), (many[0], 4)):
        with h5py.File(outputs.hdf5) as file:
            ranks = file["ranks"][:]
        for name, count in (("head", 6), ("column", 160), ("vocab", 307)):
            starts, stops = ranks[f"{name}_start"][:tp], ranks[f"{name}_stop"][:tp]
            assert starts.tolist() == [0, *stops[:-1]] and stops[-1] == count, name
        assert ranks["kv_head_start"][0] == 0 and ranks["kv_head_stop"][tp - 1] == 2
        held = ranks["kv_head_stop"] - ranks["kv_head_start"]
        assert (ranks["kv_bytes_per_token"] == held * BLOCK // 64).all()
        matrices = 4 * 2 * (96 * 96 * 2 + 2 * 32 * 96 + 3 * 160 * 96) + 4 * 2 * 307 * 96
        assert matrices <= ranks["weight_bytes"][:tp].sum() < 1.6 * matrices
        assert all(host for host in ranks["host"]) and all(cores for cores in ranks["cores"])
        for column in ("threads", "numa"):
            assert all(len(str(value)) for value in ranks[column])
        assert (ranks["threads"] >= 1).all()


def test_steps_account_for_every_token(one, two):
    prompts = sum(len(line["prompt_token_ids"]) for line in LINES)
    for outputs, replicas in ((one[0], 1), (two[0], 2)):
        with h5py.File(outputs.hdf5) as file:
            steps = file["steps"][:]
        roots = steps[steps["rank"] % 2 == 0]
        assert roots["rows_prefill"].sum() == prompts
        assert roots["rows_decode"].sum() == len(LINES) * (6 - 1), "the first token comes from the prompt's last row"
        for replica in range(replicas):
            own = [steps[steps["rank"] == 2 * replica + rank] for rank in range(2)]
            assert (own[0]["replica"] == replica).all()
            for rank in filter(len, own):
                assert rank["step"].tolist() == list(range(len(rank)))
                assert (np.diff(rank["start_s"]) > 0).all() and rank["start_s"][0] > 0
                for column in ("compute_s", "communication_s", "wait_s"):
                    assert (rank[column] >= 0).all() and np.isfinite(rank[column]).all(), column
            for column in ("rows_prefill", "rows_decode"):
                assert own[0][column].tolist() == own[1][column].tolist(), "ranks of a replica take the same steps"


# What changes nothing


def test_neither_mpi_s_sums_nor_unbound_ranks_change_a_token(one, folder):
    """Two ranks: a sum of two has one order."""
    outputs, ended = start(folder, "mpi", 2, LINES, *HOT, "--tp", 2, "--collectives", "mpi", "--no-pin")
    assert ids(outputs) == ids(one[0])
    with h5py.File(outputs.hdf5) as file:
        layout, config = (json.loads(file.attrs[name]) for name in ("layout", "config"))
    assert layout["collectives"] == "mpi" and config["pin"] is False


MEASURED = [{"id": f"m{i}", "prompt_token_ids": [(11 * i + 5 * k) % 300 + 4 for k in range(count)]}
            for i, count in enumerate((70, 1, 8, 20, 3, 33, 2))]
GREEDY = ("--temperature", 0, "--ignore-eos", "--max-tokens", 3, "--logits", "all", "--logits-type", "f32", "--tp", 1)


@pytest.mark.parametrize("weights, kv_type, kv_type_v", [("bf16", "bf16", "bf16"), ("q8_0", "f16", "f32")])
def test_neither_batch_nor_chunks_nor_threads_change_a_bit(weights, kv_type, kv_type_v, folder):
    """A prompt that crosses a cache block, with six others and alone; threads beyond the cores would be cut."""
    options = (*GREEDY, "--weights", weights, "--kv-type", kv_type, "--kv-type-v", kv_type_v)
    threads = min(2, CORES)
    batch, _ = start(folder, f"{weights} batch", 1, MEASURED, *options, "--threads-per-rank", 1)
    chunks, _ = start(folder, f"{weights} chunks", 1, MEASURED, *options, "--threads-per-rank", threads,
                      "--prefill-chunk", 3)
    alone, _ = start(folder, f"{weights} alone", 1, MEASURED[:1], *options, "--threads-per-rank", 1)
    same_bits(batch, chunks, [line["id"] for line in MEASURED])
    same_bits(batch, alone, ["m0"])
    assert batch.logits("m0").shape == (72, 307) and batch.logits("m0").std() > 0.1
    taken = []
    for outputs, count in ((batch, 1), (chunks, threads)):
        with h5py.File(outputs.hdf5) as file:
            assert json.loads(file.attrs["model"])["weight_formats"] == [weights]
            model = json.loads(file.attrs["model"])
            assert (model["kv_type"], model["kv_type_v"]) == (kv_type, kv_type_v)
            assert file["ranks"]["threads"].tolist() == [count]
            taken.append(file["steps"]["rows_prefill"][:])
    assert taken[0].max() > 100 and taken[1].max() == 3, "the runs were cut in different ways"
