"""The HDF5 output of a run: checked before the work, written in parts during it, then folded into one file.

    parts = check_output("out.h5", overwrite=False)             # rank 0, before any work
    part = ReplicaPart(replica_part_path(parts, replica))       # the root of every replica
    logits = LogitsPart(logits_part_path(parts, replica, tp_rank), start, stop, "f16")   # every rank
    ...
    fold("out.h5", parts, header, steps, ranks, failed, overwrite=False)    # rank 0, all parts closed

``docs/formats.md`` describes the file, ``hdf5_schema`` its columns, ``hdf5_parts`` the parts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import h5py
import numpy as np

from mpillm.errors import OutputError
from mpillm.formats.hdf5_file import OpenParts, WritableFile, reading, reason
from mpillm.formats.hdf5_fold import (
    FailedRow,
    make_plan,
    plan_logits,
    sort_parts,
    write_logits,
    write_requests,
    write_table,
)
from mpillm.formats.hdf5_parts import (
    LogitsPart,
    ReplicaPart,
    SequenceRecord,
    logits_part_path,
    part_replica,
    replica_part_path,
    whole_requests,
)
from mpillm.formats.hdf5_schema import (
    FORMAT,
    RANKS,
    SCHEMA_VERSION,
    STEPS,
    clean_text,
    rank_table,
    step_table,
)
from mpillm.formats.results import PART as RESULTS_PART

__all__ = ["LogitsPart", "RANKS", "ReplicaPart", "SCHEMA_VERSION", "STEPS", "SequenceRecord",
           "check_output", "discard_parts", "fold", "logits_part_path", "rank_table", "replica_part_path",
           "step_table", "whole_requests"]

_Path = str | os.PathLike[str]
LOCK = "lock"        # file in the folder of parts that the run holds


def check_output(path: _Path, overwrite: bool, keep: bool = False) -> str:
    """Makes the empty folder for the parts of ``path`` and returns its name; call before any work.

    Making it is the test that the folder can be written, and stops a second job on the same output.

    Raises
    ------
    OutputError
        the output exists (with ``overwrite``: and is not an HDF5 file, which is never deleted); its folder is
        missing or cannot be written; parts of an earlier run lie there (with ``overwrite`` they are removed,
        or left for ``clear_parts`` if ``keep``).
    """
    target = _target(path)
    folder, parts, unfinished = os.path.dirname(target), target + ".parts", target + ".tmp"
    if not os.path.isdir(folder):
        raise OutputError(f"the folder {folder} of the output {path} does not exist: make it, "
                          "or choose another --output")
    if os.path.lexists(target):
        _check_existing(path, target, overwrite)
    if os.path.lexists(unfinished):
        if not overwrite:
            raise OutputError(f"{unfinished} is left from an earlier run: move it away, or use --overwrite")
        if os.path.isdir(unfinished):
            raise OutputError(f"{unfinished} is a folder and in the way: move it away")
    if os.path.lexists(parts) and not _is_empty_folder(parts):
        if not overwrite:
            raise OutputError(f"{parts} has parts of an earlier run that did not finish, or of one that "
                              "still runs: move it away, or use --overwrite to delete it")
        if not keep:
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


def _is_empty_folder(path: str) -> bool:
    try:
        return os.path.isdir(path) and not set(os.listdir(path)) - {LOCK}
    except OSError as error:
        raise OutputError(f"cannot read the folder {path}: {reason(error)}") from error


def discard_parts(parts_dir: _Path) -> None:
    """Removes a folder of parts; OutputError when something else lies in it, which stays."""
    clear_parts(parts_dir, lock_too=True)
    try:
        os.rmdir(parts_dir)
    except OSError as error:
        raise OutputError(f"cannot remove {parts_dir}: {reason(error)}: move it away") from error


def clear_parts(parts_dir: _Path, lock_too: bool = False) -> None:
    """Removes all parts from their folder; OutputError when that fails."""
    try:
        for name in os.listdir(parts_dir):
            if part_replica(name) or RESULTS_PART.fullmatch(name) or lock_too and name == LOCK:
                os.unlink(os.path.join(parts_dir, name))
    except OSError as error:
        raise OutputError(f"cannot clear {parts_dir}: {reason(error)}: move it away") from error


def fold(output_path: _Path, parts_dir: _Path, header: Mapping[str, Any], steps: np.ndarray,
         ranks: np.ndarray, failed: Sequence[tuple[int, int, str | None, int, str]], overwrite: bool, *,
         compress: bool = True, threads: int | None = None, slab_bytes: int = 32 << 20,
         expected: Sequence[str | None] | None = None) -> dict[str, Any]:
    """Makes the output from closed parts, named ``.tmp`` until it is complete, then removes the parts.

    Parameters
    ----------
    header
        root attributes: at least mpillm_version, config, versions, layout and model; text and numbers as they
        are, everything else as JSON text. ``created`` is set when absent.
    steps, ranks
        structured arrays with the columns of ``STEPS`` and ``RANKS`` (``step_table``, ``rank_table``).
    failed
        lines that failed before they reached a replica: (index, line, custom_id, status, error), the index
        counting with the requests.
    overwrite
        whether an output that exists by now may be replaced; if not, the finished file stays ``.tmp``.
    threads
        for compressing logits; default: the cores of this process.
    slab_bytes
        logits in memory at a time.
    expected
        ``path`` of every part (as other hosts' new files may be unseen for a while in a shared folder's
        listing), None is skipped; default: the listing.

    Returns
    -------
    dict
        path, bytes, requests, failed, sequences, prompt_tokens, completion_tokens, logits_rows,
        logits_clamped (values beyond f16), logits_dropped (rows of requests that were never recorded),
        warning (None, or why the parts could not be removed)

    Raises
    ------
    OutputError
        a part is missing or damaged, or the file cannot be written; the parts and an earlier output stay.
    """
    target = _target(output_path)
    unfinished = target + ".tmp"
    parts = OpenParts()
    out = WritableFile(unfinished)
    try:
        _write_header(out, header)
        write_table(out, "ranks", ranks, RANKS)
        write_table(out, "steps", steps[np.lexsort((steps["step"], steps["rank"]))], STEPS)
        summary = _write_parts(out, parts, _part_paths(parts_dir, expected),
                               [FailedRow(*line) for line in failed], compress=compress,
                               threads=threads or _cores(), slab_bytes=slab_bytes)
        out.close(sync=True)
    except BaseException:
        out.abandon()
        with contextlib.suppress(OSError):  # the disk may be full; the parts have everything
            os.unlink(unfinished)
        raise
    finally:
        parts.close()
    _move_into_place(unfinished, target, overwrite)
    warning = None
    try:
        discard_parts(parts_dir)
    except OutputError as error:
        warning = str(error)
    return {"path": target, "bytes": os.path.getsize(target), **summary, "warning": warning}


def _part_paths(parts_dir: _Path, expected: Sequence[str | None] | None) -> list[str]:
    if expected is not None:
        return [path for path in expected if path is not None]
    try:
        return [os.path.join(parts_dir, name) for name in os.listdir(parts_dir)]
    except OSError as error:
        raise OutputError(f"cannot read the folder {parts_dir}: {reason(error)}") from error


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write_parts(out: WritableFile, parts: OpenParts, paths: Sequence[str], failed: Sequence[FailedRow],
                 **how: Any) -> dict[str, int]:
    """Everything that comes from the parts; ``how`` goes to ``write_logits``. The summary's figures."""
    replicas, logits = sort_parts(paths)
    plan = make_plan(parts, replicas, failed)
    sets, rows, counts, dropped = plan_logits(parts, logits, plan)
    write_requests(out, parts, replicas, failed, plan, counts)
    clamped = write_logits(out, parts, sets, rows, **how) if sets else 0
    with reading(out.path):
        statuses = out.file["requests"].fields("status")[:]
    return {"requests": len(plan), "failed": int(np.count_nonzero(statuses)),
            "sequences": len(counts), "prompt_tokens": int(plan["prompt_tokens"].sum()),
            "completion_tokens": int(plan["completion_tokens"].sum()),
            "logits_rows": len(rows), "logits_clamped": clamped, "logits_dropped": dropped}


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


def _move_into_place(unfinished: str, target: str, overwrite: bool) -> None:
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
    with contextlib.suppress(OSError):  # some network file systems cannot sync a folder
        folder = os.open(os.path.dirname(target), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
