"""Options: sizes, files, conflicts; each mistake is one line that names the value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpillm import config
from mpillm.cli import options
from mpillm.errors import UsageError


@pytest.mark.parametrize("text, size", [("1000000", 10**6), ("4GiB", 4 << 30), ("4g", 4 << 30), ("1.5M", 3 << 19),
                                        ("512 MiB", 512 << 20), (77, 77), ("2TB", 2 << 40), ("0", 0)])
def test_sizes(text, size):
    assert config.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "4PiB", "4 G B", "1e9", "nan"])
def test_sizes_that_are_none(text):
    with pytest.raises(UsageError, match="not a number of bytes"):
        config.parse_size(text)


@given(st.integers(0, 2**50))
def test_a_formatted_size_reads_back_within_its_digits(size):
    assert config.parse_size(config.format_size(size)) == pytest.approx(size, rel=0.06, abs=1)


@pytest.mark.parametrize("text, seconds", [("5400", 5400), ("90:00", 5400), ("1:30:00", 5400), ("2-12:00:00", 216000),
                                           ("36h", 129600), ("100:30", 6030), ("0:59", 59), ("48:00:00", 172800)])
def test_durations(text, seconds):
    assert config.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["1:99:00", "1:60", "1:00:60", "1-24:00:00", "1-1:60:00"])
def test_parts_of_a_duration_stay_below_the_next(text):
    with pytest.raises(UsageError, match=f"time '{text}': minutes and seconds"):
        config.parse_duration(text)


def test_defaults_and_names_beside_the_prompts():
    run = options.parse(["--prompts", "a/in.jsonl"])
    assert (run.output_path, run.results_path) == ("a/in.h5", "a/in.results.jsonl")
    assert run.weights == "auto" and run.kv_type == "bf16" and run.kv_mode == "redundant" and run.tp is None
    assert options.parse(["--prompts", ".jsonl"]).output_path == ".jsonl.h5"


@pytest.mark.parametrize("argv, said", [
    ([], "--prompts FILE is missing"),
    (["--prompts", "a.jsonl", "--max-batch", "0"], "--max-batch 0 must be at least 1"),
    (["--prompts", "a.jsonl", "--tp", "-3"], "--tp -3"),
    (["--prompts", "a.jsonl", "--layout", "4x0"], "--layout 4x0 is neither auto nor replicas x ranks"),
    (["--prompts", "a.jsonl", "--layout", "2x4", "--tp", "2"], "--tp 2 and --layout 2x4 name different ranks"),
    (["--prompts", "a.jsonl", "--kv-type", "int4"], "invalid choice: 'int4'"),
    (["--prompts", "a.jsonl", "--kv-memory", "much"], "not a number of bytes"),
    (["--prompts", "a.jsonl", "--kv-memory", "0"], "--kv-memory 0 must be at least 1"),
    (["--prompts", "a.jsonl", "--nonsense"], "unrecognized arguments: --nonsense"),
    (["--prompts", "a.jsonl", "--kv-memory", "9" * 400], "more than any machine has"),
    (["--prompts", "a.jsonl", "--config", "/no/such.toml"], "/no/such.toml"),
    (["--prompts", "a.jsonl", "--stop-token-ids", "1,x"], "--stop-token-ids"),
])
def test_mistakes_are_named(argv, said):
    with pytest.raises(UsageError) as caught:
        options.parse(argv)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_gives_options_and_the_command_line_wins(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('prompts = "in.jsonl"\nmax-batch = 4\ntemperature = 0\nstop = ["A", "B"]\n'
                    'kv-memory = "1MiB"\nstop-token-ids = [3]\npin = false\n')
    run = options.parse(["--config", str(path), "--max-batch", "9", "--stop", "C"])
    assert run.prompts == "in.jsonl" and run.max_batch == 9 and run.temperature == 0.0
    assert run.stop == ("C",) and run.stop_token_ids == (3,) and run.kv_memory == 1 << 20 and run.pin is False


@pytest.mark.parametrize("text, said", [
    ("prompts = 3", "prompts must be of type str"), ("nonsense = 1", "'nonsense' (mpillm run --help lists"),
    ("mx-batch = 1", "unknown option 'mx-batch' (did you mean 'max-batch'?)"),
    ("max-batch = true", "max-batch must be of type int"), ("max-batch = 2.5", "max-batch must be of type int"),
    ("stop = 'x'", "stop must be a list of str"), ("stop-token-ids = ['x']", "must be a list of int"),
    ("kv-type = 'int4'", "--kv-type 'int4' is not one of"),
    ("a = [", "run.toml is not a TOML file"), ("pin = 'no'", "of type bool"),
])
def test_mistakes_in_the_file_are_named(tmp_path, text, said):
    path = tmp_path / "run.toml"
    path.write_text(text + "\n")
    with pytest.raises(UsageError) as caught:
        options.parse(["--config", str(path), *(["--prompts", "p.jsonl"] if "prompts" not in text else [])])
    assert said in str(caught.value)


def test_every_option_is_on_the_command_line_and_in_the_file():
    actions = {action.dest for action in options.parser()._actions} - {"help", "config"}
    assert actions == set(config.RunConfig.__dataclass_fields__)


@pytest.mark.parametrize("argv, said", [
    (["--wire", "q4_0"], "invalid choice"), (["--exchange-timeout", "0"], "--exchange-timeout 0 must be above 0"),
    (["--collectives", "mpi", "--wire", "bf16"], "--wire bf16 needs --collectives shm")])
def test_exchanges_that_cannot_be(argv, said, capsys):
    with pytest.raises((UsageError, SystemExit)) as caught:
        options.parse(["--prompts", "a.jsonl", *argv])
    assert said in str(caught.value) + capsys.readouterr().err


def test_the_former_name_of_sums_in_rank_order():
    assert options.parse(["--prompts", "a.jsonl", "--collectives", "ordered"]).collectives == "shm"
    assert config.resolve({"collectives": "ordered"}, {"prompts": "a.jsonl"}).collectives == "shm"
