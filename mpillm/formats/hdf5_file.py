"""HDF5 files under a full disk or a lost mount: how this program writes them."""

from __future__ import annotations

import os
import re
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import h5py
import numpy as np

from mpillm.errors import OutputError


def reason(error: BaseException) -> str:
    """The system's word for an error of h5py or the system, such as ``No space left on device``."""
    found = re.search(r"errno = (\d+)", str(error))
    number = int(found[1]) if found else getattr(error, "errno", None)
    if number:
        return os.strerror(number)
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class _Disk:
    """The file below HDF5, as h5py's ``fileobj`` driver wants it.

    HDF5 cannot be told that a write failed: its next close of that file crashes the process (seen with
    HDF5 2.0.0). So the first failure is kept in ``error``, and this and later writes only seem to succeed;
    the owner asks for ``error`` after each operation.
    """

    def __init__(self, path: str) -> None:
        self.error: OSError | None = None
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._at = self._size = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + {0: 0, 1: self._at, 2: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def truncate(self, size: int | None = None) -> int:
        self._size = self._at if size is None else size
        return self._size

    def flush(self) -> None:
        """Nothing waits."""

    def read(self, size: int) -> bytes:
        """h5py knows file objects by this method; it reads with ``readinto``."""
        data = bytearray(size)
        self.readinto(data)
        return bytes(data)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):
            data = os.pread(self._file, len(view) - done, self._at + done)
            if not data:  # beyond the end, or never written because of ``error``
                data = bytes(len(view) - done)
            view[done:done + len(data)] = data
            done += len(data)
        self._at += done
        return done

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        with self._keep_error():
            while self.error is None and done < len(view):
                done += os.pwrite(self._file, view[done:], self._at + done)
        self._at += len(view)
        self._size = max(self._size, self._at)
        return len(view)

    def finish(self, sync: bool) -> None:
        """Closes; ``sync``: when the bytes are on the disk itself."""
        with self._keep_error():
            if self.error is None:
                os.ftruncate(self._file, self._size)
                if sync:
                    os.fsync(self._file)
        with self._keep_error():
            os.close(self._file)

    @contextmanager
    def _keep_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error


class WritableFile:
    """A new HDF5 file at ``path``, which is replaced; ``file`` is the h5py.File.

    Default file version, readable by HDF5 1.8 and later. Every failure is an OutputError naming path and reason, at
    the latest from ``close``.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._disk = _Disk(path)
        except OSError as error:
            raise OutputError(f"cannot create {path}: {reason(error)}") from error
        self.file = h5py.File(self._disk, "w")
        self.is_open = True
        # HDF5's own closing at exit would call into a Python that is gone.
        self._at_exit = weakref.finalize(self, _close_quietly, self.file, self._disk)

    @contextmanager
    def guard(self) -> Iterator[h5py.File]:
        """What is written inside either reached the system, or an OutputError says why not."""
        assert self.is_open, f"{self.path} is written after its close"
        try:
            yield self.file
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            self._check()  # most likely a consequence of the disk's own error
            if isinstance(error, (ValueError, KeyError)):
                raise
            raise OutputError(f"cannot write {self.path}: {reason(error)}") from error
        self._check()

    def close(self, *, sync: bool = False) -> None:
        """Closes; ``sync``: the bytes are on the disk itself. A second call does nothing."""
        if not self.is_open:
            return
        try:
            with self.guard() as file:
                file.close()
        finally:
            self.is_open = False
            self._at_exit.detach()
            self._disk.finish(sync)
        self._check()

    def abandon(self) -> None:
        """Closes after a failure, without another word."""
        with suppress(OutputError):
            self.close()

    def _check(self) -> None:
        if self._disk.error is not None:
            raise OutputError(f"cannot write {self.path}: {reason(self._disk.error)}") from self._disk.error


def _close_quietly(file: h5py.File, disk: _Disk) -> None:
    with suppress(OSError, RuntimeError):
        file.close()
    disk.finish(sync=False)


def extend(dataset: h5py.Dataset, values: np.ndarray) -> None:
    """Appends ``values`` along the first axis."""
    if len(values):
        start = dataset.shape[0]
        dataset.resize(start + len(values), axis=0)
        dataset[start:] = values


class RowWriter:
    """Writes whole rows of a two-dimensional dataset made by ``create``, each a chunk of its own.

    A row can be written at any place in any order and is compressed once. Rows are shuffled and deflated
    here (``threads`` at a time) rather than by HDF5: zlib's run-length strategy is two to three times as
    fast on logits as level 1 and their files are smaller; readers see the usual filters.
    """

    def __init__(self, dataset: h5py.Dataset, threads: int = 1) -> None:
        self._dataset, self._compress = dataset, dataset.compression is not None
        self._pool = ThreadPoolExecutor(threads) if threads > 1 and self._compress else None

    @staticmethod
    def create(file: h5py.File, name: str, rows: int, width: int, dtype: Any, compress: bool) -> h5py.Dataset:
        """An empty dataset [rows, width], growing along its first axis."""
        filters = dict(compression="gzip", compression_opts=1, shuffle=True) if compress else {}
        return file.create_dataset(name, (rows, width), dtype, maxshape=(None, width), chunks=(1, width),
                                   **filters)

    def write(self, places: Sequence[int] | np.ndarray, rows: np.ndarray) -> None:
        """``rows`` [r, width], contiguous and of the dataset's dtype, go to rows ``places``."""
        assert rows.dtype == self._dataset.dtype and rows.shape[1] == self._dataset.shape[1]
        if self._compress:
            chunks: Iterable[Any] = (self._pool.map if self._pool else map)(_shuffle_and_deflate, rows)
        else:
            chunks = rows
        for place, chunk in zip(places, chunks, strict=True):
            self._dataset.id.write_direct_chunk((int(place), 0), chunk, 0)

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)


def _shuffle_and_deflate(row: np.ndarray) -> bytes:
    """The bytes of HDF5's shuffle and deflate filters for one contiguous row."""
    planes = np.ascontiguousarray(row.view(np.uint8).reshape(-1, row.itemsize).T)
    deflate = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, 8, zlib.Z_RLE)
    return deflate.compress(planes.data) + deflate.flush()
