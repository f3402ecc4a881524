"""Reading the experts of a layer: which of them a rank holds, in which formats, and how they stand in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mpillm import kernels
from mpillm.layers.mlp import GatedMLP
from mpillm.layers.moe import ExpertMLP
from mpillm.models.config import ModelConfig
from mpillm.models.expert_names import CORRECTION, ROUTER, SHARED
from mpillm.models.load import PANEL, QUANT_BLOCK, SUPER_BLOCKS, Loader, Piece, memory_format, stored_slice
from mpillm.models.weights import Weights
from mpillm.partition import Share, Span

SUPER_BLOCK = 256


@dataclass(frozen=True)
class Stand:
    """How the experts of one layer stand in a rank's memory.

    The ``columns`` of the experts ``held`` are one matrix for gate and up and one for down, of these formats; each is
    filled up to whole panels. ``merged`` shared experts stand behind them as further ones; else these are a
    feed-forward by itself, with the formats ``apart`` of its gate and up, and down.
    """

    gate_up: str
    down: str
    held: Span
    columns: Span
    merged: int
    apart: tuple[str, str] | None
    k: int               # inputs as stored, of gate and up and of the router
    height: int          # outputs of down

    @property
    def count(self) -> int:
        """Experts in the matrices."""
        return self.held.size + self.merged

    @property
    def width(self) -> int:
        """Columns of an expert in whole panels."""
        return -(-self.columns.size // PANEL) * PANEL

    @property
    def k_down(self) -> int:
        """Inputs of down as stored."""
        return -(-self.width // QUANT_BLOCK) * QUANT_BLOCK if self.down in kernels.QUANTISED else self.width

    @property
    def phase(self) -> int:
        return stored_slice(self.down, self.columns)[2]


def expert_names(prefix: str, experts: Iterable[int], part: str) -> list[str]:
    """The weights of a layer's experts, ``part`` gate, up or down; ``prefix`` is the layer's."""
    return [f"{prefix}mlp.experts.{e}.{part}_proj.weight" for e in experts]


def shared_names(prefix: str, part: str) -> list[str]:
    """The weight of a layer's shared experts, all in one."""
    return [f"{prefix}{SHARED}{part}_proj.weight"]


@lru_cache(maxsize=4096)
def _packed_together(prefix: str, experts: int, shared: bool) -> tuple[tuple[str, ...], ...]:
    """The weights whose format is one: of gate and up, and of down; then those of the shared experts."""
    every = range(experts)
    groups = [expert_names(prefix, every, "gate") + expert_names(prefix, every, "up"),
              expert_names(prefix, every, "down")]
    if shared:
        groups += [shared_names(prefix, "gate") + shared_names(prefix, "up"), shared_names(prefix, "down")]
    return tuple(map(tuple, groups))


def stand(config: ModelConfig, weights: Weights, prefix: str, share: Share, asked: str) -> Stand:
    """What a share holds of a layer's experts; shared ones stand among the others if cut and stored alike."""
    together = _packed_together(prefix, config.experts, config.shared_experts > 0)
    kinds = [memory_format(weights, names, asked) for names in together]
    gate_up, down, *shared = kinds
    whole = share.experts.size == config.experts
    in_phase = down not in SUPER_BLOCKS or config.shared_experts == 1 or config.expert_intermediate % SUPER_BLOCK == 0
    merged = config.shared_experts if whole and in_phase and shared == [gate_up, down] else 0
    apart = (shared[0], shared[1]) if shared and not merged else None
    inputs = Span(0, config.hidden)
    k = max(stored_slice(kind, inputs)[1] for kind in (gate_up, *(apart[:1] if apart else ())))
    return Stand(gate_up, down, share.experts, share.columns, merged, apart, k, -(-config.hidden // PANEL) * PANEL)


def held(config: ModelConfig, weights: Weights, prefix: str, share: Share,
         asked: str) -> Iterator[tuple[Sequence[str], str, int]]:
    """Names of the tensors, format and bytes of each packed matrix that a share holds of a layer's experts.

    Without the router. Shared experts come by themselves wherever they stand, since recipes name them so.
    """
    s = stand(config, weights, prefix, share, asked)
    gate_up, down, *others = _packed_together(prefix, config.experts, config.shared_experts > 0)
    both: Sequence[str]
    for count, (both, last) in ((s.held.size, (gate_up, down)), (s.merged, others or ((), ()))):
        if count:
            yield both, s.gate_up, kernels.packed_nbytes(s.gate_up, 2 * count * s.width, s.k)
            yield last, s.down, kernels.packed_nbytes(s.down, count * s.height, s.k_down, s.phase)
    if s.apart:
        columns = share.shared_columns
        first, stop, phase = stored_slice(s.apart[1], columns)
        yield others[0], s.apart[0], kernels.packed_nbytes(s.apart[0], 2 * columns.size, s.k)
        yield others[1], s.apart[1], kernels.packed_nbytes(s.apart[1], config.hidden, stop - first, phase)


def routed_bytes(config: ModelConfig, weights: Weights, share: Share, asked: str) -> int:
    """Bytes of the experts among which tokens choose, all layers."""
    return sum(nbytes for layer in range(config.n_layers) if config.has_experts(layer)
               for names, _, nbytes in held(config, weights, f"model.layers.{layer}.", share, asked)
               if SHARED not in names[0])


def router_bytes(config: ModelConfig, weights: Weights, prefix: str, share: Share, asked: str) -> int:
    """Bytes of a layer's router, float32, on every rank."""
    corrections = 4 * config.experts if config.routing.bias and weights.has(prefix + CORRECTION) else 0
    return kernels.packed_nbytes("f32", config.experts, stand(config, weights, prefix, share, asked).k) + corrections


def read_experts(load: Loader, prefix: str) -> ExpertMLP:
    """The experts of the layer ``prefix``: what the loader's share holds of them, and the router. Raises ModelError."""
    c, s = load.config, stand(load.config, load.weights, prefix, load.share, load.asked)
    span = s.columns
    assert stored_slice(s.down, span)[0] == span.start, f"columns {span} cut a block"
    k, parts = s.k, [range(s.held.start, s.held.stop), range(s.merged)]

    def pieces(part: str, tensor: int, height: int, cut: Span, along: int, aside: int) -> list[Piece]:
        """Of each expert the rows ``cut``; shared ones' are ``along`` rows and ``aside`` columns apart."""
        held = [Piece(name, cut, i * height, tensor) for i, name in enumerate(expert_names(prefix, parts[0], part))]
        return held + [Piece(shared_names(prefix, part)[0], Span(cut.start + j * along, cut.stop + j * along),
                             (len(held) + j) * height, tensor, j * aside) for j in parts[1]]

    packer = kernels.Packer(s.gate_up, 2 * s.count * s.width, k, interleaved=2)
    both = [piece for two in zip(*(pieces(part, tensor, s.width, span, c.expert_intermediate, 0)
                                   for tensor, part in enumerate(("gate", "up"))), strict=True) for piece in two]
    gate_up = load.fill(packer, both if span else (), range(c.hidden), s.width)

    packer = kernels.Packer(s.down, s.count * s.height, s.k_down, s.phase)
    if not span:
        packer.put(0, np.zeros((packer.n, 0), np.float32))
    outputs = pieces("down", 0, s.height, Span(0, c.hidden), 0, c.expert_intermediate)
    down = load.fill(packer, outputs if span else (), span.range(), s.height)

    experts = kernels.Experts(_router(load, prefix, k), gate_up, down, s.width, c.hidden, s.held.size, s.held.start,
                              s.merged)
    return ExpertMLP(experts, _shared(load, prefix, k) if s.apart else None, load.reducer)


def _router(load: Loader, prefix: str, k: int) -> kernels.Router:
    c, routing = load.config, load.config.routing
    packer = kernels.Packer("f32", c.experts, k)
    weight = load.fill(packer, [Piece(prefix + ROUTER, Span(0, c.experts))], range(c.hidden))
    corrected = routing.bias and load.weights.has(prefix + CORRECTION)
    return kernels.Router(weight, c.experts_chosen, routing.normed, routing.scale, routing.scoring == "sigmoid",
                          load.vector(prefix + CORRECTION) if corrected else None, routing.groups,
                          routing.groups_chosen, routing.group_best == 2)


def _shared(load: Loader, prefix: str, k: int) -> GatedMLP:
    """The shared experts as one feed-forward, split by columns of its own; ``k`` inputs are stored."""
    gate, up, down = (shared_names(prefix, part)[0].removesuffix(".weight") for part in ("gate", "up", "down"))
    columns = load.share.shared_columns
    return GatedMLP(load.pairs((gate, up), columns, k), load.rows(down, columns))
