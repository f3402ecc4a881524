"""The door to all numeric kernels: shapes are checked, outputs allocated, the format's kernel picked.

Each operation has one arithmetic per format: a row's bits do not depend on the other rows, on the number
of threads or on how rows are cut into calls. Arrays are C-contiguous float32 unless said otherwise;
"strided" arrays need only contiguous rows (a slice of columns). M: rows of a batch, S: sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mpillm.errors import UsageError
from mpillm.jit import attention as _attention
from mpillm.jit import elementwise as _elementwise
from mpillm.jit import exchange as _exchange
from mpillm.jit import gemm as _gemm
from mpillm.jit import pack as _pack
from mpillm.jit import policy as _policy
from mpillm.jit import sampling as _sampling
from mpillm.jit.gemm import NOTHING as _NOTHING
from mpillm.quant.layout import FORMATS, LIMIT, PAIR, WORDS, allocate, packed_nbytes
from mpillm.quant.packed import PackedMatrix, Packer

BLOCK = _attention.BLOCK
KV_TYPES = ("f32", "f16", "bf16")
_LARGEST = {"f32": np.float32(3.4028235e38), "f16": np.float32(65504), "bf16": np.float32(3.3895314e38)}
_F32 = np.dtype(np.float32)
_ELEMENTS_PER_THREAD = 16384      # below, starting a second thread costs more than it saves

set_threads = _policy.set_threads
threads = _policy.threads


def _rows(name: str, x: np.ndarray) -> np.ndarray:
    assert x.ndim == 2 and x.dtype == _F32 and x.flags.c_contiguous, \
        f"{name}: a contiguous [rows, n] float32 array, not {x.dtype} {x.shape} with strides {x.strides}"
    return x


def _strided(name: str, x: np.ndarray) -> np.ndarray:
    assert x.ndim == 2 and x.dtype == _F32 and (x.strides[1] == 4 or x.size == 0), \
        f"{name}: [rows, n] float32 with contiguous rows, not {x.dtype} {x.shape}, strides {x.strides}"
    return x


def _parts(elements: int) -> int:
    """Threads worth starting for so many elements."""
    count = _policy.threads()
    return 1 if count == 1 else max(1, min(count, elements // _ELEMENTS_PER_THREAD))


def _output(name: str, out: np.ndarray | None, shape: tuple[int, int]) -> np.ndarray:
    if out is None:
        return np.empty(shape, np.float32)
    assert out.shape == shape, f"{name}: out is {out.shape}, not {shape}"
    return _rows(name, out)


def linear(x: np.ndarray, w: PackedMatrix, bias: np.ndarray | None = None,
           out: np.ndarray | None = None) -> np.ndarray:
    """x [M, k] @ w.T + bias [n] -> [M, n]. float32 sums along k in order; q8_0 quantises x first."""
    _rows("linear", x)
    m = x.shape[0]
    assert x.shape[1] == w.k, f"linear: x is {x.shape}, the matrix has {w.k} inputs"
    out = _output("linear", out, (m, w.n))
    if bias is None:
        bias = _NOTHING
    else:
        assert bias.shape == (w.n,) and bias.dtype == _F32, f"linear: bias {bias.dtype} {bias.shape}, n {w.n}"
    if m == 0 or w.n == 0:
        return out
    if w.k == 0:
        out[:] = bias if bias.size else 0
        return out
    count = min(_policy.threads(), -(-w.n // 16))
    tail = np.empty(16 * m, np.float32) if w.n % 16 else _NOTHING
    if w.format != "q8_0":
        w.kernel(x, _NOTHING, w.data, _NOTHING, w.stride, bias, out, tail, count)
        return out
    codes, scales = np.empty(x.shape, np.int16), np.empty((m, w.k // 32), np.float32)
    _gemm.quantise_kernel()(x, codes, scales, min(m, _parts(x.size)))
    w.kernel(codes, scales.ravel(), w.data, w.scales, w.stride, bias, out, tail, count)
    return out


def lookup(w: PackedMatrix, ids: np.ndarray) -> np.ndarray:
    """Rows ``ids`` int64 [M] of a packed matrix, exactly -> [M, k]."""
    assert ids.dtype == np.int64 and ids.ndim == 1, f"lookup: ids {ids.dtype} {ids.shape}"
    out = np.empty((len(ids), w.k), np.float32)
    scales = _NOTHING if w.scales is None else w.scales
    bad = _pack.lookup_kernel(w.format)(w.data, scales, w.stride, PAIR[w.format], w.n,
                                        np.ascontiguousarray(ids), out)
    assert bad == 0, f"lookup: {bad} of {len(ids)} ids are outside 0 ... {w.n - 1}"
    return out


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray | None = None) -> np.ndarray:
    """x / sqrt(mean(x**2) + eps) * weight for rows of x [M, h] (strided); ``out`` may be x."""
    _strided("rms_norm", x)
    assert weight.shape == (x.shape[1],) and weight.dtype == _F32, f"rms_norm: {weight.shape}, x {x.shape}"
    out = _output("rms_norm", out, x.shape)
    _elementwise.elementwise_kernel(_elementwise.rms_norm)(x, weight, eps, out, _parts(x.size))
    return out


def head_rms_norm(x: np.ndarray, weight: np.ndarray, head_dim: int, eps: float) -> None:
    """rms_norm of each head of x [M, heads * head_dim] (strided), in place."""
    _strided("head_rms_norm", x)
    assert weight.shape == (head_dim,) and x.shape[1] % head_dim == 0, \
        f"head_rms_norm: x {x.shape}, weight {weight.shape}, head_dim {head_dim}"
    _elementwise.elementwise_kernel(_elementwise.head_rms_norm)(x, weight, head_dim, eps)


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, head_dim: int) -> None:
    """Rotate pairs (i, i + head_dim/2) of each head of x [M, heads * head_dim] (strided), in place.

    cos, sin [M, head_dim / 2]: those of each row's position.
    """
    _strided("rope", x)
    assert head_dim % 2 == 0 and x.shape[1] % head_dim == 0, f"rope: x {x.shape}, head_dim {head_dim}"
    assert cos.shape == sin.shape == (x.shape[0], head_dim // 2), f"rope: cos {cos.shape}, x {x.shape}"
    _elementwise.elementwise_kernel(_elementwise.rope)(x, cos, sin, head_dim)


def silu_mul(gate_up: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """silu(gate) * up for rows [gate f | up f] of gate_up [M, 2f] -> [M, f]."""
    _rows("silu_mul", gate_up)
    assert gate_up.shape[1] % 2 == 0, f"silu_mul: {gate_up.shape}"
    out = _output("silu_mul", out, (gate_up.shape[0], gate_up.shape[1] // 2))
    _elementwise.elementwise_kernel(_elementwise.silu_mul)(gate_up, out, _parts(4 * out.size))
    return out


def add_in_place(x: np.ndarray, y: np.ndarray) -> None:
    """x += y."""
    assert x.shape == y.shape, f"add_in_place: {x.shape} and {y.shape}"
    np.add(x, y, out=x)


def largest(kv_type: str) -> float:
    """The largest finite value of a cache type."""
    _check_kv(kv_type)
    return float(_LARGEST[kv_type])


def _check_kv(kv_type: str) -> None:
    if kv_type not in KV_TYPES:
        raise UsageError(f"kv-type cannot be {kv_type!r}: use one of {', '.join(KV_TYPES)}")


def cache_shape(kv_type: str, n_blocks: int, kv_heads: int,
                head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
    """(shape of K, shape of V, dtype) of one layer's cache; f16 and bf16 are kept as 16-bit words."""
    _check_kv(kv_type)
    assert head_dim % 2 == 0, f"head_dim {head_dim} is odd"
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


def _check_rows(name: str, m: int, row_seq: np.ndarray, positions: np.ndarray,
                table: np.ndarray) -> None:
    assert row_seq.shape == positions.shape == (m,), f"{name}: {m} rows, {row_seq.shape}, {positions.shape}"
    assert row_seq.dtype == positions.dtype == table.dtype == np.int32, f"{name}: indices must be int32"
    assert table.ndim == 2, f"{name}: block table {table.shape}"


def cache_write(k_cache: np.ndarray, v_cache: np.ndarray, kv_type: str, k: np.ndarray, v: np.ndarray,
                row_seq: np.ndarray, positions: np.ndarray, block_table: np.ndarray) -> int:
    """Write k, v [M, kv * head_dim] (strided) at (row_seq[m], positions[m]), rounding to nearest even.

    Returns how many values were not finite or beyond the type's range: an error of the model; they are
    stored as the largest finite value, NaN as NaN.
    """
    _strided("cache_write", k), _strided("cache_write", v)
    _check_rows("cache_write", k.shape[0], row_seq, positions, block_table)
    assert k.shape == v.shape, f"cache_write: k {k.shape}, v {v.shape}"
    kv_heads = k_cache.shape[1]
    if kv_heads == 0:
        return 0
    size = k.shape[1] // kv_heads
    _check_caches("cache_write", k_cache, v_cache, kv_type, size)
    losses = np.zeros(max(1, min(len(k), _parts(k.size))), np.int64)
    _attention.cache_write_kernel(kv_type)(
        k_cache.reshape(-1), v_cache.reshape(-1), PAIR[kv_type], LIMIT[kv_type], _LARGEST[kv_type], k, v,
        size, row_seq, positions, block_table, k_cache.shape[0], losses)
    assert losses.min() >= 0, "cache_write: a row's position has no block in the table"
    return int(losses.sum())


def _check_caches(name: str, k_cache: np.ndarray, v_cache: np.ndarray, kv_type: str, size: int) -> None:
    pair = PAIR[kv_type]
    assert k_cache.dtype == v_cache.dtype == WORDS[kv_type], f"{name}: {k_cache.dtype} for {kv_type}"
    assert k_cache.shape[3] * pair == size and v_cache.shape[2] == -(-size // 16), \
        f"{name}: head_dim {size}, caches {k_cache.shape}, {v_cache.shape}"
    assert k_cache.flags.c_contiguous and v_cache.flags.c_contiguous, f"{name}: caches are not contiguous"


def attention(q: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray, kv_type: str,
              head_kv_start: np.ndarray, head_kv_stop: np.ndarray, row_seq: np.ndarray,
              positions: np.ndarray, block_table: np.ndarray, scale: float, window: int = 0,
              out: np.ndarray | None = None) -> np.ndarray:
    """softmax(scale * q K) V for q [M, Hq * head_dim] (strided) -> [M, Hq * head_dim].

    Row m attends to positions max(0, p - window + 1) ... p of sequence row_seq[m], p = positions[m] (window
    0: from 0). Query heads head_kv_start[j] ... head_kv_stop[j] - 1 use KV head j, each head one; int32 [kv].
    Rows of consecutive positions of a sequence that stand together are worked on together.
    """
    _strided("attention", q)
    _check_rows("attention", q.shape[0], row_seq, positions, block_table)
    kv_heads, size = k_cache.shape[1], k_cache.shape[3] * PAIR[kv_type]
    _check_caches("attention", k_cache, v_cache, kv_type, size)
    assert len(head_kv_start) == len(head_kv_stop) == kv_heads, f"attention: {kv_heads} KV heads"
    out = _output("attention", out, q.shape)
    if out.size == 0:
        return out
    tiles = _attention.attention_kernel(kv_type)(
        q, k_cache.reshape(-1), v_cache.reshape(-1), head_kv_start, head_kv_stop, row_seq, positions,
        block_table, k_cache.shape[0], scale, size, window, out, _policy.threads())
    assert tiles != -2, f"attention: heads {head_kv_start} ... {head_kv_stop}, q {q.shape}, size {size}"
    assert tiles > 0, "attention: a position that is attended to has no block in the table"
    return out


def log_sum_exp_parts(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(maximum f32 [S], sum of exp(x - maximum) f64 [S]) of logits [S, V]; the sum is NaN if a logit is."""
    _rows("log_sum_exp_parts", logits)
    rows = len(logits)
    maxima, sums = np.empty(rows, np.float32), np.empty(rows, np.float64)
    kernel = _sampling.sampling_kernel(_sampling.log_sum_exp_parts)
    kernel(logits, maxima, sums, max(1, min(rows, _parts(logits.size))))
    return maxima, sums


def top_k(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(values f32 [S, k'], ids int64 [S, k']) of the k' = min(k, V) largest, descending, ties by lower id.

    NaN ranks as -inf.
    """
    _rows("top_k", logits)
    rows, count = len(logits), max(0, min(k, logits.shape[1]))
    values, ids = np.empty((rows, count), np.float32), np.empty((rows, count), np.int64)
    if count and rows:
        kernel = _sampling.sampling_kernel(_sampling.top_k)
        kernel(logits, values, ids, max(1, min(rows, _parts(logits.size))))
    return values, ids


def gumbel_best(logits: np.ndarray, temperature: float, floor: float, seed: int, position: int,
                first_id: int) -> tuple[float, int]:
    """(score, index) of the largest logit / temperature + noise(seed, position, first_id + index).

    Logits [V] below ``floor``, -inf and NaN are left out; (-inf, -1) if none is left.
    """
    assert logits.ndim == 1 and logits.dtype == _F32 and logits.flags.c_contiguous, f"logits {logits.shape}"
    assert temperature > 0, f"gumbel_best: temperature {temperature}"
    kernel = _sampling.sampling_kernel(_sampling.gumbel_best)
    return kernel(logits, temperature, floor, np.uint64(seed & 0xFFFFFFFFFFFFFFFF), position, first_id)


def gumbel_noise(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """The noise of gumbel_best for token ids int64 [n] -> f64 [n]."""
    ids = np.ascontiguousarray(ids, np.int64)
    noise = np.empty(len(ids), np.float64)
    kernel = _sampling.sampling_kernel(_sampling.gumbel_noise)
    kernel(np.uint64(seed & 0xFFFFFFFFFFFFFFFF), position, ids, noise)
    return noise


def warm_up(weight_formats: Iterable[str], kv_type: str) -> None:
    """Compile or load every kernel that a run with these formats needs; call set_threads() before."""
    _check_kv(kv_type)
    for name in weight_formats:
        _gemm.linear_kernel(name), _pack.pack_kernel(name), _pack.lookup_kernel(name)
        if name == "q8_0":
            _gemm.quantise_kernel(), _pack.pack_codes_kernel()
    _attention.attention_kernel(kv_type), _attention.cache_write_kernel(kv_type)
    for elementwise in (_elementwise.rms_norm, _elementwise.head_rms_norm, _elementwise.rope,
                        _elementwise.silu_mul):
        _elementwise.elementwise_kernel(elementwise)
    for sampling in _sampling.SIGNATURES:
        _sampling.sampling_kernel(sampling)
    _exchange.warm_up()


__all__ = ["BLOCK", "FORMATS", "KV_TYPES", "PackedMatrix", "Packer", "add_in_place", "allocate_cache",
           "attention", "cache_block_nbytes", "cache_shape", "cache_write", "gumbel_best", "gumbel_noise",
           "head_rms_norm", "linear", "log_sum_exp_parts", "lookup", "packed_nbytes", "rms_norm", "rope",
           "set_threads", "silu_mul", "threads", "top_k", "warm_up"]
