"""Parts: the journals in which the ranks keep what a run has done, in the folder ``OUT.h5.parts/``.

    root = RequestsPart(folder, attempt, replica, flush_every)       # the root of every replica
    own = RankPart(folder, attempt, rank, replica, tp_rank, flush_every, logits=(start, stop, "f16"))   # every rank
    ...
    done = finished(folder)                                          # before a run goes on

``requests-AAAA-RRRRR.journal`` is written by the root of replica R in attempt A (the number of times that the run was
started again), ``rank-AAAA-RRRRRR.journal`` by rank R. ``journal`` has their records' frame, ``part_records`` what is
in them, ``part_scan`` reads them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from mpillm.formats import part_records as records
from mpillm.formats.journal import PATIENCE, Journal
from mpillm.formats.part_records import SequenceRecord
from mpillm.formats.part_scan import Finished, finished, rank_path, requests_path

__all__ = ["Finished", "RankPart", "RequestsPart", "SequenceRecord", "finished", "rank_path", "requests_path"]

LOGITS_RECORD = 4 << 20      # bytes of logits in one record, if a row is not longer


class _Part:
    """What both kinds of parts share: their journal, with its head written at once."""

    def __init__(self, path: str, head: Mapping[str, Any], flush_every: float, patience: float) -> None:
        self.path = path
        self._journal = Journal(path, flush_every, patience=patience)
        self._journal.append(records.HEAD, records.VERSION, json.dumps(head).encode())
        self._journal.flush()

    def flush_if_due(self) -> None:
        """Writes when the last flush is ``flush_every`` seconds ago. OutputError."""
        self._journal.flush_if_due()

    def flush(self, *, sync: bool = False) -> None:
        """Everything so far survives the death of this process; ``sync``: of the machine. OutputError."""
        self._journal.flush(sync=sync)

    def close(self) -> None:
        """Flushes to the disk and closes; OutputError. A second call does nothing."""
        self._journal.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._journal.__exit__(kind, error, trace)


class RequestsPart(_Part):
    """The finished and failed requests of one replica in one attempt. OutputError when the file exists."""

    def __init__(self, folder: str, attempt: int, replica: int, flush_every: float, *,
                 patience: float = PATIENCE) -> None:
        self._attempt = attempt
        head = {"format": "mpillm requests", "version": records.VERSION, "attempt": attempt, "replica": replica}
        super().__init__(requests_path(folder, attempt, replica), head, flush_every, patience)

    def add(self, *, index: int, line: int, custom_id: str | None, replica: int, tp: int, result: dict[str, Any],
            status: int = 0, error: str = "", prompts: Sequence[Sequence[int] | np.ndarray] = (),
            choices: Sequence[SequenceRecord] = (),
            prompt_logprobs: Sequence[Sequence[float | None] | np.ndarray | None] | None = None,
            prompt_top: Sequence[Sequence[Any] | None] | None = None, logits_rows: int = 0) -> None:
        """One finished (or, with ``status`` and ``error``, failed) request. OutputError.

        ``index``: place among the input's requests, failed lines included; ``line``: number of the input line;
        ``replica``: -1 for a line that none answered, with ``tp`` 0. ``logits_rows``: different rows of logits that
        each rank of the replica keeps of it. ``result``: its record in the results. The rest:
        ``part_records.pack_request``.
        """
        assert line > 0 and index >= 0, f"request {index} of line {line}"
        row = np.zeros(1, records.ROW)
        row["line"], row["status"], row["attempt"], row["replica"], row["tp"] = line, status, self._attempt, replica, tp
        row["ended"], row["logits_rows"] = time.time(), logits_rows
        self._journal.append(records.REQUEST, index, *records.pack_request(
            row, custom_id, error, prompts, choices, prompt_logprobs, prompt_top, result))


class RankPart(_Part):
    """What one rank was, its steps, and its columns of the logits, in one attempt. OutputError when the file exists.

    ``logits``: (first column, one past the last, type), or None where none are kept. In f16 a finite value beyond
    65504 is stored as 65504 with its sign and counted in ``clamped``; infinities and nan stay what they are.
    """

    def __init__(self, folder: str, attempt: int, rank: int, replica: int, tp_rank: int, flush_every: float, *,
                 logits: tuple[int, int, str] | None = None, patience: float = PATIENCE) -> None:
        start, stop, kind = logits or (0, 0, "f32")
        assert kind in records.KINDS, f"logits are stored as f16 or f32, not {kind}"
        assert 0 <= start <= stop, f"vocabulary rows {start} to {stop}"
        self.clamped = self._steps = 0
        self._width, self._kind = stop - start, records.KINDS[kind]
        head = {"format": "mpillm rank", "version": records.VERSION, "attempt": attempt, "rank": rank,
                "replica": replica, "tp_rank": tp_rank, "logits": None if logits is None else list(logits)}
        super().__init__(rank_path(folder, attempt, rank), head, flush_every, patience)

    def describe(self, row: Mapping[str, Any]) -> None:
        """The rank's row of /ranks, by the names of its columns, attempt aside; once."""
        plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in row.items()}
        self._journal.append(records.RANK, 0, json.dumps(plain).encode())

    def add_steps(self, steps: np.ndarray) -> None:
        """Steps in order, a structured array with the columns of STEP_ROWS; ``step`` is counted here."""
        rows = np.empty(len(steps), records.STEP_ROWS)
        for name in records.STEP_ROWS.names or ():
            rows[name] = np.arange(self._steps, self._steps + len(steps)) if name == "step" else steps[name]
        self._steps += len(steps)
        if len(rows):
            self._journal.append(records.STEPS, len(rows), rows)

    def add_logits(self, keys: np.ndarray, logits: np.ndarray) -> None:
        """Rows float32 [r, columns] with keys int64 [r, 4]: request index, choice, position, anything.

        A key that comes again (a sequence computed anew) counts once. OutputError.
        """
        assert keys.shape == (len(logits), 4) and logits.shape[1:] == (self._width,), \
            f"keys {keys.shape}, logits {logits.shape}, {self._width} columns"
        if self._width == 0:
            return
        step = max(1, LOGITS_RECORD // (self._width * self._kind.itemsize))
        for start in range(0, len(keys), step):
            rows, clamped = records.narrow(logits[start:start + step], self._kind)
            self.clamped += clamped
            self._journal.append(records.LOGITS, len(rows), np.array([clamped], "<i8"),
                                 np.ascontiguousarray(keys[start:start + step, :3], "<i8"), rows)
