"""Tensors of multi-head latent attention: names, shapes, and where files keep them.

``kv_b_proj`` [heads * (nope + value), kv_rank] has the key part and the value part of a head below each other, head by
head. GGUF files of architecture deepseek2 hold it whole (``attn_kv_b``), or cut in two: ``attn_k_b``, the key parts
transposed, [heads, kv_rank, nope] or these below each other, and ``attn_v_b`` [heads, value, kv_rank] likewise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mpillm.errors import ModelError
from mpillm.formats.checkpoint import Checkpoint, Rows, indices
from mpillm.models.config import ModelConfig

KV_B = "self_attn.kv_b_proj.weight"
GGUF_LATENT = {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
ROTATED = ("q_proj", "q_b_proj", "kv_a_proj_with_mqa")      # rows in pairs
KEYS, VALUES = "attn_k_b.weight", "attn_v_b.weight"      # kv_b_proj in two


def latent_matrices(c: ModelConfig) -> dict[str, tuple[int, int, bool]]:
    """Names within a layer of the matrices of attention: outputs, inputs, and whether there is a bias."""
    queries, row = c.n_heads * c.head_dim, c.kv_rank + c.rope_dim
    found = {"self_attn.q_proj": (queries, c.hidden, False)} if not c.q_rank else {
        "self_attn.q_a_proj": (c.q_rank, c.hidden, c.qkv_bias), "self_attn.q_b_proj": (queries, c.q_rank, False)}
    return found | {
        "self_attn.kv_a_proj_with_mqa": (row, c.hidden, c.qkv_bias),
        "self_attn.kv_b_proj": (c.n_heads * (c.nope_dim + c.value_dim), c.kv_rank, False),
        "self_attn.o_proj": (c.hidden, c.n_heads * c.value_dim, c.output_bias)}


def latent_norms(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names within a layer of the norms of the latents."""
    found: dict[str, tuple[int, ...]] = {"self_attn.kv_a_layernorm.weight": (c.kv_rank,)}
    if c.q_rank:
        found["self_attn.q_a_layernorm.weight"] = (c.q_rank,)
    return found


def neighbours_apart(c: ModelConfig, name: str, rows: np.ndarray) -> np.ndarray:
    """The rows of a file that has rotary pairs as neighbours for ``rows`` with the halves of the pairs apart.

    ``name`` is one of ROTATED. Of each query head, and behind the latent, the last rows are rotated.
    """
    if ".kv_a_proj_with_mqa." in name:
        return _apart(rows, c.kv_rank, c.rope_dim)
    head, within = np.divmod(rows, c.head_dim)
    return head * c.head_dim + _apart(within, c.nope_dim, c.rope_dim)


def _apart(rows: np.ndarray, start: int, width: int) -> np.ndarray:
    """Row ``start + half * width / 2 + pair`` is the file's ``start + 2 pair + half``."""
    half, pair = np.divmod(rows - start, width // 2)
    return np.where(rows < start, rows, start + 2 * pair + half)


@dataclass(frozen=True)
class Halves:
    """A layer's ``kv_b_proj`` that a file holds in two tensors."""

    keys: str
    values: str

    @classmethod
    def of(cls, checkpoint: Checkpoint, layer: str) -> Halves | None:
        """Those of a layer, if both are there and the whole is not."""
        at = f"blk.{layer}."
        there = checkpoint.kind == "gguf" and at + "attn_kv_b.weight" not in checkpoint.tensors and \
            at + KEYS in checkpoint.tensors and at + VALUES in checkpoint.tensors
        return cls(at + KEYS, at + VALUES) if there else None

    def check(self, checkpoint: Checkpoint, c: ModelConfig) -> None:
        """Raise ModelError unless both have a shape that the figures give."""
        for name, shape in ((self.keys, (c.n_heads, c.kv_rank, c.nope_dim)),
                            (self.values, (c.n_heads, c.value_dim, c.kv_rank))):
            found, flat = checkpoint.tensors[name].shape, (shape[0] * shape[1], shape[2])
            if found not in (shape, flat):
                raise ModelError(f"{checkpoint.file_of(name)}: tensor {name} has shape {found}, but the model's "
                                 f"figures give {shape} or {flat}")
            reason = checkpoint.unreadable(name)
            if reason is not None:
                raise ModelError(reason)

    def read(self, checkpoint: Checkpoint, c: ModelConfig, heads: range) -> tuple[np.ndarray, np.ndarray]:
        """float32 key parts [heads, nope, kv_rank] and value parts [heads, value, kv_rank]."""
        def stacked(name: str, height: int) -> np.ndarray:
            found = checkpoint.read(name, range(heads.start * height, heads.stop * height))
            return found.reshape(len(heads), height, found.shape[1])

        return np.ascontiguousarray(stacked(self.keys, c.kv_rank).swapaxes(1, 2)), stacked(self.values, c.value_dim)

    def read_rows(self, checkpoint: Checkpoint, c: ModelConfig, name: str, rows: Rows,
                  cols: range | None) -> np.ndarray:
        """float32 [rows, cols] of the whole ``kv_b_proj``, whose full name is ``name``."""
        height = c.nope_dim + c.value_dim
        index = indices(name, rows, c.n_heads * height)
        if not len(index):
            return np.empty((0, c.kv_rank if cols is None else len(cols)), np.float32)
        heads = range(int(index.min()) // height, int(index.max()) // height + 1)
        whole = np.concatenate(self.read(checkpoint, c, heads), axis=1).reshape(-1, c.kv_rank)
        picked = whole[index - heads.start * height]
        return picked if cols is None else np.ascontiguousarray(picked[:, cols.start:cols.stop])


def ahead_of(config: ModelConfig, names: Iterable[str]) -> list[str]:
    """Those of a checkpoint's tensors that belong to layers behind the model's last: they predict further tokens."""
    found = ((name, re.match(r"(?:model\.layers|blk)\.(\d+)\.", name)) for name in names)
    return [name for name, match in found if match and int(match[1]) >= config.n_layers]
