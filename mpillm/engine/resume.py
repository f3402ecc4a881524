"""What a run is, written down so that another one can continue it, or say why it may not.

``run.json`` in the folder of parts holds what the results depend on and a user chose: the model's content, the
options that change results. Ranks, layout, threads and time may differ from one attempt to the next.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from mpillm.config import RunConfig
from mpillm.errors import OutputError, UsageError
from mpillm.models.config import ModelConfig

FILE = "run.json"
VERSION = 2
# Options on which a prompt's tokens, or what is stored of them, depend.
OPTIONS = ("weights", "kv_type", "kv_type_v", "mla", "fast", "moe_split", "wire", "collectives", "max_model_len",
           "tie_embeddings", "logits", "logits_type", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n",
           "logprobs", "stop", "stop_token_ids", "ignore_eos", "seed", "parse_special")


def identity(settings: RunConfig, model: ModelConfig, checkpoint: Any, template: bytes | None) -> dict[str, Any]:
    """What must be the same in every attempt, as JSON has it; ``template``: the chat template that was given."""
    options = {name: getattr(settings, name) for name in OPTIONS}
    given = None if template is None else hashlib.blake2b(template, digest_size=16).hexdigest()
    made = {"version": VERSION, "model": _digest_of_model(model, checkpoint), "options": options,
            "chat template": given}
    return json.loads(json.dumps(made))


def _digest_of_model(model: ModelConfig, checkpoint: Any) -> str:
    """Of the configuration and of the tensors' names, types and shapes, and a few bytes of each."""
    digest = hashlib.blake2b(digest_size=16)
    figures = {name: value for name, value in dataclasses.asdict(model).items() if name != "name"}
    digest.update(json.dumps(figures, sort_keys=True, default=str).encode())
    for piece in checkpoint.fingerprint():
        digest.update(piece)
    return digest.hexdigest()


def save(folder: str, what: dict[str, Any]) -> None:
    """Write ``run.json`` whole or not at all. Raises OutputError."""
    path = os.path.join(folder, FILE)
    try:
        with open(path + ".tmp", "w", encoding="utf-8") as file:
            json.dump(what, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".tmp", path)
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}") from None


def load(folder: str) -> dict[str, Any] | None:
    """``run.json`` of an interrupted run; None where there is none. Raises OutputError when it is damaged."""
    path = os.path.join(folder, FILE)
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise OutputError(f"{path} cannot be read ({error}): move {folder} away and start afresh") from None
    if not isinstance(found, dict) or not isinstance(found.get("identity"), dict):
        raise OutputError(f"{path} does not describe a run: move {folder} away and start afresh")
    return found


def check_complete(output: str, attributes: Mapping[str, Any], now: dict[str, Any], prompts: str,
                   digest: str) -> None:
    """Outputs that are complete already are those of this command. Raises UsageError that names a difference.

    ``attributes``: of the HDF5 file ``output``; ``now``: the identity; ``digest``: of all lines of ``prompts``, empty
    where it cannot be had.
    """
    if "identity" in attributes:
        check_same(json.loads(attributes["identity"]), now)
    if digest and attributes.get("prompts", digest) != digest:
        raise UsageError(f"--resume: {output} is complete, but of other lines than --prompts {prompts} has: give "
                         "the same file, or another --output")


def check_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises UsageError that names the first thing in which two identities differ."""
    remedy = "resume with what the run began with, or start another one with another --output"
    for name, value in now["options"].items():
        old = before.get("options", {}).get(name)
        if old != value:
            raise UsageError(f"--resume: --{name.replace('_', '-')} is {json.dumps(value)}, the run began with "
                             f"{json.dumps(old)}: {remedy}")
    for name in ("version", "model", "chat template"):
        if before.get(name) != now[name]:
            raise UsageError(f"--resume: the {name} is another one than when the run began: {remedy}")
