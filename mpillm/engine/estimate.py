"""What ranks would hold, read and exchange, and how fast they would be: before a job is queued, from figures alone.

Bytes are counted by the code of the run: partition, registry, setup, kvcache. Only speed is a model of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mpillm import kernels
from mpillm.config import RunConfig
from mpillm.engine import cost, kvcache, room, setup
from mpillm.engine.blocks import blocks_for
from mpillm.engine.layout import row_swaps
from mpillm.models import latent_weights, registry
from mpillm.models.config import ModelConfig
from mpillm.models.load import LOADING_BYTES, QUANT_BLOCK, SUPER_BLOCKS, apart
from mpillm.models.load_experts import SUPER_BLOCK
from mpillm.models.weights import EMBEDDING, Weights, expected
from mpillm.partition import KV_MODES, Partition, Share, partition, step_bytes

SAMPLING = 2                      # exchanges of a step that choose the tokens
TERMS = {"weights": "reading weights", "products": "multiplying", "cache": "reading the cache",
         "attention": "attention's arithmetic", "exchanges": "exchanges", "rest": "work outside kernels"}


@dataclass(frozen=True)
class Mode:
    """How K and V are held: ``mla`` None for models with K and V of each head."""

    kv_mode: str
    mla: int | None = None

    @property
    def name(self) -> str:
        return self.kv_mode if self.mla is None else f"mla {self.mla} {self.kv_mode}"


@dataclass(frozen=True)
class Asked:
    """What is planned. ``context``: positions of each of ``batch`` sequences; ``chunk``: rows of a prefill step."""

    context: int = 4096
    batch: int = 32
    chunk: int = 512
    threads: int = 1
    weights: str = "auto"
    kv_type: str = "bf16"
    kv_type_v: str = ""             # "": as kv_type
    moe_split: str = "auto"
    attention_scratch: int = RunConfig.attention_scratch

    @property
    def blocks(self) -> int:
        """Of the cache, of one sequence."""
        return blocks_for(self.context, kernels.BLOCK)

    def run(self, mode: Mode) -> RunConfig:
        """The options of the run that is planned; where no values are cached they have no type of their own."""
        values = "" if mode.mla in (2, 3) else self.kv_type_v
        return RunConfig("", weights=self.weights, kv_type=self.kv_type, kv_type_v=values or self.kv_type,
                         mla="auto" if mode.mla is None else str(mode.mla), max_batch=self.batch,
                         prefill_chunk=self.chunk, kv_mode=mode.kv_mode, moe_split=self.moe_split,
                         attention_scratch=self.attention_scratch)


@dataclass(frozen=True)
class RankFigures:
    """One rank, in bytes. ``read_bytes``: of weights, in a decode step of the batch."""

    rank: int
    heads: int
    weight_bytes: int
    duplicated_kv_weight_bytes: int
    kv_bytes_per_token: int
    cache_bytes: int
    scratch_bytes: int
    read_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Beside the runtime's own."""
        return self.weight_bytes + self.cache_bytes + self.scratch_bytes + LOADING_BYTES

    def to_dict(self) -> dict[str, int]:
        """Plain JSON."""
        return {**dataclasses.asdict(self), "needed_bytes": self.needed_bytes}


@dataclass(frozen=True)
class Planned:
    """One split in one mode. ``decode`` and ``prefill``: the rank that reads the most, as the cost model sees it."""

    asked: Asked
    tp: int
    mode: Mode
    ranks: tuple[RankFigures, ...]
    decode: cost.Candidate
    prefill: cost.Candidate

    @property
    def needed_bytes(self) -> int:
        """Of the fullest rank, the runtime's own included."""
        return max(rank.needed_bytes for rank in self.ranks) + setup.RUNTIME_BYTES

    @property
    def cache_per_token(self) -> int:
        """Of the rank that has the most."""
        return max(rank.kv_bytes_per_token for rank in self.ranks)

    @property
    def alike(self) -> bool:
        """Whether all ``kv_mode`` come to the same: no two ranks share K and V."""
        return self.decode.swap_ranks == 1

    @property
    def exchanges(self) -> int:
        """In a step of one token of each sequence."""
        return 0 if self.tp == 1 else self.decode.sums + self.decode.swaps + SAMPLING

    @property
    def exchange_bytes(self) -> int:
        """Of the vectors that one token's exchanges join."""
        own = self.decode
        return 0 if self.tp == 1 else round(own.sums * own.row_bytes + own.swaps * own.swap_bytes)

    @property
    def read_per_token(self) -> float:
        """Bytes that the fullest rank reads for a token of a full batch: its part of the weights, one cache."""
        return self.decode.read_bytes / self.asked.batch + self.asked.context * self.decode.cache_bytes

    def cache_tokens(self, memory: int) -> int | None:
        """Positions that fit beside weights, scratch and runtime; None: any number. Negative memory holds none."""
        counts = [max(0, memory - setup.RUNTIME_BYTES - rank.needed_bytes + rank.cache_bytes) // rank.kv_bytes_per_token
                  for rank in self.ranks if rank.kv_bytes_per_token]
        return min(counts) // kernels.BLOCK * kernels.BLOCK if counts else None


class Subject:
    """A model that can be planned, counted by the code of the run: partition, registry, setup and kvcache."""

    def __init__(self, model: ModelConfig, weights: Weights, asked: str) -> None:
        """``asked``: --weights."""
        self.name, self.context, self.model = model.name, model.context, model
        self.weights, self.asked = weights, asked
        self._sizes = registry.sizes(model, weights, asked)
        self.formats: tuple[str, ...] = tuple(sorted(registry.formats(model, weights, asked)))
        # Bytes depend on where slices begin within a block
        self._unit = 1 if set(kernels.QUANTISED).isdisjoint(self.formats) else \
            QUANT_BLOCK if set(SUPER_BLOCKS).isdisjoint(self.formats) else SUPER_BLOCK
        self._shared_bytes = self._bytes_of_shared()
        self._held: dict[tuple[int, ...], int] = {}
        self._rooms: dict[tuple[object, ...], int] = {}

    def modes(self) -> list[Mode]:
        """Those that `run` runs."""
        if not self.model.latent:
            return [Mode(kv_mode) for kv_mode in KV_MODES]
        best = {"redundant": range(4), "allgather": (3,), "sharded": (2,)}
        return [Mode(kv_mode, mla) for kv_mode in KV_MODES for mla in best[kv_mode]]

    def figures(self) -> dict[str, Any]:
        """For people."""
        model = self.model
        heads = {"latent": f"{model.kv_rank} + {model.rope_dim}"} if model.latent else {
            "KV heads": model.n_kv_heads, "head size": model.head_dim}
        shared = {"shared": model.shared_experts} if model.shared_experts else {}
        experts = {"experts": model.experts, "for a token": model.experts_chosen, **shared} if model.experts else {}
        total, active = parameters(model)
        return {"architecture": model.architecture, "layers": model.n_layers, "hidden": model.hidden,
                "query heads": model.n_heads, **heads, "feed-forward": model.expert_intermediate or model.intermediate,
                **experts, "vocabulary": model.vocab, "parameters": f"{total / 1e9:.3g} G",
                **({"active": f"{active / 1e9:.3g} G"} if experts else {})}

    def plan(self, asked: Asked, tp: int, mode: Mode) -> Planned:
        """One split. Raises UsageError for a mode or a cache type that the model cannot have."""
        run, model = setup.decided(asked.run(mode), self.model)
        split = partition(self._sizes, tp, run.kv_mode, run.moe_split)
        copies = Counter(head for share in split.shares for head in share.kv_heads.range())
        ranks = tuple(self._rank(asked, run, model, split, share, copies) for share in split.shares)
        read = [rank.read_bytes for rank in ranks]
        fullest = max(range(tp), key=read.__getitem__)
        swaps, swapped = row_swaps(split)
        heads = model.n_heads / split.tp if split.places > 1 else max(s.heads.size for s in split.shares)
        decode = cost.Candidate(
            tp=tp, dp=1, idle=0, weight_bytes=ranks[fullest].weight_bytes, read_bytes=read[fullest],
            products=products(model, split.shares[fullest]),
            head_products=float(model.hidden * split.shares[fullest].vocab.size),
            cache_bytes=max(rank.kv_bytes_per_token for rank in ranks), free=0, sums=2 * model.n_layers + 1,
            row_bytes=4 * model.hidden, attention_products=attending(model, heads), swaps=swaps * model.n_layers,
            swap_ranks=split.width, swap_bytes=swapped / max(1, swaps))
        chunk = min(asked.chunk, asked.context)
        prefill = dataclasses.replace(decode, read_bytes=step_bytes(split, fullest, chunk),
                                      attention_products=attending(model, heads, chunk))
        return Planned(asked, tp, mode, ranks, decode, prefill)

    def _rank(self, asked: Asked, run: RunConfig, model: ModelConfig, split: Partition, share: Share,
              copies: Counter[int]) -> RankFigures:
        block = kvcache.share_block_bytes(run, model, share)
        return RankFigures(
            share.rank, share.heads.size, self._weight_bytes(run, model, split, share),
            self._duplicated(split, share, copies), block // (kernels.BLOCK * split.places),
            block * setup.most_blocks(asked.batch, asked.context, split.places),
            self._step_bytes(run, model, split, share, asked.threads),
            round(step_bytes(split, share.rank, asked.batch)))

    def _alike(self, model: ModelConfig, share: Share) -> tuple[int, ...]:
        """The same for ranks that hold and do the same: they are counted once."""
        starts = [n % self._unit for n in (share.heads.start * (model.value_dim or model.head_dim), share.columns.start,
                                           share.dense_columns.start, share.shared_columns.start)]
        at = share.kv_columns.start if model.latent else 0         # which of both latents' columns they are
        return (model.mla, at, share.heads.size, share.kv_heads.size, share.kv_columns.size, share.columns.size,
                share.vocab.size, share.dense_columns.size, share.experts.size, share.shared_columns.size, *starts)

    def _weight_bytes(self, run: RunConfig, model: ModelConfig, split: Partition, share: Share) -> int:
        """As the loader will allocate."""
        key = self._alike(model, share)
        if key not in self._held:
            self._held[key] = registry.weight_bytes(model, self.weights, split, run.weights, share.rank)
        return self._held[key]

    def _step_bytes(self, run: RunConfig, model: ModelConfig, split: Partition, share: Share, threads: int) -> int:
        """As the plan of the largest step will allocate."""
        key = (run, threads, split.tp, self._alike(model, share))
        if key not in self._rooms:
            self._rooms[key] = room.step_nbytes(run, model, self.weights, split, share, threads)
        return self._rooms[key]

    def _bytes_of_shared(self) -> Fraction:
        """Bytes of what makes a KV head's keys and values, all layers; of latent attention, of what makes latents."""
        model, found = self.model, Fraction(0)
        for layer in range(model.n_layers):
            if model.latent:
                names = [f"{name}.weight" for name in latent_weights.inputs(model, layer)]
                kinds = [kind for kind, run in apart(self.weights, names, self.asked) for _ in run]
                widths = [model.q_rank, model.kv_rank + model.rope_dim]
            else:
                kinds, widths = list(registry.qkv_formats(self.weights, layer, self.asked)[1:]), [model.head_dim] * 2
            found += sum(n * Fraction(kernels.packed_nbytes(kind, 16, model.hidden), 16)
                         for kind, n in zip(kinds, widths, strict=True))
        return found

    def _duplicated(self, split: Partition, share: Share, copies: Counter[int]) -> int:
        """Bytes of K/V projections that other ranks hold as well, each rank its part of the copies too many."""
        if split.kv_mode != "redundant" and split.width > 1:
            return 0
        return round(self._shared_bytes * sum(1 - Fraction(1, copies[head]) for head in share.kv_heads.range()))


def parameters(model: ModelConfig) -> tuple[int, float]:
    """Values in all of a model's tensors, and those that a token multiplies: an embedding is only looked up."""
    total, active = 0, 0.0
    for name, shape in expected(model):
        count = math.prod(shape)
        total += count
        if ".mlp.experts." in name:
            active += count * model.experts_chosen / model.experts
        elif model.tied or name != EMBEDDING:
            active += count
    return total, active


def products(model: ModelConfig, share: Share) -> float:
    """Multiply-adds of a row with a share's weights, all layers, on the mean of free choices of experts."""
    columns = cost.row_columns(share, model.experts, model.experts_chosen, model.shared_experts)
    dense = len(model.dense) if model.experts else 0
    forward = (model.n_layers - dense) * columns + dense * share.dense_columns.size
    return float(model.n_layers * registry.attention_products(model, share) + 3 * model.hidden * forward)


def attending(model: ModelConfig, heads: float, chunk: int | None = None) -> float:
    """Multiply-adds of a row and a position with so many query heads, all layers; ``chunk``: rows of a prefill step.

    Latent attention in mode 3 prefills as in mode 0, and makes keys and values of the past again in every step.
    """
    if not model.latent:
        return 2.0 * model.head_dim * heads * model.n_layers
    if model.mla == 0 or model.mla == 3 and chunk is not None:
        again = model.kv_rank * (model.nope_dim + model.value_dim) / chunk if model.mla == 3 and chunk else 0.0
        return model.n_layers * heads * (model.head_dim + model.value_dim + again)
    return model.n_layers * heads * (2.0 * model.kv_rank + model.rope_dim)


@dataclass(frozen=True)
class Speed:
    """Tokens/s of all replicas, and the seconds of a step by what it does; None: not known of this machine."""

    decode: float
    prefill: float | None
    decode_terms: dict[str, float]
    prefill_terms: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"decode_tokens_per_s": self.decode, "prefill_tokens_per_s": self.prefill,
                "decode_bound_by": bound(self.decode_terms),
                "prefill_bound_by": None if self.prefill is None else bound(self.prefill_terms),
                "decode_step_s": self.decode_terms, "prefill_step_s": self.prefill_terms}


def bound(terms: dict[str, float]) -> str:
    """The key of the longest term."""
    return max(terms, key=terms.__getitem__)


def speed(planned: Planned, machine: cost.Machine, dp: int) -> Speed:
    """Of ``dp`` replicas: decode with all caches full, prefill in chunks at half of the context."""
    asked = planned.asked
    batch, chunk = asked.batch, min(asked.chunk, asked.context)
    decode = cost.step_terms(planned.decode, machine, batch, batch, float(batch * asked.context))
    prefill = cost.step_terms(planned.prefill, machine, chunk, 1, asked.context / 2, chunk * asked.context / 2)
    known = machine.operations != float("inf")
    return Speed(dp * batch / cost.total_seconds(decode), dp * chunk / cost.total_seconds(prefill) if known else None,
                 decode, prefill)


def exchange_figures(sizes: Sequence[int], latency: float, network: float | None) -> tuple[tuple[int, int, float], ...]:
    """Points of ``cost.Machine.exchanges`` by the usual formula: parts to whoever adds them, and sums back.

    ``latency`` seconds of a message, ``network`` bytes/s that a rank sends; None: bytes cost nothing.
    """
    def seconds(ranks: int, nbytes: int) -> float:
        return 2 * latency + (2 * nbytes * (ranks - 1) / ranks / network if network else 0.0)

    return tuple((ranks, nbytes, seconds(ranks, nbytes)) for ranks in sizes if ranks > 1 for nbytes in (0, 1 << 20))
