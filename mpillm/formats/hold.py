"""An exclusive hold on a file name while a run lasts, so that no second run writes the same output."""

from __future__ import annotations

import fcntl
import os

from mpillm.errors import OutputError


class Hold:
    """Makes (or takes over) the file ``path`` and locks it; whoever dies lets go of it.

    ``what`` names it in messages. Raises OutputError when another run holds it or it cannot be made.
    """

    def __init__(self, path: str, what: str) -> None:
        self.path, self._what = path, what
        try:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise OutputError(f"cannot write {what}: {path}: {error.strerror}: choose another name") from None
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.descriptor)
            raise OutputError(f"another run is writing {what}: wait for it, or choose another name") from None
        except OSError:
            return            # a file system without locks: the name alone has to do
        if not self._ours():
            os.close(self.descriptor)
            raise OutputError(f"another run has just ended or begun with {what}: start again")

    def _ours(self) -> bool:
        """The name still leads to the file that was locked."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except OSError:
            return False

    @property
    def nbytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def release(self, keep: bool = False) -> None:
        """Let go; the file is removed unless ``keep``. A second call does nothing."""
        if self.descriptor < 0:
            return
        if not keep and self._ours():
            os.unlink(self.path)
        os.close(self.descriptor)
        self.descriptor = -1
