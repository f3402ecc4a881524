"""A model of which only config.json is there: its tensors as the config states them, without values."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from mpillm.formats.checkpoint import Checkpoint, TensorInfo
from mpillm.formats.safetensors import read_json
from mpillm.models.config import ModelConfig
from mpillm.models.parse_hf import hf_config
from mpillm.models.weights import Weights, expected

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class StatedTensors(Checkpoint):
    """Names, shapes and one type for all tensors; nothing can be read."""

    kind = "hf"

    def __init__(self, path: str, config: ModelConfig, dtype: str) -> None:
        """``dtype``: as safetensors name it, such as BF16."""
        super().__init__(path)
        self.tensors = {name: TensorInfo(name, shape, dtype) for name, shape in expected(config)}


def config_file(path: str) -> str | None:
    """config.json itself, or that of a folder; None where ``path`` is neither."""
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    return path if path.endswith(".json") and os.path.isfile(path) else None


def stated_dtype(values: Mapping[str, Any]) -> str:
    """The type of the tensors by a config.json, as safetensors name it: BF16 where it says nothing."""
    quantised = values.get("quantization_config")
    if isinstance(quantised, dict) and quantised.get("quant_method") == "fp8":
        return "F8_E4M3"
    named = values.get("dtype", values.get("torch_dtype"))
    return _DTYPES.get(str(named).removeprefix("torch."), "BF16")


def stated_name(where: str) -> str:
    """A model's name by the path of its config.json: the folder's, or a file's own."""
    if os.path.basename(where) == "config.json":
        return os.path.basename(os.path.dirname(os.path.abspath(where)))
    return os.path.basename(where).removesuffix(".json")


def stated_model(where: str, tie_embeddings: bool = False) -> tuple[ModelConfig, Weights]:
    """Figures and tensors by the config.json at ``where``. Raises ModelError."""
    values = read_json(where)
    config = hf_config(where, values, {}, stated_name(where))
    config = dataclasses.replace(config, tied=config.tied or tie_embeddings)
    return config, Weights(StatedTensors(where, config, stated_dtype(values)), config)
