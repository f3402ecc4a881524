"""What sampling asks of a slice of the vocabulary: best candidates, sums of exponentials, noise.

Legend: S rows (sequences), V logits of a row, C candidates.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.gemm import F32_1, F32_2, ROWS, VECTOR, reads
from mpillm.jit.isa.generic import flat
from mpillm.jit.isa.lanes import any_above, bits_of, row_maximum, sum_exponentials
from mpillm.jit.parallel import in_parts

MINUS_INF = np.float32(-np.inf)
LN2_ABOVE = 0.6931471805599455      # rounded up


@policy.helper
def _sift(values, ids, at, i, n):
    """Restore the heap at ``i``: its root is the worst candidate (lowest value, then highest id)."""
    while True:
        worst = i
        for child in (2 * i + 1, 2 * i + 2):
            if child < n:
                a, b = values[at + child], values[at + worst]
                if a < b or (a == b and ids[at + child] > ids[at + worst]):
                    worst = child
        if worst == i:
            return
        values[at + i], values[at + worst] = values[at + worst], values[at + i]
        ids[at + i], ids[at + worst] = ids[at + worst], ids[at + i]
        i = worst


@policy.inlined
def _best_of_row(x, start, n, values, ids, at, count):
    """The ``count`` largest of n logits in a heap, then sorted; NaN ranks as -inf."""
    for i in range(count):
        value = x[start + i]
        values[at + i], ids[at + i] = value if value == value else MINUS_INF, i
    for i in range(count // 2 - 1, -1, -1):
        _sift(values, ids, at, i, count)
    i = count
    while i < n:
        if i + 64 <= n and not any_above(x, start + i, values[at]):
            i += 64
            continue
        for j in range(i, min(i + 64, n)):
            # An equal value has a higher id than all that are in the heap.
            if x[start + j] > values[at]:
                values[at], ids[at] = x[start + j], j
                _sift(values, ids, at, 0, count)
        i += 64
    for last in range(count - 1, 0, -1):
        values[at], values[at + last] = values[at + last], values[at]
        ids[at], ids[at + last] = ids[at + last], ids[at]
        _sift(values, ids, at, 0, last)


@policy.helper
def _top_k_part(part, parts, x, rows, n, values, ids, count):
    for s in range(part * rows // parts, (part + 1) * rows // parts):
        _best_of_row(x, s * n, n, values, ids, s * count, count)


_run_top_k = in_parts(_top_k_part)


def top_k(x_SV, values_SC, ids_SC, threads):
    """Values and indices of the C largest of each row, descending, ties by lower index."""
    rows, n = x_SV.shape
    _run_top_k((flat(x_SV), rows, n, flat(values_SC), flat(ids_SC), values_SC.shape[1]), threads)


@policy.helper
def _log_sum_exp_part(part, parts, x, rows, n, maxima, sums):
    for s in range(part * rows // parts, (part + 1) * rows // parts):
        most = row_maximum(x, s * n, n)
        maxima[s] = most
        if most == MINUS_INF:
            sums[s] = 0
            for i in range(s * n, (s + 1) * n):
                if x[i] != x[i]:
                    sums[s] = np.nan
        else:
            sums[s] = sum_exponentials(x, s * n, n, most)


_run_log_sum_exp = in_parts(_log_sum_exp_part)


def log_sum_exp_parts(x_SV, maxima, sums, threads):
    """Each row's maximum and its sum of exp(x - maximum); the sum is NaN when a logit is NaN or inf."""
    rows, n = x_SV.shape
    _run_log_sum_exp((flat(x_SV), rows, n, maxima, sums), threads)


@policy.helper
def _place_of(x, start, n, most):
    """The first index of n logits that is not below ``most``; 0 if there is none."""
    below = np.nextafter(most, MINUS_INF)
    i = 0
    while i + 64 <= n and not any_above(x, start + i, below):
        i += 64
    while i < n:
        if x[start + i] > below:
            return i
        i += 1
    return 0


@policy.helper
def _best_part(part, parts, x, rows, n, maxima, sums, places):
    _log_sum_exp_part(part, parts, x, rows, n, maxima, sums)
    for s in range(part * rows // parts, (part + 1) * rows // parts):
        places[s] = 0 if maxima[s] == MINUS_INF else _place_of(x, s * n, n, maxima[s])


_run_best = in_parts(_best_part)


def best_parts(x_SV, maxima, sums, places, threads):
    """The same, and the first index of each row's maximum."""
    rows, n = x_SV.shape
    _run_best((flat(x_SV), rows, n, maxima, sums, places), threads)


@policy.helper
def _mix(x):
    """The finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@policy.helper
def _stream(seed, position):
    golden = np.uint64(0x9E3779B97F4A7C15)
    return _mix(_mix(seed + golden) ^ (np.uint64(position) * golden + np.uint64(1)))


@policy.helper
def _bits(stream, token):
    """52 bits that depend on seed, position and token alone."""
    return _mix(stream + (np.uint64(token) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(12)


@policy.helper
def _gumbel(bits):
    """-log(-log(u)) for u = (bits + 1/2) / 2**52, which is never 0 nor 1."""
    return -math.log(-math.log((np.float64(bits) + 0.5) * 2.0 ** -52))


def gumbel_noise(seed, position, tokens, noise):
    stream = _stream(seed, position)
    for i in range(tokens.size):
        noise[i] = _gumbel(_bits(stream, tokens[i]))


def gumbel_best(x, temperature, floor, seed, position, first):
    """(best x / temperature + noise, its index) over x >= floor, ties by lower index; (-inf, -1) if none."""
    stream = _stream(seed, position)
    best, best_index = -np.inf, -1
    for i in range(x.size):
        if not x[i] >= floor or x[i] == MINUS_INF:
            continue
        scaled = np.float64(x[i]) / temperature
        bits = _bits(stream, first + i)
        # As -log(u) >= 1 - u, noise <= -log(1 - u): most candidates are out without a logarithm.
        # (1 - u) * 2**52 is at least two to its own exponent.
        exponent = (bits_of((2.0 ** 52 - 0.5) - np.float64(bits)) >> 52) - 1023
        if best_index >= 0 and scaled + (52 - exponent) * LN2_ABOVE < best:
            continue
        score = scaled + _gumbel(bits)
        if score > best or best_index < 0:
            best, best_index = score, i
    return best, best_index


INT, UNSIGNED, REAL8 = types.intp, types.uint64, types.float64
SIGNATURES = {
    top_k: (ROWS, F32_2, types.int64[:, ::1], INT),
    log_sum_exp_parts: (ROWS, F32_1, types.float64[::1], INT),
    best_parts: (ROWS, F32_1, types.float64[::1], types.int64[::1], INT),
    gumbel_noise: (UNSIGNED, INT, reads(types.int64), types.float64[::1]),
    gumbel_best: (VECTOR, REAL8, types.float32, UNSIGNED, INT, INT),
}


@lru_cache(None)
def sampling_kernel(function: Any) -> Any:
    return policy.kernel(function, function.__name__, SIGNATURES[function])
