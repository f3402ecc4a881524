"""Record what transformers computes for a text: the sliding windows of its documentation, float32, eager attention.

    pip install torch transformers numpy tokenizers
    python tests/reference/make_perplexity.py        # writes data/perplexity.json

The model is the tiny Llama of ``tests/cli/tiny_text.py``, whose weights are hashes; the text is ``TEXT``.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path

from make_checkpoints import DATA, load_model

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

RECORDED = DATA / "perplexity.json"
TEXT = "".join(f"{i}. The test seen in the hot sun is that of {i * i} tests; naïve, and \tdone.\n\n"
               for i in range(1, 14))
WINDOWS = ((64, 32), (100, 7), (512, 256), (9, 8))        # (window, stride)


def documented(model, ids: list[int], window: int, stride: int) -> list[float]:
    """-log p in nats of every token but the first, by the loop of transformers' page on perplexity."""
    import torch

    found: list[float] = []
    previous = 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        logits = model(input_ids=torch.tensor([ids[begin:end]])).logits[0].double()
        scores = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[begin + 1:end])[:, None])[:, 0]
        found += (-scores[max(previous, 1) - begin - 1:]).tolist()
        previous = end
        if end == len(ids):
            break
    return found


def record(folder: Path, text: str, window: int, stride: int) -> dict[str, float]:
    """The mean -log p of a text, its standard error, and how many tokens were scored."""
    from tiny_text import tokenizer

    found = documented(load_model(folder), tokenizer().encode(text).ids, window, stride)
    mean = math.fsum(found) / len(found)
    spread = math.fsum((value - mean) ** 2 for value in found) / (len(found) - 1)
    return {"tokens": len(found), "nll_mean": mean, "nll_stderr": math.sqrt(spread / len(found))}


def main() -> None:
    import torch
    import transformers
    from tiny_text import write_model

    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch) / "model")
        found = [{"window": w, "stride": s, **record(folder, TEXT, w, s)} for w, s in WINDOWS]
    RECORDED.write_text(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__,
                                    "figures": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
