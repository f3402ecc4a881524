"""Run the program under mpirun, and read back what it wrote; shared by tests/reference and tests/cli."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

# Root, and more ranks than cores, in each MPI's own words; MPICH oversubscribed should yield.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
}
REPOSITORY = Path(__file__).resolve().parents[2]
EXACT = ("--weights", "f32", "--kv-type", "f32", "--temperature", "0", "--ignore-eos", "--logits", "all",
         "--logits-type", "f32")


def mpirun() -> str:
    """The mpirun beside this Python, else the first on PATH."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    assert found, "no mpirun: pip install '.[mpi]'"
    return found


@dataclass(frozen=True)
class Ended:
    """How one run of the program ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """The program's own error lines."""
        return [line for line in self.stderr.splitlines() if line.startswith("mpillm: ")]


def launch(ranks: int, arguments: Sequence[Any], *, timeout: float = 180, env: dict[str, str] | None = None,
           stdin: int | None = subprocess.DEVNULL) -> Ended:
    """mpirun -n RANKS python -m mpillm.main ARGUMENTS; the whole job is killed when the time is over."""
    command = [mpirun(), "-n", str(ranks), sys.executable, "-m", "mpillm.main", *map(str, arguments)]
    path = os.pathsep.join(p for p in (str(REPOSITORY), os.environ.get("PYTHONPATH")) if p)
    job = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                           errors="replace", start_new_session=True,
                           env=os.environ | ENVIRONMENT | {"PYTHONPATH": path} | (env or {}))
    try:
        stdout, stderr = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        stdout, stderr = job.communicate()
        raise AssertionError(f"still running after {timeout} s: {' '.join(command)}\n{stdout[-2000:]}\n"
                             f"{stderr[-4000:]}") from None
    return Ended(job.returncode, stdout, stderr)


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """A prompts file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@dataclass(frozen=True)
class Outputs:
    """The two files that a run wrote."""

    results: Path
    hdf5: Path

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The result lines in line order."""
        return sorted(map(json.loads, self.results.read_text(encoding="utf-8").splitlines()), key=lambda r: r["line"])

    @cached_property
    def by_id(self) -> dict[str, dict[str, Any]]:
        """Result lines by custom_id."""
        return {line["custom_id"]: line for line in self.lines}

    def body(self, custom_id: str) -> dict[str, Any]:
        """The body of an answered line."""
        line = self.by_id[custom_id]
        assert line["response"]["status_code"] == 200 and line["error"] is None, line
        return line["response"]["body"]

    @cached_property
    def layout(self) -> dict[str, Any]:
        """How the model was split, as the HDF5 file has it."""
        with h5py.File(self.hdf5) as file:
            return json.loads(file.attrs["layout"])

    def ids(self, custom_id: str, choice: int = 0) -> list[int]:
        """The generated ids of a choice."""
        return self.body(custom_id)["choices"][choice]["token_ids"]

    def logits(self, custom_id: str, choice: int = 0) -> np.ndarray:
        """All logits [rows, vocab] of a choice, by ascending position; positions follow one another."""
        with h5py.File(self.hdf5) as file:
            names = [name.decode() for name in file["requests"]["custom_id"]]
            sequence = int(file["requests"]["first_sequence"][names.index(custom_id)]) + choice
            row = file["sequences"][sequence]
            rows = slice(int(row["logits_start"]), int(row["logits_start"] + row["logits_count"]))
            where = file["logits_rows"][rows]
            assert (where["sequence"] == sequence).all()
            assert (np.diff(where["position"]) == 1).all(), where["position"]
            return file["logits"][rows]


def run(folder: Path, ranks: int, model: Path, lines: Iterable[dict[str, Any]] | Path, *more: Any,
        name: str = "out", timeout: float = 180, env: dict[str, str] | None = None) -> Outputs:
    """Run lines (or a prompts file) through a model; the run has to succeed."""
    prompts = lines if isinstance(lines, Path) else write_lines(folder / f"{name}.in.jsonl", lines)
    outputs = Outputs(folder / f"{name}.results.jsonl", folder / f"{name}.h5")
    ended = launch(ranks, ["--model", model, "--prompts", prompts, "--results", outputs.results,
                           "--output", outputs.hdf5, "--overwrite", *more], timeout=timeout, env=env)
    assert ended.code == 0, f"exit code {ended.code}\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    assert "Traceback" not in ended.stderr, ended.stderr[-4000:]
    left = [path for path in folder.glob(f"{name}.*") if path.suffix in (".tmp", ".parts")]
    assert not left, f"left beside the outputs: {left}"
    return outputs
