"""Rotary positions (arXiv 2104.09864) with the scalings of the Llama family.

The frequencies follow transformers' ``modeling_rope_utils`` and, like there, are float32, and so is the
angle ``position * frequency``; a wider type would part from the published models at long contexts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched; ``kind`` none, linear, dynamic, yarn or llama3."""

    kind: str = "none"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0          # llama3
    high_freq_factor: float = 4.0         # llama3
    beta_fast: float = 32.0               # yarn
    beta_slow: float = 1.0                # yarn
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None = derived as transformers does
    mscale: float | None = None           # yarn
    mscale_all_dim: float | None = None   # yarn; DeepSeek's softmax with any kind (models/config)
    truncate: bool = True                 # yarn
    factors: tuple[float, ...] | None = None  # GGUF rope_freqs.weight: divides each frequency


class Rope:
    """Cosines and sines of rows: ``rows(positions, lengths) -> (cos, sin)``, float32 [T, head_dim / 2]."""

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling) -> None:
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        self.scale = np.float32(_attention_factor(scaling))
        self.frequencies = inverse_frequencies(head_dim, theta, scaling)

    def rows(self, positions: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tables of rows at ``positions`` int [T].

        ``lengths`` int [T] counts, for scaling that depends on it (dynamic), the tokens that the row's
        sequence has: its prompt's, or position + 1 beyond the prompt. So the result depends on neither
        the chunking of a prefill nor on a recomputation.
        """
        if self.scaling.kind == "dynamic" and (lengths > self.scaling.original_max_positions).any():
            angles = np.empty((len(positions), self.head_dim // 2), np.float32)
            for length in np.unique(lengths):
                rows = lengths == length
                frequencies = dynamic_frequencies(self.head_dim, self.theta, self.scaling, int(length))
                angles[rows] = positions[rows, None].astype(np.float32) * frequencies
        else:
            angles = positions[:, None].astype(np.float32) * self.frequencies
        return np.cos(angles) * self.scale, np.sin(angles) * self.scale

    def salt(self, length: int) -> bytes:
        """What the keys of a prompt of ``length`` tokens depend on beside its ids: prompts of another salt share none.

        Rows behind the prompt depend on their own position alone.
        """
        stretched = self.scaling.kind == "dynamic" and length > self.scaling.original_max_positions
        return length.to_bytes(8, "little") if stretched else b""


def _base(theta: float, head_dim: int) -> np.ndarray:
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    return (1.0 / np.float32(theta) ** exponents.astype(np.float32)).astype(np.float32)


def inverse_frequencies(head_dim: int, theta: float, f: RopeScaling) -> np.ndarray:
    """float32 [head_dim / 2] radians a position, for sequences up to the original length."""
    base = _base(theta, head_dim)
    if f.kind == "linear":
        base = base / np.float32(f.factor)
    elif f.kind == "yarn":
        base = _yarn(head_dim, theta, f, base)
    elif f.kind == "llama3":
        base = _llama3(f, base)
    else:
        assert f.kind in ("none", "dynamic"), f"rope scaling {f.kind!r} should have been refused"
    if f.factors is not None:
        base = base / np.asarray(f.factors, np.float32)
    return base.astype(np.float32)


def dynamic_frequencies(head_dim: int, theta: float, f: RopeScaling, length: int) -> np.ndarray:
    """NTK-aware frequencies for a sequence of ``length`` tokens (float32 [head_dim / 2])."""
    length = max(length, f.original_max_positions)
    stretch = f.factor * length / f.original_max_positions - (f.factor - 1)
    return _base(theta * stretch ** (head_dim / (head_dim - 2)), head_dim)


def _llama3(f: RopeScaling, base: np.ndarray) -> np.ndarray:
    wavelength = 2 * math.pi / base
    ratio = f.original_max_positions / wavelength
    smooth = (ratio - f.low_freq_factor) / (f.high_freq_factor - f.low_freq_factor)
    between = (1 - smooth) * base / f.factor + smooth * base
    scaled = np.where(wavelength > f.original_max_positions / f.low_freq_factor, base / f.factor, between)
    return np.where(wavelength < f.original_max_positions / f.high_freq_factor, base, scaled)


def _yarn(head_dim: int, theta: float, f: RopeScaling, base: np.ndarray) -> np.ndarray:
    """YaRN (arXiv 2309.00071): interpolate slow frequencies, keep fast ones, a ramp between."""
    def dimension_of(rotations: float) -> float:
        wave = f.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(theta))

    low, high = dimension_of(f.beta_fast), dimension_of(f.beta_slow)
    if f.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as the reference does: no division by zero
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return base / np.float32(f.factor) * ramp + base * (1 - ramp)


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's figure for the sharper attention that positions stretched by ``factor`` need."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _attention_factor(f: RopeScaling) -> float:
    if f.kind != "yarn":
        return 1.0
    if f.attention_factor is not None:
        return f.attention_factor
    if f.mscale and f.mscale_all_dim:
        return magnitude(f.factor, f.mscale) / magnitude(f.factor, f.mscale_all_dim)
    return magnitude(f.factor)
