"""From a path to a model that can be planned: config.json alone, a folder, or a GGUF file's header."""

from __future__ import annotations

import os

from mpillm import io
from mpillm.engine.estimate import Subject
from mpillm.errors import ModelError
from mpillm.formats.checkpoint import listing
from mpillm.models.parse import open_model
from mpillm.models.stated import config_file, stated_model
from mpillm.models.weights import Weights


def open_subject(path: str | None, weights: str, tie_embeddings: bool = False) -> tuple[Subject, str]:
    """The model, and where the types of its tensors come from. No values are read, but for a tied folder that has a
    head as well, where both are compared. ``weights``: --weights. Raises ModelError."""
    path = io.find_model(path)
    where = config_file(path)
    if where is not None and (not os.path.isdir(path) or
                              not any(name.endswith((".safetensors", ".gguf")) for name in listing(path))):
        return Subject(*stated_model(where, tie_embeddings), weights), "config.json"
    try:
        model, checkpoint = open_model(path, tie_embeddings)
    except ModelError as error:
        if where is None:
            raise
        # Weights that are not there yet, such as git-lfs pointers, do not stand in a plan's way
        return Subject(*stated_model(where, tie_embeddings), weights), f"config.json, since {error}"
    with checkpoint:
        return Subject(model, Weights(checkpoint, model), weights), f"the {checkpoint.kind} files' headers"
