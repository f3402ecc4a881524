"""Where files keep the tensors of experts: each by itself, or those of a layer in one tensor of three axes.

Hugging Face's older folders have each expert's matrices by themselves, under two sets of names; transformers 5 can
write a layer's gate and up as ``mlp.experts.gate_up_proj`` [E, 2 f, hidden]. GGUF has ``ffn_gate_exps`` [E, f, hidden]
and its like, in old files each expert's by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpillm.models.config import ModelConfig

ROUTER, CORRECTION = "mlp.gate.weight", "mlp.gate.e_score_correction_bias"
SHARED = "mlp.shared_experts."
GGUF_SHARED = {f"{SHARED}{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


@dataclass(frozen=True)
class Place:
    """A matrix is ``name`` from row ``first`` on, if that tensor has this shape."""

    name: str
    shape: tuple[int, ...]
    first: int = 0


def expert_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names within a layer, and the shapes (outputs, inputs) that the figures give.

    Shared experts are one feed-forward, as wide as all of them.
    """
    up, down = (config.expert_intermediate, config.hidden), (config.hidden, config.expert_intermediate)
    shapes: dict[str, tuple[int, ...]] = {ROUTER: (config.experts, config.hidden)}
    for e in range(config.experts):
        shapes |= {f"mlp.experts.{e}.gate_proj.weight": up, f"mlp.experts.{e}.up_proj.weight": up,
                   f"mlp.experts.{e}.down_proj.weight": down}
    if config.routing.bias:
        shapes[CORRECTION] = (config.experts,)
    if config.shared_experts:
        width = config.shared_experts * config.expert_intermediate
        up, down = (width, config.hidden), (config.hidden, width)
        shapes |= {f"{SHARED}gate_proj.weight": up, f"{SHARED}up_proj.weight": up, f"{SHARED}down_proj.weight": down}
    return shapes


def is_expert(name: str) -> bool:
    """Whether a tensor's full name is of experts to choose among or their router."""
    return ".mlp.experts." in name or name.endswith(("." + ROUTER, "." + CORRECTION))


def places(config: ModelConfig, kind: str, name: str) -> list[Place]:
    """Where a checkpoint of ``kind`` may have an expert's or a router's tensor ``name``, likely ones first."""
    layer, within = name.split(".", 3)[2:]
    if within == CORRECTION:
        return [Place(f"blk.{layer}.exp_probs_b.bias" if kind == "gguf" else name, (config.experts,))]
    if within == ROUTER:
        shape = (config.experts, config.hidden)
        names = [f"blk.{layer}.ffn_gate_inp.weight"] if kind == "gguf" else _routers(config, layer)
        return [Place(found, shape) for found in names]
    number, part = within.split(".")[2:4]
    e, what = int(number), part.removesuffix("_proj")
    count, f, hidden = config.experts, config.expert_intermediate, config.hidden
    shape = (hidden, f) if what == "down" else (f, hidden)
    stacked = (count, *shape)
    if kind == "gguf":
        return [Place(f"blk.{layer}.ffn_{what}_exps.weight", stacked, e * shape[0]),
                Place(f"blk.{layer}.ffn_{what}.{e}.weight", shape)]
    apart = [Place(name, shape)]
    if config.architecture == "mixtral":
        apart.insert(0, Place(f"model.layers.{layer}.block_sparse_moe.experts.{e}.{_MIXTRAL[what]}.weight", shape))
    if what == "down":
        return [*apart, Place(f"model.layers.{layer}.mlp.experts.down_proj", stacked, e * hidden)]
    first = 2 * e * f + (f if what == "up" else 0)
    return [*apart, Place(f"model.layers.{layer}.mlp.experts.gate_up_proj", (count, 2 * f, hidden), first)]


def _routers(config: ModelConfig, layer: str) -> list[str]:
    blocks = ("block_sparse_moe", "mlp") if config.architecture == "mixtral" else ("mlp",)
    return [f"model.layers.{layer}.{block}.gate.weight" for block in blocks]
