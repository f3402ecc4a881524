"""Small random DeepSeek-V2 and V3 checkpoints for tests; every width differs from every other."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from made_models import PARTS, TOPS, finish

V3 = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu", "hidden_size": 160,
      "intermediate_size": 300, "moe_intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 10,
      "num_key_value_heads": 10, "q_lora_rank": 96, "kv_lora_rank": 72, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8,
      "v_head_dim": 40, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 4,
      "topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
      "vocab_size": 211, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
      "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1}
V2 = {**V3, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None,
      "topk_method": "group_limited_greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.5}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0}
KV_LAYOUTS = ("whole", "flat", "stacked")


def shapes(c: dict) -> dict[str, tuple[int, ...]]:
    """All tensors by Hugging Face names."""
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    key, value = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["v_head_dim"]
    found = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,),
             "lm_head.weight": (c["vocab_size"], hidden)}

    def gated(at: str, width: int) -> None:
        found.update({at + "gate_proj.weight": (width, hidden), at + "up_proj.weight": (width, hidden),
                      at + "down_proj.weight": (hidden, width)})

    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        attention = {"kv_a_proj_with_mqa": (rank + c["qk_rope_head_dim"], hidden), "kv_a_layernorm": (rank,),
                     "kv_b_proj": (heads * (c["qk_nope_head_dim"] + value), rank), "o_proj": (hidden, heads * value)}
        if c["q_lora_rank"] is None:
            attention["q_proj"] = (heads * key, hidden)
        else:
            attention |= {"q_a_proj": (c["q_lora_rank"], hidden), "q_a_layernorm": (c["q_lora_rank"],),
                          "q_b_proj": (heads * key, c["q_lora_rank"])}
        found |= {f"{at}self_attn.{name}.weight": shape for name, shape in attention.items()}
        found[at + "input_layernorm.weight"] = found[at + "post_attention_layernorm.weight"] = (hidden,)
        if i < c["first_k_dense_replace"]:
            gated(at + "mlp.", c["intermediate_size"])
            continue
        found[at + "mlp.gate.weight"] = (c["n_routed_experts"], hidden)
        if c["model_type"] == "deepseek_v3":
            found[at + "mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        for e in range(c["n_routed_experts"]):
            gated(f"{at}mlp.experts.{e}.", c["moe_intermediate_size"])
        if c["n_shared_experts"]:
            gated(at + "mlp.shared_experts.", c["n_shared_experts"] * c["moe_intermediate_size"])
    return found


def tensors(c: dict, seed: int = 0, ahead: int = 0) -> dict[str, np.ndarray]:
    """float32 tensors in ±1, with some of ``ahead`` layers that predict further tokens."""
    rng = np.random.default_rng(seed)
    found = {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes(c).items()}
    for i in range(c["num_hidden_layers"], c["num_hidden_layers"] + ahead):
        found[f"model.layers.{i}.eh_proj.weight"] = np.zeros((c["hidden_size"], 2 * c["hidden_size"]), np.float32)
        found[f"model.layers.{i}.enorm.weight"] = np.ones(c["hidden_size"], np.float32)
    return found


NAMES = {**PARTS, "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
         "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
         "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.kv_b_proj": "attn_kv_b", "mlp.gate": "ffn_gate_inp",
         **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}}


def gguf_tensors(c: dict, found: dict[str, np.ndarray], layout: str) -> dict[str, np.ndarray]:
    """The same as converters write them: experts stacked, ``kv_b_proj`` in one of KV_LAYOUTS."""
    out: dict[str, np.ndarray] = {}
    stacked: dict[str, list[np.ndarray]] = {}
    for name, x in found.items():
        if not name.startswith("model.layers."):
            out[TOPS[name.removesuffix(".weight")] + ".weight"] = x
            continue
        layer, rest = name.split(".", 3)[2:]
        at, part = f"blk.{layer}.", rest.removesuffix(".weight")
        if rest.endswith("e_score_correction_bias"):
            out[at + "exp_probs_b.bias"] = x
        elif ".experts." in name:
            stacked.setdefault(f"{at}ffn_{part.split('.')[3].removesuffix('_proj')}_exps.weight", []).append(x)
        elif part == "self_attn.kv_b_proj" and layout != "whole":
            by_head = x.reshape(c["num_attention_heads"], -1, c["kv_lora_rank"])
            keys = by_head[:, :c["qk_nope_head_dim"]].swapaxes(1, 2)
            values = by_head[:, c["qk_nope_head_dim"]:]
            for half, y in (("attn_k_b", keys), ("attn_v_b", values)):
                out[f"{at}{half}.weight"] = np.ascontiguousarray(
                    y if layout == "stacked" else y.reshape(-1, y.shape[2]))
        else:
            out[f"{at}{NAMES[part]}.weight"] = x
    return out | {name: np.stack(parts) for name, parts in stacked.items()}


def write_gguf(path: Path, c: dict, found: dict[str, np.ndarray], layout: str = "whole",
               kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> str:
    """A file of architecture deepseek2; matrices whose rows are whole blocks are of ``kind``."""
    writer = gguf.GGUFWriter(str(path), "deepseek2")
    key = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    row = c["kv_lora_rank"] + c["qk_rope_head_dim"]
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(1 if layout == "stacked" else c["num_attention_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_theta"])
    writer.add_rope_dimension_count(c["qk_rope_head_dim"])
    if c["q_lora_rank"] is not None:
        writer.add_q_lora_rank(c["q_lora_rank"])
    writer.add_kv_lora_rank(c["kv_lora_rank"])
    writer.add_key_length(row if layout == "stacked" else key)
    writer.add_value_length(c["kv_lora_rank"] if layout == "stacked" else c["v_head_dim"])
    if layout == "stacked":
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(c["v_head_dim"])
    writer.add_leading_dense_block_count(c["first_k_dense_replace"])
    writer.add_expert_count(c["n_routed_experts"])
    writer.add_expert_used_count(c["num_experts_per_tok"])
    writer.add_expert_shared_count(c["n_shared_experts"])
    writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    writer.add_expert_weights_scale(c["routed_scaling_factor"])
    writer.add_expert_weights_norm(c["norm_topk_prob"])
    if c["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if c.get("topk_method") != "greedy":
        writer.add_expert_group_count(c["n_group"])
        writer.add_expert_group_used_count(c["topk_group"])
    scaling = c.get("rope_scaling")
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
    for name, x in gguf_tensors(c, found, layout).items():
        used = kind if x.ndim > 1 and not x.shape[-1] % 32 and "ffn_gate_inp" not in name else \
            gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(x, used), raw_dtype=used)
    finish(writer)
    return str(path)
