"""The program under mpirun against the logits that transformers recorded.

Every case runs at some rank counts, every rank count with some cases, in both K/V modes where they differ; the
whole product is marked slow. Rows of ranks that share KV heads are wider than one exactly when there are more
ranks than KV heads.
"""

from __future__ import annotations

from math import gcd

import pytest
from case_list import BY_NAME, CASES
from cases import figures, write_folder
from comparing import check, run_case, same_bits
from make_checkpoints import DATA, SAVED
from recorded import load_recorded

RANKS = (1, 2, 3, 4, 5, 8, 9, 13)
CHOSEN = {
    "tiny": (1, 2, 3, 4, 5, 8, 9), "ratio1": (4, 5), "ratio4": (3, 8), "ratio7": (2, 5), "nine": (3, 5, 13),
    "single": (2, 4), "equal13": (5,), "wide28": (8,), "wide_head": (5,), "norms": (3, 9), "norms_bias": (4,),
    "biases": (3, 9), "biases13": (13,), "linear": (2,), "dynamic": (3,), "dynamic5": (1,), "yarn": (2,), "yarn5": (4,),
    "llama3": (5,), "window": (3,), "window_late": (4,), "window_off": (8,),
}


def width(name: str, ranks: int) -> int:
    """Ranks that share a row's KV heads."""
    kv_heads = figures(BY_NAME[name].config)["kv_heads"]
    return 1 if ranks <= kv_heads else ranks // gcd(ranks, kv_heads)


def combinations(names_and_ranks):
    return [pytest.param(name, ranks, id=f"{name}-{ranks}") for name, ranks in names_and_ranks]


def test_the_chosen_runs_cover_every_case_and_rank_count():
    assert CHOSEN.keys() == BY_NAME.keys()
    assert {ranks for chosen in CHOSEN.values() for ranks in chosen} == set(RANKS)


@pytest.mark.parametrize("name, ranks", combinations((name, r) for name in CHOSEN for r in CHOSEN[name]))
def test_logits_and_tokens_are_the_recorded_ones(name, ranks, tmp_path):
    compare(name, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name, ranks", combinations(
    (case.name, r) for case in CASES for r in RANKS if r not in CHOSEN[case.name]))
def test_logits_and_tokens_of_all_other_pairs(name, ranks, tmp_path):
    compare(name, ranks, tmp_path)


def compare(name: str, ranks: int, folder) -> None:
    """Both K/V modes where they differ, and those bit for bit."""
    prompts = load_recorded(name)
    model = write_folder(BY_NAME[name], folder / "model")
    redundant = run_case(folder, model, prompts, ranks, "redundant")
    check(redundant, prompts)
    if width(name, ranks) > 1:
        allgather = run_case(folder, model, prompts, ranks, "allgather")
        check(allgather, prompts)
        same_bits(redundant, allgather, [f"p{i}" for i in range(len(prompts))])


@pytest.mark.parametrize("name", SAVED)
def test_folders_that_transformers_wrote(name, tmp_path):
    prompts = load_recorded(name)
    check(run_case(tmp_path, DATA / f"saved_{name}", prompts, 2), prompts)


@pytest.mark.parametrize("name, ranks", [("tiny", 3), ("dynamic", 1), ("window_late", 2)])
def test_neither_batch_nor_chunks_nor_replicas_change_a_bit(name, ranks, tmp_path):
    prompts = load_recorded(name)
    model = write_folder(BY_NAME[name], tmp_path / "model")
    names = [f"p{i}" for i in range(len(prompts))]
    whole = run_case(tmp_path, model, prompts, ranks, name="whole")
    check(whole, prompts)
    same_bits(whole, run_case(tmp_path, model, prompts, ranks, "redundant", "--prefill-chunk", 3, name="chunks"), names)
    same_bits(whole, run_case(tmp_path, model, prompts, ranks, "redundant", "--max-batch", 1, name="alone"), names)


def test_a_prompt_alone_in_its_file_has_the_bits_of_the_batch(tmp_path):
    prompts = load_recorded("tiny")
    model = write_folder(BY_NAME["tiny"], tmp_path / "model")
    batch = run_case(tmp_path, model, prompts, 2, name="batch")
    alone = run_case(tmp_path, model, prompts[:1], 2, name="alone")
    same_bits(batch, alone, ["p0"])
    replicas = run_case(tmp_path, model, prompts, 2, "redundant", "--tp", 1, name="replicas")
    check(replicas, prompts)
    single = run_case(tmp_path, model, prompts, 1, name="single")
    same_bits(replicas, single, [f"p{i}" for i in range(len(prompts))])
