"""GGUF metadata to ``ModelConfig``, by the keys of ggml's docs/gguf.md and llama.cpp's loader."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpillm.formats.checkpoint import Checkpoint
from mpillm.models.config import ModelConfig, RopeScaling
from mpillm.models.expert_figures import gguf_expert_figures
from mpillm.models.fields import MAX_LAYERS, Fields, checked_rope, head_figures, known_ids, shown
from mpillm.models.latent_figures import GGUF_ARCHITECTURE as DEEPSEEK
from mpillm.models.latent_figures import gguf_latent_figures

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", DEEPSEEK)
SUPPORTED = ", ".join(ARCHITECTURES)
ROPE_FACTORS = "rope_freqs.weight"
# Keys that may hold one figure for each layer, and keys with the values that leave the arithmetic as it is.
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "attention.scale": (0.0,), "attention.clamp_kqv": (0.0,),
    "logit_scale": (0.0, 1.0), "residual_scale": (0.0, 1.0), "embedding_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,), "final_logit_softcapping": (0.0,), "use_parallel_residual": (False,),
}
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def gguf_config(checkpoint: Checkpoint, name: str = "") -> ModelConfig:
    """The figures of a GGUF model, from its metadata and, where it is silent, its tensors.

    Raise ModelError for an unsupported architecture or a wrong value; remarks go to the checkpoint's
    warnings.
    """
    meta = Fields(checkpoint.path, checkpoint.metadata)
    arch = _architecture(meta)
    values = {key[len(arch) + 1:]: value for key, value in meta.values.items() if key.startswith(arch + ".")}
    fields = Fields(f"{meta.where}: {arch}", values)
    _refuse_unsupported(fields)
    values.update({key: _uniform(fields, key) for key in _PER_LAYER})
    n_layers = _layers(fields)
    experts = gguf_expert_figures(fields, arch, n_layers)
    if bool(experts) != (arch == "qwen3moe") and arch not in ("llama", DEEPSEEK):
        raise meta.error(f"architecture {arch} with {fields.natural('expert_count', 0)} experts is not supported; "
                         f"these are: {SUPPORTED}")
    hidden, n_heads = fields.positive("embedding_length"), fields.positive("attention.head_count")
    n_kv_heads = fields.positive("attention.head_count_kv", n_heads)
    latent = gguf_latent_figures(fields, arch)
    if latent:
        n_kv_heads, head_dim = 1, latent["nope_dim"] + latent["rope_dim"]
    else:
        head_dim = _head_dim(fields, hidden, n_heads, n_kv_heads)
    vocab = _vocab(checkpoint, meta)
    ends = [token for key in _END_KEYS for token in meta.token_ids(key)]
    starts = known_ids(meta, meta.token_ids("tokenizer.ggml.bos_token_id"), vocab, checkpoint.warnings)
    theta, rope = _rope(checkpoint, fields, latent.get("rope_dim", head_dim), bool(latent))
    return ModelConfig(
        architecture=_named(arch, experts), hidden=hidden, n_layers=n_layers, n_heads=n_heads,
        n_kv_heads=n_kv_heads, head_dim=head_dim, vocab=vocab,
        intermediate=fields.positive("feed_forward_length", experts.get("expert_intermediate")),
        max_positions=fields.positive("context_length"),
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"), rope_theta=theta, rope=rope,
        tied="output.weight" not in checkpoint.tensors,
        qkv_bias=_any_bias(checkpoint, ("attn_q_a", "attn_kv_a_mqa") if latent else ("attn_q", "attn_k", "attn_v")),
        output_bias=_any_bias(checkpoint, ("attn_output",)),
        mlp_bias=_any_bias(checkpoint, ("ffn_gate", "ffn_up", "ffn_down")), qk_norm=arch in ("qwen3", "qwen3moe"),
        windows=_windows(fields, n_layers), bos_id=starts[0] if starts else None,
        eos_ids=known_ids(meta, ends, vocab, checkpoint.warnings), name=name, **latent, **experts)


def _architecture(meta: Fields) -> str:
    arch, kind = meta.text("general.architecture"), meta.text("general.type")
    if arch is None:
        raise meta.error("general.architecture is missing: damaged, or not the first part of a model")
    if kind not in (None, "model"):
        raise meta.error(f"holds a {shown(kind)}, not a model")
    if arch not in ARCHITECTURES:
        name = shown(arch).strip("'")
        raise meta.error(f"architecture {name} is not supported; these are: {SUPPORTED}")
    return arch


def _layers(fields: Fields) -> int:
    """Layers but for those that predict further tokens, which some files count."""
    count, ahead = fields.positive("block_count"), fields.natural("nextn_predict_layers", 0)
    if count > MAX_LAYERS:
        raise fields.error(f"block_count is {count}, more than {MAX_LAYERS}: damaged")
    if ahead >= count:
        raise fields.error(f"nextn_predict_layers is {ahead} of {count} layers: damaged")
    return count - ahead


def _named(arch: str, experts: dict[str, Any]) -> str:
    """Our name of an architecture: files of Mixtral say llama, those of DeepSeek-V2 and V3 deepseek2."""
    if arch == DEEPSEEK:
        return "deepseek_v3" if experts and experts["routing"].scoring == "sigmoid" else "deepseek_v2"
    return {"llama": "mixtral" if experts else "llama", "qwen3moe": "qwen3_moe"}.get(arch, arch)


def _refuse_unsupported(fields: Fields) -> None:
    for key, neutral in _NEUTRAL.items():
        value = fields.get(key)
        if value is not None and value not in neutral:
            raise fields.error(f"{key} {shown(value)} is not supported")


def _uniform(fields: Fields, key: str) -> Any:
    """A list with one figure per layer counts as that figure where all agree."""
    value = fields.get(key)
    if not isinstance(value, list) or not value:
        return value
    if any(item != value[0] for item in value[1:]):
        raise fields.error(f"{key} differs between layers, which is not supported: {shown(value)}")
    return value[0]


def _head_dim(fields: Fields, hidden: int, n_heads: int, n_kv_heads: int) -> int:
    stated = fields.get("attention.key_length")
    stated = None if stated is None else fields.positive("attention.key_length")
    head_dim = head_figures(fields, hidden, n_heads, n_kv_heads, stated)
    for key, what in (("attention.value_length", "the width of values"),
                      ("rope.dimension_count", "the rotated width")):
        found = fields.positive(key, head_dim)
        if found != head_dim:
            raise fields.error(f"{key} is {found}: {what} must be that of keys, {head_dim}")
    return head_dim


def _vocab(checkpoint: Checkpoint, meta: Fields) -> int:
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None:
        raise meta.error("tensor token_embd.weight is missing")
    return embedding.shape[0]


def _any_bias(checkpoint: Checkpoint, names: tuple[str, ...]) -> bool:
    return any(tensor.startswith("blk.") and tensor.endswith(tuple(f".{name}.bias" for name in names))
               for tensor in checkpoint.tensors)


def _windows(fields: Fields, n_layers: int) -> tuple[int | None, ...]:
    """``attention.sliding_window`` of all layers, or of those that the pattern's flags name."""
    window = fields.natural("attention.sliding_window", 0) or None
    pattern = fields.get("attention.sliding_window_pattern")
    if window is None or pattern is None:
        return (window,) * n_layers
    if not isinstance(pattern, list) or [type(flag) for flag in pattern] != [bool] * n_layers:
        raise fields.error(f"attention.sliding_window_pattern {shown(pattern)} has not {n_layers} flags")
    return tuple(window if slides else None for slides in pattern)


def _rope(checkpoint: Checkpoint, fields: Fields, head_dim: int, latent: bool) -> tuple[float, RopeScaling]:
    theta = fields.number("rope.freq_base", 10000.0)
    factors = _factors(checkpoint, fields, head_dim)
    # As llama.cpp: a factor without a type is linear, 0 is none; scale_linear is the old name.
    old = fields.number("rope.scale_linear", 0.0, "zero")
    factor = fields.number("rope.scaling.factor", old, "zero") or 1.0
    kind = fields.text("rope.scaling.type") or "linear"
    if kind == "none" or kind == "linear" and factor == 1.0:
        return theta, RopeScaling(factors=factors)
    if kind == "linear":
        return theta, RopeScaling("linear", factor, fields.positive("context_length"), factors=factors)
    if kind != "yarn":
        raise fields.error(f"rope scaling {shown(kind)} is not supported; these are: none, linear, yarn")
    return theta, checked_rope(fields, theta, _yarn(fields, factor, factors, latent), head_dim)


def _yarn(fields: Fields, factor: float, factors: tuple[float, ...] | None, latent: bool) -> RopeScaling:
    """With a latent, as llama.cpp: cosines and sines are not scaled, and yarn_log_multiplier is 0.1 mscale_all_dim."""
    sharper = fields.number("rope.scaling.yarn_log_multiplier", 0.0, "any")
    refused = [("yarn_ext_factor", fields.number("rope.scaling.yarn_ext_factor", 1.0, "any"), (1.0, -1.0)),
               ("yarn_log_multiplier", sharper, (0.0,))]
    # llama.cpp multiplies its own 0.1 ln(factor) + 1 with the stated factors.
    stated = math.prod(fields.number(f"rope.scaling.{key}", 1.0)
                       for key in ("attn_factor", "yarn_attn_factor"))
    derived = 1.0 if factor <= 1.0 else 0.1 * math.log(factor) + 1.0
    attention_factor = None if stated == 1.0 else stated * derived
    if latent:
        refused[1:], attention_factor = [("yarn_attn_factor", stated, (1.0,))], 1.0
    for key, value, neutral in refused:
        if value not in neutral:
            raise fields.error(f"rope.scaling.{key} {value} is not supported")
    return RopeScaling(
        "yarn", factor,
        fields.positive("rope.scaling.original_context_length", fields.positive("context_length")),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0), attention_factor=attention_factor,
        mscale_all_dim=round(10 * sharper, 6) or None, factors=factors)


def _factors(checkpoint: Checkpoint, fields: Fields, head_dim: int) -> tuple[float, ...] | None:
    """Divisors of the frequencies (long-context Llama 3), kept in a tensor of their own."""
    if ROPE_FACTORS not in checkpoint.tensors:
        return None
    shape = checkpoint.tensors[ROPE_FACTORS].shape
    if shape != (head_dim // 2,):
        raise fields.error(f"tensor {ROPE_FACTORS} has shape {shape}, it must be ({head_dim // 2},)")
    values = checkpoint.read(ROPE_FACTORS)
    if not (np.isfinite(values) & (values > 0)).all():
        raise fields.error(f"tensor {ROPE_FACTORS} has values that are not positive numbers: damaged")
    return tuple(values.tolist())
