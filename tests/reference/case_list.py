"""The recorded cases: every figure of the Llama family that a split over ranks or a reader could get wrong."""

from __future__ import annotations

from typing import Any

from cases import VOCAB, Case


def old(kind: str, heads: tuple[int, int | None], hidden: int, intermediate: int = 160, **more: Any) -> dict[str, Any]:
    """A config.json as transformers 4 writes it (rope_theta, rope_scaling, torch_dtype)."""
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral",
             "qwen3_moe": "Qwen3Moe", "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}
    config = {
        "architectures": [names[kind] + "ForCausalLM"], "model_type": kind, "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": 2,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "vocab_size": VOCAB,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
        "tie_word_embeddings": False, "torch_dtype": "float32", "use_cache": True, "bos_token_id": 1,
        "eos_token_id": 2, "initializer_range": 0.02, "attention_dropout": 0.0, "transformers_version": "4.46.0",
    }
    return config | more


def new(kind: str, heads: tuple[int, int | None], hidden: int, intermediate: int = 160, *,
        rope: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A config.json as transformers 5 writes it (rope_parameters, dtype)."""
    config = old(kind, heads, hidden, intermediate) | {"dtype": "float32", "transformers_version": "5.24.0"}
    for key in ("rope_theta", "rope_scaling", "torch_dtype"):
        del config[key]
    return config | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"} | (rope or {})} | more


# Latent attention: every width another one, ten heads whose rows are no whole blocks.
LATENT = {"kv_lora_rank": 72, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 40, "q_lora_rank": 96,
          "attention_bias": False, "n_routed_experts": 8, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
          "n_shared_experts": 2, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
          "norm_topk_prob": True}
LATENT_V2 = LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "norm_topk_prob": False,
                      "routed_scaling_factor": 1.5}
LATENT_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
               "mscale": 1.0, "mscale_all_dim": 0.7}

CASES = [
    # The tiny Llama of the tests: six query heads, two KV heads.
    Case("tiny", new("llama", (6, 2), 96, head_dim=16), lengths=(1, 6, 17, 60, 140)),
    # Ratios of query to KV heads: 1 (norms in another dtype), 4, 7, 3 with nine heads, 6 with a single KV head.
    Case("ratio1", old("llama", (6, 6), 96, tie_word_embeddings=True, torch_dtype="bfloat16"),
         dtype="BF16", norm_dtype="F32", o_dtype="F16"),
    Case("ratio4", old("llama", (8, 2), 64, 176, head_dim=None, rope_theta=500000.0), dtype="BF16",
         extra={"eos_token_id": [2, 3], "bos_token_id": 1}),
    Case("ratio7", new("qwen2", (14, 2), 112, tie_word_embeddings=True, rope={"rope_theta": 1e6}), bias=1.0),
    Case("nine", old("llama", (9, 3), 72, 144, tie_word_embeddings=True), dtype="F16"),
    Case("single", old("llama", (6, 1), 96, 100)),
    Case("equal13", old("llama", (13, None), 104, 96), dtype="BF16"),
    Case("wide28", old("qwen2", (28, 4), 112, 96), bias=0.5, dtype="BF16"),
    # Heads wider than hidden / heads; with hidden not divisible by the heads (Qwen3, in three shards).
    Case("wide_head", old("llama", (6, 2), 96, head_dim=24), dtype="F16"),
    Case("norms", new("qwen3", (6, 2), 64, head_dim=24, tie_word_embeddings=False), dtype="BF16", shards=3),
    Case("norms_bias", old("qwen3", (8, 2), 64, head_dim=16, attention_bias=True, tie_word_embeddings=True), bias=1.0),
    # Biases everywhere, far from zero: counted once, whatever the ranks.
    Case("biases", old("llama", (6, 2), 96, attention_bias=True, mlp_bias=True), bias=3.0),
    Case("biases13", new("llama", (13, 13), 104, 48, attention_bias=True, mlp_bias=True), bias=3.0, dtype="BF16"),
    # Rotary scalings, each in one of the two spellings.
    Case("linear", old("llama", (6, 2), 96, rope_scaling={"type": "linear", "factor": 4.0})),
    Case("dynamic", old("llama", (6, 2), 96, max_position_embeddings=24,
                        rope_scaling={"rope_type": "dynamic", "factor": 4.0}), lengths=(1, 6, 17, 60)),
    Case("dynamic5", new("llama", (8, 4), 64, max_position_embeddings=40, rope={"rope_type": "dynamic", "factor": 2.0}),
         lengths=(36, 41, 55)),
    Case("yarn", old("qwen2", (6, 2), 96, max_position_embeddings=512,
                     rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}), bias=1.0),
    Case("yarn5", new("llama", (6, 2), 96, head_dim=32, rope={
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
        "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False})),
    Case("llama3", old("llama", (8, 2), 96, 96, head_dim=32, rope_theta=500000.0, rope_scaling={
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        "rope_type": "llama3"}), dtype="BF16"),
    # Sliding windows: on all layers; on the second layer only.
    Case("window", old("mistral", (6, 2), 96, sliding_window=8, head_dim=16), dtype="BF16"),
    Case("window_late", old("qwen2", (6, 2), 96, sliding_window=8, use_sliding_window=True, max_window_layers=1),
         bias=1.0),
    # Experts: five of them, columns that are no whole blocks; dense layers between, weights that do not add up to 1.
    Case("experts", old("mixtral", (6, 2), 96, 72, num_local_experts=5, num_experts_per_tok=2, sliding_window=None),
         dtype="BF16"),
    Case("experts_normed", new("qwen3_moe", (8, 2), 64, head_dim=16, num_experts=16, num_experts_per_tok=4,
                               moe_intermediate_size=48, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1,
                               use_sliding_window=False)),
    Case("experts_dense", old("qwen3_moe", (6, 2), 96, 100, head_dim=16, num_hidden_layers=4, num_experts=6,
                              num_experts_per_tok=3, moe_intermediate_size=64, norm_topk_prob=False,
                              mlp_only_layers=[3], decoder_sparse_step=2, sliding_window=8, use_sliding_window=True)),
    Case("window_off", new("mistral", (8, 4), 64, sliding_window=None, tie_word_embeddings=True), dtype="F16"),
]
# Of latent attention; what runs on them: test_latent.py
LATENT_CASES = [
    Case("latent_v3", old("deepseek_v3", (10, 10), 160, 300, **LATENT), lengths=(17, 60)),
    Case("latent_v2", old("deepseek_v2", (10, 10), 160, 300, **LATENT_V2), lengths=(1, 60)),
    Case("latent_yarn", old("deepseek_v3", (10, 10), 160, 300, **LATENT | {"attention_bias": True},
                            rope_scaling=LATENT_YARN), bias=1.0, lengths=(1, 80)),
    Case("latent_v2_yarn", old("deepseek_v2", (10, 10), 160, 300, **LATENT_V2 | {"q_lora_rank": 96},
                               rope_scaling=LATENT_YARN), dtype="BF16", lengths=(17, 60)),
]
BY_NAME = {case.name: case for case in CASES}
