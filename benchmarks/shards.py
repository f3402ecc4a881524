"""Decode against the context with the cache held by each rank of a KV row, or dealt out over them, and where that pays.

    python benchmarks/make_model.py --out DIR --types '' --shape \\
        hidden=512,layers=4,heads=16,kv_heads=1,head_dim=128,ffn=1024,vocab=4096
    python benchmarks/shards.py run --model DIR/hf --ranks 2 --contexts 1024,4096,16384,32512 --json shards.json
    python benchmarks/shards.py cluster --model examples/models/Llama-3.3-70B --ranks 16,32,64

``run`` calls `mpillm bench model` for each --kv-mode in turn, ``--rounds`` times, and prints medians: ms for a token,
bytes of the cache for a token on a rank and of the exchanges of a layer. ``cluster`` prints by the cost model of
`mpillm plan` from how many positions of each sequence on ``sharded`` decodes faster than the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mpillm.engine import estimate
from mpillm.engine.cost import Machine
from mpillm.engine.estimate import Asked, Mode, Subject
from mpillm.engine.subject import open_subject

MODES = ("redundant", "allgather", "sharded")
BESIDE = Path(sys.executable).with_name("mpirun")
MPIRUN = str(BESIDE) if BESIDE.exists() else "mpirun"


def mode_of(subject: Subject, kv_mode: str) -> Mode:
    """With the mode of latent attention that ``auto`` takes there."""
    return {mode.kv_mode: mode for mode in subject.modes()}[kv_mode]


def speeds(model: str, ranks: int, mode: str, contexts: list[int]) -> dict[int, float]:
    """Seconds of a token of one sequence at each context."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        subprocess.run([MPIRUN, "-n", str(ranks), sys.executable, "-m", "mpillm.main", "bench", "model", "--model",
                        model, "--kv-mode", mode, "--batch", "1", "--prompt", "0", "--tokens", "16", "--repetitions",
                        "2", "--depth", ",".join(map(str, contexts)), "--buffer", "64M", "--threads-per-rank", "1",
                        "--no-pin", "--json", str(path)], check=True, stdout=subprocess.DEVNULL)
        return {row["depth"]: 1 / row["median_ts"] for row in json.loads(path.read_text())}


def crossing(subject: Subject, ranks: int, machine: Machine, batch: int, other: str,
             blocks: int = 1 << 14) -> int | None:
    """The least positions of each sequence, in blocks of 64, from which on sharded beats ``other``; None: beyond."""
    def ahead(count: int) -> bool:
        asked = Asked(64 * count, batch)
        own, cut = (estimate.speed(subject.plan(asked, ranks, mode_of(subject, mode)), machine, 1).decode
                    for mode in (other, "sharded"))
        return cut > own

    if not ahead(blocks):
        return None
    low, high = 0, blocks
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if ahead(middle) else (middle, high)
    return 64 * high


def overtakes(redundant: dict[str, float], sharded: dict[str, float]) -> str:
    """The first measured context from which on sharded is faster at all further ones, in words."""
    ahead = [n for n in sorted(redundant, key=int) if all(
        sharded[m] < redundant[m] for m in redundant if int(m) >= int(n))]
    return f"from {ahead[0]} positions on" if ahead else "at none of these contexts"


def table(found: list[dict[str, Any]]) -> str:
    """Markdown: ms of a token for each context and mode, bytes beside."""
    contexts = sorted({context for row in found for context in row["seconds"]}, key=int)
    head = ["ranks", "mode", "cache of a token on a rank", "exchanges of a layer, for a row",
            *(f"{n}: ms" for n in contexts)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in found:
        ms = [f"{1e3 * row['seconds'][n]:.2f}" for n in contexts]
        lines.append(f"| {row['ranks']} | {row['mode']} | {row['cache_bytes']} B | {row['exchange_bytes']} B | "
                     f"{' | '.join(ms)} |")
    return "\n".join(lines)


def measured(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians over the rounds of every mode at every number of ranks."""
    subject, found = open_subject(given.model, "auto")[0], []
    for ranks in given.ranks:
        times: dict[str, list[dict[int, float]]] = {mode: [] for mode in given.modes}
        for _ in range(given.rounds):
            for mode in given.modes:
                times[mode].append(speeds(given.model, ranks, mode, given.contexts))
        for mode in given.modes:
            planned = subject.plan(Asked(max(given.contexts), 1), ranks, mode_of(subject, mode))
            swapped = planned.decode.swaps * planned.decode.swap_bytes / subject.model.n_layers
            seconds = {str(n): statistics.median(one[n] for one in times[mode]) for n in given.contexts}
            found.append({"ranks": ranks, "mode": mode, "cache_bytes": planned.cache_per_token,
                          "exchange_bytes": round(swapped), "seconds": seconds})
    return found


def cluster(given: argparse.Namespace) -> str:
    """Markdown: where sharded overtakes the other modes by the cost model."""
    subject = open_subject(given.model, "auto")[0]
    lines = ["| ranks | sequences | beats redundant from | beats allgather from |", "|---|---|---|---|"]
    for ranks in given.ranks:
        width = subject.plan(Asked(), ranks, mode_of(subject, "sharded")).decode.swap_ranks
        points = estimate.exchange_figures(sorted({ranks, width}), 1e-6 * given.latency, 1e9 * given.network)
        machine = Machine(1e9 * given.bandwidth, 1e9 * given.peak, points)
        for batch in given.batch:
            found = [crossing(subject, ranks, machine, batch, mode) for mode in MODES[:2]]
            lines.append(f"| {ranks} | {batch} | {' | '.join('-' if n is None else str(n) for n in found)} |")
    return "\n".join(lines)


def numbers(text: str) -> list[int]:
    """Integers with commas between."""
    return [int(part) for part in text.split(",")]


def main(argv: list[str]) -> int:
    """Measure or compute, print, write."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("run", "cluster"))
    p.add_argument("--model", required=True)
    p.add_argument("--ranks", type=numbers, default=[2, 4])
    p.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES))
    p.add_argument("--contexts", type=numbers, default=[1024, 4096, 16384, 32512])
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--json", metavar="FILE", help="add what was measured to FILE")
    p.add_argument("--batch", type=numbers, default=[1, 8, 32], help="sequences, of cluster")
    p.add_argument("--bandwidth", type=float, default=50, help="GB/s that a rank reads")
    p.add_argument("--peak", type=float, default=1000, help="GFLOP/s of a rank")
    p.add_argument("--latency", type=float, default=5, help="microseconds of a message")
    p.add_argument("--network", type=float, default=3, help="GB/s that a rank sends")
    given = p.parse_args(argv)
    if given.what == "cluster":
        print(cluster(given))
        return 0
    path = Path(given.json) if given.json else None
    found = json.loads(path.read_text()) if path and path.exists() else []
    found += measured(given)
    if path:
        path.write_text(json.dumps(found, indent=1))
    print(table(found))
    for ranks in dict.fromkeys(row["ranks"] for row in found):
        own = {row["mode"]: row["seconds"] for row in found if row["ranks"] == ranks}
        if {"redundant", "sharded"} <= set(own):
            print(f"{ranks} ranks: sharded is faster than redundant {overtakes(own['redundant'], own['sharded'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
