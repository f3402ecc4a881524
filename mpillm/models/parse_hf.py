"""config.json of a Hugging Face folder to ``ModelConfig``, as transformers 4 and 5 write it.

Version 4 has ``rope_theta``, ``rope_scaling`` (with ``type`` or ``rope_type``) and ``torch_dtype``, version
5 ``rope_parameters`` and ``dtype``. Defaults of absent keys are those of transformers' own classes
(configuration_llama.py and its like, 5.24). The dtype is not asked for: each tensor states its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpillm.formats import float8
from mpillm.models.config import ModelConfig, RopeScaling
from mpillm.models.expert_figures import expert_figures
from mpillm.models.fields import MAX_LAYERS, Fields, checked_rope, head_figures, known_ids, shown
from mpillm.models.latent_figures import latent_figures

ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral",
                 "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "MixtralForCausalLM": "mixtral",
                 "Qwen3MoeForCausalLM": "qwen3_moe", "DeepseekV2ForCausalLM": "deepseek_v2",
                 "DeepseekV3ForCausalLM": "deepseek_v3"}
SUPPORTED = ", ".join(ARCHITECTURES)
DEFAULT_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768, "mixtral": 131072,
                     "qwen3_moe": 32768, "deepseek_v2": 2048, "deepseek_v3": 4096}
DEFAULT_IDS = {**dict.fromkeys(("llama", "mistral", "mixtral", "deepseek_v2"), (1, 2)), "deepseek_v3": (0, 1)}
MAY_BE_BIASED = ("llama", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")      # by attention_bias
DEFAULT_WINDOW = 4096
ROPE_KINDS = {"default": "none", "linear": "linear", "dynamic": "dynamic", "yarn": "yarn", "llama3": "llama3"}


def hf_config(where: str, config: Mapping[str, Any], generation: Mapping[str, Any],
              name: str = "", warnings: list[str] | None = None) -> ModelConfig:
    """The figures in ``config`` (config.json) and ``generation`` (generation_config.json, or empty).

    ``where`` begins the messages, ``warnings`` collects remarks. ``tied`` is what the config says,
    before the tensors are seen. Raise ModelError for an unsupported architecture or a wrong value.
    """
    fields = Fields(where, config)
    warnings = [] if warnings is None else warnings
    kind = _architecture(fields)
    _refuse_unsupported(fields, kind)
    hidden, n_heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    n_layers, vocab = fields.positive("num_hidden_layers"), fields.positive("vocab_size")
    if n_layers > MAX_LAYERS:
        raise fields.error(f"num_hidden_layers is {n_layers}, more than {MAX_LAYERS}: damaged")
    n_kv_heads = fields.positive("num_key_value_heads", n_heads)
    latent = latent_figures(fields, kind)
    if latent:
        n_kv_heads, head_dim = 1, latent["nope_dim"] + latent["rope_dim"]
    else:
        stated = fields.get("head_dim")
        stated = fields.positive("head_dim") if stated is not None else 128 if kind == "qwen3" else None
        head_dim = head_figures(fields, hidden, n_heads, n_kv_heads, stated)
    max_positions = fields.positive("max_position_embeddings", DEFAULT_POSITIONS[kind])
    theta, rope = _rope(fields, max_positions, 1e6 if kind == "mixtral" else 1e4)
    biased = kind in MAY_BE_BIASED and fields.flag("attention_bias", False)
    experts = expert_figures(fields, kind, n_layers, warnings)
    bos, eos = _special_ids(fields, Fields(where, generation), kind, vocab, warnings)
    return ModelConfig(
        architecture=kind, hidden=hidden, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads,
        head_dim=head_dim, intermediate=fields.positive("intermediate_size"), vocab=vocab,
        max_positions=max_positions, rms_eps=fields.number("rms_norm_eps", 1e-5 if kind == "mixtral" else 1e-6),
        rope_theta=theta,
        rope=checked_rope(fields, theta, rope, latent.get("rope_dim", head_dim)),
        tied=fields.flag("tie_word_embeddings", False), qkv_bias=biased or kind == "qwen2",
        output_bias=biased, mlp_bias=kind == "llama" and fields.flag("mlp_bias", False),
        qk_norm=kind in ("qwen3", "qwen3_moe"), windows=_windows(fields, kind, n_layers), bos_id=bos, eos_ids=eos,
        name=name, **latent, **experts)


def _architecture(fields: Fields) -> str:
    named, model_type = fields.get("architectures"), fields.text("model_type")
    if named is None or named == []:
        if model_type is None or model_type not in ARCHITECTURES.values():
            raise fields.error(f"model_type {shown(model_type)} is not supported; these are: {SUPPORTED}")
        return model_type
    found = named[0] if isinstance(named, list) else None
    if not isinstance(found, str) or found not in ARCHITECTURES:
        name = shown(named if found is None else found).strip("'")
        raise fields.error(f"architecture {name} is not supported; these are: {SUPPORTED}")
    kind = ARCHITECTURES[found]
    if model_type is not None and model_type != kind:
        raise fields.error(f"architecture {found} with model_type {shown(model_type)} is not supported; "
                           f"these are: {SUPPORTED}")
    return kind


def _refuse_unsupported(fields: Fields, kind: str) -> None:
    act = fields.text("hidden_act")
    if act not in (None, "silu", "swish"):
        raise fields.error(f"hidden_act {shown(act)} is not supported: it must be 'silu'")
    float8.scheme(fields.where, fields.values)
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error(f"partial_rotary_factor {fields.get('partial_rotary_factor')} is not supported")
    if kind == "deepseek_v2" and fields.flag("mlp_bias", False):
        raise fields.error("mlp_bias true is not supported for deepseek_v2")


def _rope(fields: Fields, max_positions: int, base: float) -> tuple[float, RopeScaling]:
    """Base and scaling of the rotary frequencies; ``rope_scaling`` wins over ``rope_parameters``."""
    values = fields.mapping("rope_scaling") or _unnested(fields, fields.mapping("rope_parameters"))
    rope = Fields(f"{fields.where}: rope", values)
    theta = rope.number("rope_theta", fields.number("rope_theta", base))
    named = rope.text("rope_type") or rope.text("type") or "default"
    if named not in ROPE_KINDS:
        known = ", ".join(ROPE_KINDS)
        raise fields.error(f"rope scaling {shown(named)} is not supported; these are: {known}")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error(f"partial_rotary_factor {rope.get('partial_rotary_factor')} is not supported")
    kind, sharper = ROPE_KINDS[named], rope.optional("mscale_all_dim") or None
    if kind == "none":
        return theta, RopeScaling()
    if kind in ("linear", "dynamic"):
        return theta, RopeScaling(kind, rope.number("factor"), max_positions, mscale_all_dim=sharper)
    # A figure beside the rope's own wins, as in transformers' standardize_rope_params.
    original = fields.positive("original_max_position_embeddings",
                               rope.positive("original_max_position_embeddings", max_positions))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.error(f"low_freq_factor {low} must be below high_freq_factor {high}")
        return theta, RopeScaling(kind, rope.number("factor"), original, low, high, mscale_all_dim=sharper)
    # 0 counts as absent for the betas and mscales, as in transformers.
    return theta, RopeScaling(
        kind, rope.number("factor", max_positions / original), original,
        beta_fast=rope.optional("beta_fast") or 32.0, beta_slow=rope.optional("beta_slow") or 1.0,
        attention_factor=rope.optional("attention_factor"), mscale=rope.optional("mscale") or None,
        mscale_all_dim=sharper, truncate=rope.flag("truncate", True))


def _unnested(fields: Fields, values: dict[str, Any]) -> dict[str, Any]:
    """``rope_parameters`` may hold one object per layer type; those must agree here."""
    inner = {key: value for key, value in values.items()
             if key.endswith("_attention") and (value is None or isinstance(value, dict))}
    if not inner:
        return values
    found = [value for value in inner.values() if value is not None]
    if any(value != found[0] for value in found[1:]):
        raise fields.error(f"rope_parameters differ between {' and '.join(inner)}: not supported")
    return found[0] if found else {}


def _windows(fields: Fields, kind: str, n_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer; here a null means none, and an absent key the class's default."""
    if kind in ("llama", "deepseek_v2", "deepseek_v3"):
        return (None,) * n_layers
    window = None
    if kind in ("mistral", "mixtral") or fields.flag("use_sliding_window", False):
        default = None if kind == "mixtral" else DEFAULT_WINDOW
        window = default if fields.absent("sliding_window") else fields.get("sliding_window")
        window = None if window is None else fields.positive("sliding_window", DEFAULT_WINDOW)
    if kind in ("mistral", "mixtral", "qwen3_moe"):
        return (window,) * n_layers
    types = fields.get("layer_types")
    if types is None:
        first = fields.natural("max_window_layers", 28)
        return tuple(window if i >= first else None for i in range(n_layers))
    if not isinstance(types, list) or len(types) != n_layers:
        raise fields.error(f"layer_types {shown(types)} does not list {n_layers} layers")
    for layer, found in enumerate(types):
        if found not in ("full_attention", "attention", "sliding_attention"):
            raise fields.error(f"layer_types has {shown(found)} for layer {layer}: not supported")
        if found == "sliding_attention" and window is None:
            raise fields.error(f"layer {layer} is of type sliding_attention, but there is no sliding window")
    return tuple(window if found == "sliding_attention" else None for found in types)


def _special_ids(fields: Fields, generation: Fields, kind: str, vocab: int,
                 warnings: list[str]) -> tuple[int | None, tuple[int, ...]]:
    """Begin and end tokens, the union over both files; absent everywhere = the class's default."""
    defaults = {key: [token] for key, token in zip(("bos_token_id", "eos_token_id"), DEFAULT_IDS.get(kind, ()),
                                                   strict=False)}
    found = {}
    for key in ("bos_token_id", "eos_token_id"):
        ids = fields.token_ids(key) + generation.token_ids(key)
        if fields.absent(key) and not ids:
            ids = defaults.get(key, [])
        found[key] = known_ids(fields, ids, vocab, warnings)
    first = [token for token in fields.token_ids("bos_token_id") + generation.token_ids("bos_token_id")
             if token in found["bos_token_id"]] or list(found["bos_token_id"])
    return (first[0] if first else None), found["eos_token_id"]
