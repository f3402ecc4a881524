"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437): the Llama family's decoder with latent attention and experts."""

from __future__ import annotations

from mpillm.kernels import LatentHeads
from mpillm.layers.attention import KVGather
from mpillm.layers.mla import LatentAttention, LatentMatrices
from mpillm.layers.norm import RMSNorm
from mpillm.models import latent_weights
from mpillm.models.config import ModelConfig
from mpillm.models.llama import Llama, decoder
from mpillm.models.load import Loader
from mpillm.partition import Share


def local_heads(config: ModelConfig, share: Share) -> LatentHeads:
    """The widths, and a share's query heads."""
    return LatentHeads(share.heads.size, config.kv_rank, config.nope_dim, config.rope_dim, config.value_dim)


def build(config: ModelConfig, load: Loader, gather: KVGather | None) -> Llama:
    """Read one share of the model, layer by layer. Raises ModelError."""
    model = decoder(config, load, lambda layer: _attention(config, load, gather, layer))
    model.prompts_apart = config.mla == 3
    return model


def _attention(config: ModelConfig, load: Loader, gather: KVGather | None, layer: int) -> LatentAttention:
    at, heads = latent_weights.LAYER.format(layer), load.share.heads

    def norm(which: str) -> RMSNorm:
        return RMSNorm(load.vector(f"{at}{which}_layernorm.weight"), config.rms_eps)

    inputs = load.columns_apart(latent_weights.inputs(config, layer), latent_weights.input_spans(config, load.share))
    query = load.columns(f"{at}q_b_proj", load.query_rows()) if config.q_rank else None
    expand, matrices = None, None
    if config.mla == 0:
        kind = latent_weights.whole_format(load.weights, layer, load.asked)
        expand = load.columns(f"{at}kv_b_proj", heads.times(config.nope_dim + config.value_dim), kind).weight
    else:
        matrices = LatentMatrices(*latent_weights.load_parts(load, layer))
    return LatentAttention(
        local_heads(config, load.share), config.mla, config.softmax_scale, inputs, config.q_rank,
        norm("q_a") if config.q_rank else None, None if query is None else query.weight, norm("kv_a"), expand,
        matrices, load.rows(f"{at}o_proj", heads.times(config.value_dim)), gather)
