"""Architectures by name, and what a rank of each would hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mpillm import kernels
from mpillm.models import deepseek, latent_weights, llama, load_experts
from mpillm.models.config import ModelConfig
from mpillm.models.load import QUANT_BLOCK, apart, memory_format, stored_slice
from mpillm.models.load_experts import expert_names, shared_names
from mpillm.models.weights import Weights
from mpillm.partition import Partition, Share, Sizes, Span
from mpillm.quant import recipe

BUILDERS: dict[str, Callable[..., Any]] = {
    "llama": llama.build, "mistral": llama.build, "qwen2": llama.build, "qwen3": llama.build,
    "mixtral": llama.build, "qwen3_moe": llama.build,
    "deepseek_v2": deepseek.build, "deepseek_v3": deepseek.build,
}

_BYTES = {"f32": 4.0, "bf16": 2.0, "f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32,
          "q4_K": 148 / 256, "q6_K": 210 / 256}


@lru_cache(maxsize=4096)
def layer_matrices(layer: int, group: str, experts: int = 0) -> tuple[str, ...]:
    """Full names of the weights of one packed matrix of a layer; of ``experts`` where it has them."""
    prefix = llama.LAYER.format(layer)
    if experts and group == "gate_up":
        return tuple(expert_names(prefix, range(experts), "gate") + expert_names(prefix, range(experts), "up"))
    if experts and group == "down":
        return tuple(expert_names(prefix, range(experts), "down"))
    return tuple(f"{prefix}{name}.weight" for name in llama.MATRICES[group])


def _matrices(config: ModelConfig, layer: int, group: str) -> tuple[str, ...]:
    return layer_matrices(layer, group, config.experts if config.has_experts(layer) else 0)


def _shared(config: ModelConfig) -> list[tuple[str, ...]]:
    """Names of the shared experts' weights, of each layer those of gate and up, and that of down."""
    if not config.shared_experts:
        return []
    layers = [llama.LAYER.format(i) for i in range(config.n_layers) if config.has_experts(i)]
    return [tuple(names) for at in layers
            for names in (shared_names(at, "gate") + shared_names(at, "up"), shared_names(at, "down"))]


def formats(config: ModelConfig, weights: Weights, asked: str) -> set[str]:
    """The formats that the model's matrices will have in memory."""
    kinds = ("gate_up", "down") if config.latent else ("output", "gate_up", "down")
    groups = [_matrices(config, i, group) for i in range(config.n_layers) for group in kinds]
    groups += [("model.embed_tokens.weight",)] + ([] if config.tied else [("lm_head.weight",)])
    found = {memory_format(weights, group, asked) for group in [*groups, *_shared(config)]}
    if config.latent:
        return found | latent_weights.formats(config, weights, asked)
    return found.union(*(qkv_formats(weights, i, asked) for i in range(config.n_layers)))


def qkv_formats(weights: Weights, layer: int, asked: str) -> tuple[str, ...]:
    """The formats of q, k and v of a layer."""
    return tuple(kind for kind, run in apart(weights, layer_matrices(layer, "qkv"), asked) for _ in run)


def sizes(config: ModelConfig, weights: Weights, asked: str) -> Sizes:
    """The figures that the split depends on, with the bytes that a weight takes in memory."""
    def in_memory(group: str) -> list[str]:
        return [memory_format(weights, _matrices(config, i, group), asked) for i in range(config.n_layers)]

    def mean(found: list[str]) -> float:
        return sum(_BYTES[name] for name in found) / len(found)

    def projections(kinds: Sequence[str]) -> float:
        rows = config.n_heads, config.n_kv_heads, config.n_kv_heads
        return sum(_BYTES[kind] * n for kind, n in zip(kinds, rows, strict=True)) / sum(rows)

    def attention_bytes(layer: int) -> float:
        if not config.latent:
            return projections(qkv_formats(weights, layer, asked))
        return mean([kind for _, kind, _ in latent_weights.held(config, weights, layer, _NOBODY, asked)])

    down = in_memory("down") + [memory_format(weights, names, asked) for names in _shared(config)[1::2]]
    head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    return Sizes(
        hidden=config.hidden, n_layers=config.n_layers, n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=latent_weights.latent_columns(config) if config.latent else config.head_dim,
        intermediate=config.expert_intermediate if config.experts else config.intermediate,
        vocab=config.vocab, column_unit=16 if set(down).isdisjoint(kernels.QUANTISED) else QUANT_BLOCK,
        bytes_attn=sum(map(attention_bytes, range(config.n_layers))) / config.n_layers,
        latent_head=_latent_head(config) if config.latent else 0,
        latent_query=config.kv_rank + config.rope_dim, latent_value=config.kv_rank,
        bytes_ffn=(2 * mean(in_memory("gate_up")) + mean(down[:config.n_layers])) / 3,
        bytes_vocab=_BYTES[memory_format(weights, [head], asked)], experts=config.experts,
        experts_chosen=config.experts_chosen, shared=config.shared_experts, dense_layers=len(config.dense),
        dense_intermediate=config.intermediate if config.dense else 0)


_NOBODY = Share(0, 0, 0, *[Span(0, 0)] * 5)


def attention_products(config: ModelConfig, share: Share) -> int:
    """Multiply-adds with weights of one row in one layer's attention."""
    if config.latent:
        return share.heads.size * _latent_head(config) + share.kv_columns.size * config.hidden
    return config.hidden * (2 * share.heads.size * config.head_dim + 2 * share.kv_columns.size)


def _latent_head(c: ModelConfig) -> int:
    """Weights of a query head with latent attention that a step of one row reads."""
    return c.head_dim * (c.q_rank or c.hidden) + (c.nope_dim + c.value_dim) * c.kv_rank + c.value_dim * c.hidden


def weight_bytes(config: ModelConfig, weights: Weights, partition: Partition, asked: str, rank: int) -> int:
    """Bytes of packed weights and vectors that ``rank`` holds: what the loader will allocate, without reading."""
    share = partition.shares[rank]
    columns = llama.dense_columns(config, share).size
    vectors = config.n_layers * _vector_values(config, share, columns) + config.hidden
    routers = sum(load_experts.router_bytes(config, weights, llama.LAYER.format(i), share, asked)
                  for i in range(config.n_layers) if config.has_experts(i))
    return 4 * vectors + routers + sum(nbytes for *_, nbytes in matrices(config, weights, share, asked))


def matrices(config: ModelConfig, weights: Weights, share: Share,
             asked: str) -> Iterator[tuple[Sequence[str], str, int]]:
    """Names of the tensors, format and bytes of each packed matrix that a share holds."""
    def packed(names: Sequence[str], n: int, k: int, before: int = 0,
               kind: str | None = None) -> tuple[Sequence[str], str, int]:
        kind = memory_format(weights, names, asked) if kind is None else kind
        first, last, phase = stored_slice(kind, Span(before, before + k))
        return names, kind, kernels.packed_nbytes(kind, n, last - first, phase)

    q_rows, q_before = share.heads.size * config.head_dim, share.heads.start * config.head_dim
    columns = llama.dense_columns(config, share)
    for i in range(config.n_layers):
        if config.latent:
            yield from latent_weights.held(config, weights, i, share, asked)
        else:
            qkv, outputs = layer_matrices(i, "qkv"), (q_rows, share.kv_columns.size, share.kv_columns.size)
            for kind, run in apart(weights, qkv, asked):
                yield packed(qkv[run.start:run.stop], sum(outputs[run.start:run.stop]), config.hidden, kind=kind)
            yield packed(layer_matrices(i, "output"), config.hidden, q_rows, q_before)
        if config.has_experts(i):
            yield from load_experts.held(config, weights, llama.LAYER.format(i), share, asked)
        else:
            yield packed(layer_matrices(i, "gate_up"), 2 * columns.size, config.hidden)
            yield packed(layer_matrices(i, "down"), config.hidden, columns.size, columns.start)
    for name in ["model.embed_tokens.weight"] + ([] if config.tied else ["lm_head.weight"]):
        yield packed([name], share.vocab.size, config.hidden)


@dataclass(frozen=True)
class Matched:
    """What one rule of a weight recipe is for: formats in memory, tensors, and bytes on all of a replica's ranks."""

    rule: str
    asked: str
    formats: tuple[str, ...]
    tensors: int
    nbytes: int


def matched(config: ModelConfig, weights: Weights, partition: Partition, asked: str) -> tuple[Matched, ...]:
    """What each rule of a recipe matches, the default last; empty where ``asked`` is a plain format."""
    stated = recipe.parse(asked)
    if not stated.rules:
        return ()
    kinds: dict[str, set[str]] = {rule: set() for rule, _ in [*stated.rules, (recipe.DEFAULT, "")]}
    tensors: dict[str, set[str]] = {rule: set() for rule in kinds}
    nbytes = dict.fromkeys(kinds, 0)
    for share in partition.shares:
        for names, kind, size in matrices(config, weights, share, asked):
            rule = stated.rule(*weights.groups(names[0]))
            kinds[rule].add(kind)
            tensors[rule].update(names)
            nbytes[rule] += size
    named = {**dict(stated.rules), recipe.DEFAULT: stated.default}
    return tuple(Matched(rule, named[rule], tuple(sorted(kinds[rule])), len(tensors[rule]), nbytes[rule])
                 for rule in kinds)


def _vector_values(config: ModelConfig, share: Share, columns: int) -> int:
    """Values in the norms and biases of one layer that a rank holds; ``columns`` of a dense layer."""
    if config.latent:
        return 2 * config.hidden + latent_weights.vector_values(config, share)
    qkv_rows = share.heads.size * config.head_dim + 2 * share.kv_columns.size
    values = 2 * config.hidden + (2 * config.head_dim if config.qk_norm else 0)
    values += qkv_rows if config.qkv_bias else 0
    values += config.hidden if config.output_bias else 0
    return values + (2 * columns + config.hidden if config.mlp_bias else 0)
