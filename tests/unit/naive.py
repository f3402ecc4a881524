"""Slow, obvious twins of the kernels, in float64 where rounding is not the point."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, quants

from mpillm import kernels
from mpillm.jit.attention import by_tiles


def round_to(name, values):
    """f32 values as the format holds them, as f32."""
    values = np.asarray(values, np.float32)
    if name == "f32":
        return values
    if name == "q8_0":
        scales, codes = quantise(values)
        return (scales.astype(np.float32)[..., None] * codes.reshape(*scales.shape, 32)).reshape(values.shape)
    if name in ("q4_0", "q4_1"):
        kind = GGMLQuantizationType[name.upper()]
        return quants.dequantize(quants.quantize(values, kind), kind).reshape(values.shape)
    return values.astype({"f16": np.float16, "bf16": ml_dtypes.bfloat16}[name]).astype(np.float32)


def quantise(values):
    """ggml's quantize_row_q8_0_ref: (scales f16 [..., blocks], codes int8 [..., k])."""
    blocks = values.reshape(*values.shape[:-1], -1, 32).astype(np.float32)
    d = np.abs(blocks).max(-1) / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(d == 0, np.float32(0), np.float32(1) / d)
    x = blocks * inverse[..., None]
    size = np.floor(np.abs(x))
    codes = np.sign(x) * (size + np.floor(2 * (np.abs(x) - size)))
    return d.astype(np.float16), codes.astype(np.int8).reshape(values.shape)


#: bytes of a stored block, its values, and where float16 stand in it (ggml-common.h)
STORED = {"q8_0": (34, 32, (0,)), "q4_0": (18, 32, (0,)), "q4_1": (20, 32, (0, 2)), "q4_K": (144, 256, (0, 2)),
          "q6_K": (210, 256, (208,))}


def blocks(name, raw):
    """Stored rows uint8 [n, bytes] taken apart: codes int64 [n, blocks of 32, 32], and scales, each [n, blocks, ...]:
    d, of q4_1 m; of q4_K sc, dmin, mn; of q6_K sc of 16 values each."""
    size, values, halves = STORED[name]
    rows = raw.reshape(len(raw), -1, size)
    d, *least = (rows[..., at:at + 2].copy().view(np.float16)[..., 0].astype(np.float32) for at in halves)
    wide = rows.astype(np.int64)
    if name == "q8_0":
        return rows[..., 2:].view(np.int8).astype(np.int64), d
    if values == 32:
        packed = wide[..., size - 16:]
        return np.concatenate([packed & 15, packed >> 4], -1), d, *least
    n, supers = rows.shape[:2]

    def spread(x):
        return np.repeat(x, 8, axis=1)

    if name == "q4_K":
        packed, six = wide[..., 16:].reshape(n, supers, 4, 1, 32), wide[..., 4:16]
        codes = np.concatenate([packed & 15, packed >> 4], 3).reshape(n, -1, 32)
        low = [six[..., :4] & 63, six[..., 4:8] & 63]
        high = [six[..., 8:] & 15 | six[..., :4] >> 6 << 4, six[..., 8:] >> 4 | six[..., 4:8] >> 6 << 4]
        scales = [np.concatenate(both, -1).reshape(n, -1) for both in zip(low, high, strict=True)]
        return codes, spread(d), scales[0], spread(least[0]), scales[1]
    low, high = wide[..., :128].reshape(n, supers, 2, 1, 64), wide[..., 128:192].reshape(n, supers, 2, 1, 32)
    low = np.concatenate([low & 15, low >> 4], 3).reshape(n, supers, 2, 4, 32)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], 3)
    scales = rows[..., 192:208].view(np.int8).astype(np.int64).reshape(n, -1, 2)
    return (low | high << 4).reshape(n, -1, 32), spread(d), scales


def fma(x, y, z):
    """float32 of x * y + z, rounded once (but for one case in 2**40: the product is exact in longdouble)."""
    return (x.astype(np.longdouble) * y + z).astype(np.float32)


def linear_blocks(name, x, raw, skip=0):
    """x [m, k] times stored rows from block ``skip`` on: the arithmetic of mpillm/jit/isa/quantised.py, bit for bit."""
    scales, x_codes = quantise(x)
    codes, d, *more = blocks(name, raw)
    y = np.zeros((len(x), len(raw)), np.float32)
    for block in range(x.shape[1] // 32):
        at, xq = skip + block, x_codes[:, 32 * block:32 * block + 32].astype(np.int64)
        xs, w, dd = scales[:, block, None].astype(np.float32), codes[:, at], d[:, at]
        x_sum, total = xq.sum(1, keepdims=True), xq @ w.T
        if name == "q4_0":
            total = total - 8 * x_sum
        elif name == "q4_K":
            total = total * more[0][:, at]
        elif name == "q6_K":
            halves = [xq[:, half] @ (w[:, half] - 32).T for half in (slice(0, 16), slice(16, 32))]
            total = halves[0] * more[0][:, at, 0] + halves[1] * more[0][:, at, 1]
        y = fma(total.astype(np.float32), dd * xs, y)
        if name == "q4_1":
            y = fma(x_sum.astype(np.float32) * xs, more[0][:, at], y)
        elif name == "q4_K":
            y = fma((x_sum * more[2][:, at]).astype(np.float32), -(more[1][:, at] * xs), y)
    return y


def linear(name, x, w, bias=None):
    if name.startswith("q"):
        scales, codes = quantise(x)
        x = (scales.astype(np.float64)[..., None] * codes.reshape(*scales.shape, 32)).reshape(x.shape)
    elif name == "bf16" and kernels.tier() in ("avx512", "amx"):
        x = round_to(name, x)       # these multiply bf16 by bf16
    y = x.astype(np.float64) @ round_to(name, w).astype(np.float64).T
    return y if bias is None else y + bias


def rms_norm(x, weight, eps):
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rope(x, cos, sin, size):
    heads = x.astype(np.float64).reshape(len(x), -1, size)
    left, right = heads[..., :size // 2], heads[..., size // 2:]
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([left * c - right * s, right * c + left * s], -1).reshape(x.shape)


def silu_mul(x):
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def attention_rounding(q, kv_type, kv_type_v, value_dim, window=0):
    """(scaled queries [.., head_dim] as attention multiplies them, tolerance of its outputs).

    On tiles these and the probabilities are bf16: test_attention_tiles.py has that arithmetic bit by bit.
    """
    if kv_type == "q8_0":
        return round_to("q8_0", q), 2e-5
    if by_tiles(kv_type, kv_type_v, q.shape[-1], value_dim, window):
        return round_to("bf16", q), 6e-3
    return q, 2e-5 if kv_type_v == "q8_0" else 3e-6


def attention(q, keys, values, starts, stops, row_seq, positions, scale, window):
    """keys, values: for each sequence [positions, kv heads, head_dim], as the cache holds them."""
    size = keys[0].shape[2]
    out = np.zeros(q.shape)
    for m, (seq, position) in enumerate(zip(row_seq, positions, strict=True)):
        first = max(0, position - window + 1) if window else 0
        for j, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            k = keys[seq][first:position + 1, j].astype(np.float64)
            v = values[seq][first:position + 1, j].astype(np.float64)
            for head in range(start, stop):
                columns = slice(head * size, (head + 1) * size)
                scores = k @ q[m, columns].astype(np.float64) * scale
                p = np.exp(scores - scores.max())
                out[m, columns] = p @ v / p.sum()
    return out


def top_k(row, k):
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    return [row[i] for i in order], order
