"""Both ways to split experts over ranks on fresh random checkpoints, computed by transformers now: needs torch.

The seed is printed; ``MPILLM_LIVE_SEED`` repeats a run.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import fresh  # noqa: E402
from case_list import BY_NAME, LATENT_CASES  # noqa: E402
from comparing import check, run_case  # noqa: E402

CASES = [BY_NAME[name] for name in ("experts", "experts_normed", "experts_dense")] + list(LATENT_CASES)


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    """A folder of the case's figures with weights of this run's seed, and what transformers makes of it."""
    fresh.say_the_seed()
    folder = tmp_path_factory.mktemp(request.param.name) / "model"
    return folder, fresh.drawn(request.param, folder, (1, 23))


def runs() -> list:
    """Every case, split and rank count: each pair of the three here, the whole product in ``make test-all``."""
    found = []
    for c, case in enumerate(CASES):
        for r, ranks in enumerate((1, 2, 3, 4, 6)):
            for s, split in enumerate(("columns", "experts")):
                marks = () if (c + r) % 2 == s else pytest.mark.slow
                found.append(pytest.param(case, ranks, split, marks=marks, id=f"{case.name}-{ranks}-{split}"))
    return found


@pytest.mark.parametrize("model, ranks, split", runs(), indirect=["model"])
def test_either_split_gives_the_logits_of_transformers(model, split, ranks, tmp_path):
    folder, prompts = model
    found = run_case(tmp_path, folder, prompts, ranks, "redundant", "--moe-split", split)
    check(found, prompts, 5e-5)
    assert found.layout["moe_split"] == split
