"""A step's plan: operations over fixed buffers, checked and picked for this processor when they are recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpillm.errors import UsageError
from mpillm.jit import attention as _attention
from mpillm.jit import elementwise as _elementwise
from mpillm.jit import exchange as _exchange
from mpillm.jit import fused as _fused
from mpillm.jit import gemm as _gemm
from mpillm.jit import policy as _policy
from mpillm.jit import tape as _tape
from mpillm.jit import tiles as _tiles
from mpillm.jit.gemm import NOTHING as _NOTHING
from mpillm.jit.isa import select as _select
from mpillm.jit.isa.amx import SCRATCH as _SCRATCH
from mpillm.quant.layout import LIMIT, PAIR, QUANTISED, WORDS, allocate
from mpillm.quant.packed import PackedMatrix

BLOCK = _attention.BLOCK
KV_TYPES = ("f32", "f16", "bf16", "q8_0")
_PAIR, _LIMIT = {**PAIR, "q8_0": 1}, {**LIMIT, "q8_0": np.float32(np.inf)}
ROOM_WIDTH = 32 * _fused.PAIRS      # outputs of each row that a thread works on in room of its own, at most
_F32 = np.dtype(np.float32)
ROWS, WANTED = _tape.Cell("rows"), _tape.Cell("wanted")


@dataclass
class Heads:
    """Which heads an attention has: query heads in groups, one group for each KV head.

    Query heads ``starts[j]`` ... ``stops[j] - 1`` use KV head j, each head one.
    """

    head_dim: int
    n_heads: int
    starts: np.ndarray      # int32 [J]
    stops: np.ndarray       # int32 [J]

    def __post_init__(self) -> None:
        groups = self.stops - self.starts
        assert (groups >= 0).all() and groups.sum() == self.n_heads, f"heads {self.starts} ... {self.stops}"

    @property
    def n_kv_heads(self) -> int:
        return len(self.starts)

    @property
    def most_rows(self) -> int:
        """Rows of a sequence that go through a cache block together."""
        return max(1, _attention.QUERIES // max(1, int((self.stops - self.starts).max(initial=1))))


@dataclass
class HeadNorms:
    """Weights [D] of the norms of each head of queries and keys, or None."""

    query: np.ndarray | None = None
    key: np.ndarray | None = None
    eps: float = 0.0


@dataclass
class LayerCache:
    """Keys and values of one layer, in blocks, as the kernels lay them out."""

    keys: np.ndarray
    values: np.ndarray
    kv_type: str

    def arguments(self) -> tuple[np.ndarray, ...]:
        """Keys and values, each followed by its memory as 16-bit words where scales stand in it."""
        words = (array.view(np.int16) if self.kv_type == "q8_0" else np.zeros(0, np.int16)
                 for array in (self.keys, self.values))
        return tuple(one for pair in zip((self.keys, self.values), words, strict=True) for one in pair)


@dataclass
class Rows:
    """The rows of one step, from any number of sequences; every layer sees the same.

    Rows of consecutive positions of a sequence that stand together are worked on together.
    """

    tokens: np.ndarray       # int64 [T]
    positions: np.ndarray    # int32 [T]
    sequences: np.ndarray    # int32 [T], rows of block_table
    block_table: np.ndarray  # int32 [S, blocks], cache blocks of each sequence in order of position
    cos: np.ndarray          # float32 [T, D / 2]
    sin: np.ndarray          # float32 [T, D / 2]


class Plan:
    """The operations of one step, recorded once over fixed buffers and run for any rows up to ``capacity``.

    Arrays of rows are float32 [capacity, n]; a row may be a slice of a wider one. Each method records one operation.
    """

    def __init__(self, capacity: int, fast: bool = False) -> None:
        """``fast``: products of many rows widen quantised weights to bf16, in tiers that multiply it."""
        self.capacity, self.tape = capacity, _tape.Tape()
        self._fast = fast and _select.at_least("avx512")
        self._buffers: dict[tuple, np.ndarray] = {}
        self._heads: Heads | None = None
        self._n_blocks = 0
        self._room, self._tiles = _NOTHING, np.zeros(0, np.uint8)
        self._ready = False

    def buffer(self, name: str, n: int, before: int = 0, whole: int | None = None) -> np.ndarray:
        """Room named ``name`` for [capacity, n]: columns ``before`` ... of rows of ``whole``, the others zeros.

        Asked for again, it is the same room.
        """
        whole = n if whole is None else whole
        key = (name, whole)
        if key not in self._buffers:
            self._buffers[key] = np.zeros((self.capacity, whole), np.float32)
        return self._buffers[key][:, before:before + n]

    def call(self, family: str, function: Callable[[int], None]) -> None:
        """Leave the kernels for ``function(rows)``."""
        self.tape.call(family, lambda: function(self._n_rows))

    def linear(self, x: np.ndarray, w: PackedMatrix, bias: np.ndarray | None, out: np.ndarray,
               rows: _tape.Cell = ROWS) -> None:
        """out [., n] = x [., k] @ w.T + bias [n]. float32 sums along k in order; quantised formats quantise x first."""
        assert x.shape == (self.capacity, w.k) and x.flags.c_contiguous, f"linear: x {x.shape}, {w.k} inputs"
        assert out.shape == (self.capacity, w.n) and out.flags.c_contiguous, f"linear: out {out.shape}, n {w.n}"
        assert bias is None or bias.shape == (w.n,), f"linear: bias {bias.shape if bias is not None else 0}, n {w.n}"
        if w.n == 0:
            return
        if self._is_fast(w):
            arguments = self._product(x, w, bias, ROOM_WIDTH, rows)
            self.tape.add("linear", _fused.linear_operation(w.format), *arguments, out, w.n)
            return
        shared = (_NOTHING if bias is None else bias, out, w.n, self.buffer("tail", 16))
        given, scales, sums = self._prepared(x, w, rows)
        tier, kind = _select.tier(), _fused.activation(w.format)
        if kind == "codes" and tier == "amx":
            self.tape.add("linear", _tiles.codes_operation(w.format), given, scales, sums, rows, w.k, w.data, w.scales,
                          w.phase, *shared, self.scratch())
        elif kind == "codes":
            self.tape.add("linear", _gemm.linear_operation(w.format), given, scales, sums, rows, w.k, w.data, w.scales,
                          w.phase, *shared)
        elif kind == "bf16":
            scratch = (self.scratch(),) if tier == "amx" else ()
            self.tape.add("linear", _tiles.bf16_operations(tier)[1], given, rows, w.k, w.data, w.stride, *shared,
                          *scratch)
        else:
            self.tape.add("linear", _gemm.linear_operation(w.format), given, _NOTHING, rows, w.k, w.data, _NOTHING,
                          w.stride, *shared)

    def _prepared(self, x: np.ndarray, w: PackedMatrix, rows: _tape.Cell) -> tuple[np.ndarray, ...]:
        """x as a product with ``w`` takes it: (values, scales, sums); records what makes it so."""
        kind, none = _fused.activation(w.format), np.zeros(0, np.int32)
        if kind == "codes":
            codes, scales = self._array("codes", w.k, np.int8), self._array("scales", w.k // 32, np.float32)
            sums = self._array("sums", w.k // 16, np.int32)
            self.tape.add("quantise", _gemm.quantise_operation(), x, rows, w.k, codes, scales, sums)
            return codes, scales, sums
        if kind == "bf16":
            return self._rounded(x, w.k, rows), _NOTHING, none
        return x, _NOTHING, none

    def _rounded(self, x: np.ndarray, k: int, rows: _tape.Cell) -> np.ndarray:
        """x in bf16 as the tier's products take it."""
        rounded = self._array("bf16", -(-k // 32) * 32, np.uint16)
        self.tape.add("quantise", _tiles.bf16_operations(_select.tier())[0], x, rows, k, rounded)
        return rounded

    def _product(self, x: np.ndarray, w: PackedMatrix, bias: np.ndarray | None, width: int,
                 rows: _tape.Cell = ROWS) -> tuple:
        """The arguments that fused products share; threads work in rooms of ``width`` outputs for all rows."""
        assert x.shape == (self.capacity, w.k) and x.flags.c_contiguous, f"x {x.shape}, {w.k} inputs"
        assert bias is None or bias.shape == (w.n,), f"bias {bias.shape if bias is not None else 0}, n {w.n}"
        given, scales, sums = self._prepared(x, w, rows)
        rounded, widened, each_widened = np.zeros(0, np.uint16), np.zeros(0, np.uint16), 0
        if self._is_fast(w):
            rounded, each_widened = self._rounded(x, w.k, rows), width * w.k
            widened = self.kept(("widened", each_widened),
                                 lambda: allocate(each_widened * _policy.threads(), np.uint16))
        w_scales = _NOTHING if w.scales is None else w.scales
        room, each = self.thread_room(width)
        scale_stride = len(w_scales) // max(1, -(-w.n // 16))
        return (given, scales, sums, rounded, rows, w.k, w.data, w_scales, w.stride, scale_stride, w.phase,
                _NOTHING if bias is None else bias, room, each, self.buffer("tail", 16), self.scratch(),
                widened, each_widened)

    def thread_room(self, width: int) -> tuple[np.ndarray, int]:
        """Room of each thread for ``width`` outputs of all rows, and its elements."""
        each = -(-self.capacity * width // 16) * 16
        return self.kept(("fused", width), lambda: allocate(each * _policy.threads(), np.float32)), each

    def _is_fast(self, w: PackedMatrix) -> bool:
        return self._fast and w.format in QUANTISED

    def gated(self, x: np.ndarray, w: PackedMatrix, bias: np.ndarray | None, out: np.ndarray) -> None:
        """out [., n] = silu(gate) * up of the product of x with ``w``, of which panels of gate and up stand in turn."""
        n = out.shape[1]
        assert w.n == 2 * n and n % 16 == 0 and len(out) == self.capacity, f"gated: {w.n} outputs, out {out.shape}"
        if n:
            width = 32 * min(_fused.PAIRS, n // 16)
            operation = _fused.gated_operation(w.format, self._is_fast(w))
            self.tape.add("linear", operation, *self._product(x, w, bias, width), out, _stride(out), n)

    def heads(self, x: np.ndarray, w: PackedMatrix, bias: np.ndarray | None, q: np.ndarray, heads: Heads,
              norms: HeadNorms, cache: LayerCache) -> None:
        """Queries into q [., heads * D], keys and values into the cache, of the product of x with ``w``.

        Its outputs are the heads of q, k and v in order. Norms, rotation and rounding as in :meth:`rope_write`.
        """
        size, total = heads.head_dim, heads.n_heads + 2 * heads.n_kv_heads
        assert size % 16 == 0 and w.n == total * size, f"heads: {w.n} outputs for {total} heads of {size}"
        assert q.shape == (self.capacity, heads.n_heads * size), f"heads: q {q.shape}"
        self._check_cache("heads", cache, heads)
        if total:
            self.tape.add("linear", _fused.heads_operation(w.format, cache.kv_type, self._is_fast(w)),
                          *self._product(x, w, bias, size), q, _stride(q), *self._head_arguments(heads, norms, cache))

    def _head_arguments(self, heads: Heads, norms: HeadNorms, cache: LayerCache) -> tuple:
        cell, name = _tape.Cell, cache.kv_type
        return (heads.n_heads, heads.n_kv_heads, heads.head_dim, cell("cos"), cell("sin"),
                *(_NOTHING if weight is None else weight for weight in (norms.query, norms.key)), norms.eps,
                *cache.arguments(), _PAIR[name], _LIMIT[name], cell("sequences"), cell("positions"),
                cell("table"), cell("table_width"))

    def scratch(self) -> np.ndarray:
        """Room of each thread for tiles."""
        if self._tiles.size == 0:
            self._tiles = allocate(_policy.threads() * _SCRATCH, np.uint8)
        return self._tiles

    def _array(self, name: str, n: int, dtype: Any) -> np.ndarray:
        return self.kept((name, n), lambda: np.zeros((self.capacity, n), dtype))

    def kept(self, key: tuple, make: Callable[[], np.ndarray]) -> np.ndarray:
        """The room of this key, made when it is first asked for."""
        if key not in self._buffers:
            self._buffers[key] = make()
        return self._buffers[key]

    def norm(self, x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray,
             chosen: bool = False) -> None:
        """out = x / sqrt(mean(x**2) + eps) * weight, of the wanted rows of x only if ``chosen``."""
        _same("norm", x, out, weight)
        rows = WANTED if chosen else ROWS
        self.tape.add("norm", _elementwise.operation("norm"), rows, x.shape[1], x, _stride(x), chosen,
                      _tape.Cell("chosen"), weight, eps, out, _stride(out))

    def add_norm(self, x: np.ndarray, y: np.ndarray, bias: np.ndarray | None, weight: np.ndarray | None, eps: float,
                 out: np.ndarray) -> None:
        """x += y (+ bias); out = norm of x, unless ``weight`` is None."""
        _same("add_norm", x, y, bias)
        _same("add_norm", x, out, weight)
        assert x.flags.c_contiguous, f"add_norm: strides {x.strides}"
        self.tape.add("norm", _elementwise.operation("add_norm"), ROWS, x.shape[1], x, y, _stride(y),
                      bias is not None, _NOTHING if bias is None else bias, weight is not None,
                      _NOTHING if weight is None else weight, eps, out, _stride(out))

    def reduce_rows(self, memory: tuple[np.ndarray, ...], x: np.ndarray, y: np.ndarray, bias: np.ndarray | None,
                    weight: np.ndarray | None, eps: float, out: np.ndarray) -> None:
        """:meth:`add_norm` of y summed over the ranks in rank order; ``memory``: Replica.exchange_arguments()."""
        _same("reduce_rows", x, y, bias)
        _same("reduce_rows", x, out, weight)
        assert x.flags.c_contiguous and y.flags.c_contiguous, f"reduce_rows: strides {x.strides}, {y.strides}"
        self.tape.add("exchange", _exchange.reduce_operation(), *memory, y, x, _NOTHING if bias is None else bias,
                      _NOTHING if weight is None else weight, out, _stride(out), ROWS, x.shape[1], eps)

    def swap_columns(self, memory: tuple[np.ndarray, ...], arrays: Sequence[np.ndarray],
                     out: Sequence[np.ndarray]) -> None:
        """Columns of up to three arrays to the ranks that want them; ``memory``: Swap.exchange_arguments()."""
        assert len(arrays) == len(out) <= _exchange.ARRAYS, f"swap_columns: {len(arrays)} arrays, {len(out)} to fill"
        none = [_NOTHING, 0] * (_exchange.ARRAYS - len(out))
        given, got = ([one for x in own for one in (x, _stride(x))] + none for own in (arrays, out))
        self.tape.add("exchange", _exchange.swap_operation(), *memory, *given, *got, ROWS)

    def silu_mul(self, gate_up: np.ndarray, out: np.ndarray) -> None:
        """out [., f] = silu(gate) * up for rows [gate f | up f]."""
        assert gate_up.shape[1] == 2 * out.shape[1], f"silu_mul: {gate_up.shape}, {out.shape}"
        self.tape.add("silu", _elementwise.operation("silu_mul"), ROWS, out.shape[1], gate_up, _stride(gate_up), out,
                      _stride(out))

    def rope_write(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: Heads, norms: HeadNorms,
                   cache: LayerCache) -> None:
        """Norm and rotate q [., heads * D] and k [., kv * D] in place; write k and v into the cache.

        Pairs are (i, i + D/2). A key or value that the cache's type cannot hold leaves NaN in the cache there.
        """
        size, n_kv = heads.head_dim, heads.n_kv_heads
        assert q.shape[1] == heads.n_heads * size and k.shape == v.shape == (self.capacity, n_kv * size), \
            f"rope_write: q {q.shape}, k {k.shape}, v {v.shape}"
        self._check_cache("rope_write", cache, heads)
        self.tape.add("rope", _attention.rope_write_operation(cache.kv_type), ROWS, q, _stride(q), k, _stride(k), v,
                      _stride(v), *self._head_arguments(heads, norms, cache))

    def attention(self, q: np.ndarray, heads: Heads, cache: LayerCache, scale: float, window: int,
                  out: np.ndarray) -> None:
        """out = softmax(scale * q K) V for q [., heads * D].

        A row attends to positions max(0, p - window + 1) ... p of its sequence (window 0: from 0).
        """
        assert q.shape == out.shape == (self.capacity, heads.n_heads * heads.head_dim), f"attention: q {q.shape}"
        self._check_cache("attention", cache, heads)
        if not heads.n_heads:
            return
        shared = (heads.starts, heads.stops, heads.n_kv_heads)
        cell = _tape.Cell
        group = heads.most_rows * int((heads.stops - heads.starts).max())
        self.tape.add("attention", _attention.attention_operation(cache.kv_type), q, _stride(q), out, _stride(out),
                      *cache.arguments(), *shared, cell("sequences"), cell("positions"), cell("table"),
                      cell("table_width"), cell("tiles"), cell("n_tiles"), scale, heads.head_dim, window, group,
                      cell("stretches"), cell("split"), cell("room"))
        self.tape.add("attention", _attention.merge_operation(), out, _stride(out), *shared, cell("positions"),
                      cell("tiles"), cell("n_tiles"), heads.head_dim, window, group, cell("stretches"), cell("split"),
                      cell("room"))

    def _check_cache(self, name: str, cache: LayerCache, heads: Heads) -> None:
        check_kv(cache.kv_type)
        size, n_blocks = heads.head_dim, cache.keys.shape[0]
        k_shape, v_shape, dtype = cache_shape(cache.kv_type, n_blocks, heads.n_kv_heads, size)
        assert cache.keys.shape == k_shape and cache.values.shape == v_shape, \
            f"{name}: caches {cache.keys.shape}, {cache.values.shape} for {heads.n_kv_heads} heads of {size}"
        assert cache.keys.dtype == cache.values.dtype == dtype, f"{name}: {cache.keys.dtype} for {cache.kv_type}"
        assert self._heads is None or self._heads.most_rows == heads.most_rows, f"{name}: groups of heads differ"
        self._heads, self._n_blocks = heads, n_blocks

    def run(self, rows: Rows, wanted: np.ndarray) -> None:
        """Run all operations for these rows; ``wanted`` int64 are those that ``norm(chosen=True)`` takes."""
        m, table = len(rows.positions), rows.block_table
        assert m <= self.capacity, f"{m} rows for a plan of {self.capacity}"
        assert table.dtype == np.int32 and table.ndim == 2 and table.flags.c_contiguous, f"table {table.shape}"
        assert rows.positions.shape == rows.sequences.shape == (m,), f"{rows.positions.shape}"
        assert rows.positions.dtype == rows.sequences.dtype == np.int32 and wanted.dtype == np.int64
        at, parts = _tape.address_of, _policy.threads()
        tiles, n_tiles = np.empty(m + 1, np.int64), 0
        stretches = int(rows.positions.max(initial=0)) // _attention.STRETCH + 1
        split, room = 0, _NOTHING
        if self._heads is not None:
            heads = self._heads
            n_tiles = _attention.tiles_kernel()(rows.sequences, rows.positions, table.reshape(-1), table.shape[1],
                                                len(table), self._n_blocks, heads.most_rows, tiles)
            assert n_tiles >= 0, "a position that is attended to has no block in the table"
            pairs = n_tiles * heads.n_kv_heads
            if parts > 1 and stretches > 1 and pairs < 4 * parts:
                split, room = 1, self._split_room(pairs * stretches, heads)
            assert rows.cos.shape == rows.sin.shape == (m, heads.head_dim // 2), f"cos {rows.cos.shape}"
        self._run({"rows": m, "wanted": len(wanted), "chosen": at(wanted), "positions": at(rows.positions),
                   "sequences": at(rows.sequences), "table": at(table), "table_width": table.shape[1],
                   "cos": at(rows.cos), "sin": at(rows.sin), "tiles": at(tiles), "n_tiles": n_tiles,
                   "stretches": stretches, "split": split, "room": at(room)}, parts)

    def _split_room(self, pieces: int, heads: Heads) -> np.ndarray:
        width = -(-heads.head_dim // 16) * 16 + 2
        size = pieces * heads.most_rows * int((heads.stops - heads.starts).max()) * width
        if self._room.size < size:
            self._room = np.empty(size, np.float32)
        return self._room

    def run_alone(self, rows: int) -> None:
        """Run where no operation knows of sequences or a cache."""
        self._run({"rows": rows, "wanted": rows, "chosen": 0}, _policy.threads())

    def _run(self, values: dict[str, int], parts: int) -> None:
        if not self._ready:
            self.tape.finish()
            self._ready = True
        self._n_rows = values["rows"]
        self.tape.run(parts, values)

    def seconds(self) -> dict[str, float]:
        """Seconds in each family of operations since the plan was made, exchanges included."""
        return self.tape.seconds()


def _stride(x: np.ndarray) -> int:
    contiguous = x.ndim == 2 and (x.strides[1] == 4 or x.shape[1] <= 1 or not len(x))
    assert x.dtype == _F32 and contiguous, f"rows of {x.dtype}, shape {x.shape}, strides {x.strides}"
    return x.strides[0] // 4


def _same(name: str, x: np.ndarray, y: np.ndarray, vector: np.ndarray | None) -> None:
    assert x.shape == y.shape and (vector is None or vector.shape == x.shape[1:]), \
        f"{name}: {x.shape}, {y.shape}, {None if vector is None else vector.shape}"


def check_kv(kv_type: str) -> None:
    if kv_type not in KV_TYPES:
        raise UsageError(f"kv-type cannot be {kv_type!r}: use one of {', '.join(KV_TYPES)}")


def cache_shape(kv_type: str, n_blocks: int, kv_heads: int,
                head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
    """(shape of K, shape of V, dtype) of one layer's cache; f16 and bf16 are kept as 16-bit words."""
    check_kv(kv_type)
    assert head_dim % 2 == 0, f"head_dim {head_dim} is odd"
    if kv_type == "q8_0":
        if head_dim % 32:
            raise UsageError(f"kv-type q8_0 needs head sizes in blocks of 32, this model's are {head_dim}: use bf16")
        shape = (n_blocks, kv_heads, _attention.Q8_BYTES * head_dim)
        return shape, shape, np.dtype(np.int8)
    pair, columns = PAIR[kv_type], -(-head_dim // 16)
    lanes = (16, 2) if pair == 2 else (16,)
    k_shape = (n_blocks, kv_heads, BLOCK // 16, head_dim // pair, *lanes)
    return k_shape, (n_blocks, kv_heads, columns, BLOCK // pair, *lanes), np.dtype(WORDS[kv_type])


def cache_block_nbytes(kv_type: str, kv_heads: int, head_dim: int) -> int:
    """Bytes of K and V in one block of 64 positions of one layer, padding included."""
    k_shape, v_shape, dtype = cache_shape(kv_type, 1, kv_heads, head_dim)
    return (int(np.prod(k_shape)) + int(np.prod(v_shape))) * dtype.itemsize


def allocate_cache(kv_type: str, n_blocks: int, kv_heads: int,
                   head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """(K, V) of one layer, pages untouched until they are written."""
    k_shape, v_shape, dtype = cache_shape(kv_type, n_blocks, kv_heads, head_dim)
    k, v = (allocate(int(np.prod(shape)), dtype).reshape(shape) for shape in (k_shape, v_shape))
    return k, v
