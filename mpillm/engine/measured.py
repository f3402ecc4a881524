"""The machine of the cost model from a file that `mpillm bench machine --json` wrote."""

from __future__ import annotations

import json
from typing import Any

from mpillm.engine.cost import Machine
from mpillm.engine.probe import peak_of_format
from mpillm.errors import InputError


def read_machine(path: str, formats: tuple[str, ...], node_ranks: int | None = None) -> Machine:
    """What one of ``node_ranks`` ranks (None: as many as measured) of such a node can do, with the
    number of threads that was best.

    ``formats``: of the weights, the slowest decides the peak. Raises InputError for a file of another kind.
    """
    try:
        with open(path, encoding="utf-8") as file:
            rows = json.load(file)
        return _machine(rows, formats, node_ranks)
    except OSError as error:
        raise InputError(f"--machine {path}: {error.strerror or error}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise InputError(f"--machine {path} is not what `mpillm bench machine --json FILE` writes") from None


def _machine(rows: list[dict[str, Any]], formats: tuple[str, ...], node_ranks: int | None) -> Machine:
    best: dict[str, float] = {}
    for row in rows:
        if row["unit"] != "s":
            best[row["test"]] = max(best.get(row["test"], 0.0), float(row["best"]))
    share = node_ranks or int(rows[0]["n_ranks"])
    available = [(name.split()[2] if len(name.split()) > 2 else "any", name.split()[1])
                 for name in best if name.startswith("peak ")]
    available.sort(key=lambda key: -best[_peak(key)])
    peaks = [best[_peak(peak_of_format(name, None, available))] for name in formats]
    sums = tuple((int(row["n_ranks"]), int(row["nbytes"]), float(row["median"])) for row in rows
                 if row["test"] == "all-reduce shm")
    return Machine(best["read memory"] / share, min(peaks) / share, sums)


def _peak(key: tuple[str, str]) -> str:
    return f"peak {key[1]}" + ("" if key[0] == "any" else f" {key[0]}")
