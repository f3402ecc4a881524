"""The program under mpirun against the logits that transformers recorded.

Every case runs at some rank counts, every rank count with some cases, in one or both K/V modes where these differ;
the whole product is marked slow.
"""

from __future__ import annotations

from math import gcd

import pytest
from case_list import BY_NAME, CASES
from cases import figures, write_folder
from comparing import check, run_case, same_bits
from make_checkpoints import DATA, SAVED
from recorded import load_recorded

RANKS = (1, 2, 3, 4, 5, 6, 8, 9, 13)
ALL = ("redundant", "allgather", "sharded")
BOTH, OWN, GIVEN, CUT = ("redundant", "allgather"), ("redundant",), ("allgather",), ("sharded",)
# Who runs in `make test`: the modes by case and rank count. A start of a rank takes seconds, so they are few.
CHOSEN = {
    "tiny": {1: OWN, 2: OWN, 3: BOTH, 4: CUT, 8: GIVEN, 9: CUT},
    "ratio1": {5: OWN}, "ratio4": {3: GIVEN}, "ratio7": {2: OWN}, "nine": {5: ALL}, "single": {2: CUT},
    "equal13": {3: OWN}, "wide28": {5: GIVEN}, "wide_head": {3: OWN}, "norms": {3: CUT}, "norms_bias": {4: GIVEN},
    "biases": {3: BOTH, 13: GIVEN}, "biases13": {5: OWN}, "linear": {1: OWN}, "dynamic": {2: OWN}, "dynamic5": {1: OWN},
    "yarn": {2: OWN}, "yarn5": {1: OWN}, "llama3": {2: OWN}, "window": {3: CUT}, "window_late": {1: OWN},
    "window_off": {1: OWN}, "experts": {1: OWN, 3: BOTH, 6: CUT}, "experts_normed": {2: OWN, 4: GIVEN},
    "experts_dense": {3: GIVEN},
}


def width(name: str, ranks: int) -> int:
    """Ranks that share a row's KV heads."""
    kv_heads = figures(BY_NAME[name].config)["kv_heads"]
    return 1 if ranks <= kv_heads else ranks // gcd(ranks, kv_heads)


def modes_of(name: str, ranks: int) -> tuple[str, ...]:
    """The modes that differ there."""
    return ALL if width(name, ranks) > 1 else OWN


def every_other() -> list:
    """All (case, ranks, modes) that are not in CHOSEN."""
    return [(case.name, ranks, modes_of(case.name, ranks)) for case in CASES for ranks in RANKS
            if CHOSEN[case.name].get(ranks) != modes_of(case.name, ranks)]


def named(runs) -> list:
    return [pytest.param(*run, id=f"{run[0]}-{run[1]}-{'-'.join(run[2])}") for run in runs]


def test_the_chosen_runs_cover_every_case_rank_count_and_mode():
    assert CHOSEN.keys() == BY_NAME.keys()
    assert {ranks for chosen in CHOSEN.values() for ranks in chosen} == set(RANKS)
    for name, chosen in CHOSEN.items():
        assert all(set(modes) <= set(modes_of(name, ranks)) for ranks, modes in chosen.items()), name
    heads = {name: BY_NAME[name].config["num_attention_heads"] for name in CHOSEN}
    assert any(ranks > heads[name] for name, chosen in CHOSEN.items() for ranks in chosen)


@pytest.mark.parametrize("name, ranks, modes", named(
    (name, ranks, modes) for name, chosen in CHOSEN.items() for ranks, modes in chosen.items()))
def test_logits_and_tokens_are_the_recorded_ones(name, ranks, modes, tmp_path):
    compare(name, ranks, modes, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name, ranks, modes", named(every_other()))
def test_logits_and_tokens_of_all_other_runs(name, ranks, modes, tmp_path):
    compare(name, ranks, modes, tmp_path)


@pytest.mark.parametrize("name, ranks", [
    pytest.param("experts", 1, marks=pytest.mark.slow), pytest.param("experts", 2, marks=pytest.mark.slow),
    ("experts", 3), ("experts", 6), ("experts_normed", 4), pytest.param("experts_dense", 3, marks=pytest.mark.slow)])
def test_whole_experts_on_each_rank(name, ranks, tmp_path):
    """Five experts on six ranks leave one without; the bits of a row do not depend on the chunks."""
    prompts, model = load_recorded(name), write_folder(BY_NAME[name], tmp_path / "model")
    whole = run_case(tmp_path, model, prompts, ranks, "redundant", "--moe-split", "experts")
    check(whole, prompts)
    assert whole.layout["moe_split"] == "experts"
    chunks = run_case(tmp_path, model, prompts, ranks, "redundant", "--moe-split", "experts", "--prefill-chunk", 3,
                      name="chunks")
    same_bits(whole, chunks, [f"p{i}" for i in range(len(prompts))])


def compare(name: str, ranks: int, modes: tuple[str, ...], folder) -> None:
    """Each mode against the recorded; those whose sums are in one order bit for bit."""
    prompts = load_recorded(name)
    model = write_folder(BY_NAME[name], folder / "model")
    found = [run_case(folder, model, prompts, ranks, mode) for mode in modes]
    for outputs in found:
        check(outputs, prompts)
    if BOTH == modes[:2]:
        same_bits(*found[:2], [f"p{i}" for i in range(len(prompts))])


@pytest.mark.parametrize("name", SAVED)
def test_folders_that_transformers_wrote(name, tmp_path):
    prompts = load_recorded(name)
    check(run_case(tmp_path, DATA / f"saved_{name}", prompts, 2), prompts)


@pytest.mark.parametrize("name, ranks", [
    ("tiny", 3), ("dynamic", 1), pytest.param("window_late", 2, marks=pytest.mark.slow), ("experts", 2)])
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
