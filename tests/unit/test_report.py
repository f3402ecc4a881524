"""What people see of a run: progress lines, tables, the summary, `mpillm show`, and which command is meant."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from made_parts import FAILED, HEADER, make_request

from mpillm import __version__, cli, main
from mpillm.cli import report
from mpillm.cli.show import show
from mpillm.config import RunConfig
from mpillm.engine import progress
from mpillm.errors import InputError, UsageError
from mpillm.formats.hdf5 import check_output, fold
from mpillm.formats.hdf5_fold import TIMES
from mpillm.formats.parts import RequestsPart, SequenceRecord, requests_path

ROOT = Path(__file__).parents[2]


@pytest.fixture
def said(caplog, monkeypatch):
    """The program's log lines so far."""
    monkeypatch.setattr(logging.getLogger("mpillm"), "propagate", True)     # log.setup of another test turns it off
    caplog.set_level(logging.INFO, "mpillm")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("mpillm")]


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand; standard error is a file."""
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: made.now))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    return made


def test_the_first_step_has_a_line_and_then_one_every_so_often(clock, said):
    shown = progress.RunProgress(4, every=10)
    assert said() == []
    for at, count in ((1, 1), (5, 1), (10.5, 1), (11, 2), (20, 2), (21.5, 3), (31, 3), (31.5, 4)):
        clock.now = 1000 + at
        shown.add(prefilled=5, generated=3, finished=0)
        assert len(said()) == count, at
    shown.close()
    assert all(line.startswith("0 of 4 requests, ") for line in said())


def test_a_line_has_the_rates_since_the_start_and_the_time_left(clock, said):
    shown = progress.RunProgress(6, every=1)
    clock.now += 20
    shown.add(prefilled=100, generated=10, finished=0)
    clock.now += 20
    shown.add(prefilled=0, generated=30, finished=2)
    clock.now += 20
    shown.add(prefilled=20, generated=20, finished=4)
    assert said() == [
        "0 of 6 requests, 0.5 tokens/s generated, 5.0 prefilled",
        "2 of 6 requests, 1.0 tokens/s generated, 2.5 prefilled, about 1:20 left",
        "6 of 6 requests, 1.0 tokens/s generated, 2.0 prefilled"]


@pytest.mark.parametrize("seconds, text", [
    (0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599, "59:59"), (3599.6, "1:00:00"), (90061, "25:01:01")])
def test_the_time_left_reads_like_a_clock(clock, said, seconds, text):
    shown = progress.RunProgress(2, every=1)
    clock.now += seconds
    shown.add(prefilled=1, generated=1, finished=1)
    assert said()[-1].endswith(f", about {text} left")


def test_refused_requests_count_as_finished(clock, said):
    """The loop reports them before its first step; the first line then has them, and no rate is infinite."""
    shown = progress.RunProgress(3, every=10)
    shown.add(prefilled=0, generated=0, finished=2)
    assert said() == ["2 of 3 requests, 0.0 tokens/s generated, 0.0 prefilled, about 0:00 left"]


def test_what_an_earlier_attempt_did_is_counted_but_not_in_the_time_left(clock, said):
    shown = progress.RunProgress(10, every=1, done=6)
    clock.now += 10
    shown.add(prefilled=10, generated=0, finished=0)
    clock.now += 10
    shown.add(prefilled=0, generated=20, finished=2)
    assert said() == ["6 of 10 requests, 0.0 tokens/s generated, 1.0 prefilled",
                      "8 of 10 requests, 1.0 tokens/s generated, 0.5 prefilled, about 0:20 left"]


@pytest.mark.parametrize("columns", ["140", "80"])
def test_on_a_terminal_it_is_a_bar_and_not_lines(columns, monkeypatch, said):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "stderr", Terminal())
    shown = progress.RunProgress(4, every=1e-9)
    shown.add(prefilled=7, generated=1, finished=3)
    shown.close()
    last = sys.stderr.getvalue().splitlines()[-2]
    assert "requests" in last and "t/s" in last
    assert said() == []
    assert "3/4" in last


# Tables


def test_a_table_has_its_title_header_and_rows_aligned():
    text = report.render("ranks", ["rank", "host"], [[1, "a"], [10, "node07"]], left=("host",))
    assert text == "ranks\nrank  host\n   1  a\n  10  node07"


def test_a_long_table_is_cut_in_the_middle():
    for count in (report.SHOWN, report.SHOWN + 1, 5000):
        lines = report.render("many", ["n", "square"], ([i, i * i] for i in range(count))).splitlines()[2:]
        numbers = [line.split()[0] for line in lines]
        if count <= report.SHOWN:
            assert numbers == [str(i) for i in range(count)]
            continue
        half = report.SHOWN // 2
        assert numbers == [*map(str, range(half)), "...", *map(str, range(count - half, count))]
        assert lines[half].split() == ["...", "..."]


def test_cells_are_text_and_not_markup():
    assert "[bold]x[/bold] [1]" in report.render("t", ["text"], [["[bold]x[/bold] [1]"]])


def test_emoji_codes_stay_and_what_a_terminal_acts_on_does_not():
    assert report.render("t", ["text"], [["a :smile: \x1b[2Jé\0"]], left=("text",)) == "t\ntext\na :smile: �[2Jé�"


def test_the_table_of_the_split_has_a_line_a_rank():
    rows = [{"rank": r, "heads": f"{3 * r}-{3 * r + 2}", "kv_heads": str(r), "columns": "0-79", "vocab": "-",
             "weight_bytes": 407_000, "cache_bytes_per_token": 128.0} for r in range(2)]
    places = [{"rank": r, "host": f"node{r}", "cores": f"{r}", "NUMA domain": "0", "threads": 1,
               "memory domain": "0" if r else "", "memory bytes": 3 << 30} for r in range(4)]
    title, header, *lines = report.split_table(rows, places, "ranks of replica 0").splitlines()
    assert title == "ranks of replica 0" and header.split()[:5] == ["rank", "host", "cores", "NUMA", "threads"]
    assert [line.split() for line in lines] == [
        [str(r), f"node{r}", str(r), "0", "1", "3.00", "GiB", *(["of", "0"] if r else []), f"{3 * r}-{3 * r + 2}",
         str(r), "0-79", "-", "397.5", "KiB", "128", "B"]
        for r in range(2)]
    placed = report.place_table(places[2:], "the other ranks").splitlines()
    assert [line.split() for line in placed[2:]] == [
        [r, f"node{r}", r, "0", "1", "3.00", "GiB", "of", "0"] for r in "23"]


def times(*rows: tuple) -> np.ndarray:
    """Sums of the ranks of two replicas of three: rank, then by the names of the columns from ``steps`` on."""
    table = np.zeros(len(rows), TIMES)
    for own, (rank, *values) in zip(table, rows, strict=True):
        own["rank"], own["replica"], own["tp_rank"] = rank, rank // 3, rank % 3
        for name, value in zip(TIMES.names[4:], values, strict=True):
            own[name] = value
    return table


def test_rates_are_those_of_steps_with_and_without_prompt_rows():
    assert report.rates(times((0, 4, 6, 0, 0, 5, 1, 40, 10))) == (8.0, 10.0)
    assert report.rates(times((0, 1, 2, 0, 0, 2, 0, 30, 0))) == (15.0, 0.0)
    assert report.rates(times((0, 0, 0, 0, 0, 0, 0, 0, 0))) == (0.0, 0.0)


def test_the_table_of_times_tells_computing_from_communicating():
    text = report.speed_table(times((3, 2, 4.0, 1.0, 0.35, 0, 0, 0, 0), (4, 0, 0, 0, 0, 0, 0, 0, 0)))
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["3", "2", "4.00", "3.00", "1.00", "0.35", "25", "%"], ["4", "0", "0.00", "0.00", "0.00", "0.00", "0", "%"]]


def summarize(**changes) -> None:
    busy, idle = (2, 3, 1.5, 0, 2, 1, 20, 4), (0, 0, 0, 0, 0, 0, 0, 0)
    follower = (2, 0.002, 0, 0, 0.001, 0.001, 20, 4)     # only roots count, or tokens would count twice
    table = times(*((rank, *row) for rank, row in enumerate((busy, follower, follower, busy, idle, idle))))
    earlier = table.copy()
    table["attempt"] = 1
    summary = {"requests": 7, "failed": 2, "prompt_tokens": 41, "completion_tokens": 12, "logits_clamped": 0,
               "path": "/x/out.h5", "bytes": 3 << 20, "times": np.concatenate([earlier, table])} | changes
    report.summarize(summary, RunConfig("in.jsonl", results="r.jsonl"), 12.34)


def test_the_summary_adds_the_replicas_up(said):
    summarize()
    table, done, where = said()
    assert len(table.splitlines()) == 2 + 6
    assert done == ("done in 12.3 s: 5 request(s) answered, 2 failed; 41 prompt and 12 generated tokens; "
                    "prefill 20.0 tokens/s, decode 8.0 tokens/s")
    assert where == "results: r.jsonl\nHDF5:    in.h5 (3.0 MiB)"


def test_a_run_without_steps_has_a_summary(said):
    summarize(times=times())
    assert "prefill 0.0 tokens/s, decode 0.0 tokens/s" in said()[1]


def test_logits_that_float16_cannot_hold_are_a_warning(said, caplog):
    summarize(logits_clamped=9)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith("9 logits ") and "--logits-type f32" in warning


# mpillm show

LONG = "one  two\nthree " * 20


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> str:
    """An output of 40 lines: one with a long text and no id, two that failed, 37 of random sizes."""
    folder = tmp_path_factory.mktemp("show")
    path = str(folder / "out.h5")
    parts = check_output(path, False)
    random = np.random.default_rng(0)
    with RequestsPart(parts, 0, 0, 1.0) as part:
        for index, line, custom_id, status, error in FAILED:
            part.add(index=index, line=line, custom_id=custom_id, status=status, error=error, replica=-1, tp=0,
                     result={})
        choice = SequenceRecord(0, 0, 0, 7, [1, 2, 3], [-1.0] * 3, LONG, "length", queue_s=0.0, prefill_s=0.1,
                                first_token_s=1.234, decode_s=5.678)
        part.add(index=0, line=2, custom_id=None, replica=0, tp=1, prompts=[[5, 6]], choices=[choice], result={})
        for index in range(2, 40):
            if index != 7:
                part.add(**make_request(random, index, 0))
    header = HEADER | {"model": json.dumps({"hidden": 8, "name": "tiny-model"})}
    fold(path, parts, header, False)
    return path


def test_show_has_a_line_for_each_choice_up_to_the_limit(output, capsys):
    with h5py.File(output) as file:
        total = len(file["sequences"])
    assert show([output]) == 0
    title, header, first, *lines = capsys.readouterr().out.splitlines()
    assert title == f"{output}: 40 requests, {total} choices, model tiny-model"
    assert header.split()[:4] == ["id", "choice", "prompt", "tokens"]
    assert re.split(r"\s{2,}", first) == ["line 2", "0", "2", "3", "length", "1.23", "5.68",
                                          " ".join(LONG.split())[:60] + "..."]
    assert len(lines) == 15 + 1 + 2 and lines[15] == f"... and {total - 16} more"
    assert lines[16:] == ["failed with 400: no prompt␀", "failed with 404: …"]


def test_show_takes_a_width_and_a_number_of_rows(output, capsys):
    assert show([output, "--rows", "1", "--width", "7"]) == 0
    _, _, row, more, failed = capsys.readouterr().out.splitlines()
    assert row.endswith("  one two...") and more.startswith("... and ")
    assert failed == "failed with 400: no prompt␀"
    assert show([output, "--rows", "100000"]) == 0
    out = capsys.readouterr().out
    assert "... and" not in out and "é 39/0" in out


@pytest.mark.parametrize("option", ["--rows", "--width"])
def test_show_refuses_counts_below_nothing(output, option, capsys):
    with pytest.raises(SystemExit) as caught:
        show([output, option, "-1"])
    assert caught.value.code == 2 and option in capsys.readouterr().err


def foreign(folder: Path, kind: str) -> str:
    """A file that is no output of the program."""
    path = folder / f"{kind}.h5"
    if kind == "text":
        path.write_text("hello\n")
    elif kind == "part":
        RequestsPart(str(folder), 0, 0, 1.0).close()
        os.rename(requests_path(str(folder), 0, 0), path)
    elif kind != "missing":
        with h5py.File(path, "w") as file:
            if kind != "bare":
                file.attrs["model"] = "no json" if kind == "no json" else "{}"
                file["requests"], file["sequences"] = (1, 2) if kind == "numbers" else (np.zeros(3), np.zeros(3))
            if kind == "groups":
                del file["requests"], file["sequences"]
                file.create_group("requests"), file.create_group("sequences")
    return str(path)


@pytest.mark.parametrize("kind", ["missing", "text", "bare", "part", "groups", "numbers", "arrays", "no json"])
def test_show_says_so_of_a_file_that_is_no_output(tmp_path, kind):
    path = foreign(tmp_path, kind)
    with pytest.raises(InputError, match=re.escape(path) + " (is not an output of mpillm|does not exist)") as caught:
        show([path])
    assert "\n" not in str(caught.value)


def test_show_of_a_folder_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match=f"^{re.escape(str(tmp_path))} is a folder: give the HDF5 file"):
        show([str(tmp_path)])


# Which command


def test_an_unknown_command_names_the_known_ones(monkeypatch):
    for rank, quiet in (("0", False), ("1", True)):
        monkeypatch.setenv("PMI_RANK", rank)
        with pytest.raises(UsageError, match="no command 'ruin': use one of run, perplexity") as caught:
            cli.command(["ruin", "--prompts", "x"])
        assert caught.value.agreed and caught.value.quiet is quiet


def test_the_version_is_said_once(monkeypatch, capsys):
    for rank, said in (("0", f"mpillm {__version__}\n"), ("1", "")):
        monkeypatch.setenv("PMI_RANK", rank)
        assert cli.command(["--version"]) == 0
        assert capsys.readouterr().out == said


@pytest.mark.parametrize("argv, code", [(["--help"], 0), (["-h"], 0), ([], 2)])
def test_help_is_printed_once(argv, code, monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", "0")
    assert cli.command(argv) == code
    assert capsys.readouterr().out == cli.HELP
    monkeypatch.setenv("PMI_RANK", "3")
    assert cli.command(argv) == code
    assert capsys.readouterr().out == ""


def test_help_names_every_command():
    for name in cli.COMMANDS:
        assert re.search(rf"^  {name} ", cli.HELP, re.M)


def test_help_of_run_starts_no_job(monkeypatch, capsys):
    monkeypatch.setattr("mpillm.collectives.start", lambda: pytest.fail("MPI was started"))
    monkeypatch.setenv("PMI_RANK", "0")
    assert cli.command(["run", "--prompts", "x", "--help"]) == 0
    assert "--kv-memory" in capsys.readouterr().out


@pytest.mark.parametrize("argv, name, rest", [
    (["run", "--tp", "2"], "run", ["--tp", "2"]), (["--tp", "2"], "run", ["--tp", "2"]),
    (["show", "x.h5"], "show", ["x.h5"])])
def test_a_command_gets_what_follows_its_name(argv, name, rest, monkeypatch):
    monkeypatch.setattr("mpillm.cli.run.run", lambda argv: ("run", argv))
    monkeypatch.setattr("mpillm.cli.show.show", lambda argv: ("show", argv))
    assert cli.command(argv) == (name, rest)


@pytest.mark.parametrize("given, meant", [
    (["--prompts", "x"], ["run", "--prompts", "x"]), ([], ["run"]), (["show", "x.h5"], ["show", "x.h5"]),
    (["run", "--tp", "2"], ["run", "--tp", "2"]), (["--help"], ["run", "--help"])])
def test_the_module_is_run_unless_it_names_a_command(given, meant, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main.py", *given])
    monkeypatch.setattr(main, "program", lambda argv: argv)
    assert main.as_module() == meant


def module(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "mpillm.main", *arguments], capture_output=True, text=True,
                          timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_show_as_a_module(output, tmp_path):
    done = module("show", output)
    assert done.returncode == 0 and "model tiny-model" in done.stdout, done.stderr
    refused = module("show", str(tmp_path / "none.h5"))
    assert refused.returncode == InputError.exit_code and refused.stdout == ""
    assert refused.stderr.startswith("mpillm: error: ") and len(refused.stderr.splitlines()) == 1
