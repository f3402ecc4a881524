"""transformers' speed on the CPU, as one JSON object on stdout. `peers.py` runs it, in an interpreter that has torch.

    python benchmarks/peer_transformers.py --model FOLDER --threads 2 --dtype bfloat16 [--batch 1,8,32]
    python benchmarks/peer_transformers.py --model FOLDER --threads 2 --dtype bfloat16 --workload FILE.jsonl

Random tokens, the model's own forward pass with its cache, greedy choice by argmax.

With --workload the lines of batch.py by `generate`: 32 at a time, of about equal length, padded on the left; a batch
goes on until its longest text is done. What others of the batch generate beyond their own end is not counted.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings

import torch
import transformers
from workload import Cut, Line, groups, read


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


def batches(model: torch.nn.Module, lines: list[Line], seconds: float, size: int = 32) -> Cut:
    """The lines in groups of ``size``, each as long as its longest."""
    model.generate(torch.tensor([lines[0].prompt]), max_new_tokens=2, do_sample=False, pad_token_id=0)
    cut = Cut(seconds)
    for group in groups(lines, size):
        if cut.over():
            break
        longest, new = max(len(line.prompt) for line in group), max(line.max_tokens for line in group)
        ids, mask = torch.zeros(2, len(group), longest, dtype=torch.long)
        for i, line in enumerate(group):
            ids[i, longest - len(line.prompt):] = torch.tensor(line.prompt)
            mask[i, longest - len(line.prompt):] = 1
        model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False,
                       pad_token_id=0)
        cut.tokens += sum(line.max_tokens for line in group)
        cut.lines += len(group)
    cut.end()
    return cut


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which a decode test is cut")
    parser.add_argument("--workload", help="lines of batch.py, instead of the tests; cut after --seconds")
    given = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)      # releases differ in what the cache's argument is called
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=getattr(torch, given.dtype)).eval()
    vocab = model.config.vocab_size
    told = {"version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "info": torch.backends.cpu.get_cpu_capability()}
    if given.workload:
        print(json.dumps({**told, **batches(model, read(given.workload), given.seconds).row()}))
        return
    with torch.inference_mode():
        rows = [{"test": f"pp{given.prompt}", "batch": 1,
                 "ts": prefill(model, torch.randint(0, vocab, (1, given.prompt)))}]
        for batch in map(int, given.batch.split(",")):
            rows.append({"test": f"tg{given.tokens}", "batch": batch, "ts": generate(
                model, torch.randint(0, vocab, (batch, 1)), given.tokens, given.seconds)})
    print(json.dumps({**told, "rows": rows}))


if __name__ == "__main__":
    main()
