"""The arrays of the KV cache: for each layer keys and values of the heads that are held here, in blocks.

``kv_type_v`` ("": as the keys) and ``value_dim`` (None: as the keys; 0: the values are columns of the keys) are those
of :func:`kernels.cache_shape`.
"""

from __future__ import annotations

from mpillm import kernels
from mpillm.config import RunConfig
from mpillm.kernels import LayerCache
from mpillm.models.config import ModelConfig
from mpillm.partition import Share


def form(model: ModelConfig, share: Share) -> tuple[int, int, int]:
    """(KV heads, columns of a key, of a value) that a share caches of a layer; 0: values are columns of the keys."""
    if not model.latent:
        return share.kv_heads.size, model.head_dim, model.head_dim
    if model.mla == 0:
        return share.heads.size, model.head_dim, model.value_dim
    return share.kv_heads.size, model.kv_rank + model.rope_dim, model.kv_rank if model.mla == 1 else 0


def share_block_bytes(run: RunConfig, model: ModelConfig, share: Share) -> int:
    """Bytes of one block of a share's cache, all layers; 0 where nothing is cached."""
    heads, key, value = form(model, share)
    return block_bytes(run.kv_type, model.n_layers, heads, key, run.kv_type_v, value) if heads else 0


def share_cache(run: RunConfig, model: ModelConfig, share: Share, n_blocks: int) -> list[LayerCache]:
    """A share's cache."""
    heads, key, value = form(model, share)
    return allocate(run.kv_type, model.n_layers, n_blocks, heads, key, run.kv_type_v, value)


def block_bytes(kv_type: str, n_layers: int, kv_heads: int, head_dim: int, kv_type_v: str = "",
                value_dim: int | None = None) -> int:
    """Bytes of one block over all layers, as allocated (padding included)."""
    return n_layers * kernels.cache_block_nbytes(kv_type, kv_heads, head_dim, kv_type_v, value_dim)


def allocate(kv_type: str, n_layers: int, n_blocks: int, kv_heads: int, head_dim: int, kv_type_v: str = "",
             value_dim: int | None = None, shard: tuple[int, int] = (0, 1)) -> list[LayerCache]:
    """A cache of ``n_blocks`` blocks for each layer; ``shard``: see :class:`kernels.LayerCache`."""
    layers = []
    for _ in range(n_layers):
        keys, values = kernels.allocate_cache(kv_type, n_blocks, kv_heads, head_dim, kv_type_v, value_dim)
        layers.append(LayerCache(keys, values, kv_type, kv_type_v, shard))
    return layers
