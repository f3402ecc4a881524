"""What a run prints: the tables of ranks and of the split at the start, the summary at the end."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpillm.config import RunConfig, format_size
from mpillm.partition import Partition, step_bytes
from mpillm.quant.recipe import DEFAULT

if TYPE_CHECKING:
    from mpillm.models.registry import Matched

LOG = logging.getLogger("mpillm.run")
SHOWN = 64   # rows of a table: more ranks than that are cut in the middle


def render(title: str, header: Sequence[str], rows: Iterable[Sequence[Any]], left: Sequence[str] = ()) -> str:
    """A table as text; columns named in ``left`` are aligned left, the others right."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in header:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    rows = [[printable(str(cell)) for cell in row] for row in rows]
    if len(rows) > SHOWN:
        rows = rows[:SHOWN // 2] + [["..."] * len(header)] + rows[-SHOWN // 2:]
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=150, no_color=True, highlight=False, markup=False, emoji=False).print(table)
    return "\n".join([title] + [line.rstrip() for line in out.getvalue().rstrip().splitlines()])


def printable(text: str) -> str:
    """``text`` without characters that a terminal would act on."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def describe(p: Partition, weight_bytes: Sequence[float] | None = None,
             kv_bytes_per_token: float = 0) -> list[dict]:
    """One dict a rank for the printed table; spans read ``0-2``, ``7`` or ``-``.

    ``weight_bytes``: what each rank really stores, by rank; None: ``step_bytes``.
    ``kv_bytes_per_token``: K and V of *one KV head* over all layers for one position; a rank's figure is
    that times the KV heads whose cache it holds.
    """
    if weight_bytes is None:
        weight_bytes = [step_bytes(p, rank) for rank in range(p.tp)]
    assert len(weight_bytes) == p.tp, f"weight bytes of {len(weight_bytes)} ranks given for tp {p.tp}"
    columns = [f"experts {s.experts}" if p.moe_split == "experts" else str(s.columns) for s in p.shares]
    return [{"rank": s.rank, "row": s.row, "heads": str(s.heads), "kv_heads": str(s.kv_heads),
             "kv_columns": str(s.kv_columns), "columns": columns[s.rank], "vocab": str(s.vocab),
             "weight_bytes": weight_bytes[s.rank],
             "cache_bytes_per_token": s.kv_heads.size * kv_bytes_per_token} for s in p.shares]


def split_table(rows: Sequence[dict[str, Any]], places: Sequence[dict[str, Any]], title: str) -> str:
    """Who sits where and holds what, a line a rank (of the first replica; the others are alike)."""
    header = ["rank", "host", "cores", "NUMA", "threads", "memory", "heads", "KV heads", "columns", "vocabulary",
              "weights", "cache/token"]
    lines = [[place["rank"], place["host"], place["cores"], place["NUMA domain"], place["threads"],
              _memory(place), row["heads"],
              row["kv_heads"], row["columns"], row["vocab"], format_size(row["weight_bytes"]),
              f"{row['cache_bytes_per_token']:.0f} B"] for row, place in zip(rows, places, strict=False)]
    return render(title, header, lines, left=("host", "cores"))


def rules_table(rules: Sequence[Matched]) -> str:
    """What each rule of a weight recipe matched, and its bytes on the ranks of one replica."""
    lines = [[found.rule, found.asked, "+".join(found.formats) or "-", found.tensors, format_size(found.nbytes)]
             for found in rules]
    header = ["rule", "asked", "in memory", "tensors", "bytes"]
    return render("weights by rule, on all ranks of a replica", header, lines,
                  left=("rule", "asked", "in memory"))


def announce_rules(rules: Sequence[Matched]) -> None:
    """Log the table, and a warning for each rule that matches nothing; nothing without a recipe."""
    if not rules:
        return
    LOG.info("%s", rules_table(rules))
    for found in rules:
        if not found.tensors and found.rule != DEFAULT:
            LOG.warning("--weights: the rule %s=%s matches no tensor of this model", found.rule, found.asked)


def place_table(places: Sequence[dict[str, Any]], title: str) -> str:
    """Who sits where."""
    rows = [[p["rank"], p["host"], p["cores"], p["NUMA domain"], p["threads"], _memory(p)] for p in places]
    return render(title, ["rank", "host", "cores", "NUMA", "threads", "memory"], rows, left=("host", "cores"))


def _memory(place: dict[str, Any]) -> str:
    """The bytes that a rank may use, and the NUMA domains that they are bound to."""
    size = format_size(place["memory bytes"])
    return f"{size} of {place['memory domain']}" if place["memory domain"] else size


def speed_table(times: np.ndarray) -> str:
    """Seconds of the steps of each rank (``hdf5_fold.TIMES``): computing, communicating, and waiting in that."""
    lines = []
    for row in times:
        total, exchange = float(row["total_s"]), float(row["communication_s"])
        lines.append([row["rank"], row["steps"], f"{total:.2f}", f"{total - exchange:.2f}", f"{exchange:.2f}",
                      f"{float(row['wait_s']):.2f}", f"{100 * exchange / total if total else 0:.0f} %"])
    return render("step time by rank", ["rank", "steps", "total s", "compute s", "communication s", "of it waiting s",
                                        "communication"], lines)


def rates(times: np.ndarray) -> tuple[float, float]:
    """Prefill and decode tokens/s of all replicas: tokens of steps with prompt rows over their time, and of the others.

    Only roots count, since the ranks of a replica compute the same tokens.
    """
    roots = times[times["tp_rank"] == 0]
    fast = [0.0, 0.0]
    for at, name in enumerate(("prefill", "decode")):
        spent, tokens = roots[f"{name}_s"], roots[f"{name}_tokens"]
        fast[at] = float((tokens[spent > 0] / spent[spent > 0]).sum())
    return fast[0], fast[1]


def summarize(summary: dict[str, Any], settings: RunConfig, seconds: float) -> None:
    """Log the end of a run: what was done, how fast in the last attempt, and where the results are."""
    times = summary["times"]
    last = times[times["attempt"] == times["attempt"].max(initial=0)]
    LOG.info("%s", speed_table(last))
    prefill, decode = rates(last)
    answered = summary["requests"] - summary["failed"]
    LOG.info("done in %.1f s: %d request(s) answered, %d failed; %d prompt and %d generated tokens; "
             "prefill %.1f tokens/s, decode %.1f tokens/s", seconds, answered, summary["failed"],
             summary["prompt_tokens"], summary["completion_tokens"], prefill, decode)
    if summary["logits_clamped"]:
        LOG.warning("%d logits are beyond float16 and stored as its largest value: use --logits-type f32",
                    summary["logits_clamped"])
    LOG.info("results: %s\nHDF5:    %s (%s)", settings.results_path, settings.output_path,
             format_size(summary["bytes"]))
