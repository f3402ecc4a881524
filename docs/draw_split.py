"""Draws how heads, KV heads, feed-forward columns and vocabulary rows fall on ranks: docs/img/split.png.

Everything drawn comes from ``mpillm.partition``.  Needs matplotlib: ``pip install '.[plot]'``, then
``python docs/draw_split.py [OUTPUT.png|.svg]``.
"""

from __future__ import annotations

import argparse
import colorsys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from mpillm.partition import Partition, Sizes, Span, balance, partition, phase_bytes

MODELS = (
    ("SmolLM2-135M", 5, Sizes(hidden=576, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64,
                              intermediate=1536, vocab=49152)),
    ("Llama-3.3-70B", 32, Sizes(hidden=8192, n_layers=80, n_heads=64, n_kv_heads=8, head_dim=128,
                                intermediate=28672, vocab=128256)),
)
FEW = ("#7ba3d0", "#f7a655", "#83c379", "#ec8583", "#c99fbe", "#8ecac6", "#f2d76d", "#bd9a85")
PHASES = (("attention", "#54708c"), ("feed-forward", "#9fb4c7"), ("output head", "#d9c9a3"))


def colours(p: Partition) -> list:
    """A colour for each rank: a hue for each KV row, shades within; plain colours where one row is all."""
    if p.rows == 1 and p.tp <= len(FEW):
        return list(FEW[:p.tp])
    shades = [0.52 + 0.30 * i / max(1, p.width - 1) for i in range(p.width)]
    return [colorsys.hls_to_rgb(s.row / p.rows, shades[s.row_rank], 0.55) for s in p.shares]


def box(ax: Axes, left: float, bottom: float, width: float, height: float, colour, text: str,
        size: float) -> None:
    ax.add_patch(Rectangle((left, bottom), width, height, facecolor=colour, edgecolor="white", linewidth=0.8))
    ax.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=size)


def strip(ax: Axes, bottom: float, spans: list[Span], total: int, palette: list, small: float) -> None:
    """Neighbouring spans of the ranks on a line from 0 to 1; a rank's number where it fits."""
    for rank, span in enumerate(spans):
        if span:
            box(ax, span.start / total, bottom, span.size / total, 0.8, palette[rank], str(rank), small)


def query_heads(ax: Axes, bottom: float, p: Partition, palette: list, small: float) -> None:
    """One box for each query head in its owner's colour, a rank's number over its first."""
    width = 1 / p.sizes.n_heads
    for share in p.shares:
        for head in share.heads.range():
            label = str(share.rank) if head == share.heads.start or p.tp <= len(FEW) else ""
            box(ax, head * width, bottom, width, 0.8, palette[share.rank], label, small)


def kv_heads(ax: Axes, bottom: float, p: Partition, palette: list, small: float) -> None:
    """One box for each KV head, under its query heads, with a band for each rank that holds it."""
    width = 1 / p.sizes.n_kv_heads
    for head in range(p.sizes.n_kv_heads):
        holders = [s.rank for s in p.shares if s.kv_heads.overlap(Span(head, head + 1))]
        band = 0.8 / len(holders)
        left = head * width + 0.002
        for place, rank in enumerate(reversed(holders)):
            box(ax, left, bottom + place * band, width - 0.004, band, palette[rank], str(rank), small)


def draw_spans(ax: Axes, name: str, p: Partition, even: Partition) -> None:
    """The strips of one model, top to bottom; ``even`` is the same split with kv-mode allgather."""
    palette, s = colours(p), p.sizes
    small = 8 if p.tp <= len(FEW) else 5.5

    def spans(field: str, split: Partition, total: int) -> Callable[[float], None]:
        return lambda y: strip(ax, y, [getattr(x, field) for x in split.shares], total, palette, small)

    lines = (
        (f"query heads\n{s.n_heads}", lambda y: query_heads(ax, y, p, palette, small)),
        (f"KV heads held\n{s.n_kv_heads}", lambda y: kv_heads(ax, y, p, palette, small)),
        ("K/V columns,\nallgather", spans("kv_columns", even, s.n_kv_heads * s.head_dim)),
        (f"feed-forward\ncolumns {s.intermediate:,}", spans("columns", p, s.intermediate)),
        (f"vocabulary\nrows {s.vocab:,}", spans("vocab", p, s.vocab)),
    )
    for i, (label, draw) in enumerate(lines):
        y = len(lines) - 1 - i
        draw(y)
        ax.text(-0.012, y + 0.4, label, ha="right", va="center", fontsize=8)
    rows = "1 KV row" if p.rows == 1 else f"{p.rows} KV rows"
    ax.set_title(f"{name}: {s.n_heads} query heads, {s.n_kv_heads} KV heads on {p.tp} ranks, "
                 f"{rows} of {p.width}; numbers are ranks", loc="left", fontsize=10)
    ax.set(xlim=(0, 1), ylim=(-0.05, len(lines) - 0.1))
    ax.axis("off")


def draw_bytes(ax: Axes, p: Partition) -> None:
    """What each rank reads in a decode step, stacked by phase."""
    unit, label = (1e9, "GB") if phase_bytes(p, 0)[0] > 1e9 else (1e6, "MB")
    ranks, base = range(p.tp), [0.0] * p.tp
    for phase, (_, colour) in enumerate(PHASES):
        part = [phase_bytes(p, rank)[phase] / unit for rank in ranks]
        ax.bar(ranks, part, bottom=base, color=colour, width=0.85)
        base = [b + x for b, x in zip(base, part, strict=True)]
    ax.set_title(f"weights read in a step, {label} (bf16)\nmean / max = {balance(p):.4f}", fontsize=8)
    ax.set_xlabel("rank", fontsize=8)
    ax.set_xticks([r for r in ranks if p.tp <= len(FEW) or r % 8 == 0 or r == p.tp - 1])
    ax.tick_params(labelsize=7)
    ax.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", nargs="?", default=Path(__file__).parent / "img" / "split.png", type=Path)
    output = parser.parse_args().output

    figure, axes = plt.subplots(len(MODELS), 2, figsize=(12, 7), width_ratios=(4, 1), layout="constrained")
    for (name, tp, sizes), (left, right) in zip(MODELS, axes, strict=True):
        redundant = partition(sizes, tp, "redundant")
        draw_spans(left, name, redundant, partition(sizes, tp, "allgather"))
        draw_bytes(right, redundant)
    figure.legend(handles=[Patch(color=colour, label=phase) for phase, colour in PHASES], ncols=len(PHASES),
                  loc="outside lower right", fontsize=8, frameon=False)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110, facecolor="white")


if __name__ == "__main__":
    main()
