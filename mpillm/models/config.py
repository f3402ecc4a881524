"""What a model is, in figures: one frozen dataclass for every architecture of the Llama family."""

from __future__ import annotations

from dataclasses import dataclass

from mpillm.layers.rope import RopeScaling

__all__ = ["ModelConfig", "RopeScaling"]


@dataclass(frozen=True)
class ModelConfig:
    """Figures of a model of the Llama family; sizes in elements, no ranks here."""

    architecture: str            # llama, mistral, qwen2, qwen3, mixtral, qwen3_moe
    hidden: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate: int            # of a dense layer
    vocab: int
    max_positions: int
    rms_eps: float
    rope_theta: float
    rope: RopeScaling
    tied: bool                   # the output head is the embedding
    qkv_bias: bool
    output_bias: bool            # bias of o_proj
    mlp_bias: bool
    qk_norm: bool                # RMSNorm over head_dim on each query and key head (Qwen3)
    windows: tuple[int | None, ...]   # sliding window of each layer, None = all positions
    bos_id: int | None
    eos_ids: tuple[int, ...]     # the union over config.json and generation_config.json
    name: str = ""               # for people: the folder's or file's name
    experts: int = 0             # of a layer that has experts; 0: all layers are dense
    experts_chosen: int = 0      # of them for each token
    expert_intermediate: int = 0
    experts_normed: bool = True  # the chosen ones' weights add up to 1
    dense: tuple[int, ...] = ()  # layers that are dense all the same

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.experts > 0 and layer not in self.dense

    @property
    def context(self) -> int:
        """Positions that a sequence may have: stretched by the rope scaling where the model's figure is not."""
        if self.rope.kind == "yarn":
            return int(max(self.max_positions, self.rope.original_max_positions * self.rope.factor))
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_positions * self.rope.factor)
        return self.max_positions
