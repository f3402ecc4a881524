"""The door to all numeric kernels: shapes are checked, outputs allocated, the format's kernel picked.

Each operation has one arithmetic per format: a row's bits do not depend on the other rows, on the number
of threads or on how rows are cut into calls. Arrays are C-contiguous float32 unless said otherwise;
"strided" arrays need only contiguous rows (a slice of columns). M: rows of a batch, S: sequences.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import numpy as np

from mpillm import experts as _experts
from mpillm import latent as _latent
from mpillm.cache import (
    BLOCK,
    KV_TYPES,
    Heads,
    LayerCache,
    Rows,
    allocate_cache,
    cache_block_nbytes,
    cache_shape,
    check_kv,
)
from mpillm.experts import Experts, Router, record_experts, slot_bytes
from mpillm.jit import attention as _attention
from mpillm.jit import cache_rows as _cache_rows
from mpillm.jit import elementwise as _elementwise
from mpillm.jit import exchange as _exchange
from mpillm.jit import fused as _fused
from mpillm.jit import gemm as _gemm
from mpillm.jit import latent_prompt as _latent_prompt
from mpillm.jit import pack as _pack
from mpillm.jit import pack_blocks as _pack_blocks
from mpillm.jit import policy as _policy
from mpillm.jit import sampling as _sampling
from mpillm.jit import selftest as _selftest
from mpillm.jit import tape as _tape
from mpillm.jit.attention import by_tiles
from mpillm.jit.gemm import NOTHING as _NOTHING
from mpillm.jit.isa import select as _select
from mpillm.jit.isa.quantised import SHAPES as _SHAPES
from mpillm.jit.moe import kind_of as prepared_kind
from mpillm.latent import LatentHeads, record_by_heads, record_rows, record_spread
from mpillm.latent_prompt import STRETCH, PromptMatrices, prompt_nbytes, prompt_together_nbytes, record_prompts
from mpillm.plan import GENERATED, ROOM_WIDTH, ROWS, SCRATCH, TILES, WANTED, HeadNorms, Plan, attention_room
from mpillm.quant.layout import FORMATS, PAIR, QUANTISED, WORDS, packed_nbytes, word_bits
from mpillm.quant.packed import PackedMatrix, Packer
from mpillm.turns import PlanPart, run_in_turns

F = TypeVar("F", bound=Callable[..., Any])
_F32 = np.dtype(np.float32)
_ELEMENTS_PER_THREAD = 16384      # below, starting a second thread costs more than it saves

set_threads = _policy.set_threads
threads = _policy.threads
tested_tier, lowest_tier, set_tier = _selftest.tested_tier, _select.lowest, _select.set_tier
tier, prepare_threads, address_of = _select.tier, _tape.prepare, _tape.address_of


class Spent:
    """Seconds in kernels that are called by themselves, by family, since the start; a plan counts its own."""

    seconds = {"sampling": 0.0, "lookup": 0.0}

    @classmethod
    def timed(cls, family: str) -> Callable[[F], F]:
        """Count the time of a function."""
        def decorate(function: F) -> F:
            @functools.wraps(function)
            def timed(*arguments: Any) -> Any:
                began = time.perf_counter()
                result = function(*arguments)
                cls.seconds[family] += time.perf_counter() - began
                return result

            return cast(F, timed)

        return decorate


def _rows(name: str, x: np.ndarray) -> np.ndarray:
    assert x.ndim == 2 and x.dtype == _F32 and x.flags.c_contiguous, \
        f"{name}: a contiguous [rows, n] float32 array, not {x.dtype} {x.shape} with strides {x.strides}"
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
           out: np.ndarray | None = None, fast: bool = False) -> np.ndarray:
    """x [M, k] @ w.T + bias [n] -> [M, n]. float32 sums along k in order; quantised formats quantise x first."""
    _rows("linear", x)
    m = x.shape[0]
    out = _output("linear", out, (m, w.n))
    if m == 0 or w.n == 0:
        return out
    plan = Plan(m, fast)
    plan.linear(x, w, bias, out)
    plan.run_alone(m)
    return out


@Spent.timed("lookup")
def lookup(w: PackedMatrix, ids: np.ndarray) -> np.ndarray:
    """Rows ``ids`` int64 [M] of a packed matrix, exactly -> [M, k]."""
    assert ids.dtype == np.int64 and ids.ndim == 1, f"lookup: ids {ids.dtype} {ids.shape}"
    out = np.empty((len(ids), w.k), np.float32)
    ids = np.ascontiguousarray(ids)
    if w.format in QUANTISED:
        shape, scales = _SHAPES[w.format], w.scales
        assert scales is not None, f"a {w.format} matrix has scales"
        bad = _pack_blocks.lookup_blocks_kernel()(
            shape.number, w.data.view(np.uint8), shape.codes, scales, scales.view(np.uint8), shape.words,
            shape.super_words, w.phase, w.n, ids, out)
    else:
        bad = _pack.lookup_kernel(w.format)(w.data, _NOTHING, w.stride, PAIR[w.format], w.n, ids, out)
    assert bad == 0, f"lookup: {bad} of {len(ids)} ids are outside 0 ... {w.n - 1}"
    return out


@Spent.timed("sampling")
def log_sum_exp_parts(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(maximum f32 [S], sum of exp(x - maximum) f64 [S]) of logits [S, V]; the sum is NaN if a logit is."""
    _rows("log_sum_exp_parts", logits)
    rows = len(logits)
    maxima, sums = np.empty(rows, np.float32), np.empty(rows, np.float64)
    kernel = _sampling.sampling_kernel(_sampling.log_sum_exp_parts)
    kernel(logits, maxima, sums, max(1, min(rows, _parts(logits.size))))
    return maxima, sums


@Spent.timed("sampling")
def best_parts(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of logits [S, V], V > 0, and the maximum's id int64 [S], ties by lower id: top_k of 1 in one pass."""
    _rows("best_parts", logits)
    rows = len(logits)
    maxima, sums, places = np.empty(rows, np.float32), np.empty(rows, np.float64), np.empty(rows, np.int64)
    kernel = _sampling.sampling_kernel(_sampling.best_parts)
    kernel(logits, maxima, sums, places, max(1, min(rows, _parts(logits.size))))
    return maxima, sums, places


@Spent.timed("sampling")
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


@Spent.timed("sampling")
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


def warm_up(weight_formats: Iterable[str], kv_type: str, fast: bool = False, part: int = 0, parts: int = 1,
            experts: bool = False, kv_type_v: str = "", mla: int | None = None,
            stop: Callable[[], bool] = lambda: False) -> None:
    """Compile or load what a run with these formats needs, or the ``part``-th share of it; after set_threads().

    ``experts``: the model has some. ``kv_type_v``: of cached values, "" for that of keys. ``mla``: the mode of latent
    attention, None where K and V are those of each KV head. ``stop`` is asked before every kernel.
    """
    for kind in (kv_type, kv_type_v or kv_type):
        check_kv(kind)
    names = list(weight_formats)
    kv_types = kv_type, "" if mla in (2, 3) else kv_type_v or kv_type
    needed = _needed(names, kv_types, fast)
    if experts:
        needed = [*_experts.warm_up(names), functools.partial(_warm_up_linear, "f32", False), *needed]
    if mla is None:
        needed += _fused_with_cache(names, kv_types, fast)
    else:
        tiled = by_tiles(kv_type, kv_type, 192, 128, 0)
        prompts = _latent_prompt.warm_up(kv_type, tiled) if mla == 3 else []
        needed = [*prompts, *_latent.warm_up(names), functools.partial(_cache_rows.cache_write_operation, *kv_types),
                  *needed]
    for make in needed[part::parts]:
        if stop():
            return
        make()


def _needed(weight_formats: list[str], kv_types: tuple[str, str], fast: bool) -> list[Callable[[], Any]]:
    """What makes each kernel of a run, those that take long to compile first."""
    tiled = by_tiles(*kv_types, 64, 64, 0)       # usual sizes
    made: list[Callable[[], Any]] = [lambda: _attention.attention_operation(*kv_types, tiled), _exchange.warm_up]
    for name in weight_formats:
        fast_here = fast and _select.at_least("avx512") and name in QUANTISED
        made += [functools.partial(_fused.gated_operation, name, fast_here),
                 functools.partial(_warm_up_linear, name, fast)]
        made += [_gemm.quantise_operation, _pack_blocks.pack_blocks_kernel, _pack_blocks.lookup_blocks_kernel,
                 _pack_blocks.encode_kernel] if name in QUANTISED else [
            functools.partial(_pack.pack_kernel, name), functools.partial(_pack.lookup_kernel, name),
            functools.partial(_pack.pack_words_kernel, word_bits(name))]
    made += [functools.partial(_elementwise.operation, name) for name in _elementwise.KINDS]
    made += [functools.partial(_sampling.sampling_kernel, sampling) for sampling in _sampling.SIGNATURES]
    return [*made, lambda: _attention.merge_operation(*kv_types, tiled), _attention.shards_operation,
            _attention.tiles_kernel, _tape.warm_up]


def _fused_with_cache(weight_formats: list[str], kv_types: tuple[str, str], fast: bool) -> list[Callable[[], Any]]:
    """What makes queries, keys and values and writes the cache, where K and V are those of each KV head."""
    fast = fast and _select.at_least("avx512")
    return [*(functools.partial(_fused.heads_operation, name, *kv_types, fast and name in QUANTISED)
              for name in weight_formats), functools.partial(_cache_rows.rope_write_operation, *kv_types)]


def _warm_up_linear(name: str, fast: bool) -> None:
    plan = Plan(1, fast)
    packed = PackedMatrix(name, 16, 32, np.zeros(0, WORDS[name]), np.zeros(0, np.int16))
    plan.linear(np.zeros((1, 32), np.float32), packed, None, np.zeros((1, 16), np.float32))


__all__ = ["BLOCK", "FORMATS", "GENERATED", "KV_TYPES", "QUANTISED", "ROOM_WIDTH", "ROWS", "SCRATCH", "STRETCH",
           "TILES", "WANTED", "Experts", "HeadNorms", "Heads", "LatentHeads", "LayerCache", "PackedMatrix", "Packer",
           "Plan", "PlanPart", "PromptMatrices", "Router", "Rows", "Spent", "address_of", "allocate_cache",
           "attention_room", "by_tiles", "cache_block_nbytes", "cache_shape", "gumbel_best", "gumbel_noise", "linear",
           "log_sum_exp_parts", "lookup", "lowest_tier", "packed_nbytes", "prepare_threads", "prepared_kind",
           "prompt_nbytes", "prompt_together_nbytes", "record_by_heads", "record_experts", "record_prompts",
           "record_rows", "record_spread", "run_in_turns", "set_threads", "set_tier", "slot_bytes", "tested_tier",
           "threads", "tier", "top_k", "warm_up"]
