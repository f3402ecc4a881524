"""The results file: parts that grow during the run, one a replica, merged into one file in line order.

A part holds one record a line, the request's index (16 hexadecimal digits) and a tab before the JSON.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from mpillm.errors import OutputError
from mpillm.formats.jsonl import dumps_strict

_PREFIX = 17
PART = re.compile(r"results-\d{4,}\.jsonl")   # names of parts in the folder of a run's parts


class ResultsPart:
    """Appends records to one part; each is on its way to the disk when ``add`` returns."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._file = open(path, "wb", buffering=0)
        except OSError as error:
            raise OutputError(f"results {path}: {error.strerror}") from None

    def add(self, index: int, record: dict[str, Any]) -> None:
        """One request's record. Raises OutputError when the disk is full."""
        data = memoryview(f"{index:016x}\t{dumps_strict(record)}\n".encode())
        try:
            while data:
                data = data[self._file.write(data):]
        except OSError as error:
            raise OutputError(f"results {self.path}: {error.strerror}") from None

    def flush_if_due(self) -> None:
        """Nothing waits: every record is handed to the system at once."""

    def close(self) -> None:
        self._file.close()


def _offsets(file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """(index, offset, length) of each record's JSON; the newline counts."""
    at = 0
    for line in file:
        yield int(line[:_PREFIX - 1], 16), at + _PREFIX, len(line) - _PREFIX
        at += len(line)


def merge(parts: Iterable[str], output: str) -> int:
    """Write all records in order of their index to ``output``, whole or not at all; the number of them.

    Holds one record at a time beside the table of their places. Raises OutputError.
    """
    temporary = output + ".tmp"
    try:
        files = [open(path, "rb") for path in parts]
        try:
            places = sorted((index, number, at, size) for number, file in enumerate(files)
                            for index, at, size in _offsets(file))
            with open(temporary, "wb") as target:
                for _, number, at, size in places:
                    target.write(os.pread(files[number].fileno(), size, at))
                target.flush()
                os.fsync(target.fileno())
        finally:
            for file in files:
                file.close()
        os.replace(temporary, output)
    except OSError as error:
        raise OutputError(f"results {output}: {error.strerror}") from None
    return len(places)
