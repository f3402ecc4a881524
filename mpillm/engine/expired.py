"""The errors file of a run that stopped and will not be resumed: the lines that it did not come to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpillm.engine.request import echoed_id
from mpillm.errors import OutputError
from mpillm.formats.jsonl import dumps_strict

MESSAGE = "the run was stopped before this line was finished"


def write_expired(path: str, lines: Iterator[tuple[int, int, bytes]], finished: np.ndarray) -> int:
    """Write a record with the code ``batch_expired`` for each line that is not in ``finished`` (sorted indices).

    ``lines``: (index, number, bytes) of all. The number of records. Raises OutputError.
    """
    count, done = 0, iter(finished.tolist())
    following = next(done, None)
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            for index, number, raw in lines:
                if index == following:
                    following = next(done, None)
                    continue
                file.write(dumps_strict(_record(number, raw)) + "\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".tmp", path)
    except OSError as error:
        raise OutputError(f"--errors {path}: {error.strerror}") from None
    return count


def _record(number: int, raw: bytes) -> dict[str, Any]:
    """As OpenAI's batches have it, with the id that a result of the line would have."""
    return {"id": f"batch_req_{number:08d}", "custom_id": echoed_id(raw), "line": number, "response": None,
            "error": {"code": "batch_expired", "message": MESSAGE}}
