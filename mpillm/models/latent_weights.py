"""Which matrices a rank holds of a layer's latent attention, in which formats, and how they are read.

``kv_b_proj`` makes a head's keys and values of a latent. Mode 0 holds its rows. The others bring the query into the
latent's space instead, and values out of it, each head by a matrix of its own: ``absorb`` [kv_rank, nope], the key part
transposed, and ``values`` [value, kv_rank]. Mode 3, which makes keys of latents too, also holds ``keys``
[nope, kv_rank].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mpillm import kernels
from mpillm.models.config import ModelConfig
from mpillm.models.load import CHUNK_BYTES, PANEL, QUANT_BLOCK, Loader, apart, memory_format, stored_slice
from mpillm.models.weights import Weights
from mpillm.partition import Share, Span
from mpillm.quant import recipe

LAYER = "model.layers.{}.self_attn."
Held = tuple[Sequence[str], str, int]


def parts_of(mode: int) -> tuple[str, ...]:
    """The matrices that are made of ``kv_b_proj`` in a mode."""
    return {0: (), 3: ("absorb", "values", "keys")}.get(mode, ("absorb", "values"))


def part_shape(config: ModelConfig, part: str, kind: str) -> tuple[int, int]:
    """(outputs in whole panels, inputs in whole blocks) of a head's matrix."""
    c = config
    n, k = {"absorb": (c.kv_rank, c.nope_dim), "values": (c.value_dim, c.kv_rank),
            "keys": (c.nope_dim, c.kv_rank)}[part]
    return -(-n // PANEL) * PANEL, -(-k // QUANT_BLOCK) * QUANT_BLOCK if kind in kernels.QUANTISED else k


def part_format(weights: Weights, layer: int, asked: str) -> str:
    """The format of the matrices that are made of ``kv_b_proj``.

    ``auto`` keeps what is stored, but takes bf16 for quantised types: their blocks lie along other inputs now.
    """
    name = kv_b(layer)
    stated = recipe.parse(asked).of(*weights.groups(name))
    if stated != "auto":
        return stated
    kind = memory_format(weights, [name], asked)
    return "bf16" if kind in kernels.QUANTISED else kind


def whole_format(weights: Weights, layer: int, asked: str) -> str:
    """The format of the rows of ``kv_b_proj``; K-quants in two tensors cannot be put together again."""
    name = kv_b(layer)
    kind = memory_format(weights, [name], asked)
    return kind if weights.in_rows(name) else part_format(weights, layer, asked)


def inputs(config: ModelConfig, layer: int) -> tuple[str, str]:
    """Names of what makes the queries' latent (or queries), and of what makes the latent row."""
    first = "q_a_proj" if config.q_rank else "q_proj"
    return f"{LAYER.format(layer)}{first}", f"{LAYER.format(layer)}kv_a_proj_with_mqa"


def kv_b(layer: int) -> str:
    """Name of the weight that makes keys and values."""
    return f"{LAYER.format(layer)}kv_b_proj.weight"


def input_spans(config: ModelConfig, share: Share) -> list[Span]:
    """The outputs of both that are computed here: of the latents the share's columns, of queries its heads'."""
    own = share.kv_columns
    if not config.q_rank:
        return [share.heads.times(config.head_dim), own]
    row = Span(config.q_rank, config.q_rank + config.kv_rank + config.rope_dim)
    queries, latents = own.overlap(Span(0, config.q_rank)), own.overlap(row)
    return [queries or Span(0, 0), latents.relative_to(config.q_rank) if latents else Span(0, 0)]


def latent_columns(config: ModelConfig) -> int:
    """Columns that all heads share: the queries' latent and the latent row."""
    return config.q_rank + config.kv_rank + config.rope_dim


def held(config: ModelConfig, weights: Weights, layer: int, share: Share, asked: str) -> Iterator[Held]:
    """Names of the tensors, format and bytes of each packed matrix that a share holds of a layer's attention."""
    c, heads, at = config, share.heads.size, LAYER.format(layer)
    names, spans = [name + ".weight" for name in inputs(c, layer)], input_spans(c, share)
    for kind, run in apart(weights, names, asked):
        n = sum(span.size for span in spans[run.start:run.stop])
        yield names[run.start:run.stop], kind, _bytes(kind, n, Span(0, c.hidden))
    if c.q_rank:
        name = [f"{at}q_b_proj.weight"]
        kind = memory_format(weights, name, asked)
        yield name, kind, _bytes(kind, heads * c.head_dim, Span(0, c.q_rank))
    if c.mla == 0:
        kind = whole_format(weights, layer, asked)
        yield [kv_b(layer)], kind, _bytes(kind, heads * (c.nope_dim + c.value_dim), Span(0, c.kv_rank))
    for part in parts_of(c.mla):
        kind = part_format(weights, layer, asked)
        n, k = part_shape(c, part, kind)
        yield [kv_b(layer)], kind, kernels.packed_nbytes(kind, heads * n, k)
    name = [f"{at}o_proj.weight"]
    kind = memory_format(weights, name, asked)
    yield name, kind, _bytes(kind, c.hidden, share.heads.times(c.value_dim))


def _bytes(kind: str, n: int, columns: Span) -> int:
    first, last, phase = stored_slice(kind, columns)
    return kernels.packed_nbytes(kind, n, last - first, phase)


def formats(config: ModelConfig, weights: Weights, asked: str) -> set[str]:
    """The formats that matrices of latent attention have in memory."""
    share = Share(0, 0, 0, *[Span(0, 0)] * 5)
    return {kind for layer in range(config.n_layers) for _, kind, _ in held(config, weights, layer, share, asked)}


def vector_values(config: ModelConfig, share: Share) -> int:
    """Values in the norms and biases of one layer's latent attention that a share holds."""
    biased = share.kv_columns.size if config.qkv_bias and config.q_rank else 0
    if config.qkv_bias and not config.q_rank:
        biased = sum(span.size for span in input_spans(config, share))
    return config.q_rank + config.kv_rank + biased + (config.hidden if config.output_bias else 0)


def load_parts(load: Loader, layer: int) -> list[kernels.PackedMatrix]:
    """The matrices of ``parts_of`` the mode, of the heads of the loader's share, some heads at a time."""
    c, heads = load.config, load.share.heads
    kind, name = part_format(load.weights, layer, load.asked), kv_b(layer)
    shapes = {part: part_shape(c, part, kind) for part in parts_of(c.mla)}
    packers = {part: kernels.Packer(kind, heads.size * n, k) for part, (n, k) in shapes.items()}
    step = max(1, CHUNK_BYTES // (4 * (c.nope_dim + c.value_dim) * c.kv_rank))
    for first in range(heads.start, heads.stop, step):
        keys, values = load.weights.kv_b(layer, range(first, min(first + step, heads.stop)))
        found = {"absorb": keys.swapaxes(1, 2), "values": values, "keys": keys}
        for part, (n, k) in shapes.items():
            _, rows, columns = found[part].shape
            filled = np.pad(found[part], ((0, 0), (0, n - rows), (0, k - columns)))
            lost = packers[part].put((first - heads.start) * n, filled.reshape(-1, k))
            load.check(packers[part], name, lost)
    return [load.finish(packers[part]) for part in shapes]
