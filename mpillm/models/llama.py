"""The Llama family: Llama 2/3, Mistral, Qwen2/2.5 and Qwen3 are one decoder with options.

Reads like the paper (arXiv 2302.13971): ``x += attention(norm(x)); x += mlp(norm(x))``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpillm import kernels
from mpillm.layers.attention import Attention, Heads, KVGather, LayerCache, Rows
from mpillm.layers.embedding import VocabEmbedding, VocabHead
from mpillm.layers.mlp import GatedMLP
from mpillm.layers.norm import HeadRMSNorm, RMSNorm
from mpillm.layers.rope import Rope
from mpillm.models.config import ModelConfig
from mpillm.models.load import Loader
from mpillm.partition import Share, local_groups

# Tensors of a layer by the names of Hugging Face checkpoints; `models.weights` has GGUF's names for them.
LAYER = "model.layers.{}."
MATRICES = {   # tensors that are packed together, each with .weight and perhaps .bias
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
VECTORS = {
    "attention_norm": "input_layernorm.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
}
FINAL_NORM = "model.norm.weight"


@dataclass
class Block:
    """One decoder layer."""

    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP


@dataclass
class Llama:
    """A decoder whose matrices are split; the residual stream is whole everywhere."""

    embedding: VocabEmbedding
    blocks: list[Block]
    norm: RMSNorm
    head: VocabHead
    rope: Rope

    def __call__(self, rows: Rows, cache: list[LayerCache], wanted: np.ndarray) -> np.ndarray:
        """Logits float32 [len(wanted), local vocabulary] of the rows ``wanted`` (indices into the step)."""
        x = self.embedding(rows.tokens)
        for block, layer_cache in zip(self.blocks, cache, strict=True):
            kernels.add_in_place(x, block.attention(block.attention_norm(x), rows, layer_cache))
            kernels.add_in_place(x, block.mlp(block.mlp_norm(x)))
        return self.head(self.norm(np.ascontiguousarray(x[wanted])))


def local_heads(config: ModelConfig, share: Share) -> Heads:
    """The query heads of a share in groups by the KV heads that it holds."""
    groups = local_groups(share, config.n_heads // config.n_kv_heads)
    starts, stops = (np.array([getattr(span, end) for span in groups], np.int32) for end in ("start", "stop"))
    return Heads(config.head_dim, share.heads.size, len(groups), share.kv_columns.size, starts, stops)


def build(config: ModelConfig, load: Loader, gather: KVGather | None) -> Llama:
    """Read one share of the model, layer by layer. Raises ModelError."""
    embedding, head = load.embedding_and_head()
    heads = local_heads(config, load.share)
    blocks = [_block(config, load, heads, gather, index) for index in range(config.n_layers)]
    norm = RMSNorm(load.vector(FINAL_NORM), config.rms_eps)
    return Llama(embedding, blocks, norm, head, Rope(config.head_dim, config.rope_theta, config.rope))


def _block(config: ModelConfig, load: Loader, heads: Heads, gather: KVGather | None, index: int) -> Block:
    prefix = LAYER.format(index)
    share, kv_rows = load.share, load.share.kv_columns

    def norm(which: str) -> RMSNorm:
        return RMSNorm(load.vector(prefix + VECTORS[which]), config.rms_eps)

    def head_norm(which: str) -> HeadRMSNorm | None:
        return HeadRMSNorm(load.vector(prefix + VECTORS[which]), config.rms_eps) if config.qk_norm else None

    qkv = load.columns([prefix + name for name in MATRICES["qkv"]], [load.query_rows(), kv_rows, kv_rows])
    attention = Attention(index, heads, qkv, load.rows(prefix + MATRICES["output"][0], load.query_rows()),
                          head_norm("query_norm"), head_norm("key_norm"), gather, config.windows[index] or 0)
    gate_up = load.columns([prefix + name for name in MATRICES["gate_up"]], [share.columns, share.columns])
    mlp = GatedMLP(gate_up, load.rows(prefix + MATRICES["down"][0], share.columns))
    return Block(norm("attention_norm"), attention, norm("mlp_norm"), mlp)
