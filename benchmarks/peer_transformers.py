"""transformers' speed on the CPU, as one JSON object on stdout. `peers.py` runs it, in an interpreter that has torch.

    python benchmarks/peer_transformers.py --model FOLDER --threads 2 --dtype bfloat16 [--batch 1,8,32]

Random tokens, the model's own forward pass with its cache, greedy choice by argmax.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings

import torch
import transformers


def prefill(model: torch.nn.Module, ids: torch.Tensor) -> float:
    model(ids, use_cache=True, logits_to_keep=1)
    began = time.perf_counter()
    model(ids, use_cache=True, logits_to_keep=1)
    return ids.numel() / (time.perf_counter() - began)


def generate(model: torch.nn.Module, ids: torch.Tensor, tokens: int, limit: float) -> float:
    """``ids`` [batch, 1]: the first token of each sequence, whose step is not counted."""
    cache = transformers.DynamicCache()
    step = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    began, done = time.perf_counter(), 0
    while done < tokens and (done < 4 or time.perf_counter() - began < limit):
        step = model(step, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        done += 1
    return len(ids) * done / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which a decode test is cut")
    given = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)      # releases differ in what the cache's argument is called
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=getattr(torch, given.dtype)).eval()
    vocab = model.config.vocab_size
    with torch.inference_mode():
        rows = [{"test": f"pp{given.prompt}", "batch": 1,
                 "ts": prefill(model, torch.randint(0, vocab, (1, given.prompt)))}]
        for batch in map(int, given.batch.split(",")):
            rows.append({"test": f"tg{given.tokens}", "batch": batch, "ts": generate(
                model, torch.randint(0, vocab, (batch, 1)), given.tokens, given.seconds)})
    print(json.dumps({"version": f"transformers {transformers.__version__}, torch {torch.__version__}",
                      "info": torch.backends.cpu.get_cpu_capability(), "rows": rows}))


if __name__ == "__main__":
    main()
