"""Pictures: the speeds of `mpillm bench model` over batch with the machine's limit, and those of `mpillm plan`."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from mpillm.errors import UsageError

KINDS = ("png", "pdf", "svg")


def check(path: str) -> None:
    """UsageError when the picture could not be drawn."""
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")
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


def draw_plan(found: dict[str, Any], path: str) -> None:
    """Memory and cache of the fullest rank over the ranks of a replica, by mode; decode speed if predicted.

    Raises OSError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fast = found["predicted"] is not None
    panels = [("needed_bytes", 2**30, "GiB on the fullest rank"), ("kv_bytes_per_token", 2**10, "KiB of cache a token")]
    panels += [("decode_tokens_per_s", 1, "decode tokens/s of all replicas")] if fast else []
    figure = Figure(figsize=(4.5 * len(panels), 4), layout="constrained")
    FigureCanvasAgg(figure)
    styles = ("o-", "s--", "^:", "v-.", "D--", "x:")
    modes = list(dict.fromkeys(row["mode"] for row in found["table"]))
    drawn = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (key, unit, label) in zip(drawn, panels, strict=True):
        for number, mode in enumerate(modes):
            rows = [row for row in found["table"] if row["mode"] == mode]
            axes.plot([row["tp"] for row in rows], [row[key] / unit for row in rows], styles[number % len(styles)],
                      label=mode)
        if key == "needed_bytes" and found["memory"] is not None:
            axes.axhline(found["memory"]["per_rank"] / unit, color="gray", label="memory of a rank")
        ticks = sorted({row["tp"] for row in found["table"]})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("ranks of a replica")
        axes.set_ylabel(label)
        axes.grid(True, which="both", alpha=0.3)
    drawn[0].legend()
    figure.suptitle(f"{found['model']['name']}, {', '.join(found['weights'])}, {found['batch']} sequence(s) of "
                    f"{found['context']} positions, cache {found['kv_type']}")
    figure.savefig(path, format=_kind(path), dpi=90)
