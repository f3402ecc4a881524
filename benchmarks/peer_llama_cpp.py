"""llama.cpp's speed through llama-cpp-python's low-level API, as one JSON object on stdout. `peers.py` runs it.

    python benchmarks/peer_llama_cpp.py --model FILE.gguf --threads 2 [--prompt 512] [--tokens 128] [--batch 1,8,32]

As llama-bench does: random tokens, no sampling, a first call of each shape that is not counted.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time

import llama_cpp as ll
import numpy as np


class Context:
    """A context for ``sequences`` of ``length`` positions each, and the batch that feeds it."""

    def __init__(self, model: ctypes.c_void_p, sequences: int, length: int, rows: int, threads: int) -> None:
        p = ll.llama_context_default_params()
        p.n_ctx, p.n_seq_max = sequences * (-(-length // 256) * 256), sequences
        p.n_batch, p.n_ubatch = max(rows, sequences), 512
        p.n_threads = p.n_threads_batch = threads
        self.context = ll.llama_init_from_model(model, p)
        if not self.context:
            raise SystemExit(f"llama.cpp refused a context of {sequences} x {length} positions")
        self.batch = ll.llama_batch_init(max(rows, sequences), 0, 1)
        self.vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
        self.rng = np.random.default_rng(0)

    def clear(self) -> None:
        ll.llama_memory_clear(ll.llama_get_memory(self.context), True)

    def decode(self, rows: list[tuple[int, int, bool]]) -> None:
        """Run (sequence, position, are its logits wanted) of random tokens."""
        b = self.batch
        b.n_tokens = len(rows)
        tokens = self.rng.integers(0, self.vocab, len(rows))
        for i, (sequence, position, wanted) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = int(tokens[i]), position, 1, wanted
            b.seq_id[i][0] = sequence
        status = ll.llama_decode(self.context, b)
        if status:
            raise SystemExit(f"llama_decode failed with {status}")
        ll.llama_synchronize(self.context)

    def close(self) -> None:
        ll.llama_batch_free(self.batch)
        ll.llama_free(self.context)


def prefill(model: ctypes.c_void_p, prompt: int, threads: int) -> float:
    context = Context(model, 1, prompt, prompt, threads)
    rows = [(0, position, position == prompt - 1) for position in range(prompt)]
    context.decode(rows)
    context.clear()
    began = time.perf_counter()
    context.decode(rows)
    seconds = time.perf_counter() - began
    context.close()
    return prompt / seconds


def generate(model: ctypes.c_void_p, batch: int, tokens: int, threads: int, limit: float) -> float:
    context = Context(model, batch, tokens + 1, batch, threads)
    context.decode([(sequence, 0, True) for sequence in range(batch)])
    began, done = time.perf_counter(), 0
    while done < tokens and (done < 4 or time.perf_counter() - began < limit):
        done += 1
        context.decode([(sequence, done, True) for sequence in range(batch)])
    seconds = time.perf_counter() - began
    context.close()
    return batch * done / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which a decode test is cut")
    given = parser.parse_args()
    quiet = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_log_set(quiet, ctypes.c_void_p(0))
    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(given.model.encode(), ll.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {given.model}")
    rows = [{"test": f"pp{given.prompt}", "batch": 1, "ts": prefill(model, given.prompt, given.threads)}]
    for batch in map(int, given.batch.split(",")):
        rows.append({"test": f"tg{given.tokens}", "batch": batch,
                     "ts": generate(model, batch, given.tokens, given.threads, given.seconds)})
    info = ll.llama_print_system_info().decode().strip(" |")
    print(json.dumps({"version": f"llama-cpp-python {ll.__version__}", "info": info, "rows": rows}))


if __name__ == "__main__":
    main()
