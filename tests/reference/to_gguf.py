"""GGUF twins of the small checkpoints, written with the ``gguf`` package; no torch.

    python tests/reference/to_gguf.py FOLDER OUT.gguf Q8_0

GGUF files of architecture ``llama`` hold the rows of q and k (weights and biases) in the order of interleaved
rotary pairs: within a head, row i of the first half comes to 2 i and row i of the second to 2 i + 1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from cases import figures, hashed, read_safetensors

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
}
EXPERTS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor named as in a Hugging Face file."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleave(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k ([heads * D, ...]) in the order that GGUF's ``llama`` has."""
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def random_blocks(key: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, scale: float) -> np.ndarray:
    """Bytes of random K-quant blocks with sensible scales (the package cannot quantise to these)."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    n = int(np.prod(shape)) // block
    data = hashed(key, n * (size // 8 + 1)).view(np.uint8)[:n * size].reshape(n, size).copy()
    d = np.full((n, 1), scale, np.float16).view(np.uint8)
    if kind == gguf.GGMLQuantizationType.Q6_K:      # d of 8-bit scales stands at the end
        data[:, -2:] = d
    else:                                           # Q4_K: d and dmin of 6-bit scales and minima at the start
        data[:, 0:2], data[:, 2:4] = d, np.full((n, 1), scale * 7.5, np.float16).view(np.uint8)
    return data.reshape(*shape[:-1], shape[-1] // block * size)


def stored(name: str, x: np.ndarray, kind: gguf.GGMLQuantizationType) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """A tensor's bytes in the file: matrices as ``kind`` where their rows hold whole blocks, else as F32."""
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if x.ndim < 2 or x.shape[-1] % block:
        return np.ascontiguousarray(x, np.float32), gguf.GGMLQuantizationType.F32
    if kind in (gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K):
        spread = {gguf.GGMLQuantizationType.Q4_K: 170.0, gguf.GGMLQuantizationType.Q6_K: 1350.0}[kind]
        return random_blocks(name, x.shape, kind, float(np.std(x)) / spread), kind
    return gguf.quants.quantize(np.ascontiguousarray(x, np.float32), kind), kind


def write_gguf(config: dict[str, Any], tensors: dict[str, np.ndarray], path: Path, kind: str = "F32", *,
               architecture: str | None = None, tokenizer: dict[str, Any] | None = None,
               extra: dict[str, np.ndarray] | None = None, skip: tuple[str, ...] = (),
               others: dict[str, str] | None = None, **writer: Any) -> dict[str, np.ndarray]:
    """Write a GGUF file (or a set, with ``split_max_tensors``); the tensors as they read back, by HF name.

    ``tokenizer`` maps GGUF keys to strings, lists of strings or of ints; None writes none of them. ``extra`` tensors
    are stored as they are, ``skip`` names HF tensors to leave out. ``others``: kinds by a part of
    the HF name. ``writer`` goes to GGUFWriter.
    """
    f, family = figures(config), config["model_type"]
    arch = architecture or ARCHITECTURES.get(family, family)
    out = gguf.GGUFWriter(path, arch, **writer)
    out.add_name("tiny")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(f["hidden"])
    out.add_block_count(f["layers"])
    out.add_feed_forward_length(f["intermediate"])
    out.add_head_count(f["heads"])
    out.add_head_count_kv(f["kv_heads"])
    out.add_key_length(f["head_dim"])
    out.add_value_length(f["head_dim"])
    out.add_rope_dimension_count(f["head_dim"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    out.add_vocab_size(f["vocab"])
    if f["experts"]:
        out.add_expert_count(f["experts"])
        out.add_expert_used_count(f["chosen"])
        if arch != "llama":
            out.add_expert_feed_forward_length(f["expert_width"])
    add_tokenizer(out, tokenizer or {})
    seen: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, x in tensors.items():
        if name in skip:
            continue
        turned = arch == "llama" and (".q_proj." in name or ".k_proj." in name)
        heads = f["heads"] if ".q_proj." in name else f["kv_heads"]
        own = next((other for part, other in (others or {}).items() if part in name), kind)
        data, used = stored(name, interleave(x, heads) if turned else x, gguf.GGMLQuantizationType[own])
        back = gguf.quants.dequantize(data, used).reshape(x.shape).astype(np.float32)
        seen[name] = deinterleave(back, heads) if turned else back
        if ".experts." in name:
            *_, layer, _, _, number, part, _ = name.split(".")
            stack = stacks.setdefault(f"blk.{layer}.ffn_{EXPERTS[part]}_exps.weight", [])
            assert len(stack) == int(number), "experts come in order"
            stack.append(data)
            if len(stack) == f["experts"]:
                out.add_tensor(f"blk.{layer}.ffn_{EXPERTS[part]}_exps.weight", np.stack(stack), raw_dtype=used)
            continue
        out.add_tensor(gguf_name(name), data, raw_dtype=used)
    for name, data in (extra or {}).items():
        out.add_tensor(name, data)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return seen


def deinterleave(x: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of ``interleave``."""
    return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def add_tokenizer(out: gguf.GGUFWriter, keys: dict[str, Any]) -> None:
    """Tokenizer metadata by its GGUF keys."""
    for key, value in keys.items():
        if isinstance(value, list):
            out.add_array(key, value)
        elif isinstance(value, bool):
            out.add_bool(key, value)
        elif isinstance(value, int):
            out.add_uint32(key, value)
        else:
            out.add_string(key, value)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    write_gguf(json.loads((source / "config.json").read_text()), read_safetensors(source), Path(sys.argv[2]),
               *sys.argv[3:4])
