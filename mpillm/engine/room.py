"""What a step's plan allocates beside weights and cache, to the byte: the buffers of models/llama and its layers.

Each rank records its step once over fixed buffers, which layers share by name (plan.py). Here are the same names,
without the arrays and without a kernel, so that a plan on a login node knows what a run will take. A test holds it
against the buffers of real steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mpillm import kernels
from mpillm.config import RunConfig
from mpillm.engine import kvcache, overlap, setup
from mpillm.models import deepseek, latent_weights, llama, registry
from mpillm.models.config import ModelConfig
from mpillm.models.llama import room_for
from mpillm.models.load import PANEL, apart, memory_format, stored_slice
from mpillm.models.load_experts import Stand, stand
from mpillm.models.weights import Weights
from mpillm.partition import Partition, Share, Span

APART = "experts' ", "latent "      # how the names of what does not hold rows begin


@dataclass
class Buffers:
    """Bytes by name of one recorded step of ``rows`` rows."""

    rows: int
    threads: int
    fast: bool
    found: dict[tuple[str, int], int] = field(default_factory=dict)
    tiled: bool = False

    @property
    def nbytes(self) -> int:
        """All of them, and the threads' tiles where a product has some."""
        tiled = any(name == "fused" for name, _ in self.found) or self.tiled
        return sum(self.found.values()) + (self.threads * kernels.TILES if tiled else 0)

    def take(self, name: str, n: int, each: int = 4) -> None:
        """Rows of ``n`` values of ``each`` bytes."""
        self.found[name, n] = self.rows * n * each

    def keep(self, name: str, n: int, each: int) -> None:
        """``n`` values of ``each`` bytes."""
        self.found[name, n] = n * each

    def threads_room(self, width: int) -> None:
        """Of each thread, for ``width`` outputs of all rows."""
        self.found["fused", width] = 4 * self.threads * (-(-self.rows * width // 16) * 16)

    def product(self, kind: str, k: int, width: int = 0, n: int = 1) -> None:
        """What a product with weights ``kind`` of ``k`` stored inputs takes its input as; ``width``: fused."""
        fast = self.fast and kind in kernels.QUANTISED
        if not n:
            return
        self.take("tail", 16)
        self.prepared("", self.rows, kind, k)
        self.tiled |= kernels.tier() == "amx" and kernels.prepared_kind(kind) != "numbers"
        if width or fast:
            width = width or kernels.ROOM_WIDTH
            self.threads_room(width)
            if fast:
                self.take("bf16", -(-k // 32) * 32, 2)
                self.found["widened", width * k] = 2 * self.threads * width * k

    def prepared(self, prefix: str, slots: int, kind: str, k: int, gathered: bool = False) -> None:
        """``slots`` inputs as weights ``kind`` take them; numbers only if they are ``gathered``."""
        form, whole = kernels.prepared_kind(kind), -(-k // 32) * 32
        if form == "codes":
            for name, n, each in (("codes", k, 1), ("scales", k // 32, 4), ("sums", k // 16, 4)):
                self.found[prefix + name, slots * n] = slots * n * each
        elif form == "numbers":
            if gathered:
                self.found[prefix + "numbers", slots * k] = 4 * slots * k
        else:
            self.found[prefix + "bf16", slots * whole] = 2 * slots * whole


@dataclass(frozen=True)
class _Rank:
    """One rank's part of a model."""

    model: ModelConfig
    weights: Weights
    asked: str
    split: Partition
    share: Share

    def format(self, names: tuple[str, ...] | list[str]) -> str:
        return memory_format(self.weights, names, self.asked)


def step_nbytes(run: RunConfig, model: ModelConfig, weights: Weights, split: Partition, share: Share,
                threads: int) -> int:
    """Bytes of all that the largest step's plan takes, with ``threads`` of a rank."""
    rank, rows = _Rank(model, weights, run.weights, split, share), room_for(run.chunk + run.max_batch)
    step = _whole_and_halves(run, rank, run.chunk + run.max_batch, threads)
    if model.mla == 3:           # steps without prompts have a plan of their own
        step += _whole_and_halves(run, rank, run.max_batch, threads)
        halves = overlap.planned(run, split.tp, run.chunk + run.max_batch)
        for each in (rows, rows // 2)[:1 + halves] if share.heads else ():
            step += _prompts(run, rank, each, threads)
    width = kvcache.form(model, share)[1]
    return step + kernels.attention_room(threads, width, setup.context_of(run, model), run.attention_scratch)


def _whole_and_halves(run: RunConfig, rank: _Rank, most: int, threads: int) -> int:
    """Bytes of a recorded step of ``most`` rows, and its halves: rows lie in its buffers, products' slots do not."""
    fast, rows = run.fast and kernels.tier() in ("avx512", "amx"), room_for(most)
    tiled = _attends_by_tiles(run, rank)
    whole, half = (Buffers(each, threads, fast, tiled=tiled) for each in (rows, rows // 2))
    nbytes = recorded(rank, whole)
    if overlap.planned(run, rank.split.tp, most):
        recorded(rank, half)
        nbytes += sum(size for key, size in half.found.items() if key not in whole.found and key[0].startswith(APART))
    return nbytes


def _attends_by_tiles(run: RunConfig, rank: _Rank) -> bool:
    _, size, value_dim = kvcache.form(rank.model, rank.share)
    types = run.kv_type, (run.kv_type_v or run.kv_type) if value_dim else ""
    heads = rank.share.heads.size or rank.split.places > 1
    return bool(heads) and kernels.by_tiles(*types, size, value_dim or rank.model.kv_rank, 0)


def recorded(rank: _Rank, buffers: Buffers) -> int:
    """Bytes of one recorded step: see models/llama."""
    model, hidden = rank.model, rank.model.hidden
    for name in ("x", "unused", "row_output"):
        buffers.take(name, hidden)
    for layer in range(model.n_layers):
        (_latent if model.latent else _attention)(rank, layer, buffers)
        if model.has_experts(layer):
            _experts(rank, layer, buffers)
        else:
            _feed_forward(rank, layer, buffers)
    kind = rank.format(["model.embed_tokens.weight" if model.tied else "lm_head.weight"])
    k = _stored(kind, Span(0, hidden))
    buffers.take("head_input", k)
    buffers.take("logits", rank.share.vocab.size)
    buffers.product(kind, k, n=rank.share.vocab.size)
    return buffers.nbytes


def _stored(kind: str, span: Span) -> int:
    first, last, _ = stored_slice(kind, span)
    return last - first


def _column_input(rank: _Rank, kind: str, buffers: Buffers) -> int:
    k = _stored(kind, Span(0, rank.model.hidden))
    buffers.take("column_input", k)
    return k


def _row_input(rank: _Rank, names: list[str], columns: Span, buffers: Buffers) -> None:
    kind = rank.format(names)
    first, last, _ = stored_slice(kind, columns)
    buffers.take(f"row_input {columns.start - first} {columns.size}", last - first)
    buffers.product(kind, last - first)


def _attention(rank: _Rank, layer: int, buffers: Buffers) -> None:
    """See layers/attention."""
    model, share, split = rank.model, rank.share, rank.split
    size, heads, columns = model.head_dim, share.heads.size, share.kv_columns.size
    runs = apart(rank.weights, registry.layer_matrices(layer, "qkv"), rank.asked)
    outputs = heads * size, columns, columns
    gathers = split.kv_mode != "redundant" and split.width > 1
    if not gathers and size % 16 == 0 and len(runs) == 1:
        k = _column_input(rank, runs[0][0], buffers)
        buffers.take("queries", heads * size)
        buffers.product(runs[0][0], k, width=size, n=sum(outputs))
    else:
        for i, (kind, run) in enumerate(runs):
            n = sum(outputs[run.start:run.stop])
            buffers.take(f"qkv {i}", n)
            buffers.product(kind, _column_input(rank, kind, buffers), n=n)
    if gathers:
        whole = share.kv_heads.size * size
        buffers.take("whole_k", whole)
        buffers.take("whole_v", whole)
    if split.places > 1:
        row = model.n_heads // split.rows
        for name, n in (("row_queries", row * size), ("part", row * size), ("part_sums", row),
                        ("parts", split.width * heads * size), ("parts_sums", split.width * heads)):
            buffers.take(name, n)
    _row_input(rank, list(registry.layer_matrices(layer, "output")), share.heads.times(size), buffers)


def _latent(rank: _Rank, layer: int, buffers: Buffers) -> None:
    """See layers/mla."""
    c, share, split, heads = rank.model, rank.share, rank.split, rank.share.heads.size
    names, spans = [f"{n}.weight" for n in latent_weights.inputs(c, layer)], latent_weights.input_spans(c, share)
    runs = apart(rank.weights, names, rank.asked)
    for i, (kind, run) in enumerate(runs):
        n = sum(span.size for span in spans[run.start:run.stop])
        buffers.take(f"latents {i}", n)
        buffers.product(kind, _column_input(rank, kind, buffers), n=n)
    row = c.kv_rank + c.rope_dim
    if split.kv_mode != "redundant" and split.width > 1:
        buffers.take("whole_latents", (c.q_rank + row) if heads or split.places > 1 else 0)
        if len(runs) > 1 and c.q_rank:
            buffers.take("own_latents", share.kv_columns.size)
    prefix = latent_weights.LAYER.format(layer)
    if heads and c.q_rank:
        kind = rank.format([f"{prefix}q_b_proj.weight"])
        k = _stored(kind, Span(0, c.q_rank))
        buffers.take("normed_queries", k)
        buffers.take("queries", heads * c.head_dim)
        buffers.product(kind, k)
    if heads and c.mla == 0:
        kind = latent_weights.whole_format(rank.weights, layer, rank.asked)
        k = _stored(kind, Span(0, c.kv_rank))
        for name, n in (("latent_input", k), ("expanded", heads * (c.nope_dim + c.value_dim)),
                        ("keys", heads * c.head_dim), ("values", heads * c.value_dim)):
            buffers.take(name, n)
        buffers.product(kind, k)
    elif heads:
        buffers.take("absorbed", heads * row)
        buffers.take("latent_values", heads * c.kv_rank)
        kind = latent_weights.part_format(rank.weights, layer, rank.asked)
        for part in ("absorb", "values"):
            k = latent_weights.part_shape(c, part, kind)[1]
            buffers.prepared("latent ", buffers.rows * heads, kind, k, gathered=True)
        buffers.threads_room(kernels.ROOM_WIDTH)
        buffers.take("tail", 16)
    if split.places > 1:
        for name, n in (("row_queries", c.n_heads * row), ("part", c.n_heads * c.kv_rank), ("part_sums", c.n_heads),
                        ("parts", split.width * heads * c.kv_rank), ("parts_sums", split.width * heads)):
            buffers.take(name, n)
    _row_input(rank, [f"{prefix}o_proj.weight"], share.heads.times(c.value_dim), buffers)


def _prompts(run: RunConfig, rank: _Rank, rows: int, threads: int) -> int:
    """What mode 3 takes to make keys and values of a stretch; see latent_prompt.py."""
    c, stretch = rank.model, kernels.STRETCH
    kind = latent_weights.part_format(rank.weights, 0, rank.asked)
    tiled = kernels.by_tiles(run.kv_type, run.kv_type, c.head_dim, c.value_dim, 0)
    branch, k = Buffers(stretch, threads, False, tiled=tiled), latent_weights.part_shape(c, "keys", kind)[1]
    branch.take("latents", k)
    branch.take("rotated", c.rope_dim)
    branch.product(kind, k)
    together = kernels.prompt_together_nbytes(deepseek.local_heads(c, rank.share), rows, run.attention_scratch)
    return branch.nbytes + together


def _gated(rank: _Rank, kinds: tuple[str, str], columns: Span, k: int, buffers: Buffers) -> None:
    """Gate and up of some columns, fused where they are whole panels."""
    n = columns.size
    if n % PANEL == 0:
        buffers.product(kinds[0], k, width=32 * min(kernels.ROOM_WIDTH // 32, n // PANEL), n=n)
    else:
        buffers.take("gate_up", 2 * n)
        buffers.product(kinds[0], k)
    first, last, _ = stored_slice(kinds[1], columns)
    buffers.take(f"row_input {columns.start - first} {n}", last - first)
    buffers.product(kinds[1], last - first)


def _feed_forward(rank: _Rank, layer: int, buffers: Buffers) -> None:
    """See layers/mlp."""
    gate_up, down = (rank.format(registry.layer_matrices(layer, group)) for group in ("gate_up", "down"))
    columns = llama.dense_columns(rank.model, rank.share)
    _gated(rank, (gate_up, down), columns, _column_input(rank, gate_up, buffers), buffers)


def _experts(rank: _Rank, layer: int, buffers: Buffers) -> None:
    """See experts.py."""
    model = rank.model
    s: Stand = stand(model, rank.weights, llama.LAYER.format(layer), rank.share, rank.asked)
    buffers.take("column_input", s.k)
    if s.apart:
        buffers.take("shared_output", model.hidden)
        _gated(rank, s.apart, rank.share.shared_columns, s.k, buffers)
    slots = buffers.rows * (model.experts_chosen + s.merged)
    for name in ("picked", "weights", "where", "sources"):
        buffers.keep(f"experts' {name}", slots, 4)
    if not s.width or not s.count:
        return
    buffers.keep("experts' starts", s.count + 1, 8)
    buffers.take("router", model.experts)
    buffers.take("router's keys", model.experts + model.routing.groups)
    buffers.product("f32", s.k)
    buffers.keep("experts' columns", slots * s.k_down, 4)
    buffers.keep("experts' made", slots * model.hidden, 4)
    buffers.prepared("experts' ", slots, s.gate_up, s.k, gathered=True)
    buffers.prepared("experts' ", slots, s.down, s.k_down)
    buffers.threads_room(kernels.ROOM_WIDTH)
