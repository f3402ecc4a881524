"""GGUF files: the container is parsed here by ``pread``, quantised blocks by decode.py.

A file is: magic, version, counts, keys and values, tensor descriptions, then from the next multiple of
the alignment on the tensors, each at an aligned offset (ggml's docs/gguf.md). The gguf package maps the
file into memory and believes the counts in it; here each is compared with the file first.
"""

from __future__ import annotations

import math
import os
import re
import struct
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from mpillm.errors import ModelError
from mpillm.formats.checkpoint import Checkpoint, Source, Stored, TensorInfo, listing

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_KEY = 65535              # bytes, by the format's description
MAX_NESTING = 4              # arrays of arrays

# Value types by their number: struct's letter, or the two that are no scalars.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class _Cursor:
    """Reads forward through the head of a file, a growing piece at a time."""

    def __init__(self, source: Source) -> None:
        self.source, self.at = source, 0           # at: position in the file
        self._start, self._data = 0, bytearray()   # what is held of it
        self._piece = 1 << 16

    def want(self, count: int, what: str) -> int:
        """Make ``count`` bytes from here on available in ``_data``; return their index there."""
        if count > self.source.size - self.at:
            raise self.source.error(f"{what} at byte {self.at} needs {count} bytes, the file ends at "
                                    f"{self.source.size}: truncated or damaged")
        index = self.at - self._start
        if index + count > len(self._data):
            self._data = self._data[index:]
            self._start, index = self.at, 0
            held = len(self._data)
            more = min(max(count - held, self._piece), self.source.size - self.at - held)
            self._data += self.source.read(self.at + held, more)
            self._piece = min(2 * self._piece, 8 << 20)
        return index

    def scalar(self, letter: str, what: str) -> Any:
        size = struct.calcsize(letter)
        index = self.want(size, what)    # may replace _data
        value = struct.unpack_from("<" + letter, self._data, index)[0]
        self.at += size
        return value

    def raw(self, count: int, what: str) -> bytes:
        index = self.want(count, what)
        self.at += count
        return bytes(self._data[index:index + count])

    def name(self, what: str) -> str:
        """A key or a tensor's name: valid UTF-8 of bounded length."""
        length = self.scalar("Q", what)
        if length > MAX_KEY:
            raise self.source.error(f"{what} at byte {self.at} is said to have {length} bytes: damaged")
        try:
            return self.source.named(self.raw(length, what).decode())
        except UnicodeDecodeError as error:
            raise self.source.error(f"{what} before byte {self.at} is not UTF-8: damaged") from error

    def strings(self, count: int, what: str) -> list[str]:
        """``count`` strings; bytes that are not UTF-8 become lone surrogates (surrogateescape)."""
        self.want(8, what) if count else None
        found = []
        unpack = struct.Struct("<Q").unpack_from
        data, index, end = self._data, self.at - self._start, len(self._data)
        for _ in range(count):
            stop = index + 8
            length = unpack(data, index)[0] if stop <= end else end
            if stop + length > end:
                # The piece ends within this string: go on with the next piece.
                self.at = self._start + index
                length = self.scalar("Q", what)
                index = self.want(length, what)
                data, end, stop = self._data, len(self._data), index
            index = stop + length
            found.append(data[stop:index].decode("utf-8", "surrogateescape"))
        self.at = self._start + index
        return found

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        """A value of a type number: int, float, bool, str, or a list of those."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.raw(self.scalar("Q", what), what).decode("utf-8", "replace")
        if kind != _ARRAY or depth > MAX_NESTING:
            deep = " (nested too deeply)" if kind == _ARRAY else ""
            raise self.source.error(f"{what} has the unknown value type {kind}{deep}: damaged or too new")
        inner, count = self.scalar("I", what), self.scalar("Q", what)
        if inner in _SCALARS:
            letter = _SCALARS[inner]
            size = struct.calcsize(letter)
            index = self.want(count * size, what)
            self.at += count * size
            return list(struct.unpack_from(f"<{count}{letter}", self._data, index))
        self.want(count * 8, what)       # every string or inner array takes at least as much
        if inner == _STRING:
            return self.strings(count, what)
        return [self.value(inner, what, depth + 1) for _ in range(count)]


class _Part:
    """One GGUF file: its metadata, and its tensors with offsets from the data's start."""

    def __init__(self, source: Source) -> None:
        self.source = source
        cursor = _Cursor(source)
        self._header(cursor)
        tensors, pairs = cursor.scalar("Q", "the tensor count"), cursor.scalar("Q", "the key count")
        for count, least, what in ((tensors, 24, "tensors"), (pairs, 13, "keys")):
            if count * least > source.size:
                raise source.error(f"is said to hold {count} {what}, in {source.size} bytes: damaged")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.name("a key")
            if key in self.metadata:
                raise source.error(f"the key {key} is there twice: damaged")
            self.metadata[key] = cursor.value(cursor.scalar("I", key), f"the value of {key}")
        self.tensors = [self._tensor(cursor) for _ in range(tensors)]
        self.head_end = cursor.at

    def _header(self, cursor: _Cursor) -> None:
        magic = cursor.raw(4, "the magic number")
        if magic == MAGIC[::-1]:
            raise self.source.error("is a big-endian GGUF file: convert it with gguf_convert_endian.py")
        if magic != MAGIC:
            raise self.source.error(f"begins with {magic!r} and not with {MAGIC!r}: not a GGUF file")
        version = cursor.scalar("I", "the version")
        if version and version & 0xffff == 0:
            raise self.source.error("is a big-endian GGUF file: convert it with gguf_convert_endian.py")
        if version not in (2, 3):
            raise self.source.error(f"has GGUF version {version}, supported are 2 and 3: convert it again")

    def _tensor(self, cursor: _Cursor) -> tuple[TensorInfo, int, int, int]:
        """The next description: tensor, offset from the data's start, size in bytes, bytes of a block."""
        name = cursor.name("a tensor's name")
        n_dims = cursor.scalar("I", f"tensor {name}")
        if not 1 <= n_dims <= 4:
            raise self.source.error(f"tensor {name} has {n_dims} axes: damaged")
        shape = tuple(reversed([cursor.scalar("Q", f"tensor {name}") for _ in range(n_dims)]))
        number, offset = cursor.scalar("I", f"tensor {name}"), cursor.scalar("Q", f"tensor {name}")
        try:
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise self.source.error(
                f"tensor {name} has type number {number}, which is unknown here: convert the model to a "
                "common type (for example Q8_0), or update the gguf package") from error
        if not all(shape) or shape[-1] % block:
            raise self.source.error(f"tensor {name} of type {kind.name} has shape {shape}, whose last axis "
                                    f"must be a positive multiple of {block}: damaged")
        nbytes = math.prod(shape) // block * block_bytes
        return TensorInfo(name, shape, kind.name, block), offset, nbytes, block_bytes

    def alignment(self) -> int | None:
        """The declared alignment, None if there is none."""
        value = self.metadata.get("general.alignment")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0 or value % 8:
            raise self.source.error(f"general.alignment is {value!r}, it must be a positive multiple of 8")
        return value

    def place(self, shared: int | None) -> list[Stored]:
        """Tensors at their places in the file, checked against its size and each other.

        ``shared`` is the alignment of the set's first part. Later parts do not repeat it, and writers
        differ in whether it holds for them; the one with which the data fills the file is right.
        """
        own = self.alignment()
        candidates = [own] if own else [DEFAULT_ALIGNMENT] + ([shared] if shared else [])
        used = max((offset + nbytes for _, offset, nbytes, _ in self.tensors), default=0)
        fitting = [a for a in candidates
                   if _aligned(self.head_end, a) + _aligned(used, a) == self.source.size]
        alignment = (fitting or candidates)[0]
        start = _aligned(self.head_end, alignment)
        placed, at, before = [], 0, ""
        for info, offset, nbytes, block_bytes in sorted(self.tensors, key=lambda item: item[1]):
            tensor = f"tensor {info.name}"
            if offset % alignment:
                raise self.source.error(f"{tensor} at offset {offset} is not aligned to {alignment}: damaged")
            if start + offset + nbytes > self.source.size:
                raise self.source.error(f"{tensor} ends at byte {start + offset + nbytes}, the file at "
                                        f"{self.source.size}: truncated")
            if offset < at:
                raise self.source.error(f"{tensor} overlaps {before}: damaged")
            at, before = offset + nbytes, info.name
            placed.append(Stored(info, self.source, start + offset, block_bytes))
        return placed


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class GgufFile(Checkpoint):
    """A GGUF file, or the whole split set of which ``path`` is one part; ``metadata`` is the first part's."""

    kind = "gguf"

    def __init__(self, path: str) -> None:
        """Parse the heads; raise ModelError for whatever is missing, foreign or damaged."""
        super().__init__(path)
        try:
            self._open(path)
        except BaseException:
            self.close()
            raise

    def _remedy(self) -> str:
        return "convert the model, for example 'llama-quantize --allow-requantize model.gguf new.gguf Q8_0'"

    def _part(self, path: str) -> _Part:
        source = Source(path)
        self.sources.append(source)
        return _Part(source)

    def _open(self, path: str) -> None:
        part = self._part(path)
        count = _natural(part, "split.count", 1) or 1
        parts = [part] if count <= 1 else self._set(part, count)
        self.metadata = parts[0].metadata
        shared = parts[0].alignment()
        for part in parts:
            for stored in part.place(shared):
                self.add(stored)

    def _set(self, given: _Part, count: int) -> list[_Part]:
        """All parts of the set that ``given`` belongs to, in order, compared with each other."""
        folder, name = os.path.split(given.source.path)
        match = _PART.fullmatch(name)
        if match is None or int(match[3]) != count:
            raise given.source.error(f"is one of {count} parts, but its name does not end in "
                                     f"-00001-of-{count:05d}.gguf or the like: give it its name back")
        paths = [os.path.join(folder, f"{match[1]}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
        absent = [os.path.basename(path) for path in paths if not os.path.exists(path)]
        if absent:
            more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
            raise given.source.error(f"{absent[0]}{more} of the set's {count} parts missing")
        parts = [given if os.path.basename(path) == name else self._part(path) for path in paths]
        wanted = _natural(parts[0], "split.tensors.count", None)
        for i, part in enumerate(parts):
            stated = (_natural(part, "split.no", None), _natural(part, "split.count", None),
                      _natural(part, "split.tensors.count", None))
            if stated != (i, count, wanted):
                raise part.source.error(
                    f"says it is part {stated[0]} (from 0) of {stated[1]} with {stated[2]} tensors in all, "
                    f"but part {i} of {count} with {wanted} is needed: it belongs to another set")
        found = sum(len(part.tensors) for part in parts)
        if wanted is not None and found != wanted:
            raise given.source.error(f"the set has {found} tensors instead of {wanted}: "
                                     "a part belongs to another set")
        return parts


def _natural(part: _Part, key: str, default: int | None) -> int | None:
    value = part.metadata.get(key, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise part.source.error(f"{key} is {value!r}, it must be a natural number: damaged")
    return value


def gguf_of_folder(folder: str) -> str | None:
    """The one GGUF model in a folder: its path or that of its set's first part found; None without any.

    Raise ModelError where there are several.
    """
    names = listing(folder)
    models: dict[str, str] = {}
    for name in names:
        if name.endswith(".gguf") and not name.startswith("mmproj"):
            match = _PART.fullmatch(name)
            models.setdefault(f"{match[1]}*{match[3]}" if match else name, name)
    if len(models) > 1:
        first, second = list(models.values())[:2]
        raise ModelError(f"{folder}: holds {len(models)} GGUF models ({first}, {second} ...): name the file")
    return os.path.join(folder, next(iter(models.values()))) if models else None
