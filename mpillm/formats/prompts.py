"""The prompts file as a run reads it: twice, once to know its lines, once to run them; in memory a line at a time.

Each line that is not blank has a digest of 8 bytes, of its number and its bytes, kept in a file beside the run's
parts, so that a resumed run knows whether it has the same lines. What cannot be read twice (a FIFO, a device) is
copied there first.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator

from mpillm.errors import InputError, OutputError, UsageError
from mpillm.formats.jsonl import iterate_lines, quote

DIGESTS, SPOOL, NEW = "prompts.digests", "prompts.copy", ".new"     # names in the folder of parts
DIGEST_BYTES = 8


class PromptFile:
    """The lines of ``path``; ``folder`` is for what is remembered of them, under other names until ``keep``."""

    def __init__(self, path: str, folder: str, resume: bool = False) -> None:
        """``resume``: a copy in ``folder`` is of the run that goes on, and is taken for the file itself.

        Raises InputError when the file cannot be read, OutputError when it cannot be copied.
        """
        self.path, self._digests = path, os.path.join(folder, DIGESTS)
        self._source = path
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            self._source = os.path.join(folder, SPOOL)
            if not (resume and os.path.exists(self._source)):
                self._source += NEW
                _copy(path, self._source)
        self._known = self._digests    # where the digests of these lines lie
        self.count = 0
        self.digest = ""               # of all lines, in hexadecimal

    def index(self) -> None:
        """Read all lines once: their number, and their digests into the folder. Raises InputError, OutputError."""
        self.count, whole = 0, hashlib.blake2b(digest_size=16)
        self._known = self._digests + NEW
        try:
            with open(self._known, "wb") as file:
                for number, raw in iterate_lines(self._source):
                    digest = _digest(number, raw)
                    file.write(digest)
                    whole.update(digest)
                    self.count += 1
                self.digest = whole.hexdigest()
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OutputError(f"{self._digests}: {error.strerror}") from None

    def keep(self) -> None:
        """A run begins with these lines: what ``index`` found is given its name. Raises OutputError."""
        try:
            if self._source.endswith(SPOOL + NEW):
                os.replace(self._source, self._source.removesuffix(NEW))
                self._source = self._source.removesuffix(NEW)
            os.replace(self._known, self._digests)
            self._known = self._digests
        except OSError as error:
            raise OutputError(f"{self._digests}: {error.strerror}") from None

    def compare(self) -> None:
        """Read all lines and compare them with the digests in the folder.

        Raises UsageError, which names the first line that differs; InputError.
        """
        self.count, whole = 0, hashlib.blake2b(digest_size=16)
        try:
            known = os.path.getsize(self._digests) // DIGEST_BYTES
            with open(self._digests, "rb") as file:
                for number, raw in iterate_lines(self._source):
                    before = file.read(DIGEST_BYTES)
                    whole.update(before)
                    if len(before) < DIGEST_BYTES:
                        raise self._changed(f"has more lines than the {known} with which the run began, the first of "
                                            f"them line {number}")
                    if before != _digest(number, raw):
                        raise self._changed(f"line {number} ({quote(raw[:40].decode('utf-8', 'replace'))}) is another "
                                            "one than when the run began")
                    self.count += 1
        except OSError as error:
            raise OutputError(f"{self._digests}: {error.strerror}") from None
        self.digest = whole.hexdigest()
        if self.count < known:
            raise self._changed(f"has {self.count} lines, the run began with {known}")

    def _changed(self, how: str) -> UsageError:
        return UsageError(f"--resume: --prompts {self.path}: {how}: give the same file, or another --output")

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(index, line number, bytes) of each line, in order. Raises InputError, also when the file has changed."""
        with open(self._known, "rb") as file:
            index = 0
            for number, raw in iterate_lines(self._source):
                if index == self.count:
                    return             # the file has grown since it was counted
                if file.read(DIGEST_BYTES) != _digest(number, raw):
                    raise InputError(f"the prompts file {self.path!r} was changed while it was read (line {number})")
                yield index, number, raw
                index += 1
        if index < self.count:
            raise InputError(f"the prompts file {self.path!r} was cut off while it was read (after {index} lines)")


def digest_of(path: str) -> str:
    """``PromptFile.digest`` of a file; empty for a FIFO, which a run that goes on does not read again. InputError."""
    if os.path.exists(path) and not os.path.isfile(path):
        return ""
    whole = hashlib.blake2b(digest_size=16)
    for number, raw in iterate_lines(path):
        whole.update(_digest(number, raw))
    return whole.hexdigest()


def _digest(number: int, raw: bytes) -> bytes:
    return hashlib.blake2b(b"%d %b" % (number, raw), digest_size=DIGEST_BYTES).digest()


def _copy(path: str, target: str) -> None:
    try:
        source = open(path, "rb")
    except OSError as error:
        raise InputError(f"the prompts file {path!r} cannot be read: {error.strerror}") from None
    with source:
        try:
            with open(target, "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
        except OSError as error:
            raise OutputError(f"copying the prompts to {target}: {error.strerror}") from None
