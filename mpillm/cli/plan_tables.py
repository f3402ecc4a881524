"""What `mpillm plan` prints, and the JSON of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpillm.cli.report import render
from mpillm.config import format_size
from mpillm.engine import setup
from mpillm.engine.estimate import TERMS
from mpillm.models.load import LOADING_BYTES

if TYPE_CHECKING:
    from mpillm.engine.estimate import Planned, Speed, Subject


def to_json(subject: Subject, source: str, given: argparse.Namespace, chosen: Planned, table: Sequence[Planned],
            speeds: Sequence[Speed] | None, types: dict[str, dict[str, int | None]]) -> dict[str, Any]:
    """All figures; bytes, seconds, tokens/s. ``predicted`` is left to the caller."""
    asked, memory = chosen.asked, given.memory_per_rank
    return {
        "model": {"name": subject.name, **subject.figures()}, "weights": list(subject.formats), "weights_from": source,
        "ranks": given.ranks, "tp": chosen.tp, "dp": given.ranks // chosen.tp, "kv_mode": chosen.mode.kv_mode,
        "mla": chosen.mode.mla, "modes_alike": chosen.alike,
        "kv_type": asked.kv_type, "kv_type_v": None if chosen.mode.mla in (2, 3) else asked.kv_type_v or asked.kv_type,
        "context": asked.context, "batch": asked.batch, "prefill_chunk": asked.chunk,
        "per_rank": [rank.to_dict() for rank in chosen.ranks],
        "runtime_bytes": setup.RUNTIME_BYTES, "loading_bytes": LOADING_BYTES,
        "read_bytes_per_token": round(chosen.read_per_token), "exchanges_per_token": chosen.exchanges,
        "exchange_bytes_per_token": chosen.exchange_bytes, "kv_bytes_per_token": types,
        "memory": None if memory is None else {
            "per_rank": memory, "needed": chosen.needed_bytes, "fits": chosen.needed_bytes <= memory,
            "cache_tokens": chosen.cache_tokens(memory)},
        "table": [_row(planned, memory, None if speeds is None else speeds[i]) for i, planned in enumerate(table)]}


def _row(planned: Planned, memory: int | None, speed: Speed | None) -> dict[str, Any]:
    return {"tp": planned.tp, "mode": planned.mode.name, "prefill_chunk": planned.asked.chunk,
            "weight_bytes": max(rank.weight_bytes for rank in planned.ranks),
            "duplicated_kv_weight_bytes": max(rank.duplicated_kv_weight_bytes for rank in planned.ranks),
            "kv_bytes_per_token": planned.cache_per_token,
            "cache_bytes": max(rank.cache_bytes for rank in planned.ranks),
            "scratch_bytes": max(rank.scratch_bytes for rank in planned.ranks),
            "needed_bytes": planned.needed_bytes, "fits": None if memory is None else planned.needed_bytes <= memory,
            "cache_tokens": None if memory is None else planned.cache_tokens(memory),
            "read_bytes_per_token": round(planned.read_per_token), "exchanges_per_token": planned.exchanges,
            "exchange_bytes_per_token": planned.exchange_bytes, **({} if speed is None else speed.to_dict())}


def text(found: dict[str, Any]) -> str:
    """All tables."""
    model = found["model"]
    lines = [f"{model['name']}: " + ", ".join(f"{key} {value}" for key, value in model.items() if key != "name"),
             f"weights {', '.join(found['weights'])} (by {found['weights_from']}); {found['ranks']} rank(s): "
             f"{found['dp']} replica(s) x {found['tp']}; {found['batch']} sequence(s) of {found['context']} positions, "
             f"cache {' and '.join(dict.fromkeys(filter(None, (found['kv_type'], found['kv_type_v']))))}"]
    if found["modes_alike"] and found["tp"] > 1:
        lines.append("note: no two ranks share a KV head, so all --kv-mode come to the same")
    return "\n\n".join(["\n".join(lines), _ranks(found), _types(found), _table(found), _summary(found)])


def _ranks(found: dict[str, Any]) -> str:
    rows = [[r["ranks"], r["heads"], format_size(r["weight_bytes"]), format_size(r["duplicated_kv_weight_bytes"]),
             f"{r['kv_bytes_per_token']} B", format_size(r["cache_bytes"]), format_size(r["scratch_bytes"]),
             format_size(r["needed_bytes"] + found["runtime_bytes"])] for r in _alike(found["per_rank"])]
    mode = found["kv_mode"] if found["mla"] is None else f"mla {found['mla']} {found['kv_mode']}"
    return render(f"ranks of a replica ({mode}); the sum has {format_size(found['runtime_bytes'])} for the runtime "
                  f"and {format_size(found['loading_bytes'])} for reading",
                  ["ranks", "heads", "weights", "K/V twice", "cache/token", "cache", "scratch", "sum"], rows)


def _types(found: dict[str, Any]) -> str:
    kinds = list(next(iter(found["kv_bytes_per_token"].values())))
    rows = [[mode, *("-" if row[kind] is None else f"{row[kind]} B" for kind in kinds)]
            for mode, row in found["kv_bytes_per_token"].items()]
    return render(f"cache of a token on the fullest of {found['tp']} rank(s), by type", ["mode", *kinds], rows,
                  left=("mode",))


def _table(found: dict[str, Any]) -> str:
    fits, fast = found["memory"] is not None, found["predicted"] is not None
    header = ["tp", "mode", "weights", "K/V twice", "cache/token", "sum", "read/token", "exchanges"]
    header += (["fits", "tokens"] if fits else []) + (["decode", "prefill", "bound by"] if fast else [])
    rows = []
    for r in found["table"]:
        row = [r["tp"], r["mode"], format_size(r["weight_bytes"]), format_size(r["duplicated_kv_weight_bytes"]),
               f"{r['kv_bytes_per_token']} B", format_size(r["needed_bytes"]), format_size(r["read_bytes_per_token"]),
               f"{r['exchanges_per_token']}, {format_size(r['exchange_bytes_per_token'])}"]
        if fits:
            row += ["yes" if r["fits"] else "no", "any" if r["cache_tokens"] is None else r["cache_tokens"]]
        if fast:
            row += [f"{r['decode_tokens_per_s']:.4g}", _speed(r["prefill_tokens_per_s"]), r["decode_bound_by"]]
        rows.append(row)
    title = "the fullest rank at other counts and in other modes" + (
        "; tokens: what its cache may hold" if fits else "") + ("; decode and prefill in tokens/s" if fast else "")
    return render(title, header, rows, left=("mode", "bound by"))


def _alike(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring ranks with the same figures as one, with their numbers in ``ranks``."""
    groups: list[list[dict[str, Any]]] = []
    for rank in ranks:
        if groups and {**rank, "rank": 0} == {**groups[-1][0], "rank": 0}:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return [{**group[0], "ranks": str(group[0]["rank"]) if len(group) == 1 else
             f"{group[0]['rank']}-{group[-1]['rank']}"} for group in groups]


def _speed(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"


def _summary(found: dict[str, Any]) -> str:
    lines = [f"a token reads {format_size(found['read_bytes_per_token'])} on the fullest rank and takes part in "
             f"{found['exchanges_per_token']} exchanges of {format_size(found['exchange_bytes_per_token'])} together"]
    memory = found["memory"]
    if memory is not None:
        held = "any number of" if memory["cache_tokens"] is None else memory["cache_tokens"]
        lines.append(f"memory: {'fits' if memory['fits'] else 'does not fit'}: {format_size(memory['needed'])} of "
                     f"{format_size(memory['per_rank'])} on a rank; the cache may hold {held} tokens")
    speed = found["predicted"]
    if speed is None:
        lines.append("speed: give --bandwidth, or --machine with what `mpillm bench machine --json` wrote")
    else:
        lines.append(f"speed: decode {speed['decode_tokens_per_s']:.4g} tokens/s, bound by "
                     f"{TERMS[speed['decode_bound_by']]}; prefill {_speed(speed['prefill_tokens_per_s'])} tokens/s"
                     + (" (give --peak)" if speed["prefill_bound_by"] is None else
                        f", bound by {TERMS[speed['prefill_bound_by']]}"))
    return "\n".join(lines)
