"""A step's plan: operations over fixed buffers, checked and picked for this processor when they are recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpillm.cache import Heads, LayerCache, Rows, cache_shape
from mpillm.jit import attention as _attention
from mpillm.jit import cache_rows as _cache_rows
from mpillm.jit import elementwise as _elementwise
from mpillm.jit import exchange as _exchange
from mpillm.jit import fused as _fused
from mpillm.jit import gemm as _gemm
from mpillm.jit import policy as _policy
from mpillm.jit import tape as _tape
from mpillm.jit import tiles as _tiles
from mpillm.jit.gemm import NOTHING as _NOTHING
from mpillm.jit.isa import select as _select
from mpillm.jit.isa.amx import SCRATCH as TILES
from mpillm.quant.layout import QUANTISED, allocate
from mpillm.quant.packed import PackedMatrix

ROOM_WIDTH = 32 * _fused.PAIRS      # outputs of each row that a thread works on in room of its own, at most
SCRATCH = 64 << 20                  # bytes that attention may take beside its threads' tiles
CROWD = 4                           # work items of a thread from which on stretches are not split off
_F32 = np.dtype(np.float32)
ROWS, WANTED, GENERATED = (_tape.Cell(name) for name in ("rows", "wanted", "generated"))


@dataclass
class HeadNorms:
    """Weights [D] of the norms of each head of queries and keys, or None."""

    query: np.ndarray | None = None
    key: np.ndarray | None = None
    eps: float = 0.0


@dataclass
class _Tiling:
    """How the rows of a step are cut for attentions of one form, and the cells that say so in a run."""

    number: int
    heads: Heads
    width: int          # values of an output in the threads' room
    generated: bool     # only those behind their prompts

    def cells(self) -> tuple[_tape.Cell, ...]:
        """Of the tiles, their number, stretches of a piece, pieces, queries of a piece in the room, and the room."""
        names = ("tiles", "n_tiles", "run", "pieces", "queries", "room")
        return tuple(_tape.Cell(f"{name} {self.number}") for name in names)


class Plan:
    """The operations of one step, recorded once over fixed buffers and run for any rows up to ``capacity``.

    Arrays of rows are float32 [capacity, n]; a row may be a slice of a wider one. Each method records one operation.
    """

    def __init__(self, capacity: int, fast: bool = False, scratch: int = SCRATCH,
                 buffers: dict[tuple, np.ndarray] | None = None) -> None:
        """``fast``: products of many rows widen quantised weights to bf16, in tiers that multiply it.

        ``scratch``: bytes that attention may take beside its threads' tiles, however long the context. ``buffers``:
        see :meth:`branch`.
        """
        self.capacity, self.tape = capacity, _tape.Tape()
        self._fast = fast and _select.at_least("avx512")
        self._buffers: dict[tuple, np.ndarray] = {} if buffers is None else buffers
        self._tilings: dict[tuple, _Tiling] = {}
        self._n_blocks, self._shard = 0, (0, 1)
        self._angles: int | None = None
        self.scratch_nbytes, self._room = scratch, _NOTHING
        self.prompts = True     # rows of prompts may be in a step, not only generated ones
        self._branches: dict[int, dict[tuple, np.ndarray]] = {}
        self.part_branches: dict[int, dict[int, dict[tuple, np.ndarray]]] = {}      # of parts, by their capacity

    def branch(self, capacity: int) -> Plan:
        """A plan that is run from a ``call`` of this one; all of one capacity share their buffers."""
        return Plan(capacity, self._fast, self.scratch_nbytes, self._branches.setdefault(capacity, {}))

    def buffer(self, name: str, n: int, before: int = 0, whole: int | None = None) -> np.ndarray:
        """Room named ``name`` for [capacity, n]: columns ``before`` ... of rows of ``whole``, the others zeros.

        Asked for again, it is the same room.
        """
        return self.rows_of(name, n if whole is None else whole, np.float32)[:, before:before + n]

    def call(self, family: str, function: Callable[[int], None], elsewhere: bool = False) -> None:
        """Leave the kernels for ``function(rows)``; ``elsewhere``: another thread may run it, see turns.py."""
        self.tape.call(family, lambda: function(self._n_rows), elsewhere)

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
            codes, scales = self.rows_of("codes", w.k, np.int8), self.rows_of("scales", w.k // 32, np.float32)
            sums = self.rows_of("sums", w.k // 16, np.int32)
            operation = _fused.few_quantised() if self._is_fast(w) else _gemm.quantise_operation()
            self.tape.add("quantise", operation, x, rows, w.k, codes, scales, sums)
            return codes, scales, sums
        if kind == "bf16":
            return self._rounded(x, w.k, rows), _NOTHING, none
        return x, _NOTHING, none

    def _rounded(self, x: np.ndarray, k: int, rows: _tape.Cell) -> np.ndarray:
        """x in bf16 as the tier's products take it."""
        rounded = self.rows_of("bf16", -(-k // 32) * 32, np.uint16)
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
        assert heads.value_dim == size and cache.values is not None, f"heads: values of {heads.value_dim}"
        assert q.shape == (self.capacity, heads.n_heads * size), f"heads: q {q.shape}"
        self._check_cache("heads", cache, heads)
        if total:
            self.tape.add("linear", _fused.heads_operation(w.format, *cache.types, self._is_fast(w)),
                          *self._product(x, w, bias, size), q, _stride(q), heads.n_heads, heads.n_kv_heads, size,
                          *self._head_arguments(heads, norms, cache))

    def _head_arguments(self, heads: Heads, norms: HeadNorms, cache: LayerCache) -> tuple:
        self.rotate(heads.head_dim)
        return (*self.angles(), *(_NOTHING if weight is None else weight for weight in (norms.query, norms.key)),
                norms.eps, *self.cache_arguments(cache))

    def rotate(self, size: int) -> None:
        """Say that rows bring angles for ``size`` rotated columns."""
        assert self._angles in (None, size // 2), f"angles for {size} columns beside {self._angles}"
        self._angles = size // 2

    def angles(self) -> tuple[_tape.Cell, _tape.Cell]:
        """cos and sin, [T, size / 2] each, as an operation takes them."""
        return _tape.Cell("cos"), _tape.Cell("sin")

    def cache_arguments(self, cache: LayerCache) -> tuple:
        """A layer's cache and where each row stands in it, as an operation that writes it takes them."""
        cell = _tape.Cell
        return *cache.arguments(), cell("sequences"), cell("positions"), cell("table"), cell("table_width")

    def scratch(self) -> np.ndarray:
        """Room of each thread for tiles."""
        return self.kept(("tiles", TILES), lambda: allocate(_policy.threads() * TILES, np.uint8))

    def rows_of(self, name: str, n: int, dtype: Any) -> np.ndarray:
        """Room for ``n`` values of each row, at first zeros."""
        return self.kept((name, n), lambda: allocate(self.capacity * n, dtype).reshape(self.capacity, n))

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

        Pairs are (i, i + D/2). A key or value that the cache's type cannot hold leaves NaN in the cache there. A
        position whose block is held elsewhere (-1 in the table) is not written.
        """
        size, n_kv = heads.head_dim, heads.n_kv_heads
        assert q.shape[1] == heads.n_heads * size and k.shape == (self.capacity, n_kv * size) and \
            v.shape == (self.capacity, n_kv * heads.value_dim), f"rope_write: q {q.shape}, k {k.shape}, v {v.shape}"
        assert cache.values is not None, "rope_write: the cache holds no values of their own"
        self._check_cache("rope_write", cache, heads)
        self.tape.add("rope", _cache_rows.rope_write_operation(*cache.types), ROWS, q, _stride(q), k, _stride(k), v,
                      _stride(v), heads.n_heads, n_kv, size, heads.value_dim,
                      *self._head_arguments(heads, norms, cache))

    def cache_write(self, k: np.ndarray, v: np.ndarray | None, heads: Heads, cache: LayerCache) -> None:
        """Write k [., kv * D] and v [., kv * value_dim] into the cache as they are; v None where it holds no values."""
        n_kv, size = heads.n_kv_heads, 0 if v is None else heads.value_dim
        assert k.shape == (self.capacity, n_kv * heads.head_dim), f"cache_write: k {k.shape}"
        assert v is None or v.shape == (self.capacity, n_kv * size), f"cache_write: v of {size} columns"
        assert (v is None) == (cache.values is None), "cache_write: values go where values are held"
        self._check_cache("cache_write", cache, heads)
        v = k if v is None else v
        self.tape.add("rope", _cache_rows.cache_write_operation(*cache.types), ROWS, k, _stride(k), v, _stride(v), n_kv,
                      heads.head_dim, size, *self.cache_arguments(cache))

    def attention(self, q: np.ndarray, heads: Heads, cache: LayerCache, scale: float, window: int,
                  out: np.ndarray, lse: np.ndarray | None = None, generated: bool = False) -> None:
        """out [., heads * value_dim] = softmax(scale * q K) V for q [., heads * D].

        A row attends to positions max(0, p - window + 1) ... p of its sequence (window 0: from 0), of which a cache
        that is sharded holds some. ``lse`` [., heads] gets log(sum of exp(scale * q K)). A row that finds no position
        here has out 0 and lse -inf. ``generated``: only of the step's first rows, as many as it says (GENERATED).
        """
        assert q.shape == (self.capacity, heads.n_heads * heads.head_dim), f"attention: q {q.shape}"
        assert out.shape == (self.capacity, heads.n_heads * heads.value_dim), f"attention: out {out.shape}"
        assert lse is None or lse.shape == (self.capacity, heads.n_heads), "attention: lse is one of each head"
        self._check_cache("attention", cache, heads)
        if not heads.n_heads:
            return
        tiling, cell = self._tiling(heads, cache.values is None, generated), _tape.Cell
        written = (out, _stride(out), _NOTHING if lse is None else lse, 0 if lse is None else _stride(lse))
        form = (heads.starts, heads.stops, heads.n_kv_heads, heads.group_parts, heads.most_queries, heads.value_dim,
                tiling.width, window, cell("positions"), *tiling.cells())
        tiled = _attention.by_tiles(*cache.types, heads.head_dim, heads.value_dim, window)
        self.tape.add("attention", _attention.attention_operation(*cache.types, tiled), q, _stride(q), *written,
                      *cache.arguments(), cell("sequences"), cell("table"), cell("table_width"), cell("first"),
                      *cache.shard, scale, heads.head_dim, *form, self.scratch() if tiled else np.zeros(0, np.uint8))
        self.tape.add("attention", _attention.merge_operation(*cache.types, tiled), *written, *form)

    def merge_shards(self, parts: np.ndarray, lses: np.ndarray, out: np.ndarray) -> None:
        """out [., heads * n] of what each place of a sharded cache gave, from the place of a sequence's block 0 on.

        ``parts`` [width, capacity, heads * n] and ``lses`` [width, capacity, heads] are outputs of :meth:`attention`:
        out = sum of exp(lse_i - lse) part_i, lse = log(sum of exp(lse_i)). A part with lse -inf counts nothing.
        """
        (width, rows, heads), n = lses.shape, out.shape[1]
        assert parts.shape == (width, rows, n) and rows == len(out) == self.capacity, f"merge_shards: {parts.shape}"
        assert parts.strides[2] == lses.strides[2] == 4 and parts.dtype == lses.dtype == _F32, "contiguous columns"
        if heads:
            steps = [step // 4 for array in (parts, lses) for step in array.strides[:2]]
            self.tape.add("attention", _attention.shards_operation(), ROWS, width, heads, n // heads, parts, lses,
                          *steps, _tape.Cell("sequences"), _tape.Cell("first"), out, _stride(out))

    def _check_cache(self, name: str, cache: LayerCache, heads: Heads) -> None:
        n_blocks, n_kv = cache.keys.shape[0], heads.n_kv_heads
        keys, values = cache_shape(cache.kv_type, n_blocks, n_kv, heads.head_dim, cache.kv_type_v,
                                   0 if cache.values is None else heads.value_dim)
        for array, wanted in ((cache.keys, keys), (cache.values, values)):
            assert array is None or (array.shape, array.dtype) == wanted, \
                f"{name}: a cache {array.shape} {array.dtype} for {n_kv} heads of {heads.head_dim}, {heads.value_dim}"
        assert heads.value_dim <= heads.head_dim or values is not None, \
            f"{name}: {heads.value_dim} values of keys of {heads.head_dim}"
        assert self._n_blocks in (0, n_blocks) and (self._n_blocks == 0 or self._shard == cache.shard), \
            f"{name}: caches of {self._n_blocks} and {n_blocks} blocks, shards {self._shard} and {cache.shard}"
        self._n_blocks, self._shard = n_blocks, cache.shard

    def _tiling(self, heads: Heads, of_keys: bool, generated: bool) -> _Tiling:
        width = _attention.padded(heads.value_dim, of_keys)
        key = (heads.most_rows, heads.group_parts, heads.most_queries, heads.n_kv_heads, width, generated)
        return self._tilings.setdefault(key, _Tiling(len(self._tilings), heads, width, generated))

    def run(self, rows: Rows, wanted: np.ndarray) -> None:
        """Run all operations for these rows; ``wanted`` int64 are those that ``norm(chosen=True)`` takes."""
        _held = self.begin(rows, wanted)
        self.tape.run(_policy.threads())

    def begin(self, rows: Rows, wanted: np.ndarray) -> list[np.ndarray]:
        """Set the tape's cells for a run; what is returned has to outlive it."""
        m, table = len(rows.positions), rows.block_table
        assert m <= self.capacity, f"{m} rows for a plan of {self.capacity}"
        assert table.dtype == np.int32 and table.ndim == 2 and table.flags.c_contiguous, f"table {table.shape}"
        assert rows.positions.shape == rows.sequences.shape == (m,), f"{rows.positions.shape}"
        assert rows.positions.dtype == rows.sequences.dtype == np.int32 and wanted.dtype == np.int64
        at, parts = _tape.address_of, _policy.threads()
        first = np.zeros(len(table), np.int32) if rows.first is None else rows.first
        assert first.shape == (len(table),) and first.dtype == np.int32, f"first {first.shape} for table {table.shape}"
        angles = None if self._angles is None else (m, self._angles)
        assert angles is None or rows.cos.shape == rows.sin.shape == angles, f"cos {rows.cos.shape}, not {angles}"
        values = {"rows": m, "wanted": len(wanted), "chosen": at(wanted), "positions": at(rows.positions),
                  "sequences": at(rows.sequences), "table": at(table), "table_width": table.shape[1],
                  "first": at(first), "cos": at(rows.cos), "sin": at(rows.sin), "generated": rows.generated}
        self.rows = rows
        held = [self._cut(rows, first, tiling, parts, values) for tiling in self._tilings.values()]
        if self._n_blocks and all(tiling.generated for tiling in self._tilings.values()):
            # Rows that are written alone are checked all the same
            self._tiles_of(rows, first, 1, m)
        self._n_rows = m
        self.tape.set(values)
        return [*held, first, wanted]

    def _tiles_of(self, rows: Rows, first: np.ndarray, most_rows: int, count: int) -> tuple[np.ndarray, int]:
        """First rows of tiles [n + 1] of the first ``count`` rows, and n."""
        table, tiles = rows.block_table, np.empty(count + 1, np.int64)
        n_tiles = _attention.tiles_kernel()(rows.sequences[:count], rows.positions[:count], table.reshape(-1),
                                            table.shape[1], len(table), self._n_blocks, first, *self._shard, most_rows,
                                            tiles)
        assert n_tiles >= 0, "a position that is attended to has no block in the table"
        return tiles, n_tiles

    def _cut(self, rows: Rows, first: np.ndarray, tiling: _Tiling, parts: int, values: dict[str, int]) -> np.ndarray:
        """Give the cells of a tiling their values; returns what has to outlive the run."""
        heads, at = tiling.heads, _tape.address_of
        count = rows.generated if tiling.generated else len(rows.positions)
        tiles, n_tiles = self._tiles_of(rows, first, heads.most_rows, count)
        stretches = int(rows.positions[:count].max(initial=0)) // _attention.STRETCH + 1
        queries = int(np.diff(tiles[:n_tiles + 1]).max(initial=1)) * heads.row_queries
        each = n_tiles * heads.n_kv_heads * heads.group_parts * queries * (tiling.width + 2)
        run, pieces, items = 0, 1, n_tiles * heads.n_kv_heads * heads.group_parts
        if parts > 1 and stretches > 1 and items < CROWD * parts:
            # Single stretches where their sums fit the room and are not too many to merge, else spans, else one thread.
            many = heads.group_parts > 1 and items * (stretches // _attention.SPAN) >= CROWD * parts
            for run in (_attention.SPAN,) if many else (1, _attention.SPAN):
                pieces = -(-stretches // run)
                if pieces > 1 and 4 * each * pieces <= self.scratch_nbytes:
                    break
            else:
                run, pieces = 0, 1
        given = (at(tiles), n_tiles, run, pieces, queries, at(self.sums_room(each * pieces if run else 0)))
        values.update((cell.name, value) for cell, value in zip(tiling.cells(), given, strict=True))
        return tiles

    def sums_room(self, n: int) -> np.ndarray:
        """Room for ``n`` values at least of pieces of attention."""
        if self._room.size < n:
            self._room = np.empty(n, np.float32)
        return self._room

    @property
    def room_nbytes(self) -> int:
        """Bytes that attention's split has come to take."""
        return self._room.nbytes

    def run_alone(self, rows: int, **more: int) -> None:
        """Run where none knows of a cache, rows of one sequence from place 0 on; ``more``: values of own cells."""
        zeros, at = np.zeros(max(rows, 1), np.int32), _tape.address_of
        self._n_rows, values = rows, {"rows": rows, "wanted": rows, "chosen": 0, "sequences": at(zeros)}
        self.tape.set({**values, "first": at(zeros), **more})
        self.tape.run(_policy.threads())

    def seconds(self) -> dict[str, float]:
        """Seconds in each family of operations since the plan was made, exchanges included."""
        return self.tape.seconds()


def attention_room(threads: int, value_dim: int, positions: int, scratch: int) -> int:
    """Bytes that attention may come to take beside its threads' tiles, over ``positions``; at most ``scratch``."""
    sums = 4 * _attention.QUERIES * (_attention.padded(value_dim, True) + 2)
    return min(scratch, CROWD * threads * -(-positions // _attention.STRETCH) * sums) if threads > 1 else 0


def _stride(x: np.ndarray) -> int:
    contiguous = x.ndim == 2 and (x.strides[1] == 4 or x.shape[1] <= 1 or not len(x))
    assert x.dtype == _F32 and contiguous, f"rows of {x.dtype}, shape {x.shape}, strides {x.strides}"
    return x.strides[0] // 4


def _same(name: str, x: np.ndarray, y: np.ndarray, vector: np.ndarray | None) -> None:
    assert x.shape == y.shape and (vector is None or vector.shape == x.shape[1:]), \
        f"{name}: {x.shape}, {y.shape}, {None if vector is None else vector.shape}"
