"""The arrays of the KV cache: for each layer keys and values of the heads that are held here, in blocks.

``kv_type_v`` ("": as the keys) and ``value_dim`` (None: as the keys; 0: the values are columns of the keys) are those
of :func:`kernels.cache_shape`.
"""

from __future__ import annotations

from mpillm import kernels
from mpillm.kernels import LayerCache


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
