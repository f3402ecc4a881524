"""JSON Lines: one JSON value a line, read as bytes and written strictly (RFC 8259).

Reading is lenient where real files need it (byte-order mark, CRLF, blank lines, gzip) and bounded in
memory by the longest line. Only the byte ``\\n`` ends a line: U+2028, U+2029, U+0085 and form feeds
inside a string do not. Writing never gives NaN, Infinity, half a surrogate pair as raw bytes or a
character that some reader takes for the end of a line.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, BinaryIO

from mpillm.errors import InputError, LineError

MAX_LINE_BYTES = 64 * 2**20     # a longer line is refused, and is never held in memory as a whole
MAX_DIGITS = 400                # digits of one whole number; more have no use and slow Python down
MAX_DEPTH = 200                 # arrays and objects inside one another; Python's own limit varies

_BOM = b"\xef\xbb\xbf"
_BLANK = re.compile(rb"[ \t\r]*\Z")
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
# What JSON allows raw in a string, but terminals, line splitters or UTF-8 encoders trip over.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")
_FOREIGN = (            # how files begin that are not what we read, and what to do about it
    (b"\xff\xfe", "is UTF-16 or UTF-32: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    (b"\xfe\xff", "is UTF-16: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    (b"\x00\x00\xfe\xff", "is UTF-32: convert it to UTF-8 (iconv -f UTF-32 -t UTF-8)"),
    (b"BZh", "is compressed with bzip2: decompress it first (gzip can be read as it is)"),
    (b"\xfd7zXZ\x00", "is compressed with xz: decompress it first (gzip can be read as it is)"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd: decompress it first (gzip can be read as it is)"),
    (b"PK\x03\x04", "is a zip archive: unpack it first (gzip can be read as it is)"),
    (b"\x89HDF\r\n", "is an HDF5 file: the prompts are JSON lines"),
)


# Reading a file as lines

def iterate_lines(path: str | os.PathLike[str],
                  max_bytes: int | None = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Open a file of lines and iterate over ``(line number from 1, bytes)`` of those that are not blank.

    The file is opened at once, so that a missing file is known before any work; it may be a FIFO or a
    device, and gzip is unpacked (known by its first bytes, not by its name). The bytes come without
    their line end and without a byte-order mark. Blank lines (spaces, tabs, CR) are counted and left
    out. Of a line above ``max_bytes`` only ``max_bytes + 1`` bytes are kept: ``parse_line`` refuses
    it. ``None`` sets no bound. A file that grows meanwhile is read to the end that it then has.

    Raises InputError (here or while iterating) when the file cannot be read.
    """
    name = os.fspath(path)
    with ExitStack() as opened:
        try:
            plain = opened.enter_context(open(name, "rb"))
            head = plain.peek(8)[:8]
            stream: BinaryIO = plain
            if head.startswith(b"\x1f\x8b"):
                unpacked = opened.enter_context(gzip.GzipFile(fileobj=plain, mode="rb"))
                stream = opened.enter_context(io.BufferedReader(unpacked, 2**20))
                head = stream.peek(8)[:8]
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise InputError(_unreadable(name, error)) from error
        for beginning, remedy in _FOREIGN:
            if head.startswith(beginning):
                raise InputError(f"the prompts file {name!r} {remedy}")
        return _lines(opened.pop_all(), stream, name, max_bytes)


def _lines(opened: ExitStack, stream: BinaryIO, name: str,
           max_bytes: int | None) -> Iterator[tuple[int, bytes]]:
    cap = -1 if max_bytes is None else max_bytes + len(_BOM) + 2
    number = 0
    with opened:
        while True:
            try:
                line = stream.readline(cap)
                cut = len(line) == cap and not line.endswith(b"\n")
                if cut:
                    _skip_line(stream)
            except (OSError, EOFError, ValueError, zlib.error) as error:
                raise InputError(f"{_unreadable(name, error)} (after line {number})") from error
            if not line:
                return
            number += 1
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            # A mark also stands in the middle, where files were joined by `cat`.
            line = line.removeprefix(_BOM)
            if cut:
                yield number, line[:cap - len(_BOM) - 1]
            elif not _BLANK.match(line):
                yield number, line


def _skip_line(stream: BinaryIO) -> None:
    while True:
        rest = stream.readline(2**20)
        if not rest or rest.endswith(b"\n"):
            return


def _unreadable(name: str, error: BaseException) -> str:
    if isinstance(error, IsADirectoryError):
        return f"the prompts file {name!r} is a folder: name a file of JSON lines in it"
    if isinstance(error, FileNotFoundError):
        return f"the prompts file {name!r} does not exist"
    if isinstance(error, PermissionError):
        return f"the prompts file {name!r} may not be read: check its permissions"
    if isinstance(error, (gzip.BadGzipFile, EOFError, zlib.error)):
        return f"the prompts file {name!r} is a damaged or half-written gzip file: {error}"
    reason = getattr(error, "strerror", None) or str(error)
    return f"the prompts file {name!r} cannot be read: {reason}"


# Reading a line as JSON

def parse_line(raw: bytes, max_bytes: int = MAX_LINE_BYTES) -> tuple[Any, LineError | None]:
    """Parse one line; gives ``(value, defect)``.

    A defect is what JSON readers let pass and this program does not: a key twice in one object, NaN or
    Infinity, a number beyond float64 or of more than ``MAX_DIGITS`` digits, half a surrogate pair. The
    value is still given, so that the error can carry the line's own ``custom_id``. Raw control
    characters inside strings are accepted. Raises LineError when no value can be had: too long, not
    UTF-8, not JSON, nested too deeply.
    """
    if len(raw) > max_bytes:
        raise LineError(f"the line is longer than {max_bytes} bytes: split it into several lines",
                        status=413, code="line_too_long")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}, after "
                        f"{_tail(raw[:error.start])}", code="invalid_utf8") from None
    found: list[LineError] = []
    try:
        value = _decoder(found).decode(text)
    except json.JSONDecodeError as error:
        hint = " (NUL bytes: is the file UTF-16?)" if b"\0" in raw[:64] else ""
        raise LineError(f"not JSON: {error.msg} at character {error.pos + 1}, near "
                        f"{quote(text[max(0, error.pos - 20):error.pos + 40])}{hint}",
                        code="invalid_json") from None
    except RecursionError:
        too_deep = True
    else:
        too_deep = _deeper(value, MAX_DEPTH)
    if too_deep:
        raise LineError(f"not usable JSON: nested more than {MAX_DEPTH} levels deep", code="invalid_json")
    if _ESCAPED_SURROGATE.search(raw):
        where = _find_surrogate(value)
        if where is not None:
            found.append(LineError(f"{where or 'the text'} holds half a surrogate pair (a lone "
                                   "\\ud800..\\udfff): no such character exists", param=where or None,
                                   code="invalid_text"))
    return value, found[0] if found else None


def _decoder(found: list[LineError]) -> json.JSONDecoder:
    """A decoder that notes in ``found`` what Python's json lets pass."""

    def whole(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            found.append(LineError(f"a number of {len(digits)} digits, beginning {digits[:20]}",
                                   code="invalid_json"))
            return 0
        return int(digits)

    def decimal(digits: str) -> float:
        number = float(digits)
        if math.isinf(number):
            found.append(LineError(f"the number {digits[:40]} is beyond the range of float64",
                                   code="invalid_json"))
        return number

    def constant(name: str) -> float:
        found.append(LineError(f"{name} is not JSON: write a number or null", code="invalid_json"))
        return 0.0

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) < len(items):
            counts = Counter(key for key, _ in items)
            twice = next(key for key, count in counts.items() if count > 1)
            found.append(LineError(f"the key {quote(twice)} stands twice in one object",
                                   param=twice[:100], code="duplicate_key"))
        return made

    return json.JSONDecoder(parse_int=whole, parse_float=decimal, parse_constant=constant,
                            object_pairs_hook=pairs, strict=False)


def _deeper(value: Any, limit: int) -> bool:
    """Whether arrays and objects stand more than ``limit`` deep inside one another."""
    level = [value] if isinstance(value, (list, dict)) else []
    for _ in range(limit):
        if not level:
            return False
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)
                 if isinstance(inner, (list, dict))]
    return bool(level)


def _find_surrogate(value: Any) -> str | None:
    """The path of the first text with half a surrogate pair ('' for the value itself), else None."""
    waiting = [("", value)]
    while waiting:
        where, item = waiting.pop()
        if isinstance(item, str) and _SURROGATE.search(item):
            return where
        if isinstance(item, dict):
            for key, inner in item.items():
                if _SURROGATE.search(key):
                    return f"a key in {where}" if where else "a key"
                waiting.append((f"{where}.{key}" if where else key, inner))
        elif isinstance(item, list):
            waiting.extend((f"{where}[{i}]", inner) for i, inner in enumerate(item))
    return None


def has_lone_surrogate(text: str) -> bool:
    """Whether the text holds half a surrogate pair, which UTF-8 cannot express."""
    return _SURROGATE.search(text) is not None


# Quoting input in messages

def quote(value: Any, limit: int = 60) -> str:
    """A value for an error message: JSON, at most about ``limit`` characters, cheap for huge values."""
    if isinstance(value, str):
        shown = dumps_strict(value[:limit])
        return shown if len(value) <= limit else f"{shown}... ({len(value)} characters)"
    if isinstance(value, list) and len(value) > 8:
        return f"a list of {len(value)} items"
    if isinstance(value, dict) and len(value) > 8:
        return f"an object of {len(value)} keys"
    if isinstance(value, (list, dict)):
        inner = list(value.values()) if isinstance(value, dict) else value
        if any(isinstance(i, (list, dict)) or isinstance(i, str) and len(i) > limit for i in inner):
            return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and abs(value) > 10**limit:
        return "a number of more than 60 digits"
    shown = _escape(json.dumps(value, ensure_ascii=False))
    return shown if len(shown) <= 2 * limit else shown[:2 * limit] + "..."


def one_line(text: str, limit: int = 1000) -> str:
    """Text for a message: control characters and line separators escaped, cut at about ``limit``."""
    shown = _CONTROL.sub(_escaped, text[:limit])
    return shown if len(text) <= limit else shown + "..."


def _tail(raw: bytes) -> str:
    return quote(raw[-20:].decode("utf-8", "replace"))


# Writing

def dumps_strict(value: Any) -> str:
    """One line of strict JSON, without the line end.

    Numbers that JSON has no words for (NaN, infinities) become null; numpy scalars and arrays are
    written as numbers and lists. Text is written as UTF-8 can carry it; DEL, C1 controls, U+2028,
    U+2029, U+FEFF and halves of surrogate pairs are escaped.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)
    return _escape(text)


def _escape(text: str) -> str:
    return _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match.group()):04x}"


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _finite(value: Any) -> Any:
    """The value with null for every number that is not finite."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
