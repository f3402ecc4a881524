"""The arrays of the KV cache: for each layer keys and values of the heads that are held here, in blocks."""

from __future__ import annotations

from mpillm import kernels
from mpillm.kernels import LayerCache


def block_bytes(kv_type: str, n_layers: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of one block over all layers, as allocated (padding included)."""
    return n_layers * kernels.cache_block_nbytes(kv_type, kv_heads, head_dim)


def allocate(kv_type: str, n_layers: int, n_blocks: int, kv_heads: int, head_dim: int) -> list[LayerCache]:
    """A cache of ``n_blocks`` blocks for each layer."""
    layers = []
    for _ in range(n_layers):
        keys, values = kernels.allocate_cache(kv_type, n_blocks, kv_heads, head_dim)
        layers.append(LayerCache(keys, values, kv_type))
    return layers
