"""Where a replica's results go during the run: its part files, and the progress that is shown."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np

from mpillm.engine.feed import Tally
from mpillm.engine.generate import STEP_RECORD
from mpillm.engine.request import FailedLine, Request, Result, sequence_seed
from mpillm.engine.results import error_line, result_line
from mpillm.errors import OutputError
from mpillm.formats.parts import RankPart, RequestsPart, SequenceRecord
from mpillm.machine.guard import board


class ReplicaOutput:
    """A ``generate.Sink``: the root writes requests, every rank its steps and the logits of its vocabulary rows.

    ``own``: the rank's part, closed with this. ``keeps_logits``: whether logits are kept at all.
    """

    def __init__(self, parts_dir: str, attempt: int, replica: int, tp: int, own: RankPart, *, is_root: bool,
                 flush_every: float, keeps_logits: bool, tokenizer: Any | None, run_seed: int,
                 created: int) -> None:
        self.own, self.tokenizer, self.keeps_logits = own, tokenizer, keeps_logits
        self.replica, self.tp = replica, tp
        self.run_seed, self.created, self.flush_every = run_seed, created, flush_every
        self.tally = Tally()
        self._steps: list[tuple[int, int, float, float, float, float]] = []
        self._journaled = time.monotonic()              # when steps went to the journal
        self._requests = RequestsPart(parts_dir, attempt, replica, flush_every) if is_root else None
        # Logits first: what is recorded as finished then rarely lacks any after a kill
        self._parts = [part for part in (own, self._requests) if part is not None]
        self._kept: dict[int, list[np.ndarray]] = {}    # on the root: keys of the logits of each request that runs

    @property
    def paths(self) -> list[str]:
        """The journals that are written here."""
        return [part.path for part in self._parts]

    def result(self, result: Result) -> None:
        assert self._requests is not None, "only the root of a replica hands out results"
        self._requests.add(**self._record(result), logits_rows=self._rows_kept(result.request.index),
                           result=result_line(result, self.tokenizer, self.created))

    def _rows_kept(self, index: int) -> int:
        """How many different rows of logits the request has; they are forgotten."""
        keys = self._kept.pop(index, None)
        return len(np.unique(np.concatenate(keys), axis=0)) if keys else 0

    def _record(self, result: Result) -> dict[str, Any]:
        """The request as plain numbers for its HDF5 part."""
        request = result.request
        choices = [SequenceRecord(
            choice.item, choice.sample, choice.index, sequence_seed(self.run_seed, request, choice.item, choice.sample),
            choice.token_ids, choice.logprobs, choice.text, choice.finish_reason, choice.stop_reason, choice.top,
            timing.queue_s, timing.prefill_s, timing.first_token_s, timing.decode_s)
            for choice, timing in zip(result.choices, result.timings, strict=True)]
        scores = result.prompt_logprobs
        logprobs = None if scores is None else [[s if s is None else s[0] for s in item] for item in scores]
        top = None if scores is None else [[s if s is None else s[1] for s in item] for item in scores]
        return {"index": request.index, "line": request.line, "custom_id": request.custom_id,
                "replica": self.replica, "tp": self.tp, "prompts": request.prompts, "choices": choices,
                "prompt_logprobs": logprobs, "prompt_top": top}

    def failed(self, request: Request, message: str, code: str, status: int) -> None:
        self._kept.pop(request.index, None)
        self.reject(FailedLine(request.line, request.index, request.custom_id, f"line {request.line}: {message}",
                               None, code, status))

    def reject(self, failed: FailedLine) -> None:
        """A line that no replica answered: an error line in the results."""
        assert self._requests is not None, "only the root of a replica hands out results"
        self._requests.add(index=failed.index, line=failed.line, custom_id=failed.custom_id, replica=-1, tp=0,
                           status=failed.status, error=failed.message, result=error_line(failed))

    def logits(self, keys: np.ndarray, logits: np.ndarray) -> None:
        if not self.keeps_logits:
            return
        self.own.add_logits(keys, logits)
        if self._requests is not None:
            for index in np.unique(keys[:, 0]).tolist():
                self._kept.setdefault(index, []).append(keys[keys[:, 0] == index, 1:3])

    def step(self, record: tuple[int, int, float, float, float, float]) -> None:
        self._steps.append(record)

    def progress(self, prefilled: int, generated: int, finished: int) -> None:
        self.tally.prefilled += prefilled
        self.tally.generated += generated
        self.tally.finished += finished
        now = time.monotonic()
        if now - self._journaled >= self.flush_every:
            self._journal_steps()
            self._journaled = now
        for part in self._parts:
            part.flush_if_due()

    def _journal_steps(self) -> None:
        if self._steps:
            self.own.add_steps(np.array(self._steps, STEP_RECORD))
            self._steps = []

    def __enter__(self) -> ReplicaOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close the parts; what was finished before an exception is kept."""
        board().say("writing its journals")
        with contextlib.suppress(OutputError) if kind is not None else contextlib.nullcontext():
            self._journal_steps()
        for part in self._parts:
            if kind is None:
                part.close()
            else:
                with contextlib.suppress(OutputError):
                    part.close()
