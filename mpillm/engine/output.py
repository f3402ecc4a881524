"""Where a replica's results go during the run: its part files, and the progress that is shown."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np

from mpillm.engine.feed import Tally
from mpillm.engine.request import FailedLine, Request, Result, sequence_seed
from mpillm.engine.results import error_line, result_line
from mpillm.errors import OutputError
from mpillm.formats.hdf5_parts import LogitsPart, ReplicaPart, SequenceRecord, replica_part_path
from mpillm.formats.results import ResultsPart


class ReplicaOutput:
    """A ``generate.Sink``: the root writes requests, every rank the logits of its vocabulary rows."""

    def __init__(self, parts_dir: str, replica: int, *, is_root: bool, logits: LogitsPart | None,
                 tokenizer: Any | None, run_seed: int, created: int) -> None:
        self.logits_part, self.tokenizer = logits, tokenizer
        self.replica, self.run_seed, self.created = replica, run_seed, created
        self._root = _RootParts(parts_dir, replica) if is_root else None
        self._parts = [part for part in (*(self._root.parts if self._root else ()), logits) if part is not None]
        self.hdf5_parts = [part.path for part in self._parts
                           if not isinstance(part, ResultsPart) and part.path is not None]
        self.n_failed, self.first_failure = 0, ""
        self.tally = Tally()
        self.steps: list[tuple[int, int, float, float, float, float]] = []

    def step(self, record: tuple[int, int, float, float, float, float]) -> None:
        self.steps.append(record)

    def result(self, result: Result) -> None:
        assert self._root is not None, "only the root of a replica hands out results"
        self._root.hdf5.add_request(**self._record(result))
        self._root.results.add(result.request.index, result_line(result, self.tokenizer, self.created))

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
                "replica": self.replica, "prompts": request.prompts, "choices": choices,
                "prompt_logprobs": logprobs, "prompt_top": top}

    def failed(self, request: Request, message: str, code: str, status: int) -> None:
        failed = FailedLine(request.line, request.index, request.custom_id, f"line {request.line}: {message}",
                            None, code, status)
        self.reject(failed)

    def reject(self, failed: FailedLine) -> None:
        """An error line in the results."""
        assert self._root is not None, "only the root of a replica hands out results"
        self.n_failed += 1
        self.first_failure = self.first_failure or failed.message
        self._root.results.add(failed.index, error_line(failed))

    def logits(self, keys: np.ndarray, logits: np.ndarray) -> None:
        if self.logits_part is not None and logits.shape[1]:
            self.logits_part.append(keys, logits)

    def progress(self, prefilled: int, generated: int, finished: int) -> None:
        self.tally.prefilled += prefilled
        self.tally.generated += generated
        self.tally.finished += finished
        for part in self._parts:
            part.flush_if_due()

    def __enter__(self) -> ReplicaOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close the parts; what was finished before an exception is kept."""
        for part in self._parts:
            if kind is None:
                part.close()
            else:
                with contextlib.suppress(OutputError):
                    part.close()


class _RootParts:
    """The two files of a replica's root."""

    def __init__(self, parts_dir: str, replica: int) -> None:
        self.hdf5 = ReplicaPart(replica_part_path(parts_dir, replica))
        self.results = ResultsPart(results_part(parts_dir, replica))
        self.parts = (self.hdf5, self.results)


def results_part(parts_dir: str, replica: int) -> str:
    return os.path.join(parts_dir, f"results-{replica:04d}.jsonl")

