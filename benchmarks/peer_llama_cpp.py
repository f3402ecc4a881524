"""llama.cpp's speed through llama-cpp-python's low-level API, as one JSON object on stdout. `peers.py` runs it.

    python benchmarks/peer_llama_cpp.py --model FILE.gguf --threads 2 [--prompt 512] [--tokens 128] [--batch 1,8,32]
    python benchmarks/peer_llama_cpp.py --model FILE.gguf --threads 2 --workload FILE.jsonl [--alone]

As llama-bench does: random tokens, no sampling, a first call of each shape that is not counted.

With --workload the lines of batch.py, greedy: up to 32 sequences in a batch that others join when one ends, steps of
512 prompt tokens, the common beginning computed once and copied to its sequences; with --alone one
line after another by `Llama.generate`, which is under the package's `create_completion`. (That one itself cannot be
held to a number of tokens: it goes on while a character is incomplete.)
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections import deque
from itertools import islice

import llama_cpp as ll
import numpy as np
from workload import Cut, Line, read


class Context:
    """A context for ``sequences`` of ``length`` positions each, and the batch that feeds it."""

    def __init__(self, model: ctypes.c_void_p, sequences: int, length: int, rows: int, threads: int,
                 unified: bool = False) -> None:
        """``unified``: one cache for all sequences, which is quicker where steps mix prompts and single tokens."""
        p = ll.llama_context_default_params()
        p.kv_unified = unified
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

    def copy(self, source: int, target: int) -> None:
        """What ``target`` held goes; it begins with all that ``source`` holds."""
        memory = ll.llama_get_memory(self.context)
        ll.llama_memory_seq_rm(memory, target, -1, -1)
        if source >= 0:
            ll.llama_memory_seq_cp(memory, source, target, -1, -1)

    def likeliest(self, row: int) -> int:
        """The token with the largest logit after a row of the last step."""
        return int(np.ctypeslib.as_array(ll.llama_get_logits_ith(self.context, row), (self.vocab,)).argmax())

    def decode(self, rows: list[tuple[int, int, bool]], tokens: list[int] | None = None) -> None:
        """Run (sequence, position, are its logits wanted) of ``tokens``, or of random ones."""
        b = self.batch
        b.n_tokens = len(rows)
        if tokens is None:
            tokens = self.rng.integers(0, self.vocab, len(rows)).tolist()
        for i, (sequence, position, wanted) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = tokens[i], position, 1, wanted
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


class Running:
    """A line in one of the sequences of a context; ``computed`` positions are in the cache."""

    def __init__(self, line: Line, sequence: int, computed: int) -> None:
        self.tokens, self.sequence, self.computed = list(line.prompt), sequence, computed
        self.whole = len(line.prompt) + line.max_tokens

    def rows(self, budget: int) -> list[tuple[int, int, bool]]:
        stop = min(len(self.tokens), self.computed + budget)
        return [(self.sequence, at, at + 1 == len(self.tokens)) for at in range(self.computed, stop)]


def together(model: ctypes.c_void_p, lines: list[Line], threads: int, seconds: float, most: int = 32,
             chunk: int = 512) -> Cut:
    """The lines in up to ``most`` sequences, each of which takes the next line when its own has ended."""
    length, shared = max(len(line.prompt) + line.max_tokens for line in lines), max(line.shared for line in lines)
    # The last sequence keeps the common beginning
    context = Context(model, most + 1, length, chunk + most, threads, True)
    context.decode([(0, 0, True)])
    context.clear()
    waiting, free, running, cut = deque(lines), list(range(most)), [], Cut(seconds)
    if shared:
        common = next(line.prompt for line in lines if line.shared)[:shared]
        context.decode([(most, at, False) for at in range(shared)], common)
    while (waiting and not cut.over()) or running:
        while waiting and free and not cut.over():
            line, sequence = waiting.popleft(), free.pop()
            context.copy(most if line.shared else -1, sequence)
            running.append(Running(line, sequence, line.shared))
        rows, tokens, budget, ends = [], [], chunk, []
        for one in running:
            own = one.rows(budget if len(one.tokens) - one.computed > 1 else 1)
            budget -= len(own) if len(one.tokens) - one.computed > 1 else 0
            tokens += one.tokens[one.computed:one.computed + len(own)]
            rows += own
            one.computed += len(own)
            if own and own[-1][2]:
                ends.append((one, len(rows) - 1))
        context.decode(rows, tokens)
        for one, row in ends:
            one.tokens.append(context.likeliest(row))
            cut.tokens += 1
            if len(one.tokens) == one.whole:
                cut.lines += 1
                free.append(one.sequence)
                running.remove(one)
    cut.end()
    context.close()
    return cut


def one_by_one(path: str, lines: list[Line], threads: int, seconds: float) -> Cut:
    """Each line by a call of `Llama.generate`, greedily; it takes over what the line before has in common with it."""
    most = max(len(line.prompt) + line.max_tokens for line in lines)
    model = ll.Llama(path, n_ctx=most + 1, n_threads=threads, n_threads_batch=threads, verbose=False)
    next(model.generate(lines[0].prompt, temp=0.0))
    model.reset()
    cut = Cut(seconds)
    for line in lines:
        if cut.over():
            break
        cut.tokens += sum(1 for _ in islice(model.generate(line.prompt, temp=0.0), line.max_tokens))
        cut.lines += 1
    cut.end()
    model.close()
    return cut


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--seconds", type=float, default=60.0, help="after which a decode test is cut")
    parser.add_argument("--workload", help="lines of batch.py, instead of the tests; cut after --seconds")
    parser.add_argument("--alone", action="store_true", help="with --workload: one line after another")
    given = parser.parse_args()
    quiet = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_log_set(quiet, ctypes.c_void_p(0))
    ll.llama_backend_init()
    info = ll.llama_print_system_info().decode().strip(" |")
    told = {"version": f"llama-cpp-python {ll.__version__}", "info": info}
    if given.alone:
        cut = one_by_one(given.model, read(given.workload), given.threads, given.seconds)
        print(json.dumps({**told, **cut.row()}))
        return
    model = ll.llama_model_load_from_file(given.model.encode(), ll.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {given.model}")
    if given.workload:
        cut = together(model, read(given.workload), given.threads, given.seconds)
        print(json.dumps({**told, **cut.row()}))
        return
    rows = [{"test": f"pp{given.prompt}", "batch": 1, "ts": prefill(model, given.prompt, given.threads)}]
    for batch in map(int, given.batch.split(",")):
        rows.append({"test": f"tg{given.tokens}", "batch": batch,
                     "ts": generate(model, batch, given.tokens, given.threads, given.seconds)})
    print(json.dumps({**told, "rows": rows}))


if __name__ == "__main__":
    main()
