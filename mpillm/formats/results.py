"""The results file: made from the journals of a run, under a temporary name until it is complete."""

from __future__ import annotations

import os

import numpy as np

from mpillm.errors import OutputError
from mpillm.formats.hold import Hold
from mpillm.formats.journal import OpenFiles, sync_folder
from mpillm.formats.part_scan import Parts

ORDERS = ("input", "finished")
_BUFFER = 1 << 20       # bytes that are written at a time
_BATCH = 1 << 16        # requests whose places are Python numbers at a time


class Target:
    """The results file: its temporary name is held from the start, filled from the parts, then renamed.

    Symbolic links are followed. With ``resume`` a temporary file of an earlier run is taken over. Raises OutputError
    when the file exists and may not be replaced, is no regular file, or cannot be written.
    """

    def __init__(self, path: str, overwrite: bool, resume: bool = False) -> None:
        self.path, self._overwrite = path, overwrite
        self._final = os.path.realpath(path)
        folder = os.path.dirname(self._final)
        if os.path.isdir(self._final) or path.endswith(os.sep):
            raise OutputError(f"results {path} is a folder: name a file")
        if not os.path.isdir(folder):
            raise OutputError(f"results {path}: the folder {folder} does not exist: make it, or choose "
                              "another --results")
        self.check_free()
        self._hold = Hold(self._final + ".tmp", f"the results {path}")
        if self._hold.nbytes and not (overwrite or resume):
            self._hold.release(keep=True)
            raise OutputError(f"{self._final}.tmp is left from an earlier run: move it away, or use --overwrite")

    def check_free(self) -> None:
        """There is no file that must not be replaced. Raises OutputError."""
        if os.path.lexists(self._final) and not os.path.isfile(self._final):
            raise OutputError(f"results {self.path} is not a regular file: choose another --results")
        if os.path.exists(self._final) and not self._overwrite:
            raise OutputError(f"results {self.path} exists: choose another --results, or use --overwrite")

    def fill(self, parts: Parts, chosen: np.ndarray, order: str = "input") -> int:
        """Write the records of the ``chosen`` requests (``part_scan.choose``), as they came in or ended; their number.

        Synced to the disk. Holds 1 MiB, or one record. Raises OutputError.
        """
        assert order in ORDERS, f"results in the order {order}"
        if order == "finished":
            chosen = chosen[np.argsort(chosen["ended"], kind="stable")]
        files = OpenFiles()
        try:
            os.ftruncate(self._hold.descriptor, 0)
            with open(self._hold.descriptor, "wb", _BUFFER, closefd=False) as target:
                for begin in range(0, len(chosen), _BATCH):
                    some = chosen[begin:begin + _BATCH]
                    starts = some["at"] + some["length"] - some["result_bytes"]
                    for number, at, size in zip(some["file"].tolist(), starts.tolist(),
                                                some["result_bytes"].tolist(), strict=True):
                        record = np.empty(size, np.uint8)
                        files.read(parts.requests[number], at, record)
                        target.write(record.data)
                target.flush()
                os.fsync(target.fileno())
        except OSError as error:
            raise OutputError(f"results {self.path}: {error.strerror}") from None
        finally:
            files.close()
        return len(chosen)

    def commit(self) -> None:
        """Rename the filled file. Raises OutputError."""
        try:
            os.replace(self._hold.path, self._final)
        except OSError as error:
            raise OutputError(f"results {self.path}: {error.strerror}") from None
        sync_folder(os.path.dirname(self._final))
        self._hold.release(keep=True)

    def release(self, keep: bool = False) -> None:
        """Let go; what was not committed is removed (the parts have it), unless ``keep``."""
        self._hold.release(keep)
