"""Prefill and decode speed of the demo model at 1 and 2 ranks, and both KV modes beyond the KV heads.

    python benchmarks/baseline.py [--model PATH] [--prompt 512] [--tokens 64] [--rounds 3]

Runs the main job itself, interleaved over ``--rounds``, and takes medians of the steps in the HDF5 outputs. The
last column is the share of this machine's read bandwidth that a decode step's weight bytes come to.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np

CASES = [  # ranks, KV mode, batch
    (1, "redundant", 1), (2, "redundant", 1), (1, "redundant", 8), (2, "redundant", 8),
    (4, "redundant", 1), (4, "allgather", 1),
]


def read_bandwidth(threads: int, seconds: float = 1.0) -> float:
    """GB/s that ``threads`` threads read from a buffer larger than the caches: the best of repeated sums."""
    parts = [np.ones(128 << 20, np.uint8).view(np.int64) for _ in range(threads)]
    best, end = 0.0, time.perf_counter() + seconds
    with ThreadPoolExecutor(threads) as pool:
        while time.perf_counter() < end:
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, sum(p.nbytes for p in parts) / (time.perf_counter() - began) / 1e9)
    return best


def measure(folder: str, ranks: int, kv_mode: str, batch: int, given: argparse.Namespace) -> dict[str, float]:
    """One run: tokens/s of prefill and decode, weight bytes per step, milliseconds of exchanges per decode step."""
    prompts, output = os.path.join(folder, "in.jsonl"), os.path.join(folder, "out.h5")
    rng = np.random.default_rng(0)
    with open(prompts, "w") as file:
        for _ in range(batch):
            ids = rng.integers(1000, 40000, given.prompt).tolist()
            print(json.dumps({"prompt_token_ids": ids, "max_tokens": given.tokens, "temperature": 0,
                              "ignore_eos": True}), file=file)
    command = ["mpirun", "-n", str(ranks), sys.executable, "-m", "mpillm.main", "--prompts", prompts, "--output",
               output, "--tp", str(ranks), "--kv-mode", kv_mode, "--overwrite", "--log-level", "error",
               *(["--model", given.model] if given.model else []), "--weights", given.weights]
    subprocess.run(command, check=True)
    with h5py.File(output) as file:
        steps, weights = file["steps"][:], int(file["ranks"]["weight_bytes"].sum())
        threads = int(file["ranks"]["threads"].sum())
    seconds = steps["compute_s"] + steps["communication_s"] + steps["wait_s"]
    first = steps["rank"] == 0
    prefill = first & (steps["rows_prefill"] > 0) & (steps["rows_decode"] == 0)
    decode = first & (steps["rows_prefill"] == 0)
    exchange = steps["communication_s"] + steps["wait_s"]
    return {"pp": float(np.median(steps["rows_prefill"][prefill] / seconds[prefill])),
            "tg": float(np.median(steps["rows_decode"][decode] / seconds[decode])), "bytes": weights,
            "threads": threads, "step": float(np.median(seconds[decode])),
            "exchange": 1e3 * float(np.median(exchange[decode]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    found: dict[tuple[int, str, int], list[dict[str, float]]] = {case: [] for case in CASES}
    bandwidths: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.rounds):
            for threads, values in bandwidths.items():
                values.append(read_bandwidth(threads))
            for case in CASES:
                found[case].append(measure(folder, *case, given))
    limit = {threads: statistics.median(values) for threads, values in bandwidths.items()}
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores; read bandwidth {limit[1]:.1f} GB/s with one thread, {limit[2]:.1f} with two; "
          f"weights {given.weights}, prompt {given.prompt}, {given.tokens} tokens, medians of {given.rounds} rounds")
    print("| ranks | threads | KV mode | batch | prefill t/s | decode t/s | exchanges ms/step | decode GB/s | "
          "of bandwidth |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (ranks, kv_mode, batch), runs in found.items():
        mid = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        rate = mid["bytes"] / mid["step"] / 1e9
        print(f"| {ranks} | {mid['threads']:.0f} | {kv_mode} | {batch} | {mid['pp']:.1f} | "
              f"{mid['tg']:.1f} | {mid['exchange']:.2f} | {rate:.1f} | "
              f"{100 * rate / limit[int(min(mid['threads'], 2, cores))]:.0f} % |")


if __name__ == "__main__":
    main()
