"""Latent attention of one layer against the context, in the modes of --mla, through the program's own layer.

    python benchmarks/latent.py decode --threads 2 --json decode.json --out latent.md --plot docs/img/latent.png
    python benchmarks/latent.py decode --heads 128 --modes 2 --contexts 1024,16384
    python benchmarks/latent.py prefill --chunks 512,4096 --past 16384

The widths are DeepSeek-V2-Lite's: 16 heads, a latent row of 512 + 64, keys of 128 + 64 and values of 128 for each head.
Weights are random, and the model is only 64 wide, so that the projections that all modes share take no time. Decode is
one token of one sequence, prefill a chunk of a prompt behind ``--past`` positions. Modes take turns in every round; the
tables have the medians of the rounds, beside the bytes or operations that a mode needs at least and their share of
what the machine reads or multiplies, measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mpillm import collectives, kernels, main
from mpillm.engine import probe
from mpillm.kernels import BLOCK, LatentHeads, LayerCache, PackedMatrix, Plan, Rows
from mpillm.layers.linear import ColumnLinear, RowLinear
from mpillm.layers.mla import LatentAttention, LatentMatrices
from mpillm.layers.norm import RMSNorm

HIDDEN, KV_RANK, NOPE, ROPE, VALUE = 64, 512, 128, 64, 128


class Alone:
    """The sum over one rank."""

    tp = 1

    def all_reduce(self, array: np.ndarray) -> None:
        pass

    def exchange_arguments(self) -> None:
        return None

    def check(self) -> None:
        pass


@dataclass(frozen=True)
class Case:
    """One thing that is timed: ``rows`` new positions behind ``past`` ones."""

    mode: int
    kv_type: str
    heads: int
    past: int
    rows: int = 1

    @property
    def cached(self) -> tuple[int, int, int]:
        """(KV heads, columns of a key, of a value) of the cache; 0: values are columns of the keys."""
        if self.mode == 0:
            return self.heads, NOPE + ROPE, VALUE
        return 1, KV_RANK + ROPE, KV_RANK if self.mode == 1 else 0

    @property
    def cache_nbytes(self) -> int:
        """Of all positions, whole blocks."""
        heads, key, value = self.cached
        blocks = -(-(self.past + self.rows) // BLOCK)
        return blocks * kernels.cache_block_nbytes(self.kv_type, heads, key, self.kv_type, value)

    @property
    def pairs(self) -> float:
        """New positions with all that they attend to."""
        return self.rows * (self.past + (self.rows + 1) / 2)

    @property
    def operations(self) -> float:
        """Multiplications and additions of attention, and of making keys and values of latents."""
        absorbed = self.mode in (1, 2) or self.mode == 3 and self.rows == 1
        each = 2 * KV_RANK + ROPE if absorbed else NOPE + ROPE + VALUE
        made = 0 if absorbed else (self.past + self.rows if self.mode == 3 else self.rows)
        weights = self.rows * (NOPE + VALUE) * KV_RANK if absorbed else made * (NOPE + VALUE) * KV_RANK
        return 2.0 * self.heads * (self.pairs * each + weights)


def packed(rng: np.random.Generator, n: int, k: int, kind: str = "bf16") -> PackedMatrix:
    """Random weights with products of about 1."""
    packer = kernels.Packer(kind, n, k)
    packer.put(0, (rng.standard_normal((n, k)) / k ** 0.5).astype(np.float32))
    return packer.finish()


def layer_of(case: Case) -> LatentAttention:
    """A layer of random weights in the case's mode."""
    rng, h = np.random.default_rng(0), LatentHeads(case.heads, KV_RANK, NOPE, ROPE, VALUE)
    widths = (case.heads * h.query, h.row)
    inputs = ColumnLinear(packed(rng, sum(widths), HIDDEN), None, sum(widths), widths=widths)
    expand, matrices = None, None
    if case.mode == 0:
        expand = packed(rng, case.heads * (NOPE + VALUE), KV_RANK)
    else:
        matrices = LatentMatrices(packed(rng, case.heads * KV_RANK, NOPE), packed(rng, case.heads * VALUE, KV_RANK),
                                  packed(rng, case.heads * NOPE, KV_RANK) if case.mode == 3 else None)
    k = case.heads * VALUE
    return LatentAttention(h, case.mode, h.query ** -0.5, [inputs], 0, None, None,
                           RMSNorm(np.ones(KV_RANK, np.float32), 1e-6), expand, matrices,
                           RowLinear(packed(rng, HIDDEN, k), None, k, 0, k, Alone()), None)


def filled(case: Case) -> LayerCache:
    """A cache whose blocks all hold the same random rows, written by the cache's own operation."""
    heads, key, value = case.cached
    blocks = -(-(case.past + case.rows) // BLOCK)
    cache = LayerCache(*kernels.allocate_cache(case.kv_type, blocks, heads, key, case.kv_type, value), case.kv_type)
    rng, none = np.random.default_rng(1), np.zeros(heads, np.int32)
    k, v = (rng.standard_normal((BLOCK, heads * n), np.float32) for n in (key, value))
    plan = Plan(BLOCK)
    plan.cache_write(k, v if value else None, kernels.Heads(key, 0, none, none, value or key), cache)
    plan.run(rows_of(0, BLOCK, 1), np.zeros(0, np.int64))
    for array in (cache.keys, cache.values):
        if array is not None:
            array[1:] = array[:1]
    return cache


def rows_of(start: int, count: int, blocks: int, generated: int = 0) -> Rows:
    """Positions of one sequence, unturned."""
    positions = np.arange(start, start + count, dtype=np.int32)
    return Rows(np.zeros(count, np.int64), positions, np.zeros(count, np.int32),
                np.arange(blocks, dtype=np.int32)[None], np.ones((count, ROPE // 2), np.float32),
                np.zeros((count, ROPE // 2), np.float32), generated=generated)


def step_of(case: Case) -> Callable[[], None]:
    """What runs the layer once."""
    layer, cache, plan = layer_of(case), filled(case), Plan(case.rows)
    plan.prompts = case.rows > 1
    rng, out = np.random.default_rng(2), plan.buffer("normed", HIDDEN)
    layer.input(plan, HIDDEN)[:] = rng.standard_normal((case.rows, HIDDEN))
    layer.record(plan, cache, plan.buffer("x", HIDDEN), None, out)
    rows = rows_of(case.past, case.rows, len(cache.keys), generated=int(case.rows == 1))
    return lambda: plan.run(rows, np.zeros(0, np.int64))


def measured(cases: Sequence[Case], rounds: int, seconds: float) -> list[float]:
    """Median seconds of each case; they take turns, a round calls one as often as fits ``seconds``."""
    steps = [step_of(case) for case in cases]
    times: list[list[float]] = [[] for _ in cases]
    for step in steps:
        step()
    for _ in range(rounds):
        for own, step in zip(times, steps, strict=True):
            began = time.perf_counter()
            while not own or time.perf_counter() - began < seconds:
                at = time.perf_counter()
                step()
                own.append(time.perf_counter() - at)
    return [statistics.median(own) for own in times]


def result(case: Case, seconds: float, read: float, peak: float) -> dict[str, Any]:
    """A case's figures; ``read`` bytes/s and ``peak`` operations/s of the machine."""
    return {**asdict(case), "seconds": seconds, "cache_bytes": case.cache_nbytes,
            "read_share": case.cache_nbytes / seconds / read, "operations": case.operations,
            "peak_share": case.operations / seconds / peak}


def table(found: Sequence[dict[str, Any]], read: float, peak: float) -> str:
    """Markdown: a row for each mode, type and size, with its speed against mode 0."""
    names = ("heads", "mode", "cache", "past", "rows", "ms", "MB of cache", "GB/s", "of read", "GFLOP/s", "of peak",
             "mode 0's ms / own")
    lines = [f"{read / 1e9:.1f} GB/s read, {peak / 1e9:.0f} GFLOP/s at most (instructions: {kernels.tier()}, "
             f"{kernels.threads()} threads)", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    zeros = {(r["heads"], r["kv_type"], r["past"], r["rows"]): r["seconds"] for r in found if r["mode"] == 0}
    for r in sorted(found, key=lambda r: (r["rows"], r["kv_type"], r["heads"], r["past"], r["mode"])):
        seconds, zero = r["seconds"], zeros.get((r["heads"], r["kv_type"], r["past"], r["rows"]))
        row = [r["heads"], r["mode"], r["kv_type"], r["past"], r["rows"], f"{1e3 * seconds:.3f}",
               f"{r['cache_bytes'] / 1e6:.1f}", f"{r['cache_bytes'] / seconds / 1e9:.1f}",
               f"{100 * r['read_share']:.0f} %", f"{r['operations'] / seconds / 1e9:.0f}",
               f"{100 * r['peak_share']:.0f} %", "-" if zero is None else f"{zero / seconds:.2f}"]
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines) + "\n"


def draw(found: Sequence[dict[str, Any]], path: str) -> None:
    """Milliseconds of a token and layer against the context, a line for each mode and type."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = {0: "tab:red", 1: "tab:orange", 2: "tab:blue", 3: "tab:green"}
    for mode, kind in sorted({(r["mode"], r["kv_type"]) for r in found}):
        points = sorted((r["past"], 1e3 * r["seconds"]) for r in found if (r["mode"], r["kv_type"]) == (mode, kind))
        axes.plot(*zip(*points, strict=True), "o-" if kind == "bf16" else "s--", color=colours[mode],
                  label=f"--mla {mode}, cache {kind}")
    axes.set(xscale="log", yscale="log", xlabel="positions in the context", ylabel="ms per token and layer",
             title="Latent attention, decode: 16 heads, latent 512 + 64")
    axes.set_xscale("log", base=2)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def cases_of(given: argparse.Namespace) -> list[Case]:
    """All combinations that are asked for."""
    sizes = [(n - 1, 1) for n in given.contexts] if given.what == "decode" else [(given.past, n) for n in given.chunks]
    return [Case(mode, kind, given.heads, past, rows) for past, rows in sizes for kind in given.types
            for mode in given.modes]


def numbers(text: str) -> list[int]:
    """Integers with commas between."""
    return [int(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("decode", "prefill"))
    p.add_argument("--heads", type=int, default=16)
    p.add_argument("--modes", type=numbers, default=[0, 1, 2])
    p.add_argument("--types", type=lambda text: text.split(","), default=["bf16", "q8_0"], help="of the cache")
    p.add_argument("--contexts", type=numbers, default=[1024, 4096, 16384, 65536], help="of decode")
    p.add_argument("--past", type=int, default=16384, help="positions before a chunk of prefill")
    p.add_argument("--chunks", type=numbers, default=[512, 4096], help="rows of prefill")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--seconds", type=float, default=0.1, help="that a case takes in a round, at least one call")
    p.add_argument("--json", metavar="FILE", help="add the figures to those in FILE")
    p.add_argument("--out", metavar="MD", help="write the table of all figures")
    p.add_argument("--plot", metavar="PNG")
    return p


def run(argv: list[str]) -> int:
    """Measure, print, write."""
    given = parser().parse_args(argv)
    kernels.set_threads(given.threads)
    read, peak, _ = probe.quick_figures(collectives.start(), given.threads, "bf16", [], 0, "shm", "f32")
    found: list[dict[str, Any]] = []
    if given.json:
        try:
            with open(given.json, encoding="utf-8") as file:
                found = json.load(file)
        except FileNotFoundError:
            pass
    cases = cases_of(given)
    for past, rows, kind in dict.fromkeys((case.past, case.rows, case.kv_type) for case in cases):
        alike = [case for case in cases if (case.past, case.rows, case.kv_type) == (past, rows, kind)]
        for case, seconds in zip(alike, measured(alike, given.rounds, given.seconds), strict=True):
            found.append(result(case, seconds, read, peak))
            print(f"{case}: {1e3 * seconds:.3f} ms", flush=True)
    text = table(found, read, peak)
    print(text)
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    if given.out:
        with open(given.out, "w", encoding="utf-8") as file:
            file.write(text)
    if given.plot:
        draw([r for r in found if r["rows"] == 1 and r["heads"] == given.heads], given.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main.main(sys.argv[1:], run))
