"""`mpillm bench` on one and two ranks: what it writes has every figure, and the figures agree with each other."""

from __future__ import annotations

import json
import os
import stat

import pytest
from program import launch
from tiny_text import write_model

QUICK = ("--buffer", "1MiB", "--threads-per-rank", 1, "--log-level", "error")
KEYS = {"test", "batch", "depth", "n_ranks", "n_threads", "weights", "avg_ts", "stddev_ts", "bandwidth_fraction",
        "peak_fraction", "comm_fraction", "python_fraction", "bytes_per_token", "family_seconds", "limit_ts"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    write_model(folder / "model")
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_machine(folder, ranks):
    path = folder / f"machine{ranks}.json"
    done = launch(ranks, ["bench", "machine", "--seconds", 0.02, "--json", path, *QUICK])
    assert done.code == 0, done.stderr
    rows = json.loads(path.read_text())
    found = {row["test"] for row in rows}
    assert {"read memory", "read L2", "peak f32"} <= found
    assert any(test.startswith("all-reduce") for test in found) == (ranks == 2)
    for row in rows:
        assert {"n_ranks", "n_threads", "unit", "best", "median", "repetitions"} <= set(row)
        assert row["n_ranks"] == ranks and row["n_threads"] == 1
        # The best is a rate, or for exchanges a time
        low, high = (row["best"], row["median"]) if row["unit"] == "s" else (row["median"], row["best"])
        assert 0 < low <= high
    assert not list(folder.glob("*.new"))
    assert "read memory" in done.stdout and "GFLOP/s" in done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_model(folder, ranks):
    path, picture = folder / f"model{ranks}.json", folder / f"speed{ranks}.svg"
    done = launch(ranks, ["bench", "model", "--model", folder / "model", "--weights", "bf16", "--batch", "1,3",
                          "--depth", "0,100", "--prompt", 24, "--tokens", 5, "--prompt-batch", 2, "--repetitions", 2,
                          "--seconds", 5, "--json", path, "--plot", picture, *QUICK])
    assert done.code == 0, done.stderr
    rows = json.loads(path.read_text())
    assert [(row["test"], row["batch"], row["depth"]) for row in rows] == [
        ("pp24", 2, 0), ("tg5", 1, 0), ("tg5", 3, 0),
        ("pp24 @ d100", 2, 100), ("tg5 @ d100", 1, 100), ("tg5 @ d100", 3, 100)]
    for row in rows:
        assert set(row) >= KEYS
        assert (row["n_ranks"], row["n_threads"], row["weights"]) == (ranks, 1, "bf16")
        assert 0 < row["bandwidth_fraction"] and 0 < row["peak_fraction"]
        assert 0 <= row["comm_fraction"] < 1 and (ranks == 1 or row["comm_fraction"] > 0)
        assert row["python_fraction"] is None or 0 <= row["python_fraction"] <= 1
        # The time that the fractions come from is the one that the speed comes from
        seconds = row["bytes_per_token"] / row["bandwidth"] / row["bandwidth_fraction"]
        assert seconds == pytest.approx(1 / row["median_ts"])
    by_name = {(row["test"], row["batch"]): row["bytes_per_token"] for row in rows}
    # Together they read the weights once; behind a depth each reads its own cache
    assert by_name["tg5", 3] < by_name["tg5", 1] < by_name["tg5 @ d100", 1]
    assert by_name["tg5 @ d100", 1] - by_name["tg5", 1] == pytest.approx(
        by_name["tg5 @ d100", 3] - by_name["tg5", 3])
    assert picture.read_text().startswith("<?xml") and "tg5" in done.stdout


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["speed"], 2, "invalid choice: 'speed'"),
    (["model", "--batch", "0"], 2, "'0' is not a number of 1 or more"),
    (["model", "--prompt", "0", "--tokens", "0"], 2, "leave nothing to measure"),
    (["model", "--plot", "speed.txt"], 2, "name a file that ends in png, pdf, svg"),
    (["machine", "--json", "/no/such/folder/m.json"], 5, "/no/such/folder/m.json cannot be written"),
    (["machine", "--buffer", "4k"], 2, "'4k' is less than 1MiB"),
    (["model", "--model", "/no/such/model"], 3, "/no/such/model"),
])
def test_an_error_is_one_line(arguments, code, message):
    done = launch(2, ["bench", *arguments])
    assert done.code == code, done.stderr
    assert len(done.errors) == 1 and message in done.errors[0], done.stderr


def test_help_is_printed_once():
    done = launch(2, ["bench", "model", "--help"])
    assert done.code == 0 and done.stdout.count("usage: mpillm bench model") == 1


def test_nothing_is_replaced_that_is_no_file_and_nothing_measured_is_an_error(folder):
    fifo, link, real = folder / "fifo", folder / "link.json", folder / "real.json"
    os.mkfifo(fifo)
    done = launch(1, ["bench", "machine", "--seconds", 0.02, "--json", fifo, *QUICK])
    assert done.code == 5 and "fifo is not a regular file" in done.stderr and stat.S_ISFIFO(fifo.stat().st_mode)
    real.write_text("")
    link.symlink_to(real)
    model = ["bench", "model", "--model", folder / "model", "--weights", "bf16", "--batch", 1, "--prompt", 0,
             "--tokens", 2]
    done = launch(1, [*model, "--depth", 0, "--repetitions", 1, "--json", link, *QUICK])
    assert done.code == 0 and link.is_symlink() and json.loads(real.read_text()), done.stderr
    done = launch(1, [*model, "--depth", 10 ** 12, *QUICK])
    assert done.code == 6 and "no test fits the memory" in done.stderr
