"""Sizes of DeepSeek-V2 and V3 (multi-head latent attention, mixture of experts), from their figures alone.

What a rank would hold, read and cache, for planning: nothing here computes the model. A cached row of one layer has
``kv_rank`` latent values and ``rope_dim`` rotated ones; the modes (``--mla``) are those of ik_llama.cpp's pull
requests 235, 240, 246 and 273:

====  ==========================================================================================
mode  cached per token and layer
====  ==========================================================================================
0     keys and values of each head: ``heads * (nope_dim + rope_dim)`` and ``heads * value_dim``
1     the latent row, and a second, transposed copy of its first ``kv_rank`` values
2     the latent row
3     as 2; prefill decompresses keys and values for a stretch of positions at a time
====  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mpillm import kernels
from mpillm.errors import UsageError
from mpillm.models.fields import MAX_LAYERS, Fields
from mpillm.partition import Span, spread

MLA_MODES = (0, 1, 2, 3)
ARCHITECTURES = {"DeepseekV2ForCausalLM": "deepseek_v2", "DeepseekV3ForCausalLM": "deepseek_v3"}
GGUF_ARCHITECTURE = "deepseek2"
ROUTER = "bf16"               # its format whatever the others have: routing is sensitive, and it is small
PANEL = 16
_VALUE_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True)
class DeepSeekFigures:
    """Sizes in elements. ``q_rank`` None: queries have no latent. The first ``dense_layers`` have no experts."""

    name: str
    hidden: int
    n_layers: int
    n_heads: int
    q_rank: int | None
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    intermediate: int
    dense_layers: int
    n_experts: int               # routed
    n_shared: int
    experts_per_token: int
    expert_intermediate: int
    vocab: int
    max_positions: int
    tied: bool

    @property
    def row(self) -> int:
        """Values of a latent row."""
        return self.kv_rank + self.rope_dim

    @property
    def expert_layers(self) -> int:
        return self.n_layers - self.dense_layers


@dataclass(frozen=True)
class Matrix:
    """``count`` matrices [n, k] that a rank holds, alike in all layers that have them.

    ``role``: latent (projections to latents), attention, dense, shared, expert, router, embedding or head.
    """

    role: str
    n: int
    k: int
    count: int
    format: str

    @property
    def nbytes(self) -> int:
        """Bytes in memory of all of them."""
        return self.count * kernels.packed_nbytes(self.format, self.n, self.k) if self.n and self.k else 0


def of_config(where: str, values: Mapping[str, Any], name: str) -> DeepSeekFigures | None:
    """The figures of a config.json; None for another architecture. Raises ModelError for a wrong value."""
    fields = Fields(where, values)
    named = fields.get("architectures")
    found = named[0] if isinstance(named, list) and named else None
    if found not in ARCHITECTURES and not (found is None and fields.get("model_type") in ARCHITECTURES.values()):
        return None
    if fields.natural("moe_layer_freq", 1) != 1:
        raise fields.error(f"moe_layer_freq {fields.get('moe_layer_freq')} is not supported: it must be 1")
    experts = fields.natural("n_routed_experts", 0)
    n_layers = _layers(fields, "num_hidden_layers")
    return DeepSeekFigures(
        name=name, hidden=fields.positive("hidden_size"), n_layers=n_layers,
        n_heads=fields.positive("num_attention_heads"), q_rank=fields.natural("q_lora_rank", 0) or None,
        kv_rank=fields.positive("kv_lora_rank"), rope_dim=fields.positive("qk_rope_head_dim"),
        nope_dim=fields.positive("qk_nope_head_dim"), value_dim=fields.positive("v_head_dim"),
        intermediate=fields.positive("intermediate_size"),
        dense_layers=min(n_layers, fields.natural("first_k_dense_replace", 0)) if experts else n_layers,
        n_experts=experts, n_shared=fields.natural("n_shared_experts", 0),
        experts_per_token=fields.positive("num_experts_per_tok") if experts else 0,
        expert_intermediate=fields.positive("moe_intermediate_size") if experts else 0,
        vocab=fields.positive("vocab_size"), max_positions=fields.positive("max_position_embeddings", 2048),
        tied=fields.flag("tie_word_embeddings", False))


def of_gguf(where: str, metadata: Mapping[str, Any], vocab: int, tied: bool, name: str) -> DeepSeekFigures:
    """The figures of a GGUF file of architecture deepseek2. Raises ModelError for a wrong value."""
    start = GGUF_ARCHITECTURE + "."
    fields = Fields(f"{where}: {GGUF_ARCHITECTURE}",
                    {key[len(start):]: value for key, value in metadata.items() if key.startswith(start)})
    rope, experts = fields.positive("rope.dimension_count"), fields.natural("expert_count", 0)
    # Files made for latent attention state the latent's widths first, the heads' own beside them
    key = fields.positive("attention.key_length_mla", fields.positive("attention.key_length"))
    if key <= rope:
        raise fields.error(f"keys of {key} values, of which {rope} are rotated, leave none: damaged")
    n_layers = _layers(fields, "block_count")
    return DeepSeekFigures(
        name=name, hidden=fields.positive("embedding_length"), n_layers=n_layers,
        n_heads=fields.positive("attention.head_count"), q_rank=fields.natural("attention.q_lora_rank", 0) or None,
        kv_rank=fields.positive("attention.kv_lora_rank"), rope_dim=rope, nope_dim=key - rope,
        value_dim=fields.positive("attention.value_length_mla", fields.positive("attention.value_length")),
        intermediate=fields.positive("feed_forward_length"),
        dense_layers=min(n_layers, fields.natural("leading_dense_block_count", 0)) if experts else n_layers,
        n_experts=experts, n_shared=fields.natural("expert_shared_count", 0),
        experts_per_token=fields.positive("expert_used_count") if experts else 0,
        expert_intermediate=fields.positive("expert_feed_forward_length") if experts else 0,
        vocab=vocab, max_positions=fields.positive("context_length"), tied=tied)


def _layers(fields: Fields, key: str) -> int:
    count = fields.positive(key)
    if count > MAX_LAYERS:
        raise fields.error(f"{key} is {count}, more than {MAX_LAYERS}: damaged")
    return count


def parameters(f: DeepSeekFigures) -> int:
    """All of the model's matrices, in values; the layer that predicts further tokens (MTP) is none of them."""
    return sum(m.n * m.k * m.count for m in matrices(f, "f32", 1, 0, "redundant"))


def active_parameters(f: DeepSeekFigures) -> float:
    """Those that one token multiplies; the embedding is looked up."""
    return sum(m.n * m.k * m.count * active_share(f, m.role) for m in matrices(f, "f32", 1, 0, "redundant"))


def active_share(f: DeepSeekFigures, role: str) -> float:
    """Which part of matrices of a role one token multiplies."""
    if role == "embedding":
        return 0.0
    return f.experts_per_token / f.n_experts if role == "expert" else 1.0


def read_share(f: DeepSeekFigures, role: str, rows: int) -> float:
    """Which part of them a step of ``rows`` tokens is expected to read, if each takes its experts by chance."""
    if role == "embedding":
        return float(f.tied)
    if role == "expert":
        return 1.0 - (1.0 - f.experts_per_token / f.n_experts) ** rows
    return 1.0


def heads_of(f: DeepSeekFigures, tp: int, rank: int) -> Span:
    """The query heads of a rank: whole ones, the first ranks one more."""
    return spread(f.n_heads, tp)[rank]


def matrices(f: DeepSeekFigures, weights: str, tp: int, rank: int, kv_mode: str) -> Iterator[Matrix]:
    """What ``rank`` of ``tp`` holds. Feed-forward columns of every expert are split, so that the load is even.

    ``kv_mode``: redundant holds the projections to the latents on every rank; else their outputs are split.
    """
    def columns(total: int) -> int:
        unit = 32 if weights in kernels.QUANTISED else 16
        span = spread(-(-total // unit), tp)[rank].times(unit)
        return max(0, min(span.stop, total) - span.start)

    def outputs(total: int) -> int:
        return total if kv_mode == "redundant" else spread(total, tp)[rank].size

    def gated(role: str, total: int, count: int) -> Iterator[Matrix]:
        if total and count:
            own = columns(total)
            yield Matrix(role, 2 * own, f.hidden, count, weights)
            yield Matrix(role, f.hidden, own, count, weights)

    heads, layers = heads_of(f, tp, rank).size, f.n_layers
    queries = heads * (f.nope_dim + f.rope_dim)
    yield Matrix("latent", outputs(f.row), f.hidden, layers, weights)
    if f.q_rank is not None:
        yield Matrix("latent", outputs(f.q_rank), f.hidden, layers, weights)
    yield Matrix("attention", queries, f.hidden if f.q_rank is None else f.q_rank, layers, weights)
    yield Matrix("attention", heads * (f.nope_dim + f.value_dim), f.kv_rank, layers, weights)
    yield Matrix("attention", f.hidden, heads * f.value_dim, layers, weights)
    yield from gated("dense", f.intermediate, f.dense_layers)
    if f.n_experts:
        yield Matrix("router", f.n_experts, f.hidden, f.expert_layers, ROUTER)
        yield from gated("expert", f.expert_intermediate, f.expert_layers * f.n_experts)
        yield from gated("shared", f.expert_intermediate * f.n_shared, f.expert_layers)
    panels = spread(-(-f.vocab // PANEL), tp)[rank].times(PANEL)
    own = max(0, min(panels.stop, f.vocab) - panels.start)
    yield Matrix("head" if f.tied else "embedding", own, f.hidden, 1, weights)
    if not f.tied:
        yield Matrix("head", own, f.hidden, 1, weights)


def vector_bytes(f: DeepSeekFigures) -> int:
    """Of the norms and the router's corrections, float32, on every rank."""
    layer = 2 * f.hidden + f.kv_rank + (f.q_rank or 0)
    return 4 * (f.n_layers * layer + f.expert_layers * f.n_experts + f.hidden)


def value_bytes(kv_type: str, count: int) -> int:
    """Bytes of ``count`` cached values. Raises UsageError where q8_0's blocks of 32 do not fit."""
    if kv_type == "q8_0":
        if count % 32:
            raise UsageError(f"kv-type q8_0 needs rows in blocks of 32, this model has {count}: use bf16")
        return count // 32 * 34
    return _VALUE_BYTES[kv_type] * count


def cache_bytes(f: DeepSeekFigures, mla: int, kv_type: str, kv_type_v: str, heads: int) -> int:
    """Bytes of one position in all layers, on a rank with so many ``heads``; latent modes do not depend on them.

    ``kv_type_v``: of the values in mode 0 and of the copy in mode 1.
    """
    if mla == 0:
        layer = value_bytes(kv_type, heads * (f.nope_dim + f.rope_dim)) + value_bytes(kv_type_v, heads * f.value_dim)
    else:
        layer = value_bytes(kv_type, f.row) + (value_bytes(kv_type_v, f.kv_rank) if mla == 1 else 0)
    return f.n_layers * layer


def attention_products(f: DeepSeekFigures, mla: int, heads: float, chunk: int | None = None) -> float:
    """Multiply-adds of a row and a position in all layers; ``chunk``: rows of a prefill step, None = decode.

    Mode 3 prefills as mode 0 and decompresses the past once a step.
    """
    whole = f.nope_dim + f.rope_dim + f.value_dim
    if mla == 0 or mla == 3 and chunk is not None:
        again = f.kv_rank * (f.nope_dim + f.value_dim) / chunk if mla == 3 and chunk else 0.0
        return f.n_layers * heads * (whole + again)
    return f.n_layers * heads * (2 * f.kv_rank + f.rope_dim)


def swaps(f: DeepSeekFigures, kv_mode: str) -> tuple[int, int]:
    """(exchanges, bytes of a row in all of them) within one layer, beside the sums.

    allgather: the latents before their norms. sharded too, and the absorbed queries of all heads, then their partial
    outputs with a log-sum-exp each.
    """
    if kv_mode == "redundant":
        return 0, 0
    latent = 4 * (f.row + (f.q_rank or 0))
    if kv_mode == "allgather":
        return 1, latent
    return 3, latent + 4 * f.n_heads * f.row + 4 * f.n_heads * (f.kv_rank + 1)
