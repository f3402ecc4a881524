"""A mixture of experts' figures, from config.json or GGUF metadata, checked."""

from __future__ import annotations

from typing import Any

from mpillm.models.config import Routing
from mpillm.models.fields import Fields, shown

MAX_EXPERTS = 4096
DEEPSEEK = ("deepseek_v2", "deepseek_v3")


def expert_figures(fields: Fields, kind: str, n_layers: int, warnings: list[str]) -> dict[str, Any]:
    """ModelConfig's fields about experts, from config.json; none for dense architectures. Raises ModelError.

    The number of experts goes by two names, since transformers 5 has one for both architectures.
    """
    if kind in DEEPSEEK:
        return _deepseek_figures(fields, kind, n_layers, warnings)
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
        "expert_intermediate": width, "routing": Routing(normed=normed), "dense": dense}


def _deepseek_figures(fields: Fields, kind: str, n_layers: int, warnings: list[str]) -> dict[str, Any]:
    """V2 and V3; defaults as in transformers' classes. No experts where ``n_routed_experts`` is null or 0."""
    second = kind == "deepseek_v2"
    if fields.natural("moe_layer_freq", 1) != 1:
        raise fields.error(f"moe_layer_freq {fields.get('moe_layer_freq')} is not supported: it must be 1")
    key = "n_routed_experts"
    count = fields.natural(key, (64 if second else 256) if fields.absent(key) else 0)
    if not count:
        return {}
    chosen = fields.positive("num_experts_per_tok", None if second else 8)
    figures = checked(fields, count, chosen, key, "num_experts_per_tok")
    first = min(n_layers, fields.natural("first_k_dense_replace", 0 if second else 3))
    routing = _second_routing(fields, warnings) if second else _third_routing(fields)
    _check_groups(fields, routing, count, chosen, ("n_group", "topk_group", "num_experts_per_tok"))
    shared = (2 if second else 1) if fields.absent("n_shared_experts") else 0
    return figures | {
        "expert_intermediate": fields.positive("moe_intermediate_size", 1407 if second else 2048),
        "dense": tuple(range(first)), "shared_experts": fields.natural("n_shared_experts", shared), "routing": routing}


def _second_routing(fields: Fields, warnings: list[str]) -> Routing:
    """DeepSeek-V2's: softmax over all, the scores as they are; transformers knows no norm_topk_prob here either."""
    _only(fields, "scoring_func", "softmax")
    if fields.flag("norm_topk_prob", False):
        warnings.append(f"{fields.where}: norm_topk_prob is true, which deepseek_v2 does not use: left out, as "
                        "transformers does")
    method = fields.text("topk_method") or "greedy"
    scale = fields.number("routed_scaling_factor", 1.0, "zero")
    if method == "greedy":
        return Routing(normed=False, scale=scale)
    if method != "group_limited_greedy":
        raise fields.error(f"topk_method {shown(method)} is not supported for deepseek_v2; these are: greedy, "
                           "group_limited_greedy")
    return Routing(groups=fields.positive("n_group"), groups_chosen=fields.positive("topk_group"), normed=False,
                   scale=scale)


def _third_routing(fields: Fields) -> Routing:
    """DeepSeek-V3's: sigmoids, corrected for the choice alone."""
    _only(fields, "scoring_func", "sigmoid")
    _only(fields, "topk_method", "noaux_tc")
    return Routing("sigmoid", bias=True, groups=fields.positive("n_group", 8), group_best=2,
                   groups_chosen=fields.positive("topk_group", 4),
                   normed=fields.flag("norm_topk_prob", fields.absent("norm_topk_prob")),
                   scale=fields.number("routed_scaling_factor", 2.5, "zero"))


def _only(fields: Fields, key: str, value: str) -> None:
    """ModelError where a key states something else than what its architecture has."""
    found = fields.text(key)
    if found not in (None, value):
        raise fields.error(f"{key} {shown(found)} is not supported: it must be {value!r} here")


def _check_groups(fields: Fields, routing: Routing, count: int, chosen: int, keys: tuple[str, str, str]) -> None:
    """ModelError unless the experts can be cut into the groups, and those of the best groups suffice."""
    groups, best = routing.groups, routing.groups_chosen
    if not groups:
        return
    if count % groups or count // groups < routing.group_best:
        raise fields.error(f"{count} experts cannot be cut into {groups} groups ({keys[0]}) of equal size, of "
                           f"{routing.group_best} or more")
    if best > groups:
        raise fields.error(f"{keys[1]} is {best}, but there are {groups} groups ({keys[0]}): it can be {groups} "
                           "at most")
    if chosen > best * (count // groups):
        raise fields.error(f"{keys[2]} is {chosen}, but the {best} best groups ({keys[1]}) have "
                           f"{best * (count // groups)} experts: it can be that at most")


def gguf_expert_figures(fields: Fields, arch: str, n_layers: int) -> dict[str, Any]:
    """The same from GGUF metadata of architecture ``arch``; as llama.cpp has them, with weights that add up to 1."""
    if not fields.natural("expert_count", 0):
        return {}
    count, chosen = fields.positive("expert_count"), fields.positive("expert_used_count")
    figures = checked(fields, count, chosen, "expert_count", "expert_used_count")
    if arch == "deepseek2":
        return figures | _gguf_deepseek(fields, n_layers, count, chosen)
    for key in ("expert_shared_count", "leading_dense_block_count"):
        if fields.natural(key, 0):
            raise fields.error(f"{key} is {fields.get(key)}, which is not supported")
    width = fields.positive("feed_forward_length") if arch == "llama" else None
    return figures | {"expert_intermediate": fields.positive("expert_feed_forward_length", width)}


def _gguf_deepseek(fields: Fields, n_layers: int, count: int, chosen: int) -> dict[str, Any]:
    """Files of V2 say nothing of the scores' function: softmax. A scale of 0, or none, is 1, as in llama.cpp."""
    functions = {0: "softmax", 1: "softmax", 2: "sigmoid"}
    function = fields.natural("expert_gating_func", 0)
    if function not in functions:
        raise fields.error(f"expert_gating_func {function} is not supported: it must be 1 (softmax) or 2 (sigmoid)")
    groups, best = fields.natural("expert_group_count", 0), fields.natural("expert_group_used_count", 0)
    if not groups or not best:
        groups = best = 0
    sigmoid = functions[function] == "sigmoid"
    routing = Routing(functions[function], bias=sigmoid, groups=groups, groups_chosen=best,
                      group_best=2 if sigmoid else 1, normed=fields.flag("expert_weights_norm", False),
                      scale=fields.number("expert_weights_scale", 1.0, "zero") or 1.0)
    _check_groups(fields, routing, count, chosen,
                  ("expert_group_count", "expert_group_used_count", "expert_used_count"))
    first = min(n_layers, fields.natural("leading_dense_block_count", 0))
    return {"expert_intermediate": fields.positive("expert_feed_forward_length"), "dense": tuple(range(first)),
            "shared_experts": fields.natural("expert_shared_count", 0), "routing": routing}


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
