"""Both ways to split experts over ranks on fresh random checkpoints, computed by transformers now: needs torch.

The seed is printed; ``MPILLM_LIVE_SEED`` repeats a run.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from case_list import BY_NAME, LATENT_CASES  # noqa: E402
from cases import write_folder  # noqa: E402
from comparing import check, run_case  # noqa: E402
from make_checkpoints import record  # noqa: E402
from recorded import Recorded  # noqa: E402

SEED = int(os.environ.get("MPILLM_LIVE_SEED") or random.randrange(10**9))
CASES = [BY_NAME[name] for name in ("experts", "experts_normed", "experts_dense")] + list(LATENT_CASES)


@pytest.fixture(scope="module")
def fresh(request, tmp_path_factory):
    """A folder of the case's figures with weights of this run's seed, and what transformers makes of it."""
    print(f"MPILLM_LIVE_SEED={SEED}")
    case = replace(request.param, name=f"{request.param.name}-{SEED}", lengths=(1, 23))
    folder = write_folder(case, tmp_path_factory.mktemp(request.param.name) / "model")
    found = record(case, folder)
    return folder, [Recorded(found[f"prompt_{i}"].tolist(), found[f"ids_{i}"].tolist(), found[f"logits_{i}"])
                    for i in range(len(case.lengths))]


def runs() -> list:
    """Every case, split and rank count: each pair of the three here, the whole product in ``make test-all``."""
    found = []
    for c, case in enumerate(CASES):
        for r, ranks in enumerate((1, 2, 3, 4, 6)):
            for s, split in enumerate(("columns", "experts")):
                marks = () if (c + r) % 2 == s else pytest.mark.slow
                found.append(pytest.param(case, ranks, split, marks=marks, id=f"{case.name}-{ranks}-{split}"))
    return found


@pytest.mark.parametrize("fresh, ranks, split", runs(), indirect=["fresh"])
def test_either_split_gives_the_logits_of_transformers(fresh, split, ranks, tmp_path):
    folder, prompts = fresh
    found = run_case(tmp_path, folder, prompts, ranks, "redundant", "--moe-split", split)
    check(found, prompts, 5e-5)
    assert found.layout["moe_split"] == split
