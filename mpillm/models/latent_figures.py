"""Figures of multi-head latent attention, from config.json or the metadata of a GGUF file of DeepSeek, checked."""

from __future__ import annotations

from typing import Any

from mpillm.models.fields import Fields

ARCHITECTURES = ("deepseek_v2", "deepseek_v3")
GGUF_ARCHITECTURE = "deepseek2"


def latent_figures(fields: Fields, kind: str) -> dict[str, Any]:
    """ModelConfig's fields about the latent; none for other architectures. Raises ModelError.

    Files have rotary pairs as neighbours; V3's may say otherwise, a null counting as no, as in transformers.
    """
    if kind not in ARCHITECTURES:
        return {}
    q_rank = fields.positive("q_lora_rank", 1536) if fields.absent("q_lora_rank") or fields.get("q_lora_rank") else 0
    interleaved = kind == "deepseek_v2" or fields.flag("rope_interleave", fields.absent("rope_interleave"))
    return _checked(fields, "qk_rope_head_dim", q_rank, fields.positive("kv_lora_rank", 512),
                    fields.positive("qk_nope_head_dim", 128), fields.positive("qk_rope_head_dim", 64),
                    fields.positive("v_head_dim", 128)) | {"interleaved": interleaved}


def gguf_latent_figures(fields: Fields, arch: str) -> dict[str, Any]:
    """The same from GGUF metadata. Files made for latent attention state the latent row's width as that of a head,
    and the heads' own widths beside it."""
    if arch != GGUF_ARCHITECTURE:
        return {}
    rope = fields.positive("rope.dimension_count")
    key = fields.positive("attention.key_length_mla", fields.positive("attention.key_length"))
    if key <= rope:
        raise fields.error(f"keys of {key} values, of which {rope} are rotated, leave none: damaged")
    return _checked(fields, "rope.dimension_count", fields.natural("attention.q_lora_rank", 0),
                    fields.positive("attention.kv_lora_rank"), key - rope, rope,
                    fields.positive("attention.value_length_mla", fields.positive("attention.value_length"))) | {
                        "interleaved": True}


def _checked(fields: Fields, rope_key: str, q_rank: int, kv_rank: int, nope: int, rope: int,
             value: int) -> dict[str, Any]:
    if rope % 2:
        raise fields.error(f"{rope_key} is {rope}: rotary positions need an even width")
    return {"q_rank": q_rank, "kv_rank": kv_rank, "nope_dim": nope, "rope_dim": rope, "value_dim": value}
