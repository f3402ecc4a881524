"""One file of good and bad lines, run once over three ranks: each line by itself, none in the way of another."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
from line_cases import AS_GREEDY, CASES, PROMPT, TOKENS, Fails, line
from program import EXACT, Outputs, run
from tiny_text import write_model

HEALTHY = [{"id": f"healthy {i}", "prompt_token_ids": ids} for i, ids in enumerate((PROMPT, [9], list(range(40, 110))))]
RUN = (*EXACT, "--tp", 3, "--max-tokens", TOKENS)


def healthy(outputs: Outputs) -> dict[str, tuple[list[int], bytes]]:
    return {at["id"]: (outputs.ids(at["id"]), outputs.logits(at["id"]).tobytes()) for at in HEALTHY}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")
    write_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def mixed(folder) -> Outputs:
    """The run of all lines, a healthy one at the beginning, in the middle and at the end; a mark, no last newline."""
    lines = [case.line for case in CASES]
    for place, extra in zip((0, len(lines) // 2, len(lines) + 2), HEALTHY, strict=True):
        lines.insert(place, json.dumps(extra).encode())
    prompts = folder / "mixed.jsonl"
    prompts.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    return run(folder, 3, folder / "model", prompts, *RUN, name="mixed", timeout=300)


@pytest.fixture(scope="module")
def line_of() -> dict[str, int]:
    """The line number of each case."""
    middle = len(CASES) // 2
    return {case.name: i + 2 + (i + 1 >= middle) for i, case in enumerate(CASES)}


def test_every_line_has_one_result(mixed):
    assert [found["line"] for found in mixed.lines] == list(range(1, len(CASES) + len(HEALTHY) + 1))
    assert len({found["id"] for found in mixed.lines}) == len(mixed.lines)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_line(case, mixed, line_of):
    found = mixed.lines[line_of[case.name] - 1]
    if not isinstance(case.expected, Fails):
        assert found["custom_id"] == case.name and found["response"]["status_code"] == 200, found
        case.expected(found["response"]["body"])
        return
    assert 400 <= found["response"]["status_code"] < 500, found
    assert found["custom_id"] == (case.name if case.expected.custom_id else found["custom_id"])
    message = found["error"]["message"]
    assert message == found["response"]["body"]["error"]["message"]
    assert message.startswith(f"line {found['line']}: ") and len(message) < 700 and "\n" not in message
    for word in case.expected.words:
        assert word.casefold() in message.casefold(), (word, message)


@pytest.mark.parametrize("name", AS_GREEDY)
def test_the_sharpest_draws_are_greedy(name, mixed):
    assert mixed.ids(name) == mixed.ids("healthy 0")


def test_healthy_lines_have_the_bits_that_they_have_alone(mixed, folder):
    assert healthy(mixed) == healthy(run(folder, 3, folder / "model", HEALTHY, *RUN, name="alone"))


def test_results_are_strict_json_lines(mixed):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    data = mixed.results.read_bytes()
    for text in data.split(b"\n")[:-1]:
        json.loads(text, parse_constant=refuse)
        assert text.decode().splitlines() == [text.decode()], "a separator that readers split at"
    assert data.endswith(b"\n")


def test_hdf5_tells_the_same_story(mixed):
    with h5py.File(mixed.hdf5) as file:
        requests, sequences = file["requests"][:], file["sequences"][:]
        tokens, logprobs = file["tokens"][:], file["logprobs"][:]
    assert requests["line"].tolist() == [found["line"] for found in mixed.lines]
    for request, found in zip(requests, mixed.lines, strict=True):
        status = found["response"]["status_code"]
        assert request["status"] == (0 if status == 200 else status)
        assert (request["custom_id"].decode() or None) == (found["custom_id"] or None)
        if status != 200:
            assert request["error"].decode() == found["error"]["message"] and request["n_choices"] == 0
            continue
        choices = found["response"]["body"]["choices"]
        assert request["n_choices"] == len(choices)
        for k, choice in enumerate(choices):
            row = sequences[request["first_sequence"] + k]
            span = slice(row["token_start"], row["token_start"] + row["token_count"])
            assert tokens[span].tolist() == choice["token_ids"]
            assert row["finish_reason"].decode() == choice["finish_reason"]
            assert (logprobs[span] <= 0).all() or np.isnan(logprobs[span]).all()


def test_logprobs_are_those_of_the_logits(mixed):
    for name in ("all but one banned", "stop kept"):
        logits = mixed.logits(name).astype(np.float64)
        choice = mixed.body(name)["choices"][0]
        rows = logits[-len(choice["token_ids"]):]
        every = rows - np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)) - rows.max(
            axis=1, keepdims=True)
        own = every[range(len(rows)), choice["token_ids"]]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(own, abs=2e-5)


def test_seeded_draws_repeat_and_unseeded_ones_depend_on_the_run_seed(folder):
    """The same lines over another split, in another order and batch: the same draws."""
    hot = [{"id": f"s{i}", "prompt_token_ids": [5 + i, 6], "temperature": 1.2, "seed": i, "n": 3} for i in range(4)]
    cold = [{"id": "cold", "prompt_token_ids": [5, 6], "temperature": 1.2, "n": 3}]
    options = (*RUN, "--temperature", 1, "--max-tokens", 8)
    first = run(folder, 3, folder / "model", [*cold, *hot], *options, "--seed", 1, name="first")
    other = run(folder, 2, folder / "model", [*cold, *reversed(hot)], *options, "--seed", 2, "--tp", 2,
                "--max-batch", 2, name="other")
    for at in hot:
        draws = [first.ids(at["id"], k) for k in range(3)]
        assert draws == [other.ids(at["id"], k) for k in range(3)]
        assert len({tuple(ids) for ids in draws}) == 3, "three samples of one prompt are three draws"
    assert first.ids("cold") != other.ids("cold")


def test_doubled_ids_are_both_answered(folder):
    lines = folder / "doubled.jsonl"
    lines.write_bytes(b"\n\n".join([line("twin"), line("twin", raw='"top_k": "x"'), b"  \t\r", line("twin")]))
    found = run(folder, 1, folder / "model", lines, *RUN, "--tp", 1, name="doubled").lines
    assert [(r["line"], r["custom_id"], r["response"]["status_code"]) for r in found] == [
        (1, "twin", 200), (3, "twin", 400), (7, "twin", 200)]
