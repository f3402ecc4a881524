"""Slow, obvious twins of the kernels, in float64 where rounding is not the point."""

from __future__ import annotations

import ml_dtypes
import numpy as np


def round_to(name, values):
    """f32 values as the format holds them, as f32."""
    values = np.asarray(values, np.float32)
    if name == "f32":
        return values
    if name == "q8_0":
        scales, codes = quantise(values)
        return (scales.astype(np.float32)[..., None] * codes.reshape(*scales.shape, 32)).reshape(values.shape)
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


def linear(name, x, w, bias=None):
    if name == "q8_0":
        scales, codes = quantise(x)
        x = (scales.astype(np.float64)[..., None] * codes.reshape(*scales.shape, 32)).reshape(x.shape)
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
