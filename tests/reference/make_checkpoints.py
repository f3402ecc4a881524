"""Record what transformers computes for the cases of ``case_list.py`` (float32, eager attention).

    pip install torch transformers numpy
    python tests/reference/make_checkpoints.py              # all cases into tests/reference/data
    python tests/reference/make_checkpoints.py dynamic yarn # some

Writes ``data/CASE.npz``: for each prompt i ``prompt_i`` int64 [L], ``ids_i`` int64 [12] (greedy tokens) and
``logits_i`` float32 [L + 11, 307], row p being the logits after position p: the whole prompt in one step, then
one token a step. ``data/recorded.json`` has the checksum of each case's weights and the versions. Two cases are
also kept as the folders that ``save_pretrained`` writes (``data/saved_*``), for the spelling of config.json, names
and shards that a user's files have. Nothing here is random: the weights are hashes of their names.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from case_list import CASES, LATENT_CASES
from cases import DECODE, Case, checksum, prompts, write_folder

DATA = Path(__file__).with_name("data")
SAVED = {"tiny": "10GB", "norms": "150KB"}   # case: largest shard
MARGIN = 1e-3          # least lead of a greedy token, in parts of the largest logit: no comparison hangs on rounding


def load_model(folder: Path):
    """The folder as transformers reads it; a new object has no state of earlier prompts (dynamic scaling)."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_grad_enabled(False)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def run(model, prompt: list[int], n: int) -> tuple[list[int], np.ndarray, float]:
    """Greedy tokens, logits [len(prompt) + n - 1, vocab], and the least lead of a token over the next."""
    import torch

    cache, ids, rows, feed = None, [], [], [prompt]
    for _ in range(n):
        out = model(input_ids=torch.tensor(feed), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0].float().numpy())
        ids.append(int(rows[-1][-1].argmax()))
        feed = [[ids[-1]]]
    logits = np.concatenate(rows)
    two = np.sort(logits[len(prompt) - 1:], axis=1)[:, -2:]
    return ids, logits, float((two[:, 1] - two[:, 0]).min() / np.abs(logits).max())


def record(case: Case, folder: Path) -> dict[str, np.ndarray]:
    """Prompts with clear greedy tokens, their tokens and logits."""
    found: dict[str, np.ndarray] = {}
    for i in range(len(case.lengths)):
        for salt in range(50):
            prompt = list(prompts(case, salt))[i]
            ids, logits, lead = run(load_model(folder) if "dynamic" in case.name else load_once(folder), prompt, DECODE)
            if lead > MARGIN:
                break
        else:
            raise SystemExit(f"{case.name}: no prompt of length {len(prompt)} with clear greedy tokens")
        found |= {f"prompt_{i}": np.array(prompt), f"ids_{i}": np.array(ids), f"logits_{i}": logits}
    return found


def load_once(folder: Path, _models: dict = {}):  # noqa: B006 - one model for all prompts of a folder
    if folder not in _models:
        _models.clear()
        _models[folder] = load_model(folder)
    return _models[folder]


def main(names: list[str]) -> None:
    import torch
    import transformers

    table = DATA / "recorded.json"
    recorded = json.loads(table.read_text()) if table.exists() else {}
    for case in [*CASES, *LATENT_CASES]:
        if names and case.name not in names:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = write_folder(case, Path(scratch) / case.name)
            found = record(case, folder)
            if case.name in SAVED:
                load_model(folder).to(torch.bfloat16 if case.dtype == "BF16" else torch.float32).save_pretrained(
                    DATA / f"saved_{case.name}", max_shard_size=SAVED[case.name])
                for path in (DATA / f"saved_{case.name}").iterdir():
                    path.chmod(0o644)
        np.savez_compressed(DATA / f"{case.name}.npz", **found)
        recorded[case.name] = {"weights_sha256": checksum(case), "torch": torch.__version__,
                               "transformers": transformers.__version__}
        table.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
        print(case.name, "recorded", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
