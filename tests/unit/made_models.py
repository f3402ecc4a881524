"""Small random checkpoints for tests: Hugging Face folders and GGUF files, made without the readers."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np

# The tiny Llama of the tests; every figure differs from every other.
TINY = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "intermediate_size": 160,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 307, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
        "bos_token_id": 1, "eos_token_id": 2}


def tiny(**changes: object) -> dict:
    """TINY with changes; a value of ``...`` removes the key."""
    return {key: value for key, value in {**TINY, **changes}.items() if value is not ...}


def random_tensors(config: dict, seed: int = 0, head: bool | None = None) -> dict[str, np.ndarray]:
    """float32 tensors by Hugging Face names, drawn in ±1; ``head`` decides about lm_head (default: untied)."""
    rng = np.random.default_rng(seed)
    c, kind = config, config["model_type"]
    heads = c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    width = c.get("head_dim") or c["hidden_size"] // heads
    q, kv, hidden, ffn = heads * width, kv_heads * width, c["hidden_size"], c["intermediate_size"]
    attention_bias = bool(c.get("attention_bias"))
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if head if head is not None else not c.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, n, k, biased in (
                ("self_attn.q_proj", q, hidden, attention_bias or kind == "qwen2"),
                ("self_attn.k_proj", kv, hidden, attention_bias or kind == "qwen2"),
                ("self_attn.v_proj", kv, hidden, attention_bias or kind == "qwen2"),
                ("self_attn.o_proj", hidden, q, attention_bias),
                ("mlp.gate_proj", ffn, hidden, c.get("mlp_bias")), ("mlp.up_proj", ffn, hidden, c.get("mlp_bias")),
                ("mlp.down_proj", hidden, ffn, c.get("mlp_bias"))):
            shapes[at + name + ".weight"] = (n, k)
            if biased:
                shapes[at + name + ".bias"] = (n,)
        shapes[at + "input_layernorm.weight"] = shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        if kind == "qwen3":
            shapes[at + "self_attn.q_norm.weight"] = shapes[at + "self_attn.k_norm.weight"] = (width,)
    return {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}


def to_bf16(values: np.ndarray) -> np.ndarray:
    """uint16 bits, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encode(values: np.ndarray, dtype: str) -> bytes:
    """Bytes of ``values`` as a safetensors dtype."""
    if dtype == "BF16":
        return to_bf16(values).tobytes()
    numpy_type = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I64": "<i8", "U8": "u1", "BOOL": "?"}[dtype]
    return values.astype(numpy_type).tobytes()


def safetensors_bytes(items: list[tuple[str, str, tuple[int, ...], bytes]], pad: int = 0) -> bytes:
    """A safetensors file of (name, dtype, shape, data); ``pad`` spaces lengthen the header."""
    header, at = {}, 0
    for name, dtype, shape, data in items:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode() + b" " * pad
    return struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in items)


def file_of(tensors: dict[str, np.ndarray], dtype: str = "F32") -> bytes:
    return safetensors_bytes([(name, dtype, x.shape, encode(x, dtype)) for name, x in tensors.items()])


def write_folder(path: Path, config: dict, tensors: dict[str, np.ndarray], dtype: str = "F32") -> str:
    """A folder with config.json and model.safetensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(file_of(tensors, dtype))
    return str(path)


PARTS = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
TOPS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_tensors(config: dict, tensors: dict[str, np.ndarray], arch: str) -> dict[str, np.ndarray]:
    """The same tensors under GGUF's names, q and k permuted for ``llama`` as llama.cpp's converter does."""
    out = {}
    for name, x in tensors.items():
        stem, suffix = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            if arch == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config["num_attention_heads" if "q_proj" in part else "num_key_value_heads"]
                x = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
            stem = f"blk.{layer}.{PARTS[part]}"
        else:
            stem = TOPS[stem]
        out[f"{stem}.{suffix}"] = x
    return out


def gguf_writer(path: Path, config: dict, arch: str = "llama", **options: object) -> gguf.GGUFWriter:
    """A writer with the metadata of ``config`` in it."""
    writer = gguf.GGUFWriter(str(path), arch, **options)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensors(writer: gguf.GGUFWriter, tensors: dict[str, np.ndarray],
                kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> None:
    """Matrices as ``kind``, vectors in float32."""
    for name, x in tensors.items():
        used = kind if x.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(x, used), raw_dtype=used)


def write_gguf(path: Path, config: dict, tensors: dict[str, np.ndarray], arch: str = "llama",
               kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, **options: object) -> str:
    """A GGUF file (or split set) of the tensors given by Hugging Face names."""
    writer = gguf_writer(path, config, arch, **options)
    add_tensors(writer, gguf_tensors(config, tensors, arch), kind)
    finish(writer)
    return str(path)
