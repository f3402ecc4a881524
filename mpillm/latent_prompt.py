"""Behind kernels: prompts' rows attend to keys and values that are made of cached latents, some heads at a time.

Beside a step's tape stand tapes of a stretch, one for some heads of a layer: read the latents, make keys and values,
attend. They run once for each stretch that a sequence's rows see, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mpillm.cache import BLOCK, LayerCache
from mpillm.jit import attention as _attention
from mpillm.jit import latent_prompt as _prompt
from mpillm.jit.tape import Cell, address_of
from mpillm.latent import LatentHeads
from mpillm.plan import Plan
from mpillm.quant.layout import PAIR, PANEL, allocate
from mpillm.quant.packed import PackedMatrix

STRETCH = _attention.STRETCH
_CELLS = ("from", "block_table", "begin", "stretch", "own_rows", "q_at", "out_at", "row_state")


@dataclass(frozen=True)
class Room:
    """How many heads and rows are worked on together, so that a stretch's keys and values and the sums fit in bytes."""

    heads: int
    rows: int

    @classmethod
    def of(cls, heads: LatentHeads, capacity: int, nbytes: int) -> Room:
        """At least one head, and the rows of a tile."""
        own, row = cls.head_nbytes(heads), cls.row_nbytes(heads)
        nbytes -= 4 * STRETCH * (heads.row + 64)
        most = min(heads.n_heads, max(1, nbytes // (own + capacity * row)))
        parts = -(-heads.n_heads // most)
        together = -(-heads.n_heads // parts)
        return cls(together, min(capacity, max(_attention.QUERIES, (nbytes - together * own) // (together * row))))

    @staticmethod
    def head_nbytes(heads: LatentHeads) -> int:
        """Of the parts of keys and values of a stretch, and of these themselves."""
        nope, value = (-(-n // PANEL) * PANEL for n in (heads.nope, heads.value))
        return 4 * STRETCH * (nope + 2 * value + heads.query)

    @staticmethod
    def row_nbytes(heads: LatentHeads) -> int:
        """Of a row's sums of one head."""
        return 4 * (_attention.padded(heads.value, False) + 2)


def prompt_nbytes(heads: LatentHeads, capacity: int, scratch: int) -> int:
    """Bytes that :func:`record_prompts` takes in a plan of ``capacity`` rows with this ``scratch``."""
    return prompt_together_nbytes(heads, capacity, scratch) + 4 * STRETCH * (heads.row + 64)


def prompt_together_nbytes(heads: LatentHeads, capacity: int, scratch: int) -> int:
    """Of them, those for keys, values and sums of the heads that are worked on together."""
    room = Room.of(heads, capacity, scratch)
    return room.heads * (room.head_nbytes(heads) + room.rows * room.row_nbytes(heads))


@dataclass(frozen=True)
class PromptMatrices:
    """Of every head: what makes the key part [nope, kv_rank], and values [value, kv_rank], each in whole panels."""

    keys: PackedMatrix
    values: PackedMatrix


def record_prompts(plan: Plan, q: np.ndarray, heads: LatentHeads, cache: LayerCache, matrices: PromptMatrices,
                   scale: float, out: np.ndarray) -> None:
    """out [T, H * value] = softmax(scale * q K) V for the rows of prompts: those behind a step's ``generated`` ones.

    ``cache`` holds latent rows once; K and V are made of them. What is allocated stays within the plan's scratch.
    """
    room = Room.of(heads, plan.capacity, plan.scratch_nbytes)
    groups = [_Heads(plan, q, heads, range(first, min(first + room.heads, heads.n_heads)), cache, matrices, scale, out,
                     room) for first in range(0, heads.n_heads, room.heads)]

    def run(rows: int) -> None:
        step = plan.rows
        for first, count in _runs(step.sequences, step.positions, step.generated, rows, room.rows):
            for group in groups:
                group.run(first, count, int(step.positions[first]), step.block_table[step.sequences[first]])

    plan.call("attention", run)


def _runs(sequences: np.ndarray, positions: np.ndarray, start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """First row and number of rows of consecutive positions of a sequence, ``most`` at most."""
    follows = (np.diff(sequences[start:stop]) == 0) & (np.diff(positions[start:stop]) == 1)
    borders = [start, *(np.flatnonzero(~follows) + start + 1).tolist(), stop]
    for first, after in zip(borders, borders[1:], strict=False):
        for row in range(first, after, most):
            yield row, min(most, after - row)


class _Heads:
    """The tape of a stretch for some heads."""

    def __init__(self, plan: Plan, q: np.ndarray, heads: LatentHeads, own: range, cache: LayerCache,
                 matrices: PromptMatrices, scale: float, out: np.ndarray, room: Room) -> None:
        h, n = heads, len(own)
        self._plan = branch = plan.branch(STRETCH)
        self._strides = q.strides[0] // 4, out.strides[0] // 4
        self._q_at, self._out_at = own.start * h.query, own.start * h.value
        cell = {name: Cell(name) for name in _CELLS}
        w_keys, w_values = (_some(w, own, h.n_heads) for w in (matrices.keys, matrices.values))
        k_rank = w_keys.k
        latents, rotated = branch.buffer("latents", h.kv_rank, whole=k_rank), branch.buffer("rotated", h.rope)
        width = _attention.padded(h.value, False)

        def shared(name: str, rows: int, each: int) -> np.ndarray:
            """Room that all layers and groups share: rows of ``each`` values of every head."""
            return branch.kept((name, rows), lambda: allocate(rows * room.heads * each, np.float32))[:rows * n * each]

        made_k, made_v = (shared(f"made {name}", STRETCH, w.n // n).reshape(STRETCH, w.n)
                          for name, w in (("keys", w_keys), ("values", w_values)))
        keys, values = shared("keys", STRETCH, h.query), shared("values", STRETCH, width)
        tiled = _attention.by_tiles(cache.kv_type, cache.kv_type, h.query, h.value, 0)
        if tiled:       # in bf16, in half of that room
            keys, values = (x.view(np.uint16)[:x.size] for x in (keys, values))
        sums = [shared(name, room.rows, each) for name, each in (("most", 1), ("total", 1), ("acc", width))]
        words = cache.keys.view(np.int16) if cache.kv_type == "q8_0" else np.zeros(0, np.int16)
        tape, rows = branch.tape, Cell("rows")
        tape.add("attention", _prompt.take_operation(cache.kv_type), rows, cache.keys, words, cell["block_table"],
                 cell["from"], PAIR.get(cache.kv_type, 1), h.kv_rank, h.rope, latents, k_rank, rotated)
        whole = branch.buffer("latents", k_rank)
        branch.linear(whole, w_keys, None, made_k)
        branch.linear(whole, w_values, None, made_v)
        tape.add("attention", _prompt.fill_operation(tiled), rows, n, h.nope, h.rope, h.value, made_k, w_keys.n,
                 w_keys.n // n, made_v, w_values.n, w_values.n // n, rotated, keys, values)
        tape.add("attention", _prompt.attend_operation(tiled), cell["own_rows"], cell["begin"], cell["stretch"], n,
                 scale, h.query, h.value, q, cell["q_at"], self._strides[0], keys, values, np.zeros(0, np.int16),
                 Cell("numbers"), np.zeros(1, np.int32), *sums, cell["row_state"], out, cell["out_at"],
                 self._strides[1], branch.scratch() if tiled else np.zeros(0, np.uint8))

    def run(self, first: int, count: int, begin: int, table: np.ndarray) -> None:
        """Rows ``first`` ... ``first + count - 1``, at positions ``begin`` ...; ``table``: the sequence's blocks."""
        end = begin + count
        numbers = np.arange(-(-end // BLOCK), dtype=np.int32) % _prompt.BLOCKS
        for stretch in range((end - 1) // STRETCH + 1):
            start = stretch * STRETCH
            skipped = max(0, start - begin)         # rows that lie before the stretch
            row = first + skipped
            self._plan.run_alone(min(end - start, STRETCH), **{
                "from": start // BLOCK, "block_table": address_of(table), "begin": begin + skipped, "stretch": stretch,
                "own_rows": count - skipped, "q_at": row * self._strides[0] + self._q_at,
                "out_at": row * self._strides[1] + self._out_at, "row_state": skipped,
                "numbers": address_of(numbers)})


def _some(w: PackedMatrix, own: range, heads: int) -> PackedMatrix:
    """The matrices of some heads, in place."""
    n = w.n // heads
    panels = range(own.start * n // PANEL, own.stop * n // PANEL)
    each = 0 if w.scales is None else len(w.scales) // (w.n // PANEL)
    scales = None if w.scales is None else w.scales[panels.start * each:panels.stop * each]
    return PackedMatrix(w.format, len(own) * n, w.k, w.data[panels.start * w.stride:panels.stop * w.stride], scales)
