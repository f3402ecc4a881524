"""What every checkpoint format offers: named tensors, of which rows and columns are read by ``pread``.

Nothing is mapped into memory: a page fault on a network mount ends a process by a signal that nothing
catches, while a read that fails is an error with a name. Every size that a file states is compared with
the file before it is used.
"""

from __future__ import annotations

import math
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpillm.errors import ModelError
from mpillm.formats.decode import decodable, decode

CHUNK_BYTES = 4 << 20        # raw bytes that one read holds beside its result
MAX_NAME = 256               # characters of a tensor's name or a key
LFS_MARK = b"version https://git-lfs"

Rows = range | np.ndarray | None


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor: ``shape`` is (outputs, inputs), ``dtype`` a name like F32, BF16, Q8_0, Q4_K."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    block: int = 1           # values of a quantisation block along the last axis


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: ``offset`` in bytes from the file's start, ``block_bytes`` of one block."""

    info: TensorInfo
    source: Source
    offset: int
    block_bytes: int


def open_error(path: str, error: OSError) -> ModelError:
    """The message for a file that the system does not let us read."""
    return ModelError(f"{path}: cannot be read: {error.strerror or error}")


def listing(folder: str) -> list[str]:
    """Sorted names in a folder; ModelError where it cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise open_error(folder, error) from error


class Source:
    """A regular file that is read in pieces, by several threads; ``bytes_read`` counts what was asked of it."""

    def __init__(self, path: str) -> None:
        """Raise ModelError for a missing, unreadable or special file, and for a git-lfs pointer."""
        self.path, self.bytes_read, self._fd, self._lock = path, 0, -1, threading.Lock()
        try:
            # Ask before opening: opening a FIFO would wait for a writer.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise self.error("is not a regular file")
            self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            self.size = os.fstat(self._fd).st_size
        except OSError as error:
            raise open_error(path, error) from error
        try:
            if self.size < 4096 and self.read(0, min(self.size, len(LFS_MARK))) == LFS_MARK:
                raise self.error("is a git-lfs pointer, not the file itself: run 'git lfs pull' there")
        except ModelError:
            self.close()
            raise

    def error(self, text: str) -> ModelError:
        """A ModelError about this file."""
        return ModelError(f"{self.path}: {text}")

    def named(self, name: str) -> str:
        """``name``, which must be fit for a message: no real one is long or unprintable."""
        if len(name) > MAX_NAME or not name.isprintable():
            raise self.error(f"has the name {name[:40]!r} in it, which cannot be right: damaged")
        return name

    def read(self, offset: int, count: int) -> bytearray:
        """``count`` bytes from ``offset``, which must lie within the size the file had when opened."""
        assert 0 <= offset and 0 <= count and offset + count <= self.size, f"{self.path}: read beyond the end"
        data = bytearray(count)
        self.read_into(offset, memoryview(data))
        return data

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` (bytes) from ``offset``; a short read is a ModelError."""
        done, count = 0, len(view)
        self._count(count)
        while done < count:
            try:
                got = os.preadv(self._fd, [view[done:] if done else view], offset + done)
            except OSError as error:
                raise open_error(self.path, error) from error
            if got == 0:
                raise self.error(f"ends at byte {offset + done}, but {count - done} more bytes are needed: "
                                 "the file was cut while it was read")
            done += got

    def read_pieces(self, offsets: Sequence[int], view: memoryview, size: int) -> None:
        """Fill ``view`` with pieces of ``size`` bytes from ``offsets``, which are many: a tight loop."""
        preadv, fd = os.preadv, self._fd
        at = 0
        try:
            for offset in offsets:
                piece = view[at:at + size]
                if preadv(fd, (piece,), offset) != size:
                    self.read_into(offset, piece)      # goes on after a short read, or names it
                    self._count(-size)
                at += size
        except OSError as error:
            raise open_error(self.path, error) from error
        self._count(size * len(offsets))

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class Checkpoint:
    """Tensors of a model in one or several files; subclasses fill the attributes.

    ``kind`` is 'hf' or 'gguf'; ``metadata`` holds config.json's content or GGUF's keys and values;
    ``warnings`` collects sentences that a user should see once, ``notes`` those that are good to know.
    """

    kind = ""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self.metadata: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.sources: list[Source] = []
        self._stored: dict[str, Stored] = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        for source in self.sources:
            source.close()

    @property
    def bytes_read(self) -> int:
        """Bytes read from all files so far."""
        return sum(source.bytes_read for source in self.sources)

    def add(self, stored: Stored) -> None:
        """Enter a tensor; a name that is there already is a ModelError."""
        name = stored.info.name
        other = self._stored.get(name)
        if other is not None:
            files = sorted({other.source.path, stored.source.path})
            raise ModelError(f"tensor {name} is stored twice, in {' and '.join(files)}")
        self._stored[name] = stored
        self.tensors[name] = stored.info

    def file_of(self, name: str) -> str:
        """The path of the file that holds tensor ``name``."""
        return self._find(name).source.path

    def unreadable(self, name: str) -> str | None:
        """Why the values of tensor ``name`` cannot be read here, or None if they can."""
        info = self._find(name).info
        if decodable(info.dtype):
            return None
        return (f"{self.file_of(name)}: tensor {name} has type {info.dtype}, which is not supported: "
                f"{self._remedy()}")

    def beside(self, name: str) -> tuple[str, ...]:
        """Tensors that are read together with tensor ``name``, such as its scales."""
        return ()

    def fingerprint(self) -> Iterator[bytes]:
        """What tells this model from another one, at the cost of some reads: heads, and a few bytes of each tensor."""
        yield repr(sorted(self.metadata.items())).encode("utf-8", "backslashreplace")
        for name in sorted(self._stored):
            stored = self._stored[name]
            yield f"{name} {stored.info.dtype} {stored.info.shape}".encode()
            start = stored.offset + stored.block_bytes * (math.prod(stored.info.shape) // stored.info.block // 2)
            yield bytes(stored.source.read(start, min(64, stored.source.size - start)))

    def _remedy(self) -> str:
        return "convert the model to BF16, F16 or F32"

    def read(self, name: str, rows: Rows = None, cols: range | None = None) -> np.ndarray:
        """Values of tensor ``name`` as float32 [rows, cols], or [rows] where it has one axis.

        A tensor of three axes counts as its matrices below each other.

        ``rows`` and ``cols`` are indices of the first and last axis (None: all); rows may be in any
        order. Only the blocks that they touch are read. Raise ModelError for an unknown name, a type
        that cannot be decoded, or a file that ends early.
        """
        stored = self._find(name)
        reason = self.unreadable(name)
        if reason is not None:
            raise ModelError(reason)
        shape = stored.info.shape
        if len(shape) == 1:
            assert cols is None, f"tensor {name} has one axis: no columns to choose"
            return self._read_vector(stored, rows)
        if len(shape) > 3:
            raise stored.source.error(f"tensor {name} has shape {shape}: one to three axes are supported")
        return self._read_matrix(stored, indices(name, rows, math.prod(shape[:-1])), _span(name, cols, shape[-1]))

    def read_raw(self, name: str, rows: Rows = None, cols: range | None = None,
                 room: np.ndarray | None = None) -> np.ndarray:
        """Rows of a matrix as stored, uint8 [rows, bytes]: of a quantised one the blocks that cover ``cols``.

        In ``room`` (uint8, 1-D) if it is large enough: memory that comes anew from the system comes slowly.

        ``cols`` must begin and end on multiples of 32, or of the block if that is less. Raise ModelError as
        ``read`` does.
        """
        stored = self._find(name)
        info = stored.info
        assert len(info.shape) in (2, 3), f"tensor {name} is no matrix: {info}"
        span, border = _span(name, cols, info.shape[-1]), min(info.block, 32)
        assert span.start % border == 0 and span.stop % border == 0, f"tensor {name}: {span} cuts a block of {border}"
        order, ordered = _rows_in_file_order(name, rows, math.prod(info.shape[:-1]))
        blocks = range(span.start // info.block, -(-span.stop // info.block) if span else span.start // info.block)
        row_bytes = stored.block_bytes * len(blocks)
        size = len(ordered) * row_bytes
        raw = np.empty(size, np.uint8) if room is None or len(room) < size else room[:size]
        raw = raw.reshape(len(ordered), row_bytes)
        _read_rows(stored, raw, ordered, blocks)
        if order is not None:
            raw[order] = raw.copy()
        return raw

    def read_flat(self, name: str) -> np.ndarray:
        """All values of a tensor of any shape, float32 [values]. Raise ModelError as ``read`` does."""
        stored = self._find(name)
        line = replace(stored, info=replace(stored.info, shape=(1, math.prod(stored.info.shape))))
        return self._read_matrix(line, np.zeros(1, np.int64), range(line.info.shape[1]))[0]

    def _find(self, name: str) -> Stored:
        stored = self._stored.get(name)
        if stored is None:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        return stored

    def _read_vector(self, stored: Stored, rows: Rows) -> np.ndarray:
        """Elements of a tensor with one axis: the shortest span around them is read."""
        info = stored.info
        index = indices(info.name, rows, info.shape[0])
        if not len(index):
            return np.empty(0, np.float32)
        first = int(index.min())
        span = range(first, int(index.max()) + 1)
        row = self._read_matrix(stored, np.zeros(1, np.int64), span)[0]
        return row if _ascending(index) and len(index) == len(span) else row[index - first]

    def _read_matrix(self, stored: Stored, index: np.ndarray, cols: range) -> np.ndarray:
        """Rows ``index`` and columns ``cols``, decoded a chunk at a time; an only axis counts as columns."""
        info = stored.info
        out = np.empty((len(index), len(cols)), np.float32)
        if not out.size:
            return out
        order, ordered = _in_file_order(index)
        blocks = range(cols.start // info.block, -(-cols.stop // info.block))
        if info.dtype == "F32" and order is None:
            _read_rows(stored, out.view(np.uint8), ordered, blocks)
            return out
        skip = cols.start - blocks.start * info.block
        row_bytes = len(blocks) * stored.block_bytes
        step = min(len(index), max(1, CHUNK_BYTES // row_bytes))
        buffer = np.empty((step, row_bytes), np.uint8)
        # Decode in place where the blocks cover just what is wanted.
        width = len(blocks) * info.block
        whole = order is None and width == len(cols)
        covering = np.empty((0 if whole else step, width), np.float32)
        for at in range(0, len(index), step):
            raw = buffer[:len(ordered[at:at + step])]
            _read_rows(stored, raw, ordered[at:at + step], blocks)
            if whole:
                decode(info.dtype, raw, stored.block_bytes, out[at:at + step])
                continue
            values = covering[:len(raw)]
            decode(info.dtype, raw, stored.block_bytes, values)
            where = slice(at, at + step) if order is None else order[at:at + step]
            out[where] = values[:, skip:skip + len(cols)]
        return out


def _read_rows(stored: Stored, part: np.ndarray, rows: np.ndarray | range, blocks: range) -> None:
    """Fill ``part`` uint8 [n, bytes] with ``blocks`` of ``rows``; whole neighbouring rows in one read.

    A range is of neighbours.
    """
    count, part_bytes = part.shape
    if not part.size:
        return
    view = part.reshape(-1).data
    row_bytes = stored.info.shape[-1] // stored.info.block * stored.block_bytes
    begin = stored.offset + blocks.start * stored.block_bytes
    if isinstance(rows, range):
        offsets = range(begin + rows.start * row_bytes, begin + rows.stop * row_bytes, row_bytes)
    else:
        offsets = (rows * row_bytes + begin).tolist()
    if part_bytes != row_bytes:
        stored.source.read_pieces(offsets, view, part_bytes)
        return
    if isinstance(rows, range):
        stored.source.read_into(offsets[0], view)
        return
    breaks = (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
    for first, last in zip([0, *breaks], [*breaks, count], strict=True):
        stored.source.read_into(offsets[first], view[first * part_bytes:last * part_bytes])


def _ascending(index: np.ndarray) -> bool:
    return bool((np.diff(index) > 0).all())


def _rows_in_file_order(name: str, rows: Rows, n: int) -> tuple[np.ndarray | None, np.ndarray | range]:
    """As ``_in_file_order`` of indices that are checked; neighbours, which need no work, as a range."""
    found = range(n) if rows is None else rows
    if isinstance(found, range) and found.step == 1:
        assert not found or 0 <= found.start < found.stop <= n, f"tensor {name} has {n} rows, asked {rows}"
        return None, found
    return _in_file_order(indices(name, found, n))


def _in_file_order(index: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """Where each row of the ascending indices belongs (None: they ascend already), and those indices."""
    if _ascending(index):
        return None, index
    order = np.argsort(index, kind="stable")
    return order, index[order]


def indices(name: str, rows: Rows, n: int) -> np.ndarray:
    """Row indices as int64 [rows], checked against the tensor."""
    if rows is None:
        return np.arange(n, dtype=np.int64)
    index = np.arange(rows.start, rows.stop, rows.step, dtype=np.int64) if isinstance(rows, range) else \
        np.asarray(rows, np.int64)
    assert not len(index) or 0 <= index.min() <= index.max() < n, f"tensor {name} has {n} rows, asked {rows}"
    return index


def _span(name: str, cols: range | None, n: int) -> range:
    if cols is None:
        return range(n)
    assert cols.step == 1 and 0 <= cols.start <= max(cols.stop, cols.start) <= n, \
        f"tensor {name} has {n} columns, asked {cols}"
    return cols

