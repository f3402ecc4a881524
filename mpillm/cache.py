"""Behind kernels: what the KV cache of a layer holds, in which shapes, and which rows a step brings to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpillm.errors import UsageError
from mpillm.jit import attention as _attention
from mpillm.quant.layout import PAIR, WORDS, allocate

BLOCK = _attention.BLOCK
KV_TYPES = ("f32", "f16", "bf16", "q8_0")
Shape = tuple[int, ...]


@dataclass
class Heads:
    """Which heads an attention has: query heads in groups, one group for each KV head.

    Query heads ``starts[j]`` ... ``stops[j] - 1`` use KV head j, each head one. Queries and keys have ``head_dim``
    columns, values ``value_dim`` (0: as many).
    """

    head_dim: int
    n_heads: int
    starts: np.ndarray      # int32 [J]
    stops: np.ndarray       # int32 [J]
    value_dim: int = 0

    def __post_init__(self) -> None:
        groups = self.stops - self.starts
        assert (groups >= 0).all() and groups.sum() == self.n_heads, f"heads {self.starts} ... {self.stops}"
        self.value_dim = self.value_dim or self.head_dim

    @property
    def n_kv_heads(self) -> int:
        return len(self.starts)

    @property
    def most_rows(self) -> int:
        """Rows of a sequence that go through a cache block together."""
        return max(1, _attention.QUERIES // self._largest)

    @property
    def group_parts(self) -> int:
        """Parts of a group of heads that go through the cache apart."""
        return -(-self._largest // _attention.QUERIES)

    @property
    def row_queries(self) -> int:
        """Queries of a row that go through a cache block together, at most."""
        return -(-self._largest // self.group_parts)

    @property
    def most_queries(self) -> int:
        """The same of all rows that do."""
        return self.most_rows * self.row_queries

    @property
    def _largest(self) -> int:
        return max(1, int((self.stops - self.starts).max(initial=1)))


@dataclass
class LayerCache:
    """Keys and values of one layer, in blocks, as the kernels lay them out.

    ``values`` None: the values are the first ``value_dim`` columns of the keys, which are cached once.
    ``shard`` (place, width): of a sequence s only blocks b with ``(first[s] + b) % width == place`` are held here.
    """

    keys: np.ndarray
    values: np.ndarray | None
    kv_type: str
    kv_type_v: str = ""     # "": as kv_type
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        self.kv_type_v = self.kv_type_v or self.kv_type
        assert 0 <= self.shard[0] < self.shard[1], f"place {self.shard[0]} of {self.shard[1]}"

    @property
    def types(self) -> tuple[str, str]:
        """Of keys and of values; "" where these are columns of the keys."""
        return self.kv_type, "" if self.values is None else self.kv_type_v

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + (0 if self.values is None else self.values.nbytes)

    def arguments(self) -> tuple[np.ndarray, ...]:
        """Keys and values, each followed by its memory as 16-bit words where scales stand in it."""
        values = self.keys if self.values is None else self.values
        return *_with_words(self.keys), *_with_words(values)


def _with_words(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return array, array.view(np.int16) if array.dtype == np.int8 else np.zeros(0, np.int16)


@dataclass
class Rows:
    """The rows of one step, from any number of sequences; every layer sees the same.

    Rows of consecutive positions of a sequence that stand together are worked on together.
    """

    tokens: np.ndarray       # int64 [T]
    positions: np.ndarray    # int32 [T]
    sequences: np.ndarray    # int32 [T], rows of block_table
    block_table: np.ndarray  # int32 [S, blocks], cache blocks of each sequence in order of position, -1: held elsewhere
    cos: np.ndarray          # float32 [T, D / 2]
    sin: np.ndarray          # float32 [T, D / 2]
    first: np.ndarray | None = None     # int32 [S], places of each sequence's block 0 in a sharded cache; None: 0
    generated: int = 0       # leading rows whose positions lie behind their prompts; where these attend in another way

    @property
    def in_order(self) -> bool:
        """Whether no row attends to one behind it: rows of prompts may stand behind what follows on them."""
        first, others = self.sequences[:self.generated], self.sequences[self.generated:]
        return not (len(first) and len(others) and np.isin(first, others).any())

    def part(self, begin: int, stop: int) -> Rows:
        """Rows ``begin`` ... ``stop - 1``."""
        own = slice(begin, stop)
        return Rows(self.tokens[own], self.positions[own], self.sequences[own], self.block_table, self.cos[own],
                    self.sin[own], self.first, min(max(self.generated - begin, 0), stop - begin))


def check_kv(kv_type: str) -> None:
    """Raises UsageError for a type that no cache has."""
    if kv_type not in KV_TYPES:
        raise UsageError(f"kv-type cannot be {kv_type!r}: use one of {', '.join(KV_TYPES)}")


def cache_shape(kv_type: str, n_blocks: int, kv_heads: int, head_dim: int, kv_type_v: str = "",
                value_dim: int | None = None) -> tuple[tuple[Shape, Any], tuple[Shape, Any] | None]:
    """(shape, dtype) of one layer's keys, and of its values; f16 and bf16 are kept as 16-bit words.

    Values have type ``kv_type_v`` ("": as keys) and ``value_dim`` columns (None: as keys; 0: there are none, as they
    are columns of the keys). Raises UsageError for types that do not exist or do not fit the widths.
    """
    value_dim = head_dim if value_dim is None else value_dim
    kv_type_v = kv_type_v or kv_type
    for kind, size in ((kv_type, head_dim), (kv_type_v, value_dim)):
        check_kv(kind)
        if kind == "q8_0" and size % 32:
            option = "kv-type" if kind == kv_type else "kv-type-v"
            raise UsageError(f"{option} q8_0 needs head sizes in blocks of 32, this model's are {size}: use bf16")
    assert head_dim % 2 == 0, f"head_dim {head_dim} is odd"
    keys = _key_shape(kv_type, n_blocks, kv_heads, head_dim), _dtype(kv_type)
    if not value_dim:
        return keys, None
    return keys, (_value_shape(kv_type_v, n_blocks, kv_heads, value_dim), _dtype(kv_type_v))


def _dtype(kind: str) -> Any:
    return np.dtype(np.int8 if kind == "q8_0" else WORDS[kind])


def _key_shape(kind: str, n_blocks: int, kv_heads: int, size: int) -> Shape:
    if kind == "q8_0":
        return n_blocks, kv_heads, _attention.Q8_BYTES * size
    lanes = (16, 2) if PAIR[kind] == 2 else (16,)
    return n_blocks, kv_heads, BLOCK // 16, size // PAIR[kind], *lanes


def _value_shape(kind: str, n_blocks: int, kv_heads: int, size: int) -> Shape:
    if kind == "q8_0":
        return n_blocks, kv_heads, _attention.Q8_BYTES * size
    lanes = (16, 2) if PAIR[kind] == 2 else (16,)
    return n_blocks, kv_heads, -(-size // 16), BLOCK // PAIR[kind], *lanes


def cache_block_nbytes(kv_type: str, kv_heads: int, head_dim: int, kv_type_v: str = "",
                       value_dim: int | None = None) -> int:
    """Bytes of K and V in one block of 64 positions of one layer, padding included; see :func:`cache_shape`."""
    made = cache_shape(kv_type, 1, kv_heads, head_dim, kv_type_v, value_dim)
    return sum(int(np.prod(one[0])) * one[1].itemsize for one in made if one is not None)


def allocate_cache(kv_type: str, n_blocks: int, kv_heads: int, head_dim: int, kv_type_v: str = "",
                   value_dim: int | None = None) -> tuple[np.ndarray, np.ndarray | None]:
    """(K, V) of one layer, pages untouched until they are written; V is None where ``value_dim`` is 0."""
    keys, values = cache_shape(kv_type, n_blocks, kv_heads, head_dim, kv_type_v, value_dim)
    return _made(*keys), None if values is None else _made(*values)


def _made(shape: Shape, dtype: Any) -> np.ndarray:
    return allocate(int(np.prod(shape)), dtype).reshape(shape)
