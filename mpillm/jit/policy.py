"""The one place for numba's flags, its cache folder and its threads.

Importing this module decides where compiled kernels are kept, before numba is imported; every
kernel is then made by :func:`kernel` with one explicit signature.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any

from mpillm.errors import LaunchError

LOG = logging.getLogger("mpillm.jit")


def _cache_key() -> str:
    """Hash of what compiled code depends on: versions, processor, the sources of all kernels.

    numba itself watches only the file of a kernel, not the files of the functions it calls.
    """
    digest = hashlib.sha256()
    for package in ("numba", "llvmlite", "numpy"):
        digest.update(f"{package} {metadata.version(package)};".encode())
    digest.update(f"{sys.version};{platform.machine()};".encode())
    digest.update(_processor().encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Model and features of the first processor, as Linux prints them ('' elsewhere)."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    wanted = ("model name", "model\t", "cpu family", "stepping", "flags", "Features", "CPU part")
    return "\n".join(line for line in text.split("\n\n")[0].splitlines() if line.startswith(wanted))


def private_folder(path: Path) -> str | None:
    """Make ``path`` and its parent for this user alone; what is wrong with them, or None."""
    try:
        for folder in (path.parent, path):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # lstat: a symbolic link that somebody else put here is refused like a foreign folder.
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode):
                return f"{folder} is not a folder"
            if status.st_uid != os.getuid():
                return f"{folder} belongs to user {status.st_uid}"
            if status.st_mode & 0o022:
                return f"{folder} is writable by others"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written"


def _choose_cache() -> tuple[str | None, str | None]:
    """(folder or None for compiling in memory, why)."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        try:
            Path(chosen).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return None, f"NUMBA_CACHE_DIR {chosen}: {error.strerror}"
        usable = os.access(chosen, os.W_OK | os.X_OK)
        return (chosen, None) if usable else (None, f"NUMBA_CACHE_DIR {chosen} cannot be written")
    folder = Path(tempfile.gettempdir()) / f"mpillm-jit-{os.getuid()}" / _cache_key()
    problem = private_folder(folder)
    return (None, problem) if problem else (str(folder), None)


CACHE_DIR, _problem = _choose_cache()
if CACHE_DIR is not None:
    os.environ["NUMBA_CACHE_DIR"] = CACHE_DIR
# Settings of numba's that the kernels cannot run under; threads are set by set_threads().
for _name in ("NUMBA_DISABLE_JIT", "NUMBA_THREADING_LAYER"):
    os.environ.pop(_name, None)
if not os.environ.get("NUMBA_NUM_THREADS", "1").isdecimal():
    del os.environ["NUMBA_NUM_THREADS"]
# workqueue ends the process when two threads call kernels at once; it stays the last resort.
os.environ.setdefault("NUMBA_THREADING_LAYER_PRIORITY", "omp tbb workqueue")

from numba import cfunc, njit, types  # noqa: E402  (the environment had to be set first)
from numba.core import config as _config  # noqa: E402
from numba.core.caching import FunctionCache  # noqa: E402
from numba.core.errors import NumbaError  # noqa: E402
from numba.np.ufunc import parallel  # noqa: E402

config: Any = _config                  # its attributes are made when it is loaded

if CACHE_DIR is not None:
    config.CACHE_DIR = CACHE_DIR       # had somebody imported numba before us

_FLAGS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}   # no fastmath: one order of sums

#: Decorator of functions that are only called inside kernels.
helper = njit(**_FLAGS)
#: The same for short ones: each helper is a module of its own that costs compile time.
inlined = njit(inline="always", **_FLAGS)


def variant(*names: str) -> Callable[[Any], Any]:
    """Decorator of helpers of which a function makes several that differ in what they close over only.

    Code is linked by name and signature, and two that were cached by two processes may have the same: each has to
    have a name of its own, which ``names`` are added to.
    """
    def named(function: Any) -> Any:
        function.__name__ = function.__qualname__ = "_".join([function.__name__, *filter(None, names)])
        return helper(function)

    return named


#: Compiled things are made once.
cached = lru_cache(None)


def kernel(function: Any, name: str, signature: tuple) -> Any:
    """Compile ``function`` (or load it) for one signature; ``name`` is its own entry in the cache.

    Processes that write different signatures of one function at the same moment can leave a
    broken entry in numba's index, so each signature is a function of its own name.
    """
    def compiled(function: Any, cache: bool) -> Any:
        dispatcher = njit(cache=cache, **_FLAGS)(function)
        dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher

    return _through_cache(_named(function, name), compiled, lambda own: njit(cache=True, **_FLAGS)(own)._cache)


#: What an operation is to its caller: a function of (address of the arguments, part, parts).
PART_SIGNATURE = types.void(types.uintp, types.intp, types.intp)


def c_function(function: Any, name: str) -> Any:
    """Compile ``function`` (or load it) as a C function of ``PART_SIGNATURE``; its ``address`` is what is called."""
    def compiled(function: Any, cache: bool) -> Any:
        return cfunc(PART_SIGNATURE, cache=cache, error_model="numpy")(function)

    return _through_cache(_named(function, name), compiled, lambda own: FunctionCache(own))


def _named(function: Any, name: str) -> FunctionType:
    own = FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
    own.__qualname__, own.__module__ = name, function.__module__ or __name__
    return own


def _through_cache(own: FunctionType, compiled: Callable[[Any, bool], Any], cache_of: Callable[[Any], Any]) -> Any:
    """``own`` compiled or loaded; a cache that cannot serve is dropped or passed by, with one line."""
    if CACHE_DIR is None:
        _warn_of_no_cache()
        return compiled(own, False)
    try:
        return compiled(own, True)
    except NumbaError:
        raise
    except Exception as error:           # whatever a damaged cache may raise while unpickling
        LOG.warning("cached kernel %s in %s cannot be used (%s: %s): it is dropped and compiled anew",
                    own.__name__, CACHE_DIR, type(error).__name__, error)
    try:
        cache_of(own).flush()
        return compiled(own, True)
    except OSError:                      # no room, or no longer writable
        return compiled(own, False)


@lru_cache(None)
def _warn_of_no_cache() -> None:
    """Once, and not while importing: by the first kernel, logging knows the rank."""
    LOG.warning("kernels are compiled in memory at every start: %s", _problem)


class _Threads:
    """How many parts a kernel's work is cut into."""

    count = 1


def threads() -> int:
    """The number of threads that kernels use."""
    return _Threads.count


def set_threads(count: int) -> None:
    """Use ``count`` threads in kernels from now on, in every Python thread.

    NUMBA_NUM_THREADS in the environment does not limit it; the cores of this process do. The first
    kernel that is compiled or loaded fixes the most that can be used.
    Raises LaunchError when ``count`` exceeds the cores or a pool that was started smaller.
    """
    if count < 1:
        raise LaunchError(f"{count} threads per rank were asked for: at least 1 is needed")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count > cores:
        raise LaunchError(f"{count} threads per rank were asked for, but this process may use {cores} "
                          f"core(s): ask for fewer, or let the launcher give a rank more cores")
    if not parallel._is_initialized:
        # Through the environment, as numba reads it again at every compilation; its pool has a copy.
        os.environ["NUMBA_NUM_THREADS"] = str(count)
        config.reload_config()
        parallel.NUM_THREADS = count
    elif count > config.NUMBA_NUM_THREADS:
        raise LaunchError(f"{count} threads per rank were asked for, but kernels already run with "
                          f"{config.NUMBA_NUM_THREADS}: set the number before the first kernel")
    _Threads.count = count
