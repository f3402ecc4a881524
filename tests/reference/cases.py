"""Small random checkpoints of the Llama family, written from a recipe.

Every weight is an integer of a counter-based hash times a power of two, so that it is exact in the dtype that it
is stored in and the same on every machine: a checkpoint needs no room in the repository, only the logits that
transformers computed from it (``make_checkpoints.py``) and a checksum of the bytes.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 307
DECODE = 12          # greedy tokens recorded after each prompt
LENGTHS = (1, 6, 17, 60)   # prompt lengths; the last one's continuation crosses a cache block of 64 positions
BITS = {"F32": 23, "F16": 11, "BF16": 8}   # significant bits that a stored value may use


@dataclass(frozen=True)
class Case:
    """One checkpoint: its config.json, how its tensors are stored, and the lengths of its prompts."""

    name: str
    config: dict[str, Any]
    dtype: str = "F32"
    norm_dtype: str | None = None        # norms in another dtype than the rest
    o_dtype: str | None = None           # o_proj in another dtype than the rest
    shards: int = 1
    bias: float = 0.0                    # biases are random in +-bias
    lengths: tuple[int, ...] = LENGTHS
    extra: dict[str, Any] = field(default_factory=dict)   # content of generation_config.json


def figures(config: dict[str, Any]) -> dict[str, Any]:
    """The sizes that the tensors' shapes follow from (nulls filled in)."""
    heads = config["num_attention_heads"]
    return {
        "hidden": config["hidden_size"], "layers": config["num_hidden_layers"], "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "intermediate": config["intermediate_size"], "vocab": config["vocab_size"],
        "tied": config.get("tie_word_embeddings", False),
        "qkv_bias": config.get("attention_bias", False) or config["model_type"] == "qwen2",
        "o_bias": config.get("attention_bias", False) and config["model_type"] in ("llama", "qwen3", "qwen3_moe"),
        "mlp_bias": config.get("mlp_bias", False), "qk_norm": config["model_type"] in ("qwen3", "qwen3_moe"),
        **expert_figures(config),
    }


def is_latent(config: dict[str, Any]) -> bool:
    """Whether attention is latent attention."""
    return config["model_type"] in ("deepseek_v2", "deepseek_v3")


def latent_attention(config: dict[str, Any]) -> list[tuple[str, int, int, bool]]:
    """(name, outputs, inputs, biased) of the matrices of latent attention (DeepSeek)."""
    heads, hidden, rank, biased = (config[key] for key in ("num_attention_heads", "hidden_size", "kv_lora_rank",
                                                           "attention_bias"))
    nope, rope, value = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q_rank = config["q_lora_rank"]
    queries = [("q_proj", heads * (nope + rope), hidden, False)] if q_rank is None else [
        ("q_a_proj", q_rank, hidden, biased), ("q_b_proj", heads * (nope + rope), q_rank, False)]
    found = [*queries, ("kv_a_proj_with_mqa", rank + rope, hidden, biased),
             ("kv_b_proj", heads * (nope + value), rank, False), ("o_proj", hidden, heads * value, biased)]
    return [(f"self_attn.{name}", n, k, bias) for name, n, k, bias in found]


def latent_norms(config: dict[str, Any]) -> dict[str, int]:
    """Widths of the norms of latents, by name."""
    queries = {} if config["q_lora_rank"] is None else {"self_attn.q_a_layernorm": config["q_lora_rank"]}
    return queries | {"self_attn.kv_a_layernorm": config["kv_lora_rank"]}


def expert_figures(config: dict[str, Any]) -> dict[str, Any]:
    """How many experts a layer has, how many a token takes, how wide they are, and which layers are dense."""
    if config["model_type"] == "mixtral":
        return {"experts": config["num_local_experts"], "chosen": config["num_experts_per_tok"], "normed": True,
                "expert_width": config["intermediate_size"], "dense": []}
    if config["model_type"] == "qwen3_moe":
        step = config.get("decoder_sparse_step", 1)
        dense = [i for i in range(config["num_hidden_layers"]) if i in config["mlp_only_layers"] or (i + 1) % step]
        return {"experts": config["num_experts"], "chosen": config["num_experts_per_tok"],
                "normed": config["norm_topk_prob"], "expert_width": config["moe_intermediate_size"], "dense": dense}
    if is_latent(config) and config.get("n_routed_experts"):
        return {"experts": config["n_routed_experts"], "chosen": config["num_experts_per_tok"], "normed": True,
                "expert_width": config["moe_intermediate_size"],
                "dense": list(range(config["first_k_dense_replace"]))}
    return {"experts": 0, "chosen": 0, "normed": True, "expert_width": 0, "dense": []}


def feed_forward(config: dict[str, Any], layer: int) -> list[tuple[str, int, int, bool]]:
    """(name, outputs, inputs, biased) of a layer's feed-forward matrices: the dense ones, or the router and experts."""
    f = figures(config)
    hidden, wide = f["hidden"], f["intermediate"]
    if not f["experts"] or layer in f["dense"]:
        return [("mlp.gate_proj", wide, hidden, f["mlp_bias"]), ("mlp.up_proj", wide, hidden, f["mlp_bias"]),
                ("mlp.down_proj", hidden, wide, f["mlp_bias"])]
    block, *names = ("block_sparse_moe", "w1", "w3", "w2") if config["model_type"] == "mixtral" else \
        ("mlp", "gate_proj", "up_proj", "down_proj")
    out = [(f"{block}.gate", f["experts"], hidden, False)]
    for e in range(f["experts"]):
        for name, n, k in zip(names, (f["expert_width"], f["expert_width"], hidden),
                              (hidden, hidden, f["expert_width"]), strict=True):
            out.append((f"{block}.experts.{e}.{name}", n, k, False))
    wide = config.get("n_shared_experts", 0) * f["expert_width"]
    if wide:
        out += [("mlp.shared_experts.gate_proj", wide, hidden, False),
                ("mlp.shared_experts.up_proj", wide, hidden, False),
                ("mlp.shared_experts.down_proj", hidden, wide, False)]
    return out


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint, in the file's order."""
    f = figures(config)
    hidden, q, kv = f["hidden"], f["heads"] * f["head_dim"], f["kv_heads"] * f["head_dim"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (f["vocab"], hidden)}
    for i in range(f["layers"]):
        at = f"model.layers.{i}."
        out[at + "input_layernorm.weight"] = (hidden,)
        attention = latent_attention(config) if is_latent(config) else [
            ("self_attn.q_proj", q, hidden, f["qkv_bias"]), ("self_attn.k_proj", kv, hidden, f["qkv_bias"]),
            ("self_attn.v_proj", kv, hidden, f["qkv_bias"]), ("self_attn.o_proj", hidden, q, f["o_bias"])]
        for name, n, k, bias in (*attention, *feed_forward(config, i)):
            out[f"{at}{name}.weight"] = (n, k)
            if bias:
                out[f"{at}{name}.bias"] = (n,)
        if f["qk_norm"]:
            out[at + "self_attn.q_norm.weight"] = (f["head_dim"],)
            out[at + "self_attn.k_norm.weight"] = (f["head_dim"],)
        if is_latent(config):
            out |= {f"{at}{name}.weight": (n,) for name, n in latent_norms(config).items()}
            if config["model_type"] == "deepseek_v3" and f["experts"] and i not in f["dense"]:
                out[at + "mlp.gate.e_score_correction_bias"] = (f["experts"],)
        out[at + "post_attention_layernorm.weight"] = (hidden,)
    out["model.norm.weight"] = (hidden,)
    if not f["tied"]:
        out["lm_head.weight"] = (f["vocab"], hidden)
    return out


def hashed(key: str, n: int) -> np.ndarray:
    """n uint64 that depend on the key and their index only (splitmix64)."""
    start = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8).digest(), "<u8")[0]
    with np.errstate(over="ignore"):
        z = start + (np.arange(n, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def symmetric(key: str, n: int, bits: int) -> np.ndarray:
    """n float32 integers, uniform in +-(2**bits - 1)."""
    span = np.uint64(2 ** (bits + 1) - 1)
    return ((hashed(key, n) >> np.uint64(16)) % span).astype(np.float32) - np.float32(2 ** bits - 1)


def values(case: Case, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 values of one tensor."""
    key, n = f"{case.name}/{name}", int(np.prod(shape))
    if name.endswith("norm.weight"):
        return 1 + (symmetric(key, n, 6) / np.float32(128)).reshape(shape)     # 0.5 .. 1.5
    if name.endswith("correction_bias"):
        return (symmetric(key, n, 6) / np.float32(256)).reshape(shape)         # of scores between 0 and 1
    if name.endswith(".bias"):
        return (symmetric(key, n, 6) * np.float32(case.bias / 64)).reshape(shape)
    if "embed_tokens" in name:
        limit = 1.0
    else:
        gain = 4.0 if "lm_head" in name else 1.5 if "q_proj" in name or "k_proj" in name else 1.0
        limit = 2.0 ** round(np.log2(gain * (3 / shape[-1]) ** 0.5))
    bits = BITS[dtype_of(case, name)]
    return (symmetric(key, n, bits) * np.float32(limit * 2.0 ** -bits)).reshape(shape)


def dtype_of(case: Case, name: str) -> str:
    """The dtype that a tensor is stored in."""
    if case.norm_dtype and name.endswith("norm.weight"):
        return case.norm_dtype
    return case.o_dtype if case.o_dtype and "o_proj" in name else case.dtype


def encode(array: np.ndarray, dtype: str) -> bytes:
    """float32 values as the little-endian bytes of a dtype; they have to be exact in it."""
    array = np.ascontiguousarray(array, np.float32)
    if dtype == "F32":
        return array.tobytes()
    if dtype == "F16":
        half = array.astype(np.float16)
        assert (half.astype(np.float32) == array).all(), "not exact in float16"
        return half.tobytes()
    bits = array.view(np.uint32)
    assert dtype == "BF16" and not (bits & 0xFFFF).any(), "not exact in bfloat16"
    return (bits >> 16).astype(np.uint16).tobytes()


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]], pad: int = 0) -> None:
    """A safetensors file of (dtype, shape, bytes); ``pad`` spaces lengthen the header (odd data addresses)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)


def read_safetensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder's files as float32."""
    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        blob = path.read_bytes()
        size = struct.unpack("<Q", blob[:8])[0]
        for name, info in json.loads(blob[8:8 + size]).items():
            if name != "__metadata__":
                start, stop = (8 + size + at for at in info["data_offsets"])
                out[name] = decode(blob[start:stop], info["dtype"]).reshape(info["shape"])
    return out


def decode(data: bytes, dtype: str) -> np.ndarray:
    """Little-endian bytes of a dtype as float32 (other than float dtypes: as uint8)."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    kinds = {"F32": "<f4", "F16": "<f2"}
    return np.frombuffer(data, kinds[dtype]).astype(np.float32) if dtype in kinds else np.frombuffer(data, "u1")


def encoded(case: Case) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """All tensors of a case as (dtype, shape, bytes)."""
    out = {}
    for name, shape in shapes(case.config).items():
        dtype = dtype_of(case, name)
        out[name] = (dtype, shape, encode(values(case, name, shape), dtype))
    return out


def write_folder(case: Case, folder: Path, pad: int = 0) -> Path:
    """The checkpoint as a Hugging Face folder (no tokenizer); the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case.config, indent=1))
    if case.extra:
        (folder / "generation_config.json").write_text(json.dumps(case.extra, indent=1))
    tensors = encoded(case)
    if case.shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, pad)
        return folder
    names = list(tensors)
    index: dict[str, Any] = {"metadata": {"total_size": sum(len(d) for _, _, d in tensors.values())}, "weight_map": {}}
    for s in range(case.shards):
        file = f"model-{s + 1:05d}-of-{case.shards:05d}.safetensors"
        part = names[s * len(names) // case.shards:(s + 1) * len(names) // case.shards]
        write_safetensors(folder / file, {name: tensors[name] for name in part}, pad)
        index["weight_map"].update({name: file for name in part})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return folder


def checksum(case: Case) -> str:
    """SHA-256 over the names, dtypes and bytes of all tensors."""
    total = hashlib.sha256()
    for name, (dtype, shape, data) in encoded(case).items():
        total.update(f"{name} {dtype} {shape}".encode() + data)
    return total.hexdigest()


def prompts(case: Case, salt: int = 0) -> Iterator[list[int]]:
    """Random token ids, one list per length."""
    for length in case.lengths:
        yield [int(h % np.uint64(case.config["vocab_size"]))
               for h in hashed(f"{case.name}/prompt/{length}/{salt}", length)]
