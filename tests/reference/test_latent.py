"""DeepSeek-V2 and V3 under mpirun against the logits that transformers recorded, in every --mla and --kv-mode.

Some runs of each mode and rank count; the whole product is marked slow.
"""

from __future__ import annotations

import json

import pytest
from case_list import LATENT_CASES
from cases import checksum, write_folder
from comparing import check, run_case, same_bits
from make_checkpoints import DATA
from program import REPOSITORY, launch, write_lines
from recorded import load_recorded

BY_NAME = {case.name: case for case in LATENT_CASES}
RANKS, MLA = (1, 2, 3, 4, 6), ("0", "1", "2", "3", "auto")
TOLERANCE, MODES = 5e-5, ("redundant", "allgather")
CHOSEN = [("latent_v3", 1, "auto"), ("latent_v3", 3, "2"), ("latent_v2", 2, "3"), ("latent_v2", 4, "0"),
          ("latent_yarn", 6, "1"), ("latent_v2_yarn", 1, "0"), ("latent_v2_yarn", 4, "3")]


@pytest.mark.parametrize("case", LATENT_CASES, ids=lambda case: case.name)
def test_weights_are_those_that_were_recorded(case):
    recorded = json.loads((DATA / "recorded.json").read_text())
    assert checksum(case) == recorded[case.name]["weights_sha256"]


@pytest.mark.parametrize("name, ranks, mla", CHOSEN)
def test_logits_and_tokens_are_the_recorded_ones(name, ranks, mla, tmp_path):
    compare(name, ranks, mla, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name, ranks, mla", [(name, ranks, mla) for name in BY_NAME for ranks in RANKS for mla in MLA
                                              if (name, ranks, mla) not in CHOSEN])
def test_logits_and_tokens_of_all_other_runs(name, ranks, mla, tmp_path):
    compare(name, ranks, mla, tmp_path)


def compare(name: str, ranks: int, mla: str, folder) -> None:
    """Each --kv-mode against the recorded, and both bit for bit."""
    prompts = load_recorded(name)
    model = write_folder(BY_NAME[name], folder / "model")
    found = [run_case(folder, model, prompts, ranks, mode, "--mla", mla) for mode in MODES[:1 + (ranks > 1)]]
    for outputs in found:
        check(outputs, prompts, TOLERANCE)
    if len(found) == 2:
        same_bits(*found, [f"p{i}" for i in range(len(prompts))])


def test_a_mode_of_latent_attention_on_another_model_is_one_line(tmp_path):
    folder = REPOSITORY / "tests" / "reference" / "data" / "saved_tiny"
    lines = write_lines(tmp_path / "in.jsonl", [{"prompt_token_ids": [1, 2], "max_tokens": 1}])
    ended = launch(2, ["--model", folder, "--prompts", lines, "--mla", 2])
    assert ended.code == 2 and len(ended.errors) == 1, ended.stderr
    assert "--mla 2 is for models with latent attention" in ended.errors[0]
