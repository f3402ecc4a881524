"""The speeds of `mpillm bench model` as a picture: tokens/s over batch for each depth, with the machine's limit."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from mpillm.errors import UsageError

KINDS = ("png", "pdf", "svg")


def check(path: str) -> None:
    """UsageError when the picture could not be drawn."""
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'mpillm[plot]'")
    if _kind(path) not in KINDS:
        raise UsageError(f"--plot {path}: name a file that ends in {', '.join(KINDS)}")


def _kind(path: str) -> str:
    return os.path.splitext(path)[1].lstrip(".").lower() or "png"


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Write the picture; its type by the name's ending, PNG without one. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = [kind for kind in ("pp", "tg") if any(row["test"].startswith(kind) for row in rows)]
    figure = Figure(figsize=(6 * max(1, len(kinds)), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, kind in zip(figure.subplots(1, max(1, len(kinds)), squeeze=False)[0], kinds, strict=False):
        mine = [row for row in rows if row["test"].startswith(kind)]
        for depth in sorted({row["depth"] for row in mine}):
            line = sorted((row for row in mine if row["depth"] == depth), key=lambda row: row["batch"])
            batches = [row["batch"] for row in line]
            drawn = axes.errorbar(batches, [row["avg_ts"] for row in line], [row["stddev_ts"] for row in line],
                                  marker="o", capsize=3, label=f"depth {depth}")
            axes.plot(batches, [row["limit_ts"] for row in line], "--", color=drawn[0].get_color())
        axes.plot([], [], "--", color="gray", label="limit: bandwidth or peak")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({row["batch"] for row in mine})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_title(f"{'prefill' if kind == 'pp' else 'decode'} ({mine[0]['test'].split(' @')[0]})")
        axes.set_xlabel("sequences together")
        axes.set_ylabel("tokens/s")
        axes.grid(True, which="both", alpha=0.3)
        axes.legend()
    if rows:
        first = rows[0]
        figure.suptitle(f"{first['model']}, {first['weights']}, {first['n_ranks']} rank(s) x {first['n_threads']} "
                        f"thread(s), {first['bandwidth'] / 1e9:.1f} GB/s")
    figure.savefig(path, format=_kind(path), dpi=120)
