"""The Llama family: Llama 2/3, Mistral, Mixtral, Qwen2/2.5, Qwen3 and Qwen3-MoE are one decoder with options.

Reads like the paper (arXiv 2302.13971): ``x += attention(norm(x)); x += mlp(norm(x))``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from mpillm import kernels
from mpillm.kernels import Heads, LayerCache, Rows
from mpillm.layers.attention import Attention
from mpillm.layers.embedding import VocabEmbedding, VocabHead
from mpillm.layers.exchange import KVGather
from mpillm.layers.mla import LatentAttention
from mpillm.layers.mlp import GatedMLP
from mpillm.layers.moe import ExpertMLP
from mpillm.layers.norm import RMSNorm
from mpillm.layers.rope import Rope
from mpillm.models.config import ModelConfig
from mpillm.models.load import Loader
from mpillm.models.load_experts import read_experts
from mpillm.partition import Share, Span, local_groups

# Tensors of a layer by the names of Hugging Face checkpoints; `models.weights` has GGUF's names for them.
LAYER = "model.layers.{}."
MATRICES = {   # tensors that are packed together, each with .weight and perhaps .bias
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
VECTORS = {
    "attention_norm": "input_layernorm.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
}
FINAL_NORM = "model.norm.weight"
ROOM = 64              # rows by which plans grow


class Overlap(Protocol):
    """Decides which steps are computed in halves, and runs these so that one computes while the other exchanges."""

    def cut(self, rows: Rows) -> int: ...

    def run(self, halves: Sequence[tuple[kernels.Plan, Rows]]) -> None: ...

    def took(self, rows: Rows, seconds: float) -> None: ...


@dataclass
class Block:
    """One decoder layer."""

    attention_norm: RMSNorm
    attention: Attention | LatentAttention
    mlp_norm: RMSNorm
    mlp: GatedMLP | ExpertMLP


@dataclass
class Llama:
    """A decoder whose matrices are split; the residual stream is whole everywhere."""

    embedding: VocabEmbedding
    blocks: list[Block]
    norm: RMSNorm
    head: VocabHead
    rope: Rope
    fast: bool = False      # see kernels.Plan
    prompts_apart: bool = False     # rows behind their prompts stand first in a step, and attend in another way
    scratch: int = kernels.SCRATCH
    overlap: Overlap | None = None
    _steps: dict[bool, _Step] = field(default_factory=dict, init=False, repr=False)     # by whether prompts are in it
    _past: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, rows: Rows, cache: list[LayerCache], wanted: np.ndarray) -> np.ndarray:
        """Logits float32 [len(wanted), local vocabulary] of the rows ``wanted`` (indices into the step).

        They are valid until the next call.
        """
        prompts = not self.prompts_apart or rows.generated < len(rows.tokens)
        step = self._steps.get(prompts)
        if step is None or step.cache is not cache or step.plan.capacity < len(rows.tokens):
            for kind, other in list(self._steps.items()):
                if kind == prompts or other.cache is not cache:
                    self._past = _added(self._past, other.seconds())
                    del self._steps[kind]
            step = self._steps[prompts] = self._record(cache, room_for(len(rows.tokens)), prompts)
        began = time.perf_counter()
        self.embedding(rows.tokens, step.x[:len(rows.tokens)])
        cut = 0 if self.overlap is None else self.overlap.cut(rows)
        if cut:
            self._run_halves(step, rows, wanted, cut)
        else:
            step.plan.run(rows, wanted)
        self.embedding.reducer.check()
        if self.overlap is not None:
            self.overlap.took(rows, time.perf_counter() - began)
        return step.logits[:len(wanted)]

    def _run_halves(self, step: _Step, rows: Rows, wanted: np.ndarray, cut: int) -> None:
        """The same as the plan of the whole: the layers in halves, and then the head of both together."""
        assert self.overlap is not None, "halves without a reason"
        if step.halves is None:
            step.halves = self._record_halves(step)
        first, second, head = step.halves
        n = len(rows.tokens)
        step.x[first.capacity:first.capacity + n - cut] = step.x[cut:n]
        self.overlap.run([(first, rows.part(0, cut)), (second, rows.part(cut, n))])
        chosen = np.where(wanted < cut, wanted, wanted + (first.capacity - cut))
        head.run_alone(len(wanted), chosen=kernels.address_of(chosen))

    def _record(self, cache: list[LayerCache], capacity: int, prompts: bool) -> _Step:
        """The plan of a step of up to ``capacity`` rows."""
        plan = kernels.Plan(capacity, self.fast, self.scratch)
        plan.prompts = prompts
        x = self._record_layers(plan, cache)
        return _Step(plan, cache, x, self._record_head(plan, x))

    def _record_halves(self, step: _Step) -> tuple[kernels.Plan, kernels.Plan, kernels.Plan]:
        """Plans of the layers for the first and the last rows of a step, and of the head for all of them."""
        capacity = step.plan.capacity
        first, second, head = (kernels.PlanPart(step.plan, *own) for own in (
            (0, capacity // 2), (capacity // 2, capacity // 2), (0, capacity)))
        for half in (first, second):
            self._record_layers(half, step.cache)
        self._record_head(head, step.x)
        return first, second, head

    def _record_layers(self, plan: kernels.Plan, cache: list[LayerCache]) -> np.ndarray:
        """``x += attention(norm(x)); x += mlp(norm(x))``; where x is."""
        hidden = self.embedding.hidden
        x = plan.buffer("x", hidden)
        first = self.blocks[0]
        plan.norm(x, first.attention_norm.weight, first.attention_norm.eps, first.attention.input(plan, hidden))
        for i, (block, layer_cache) in enumerate(zip(self.blocks, cache, strict=True)):
            block.attention.record(plan, layer_cache, x, block.mlp_norm, block.mlp.input(plan, hidden))
            last = i + 1 == len(self.blocks)
            following = None if last else self.blocks[i + 1]
            if following is None:
                block.mlp.record(plan, x, None, plan.buffer("unused", hidden))
            else:
                block.mlp.record(plan, x, following.attention_norm, following.attention.input(plan, hidden))
        return x

    def _record_head(self, plan: kernels.Plan, x: np.ndarray) -> np.ndarray:
        """Logits of the wanted rows of x; where they are."""
        plan.norm(x, self.norm.weight, self.norm.eps, self.head.input(plan, self.embedding.hidden), chosen=True)
        return self.head.record(plan)

    def seconds(self) -> dict[str, float]:
        """Seconds in each family of operations since the start."""
        found = self._past
        for step in self._steps.values():
            found = _added(found, step.seconds())
        return found


def _added(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {family: one.get(family, 0.0) + other.get(family, 0.0) for family in {**one, **other}}


@dataclass
class _Step:
    """A recorded step, what it was recorded for, and where its rows come in and its logits out.

    ``halves``: its rows' layers in two plans within its buffers, and the head for all.
    """

    plan: kernels.Plan
    cache: list[LayerCache]
    x: np.ndarray
    logits: np.ndarray
    halves: tuple[kernels.Plan, kernels.Plan, kernels.Plan] | None = None

    def seconds(self) -> dict[str, float]:
        """Seconds in each family of operations."""
        found = self.plan.seconds()
        for plan in self.halves or ():
            found = _added(found, plan.seconds())
        return found


def room_for(rows: int) -> int:
    """A plan's capacity: some steps of slightly more rows need no new one."""
    return -(-rows // ROOM) * ROOM


def local_heads(config: ModelConfig, share: Share) -> Heads:
    """The query heads of a share in groups by the KV heads that it holds."""
    groups = local_groups(share, config.n_heads // config.n_kv_heads)
    starts, stops = (np.array([getattr(span, end) for span in groups], np.int32) for end in ("start", "stop"))
    return Heads(config.head_dim, share.heads.size, starts, stops)


def build(config: ModelConfig, load: Loader, gather: KVGather | None) -> Llama:
    """Read one share of the model, layer by layer. Raises ModelError."""
    heads = local_heads(config, load.share)
    return decoder(config, load, lambda layer: _attention(config, load, heads, gather, layer))


def decoder(config: ModelConfig, load: Loader, attention: Callable[[int], Attention | LatentAttention]) -> Llama:
    """The same of a model whose layers' ``attention`` is read by the caller. Raises ModelError."""
    embedding, head = load.embedding_and_head()

    def block(layer: int) -> Block:
        before, after = (RMSNorm(load.vector(LAYER.format(layer) + VECTORS[which]), config.rms_eps)
                         for which in ("attention_norm", "mlp_norm"))
        return Block(before, attention(layer), after, _feed_forward(config, load, layer))

    blocks = [block(layer) for layer in range(config.n_layers)]
    norm = RMSNorm(load.vector(FINAL_NORM), config.rms_eps)
    return Llama(embedding, blocks, norm, head, Rope(config.rotated, config.rope_theta, config.rope))


def _attention(config: ModelConfig, load: Loader, heads: Heads, gather: KVGather | None, layer: int) -> Attention:
    prefix, kv_rows = LAYER.format(layer), load.share.kv_columns

    def head_norm(which: str) -> RMSNorm | None:
        return RMSNorm(load.vector(prefix + VECTORS[which]), config.rms_eps) if config.qk_norm else None

    qkv = load.columns_apart([prefix + name for name in MATRICES["qkv"]], [load.query_rows(), kv_rows, kv_rows])
    return Attention(heads, kv_rows.size, qkv, load.rows(prefix + MATRICES["output"][0], load.query_rows()),
                     head_norm("query_norm"), head_norm("key_norm"), gather, config.windows[layer] or 0)


def _feed_forward(config: ModelConfig, load: Loader, index: int) -> GatedMLP | ExpertMLP:
    prefix = LAYER.format(index)
    if config.has_experts(index):
        return read_experts(load, prefix)
    columns = dense_columns(config, load.share)
    gate, up = (prefix + name for name in MATRICES["gate_up"])
    return GatedMLP(load.pairs((gate, up), columns), load.rows(prefix + MATRICES["down"][0], columns))


def dense_columns(config: ModelConfig, share: Share) -> Span:
    """The feed-forward columns that a share has of a dense layer."""
    return share.dense_columns if config.experts else share.columns
