"""A mixture of experts' figures, from config.json or GGUF metadata, checked."""

from __future__ import annotations

from typing import Any

from mpillm.models.fields import Fields, shown

MAX_EXPERTS = 4096


def expert_figures(fields: Fields, kind: str, n_layers: int) -> dict[str, Any]:
    """ModelConfig's fields about experts, from config.json; none for dense architectures. Raises ModelError.

    The number of experts goes by two names, since transformers 5 has one for both architectures.
    """
    if kind == "mixtral":
        count, chosen, normed = 8, 2, True
        width = fields.positive("intermediate_size")
    elif kind == "qwen3_moe":
        count, chosen, normed = 128, 8, fields.flag("norm_topk_prob", False)
        width = fields.positive("moe_intermediate_size", 768)
    else:
        return {}
    key = "num_local_experts" if fields.get("num_experts") is None else "num_experts"
    count, chosen = fields.positive(key, count), fields.positive("num_experts_per_tok", chosen)
    dense = _dense_layers(fields, n_layers) if kind == "qwen3_moe" else ()
    return checked(fields, count, chosen, key, "num_experts_per_tok") | {
        "expert_intermediate": width, "experts_normed": normed, "dense": dense}


def gguf_expert_figures(fields: Fields, arch: str) -> dict[str, Any]:
    """The same from GGUF metadata of architecture ``arch``; as llama.cpp has them, with weights that add up to 1."""
    if not fields.natural("expert_count", 0):
        return {}
    for key in ("expert_shared_count", "leading_dense_block_count"):
        if fields.natural(key, 0):
            raise fields.error(f"{key} is {fields.get(key)}, which is not supported")
    width = fields.positive("feed_forward_length") if arch == "llama" else None
    figures = checked(fields, fields.positive("expert_count"), fields.positive("expert_used_count"), "expert_count",
                      "expert_used_count")
    return figures | {"expert_intermediate": fields.positive("expert_feed_forward_length", width)}


def checked(fields: Fields, count: int, chosen: int, count_key: str, chosen_key: str) -> dict[str, Any]:
    """Both counts, or ModelError."""
    if count > MAX_EXPERTS:
        raise fields.error(f"{count_key} is {count}, more than {MAX_EXPERTS}: damaged")
    if chosen > count:
        raise fields.error(f"{chosen_key} is {chosen}, but there are {count} experts ({count_key}): it can be {count} "
                           "at most")
    return {"experts": count, "experts_chosen": chosen}


def _dense_layers(fields: Fields, n_layers: int) -> tuple[int, ...]:
    """Layers without experts: those of mlp_only_layers, and all but every decoder_sparse_step-th."""
    listed, step = fields.get("mlp_only_layers") or [], fields.positive("decoder_sparse_step", 1)
    if not isinstance(listed, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
        raise fields.error(f"mlp_only_layers is {shown(listed)}, it must be a list of layers")
    return tuple(i for i in range(n_layers) if i in listed or (i + 1) % step)
