"""The slow, obvious twin of the whole model: one sequence, plain numpy, no cache tricks, any float width.

Sources: the Llama family as transformers 5 computes it (modeling_llama, _mistral, _qwen2, _qwen3,
_mixtral, _qwen3_moe, modeling_rope_utils), read once and written anew from the formulas.
Shapes: T rows (positions), H query heads, D head width; weights are [out, in] as in the files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cases import feed_forward, figures, read_safetensors


class NaiveLlama:
    """A model from config.json's content and a dict of float32 tensors by their Hugging Face names."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, np.ndarray], dtype: type = np.float64) -> None:
        self.config, self.dtype, self.f = config, dtype, figures(config)
        self.w = {name: value.astype(dtype) for name, value in tensors.items()}
        self.rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        self.theta = self.rope.get("rope_theta") or config.get("rope_theta", 10000.0)
        self.kind = self.rope.get("rope_type") or self.rope.get("type") or "default"
        self.windows = [window_of(config, layer) for layer in range(self.f["layers"])]

    @classmethod
    def from_folder(cls, folder: Path, dtype: type = np.float64) -> NaiveLlama:
        """The model in a folder that ``cases.write_folder`` or transformers wrote."""
        return cls(json.loads((folder / "config.json").read_text()), read_safetensors(folder), dtype)

    def logits(self, ids: Sequence[int], prompt: int | None = None) -> np.ndarray:
        """Logits [T, vocab] of a whole sequence, of which the first ``prompt`` ids came at once (all, if None)."""
        ids = np.asarray(ids)
        positions = np.arange(len(ids))
        lengths = np.maximum(positions + 1, len(ids) if prompt is None else prompt)
        cos, sin = self.tables(positions, lengths)
        x = self.w["model.embed_tokens.weight"][ids]
        for layer in range(self.f["layers"]):
            at = f"model.layers.{layer}."
            h = self.norm(x, at + "input_layernorm")
            x = x + self.attention(h, at + "self_attn.", cos, sin, self.windows[layer])
            h = self.norm(x, at + "post_attention_layernorm")
            x = x + self.feed_forward(h, layer, at)
        return self.head(self.norm(x, "model.norm"))

    def feed_forward(self, h: np.ndarray, layer: int, at: str) -> np.ndarray:
        if not self.f["experts"] or layer in self.f["dense"]:
            return self.gated(h, *(f"{at}mlp.{part}_proj" for part in ("gate", "up", "down")))
        (router, *_), *experts = feed_forward(self.config, layer)
        logits = self.linear(h, at + router)
        power = np.exp(logits - logits.max(axis=1, keepdims=True))
        out = np.zeros_like(h)
        for row in range(len(h)):
            best = sorted(np.argsort(-logits[row], kind="stable")[:self.f["chosen"]])
            total = power[row, best].sum() if self.f["normed"] else power[row].sum()
            for e in best:
                names = (at + name for name, *_ in experts[3 * e:3 * e + 3])
                out[row] += power[row, e] / total * self.gated(h[row:row + 1], *names)[0]
        return out

    def gated(self, h: np.ndarray, gate: str, up: str, down: str) -> np.ndarray:
        g = self.linear(h, gate)
        return self.linear(g / (1 + np.exp(-g)) * self.linear(h, up), down)

    def head(self, x: np.ndarray) -> np.ndarray:
        return x @ self.w["model.embed_tokens.weight" if self.f["tied"] else "lm_head.weight"].T

    def greedy(self, prompt: Sequence[int], n: int) -> tuple[list[int], np.ndarray]:
        """n greedy tokens after a prompt, and the logits [len(prompt) + n - 1, vocab] on the way."""
        ids = list(prompt)
        for _ in range(n):
            logits = self.logits(ids, len(prompt))
            ids.append(int(logits[-1].argmax()))
        return ids[len(prompt):], logits

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = x @ self.w[name + ".weight"].T
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return self.w[name + ".weight"] * (x / np.sqrt(mean + self.dtype(self.config.get("rms_norm_eps", 1e-6))))

    def attention(self, x: np.ndarray, at: str, cos: np.ndarray, sin: np.ndarray, window: int | None) -> np.ndarray:
        t, width = len(x), self.f["head_dim"]
        q, k, v = (self.linear(x, f"{at}{p}_proj").reshape(t, -1, width) for p in "qkv")
        if self.f["qk_norm"]:
            q, k = self.norm(q, at + "q_norm"), self.norm(k, at + "k_norm")
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        row, column = np.arange(t)[:, None], np.arange(t)[None, :]
        seen = (column <= row) & (column > row - (window or t))
        out = np.empty_like(q)
        for head in range(self.f["heads"]):
            kv = head // (self.f["heads"] // self.f["kv_heads"])
            scores = np.where(seen, q[:, head] @ k[:, kv].T / self.dtype(math.sqrt(width)), -np.inf)
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = scores / scores.sum(axis=1, keepdims=True) @ v[:, kv]
        return self.linear(out.reshape(t, -1), at + "o_proj")

    def tables(self, positions: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines [T, D / 2] of rows whose sequences then had ``lengths`` tokens (for dynamic)."""
        frequencies = np.stack([self.frequencies(int(length)) for length in lengths])
        # The reference multiplies in float32; at long positions a wider type would part from it.
        angles = (positions[:, None].astype(np.float32) * frequencies.astype(np.float32)).astype(self.dtype)
        scale = self.dtype(yarn_magnitude(self.rope, self.config) if self.kind == "yarn" else 1.0)
        return np.cos(angles) * scale, np.sin(angles) * scale

    def frequencies(self, length: int) -> np.ndarray:
        """Radians a position [D / 2] for a sequence of ``length`` tokens."""
        width, theta, rope = self.f["head_dim"], self.theta, self.rope
        exponents = np.arange(0, width, 2) / width
        if self.kind == "dynamic":
            limit = self.config["max_position_embeddings"]
            stretch = rope["factor"] * max(length, limit) / limit - (rope["factor"] - 1)
            return (theta * stretch ** (width / (width - 2))) ** -exponents
        base = theta ** -exponents
        if self.kind == "linear":
            return base / rope["factor"]
        if self.kind == "llama3":
            return llama3(base, rope)
        if self.kind == "yarn":
            return yarn(base, rope, theta, width, self.config)
        assert self.kind == "default", self.kind
        return base


def window_of(config: dict[str, Any], layer: int) -> int | None:
    """The sliding window of a layer, None for all positions."""
    if config["model_type"] in ("mistral", "mixtral"):
        return config.get("sliding_window", 4096 if config["model_type"] == "mistral" else None)
    if not config.get("use_sliding_window") or layer < config.get("max_window_layers", 0):
        return None
    return config["sliding_window"]


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate the pairs (i, i + D/2) of x [T, heads, D]."""
    half = x.shape[-1] // 2
    a, b, cos, sin = x[..., :half], x[..., half:], cos[:, None, :], sin[:, None, :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def llama3(base: np.ndarray, rope: dict[str, Any]) -> np.ndarray:
    """Llama 3.1: long waves divided by the factor, short ones kept, between them interpolated."""
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    out = []
    for f in base:
        rotations = original * f / (2 * math.pi)
        share = min(max((rotations - low) / (high - low), 0.0), 1.0)
        out.append(share * f + (1 - share) * f / rope["factor"])
    return np.array(out)


def yarn(base: np.ndarray, rope: dict[str, Any], theta: float, width: int, config: dict[str, Any]) -> np.ndarray:
    """YaRN (arXiv 2309.00071): a ramp over the dimensions between kept and divided frequencies."""
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or config["max_position_embeddings"] / original

    def dimension(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / (high - low or 0.001), 0, 1)
    return base / factor * ramp + base * (1 - ramp)


def yarn_magnitude(rope: dict[str, Any], config: dict[str, Any]) -> float:
    """The factor of cosines and sines that YaRN's attention temperature comes to."""
    factor = rope.get("factor") or config["max_position_embeddings"] / rope["original_max_position_embeddings"]
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return magnitude(1.0)
