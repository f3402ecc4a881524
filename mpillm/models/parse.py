"""From a path to a model: which format it is, its figures, and its tensors."""

from __future__ import annotations

import dataclasses
import os
import stat

import numpy as np

from mpillm.errors import ModelError
from mpillm.formats.checkpoint import LFS_MARK, Checkpoint, listing, open_error
from mpillm.formats.gguf import MAGIC, GgufFile, gguf_of_folder
from mpillm.formats.safetensors import SafetensorsFolder, read_json, weight_files
from mpillm.models.config import ModelConfig
from mpillm.models.parse_gguf import gguf_config
from mpillm.models.parse_hf import hf_config
from mpillm.models.weights import Weights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def open_model(path: str, tie_embeddings: bool = False) -> tuple[ModelConfig, Checkpoint]:
    """Figures and tensors of the model at ``path``: a Hugging Face folder, a GGUF file or a folder of one.

    ``tie_embeddings`` takes the embedding as output head whatever the model says. Remarks for the user
    are in the checkpoint's ``warnings``. Every tensor that the figures call for has been found, with its
    shape and a type that can be read. Raise ModelError with one line for anything else.

    A tied folder that also has a head reads both tensors to compare them; so let one rank open the model
    and the others take its figures and ``open_checkpoint``.
    """
    checkpoint = open_checkpoint(path)
    try:
        config = _config(checkpoint, tie_embeddings)
        Weights(checkpoint, config).check()
    except BaseException:
        checkpoint.close()
        raise
    return config, checkpoint


def open_checkpoint(path: str) -> Checkpoint:
    """The tensors at ``path``, without the figures. Raise ModelError as ``open_model`` does."""
    found = _kind(path)
    return SafetensorsFolder(found) if os.path.isdir(found) else GgufFile(found)


def read_config(path: str, tie_embeddings: bool = False) -> ModelConfig:
    """The figures alone; of a Hugging Face folder only config.json and generation_config.json are needed."""
    if os.path.isfile(os.path.join(path, "config.json")):
        try:
            found = _kind(path)
        except ModelError:
            found = path
        if found == path:
            return _folder_config(path, tie_embeddings)
    config, checkpoint = open_model(path, tie_embeddings)
    checkpoint.close()
    return config


def _folder_config(path: str, tie_embeddings: bool) -> ModelConfig:
    where, generation = os.path.join(path, "config.json"), os.path.join(path, "generation_config.json")
    config = hf_config(where, read_json(where), read_json(generation) if os.path.exists(generation) else {},
                       _name(path))
    return dataclasses.replace(config, tied=config.tied or tie_embeddings)


def _config(checkpoint: Checkpoint, tie_embeddings: bool) -> ModelConfig:
    if isinstance(checkpoint, SafetensorsFolder):
        where = os.path.join(checkpoint.path, "config.json")
        config = hf_config(where, checkpoint.metadata, checkpoint.generation, _name(checkpoint.path),
                           checkpoint.warnings)
        config = dataclasses.replace(config, tied=_tied(checkpoint, config.tied, tie_embeddings))
    else:
        config = gguf_config(checkpoint, _name(checkpoint.path))
        config = dataclasses.replace(config, tied=config.tied or tie_embeddings)
    return config


def _tied(checkpoint: Checkpoint, stated: bool, forced: bool) -> bool:
    """Whether the embedding is the head: as transformers 5 decides in ``tie_weights``."""
    if forced:
        return True
    head = HEAD in checkpoint.tensors
    if not stated and not head:
        raise ModelError(f"{checkpoint.path}: tensor {HEAD} is missing, although tie_word_embeddings is not "
                         "true: the download may be incomplete (--tie-embeddings takes the embedding)")
    if stated and head and EMBEDDING in checkpoint.tensors and not _equal(checkpoint, EMBEDDING, HEAD):
        checkpoint.warnings.append(
            f"{checkpoint.path}: tie_word_embeddings is true, but {HEAD} is there and differs from the "
            "embedding: it is used, as transformers does (--tie-embeddings takes the embedding)")
        return False
    return stated


def _equal(checkpoint: Checkpoint, first: str, second: str, chunk: int = 1 << 22) -> bool:
    """Whether two matrices hold the same values; stops at the first chunk of rows that differs."""
    one, two = checkpoint.tensors[first], checkpoint.tensors[second]
    if one.shape != two.shape or len(one.shape) != 2:
        return False
    if checkpoint.unreadable(first) or checkpoint.unreadable(second):
        return False
    step = max(1, chunk // max(one.shape[1], 1))
    for start in range(0, one.shape[0], step):
        rows = range(start, min(start + step, one.shape[0]))
        if not np.array_equal(checkpoint.read(first, rows), checkpoint.read(second, rows), equal_nan=True):
            return False
    return True


def _name(path: str) -> str:
    return os.path.basename(os.path.abspath(path))


def _kind(path: str) -> str:
    """The path to open: a folder with config.json and weights, or a GGUF file."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        hint = "" if os.path.isabs(path) or path.count("/") != 1 else \
            " (a name on a hub? models are not downloaded: give a local folder or file)"
        raise ModelError(f"model {path}: {error.strerror or error}{hint}") from error
    except ValueError as error:
        raise ModelError(f"model {path!r}: {error}") from error
    if stat.S_ISDIR(mode):
        return _folder(path)
    if not stat.S_ISREG(mode):
        raise ModelError(f"model {path}: is neither a folder nor a regular file")
    try:
        with open(path, "rb") as file:
            start = file.read(len(LFS_MARK))
    except OSError as error:
        raise open_error(path, error) from error
    # A pointer, and a file that should be GGUF and is not, get their message from the reader.
    if start[:4] in (MAGIC, MAGIC[::-1]) or start == LFS_MARK or path.endswith(".gguf"):
        return path
    if path.endswith((".safetensors", ".json")):
        raise ModelError(f"model {path}: is one file of a model: give its folder")
    raise ModelError(f"model {path}: is not a GGUF file, and only a folder can be a Hugging Face model")


def _folder(path: str) -> str:
    """A folder's own path if it is a Hugging Face model, else that of the GGUF file in it."""
    if not os.path.exists(os.path.join(path, "config.json")):
        gguf = gguf_of_folder(path)
        if gguf is not None:
            return gguf
        if any(name.endswith(".safetensors") for name in listing(path)):
            raise ModelError(f"model {path}: has weights but no config.json: the download may be incomplete")
        raise ModelError(f"model {path}: holds no model: config.json and *.safetensors, or a .gguf file, "
                         "are expected")
    try:
        weight_files(path)
    except ModelError:
        # config.json beside a GGUF file, as some publish it: the GGUF file is the model.
        if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in listing(path)):
            raise
        gguf = gguf_of_folder(path)
        if gguf is None:
            raise
        return gguf
    return path
