"""float8 checkpoints of Hugging Face folders: what config.json says of them, and the scales of a slice.

A weight ``X.weight`` of type F8_E4M3 has its scales in a tensor beside it; a value is code x scale in float32, as
in DeepSeek's ``weight_dequant``. Known are, by ``quantization_config``:

- ``fp8`` with ``weight_block_size`` [a, b] (DeepSeek-V3, Qwen3-FP8): ``X.weight_scale_inv`` holds one scale for each
  block of a rows and b columns, the last ones cut where the shape is no multiple;
- ``fp8`` without it: ``X.weight_scale``, one scale for the tensor;
- ``compressed-tensors`` with 8-bit floats: ``X.weight_scale``, one for the tensor, each row, or each block.

Which weights stayed as they were (``modules_to_not_convert``) is seen from their types. Scales of activations
(``X.input_scale``) are not used: activations stay float32.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpillm.errors import ModelError

DTYPE = "F8_E4M3"
METHODS = ("fp8", "compressed-tensors")      # quant_method of schemes that can be read
REMEDY = "use the original model, or a GGUF file of it"


@dataclass(frozen=True)
class Scheme:
    """Where the scales lie: the ending of their name, and rows and columns of a block (None: all of them)."""

    suffix: str
    rows: int | None
    columns: int | None

    def name(self, weight: str) -> str:
        """The tensor of the scales of ``weight``."""
        return weight + self.suffix

    def block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of a block of a weight of ``shape``."""
        return self.rows or max(shape[0], 1), self.columns or max(shape[1], 1)

    def allowed(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Shapes that the scales may have: the grid; without axes of one where there is but one row or scale."""
        height, width = self.block(shape)
        grid = -(-shape[0] // height), -(-shape[1] // width)
        if self.rows is None and self.columns is None:
            return grid, (1,), ()
        return (grid, grid[:1]) if self.columns is None else (grid,)


def scheme(where: str, config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of ``quantization_config`` in config.json (at ``where``); None if it has none.

    Raise ModelError for one that cannot be read here.
    """
    stated = config.get("quantization_config")
    if stated is None:
        return None
    if not isinstance(stated, dict):
        raise _refused(where, f"weights quantised by {_shown(stated)}")
    method = stated.get("quant_method", "unknown")
    if method == "fp8":
        return _fp8(where, stated)
    if method == "compressed-tensors":
        return _compressed(where, stated)
    raise _refused(where, f"weights quantised by {_shown(method)}")


def of_folder(path: str, config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a folder by the content of its config.json. Raise ModelError as ``scheme`` does."""
    return scheme(os.path.join(path, "config.json"), config)


def apply(values: np.ndarray, rows: np.ndarray, columns: range, block: tuple[int, int], scales: np.ndarray,
          first: tuple[int, int]) -> None:
    """Multiply ``values`` float32 [rows, columns] of a weight in place, each by the scale of its own block.

    ``rows`` are the weight's row numbers; ``scales`` float32 [block rows, block columns] is the part of the grid
    that begins at block ``first``.
    """
    height, width = block
    own = rows // height - first[0]
    if scales.shape[1] == 1:
        values *= scales[own]
        return
    edges = ((first[1] + np.arange(scales.shape[1] + 1)) * width - columns.start).clip(0, len(columns))
    along = np.repeat(scales, np.diff(edges), axis=1)
    # Rows of one block stand together, as a rule.
    breaks = (np.flatnonzero(np.diff(own)) + 1).tolist()
    for start, stop in zip([0, *breaks], [*breaks, len(own)], strict=True):
        values[start:stop] *= along[own[start]]


def _fp8(where: str, stated: dict[str, Any]) -> Scheme:
    if stated.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise _refused(where, f"fp8 weights of the format {_shown(stated['fmt'])}")
    block = stated.get("weight_block_size")
    if block is None:
        return Scheme("_scale", None, None)
    return Scheme("_scale_inv", *_block(where, "weight_block_size", block))


def _compressed(where: str, stated: dict[str, Any]) -> Scheme:
    groups = stated.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _refused(where, "compressed-tensors with other than one config group")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    weights = weights if isinstance(weights, dict) else {}
    if weights.get("num_bits") != 8 or weights.get("type") != "float" or not weights.get("symmetric", True):
        raise _refused(where, f"compressed-tensors of {_shown(weights.get('num_bits'))} bits, type "
                              f"{_shown(weights.get('type'))}")
    strategy = weights.get("strategy")
    if strategy == "block":
        return Scheme("_scale", *_block(where, "block_structure", weights.get("block_structure")))
    if strategy not in ("tensor", "channel"):
        raise _refused(where, f"compressed-tensors with the strategy {_shown(strategy)}")
    return Scheme("_scale", None if strategy == "tensor" else 1, None)


def _block(where: str, key: str, block: Any) -> tuple[int, int]:
    whole = isinstance(block, list) and len(block) == 2 and \
        all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < 1 << 31 for n in block)
    if not whole:
        raise ModelError(f"{where}: {key} is {_shown(block)}, it must be two positive whole numbers")
    return block[0], block[1]


def _refused(where: str, what: str) -> ModelError:
    return ModelError(f"{where}: {what} are not supported: {REMEDY}")


def _shown(value: Any) -> str:
    text = "a huge number" if isinstance(value, int) and abs(value) > 1 << 60 else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
