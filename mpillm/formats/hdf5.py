"""The HDF5 output of a run: checked before the work, written in parts during it, then folded into one file.

    parts = check_output("out.h5", overwrite=False)             # rank 0, before any work
    ...                                                         # ranks fill ``parts.RequestsPart``, ``parts.RankPart``
    fold("out.h5", parts, header, overwrite=False)              # rank 0, all parts closed

``docs/formats.md`` describes the file, ``hdf5_schema`` its columns, ``parts`` and ``part_records`` the parts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Any

import h5py
import numpy as np

from mpillm.errors import OutputError
from mpillm.formats.hdf5_file import WritableFile, reason
from mpillm.formats.hdf5_fold import (
    plan_logits,
    write_logits,
    write_ranks,
    write_requests,
    write_steps,
)
from mpillm.formats.hdf5_schema import FORMAT, RANKS, SCHEMA_VERSION, STEPS, clean_text
from mpillm.formats.journal import OpenFiles, sync_folder
from mpillm.formats.part_scan import Parts, choose, is_journal, is_part, list_names, read_parts

__all__ = ["RANKS", "SCHEMA_VERSION", "STEPS", "attributes", "build", "check_free", "check_output", "clear_parts",
           "discard_parts", "fold", "has_journals", "is_empty_folder", "is_output",
           "mark_committed", "move_into_place"]

_Path = str | os.PathLike[str]
LOCK = "lock"            # file in the folder of parts that the run holds
COMMITTED = "committed"  # file there that says: both outputs are complete, under their temporary names or their own
REPLACE = "replace"      # content of that mark where they may replace files of their names
COMING = ("prompts.digests.new", "prompts.copy.new")       # of a run that has not begun yet
COPY = "prompts.copy"    # of prompts that came from a pipe: there is no other
OURS = (COMMITTED, "run.json", "run.json.tmp", "prompts.digests", COPY, *COMING)


def check_output(path: _Path, overwrite: bool, keep: bool = False, resume: bool = False) -> str:
    """Makes the empty folder for the parts of ``path`` and returns its name; call before any work.

    Making it is the test that the folder can be written, and stops a second job on the same output.

    Raises
    ------
    OutputError
        the output exists (with ``overwrite``: and is not an HDF5 file, which is never deleted); its folder is
        missing or cannot be written; parts of an earlier run lie there (with ``resume`` they stay; with
        ``overwrite`` they are removed, or left for ``clear_parts`` if ``keep``).
    """
    target = _target(path)
    folder, parts, unfinished = os.path.dirname(target), target + ".parts", target + ".tmp"
    if not os.path.isdir(folder):
        raise OutputError(f"the folder {folder} of the output {path} does not exist: make it, "
                          "or choose another --output")
    if os.path.lexists(target):
        _check_existing(path, target, overwrite)
    if os.path.lexists(unfinished):
        if not (overwrite or resume):
            raise OutputError(f"{unfinished} is left from an earlier run: move it away, or use --overwrite")
        if os.path.isdir(unfinished):
            raise OutputError(f"{unfinished} is a folder and in the way: move it away")
    if os.path.lexists(parts) and not is_empty_folder(parts) and not resume:
        if not overwrite:
            raise OutputError(f"{parts} has parts of an earlier run that did not finish, or of one that "
                              "still runs: use --resume to go on with it, or --overwrite to delete it")
        if not keep:
            clear_parts(parts)
            discard_parts(parts)
    try:
        with contextlib.suppress(FileExistsError):  # an empty folder is as good
            os.mkdir(parts)
        # An empty folder may belong to someone else: a file in it is the proof.
        probe = os.path.join(parts, "probe")
        open(probe, "xb").close()
        os.unlink(probe)
    except OSError as error:
        raise OutputError(f"cannot write in {folder}: {reason(error)}: choose another --output") from error
    return parts


def _target(path: _Path) -> str:
    """The absolute path that is written, symbolic links followed."""
    try:
        target = os.path.realpath(path)
        os.lstat(target)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot use {os.fspath(path)!r:.200} as output: {reason(error)}") from error
    return target


def _check_existing(path: _Path, target: str, overwrite: bool) -> None:
    if not os.path.isfile(target):
        kind = "a folder" if os.path.isdir(target) else "not a regular file"
        raise OutputError(f"the output {path} is {kind}: choose another --output")
    if not overwrite:
        raise OutputError(f"the output {path} exists: choose another --output, or use --overwrite")
    if os.path.getsize(target) and not h5py.is_hdf5(target):
        raise OutputError(f"the output {path} exists and is not an HDF5 file, so --overwrite does not "
                          "replace it: choose another --output")


def is_empty_folder(path: str) -> bool:
    """Whether ``path`` is a folder with at most the lock, and what a run left that never began. OutputError."""
    try:
        return os.path.isdir(path) and not set(os.listdir(path)) - {LOCK, *COMING}
    except OSError as error:
        raise OutputError(f"cannot read the folder {path}: {reason(error)}") from error


def discard_parts(parts_dir: _Path) -> None:
    """Removes a folder of parts; OutputError when something else lies in it, which stays, as do journals set aside."""
    clear_parts(parts_dir, keep_damaged=True)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(parts_dir, LOCK))
        os.rmdir(parts_dir)
    except OSError as error:
        raise OutputError(f"cannot remove {parts_dir}: {reason(error)}: move it away") from error


def clear_parts(parts_dir: _Path, keep_damaged: bool = False, keep_coming: bool = False) -> None:
    """Removes all parts from their folder. OutputError when that fails.

    ``keep_damaged``: not those that were set aside; ``keep_coming``: not what the run that begins has made.

    The mark that the outputs are complete goes last, so that a kill meanwhile leaves no half of a run.
    """
    try:
        names = [name for name in os.listdir(parts_dir) if not (keep_coming and name in COMING)
                 if name in OURS or is_journal(name) or is_part(name) and not keep_damaged]
        for name in sorted(names, key=lambda name: name == COMMITTED):
            os.unlink(os.path.join(parts_dir, name))
    except OSError as error:
        raise OutputError(f"cannot clear {parts_dir}: {reason(error)}: move it away") from error


def has_journals(parts_dir: _Path) -> bool:
    """Whether the folder is there and has any journal."""
    return os.path.isdir(parts_dir) and any(map(is_journal, list_names(os.fspath(parts_dir))))


def fold(output_path: _Path, parts_dir: _Path, header: Mapping[str, Any], overwrite: bool, *,
         compress: bool = True, threads: int | None = None, slab_bytes: int = 32 << 20,
         discard: bool = True, expected: Iterable[str] = ()) -> dict[str, Any]:
    """Makes the output from closed parts, named ``.tmp`` until it is complete, then removes the parts.

    The parameters and what is raised: ``part_scan.read_parts``, ``build``, ``move_into_place``. A fold that was
    interrupted can be repeated.

    Returns
    -------
    dict
        what ``build`` returns, and path, bytes, warning (None, or why the parts could not be removed)
    """
    parts = read_parts(os.fspath(parts_dir), expected=expected)
    summary = build(output_path, parts, choose(parts), header, compress=compress, threads=threads,
                    slab_bytes=slab_bytes)
    target = move_into_place(output_path, overwrite)
    warning = None
    if discard:
        try:
            discard_parts(parts_dir)
        except OutputError as error:
            warning = str(error)
    return {"path": target, "bytes": os.path.getsize(target), **summary, "warning": warning}


def build(output_path: _Path, parts: Parts, chosen: np.ndarray, header: Mapping[str, Any], *, compress: bool = True,
          threads: int | None = None, slab_bytes: int = 32 << 20) -> dict[str, Any]:
    """Makes the complete output under its temporary name, synced to the disk.

    Parameters
    ----------
    parts, chosen
        ``part_scan.read_parts`` and of them ``part_scan.choose``.
    header
        root attributes: at least mpillm_version, config, versions, layout and model; text and numbers as they
        are, everything else as JSON text. ``created`` is set when absent.
    threads
        for compressing logits; default: the cores of this process.
    slab_bytes
        logits in memory at a time.

    Returns
    -------
    dict
        requests, failed, first_error (text of the first failed line, empty for none), sequences, prompt_tokens,
        completion_tokens, logits_rows, logits_clamped (values beyond f16), logits_dropped (rows of requests that
        were never recorded there), times (``hdf5_fold.TIMES`` of each rank in each attempt)

    Raises
    ------
    OutputError
        a part is missing or damaged, or the file cannot be written; the parts and an earlier output stay.
    """
    unfinished = _target(output_path) + ".tmp"
    files = OpenFiles()
    out = WritableFile(unfinished)
    try:
        _write_header(out, header)
        write_ranks(out, parts.ranks)
        times = write_steps(out, files, parts.ranks)
        sets, rows, counts, dropped = plan_logits(parts, chosen)
        write_requests(out, files, parts.requests, chosen, counts)
        clamped = write_logits(out, files, sets, rows, compress=compress, threads=threads or _cores(),
                               slab_bytes=slab_bytes) if sets else 0
        bad = np.flatnonzero(chosen["status"])
        with out.guard() as file:
            first_error = file["requests"][bad[0]]["error"].decode() if len(bad) else ""
        out.close(sync=True)
    except BaseException:
        out.abandon()
        with contextlib.suppress(OSError):  # the disk may be full; the parts have everything
            os.unlink(unfinished)
        raise
    finally:
        files.close()
    return {"requests": len(chosen), "failed": len(bad), "first_error": first_error, "sequences": len(counts),
            "prompt_tokens": int(chosen["prompt_tokens"].sum()),
            "completion_tokens": int(chosen["completion_tokens"].sum()), "logits_rows": len(rows),
            "logits_clamped": clamped, "logits_dropped": dropped, "times": times}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write_header(out: WritableFile, header: Mapping[str, Any]) -> None:
    missing = {"mpillm_version", "config", "versions", "layout", "model"} - set(header)
    assert not missing, f"the header lacks {sorted(missing)}"
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    attributes = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "created": created, **header}
    with out.guard() as file:
        for name, value in attributes.items():
            if not isinstance(value, (str, int, float)):
                value = json.dumps(value, ensure_ascii=False, default=str)
            # As a variable-length string an attribute may be longer than the 64 KiB of an object header.
            file.attrs[name] = clean_text(value).decode() if isinstance(value, str) else value


def is_output(path: _Path) -> bool:
    """Whether ``path`` is a complete HDF5 file; an empty one may hold a name only."""
    return os.path.isfile(path) and bool(h5py.is_hdf5(path))


def attributes(path: _Path) -> dict[str, Any]:
    """Those of a whole output. OutputError when it cannot be read."""
    try:
        with h5py.File(path, "r") as file:
            return dict(file.attrs)
    except (OSError, ValueError) as error:
        raise OutputError(f"{path} cannot be read ({reason(error)}): move it away, or use --overwrite") from None


def check_free(output_path: _Path, overwrite: bool) -> None:
    """No output has appeared that must not be replaced. OutputError."""
    target = _target(output_path)
    if not overwrite and os.path.lexists(target):
        raise OutputError(f"{target} appeared during the run: move it away, then go on with --resume")


def mark_committed(parts_dir: _Path, overwrite: bool) -> None:
    """From now on both outputs are complete on the disk, and only their names may be missing. OutputError.

    ``overwrite``: files of these names may be replaced, which the mark says to whoever finds it.
    """
    path = os.path.join(parts_dir, COMMITTED)
    try:
        with open(path, "w") as file:
            file.write(REPLACE if overwrite else "")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(f"cannot write {path}: {reason(error)}") from error
    sync_folder(os.fspath(parts_dir))


def move_into_place(output_path: _Path, overwrite: bool) -> str:
    """Gives the built file its name, which is returned.

    Raises OutputError when it cannot, or when an output exists by now that must not be replaced: the finished file
    then stays ``.tmp``.
    """
    target = _target(output_path)
    unfinished = target + ".tmp"
    try:
        if not overwrite:
            # An empty file takes the name, so that the move cannot replace what came meanwhile.
            open(target, "xb").close()
        os.replace(unfinished, target)
    except FileExistsError as error:
        raise OutputError(f"{target} appeared during the run: the results are in {unfinished}") from error
    except OSError as error:
        raise OutputError(f"cannot move {unfinished}, which has the results, to {target}: "
                          f"{reason(error)}") from error
    sync_folder(os.path.dirname(target))
    return target
