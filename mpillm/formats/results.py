"""The results file: parts that grow during the run, one a replica, merged into one file in line order.

A part holds one record a line, the request's index (16 hexadecimal digits) and a tab before the JSON.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from mpillm.errors import OutputError
from mpillm.formats.hold import Hold
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


class Target:
    """The results file: its temporary name is held from the start, filled from the parts, then renamed.

    Symbolic links are followed. Raises OutputError when the file exists and may not be replaced, is no regular
    file, or cannot be written.
    """

    def __init__(self, path: str, overwrite: bool) -> None:
        self.path, self._overwrite = path, overwrite
        self._final = os.path.realpath(path)
        folder = os.path.dirname(self._final)
        if os.path.isdir(self._final) or path.endswith(os.sep):
            raise OutputError(f"results {path} is a folder: name a file")
        if not os.path.isdir(folder):
            raise OutputError(f"results {path}: the folder {folder} does not exist: make it, or choose "
                              "another --results")
        self._check_existing()
        self._hold = Hold(self._final + ".tmp", f"the results {path}")
        if self._hold.nbytes and not overwrite:
            self._hold.release(keep=True)
            raise OutputError(f"{self._final}.tmp is left from an earlier run: move it away, or use --overwrite")

    def _check_existing(self) -> None:
        if os.path.lexists(self._final) and not os.path.isfile(self._final):
            raise OutputError(f"results {self.path} is not a regular file: choose another --results")
        if os.path.exists(self._final) and not self._overwrite:
            raise OutputError(f"results {self.path} exists: choose another --results, or use --overwrite")

    def fill(self, parts: Iterable[str]) -> int:
        """Write all records in order of their index; the number of them.

        Holds one record at a time beside the table of their places.
        """
        try:
            files = [open(path, "rb") for path in parts]
            try:
                places = sorted((index, number, at, size) for number, file in enumerate(files)
                                for index, at, size in _offsets(file))
                os.ftruncate(self._hold.descriptor, 0)
                with open(self._hold.descriptor, "wb", closefd=False) as target:
                    for _, number, at, size in places:
                        target.write(os.pread(files[number].fileno(), size, at))
                    target.flush()
                    os.fsync(target.fileno())
            finally:
                for file in files:
                    file.close()
        except OSError as error:
            raise OutputError(f"results {self.path}: {error.strerror}") from None
        return len(places)

    def commit(self) -> None:
        """Rename the filled file."""
        self._check_existing()
        try:
            os.replace(self._hold.path, self._final)
        except OSError as error:
            raise OutputError(f"results {self.path}: {error.strerror}") from None
        self._hold.release(keep=True)

    def release(self) -> None:
        """Let go; what was not committed is removed (the parts have it)."""
        self._hold.release()
