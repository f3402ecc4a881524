"""float8 checkpoints for tests: quantised with block scales by ml_dtypes, and their dequantised twins."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from made_models import encode, safetensors_bytes

SCALES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E8M0": ml_dtypes.float8_e8m0fnu}


def quantise(x: np.ndarray, block: tuple[int, int], scale_dtype: str = "F32") -> tuple[np.ndarray, np.ndarray]:
    """(codes float8_e4m3fn [n, k], scales [ceil(n / a), ceil(k / b)]): a block's largest value becomes 448."""
    a, b = block
    n, k = x.shape
    padded = np.pad(x, ((0, -n % a), (0, -k % b)))
    most = np.abs(padded.reshape(len(padded) // a, a, -1, b)).max(axis=(1, 3))
    scale = np.maximum(most, 1e-9) / 448
    if scale_dtype == "F8_E8M0":
        scale = np.exp2(np.ceil(np.log2(scale)))
    scale = scale.astype(SCALES[scale_dtype])
    return (x / spread(scale, block, x.shape)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn), scale


def spread(scale: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """float32 [n, k]: the scale of every value, by counting."""
    return scale.astype(np.float32)[np.arange(shape[0])[:, None] // block[0], np.arange(shape[1])[None] // block[1]]


def is_quantised(name: str, kept: tuple[str, ...] = ()) -> bool:
    """Layers' matrices are; the embedding, the head, norms and what is ``kept`` are not."""
    return name.endswith(("_proj.weight", "_with_mqa.weight")) and not any(part in name for part in kept)


def write_float8(path: Path, config: dict, tensors: dict[str, np.ndarray], block: tuple[int, int] = (128, 128),
                 scale_dtype: str = "F32", kept: tuple[str, ...] = (), change=None) -> dict[str, np.ndarray]:
    """A folder as DeepSeek and Qwen3-FP8 write it; returns the float32 tensors that it stands for.

    ``change`` may alter the list of (name, dtype, shape, bytes) before it is written.
    """
    path.mkdir(parents=True, exist_ok=True)
    twin, items = dict(tensors), []
    for name, x in tensors.items():
        if not is_quantised(name, kept):
            items.append((name, "F32", x.shape, encode(x, "F32")))
            continue
        codes, scale = quantise(x, block, scale_dtype)
        twin[name] = codes.astype(np.float32) * spread(scale, block, x.shape)
        items.append((name, "F8_E4M3", x.shape, codes.tobytes()))
        items.append((name + "_scale_inv", scale_dtype, scale.shape, scale.tobytes()))
    stated = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block),
              "modules_to_not_convert": list(kept)}
    (path / "config.json").write_text(json.dumps({"quantization_config": stated, **config}))
    (path / "model.safetensors").write_bytes(safetensors_bytes(change(items) if change else items))
    return twin
