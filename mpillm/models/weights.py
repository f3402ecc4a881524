"""A model's tensors under one set of names, those of Hugging Face, whatever the file calls them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from mpillm.errors import ModelError
from mpillm.formats.checkpoint import Checkpoint, Rows, TensorInfo, indices
from mpillm.models import latent_names as latent
from mpillm.models.config import ModelConfig
from mpillm.models.expert_names import CORRECTION, GGUF_SHARED, Place, expert_shapes, is_expert, places
from mpillm.models.latent_names import Halves

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

# Hugging Face's name of a layer's part to GGUF's.
GGUF_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", **latent.GGUF_LATENT, **GGUF_SHARED,
}
GGUF_TOP = {EMBEDDING: "token_embd.weight", NORM: "output_norm.weight", HEAD: "output.weight"}

# Tensors that may be there beside a model's own and change nothing that is computed.
_HARMLESS = ("rope_freqs.weight", ".attn_rot_embd", "rotary_emb.inv_freq", "rotary_emb.cos_cached",
             "rotary_emb.sin_cached", "masked_bias", ".input_scale", ".k_scale", ".v_scale")


def layer_shapes(config: ModelConfig, layer: int = 0) -> dict[str, tuple[int, ...]]:
    """Names within a layer, and the shapes (outputs, inputs) that the figures give."""
    c = config
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    matrices = latent.latent_matrices(c) if c.latent else {
        "self_attn.q_proj": (q, c.hidden, c.qkv_bias), "self_attn.k_proj": (kv, c.hidden, c.qkv_bias),
        "self_attn.v_proj": (kv, c.hidden, c.qkv_bias), "self_attn.o_proj": (c.hidden, q, c.output_bias),
    }
    if not c.has_experts(layer):
        matrices |= {"mlp.gate_proj": (c.intermediate, c.hidden, c.mlp_bias),
                     "mlp.up_proj": (c.intermediate, c.hidden, c.mlp_bias),
                     "mlp.down_proj": (c.hidden, c.intermediate, c.mlp_bias)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (n_out, n_in, biased) in matrices.items():
        shapes[name + ".weight"] = (n_out, n_in)
        if biased:
            shapes[name + ".bias"] = (n_out,)
    shapes["input_layernorm.weight"] = shapes["post_attention_layernorm.weight"] = (c.hidden,)
    if c.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (c.head_dim,)
    if c.latent:
        shapes |= latent.latent_norms(c)
    return shapes | (expert_shapes(c) if c.has_experts(layer) else {})


def expected(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that a model of these figures computes with."""
    yield EMBEDDING, (config.vocab, config.hidden)
    for i in range(config.n_layers):
        for name, shape in layer_shapes(config, i).items():
            yield f"model.layers.{i}.{name}", shape
    yield NORM, (config.hidden,)
    if not config.tied:
        yield HEAD, (config.vocab, config.hidden)


class Weights:
    """Reads tensors by Hugging Face names, with rows in Hugging Face order.

    Only tensors that ``config`` calls for are there: a bias that the architecture does not use is not.
    Raises ModelError as the checkpoint does.
    """

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self.checkpoint, self.config = checkpoint, config
        self._shapes = dict(expected(config))
        self._kinds: dict[tuple[str, ...], frozenset[str]] = {}
        self._places = {name: self._place(name) for name in self._shapes if is_expert(name)}
        self._halves = {name: halves for name in self._shapes if name.endswith("." + latent.KV_B)
                        and (halves := Halves.of(checkpoint, name.split(".", 3)[2])) is not None}
        self._stored = {name: stored for name in self._shapes
                        if (stored := self._stored_name(name)) in checkpoint.tensors}

    def _place(self, name: str) -> Place:
        """Where the file has a tensor of experts, or would be expected to have it."""
        found = places(self.config, self.checkpoint.kind, name)
        return next((place for place in found if place.name in self.checkpoint.tensors), found[0])

    def _stored_name(self, name: str) -> str:
        if name in self._places:
            return self._places[name].name
        if name in self._halves:
            return self._halves[name].keys
        if self.checkpoint.kind == "gguf":
            return gguf_name(name)
        # transformers ties to whichever of the two is there
        if name == EMBEDDING and self.config.tied and name not in self.checkpoint.tensors:
            return HEAD
        return name

    def has(self, name: str) -> bool:
        """Whether the model has, and uses, tensor ``name``."""
        return name in self._stored

    def groups(self, name: str) -> tuple[str, ...]:
        """The groups of a weight recipe (quant/recipe.py) that tensor ``name`` belongs to, the closest first."""
        if name == EMBEDDING:        # a tied model multiplies by it in every step: it is a head above all
            return ("head", "embedding") if self.config.tied else ("embedding",)
        if name == HEAD:
            return ("head",)
        if ".self_attn." in name:
            return ("attn",)
        for part, group in ((".shared_expert", "shared"), (".experts.", "experts")):
            if part in name:
                return group, "ffn"
        return ("ffn",)

    def info(self, name: str) -> TensorInfo:
        """Shape and stored type of a tensor; of one that is stored in halves the key parts' type."""
        info = self.checkpoint.tensors[self._find(name)]
        own = name in self._places or name in self._halves
        return dataclasses.replace(info, name=name, shape=self._shapes[name] if own else info.shape)

    def dtypes(self, names: tuple[str, ...]) -> frozenset[str]:
        """The stored types of several tensors; a layer's experts are many and are asked for often."""
        if names not in self._kinds:
            stored = [other for name in names for other in self._all_stored(name)]
            self._kinds[names] = frozenset(self.checkpoint.tensors[name].dtype for name in stored)
        return self._kinds[names]

    def _all_stored(self, name: str) -> tuple[str, ...]:
        halves = self._halves.get(name)
        return (self._find(name),) if halves is None else (halves.keys, halves.values)

    def in_rows(self, name: str) -> bool:
        """Whether ``read_raw`` can read the tensor: a file may hold it in halves, of which one is transposed."""
        return name not in self._halves

    def read(self, name: str, rows: Rows = None, cols: range | None = None) -> np.ndarray:
        """float32 [rows, cols], or [rows] of a tensor with one axis; None: all."""
        if name in self._halves:
            return self._halves[name].read_rows(self.checkpoint, self.config, name, rows, cols)
        return self.checkpoint.read(self._find(name), self._rows(name, rows), cols)

    def read_raw(self, name: str, rows: Rows = None, cols: range | None = None,
                 room: np.ndarray | None = None) -> np.ndarray:
        """Rows of a matrix as stored, of a quantised one the blocks that cover ``cols``, uint8 [rows, bytes].

        ``room``: see Checkpoint.read_raw.
        """
        assert self.in_rows(name), f"tensor {name} is stored in halves"
        return self.checkpoint.read_raw(self._find(name), self._rows(name, rows), cols, room)

    def kv_b(self, layer: int, heads: range) -> tuple[np.ndarray, np.ndarray]:
        """The parts of a layer's ``kv_b_proj`` for ``heads``, whatever the file's layout.

        float32 [heads, nope, kv_rank], which makes keys of a latent, and [heads, value, kv_rank], which makes values.
        """
        c, name = self.config, f"model.layers.{layer}.{latent.KV_B}"
        if name in self._halves:
            return self._halves[name].read(self.checkpoint, c, heads)
        height = c.nope_dim + c.value_dim
        rows = self.read(name, range(heads.start * height, heads.stop * height)).reshape(-1, height, c.kv_rank)
        return np.ascontiguousarray(rows[:, :c.nope_dim]), np.ascontiguousarray(rows[:, c.nope_dim:])

    def check(self, config: ModelConfig | None = None) -> None:
        """Raise ModelError unless every tensor is there with its shape and a type that can be read.

        Tensors that have no place in a GGUF model are an error, as in llama.cpp; in a folder they are
        left out with a warning, as in transformers.
        """
        if config is not None and config != self.config:
            return Weights(self.checkpoint, config).check()
        optional = self._optional_biases()
        for name, shape in self._shapes.items():
            stored = self._stored.get(name)
            if name in self._halves:
                self._halves[name].check(self.checkpoint, self.config)
                continue
            if stored is None:
                if name.endswith("bias") and name.split(".", 3)[3] in optional:
                    continue
                raise ModelError(f"{self.checkpoint.path}: tensor {self._named(name)} is missing")
            found = self.checkpoint.tensors[stored].shape
            shape = self._places[name].shape if name in self._places else shape
            if found != shape:
                raise ModelError(f"{self.checkpoint.file_of(stored)}: tensor {self._named(name)} has shape "
                                 f"{found}, but the model's figures give {shape}")
            reason = self.checkpoint.unreadable(stored)
            if reason is not None:
                raise ModelError(reason)
        self._check_rest()

    def _optional_biases(self) -> set[str]:
        """Biases that no layer of a GGUF model has: they are zero. If only some lack one, it is missing."""
        if self.checkpoint.kind != "gguf":
            return set()
        there = {name.split(".", 3)[3] for name in self._stored if name.endswith("bias")}
        return {name for name in (*layer_shapes(self.config), CORRECTION) if name.endswith("bias")} - there

    def _check_rest(self) -> None:
        used = set(self._stored.values()) | {gguf_name(HEAD), HEAD}
        used |= {other for name in used & set(self.checkpoint.tensors) for other in self.checkpoint.beside(name)}
        rest = sorted(name for name in self.checkpoint.tensors
                      if name not in used and not name.endswith(_HARMLESS))
        if self.config.latent:
            rest = self._without_ahead(rest)
        if not rest:
            return
        if self.checkpoint.kind == "gguf":
            raise ModelError(f"{self.checkpoint.file_of(rest[0])}: tensor {rest[0]} has no place in a model "
                             f"of architecture {self.config.architecture}: not supported")
        names = ", ".join(rest[:3]) + (" ..." if len(rest) > 3 else "")
        self.checkpoint.warnings.append(f"{self.checkpoint.path}: left out {len(rest)} tensors that "
                                        f"{self.config.architecture} does not use: {names}")

    def _without_ahead(self, rest: list[str]) -> list[str]:
        """Without the layers that predict further tokens, which are noted, and without a second layout of kv_b."""
        ahead = set(latent.ahead_of(self.config, rest))
        if ahead:
            self.checkpoint.notes.append(f"{self.checkpoint.path}: left out {len(ahead)} tensors of layers that "
                                         "predict further tokens (MTP)")
        return [name for name in rest if name not in ahead and not name.endswith((latent.KEYS, latent.VALUES))]

    def _named(self, name: str) -> str:
        """The name in messages: the file's own, then ours where it differs."""
        stored = self._stored_name(name)
        return stored if stored == name else f"{stored} ({name})"

    def _find(self, name: str) -> str:
        stored = self._stored.get(name)
        if stored is None:
            raise ModelError(f"{self.checkpoint.path}: tensor {self._named(name)} is missing")
        return stored

    def _rows(self, name: str, rows: Rows) -> Rows:
        """Rows of the file for ``rows`` in Hugging Face order.

        Files of architecture llama (Mixtral's too) hold the rows of q and k, and their biases, with rotary pairs as
        neighbours: row 2 j + t of a head is Hugging Face's t * head_dim / 2 + j. Of experts that share a tensor, each
        one's begin at its place. DeepSeek's have the part that is rotated in neighbours too.
        """
        if name in self._places:
            place, n = self._places[name], self._shapes[name][0]
            if place.first == 0 and len(place.shape) == 2:
                return rows
            rows = range(n) if rows is None else rows
            return range(rows.start + place.first, rows.stop + place.first, rows.step) if isinstance(rows, range) else \
                np.asarray(rows, np.int64) + place.first
        if self.config.latent:
            if not self.config.interleaved or name.split(".")[-2] not in latent.ROTATED:
                return rows
            return latent.neighbours_apart(self.config, name, indices(name, rows, self._shapes[name][0]))
        if self.checkpoint.kind != "gguf" or self.config.architecture not in ("llama", "mixtral"):
            return rows
        if ".self_attn.q_proj." not in name and ".self_attn.k_proj." not in name:
            return rows
        index = np.arange(self._shapes[name][0]) if rows is None else np.asarray(rows, np.int64)
        width = self.config.head_dim
        head, within = np.divmod(index, width)
        half, pair = np.divmod(within, width // 2)
        return head * width + 2 * pair + half


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor by its Hugging Face name."""
    if name in GGUF_TOP:
        return GGUF_TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{GGUF_LAYER[part]}.{suffix}"
