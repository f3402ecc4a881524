"""From a path to a model that can be planned: config.json alone, a folder, or a GGUF file's header."""

from __future__ import annotations

import os
from collections import Counter

from mpillm import io
from mpillm.engine.estimate import Dense, Latent, Subject
from mpillm.errors import ModelError
from mpillm.formats.checkpoint import listing
from mpillm.formats.safetensors import read_json
from mpillm.models import deepseek_sizes as deepseek
from mpillm.models.load import KEPT
from mpillm.models.parse import open_checkpoint, open_model
from mpillm.models.stated import config_file, stated_model, stated_name
from mpillm.models.weights import Weights


def open_subject(path: str | None, weights: str, tie_embeddings: bool = False) -> tuple[Subject, str]:
    """The model, and where the types of its tensors come from. No values are read, but for a tied folder that has a
    head as well, where both are compared. ``weights``: --weights. Raises ModelError."""
    path = io.find_model(path)
    where = config_file(path)
    if where is not None:
        figures = deepseek.of_config(where, read_json(where), stated_name(where))
        if figures is not None:
            return Latent(figures, weights), "config.json"
        if not os.path.isdir(path) or not any(name.endswith((".safetensors", ".gguf")) for name in listing(path)):
            return Dense(*stated_model(where, tie_embeddings), weights), "config.json"
    latent = _latent_gguf(path, weights)
    if latent is not None:
        return latent, "the GGUF file's header"
    try:
        model, checkpoint = open_model(path, tie_embeddings)
    except ModelError as error:
        if where is None:
            raise
        # Weights that are not there yet, such as git-lfs pointers, do not stand in a plan's way
        return Dense(*stated_model(where, tie_embeddings), weights), f"config.json, since {error}"
    with checkpoint:
        return Dense(model, Weights(checkpoint, model), weights), f"the {checkpoint.kind} files' headers"


def _latent_gguf(path: str, weights: str) -> Latent | None:
    """A GGUF file of DeepSeek; its commonest type stands for all."""
    try:
        checkpoint = open_checkpoint(path)
    except ModelError:
        return None
    with checkpoint:
        meta = checkpoint.metadata
        if checkpoint.kind != "gguf" or meta.get("general.architecture") != deepseek.GGUF_ARCHITECTURE:
            return None
        embedding = checkpoint.tensors.get("token_embd.weight")
        if embedding is None:
            raise ModelError(f"{path}: tensor token_embd.weight is missing")
        sizes: Counter[str] = Counter()
        for info in checkpoint.tensors.values():
            if len(info.shape) > 1:
                values = 1
                for n in info.shape:
                    values *= n
                sizes[info.dtype] += values
        figures = deepseek.of_gguf(path, meta, embedding.shape[0], "output.weight" not in checkpoint.tensors,
                                   os.path.basename(path))
        commonest = sizes.most_common(1)[0][0]
        return Latent(figures, weights, KEPT.get(commonest, "bf16"))
