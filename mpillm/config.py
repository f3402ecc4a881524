"""The resolved configuration of a run: one frozen dataclass, from a file and the command line.

``RunConfig`` knows every option by the name it has on the command line (dashes as underscores).
A TOML file given by ``--config`` holds the same names; the command line wins over it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import sys
from dataclasses import dataclass
from typing import Any

from mpillm.errors import UsageError
from mpillm.quant import recipe

WEIGHT_FORMATS = recipe.FORMATS
KV_TYPES = ("f32", "f16", "bf16", "q8_0")
KV_MODES = ("redundant", "allgather", "sharded")
MLA = ("auto", "0", "1", "2", "3")
CHUNK = 512        # prompt tokens in a step, unless something else is asked for or better
MOE_SPLITS = ("columns", "experts", "auto")
LOGITS = ("none", "last", "generated", "all")
COLLECTIVES = ("shm", "mpi")
OVERLAPS = ("auto", "on", "off")
WIRES = ("f32", "bf16", "q8_0")


@dataclass(frozen=True)
class RunConfig:
    """Options of ``mpillm run``; sizes in bytes, times in seconds."""

    prompts: str
    model: str | None = None
    output: str | None = None
    results: str | None = None
    errors: str | None = None
    overwrite: bool = False
    resume: bool = False
    on_stop: str = "resume"
    results_order: str = "input"
    logits: str = "none"
    logits_type: str = "f16"
    # the model in memory
    weights: str = "auto"
    kv_type: str = "bf16"
    kv_type_v: str = ""         # "": as kv_type
    mla: str = "auto"
    kv_memory: int | None = None
    attention_scratch: int = 64 << 20
    max_model_len: int | None = None
    tie_embeddings: bool = False
    fast: bool = False
    # the split
    layout: str = "auto"
    tp: int | None = None
    kv_mode: str = "redundant"
    moe_split: str = "auto"
    collectives: str = "shm"
    wire: str = "f32"
    overlap: str = "auto"
    exchange_timeout: float = 600.0
    threads_per_rank: int | None = None
    pin: bool = True
    # the batch
    max_batch: int = 32
    prefill_chunk: int | None = None
    batching: str = "continuous"
    # defaults of the lines
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    chat_template: str | None = None
    parse_special: bool = False
    # the run
    time_limit: float | None = None
    flush_every: float = 5.0
    progress_every: float = 10.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", str(recipe.parse(self.weights)))     # one way to write it
        _one_of("kv-type", self.kv_type, KV_TYPES)
        object.__setattr__(self, "kv_type_v", self.kv_type_v or self.kv_type)
        _one_of("kv-type-v", self.kv_type_v, KV_TYPES)
        _one_of("kv-mode", self.kv_mode, KV_MODES)
        _one_of("mla", self.mla, MLA)
        _one_of("moe-split", self.moe_split, MOE_SPLITS)
        _one_of("logits", self.logits, LOGITS)
        _one_of("logits-type", self.logits_type, ("f16", "f32"))
        if self.collectives == "ordered":      # its name in version 0.1
            object.__setattr__(self, "collectives", "shm")
        _one_of("collectives", self.collectives, COLLECTIVES)
        _one_of("wire", self.wire, WIRES)
        _one_of("overlap", self.overlap, OVERLAPS)
        _one_of("log-level", self.log_level, ("debug", "info", "warning", "error"))
        _one_of("batching", self.batching, ("continuous", "static"))
        _one_of("on-stop", self.on_stop, ("resume", "expire"))
        _one_of("results-order", self.results_order, ("input", "finished"))
        if self.resume and self.overwrite:
            raise UsageError("--resume and --overwrite: one keeps what an earlier run has done, the other deletes it")
        if not 0 < self.flush_every <= 3600:
            raise UsageError(f"--flush-every {self.flush_every:g} must be above 0 (seconds), at most 3600")
        if self.time_limit is not None and self.time_limit <= 0:
            raise UsageError(f"--time-limit {self.time_limit:g} s is over before it begins")
        for name in ("max_batch", "prefill_chunk", "tp", "threads_per_rank", "max_model_len", "kv_memory",
                     "attention_scratch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value} must be at least 1")
        if not re.fullmatch(r"auto|[1-9]\d{0,6}x[1-9]\d{0,6}", self.layout):
            raise UsageError(f"--layout {self.layout} is neither auto nor replicas x ranks of each, such as 4x8")
        if self.tp is not None and self.layout != "auto" and int(self.layout.split("x")[1]) != self.tp:
            raise UsageError(f"--tp {self.tp} and --layout {self.layout} name different ranks per model: give one")
        if self.collectives == "mpi" and self.wire != "f32":
            raise UsageError(f"--wire {self.wire} needs --collectives shm: MPI_Allreduce sums float32")
        if not 0 < self.exchange_timeout <= 1e9:
            raise UsageError(f"--exchange-timeout {self.exchange_timeout:g} must be above 0 (seconds), at most 1e9")
        if self.progress_every <= 0:
            raise UsageError(f"--progress-every {self.progress_every} must be above 0 (seconds)")

    @property
    def chunk(self) -> int:
        """Prompt tokens in a step."""
        return CHUNK if self.prefill_chunk is None else self.prefill_chunk

    @property
    def output_path(self) -> str:
        """The HDF5 file; by default beside the prompts with the suffix ``.h5``."""
        return self.output if self.output is not None else _beside(self.prompts) + ".h5"

    @property
    def results_path(self) -> str:
        """The JSONL results; by default beside the HDF5 file with the suffix ``.results.jsonl``."""
        if self.results is not None:
            return self.results
        return (self.output_path[:-3] if self.output_path.endswith(".h5") else self.output_path) + ".results.jsonl"

    @property
    def errors_path(self) -> str:
        """Lines that expired; by default beside the HDF5 file with the suffix ``.errors.jsonl``."""
        if self.errors is not None:
            return self.errors
        return (self.output_path[:-3] if self.output_path.endswith(".h5") else self.output_path) + ".errors.jsonl"

    def to_json(self) -> str:
        """The whole configuration as JSON text, as it is stored with the results."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def _beside(prompts: str) -> str:
    for suffix in (".jsonl.gz", ".jsonl", ".json", ".txt"):
        if prompts.endswith(suffix) and len(os.path.basename(prompts)) > len(suffix):
            return prompts[: -len(suffix)]
    return prompts


def _one_of(option: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"--{option} {value!r} is not one of {', '.join(choices)}")


def parse_size(text: str | int) -> int:
    """Bytes of '4GiB', '512M', '1000000'; K, M, G, T are powers of 1024. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(text), re.IGNORECASE)
    if not match:
        raise UsageError(f"size {text!r} is not a number of bytes like 4GiB, 512MiB or 1000000")
    size = float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ")
    if size > 2**60:
        raise UsageError(f"size {str(text)[:40]} is more than any machine has")
    return int(size)


def parse_duration(text: str) -> float:
    """Seconds of '5400', '1:30:00', '2-12:00:00' (days, as SLURM writes them), '90m' or '36h'. Raises UsageError."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)", text.strip())
    if match:
        days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
        if seconds >= 60 or minutes >= 60 and match[2] or hours >= 24 and match[1]:
            raise UsageError(f"time {text!r}: minutes and seconds behind a colon go to 59, hours behind days to 23; "
                             f"90m or 36h count on")
        return 86400 * days + 3600 * hours + 60 * minutes + seconds
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if not match:
        raise UsageError(f"time {text!r} is not one like 5400, 90m, 1:30:00 or 2-12:00:00")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def format_size(n_bytes: float) -> str:
    """Bytes for people: '512 B', '3.1 MiB', '17.25 GiB'."""
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2)):
        if n_bytes < 1024 or unit == "GiB":
            return f"{n_bytes:.{digits}f} {unit}"
        n_bytes /= 1024
    raise AssertionError("unreachable: the last unit always returns")


def read_file(path: str) -> dict[str, Any]:
    """Options of a TOML file by their command-line names. Raises UsageError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except ValueError as error:     # TOML's own and what is not UTF-8
        raise UsageError(f"--config {path} is not a TOML file: {error}") from None
    if isinstance(values.get("no-pin"), bool):
        values["pin"] = not values.pop("no-pin")
    return {name.replace("-", "_"): value for name, value in values.items()}


_SCALARS: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}


def resolve(from_file: dict[str, Any], from_command_line: dict[str, Any]) -> RunConfig:
    """The configuration of a file's options and a command line's, which win. Raises UsageError."""
    known = {field.name: str(field.type) for field in dataclasses.fields(RunConfig)}
    merged: dict[str, Any] = {}
    for name, value in from_file.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            hint = f"did you mean {close[0].replace('_', '-')!r}?" if close else "mpillm run --help lists the options"
            raise UsageError(f"the configuration file has an unknown option {name.replace('_', '-')!r} ({hint})")
        merged[name] = _checked(name, value, known[name])
    merged.update(from_command_line)
    if "prompts" not in merged:
        raise UsageError("--prompts FILE is missing: a JSONL file, one request a line")
    return RunConfig(**merged)


def _checked(name: str, value: Any, kind: str) -> Any:
    """A value of the file, of the type that the option has."""
    shown = name.replace("_", "-")
    if name in ("kv_memory", "attention_scratch"):
        return parse_size(value)
    if name == "time_limit" and isinstance(value, str):
        return parse_duration(value)
    if kind.startswith("tuple"):
        inner = str if "str" in kind else int
        if isinstance(value, list) and all(type(v) is inner for v in value):
            return tuple(value)
        raise UsageError(f"configuration file: {shown} must be a list of {inner.__name__}, not {value!r}")
    scalar = _SCALARS[kind.split(" |")[0]]
    if isinstance(value, bool) is not (scalar is bool) or not isinstance(value, scalar):
        raise UsageError(f"configuration file: {shown} must be of type {kind.split(' |')[0]}, not {value!r}")
    return float(value) if scalar == (int, float) else value
