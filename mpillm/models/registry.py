"""Architectures by name, and what a rank of each would hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from mpillm import kernels
from mpillm.models import llama
from mpillm.models.config import ModelConfig
from mpillm.models.load import PANEL, QUANT_BLOCK, expert_names, expert_widths, memory_format, stored_slice
from mpillm.models.weights import Weights
from mpillm.partition import Partition, Share, Sizes, Span

BUILDERS: dict[str, Callable[..., Any]] = {
    "llama": llama.build, "mistral": llama.build, "qwen2": llama.build, "qwen3": llama.build,
    "mixtral": llama.build, "qwen3_moe": llama.build,
}

_BYTES = {"f32": 4.0, "bf16": 2.0, "f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32,
          "q4_K": 148 / 256, "q6_K": 210 / 256}


@lru_cache(maxsize=4096)
def layer_matrices(layer: int, group: str, experts: int = 0) -> tuple[str, ...]:
    """Full names of the weights of one packed matrix of a layer; of ``experts`` where it has them."""
    prefix = llama.LAYER.format(layer)
    if experts and group == "gate_up":
        return tuple(expert_names(prefix, experts, "gate") + expert_names(prefix, experts, "up"))
    if experts and group == "down":
        return tuple(expert_names(prefix, experts, "down"))
    return tuple(f"{prefix}{name}.weight" for name in llama.MATRICES[group])


def _matrices(config: ModelConfig, layer: int, group: str) -> tuple[str, ...]:
    return layer_matrices(layer, group, config.experts if config.has_experts(layer) else 0)


def formats(config: ModelConfig, weights: Weights, asked: str) -> set[str]:
    """The formats that the model's matrices will have in memory."""
    groups = [_matrices(config, i, group) for i in range(config.n_layers) for group in llama.MATRICES]
    groups += [("model.embed_tokens.weight",)] + ([] if config.tied else [("lm_head.weight",)])
    return {memory_format(weights, group, asked) for group in groups}


def sizes(config: ModelConfig, weights: Weights, asked: str) -> Sizes:
    """The figures that the split depends on, with the bytes that a weight takes in memory."""
    def in_memory(group: str) -> list[str]:
        return [memory_format(weights, _matrices(config, i, group), asked) for i in range(config.n_layers)]

    def mean(found: list[str]) -> float:
        return sum(_BYTES[name] for name in found) / len(found)

    down = in_memory("down")
    head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    return Sizes(
        hidden=config.hidden, n_layers=config.n_layers, n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads, head_dim=config.head_dim,
        intermediate=config.expert_intermediate if config.experts else config.intermediate,
        vocab=config.vocab, column_unit=16 if set(down).isdisjoint(kernels.QUANTISED) else QUANT_BLOCK,
        bytes_attn=mean(in_memory("qkv")), bytes_ffn=(2 * mean(in_memory("gate_up")) + mean(down)) / 3,
        bytes_vocab=_BYTES[memory_format(weights, [head], asked)], experts=config.experts,
        experts_chosen=config.experts_chosen, dense_layers=len(config.dense),
        dense_intermediate=config.intermediate if config.dense else 0)


def weight_bytes(config: ModelConfig, weights: Weights, partition: Partition, asked: str, rank: int) -> int:
    """Bytes of packed weights and vectors that ``rank`` holds: what the loader will allocate, without reading."""
    share, total = partition.shares[rank], 0

    def packed(names: Sequence[str], n: int, k: int, before: int = 0) -> int:
        kind = memory_format(weights, names, asked)
        first, last, phase = stored_slice(kind, Span(before, before + k))
        return kernels.packed_nbytes(kind, n, last - first, phase)

    q_rows, q_before = share.heads.size * config.head_dim, share.heads.start * config.head_dim
    for i in range(config.n_layers):
        total += packed(layer_matrices(i, "qkv"), q_rows + 2 * share.kv_columns.size, config.hidden)
        total += packed(layer_matrices(i, "output"), config.hidden, q_rows, q_before)
        columns = llama.dense_columns(config, share)
        if config.has_experts(i):
            total += _expert_bytes(config, weights, i, share, asked)
        else:
            total += packed(layer_matrices(i, "gate_up"), 2 * columns.size, config.hidden)
            total += packed(layer_matrices(i, "down"), config.hidden, columns.size, columns.start)
        total += 4 * _vector_values(config, q_rows + 2 * share.kv_columns.size, columns.size)
    for name in ["model.embed_tokens.weight"] + ([] if config.tied else ["lm_head.weight"]):
        total += packed([name], share.vocab.size, config.hidden)
    return total + 4 * config.hidden


def _expert_bytes(config: ModelConfig, weights: Weights, layer: int, share: Share, asked: str) -> int:
    """Bytes of one layer's experts and router on a rank."""
    kind, down = (memory_format(weights, _matrices(config, layer, group), asked) for group in ("gate_up", "down"))
    width, k_down = expert_widths(down, share.columns.size)
    k, height = stored_slice(kind, Span(0, config.hidden))[1], -(-config.hidden // PANEL) * PANEL
    return (kernels.packed_nbytes(kind, 2 * config.experts * width, k)
            + kernels.packed_nbytes(down, config.experts * height, k_down, stored_slice(down, share.columns)[2])
            + kernels.packed_nbytes("f32", config.experts, k))


def _vector_values(config: ModelConfig, qkv_rows: int, columns: int) -> int:
    """Values in the norms and biases of one layer that a rank holds."""
    values = 2 * config.hidden + (2 * config.head_dim if config.qk_norm else 0)
    values += qkv_rows if config.qkv_bias else 0
    values += config.hidden if config.output_bias else 0
    return values + (2 * columns + config.hidden if config.mlp_bias else 0)
