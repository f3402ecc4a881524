"""A journal: a file of records that is only ever appended to, so that no kill, full disk or lost node spoils it.

A record is a header of 32 bytes and its payload:

    magic u32, kind u16, zero u16, number i64, length of the payload u64, crc32 of the payload u32,
    crc32 of the 28 bytes before u32                                        (all little-endian)

A record is whole or it is not there: reading ends at the first that is short or whose sums are wrong. What follows
is the torn tail of a write that was interrupted; ``repair`` cuts it off before anything is appended again.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from mpillm.errors import OutputError

LOG = logging.getLogger("mpillm.journal")
MAGIC = 0x4A4C504D          # "MPLJ"
HEADER = struct.Struct("<IHHqQI")
SUM = struct.Struct("<I")
HEAD_BYTES = HEADER.size + SUM.size
BUFFER = 1 << 20            # bytes that wait for a write
PENDING = 256 << 20         # bytes that wait for a full disk, at most
PATIENCE = 100.0            # seconds that a full disk is waited for
RETRY = 1.0                 # seconds between two tries
CHUNK = 4 << 20             # bytes read at a time
FULL = (errno.ENOSPC, errno.EDQUOT)


class Record(NamedTuple):
    """A whole record: ``payload`` is valid until the next is asked for, ``at`` its offset in the file."""

    kind: int
    number: int
    at: int
    payload: memoryview


class Journal:
    """Appends records to the new file ``path``; whoever dies loses at most what came after the last flush.

    Records wait in memory until 1 MiB of them is there or ``flush_every`` seconds have passed; each flush also
    has the disk written to, by a thread of its own. A full disk is waited for: records stay in memory, each flush
    tries again, and after ``patience`` seconds or with 256 MiB waiting it is an OutputError. So is any other
    failure, at once; what was written before stays whole.
    """

    def __init__(self, path: str, flush_every: float, *, patience: float = PATIENCE) -> None:
        self.path, self.flush_every, self.patience = path, flush_every, patience
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise OutputError(f"cannot create {path}: {error.strerror}") from error
        self._waiting: list[bytes] = []
        self._pending = self._written = 0
        self._flushed, self._full_since = time.monotonic(), 0.0
        self._sync_wanted, self._sync_lock = threading.Event(), threading.Lock()
        self._sync_error: OSError | None = None
        self._folder_synced = False
        self.is_open = True
        # Made here: where memory has run out, the start of a thread never returns. As a daemon, a dead mount does not
        # keep the program from its end.
        self._syncing = threading.Thread(target=self._sync_when_wanted, daemon=True)
        self._syncing.start()

    def append(self, kind: int, number: int, *pieces: Any) -> None:
        """One record, its payload in pieces, bytes or contiguous arrays. OutputError when the disk is full."""
        assert self.is_open, f"{self.path} is written after its close"
        length = total = 0
        for piece in pieces:
            length, total = length + memoryview(piece).nbytes, zlib.crc32(piece, total)
        head = HEADER.pack(MAGIC, kind, 0, number, length, total)
        self._waiting.append(b"".join((head, SUM.pack(zlib.crc32(head)), *pieces)))
        self._pending += len(self._waiting[-1])
        # While the disk is full, flushes alone try again
        if self._pending >= BUFFER and not self._full_since:
            self._write()
        if self._pending > PENDING:
            raise OutputError(f"cannot write {self.path}: the disk is full, and {self._pending >> 20} MiB wait for it")

    def flush_if_due(self) -> None:
        """Writes when the last flush is ``flush_every`` seconds ago, without waiting for the disk itself."""
        now = time.monotonic()
        if now - self._flushed < (RETRY if self._full_since else self.flush_every):
            return
        self._flushed = now
        self._write()
        self._sync_wanted.set()

    def flush(self, *, sync: bool = False) -> None:
        """Everything so far survives the death of this process; ``sync``: of the machine. A full disk is waited for."""
        self._flushed = time.monotonic()
        self._write()
        while self._waiting:
            time.sleep(min(RETRY, self.patience))
            self._write()
        if sync:
            self._sync()
            self._check()

    def close(self) -> None:
        """Flushes to the disk itself and closes; a second call does nothing."""
        if not self.is_open:
            return
        try:
            self.flush(sync=True)
        finally:
            self.is_open = False
            self._sync_wanted.set()
            self._syncing.join()
            os.close(self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            self.close()
        except OutputError:
            if kind is None:        # else the first error is the one to tell
                raise

    def _write(self) -> None:
        """Hands the waiting records to the system, all or as many as the disk takes."""
        self._check()
        if not self._waiting:
            return
        view = memoryview(self._waiting[0] if len(self._waiting) == 1 else b"".join(self._waiting))
        done = 0
        try:
            while done < len(view):
                done += os.write(self._file, view[done:])
        except OSError as error:
            self._cut_back(done)
            if error.errno not in FULL:
                raise OutputError(f"cannot write {self.path}: {error.strerror}") from error
            self._wait_for_disk(error)
            return
        self._written += done
        self._pending = 0
        self._waiting.clear()
        if self._full_since:
            LOG.warning("%s: the disk has room again, nothing was lost", self.path)
            self._full_since = 0.0

    def _cut_back(self, done: int) -> None:
        """Of ``done`` bytes keep the whole records; the rest waits in memory."""
        kept = count = 0
        while kept + len(self._waiting[count]) <= done:
            kept += len(self._waiting[count])
            count += 1
        del self._waiting[:count]
        self._written += kept
        self._pending -= kept
        if kept != done:
            try:
                os.ftruncate(self._file, self._written)
            except OSError as error:
                raise OutputError(f"cannot cut {self.path} to its whole records: {error.strerror}") from error

    def _wait_for_disk(self, error: OSError) -> None:
        now = time.monotonic()
        if not self._full_since:
            self._full_since = now
            LOG.warning("cannot write %s: %s: waiting up to %.0f s for room", self.path, error.strerror, self.patience)
        if now - self._full_since >= self.patience:
            raise OutputError(f"cannot write {self.path}: {error.strerror} for {self.patience:.0f} s: make room, then "
                              "go on with --resume") from error

    def _sync_when_wanted(self) -> None:
        while self.is_open:
            self._sync_wanted.wait()
            self._sync_wanted.clear()
            if self.is_open:
                self._sync()

    def _sync(self) -> None:
        try:
            with self._sync_lock:
                os.fdatasync(self._file)
                if not self._folder_synced:
                    self._folder_synced = True
                    sync_folder(os.path.dirname(self.path))
        except OSError as error:
            self._sync_error = error

    def _check(self) -> None:
        if self._sync_error is not None:
            raise OutputError(f"cannot write {self.path}: {self._sync_error.strerror}") from self._sync_error


def sync_folder(path: str) -> None:
    """The names in a folder are on the disk; some network file systems cannot, which is no error."""
    with suppress(OSError):
        folder = os.open(path or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class Reader:
    """Iterates over the whole records of a journal; ``whole``: bytes of those so far, ``size``: of the file.

    Memory: 4 MiB, or the largest record. OutputError when the file cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path, self.whole, self.size = path, 0, 0
        self._block, self._base = memoryview(b""), 0

    def __iter__(self) -> Iterator[Record]:
        with _reading(self.path), open(self.path, "rb", buffering=0) as file:
            self.size = os.fstat(file.fileno()).st_size
            while (record := self._record(file.fileno(), self.whole)) is not None:
                yield record
                self.whole = record.at + len(record.payload)

    def has_record_behind(self) -> bool:
        """Whether a whole record comes after the end of the whole ones: then the file is damaged, not torn."""
        magic = MAGIC.to_bytes(4, "little")
        with _reading(self.path), open(self.path, "rb", buffering=0) as file:
            at = self.whole + 1
            while at < self.size:
                block = _pread(file.fileno(), min(CHUNK, self.size - at), at)
                found = block.find(magic)
                while found >= 0:
                    if self._record(file.fileno(), at + found) is not None:
                        return True
                    found = block.find(magic, found + 1)
                if len(block) < CHUNK:
                    return False
                at += CHUNK - len(magic) + 1
        return False

    def _record(self, file: int, at: int) -> Record | None:
        if at + HEAD_BYTES > self.size:
            return None
        head = self._bytes(file, at, HEAD_BYTES)
        if len(head) < HEAD_BYTES or zlib.crc32(head[:HEADER.size]) != SUM.unpack_from(head, HEADER.size)[0]:
            return None
        magic, kind, _, number, length, total = HEADER.unpack_from(head)
        if magic != MAGIC or length > self.size - at - HEAD_BYTES:
            return None
        payload = self._bytes(file, at + HEAD_BYTES, length)
        if len(payload) < length or zlib.crc32(payload) != total:
            return None
        return Record(kind, number, at + HEAD_BYTES, payload)

    def _bytes(self, file: int, at: int, length: int) -> memoryview:
        """``length`` bytes at ``at``, fewer at the end of the file."""
        start = at - self._base
        if start < 0 or start + length > len(self._block):
            self._block, self._base = memoryview(_pread(file, max(length, CHUNK), at)), at
            start = 0
        return self._block[start:start + length]


class OpenFiles:
    """Files open for reading, the least recently used closed when there are more than ``limit``.

    A job may have more parts than a process may have open files.
    """

    def __init__(self, limit: int = 128) -> None:
        self._limit = limit
        self._files: OrderedDict[str, int] = OrderedDict()

    def read(self, path: str, at: int, out: np.ndarray) -> None:
        """Fills ``out`` (contiguous) from offset ``at``. OutputError."""
        view = out.reshape(-1).view(np.uint8).data
        try:
            file = self._open(path)
            done = 0
            while done < len(view):
                count = os.preadv(file, [view[done:]], at + done)
                if not count:
                    raise OutputError(f"the part {path} became shorter while it was read")
                done += count
        except OSError as error:
            raise OutputError(f"cannot read {path}: {error.strerror}") from error

    def _open(self, path: str) -> int:
        file = self._files.pop(path, -1)
        if file < 0:
            if len(self._files) >= self._limit:
                os.close(self._files.popitem(last=False)[1])
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._files[path] = file
        return file

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


def _pread(file: int, length: int, at: int) -> bytes:
    pieces = []
    while length and (piece := os.pread(file, length, at)):
        pieces.append(piece)
        length, at = length - len(piece), at + len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot read {path}: {error.strerror}") from error


def repair(reader: Reader) -> str | None:
    """Cuts the tail that a finished ``reader`` could not read; what was done, None if nothing had to be.

    A tail with whole records in it was not torn by a kill: the file is copied to ``.damaged`` before the cut. A file
    without any whole record is renamed to that. OutputError when neither can be done.
    """
    path, lost = reader.path, reader.size - reader.whole
    if not lost:
        return None
    damaged = _free_name(path + ".damaged")
    try:
        if not reader.whole:
            os.rename(path, damaged)
            return f"{path} has no whole record: set aside as {damaged}"
        said = f"{path}: {lost} bytes of an interrupted write cut off"
        if reader.has_record_behind():
            shutil.copyfile(path, damaged + ".tmp")
            os.rename(damaged + ".tmp", damaged)
            said = f"{path} is damaged after {reader.whole} bytes: the rest is set aside with a copy, {damaged}"
        os.truncate(path, reader.whole)
    except OSError as error:
        with suppress(OSError):
            os.unlink(damaged + ".tmp")
        raise OutputError(f"cannot repair {path}: {error.strerror}: nothing of it was changed") from error
    return said


def _free_name(path: str) -> str:
    name, number = path, 1
    while os.path.lexists(name):
        name, number = f"{path}.{number}", number + 1
    return name
