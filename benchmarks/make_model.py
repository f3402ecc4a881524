"""Models of random weights for measurements: a Hugging Face folder in bf16 and GGUF files of the same weights.

    python benchmarks/make_model.py --out DIR [--shape 1.26B | hidden=2048,layers=24,...] [--types bf16,q8_0,q4_0]
    python benchmarks/make_model.py --out DIR --from MODEL [--types bf16,q8_0,q4_0]

Writes DIR/hf (config.json, model.safetensors) and DIR/TYPE.gguf: of random weights, or of those of a Llama model that
mpillm reads (a GGUF file or a folder), so that every program can be given the same. The vocabulary is made up: enough
for measuring, which feeds token ids. Weights stream, one tensor at a time.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

if TYPE_CHECKING:
    from mpillm.models.weights import Weights

SHAPES = {"1.26B": "hidden=2048,layers=24,heads=32,kv_heads=4,head_dim=64,ffn=5632,vocab=49152",
          "tiny": "hidden=128,layers=2,heads=4,kv_heads=2,head_dim=32,ffn=256,vocab=512"}
KINDS = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
         "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def config_of(shape: str) -> dict[str, Any]:
    """config.json of a shape like ``SHAPES``' values."""
    given = dict(part.split("=") for part in SHAPES.get(shape, shape).split(","))
    s = {name: int(given.pop(name)) for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab")}
    if given:
        raise SystemExit(f"--shape has unknown figures: {', '.join(given)}")
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": s["hidden"],
            "intermediate_size": s["ffn"], "num_hidden_layers": s["layers"], "num_attention_heads": s["heads"],
            "num_key_value_heads": s["kv_heads"], "head_dim": s["head_dim"], "vocab_size": s["vocab"],
            "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
            "attention_bias": False, "mlp_bias": False}


def shapes_of(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors of a Llama folder by name."""
    hidden, ffn, width = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * width, c["num_key_value_heads"] * width
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for i in range(c["num_hidden_layers"]):
        for name, shape in (("self_attn.q_proj", (q, hidden)), ("self_attn.k_proj", (kv, hidden)),
                            ("self_attn.v_proj", (kv, hidden)), ("self_attn.o_proj", (hidden, q)),
                            ("mlp.gate_proj", (ffn, hidden)), ("mlp.up_proj", (ffn, hidden)),
                            ("mlp.down_proj", (hidden, ffn)), ("input_layernorm", (hidden,)),
                            ("post_attention_layernorm", (hidden,))):
            found[f"model.layers.{i}.{name}.weight"] = shape
    found["model.norm.weight"] = (hidden,)
    if not c["tie_word_embeddings"]:
        found["lm_head.weight"] = (c["vocab_size"], hidden)
    return found


def random_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """bf16 bits (uint16), the same for a name each time: normal, of standard deviation 0.02; norms are 1."""
    if len(shape) == 1:
        return np.full(shape, 0x3F80, np.uint16)
    rng = np.random.default_rng(list(name.encode()))
    values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
    return to_bf16(values)


def to_bf16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write_folder(path: Path, config: dict[str, Any], source: Weights | None) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    header, at = {}, 0
    for name, shape in shapes_of(config).items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, bits in tensors(config, source):
            file.write(bits.tobytes())


def tensors(config: dict[str, Any], source: Weights | None) -> Iterator[tuple[str, np.ndarray]]:
    """(name, bf16 bits): random, or those of a model."""
    for name, shape in shapes_of(config).items():
        yield name, random_tensor(name, shape) if source is None else to_bf16(source.read(name))


def model_of(path: str) -> tuple[dict[str, Any], Weights]:
    """config.json for a model that mpillm reads, and its weights."""
    from mpillm.models.parse import open_model
    from mpillm.models.weights import Weights

    m, checkpoint = open_model(path, False)
    if m.architecture != "llama" or m.rope.kind != "none":
        raise SystemExit(f"--from {path}: only plain Llama models are written, not {m.architecture}")
    return {**config_of("tiny"), "hidden_size": m.hidden, "intermediate_size": m.intermediate,
            "num_hidden_layers": m.n_layers, "num_attention_heads": m.n_heads, "num_key_value_heads": m.n_kv_heads,
            "head_dim": m.head_dim, "vocab_size": m.vocab, "max_position_embeddings": m.max_positions,
            "rms_norm_eps": m.rms_eps, "rope_theta": m.rope_theta, "tie_word_embeddings": m.tied}, \
        Weights(checkpoint, m)


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.weight"
    return NAMES[stem] + ".weight"


def permuted(name: str, x: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """q and k as llama.cpp's converter lays them out: pairs of a rotation stand together."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return x
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    return x.reshape(heads, 2, x.shape[0] // heads // 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


def write_gguf(path: Path, config: dict[str, Any], kind: str, source: Weights | None) -> None:
    """One GGUF file; matrices of a width that the type's blocks do not divide stay in f16."""
    used = gguf.GGMLQuantizationType[KINDS[kind]]
    w = gguf.GGUFWriter(str(path) + ".new", "llama", use_temp_file=True)
    w.add_name(path.stem)
    w.add_file_type(gguf.LlamaFileType[{"f32": "ALL_F32"}.get(kind, f"MOSTLY_{KINDS[kind]}")])
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    w.add_key_length(config["head_dim"])
    w.add_value_length(config["head_dim"])
    w.add_rope_dimension_count(config["head_dim"])
    w.add_rope_freq_base(config["rope_theta"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_vocab_size(config["vocab_size"])
    _add_vocabulary(w, config["vocab_size"])
    for name, x in tensors(config, source):
        x = permuted(name, widened(x), config)
        kept = used if x.ndim == 2 and x.shape[1] % gguf.GGML_QUANT_SIZES[used][0] == 0 else None
        kept = kept or (gguf.GGMLQuantizationType.F16 if x.ndim == 2 else gguf.GGMLQuantizationType.F32)
        w.add_tensor(gguf_name(name), gguf.quants.quantize(x, kept), raw_dtype=kept)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    Path(str(path) + ".new").replace(path)


def _add_vocabulary(w: gguf.GGUFWriter, size: int) -> None:
    """A SentencePiece vocabulary of made pieces: llama.cpp does not load a model without one."""
    special = [("<unk>", gguf.TokenType.UNKNOWN), ("<s>", gguf.TokenType.CONTROL), ("</s>", gguf.TokenType.CONTROL)]
    pieces = special + [(f"<0x{i:02X}>", gguf.TokenType.BYTE) for i in range(256)]
    pieces += [(f"t{i}", gguf.TokenType.NORMAL) for i in range(len(pieces), size)]
    w.add_tokenizer_model("llama")
    w.add_token_list([piece.encode() for piece, _ in pieces[:size]])
    w.add_token_scores([0.0] * size)
    w.add_token_types([int(kind) for _, kind in pieces[:size]])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--shape", default="1.26B", help=f"one of {', '.join(SHAPES)} or its figures")
    parser.add_argument("--from", dest="source", metavar="MODEL", help="take the weights of this Llama model")
    parser.add_argument("--types", default="bf16,q8_0,q4_0", help=f"of {','.join(KINDS)}; empty: no GGUF files")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    config, source = (config_of(given.shape), None) if given.source is None else model_of(given.source)
    if not (given.out / "hf" / "model.safetensors").exists():
        write_folder(given.out / "hf", config, source)
    for kind in filter(None, given.types.split(",")):
        if not (given.out / f"{kind}.gguf").exists():
            write_gguf(given.out / f"{kind}.gguf", config, kind, source)
        print(given.out / f"{kind}.gguf")


if __name__ == "__main__":
    main()
