"""What ranks would hold, read and exchange, and how fast they would be: before a job is queued, from figures alone.

Models of the Llama family are counted by the code that runs them (partition, registry, setup, kvcache), those with
latent attention by formula. ``sharded`` caches do not run yet, and what is printed says so.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from mpillm import kernels
from mpillm.config import RunConfig
from mpillm.engine import cost, kvcache, setup
from mpillm.engine.blocks import blocks_for
from mpillm.errors import UsageError
from mpillm.models import deepseek_sizes as deepseek
from mpillm.models import registry
from mpillm.models.config import ModelConfig
from mpillm.models.deepseek_sizes import DeepSeekFigures
from mpillm.models.llama import room_for
from mpillm.models.load import LOADING_BYTES
from mpillm.models.weights import Weights
from mpillm.partition import Partition, Share, partition, row_exchange, step_bytes

KV_MODES = ("redundant", "allgather", "sharded")
ATTENTION_SCRATCH = 64 << 20      # of latent attention, on each rank
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
    kv_type_v: str = "bf16"

    @property
    def blocks(self) -> int:
        """Of the cache, of one sequence."""
        return blocks_for(self.context, kernels.BLOCK)

    def run(self, kv_mode: str) -> RunConfig:
        """The options of the run that is planned; where K/V is sharded its weights are those of allgather."""
        return RunConfig("", weights=self.weights, kv_type=self.kv_type, kv_type_v=self.kv_type_v,
                         max_batch=self.batch, prefill_chunk=self.chunk,
                         kv_mode="redundant" if kv_mode == "redundant" else "allgather")


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

    def read_per_token(self, asked: Asked) -> float:
        """Bytes that the fullest rank reads for a token of a full batch: its part of the weights, one cache."""
        return self.decode.read_bytes / asked.batch + asked.context * self.decode.cache_bytes

    def cache_tokens(self, memory: int) -> int | None:
        """Positions that fit beside weights, scratch and runtime; None: any number. Negative memory holds none."""
        counts = [max(0, memory - setup.RUNTIME_BYTES - rank.needed_bytes + rank.cache_bytes) // rank.kv_bytes_per_token
                  for rank in self.ranks if rank.kv_bytes_per_token]
        return min(counts) // kernels.BLOCK * kernels.BLOCK if counts else None


class Subject(Protocol):
    """A model that can be planned."""

    name: str
    context: int
    formats: tuple[str, ...]

    def modes(self) -> list[Mode]: ...

    def plan(self, asked: Asked, tp: int, mode: Mode) -> Planned:
        """Raises UsageError for a cache type or weights that the model cannot have."""
        ...

    def figures(self) -> dict[str, Any]: ...


class Dense:
    """A model of the Llama family, by the code of the run."""

    def __init__(self, model: ModelConfig, weights: Weights, asked: str) -> None:
        """``asked``: --weights."""
        self.name, self.context, self._model, self._weights = model.name, model.context, model, weights
        self._sizes = registry.sizes(model, weights, asked)
        self.formats: tuple[str, ...] = tuple(sorted(registry.formats(model, weights, asked)))
        kinds = [kind for i in range(model.n_layers) for kind in registry.qkv_formats(weights, i, asked)[1:]]
        self._kv_column_bytes = sum(Fraction(kernels.packed_nbytes(kind, 16, model.hidden), 16) for kind in kinds)
        self._held: dict[tuple[int, ...], int] = {}

    def modes(self) -> list[Mode]:
        return [Mode(kv_mode) for kv_mode in KV_MODES]

    def figures(self) -> dict[str, Any]:
        model = self._model
        experts = {"experts": model.experts, "for a token": model.experts_chosen} if model.experts else {}
        return {"architecture": model.architecture, "layers": model.n_layers, "hidden": model.hidden,
                "query heads": model.n_heads, "KV heads": model.n_kv_heads, "head size": model.head_dim,
                "feed-forward": model.expert_intermediate or model.intermediate, **experts,
                "vocabulary": model.vocab}

    def plan(self, asked: Asked, tp: int, mode: Mode) -> Planned:
        model, run = self._model, asked.run(mode.kv_mode)
        split = partition(self._sizes, tp, run.kv_mode, run.moe_split)
        copies = Counter(head for share in split.shares for head in share.kv_heads.range())
        ranks = tuple(self._rank(asked, run, split, share, mode, copies) for share in split.shares)
        read = [step_bytes(split, rank, asked.batch) for rank in range(tp)]
        fullest = max(range(tp), key=read.__getitem__)
        share = split.shares[fullest]
        columns = cost.row_columns(share, model.experts, model.experts_chosen, model.shared_experts)
        layer = 2 * model.head_dim * share.heads.size + 2 * share.kv_columns.size + 3 * columns
        swaps, swapped = self._swaps(split, mode)
        attending = 2.0 * model.head_dim * model.n_layers * (
            model.n_heads / split.tp if mode.kv_mode == "sharded" else max(s.heads.size for s in split.shares))
        own = cost.Candidate(
            tp=tp, dp=1, idle=0, weight_bytes=ranks[fullest].weight_bytes, read_bytes=read[fullest],
            products=float(model.n_layers * model.hidden * layer), head_products=float(model.hidden * share.vocab.size),
            cache_bytes=max(rank.kv_bytes_per_token for rank in ranks), free=0, sums=2 * model.n_layers + 1,
            row_bytes=4 * model.hidden, attention_products=attending, swaps=swaps * model.n_layers,
            swap_ranks=split.width, swap_bytes=swapped / max(1, swaps))
        return Planned(tp, mode, ranks, own, own)

    def _rank(self, asked: Asked, run: RunConfig, split: Partition, share: Share, mode: Mode,
              copies: Counter[int]) -> RankFigures:
        model, sharded = self._model, mode.kv_mode == "sharded"
        heads = model.n_kv_heads // split.rows if sharded and split.width > 1 else share.kv_heads.size
        block = kvcache.block_bytes(asked.kv_type, model.n_layers, heads, model.head_dim, asked.kv_type_v)
        width = split.width if sharded else 1
        blocks = -(-asked.blocks * asked.batch // width)
        return RankFigures(
            share.rank, share.heads.size, self._weight_bytes(run, split, share), self._duplicated(split, share, copies),
            block // (kernels.BLOCK * width), block * blocks,
            setup.activation_bytes(run, model, share, asked.threads), round(step_bytes(split, share.rank)))

    def _weight_bytes(self, run: RunConfig, split: Partition, share: Share) -> int:
        """As the loader will allocate; ranks whose slices are alike are counted once."""
        start = share.heads.start * self._model.head_dim
        key = (start % 256, share.heads.size, share.kv_columns.size, share.columns.start % 256, share.columns.size,
               share.vocab.size, share.dense_columns.start % 256, share.dense_columns.size, share.experts.size,
               share.shared_columns.start % 256, share.shared_columns.size)
        if key not in self._held:
            self._held[key] = registry.weight_bytes(self._model, self._weights, split, run.weights, share.rank)
        return self._held[key]

    def _duplicated(self, split: Partition, share: Share, copies: Counter[int]) -> int:
        """Bytes of K/V projections that other ranks hold as well, each rank its part of the copies too many."""
        if split.kv_mode == "allgather" and split.width > 1:
            return 0
        extra = sum(1 - Fraction(1, copies[head]) for head in share.kv_heads.range())
        return round(extra * self._model.head_dim * self._kv_column_bytes)

    def _swaps(self, split: Partition, mode: Mode) -> tuple[int, int]:
        """(exchanges in a layer within a KV row, bytes of a row in all of them)."""
        if split.width == 1 or mode.kv_mode == "redundant":
            return 0, 0
        model = self._model
        if mode.kv_mode == "allgather":
            own = max(sum(span.size for span in row_exchange(split, rank).receive) for rank in split.row_ranks(0))
            return 1, 2 * 4 * own
        heads, columns = model.n_heads // split.rows, model.n_kv_heads // split.rows * model.head_dim
        return 3, 4 * (2 * columns + heads * model.head_dim + heads * (model.head_dim + 1))


class Latent:
    """DeepSeek-V2 and V3, by formula."""

    def __init__(self, figures: DeepSeekFigures, asked: str, stored: str = "bf16") -> None:
        """``asked``: --weights; ``stored``: the format that auto stands for."""
        self.name, self.context, self._figures = figures.name, figures.max_positions, figures
        self._weights = deepseek.formats_by_role(figures, asked, stored)
        whole = deepseek.matrices(figures, self._weights, 1, 0, "redundant")
        self.formats: tuple[str, ...] = tuple(sorted({m.format for m in whole if m.role != "router"}))

    def modes(self) -> list[Mode]:
        return [*(Mode("redundant", mla) for mla in deepseek.MLA_MODES), Mode("allgather", 3), Mode("sharded", 3)]

    def figures(self) -> dict[str, Any]:
        f = self._figures
        return {"layers": f.n_layers, "hidden": f.hidden, "query heads": f.n_heads,
                "latent": f"{f.kv_rank} + {f.rope_dim}",
                "experts": f"{f.n_experts} + {f.n_shared}, {f.experts_per_token} of them used",
                "vocabulary": f.vocab, "parameters": f"{deepseek.parameters(f) / 1e9:.1f} G",
                "active": f"{deepseek.active_parameters(f) / 1e9:.1f} G"}

    def plan(self, asked: Asked, tp: int, mode: Mode) -> Planned:
        f, mla = self._figures, mode.mla
        assert mla is not None, "latent attention has a mode"
        if mla == 0 and mode.kv_mode == "sharded":
            raise UsageError("--mla 0 caches whole heads, each on one rank: --kv-mode sharded is for --mla 1, 2 and 3")
        ranks, held = [], []
        for rank in range(tp):
            found = list(deepseek.matrices(f, self._weights, tp, rank, mode.kv_mode))
            ranks.append(self._rank(asked, tp, rank, mode, found))
            held.append(found)
        fullest = max(range(tp), key=lambda rank: ranks[rank].read_bytes)
        active = [(m.role, m.n * m.k * m.count * deepseek.active_share(f, m.role)) for m in held[fullest]]
        head = sum(count for role, count in active if role == "head")
        heads = f.n_heads / tp if mode.kv_mode == "sharded" else max(r.heads for r in ranks)
        swaps, swapped = deepseek.swaps(f, mode.kv_mode) if tp > 1 else (0, 0)
        chunk = min(asked.chunk, asked.context)
        decode = cost.Candidate(
            tp=tp, dp=1, idle=0, weight_bytes=ranks[fullest].weight_bytes, read_bytes=ranks[fullest].read_bytes,
            products=sum(count for _, count in active) - head, head_products=head,
            cache_bytes=max(r.kv_bytes_per_token for r in ranks), free=0, sums=2 * f.n_layers + 1,
            row_bytes=4 * f.hidden, attention_products=deepseek.attention_products(f, mla, heads),
            swaps=swaps * f.n_layers, swap_ranks=tp, swap_bytes=swapped / max(1, swaps))
        prefill = dataclasses.replace(
            decode, read_bytes=self._read(held[fullest], chunk),
            attention_products=deepseek.attention_products(f, mla, heads, chunk))
        return Planned(tp, mode, tuple(ranks), decode, prefill)

    def _read(self, held: Sequence[deepseek.Matrix], rows: int) -> int:
        return round(sum(m.nbytes * deepseek.read_share(self._figures, m.role, rows) for m in held))

    def _rank(self, asked: Asked, tp: int, rank: int, mode: Mode, held: Sequence[deepseek.Matrix]) -> RankFigures:
        f, heads = self._figures, deepseek.heads_of(self._figures, tp, rank).size
        assert mode.mla is not None, "latent attention has a mode"
        token = deepseek.cache_bytes(f, mode.mla, asked.kv_type, asked.kv_type_v, heads)
        width = tp if mode.kv_mode == "sharded" else 1
        latent = sum(m.nbytes for m in held if m.role == "latent")
        rows, widest = room_for(asked.chunk + asked.batch), max(m.n for m in held if m.role != "embedding")
        return RankFigures(
            rank, heads, sum(m.nbytes for m in held) + deepseek.vector_bytes(f),
            round(latent * (1 - Fraction(1, tp))) if mode.kv_mode == "redundant" else 0,
            token // width, token * kernels.BLOCK * -(-asked.blocks * asked.batch // width),
            4 * rows * (6 * f.hidden + 2 * widest) + ATTENTION_SCRATCH, self._read(held, asked.batch))


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


def speed(planned: Planned, machine: cost.Machine, asked: Asked, dp: int) -> Speed:
    """Of ``dp`` replicas: decode with all caches full, prefill in chunks at half of the context."""
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
