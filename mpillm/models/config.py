"""What a model is, in figures: one frozen dataclass for every architecture of the Llama family and DeepSeek's."""

from __future__ import annotations

from dataclasses import dataclass

from mpillm.layers.rope import RopeScaling, magnitude

__all__ = ["ModelConfig", "RopeScaling", "Routing"]


@dataclass(frozen=True)
class Routing:
    """How a row's experts are chosen and weighted.

    Scores are ``softmax`` over all experts' logits, or each one's ``sigmoid``; where ``bias``, a correction is added to
    them for the choice alone. Of ``groups`` equal groups only the ``groups_chosen`` best ones' experts can be chosen
    (0: all); a group is as good as its best expert (``group_best`` 1) or its two best ones together (2).
    ``normed``: the chosen ones' scores are divided by their sum; ``scale`` multiplies what comes out.
    """

    scoring: str = "softmax"
    bias: bool = False
    groups: int = 0
    groups_chosen: int = 0
    group_best: int = 1
    normed: bool = True
    scale: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Figures of a model; sizes in elements, no ranks here.

    With multi-head latent attention (``latent``): ``head_dim`` is the width of a query head, of which the last
    ``rope_dim`` are rotated; ``n_kv_heads`` is 1, the latent that all heads share.
    """

    architecture: str            # llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, deepseek_v2, deepseek_v3
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
    qkv_bias: bool               # with a latent: of q_a_proj and kv_a_proj_with_mqa
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
    dense: tuple[int, ...] = ()  # layers that are dense all the same
    shared_experts: int = 0      # that every row goes to, each as wide as one of the others
    routing: Routing = Routing()
    q_rank: int = 0              # of the queries' latent; 0: they have none
    kv_rank: int = 0             # of the keys' and values' latent; 0: no multi-head latent attention
    nope_dim: int = 0            # of a head's query and key, the part that is not rotated
    rope_dim: int = 0            # and the part that is
    value_dim: int = 0           # of a head's value
    mla: int = 0                 # what is cached of the latent (layers/mla): 0 ... 3
    interleaved: bool = False    # files have rotary pairs as neighbours; reading (models/weights) undoes it

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.experts > 0 and layer not in self.dense

    @property
    def latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_rank > 0

    @property
    def rotated(self) -> int:
        """The width that rotary positions turn: of every head, or with a latent its last part."""
        return self.rope_dim if self.latent else self.head_dim

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied by; DeepSeek's grows with the rope's stretch, as in transformers."""
        scale = self.head_dim ** -0.5
        if self.latent and self.rope.kind != "none" and self.rope.mscale_all_dim:
            scale *= magnitude(self.rope.factor, self.rope.mscale_all_dim) ** 2
        return scale

    @property
    def context(self) -> int:
        """Positions that a sequence may have: stretched by the rope scaling where the model's figure is not."""
        if self.rope.kind == "yarn":
            return int(max(self.max_positions, self.rope.original_max_positions * self.rope.factor))
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_positions * self.rope.factor)
        return self.max_positions
