"""What a step of a model moves and computes, in pure figures: the numerators of the shares of a machine's limits.

Bytes are those that must come from memory at least once a step: every packed weight but the rows of an untied
embedding, the keys and values that are attended to, those that are written. Operations count a multiply and an add as
two. Both are of one rank; a job's are the sums over its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpillm.engine.cost import row_columns
from mpillm.models import registry
from mpillm.models.config import ModelConfig
from mpillm.partition import Share


@dataclass(frozen=True)
class SpeedTest:
    """A measurement, named as llama-bench names it: "pp512" prefills, "tg128 @ d4096" generates behind a depth."""

    kind: str          # "pp" or "tg"
    count: int         # tokens of each sequence
    batch: int         # sequences
    depth: int         # positions that are in the cache before

    @property
    def name(self) -> str:
        return f"{self.kind}{self.count}" + (f" @ d{self.depth}" if self.depth else "")


@dataclass(frozen=True)
class Piece:
    """Rows ``start ... start + count - 1`` of one sequence in a step, with or without a choice of the next token."""

    start: int
    count: int
    chooses: bool


@dataclass(frozen=True)
class Costs:
    """One rank's share of a model: bytes of the weights that a step reads, of the cache a position, operations.

    A step of R rows reads of ``routed_bytes``, the experts among which tokens choose, those that a row chose: on the
    mean of free and even choices 1 - (1 - ``chosen``)**R of them.
    """

    weight_bytes: int
    cache_bytes: float                 # of one position, all layers
    row_operations: float              # of one row in the layers' matrices
    head_operations: int               # of one row in the output head
    score_operations: int              # of one row and one position that it attends to, all layers
    windows: tuple[int | None, ...]    # of the layers, None = all positions
    routed_bytes: int = 0              # of weight_bytes
    chosen: float = 0.0                # of a layer's experts, by each token

    def bytes_of(self, pieces: Sequence[Piece]) -> float:
        """Bytes that a step of these pieces moves."""
        positions = sum(p.count + self._seen(p.start + p.count, p.count) for p in pieces)
        unread = self.routed_bytes * (1 - self.chosen) ** sum(p.count for p in pieces)
        return self.weight_bytes - unread + self.cache_bytes * positions

    def operations_of(self, pieces: Iterable[Piece]) -> float:
        """Operations of a step of these pieces."""
        total = 0.0
        for p in pieces:
            attended = sum(self._seen(position + 1, 1) for position in range(p.start, p.start + p.count))
            total += (p.count * self.row_operations + p.chooses * self.head_operations
                      + attended * self.score_operations)
        return total

    def _seen(self, length: int, rows: int) -> float:
        """Positions that the last ``rows`` rows of ``length`` attend to together, the mean over the layers."""
        if not any(self.windows):
            return length
        return sum(length if not w else min(length, w + rows - 1) for w in self.windows) / len(self.windows)


def costs(model: ModelConfig, share: Share, weight_bytes: int, embedding_bytes: int, block_bytes: int,
          block: int, routed_bytes: int = 0) -> Costs:
    """The costs of one rank's ``share``.

    ``weight_bytes``: all that it holds; ``embedding_bytes``: of the embedding's part, which an untied model only looks
    up; ``block_bytes``: of a cache block of ``block`` positions, all layers; ``routed_bytes``: of the experts among
    which tokens choose.
    """
    columns = row_columns(share, model.experts, model.experts_chosen, model.shared_experts)
    layer = registry.attention_products(model, share) + 3 * round(columns) * model.hidden
    key, value = scored(model)
    return Costs(weight_bytes - (0 if model.tied else embedding_bytes), block_bytes / block,
                 2 * layer * model.n_layers, 2 * model.hidden * share.vocab.size,
                 2 * share.heads.size * (key + value) * model.n_layers, model.windows, routed_bytes,
                 model.experts_chosen / model.experts if model.experts else 0.0)


def scored(model: ModelConfig) -> tuple[int, int]:
    """Columns of keys and of values that a head's query meets at a position: of the latent row, if that is cached."""
    if model.latent and model.mla:
        return model.kv_rank + model.rope_dim, model.kv_rank
    return model.head_dim, model.value_dim or model.head_dim


def budget(test: SpeedTest, step_seconds: float, rows: int, seconds: float, repetitions: int) -> tuple[int, int]:
    """(repetitions, amount) of a test that fit ``seconds``, when a step takes ``step_seconds``.

    The amount is tokens of every sequence for "tg", sequences for "pp" (which run one behind another, ``rows`` a step,
    so that fewer of them show the same speed). Fewer repetitions first, then a smaller amount; 1 and 4 tokens at least.
    """
    if test.kind == "tg":
        whole, per_step, least = test.count, 1.0, min(4, test.count)
    else:
        whole, per_step, least = test.batch, rows / test.count, 1
    affordable = per_step * seconds / step_seconds
    if affordable >= repetitions * whole:
        return repetitions, whole
    if affordable >= whole:
        return max(1, int(affordable // whole)), whole
    return 1, max(least, min(whole, int(affordable)))
