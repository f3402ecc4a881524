"""DeepSeek-V2 and V3 on fresh random checkpoints, computed by transformers now: needs torch (``make test-reference``).

The seed is printed; ``MPILLM_LIVE_SEED`` repeats a run.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from case_list import LATENT_CASES  # noqa: E402
from cases import Case, write_folder  # noqa: E402
from comparing import MODES, check, run_case, same_bits  # noqa: E402
from make_checkpoints import record  # noqa: E402
from recorded import Recorded  # noqa: E402

SEED = int(os.environ.get("MPILLM_LIVE_SEED") or random.randrange(10**9))
TOLERANCE = 5e-5
MLA = (0, 1, 2, 3)


@pytest.fixture(autouse=True)
def say_the_seed():
    print(f"MPILLM_LIVE_SEED={SEED}")


@pytest.fixture(scope="module", params=LATENT_CASES, ids=lambda case: case.name)
def fresh(request, tmp_path_factory):
    """A folder of the case's figures with weights of this run's seed, and what transformers makes of it."""
    case: Case = replace(request.param, name=f"{request.param.name}-{SEED}", lengths=(1, 17, 140))
    folder = write_folder(case, tmp_path_factory.mktemp(request.param.name) / "model")
    found = record(case, folder)
    return folder, [Recorded(found[f"prompt_{i}"].tolist(), found[f"ids_{i}"].tolist(), found[f"logits_{i}"])
                    for i in range(len(case.lengths))]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("mla", MLA)
def test_every_mode_at_every_split(fresh, mla, ranks, tmp_path):
    folder, prompts = fresh
    runs = [run_case(tmp_path, folder, prompts, ranks, mode, "--mla", mla) for mode in MODES[:1 + (ranks > 1)]]
    for outputs in runs:
        check(outputs, prompts, TOLERANCE)
    if len(runs) == 2:
        same_bits(*runs, [f"p{i}" for i in range(len(prompts))])
