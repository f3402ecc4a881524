"""Building layers from a checkpoint: one tensor at a time, of each only the slice that is owned here.

Chunks of rows are read and packed by several threads, each chunk by one, which finds it in its cache; :meth:`ahead` of
a matrix that is not complete the next one begins. Peak memory is the packed slices plus ``LOADING_BYTES``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from mpillm import kernels
from mpillm.errors import ModelError
from mpillm.layers.embedding import VocabEmbedding, VocabHead
from mpillm.layers.linear import ColumnLinear, Reducer, RowLinear
from mpillm.machine import signals
from mpillm.machine.guard import board
from mpillm.models.config import ModelConfig
from mpillm.models.weights import Weights
from mpillm.partition import Share, Span
from mpillm.quant import recipe

CHUNK_BYTES = 2 << 20               # of a chunk's rows as stored, or of their values in float32
WORKERS = 4                         # that read and pack at the same time, at most
LOADING_BYTES = 2 * WORKERS * CHUNK_BYTES     # beside the packed weights: of each chunk what was read, and its values
QUANT_BLOCK, PANEL = 32, 16

# Stored types that have kernels of their own
KEPT = {"F32": "f32", "BF16": "bf16", "F16": "f16", "Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1", "Q4_K": "q4_K",
         "Q6_K": "q6_K"}
SUPER_BLOCKS = ("q4_K", "q6_K")


def memory_format(weights: Weights, names: Sequence[str], asked: str) -> str:
    """The format in memory of tensors that are packed together; ``asked``: a format or a recipe (quant/recipe.py).

    ``auto`` keeps what the file has when a kernel exists for it, and takes bf16 otherwise; tensors that
    differ take bf16 when all are quantised or bf16, else f32, which loses nothing.
    """
    stated = recipe.parse(asked).of(*weights.groups(names[0]))
    if stated != "auto":
        return stated
    kept = {KEPT.get(dtype, "bf16") for dtype in weights.dtypes(tuple(names))}
    if len(kept) == 1:
        return kept.pop()
    return "bf16" if kept <= {"bf16", *kernels.QUANTISED} else "f32"


def apart(weights: Weights, names: Sequence[str], asked: str) -> list[tuple[str, range]]:
    """The tensors of one product as runs that keep their formats: (format, which of ``names``).

    Where all are quantised or bf16 (files of type Q4_K_M hold q and k as q4_K beside v as q6_K), each run of
    neighbours of one format is a matrix by itself; otherwise all are one run in ``memory_format``.
    """
    kinds = [memory_format(weights, [name], asked) for name in names]
    if not set(kinds) <= {"bf16", *kernels.QUANTISED}:
        return [(memory_format(weights, names, asked), range(len(names)))]
    starts = [i for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    return [(kinds[i], range(i, stop)) for i, stop in zip(starts, [*starts[1:], len(names)], strict=True)]


def stored_slice(kind: str, span: Span) -> tuple[int, int, int]:
    """(first, last, phase) of the inputs that a matrix holds for ``span``: whole blocks if it is quantised."""
    if kind not in kernels.QUANTISED or not span.size:
        return span.start, span.stop, 0
    first, last = span.start // QUANT_BLOCK, -(-span.stop // QUANT_BLOCK)
    return first * QUANT_BLOCK, last * QUANT_BLOCK, first % 8 if kind in SUPER_BLOCKS else 0


@dataclass
class Piece:
    """Rows of one tensor in a packed matrix: from row ``at`` on, of the ``tensor``-th of those that stand in turn.

    Its columns are ``aside`` of those that are asked for.
    """

    name: str
    rows: Span
    at: int = 0
    tensor: int = 0
    aside: int = 0


#: a tensor's name, whether its first panel is that in which the job before ended, and what is to be done
Lost = tuple[int, int]
Job = tuple[str, bool, Callable[[], Lost]]


class Loader:
    """Reads a share of a model's weights into packed layers."""

    def __init__(self, config: ModelConfig, weights: Weights, share: Share, asked: str,
                 reducer: Reducer) -> None:
        self.config, self.weights, self.share = config, weights, share
        self.asked, self.reducer = asked, reducer
        self.nbytes = 0
        self._own = threading.local()       # a worker's room
        self._pool = ThreadPoolExecutor(min(WORKERS, kernels.threads() + 1))    # one waits for the disk meanwhile
        self._ahead = False
        self._pending: deque[tuple[kernels.Packer, str, Future[Lost]]] = deque()
        self._open: list[kernels.Packer] = []           # whose matrices have been given out

    # Spans of outputs, in rows of the checkpoint's matrices.

    def query_rows(self) -> Span:
        return Span(self.share.heads.start * self.config.head_dim, self.share.heads.stop * self.config.head_dim)

    def columns_apart(self, names: Sequence[str], spans: Sequence[Span]) -> list[ColumnLinear]:
        """Column-parallel products of the ``spans`` of outputs of several tensors, below each other.

        It is one product, or several where tensors keep formats that differ.
        """
        runs = apart(self.weights, [name + ".weight" for name in names], self.asked)
        found = [self._columns(names[run.start:run.stop], spans[run.start:run.stop], kind) for kind, run in runs]
        assert len({part.weight.k for part in found}) == 1, "products of one input store as many of its values"
        return found

    def columns(self, name: str, span: Span, kind: str | None = None) -> ColumnLinear:
        """A column-parallel product of the ``span`` of outputs; ``kind``: its format, None for the usual one."""
        return self._columns([name], [span], self._format([name + ".weight"]) if kind is None else kind)

    def pairs(self, names: tuple[str, str], span: Span, k: int = 0) -> ColumnLinear:
        """The same ``span`` of two tensors; in turn, a panel each, where it is whole panels; ``k`` inputs or more."""
        return self._columns(names, [span, span], self._format([name + ".weight" for name in names]),
                             in_turn=span.size % PANEL == 0, k=k)

    def _columns(self, names: Sequence[str], spans: Sequence[Span], kind: str,
                 in_turn: bool = False, k: int = 0) -> ColumnLinear:
        pieces = [Piece(name + ".weight", span) for name, span in zip(names, spans, strict=True)]
        n_in = self.weights.info(pieces[0].name).shape[1]
        n_full = sum(self.weights.info(piece.name).shape[0] for piece in pieces)
        weight, bias = self._pack(pieces, range(n_in), kind, in_turn, k), self._biases(names, spans)
        if in_turn and bias is not None:
            bias = np.ascontiguousarray(bias.reshape(len(names), -1, PANEL).swapaxes(0, 1)).reshape(-1)
        widths = () if in_turn else tuple(span.size for span in spans)
        return ColumnLinear(weight, bias, n_full, in_turn, widths)

    def rows(self, name: str, span: Span) -> RowLinear:
        """A row-parallel product of the inputs ``span``; quantised slices begin and end on block borders."""
        n_out, k_full = self.weights.info(name + ".weight").shape
        kind = self._format([name + ".weight"])
        first, last, _ = stored_slice(kind, span)
        weight = self._pack([Piece(name + ".weight", Span(0, n_out))], range(first, min(last, k_full)), kind)
        bias = self.vector(name + ".bias") if self.weights.has(name + ".bias") else None
        return RowLinear(weight, bias, k_full, span.start - first, span.size, self.reducer)

    def vector(self, name: str) -> np.ndarray:
        """A whole tensor of one axis, float32."""
        values = self._finite(name, np.ascontiguousarray(self.weights.read(name), np.float32))
        self.nbytes += values.nbytes
        return values

    def embedding_and_head(self) -> tuple[VocabEmbedding, VocabHead]:
        """The owned vocabulary rows; tied models hold them once."""
        first, hidden = self.share.vocab.start, self.config.hidden
        table = self._vocabulary("model.embed_tokens.weight")
        head = table if self.config.tied else self._vocabulary("lm_head.weight")
        return VocabEmbedding(table, first, hidden, self.reducer), VocabHead(head, first)

    def _vocabulary(self, name: str) -> kernels.PackedMatrix:
        return self._pack([Piece(name, self.share.vocab)], range(self.config.hidden), self._format([name]))

    def _format(self, names: Sequence[str]) -> str:
        return memory_format(self.weights, names, self.asked)

    def _biases(self, names: Sequence[str], spans: Sequence[Span]) -> np.ndarray | None:
        if not any(self.weights.has(name + ".bias") for name in names):
            return None
        parts = [self.weights.read(name + ".bias", span.range()) if self.weights.has(name + ".bias")
                 else np.zeros(span.size, np.float32) for name, span in zip(names, spans, strict=True)]
        bias = self._finite(names[0] + ".bias", np.concatenate(parts).astype(np.float32))
        self.nbytes += bias.nbytes
        return bias

    def _pack(self, pieces: Sequence[Piece], columns: range, packed_as: str,
              in_turn: bool = False, at_least: int = 0) -> kernels.PackedMatrix:
        """Stream the pieces, a chunk of rows at a time, into one packed matrix; columns begin on a block's border.

        The pieces stand below each other, or ``in_turn``, a panel of each. Zeros fill up to ``at_least`` columns.
        """
        k = len(columns)
        first, last, phase = stored_slice(packed_as, Span(columns.start, columns.stop))
        k_stored = max(last - first, at_least)
        packer = kernels.Packer(packed_as, sum(piece.rows.size for piece in pieces), k_stored, phase,
                                len(pieces) if in_turn else 1)
        if not k:                       # a rank that owns no inputs adds nothing to the sum
            for tensor in range(packer.interleaved):
                packer.put(0, np.zeros((packer.n // packer.interleaved, 0), np.float32), tensor)
        at = 0
        for number, piece in enumerate(pieces):
            piece.at, piece.tensor = (0, number) if in_turn else (at, 0)
            at += piece.rows.size
        return self.fill(packer, pieces if k else (), columns)

    def fill(self, packer: kernels.Packer, pieces: Sequence[Piece], columns: range,
              height: int = 0) -> kernels.PackedMatrix:
        """Stream the pieces into a matrix; each is followed by zeros up to ``height`` rows, if it has fewer."""
        for name, shares, run in self._jobs(packer, pieces, columns):
            self._take_in(0 if shares else WORKERS)
            self._pending.append((packer, name, self._pool.submit(run)))
        for piece in pieces:
            if piece.rows.size < height:
                self._take_in(0)            # they may share its last panel
                missing = np.zeros((height - piece.rows.size, packer.k), np.float32)
                packer.put(piece.at + piece.rows.size, missing, piece.tensor)
        return self.finish(packer)

    def finish(self, packer: kernels.Packer) -> kernels.PackedMatrix:
        """A packed matrix, whose bytes count; within :meth:`ahead` its rows may still be coming."""
        matrix = packer.matrix()
        self.nbytes += matrix.nbytes
        self._open.append(packer)
        if not self._ahead:
            self._settle()
        return matrix

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """While it lasts nobody waits for a matrix's rows: at its end all have come. Raises as :meth:`check`."""
        self._ahead = True
        try:
            yield
            self._settle()
        finally:
            self._ahead = False
            self._abandon()

    def _settle(self) -> None:
        """Wait for all rows that were asked for."""
        self._take_in(0)
        for packer in self._open:
            packer.finish()
        self._open.clear()

    def _take_in(self, most: int) -> None:
        """Take jobs off, in order, until ``most`` are left. Raises what a job raised, and as :meth:`check`."""
        try:
            while len(self._pending) > most:
                packer, name, job = self._pending.popleft()
                self.check(packer, name, job.result())
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """No job is left that reads or writes."""
        wait([job for _, _, job in self._pending])
        self._pending.clear()
        self._open.clear()

    def check(self, packer: kernels.Packer, name: str, lost: Lost) -> None:
        """Go on with a tensor of which rows were packed. Raises ModelError if values were ``lost``, Stopped."""
        signals.check("while weights were read")
        board().say(f"reading {name}")
        nonfinite, overflow = lost
        if nonfinite:
            raise ModelError(f"tensor {name} has {nonfinite} values that are NaN or infinite: the file is damaged")
        if overflow:
            raise ModelError(f"tensor {name} has {overflow} values beyond the range of {packer.format}: "
                             "use --weights bf16 or f32")

    def _jobs(self, packer: kernels.Packer, pieces: Sequence[Piece], columns: range) -> Iterator[Job]:
        """What reads and packs the pieces, a chunk of rows at a time, which end where panels end."""
        for piece in pieces:
            stored_as = KEPT.get(self.weights.info(piece.name).dtype)
            inputs = range(columns.start + piece.aside, columns.stop + piece.aside)
            raw = stored_as == packer.format and len(inputs) == packer.k and packer.takes_raw() \
                and (packer.format not in kernels.QUANTISED or inputs.start % QUANT_BLOCK == 0) \
                and self.weights.in_rows(piece.name)
            row_bytes = packer.raw_bytes if raw else 4 * len(columns)
            step = max(PANEL, CHUNK_BYTES // max(1, row_bytes) // PANEL * PANEL)
            first, moved = piece.rows.start, piece.at - piece.rows.start
            while first < piece.rows.stop:
                stop = min(piece.rows.stop, (first + moved) // PANEL * PANEL + step - moved)
                yield piece.name, (first + moved) % PANEL > 0, partial(
                    self._read_and_pack, packer, piece, range(first, stop), inputs, raw)
                first = stop

    def _read_and_pack(self, packer: kernels.Packer, piece: Piece, rows: range, inputs: range, raw: bool) -> Lost:
        """Rows of a piece into their panels, as they are stored (``raw``) or their values; what of them is lost."""
        at = piece.at + rows.start - piece.rows.start
        if raw:
            if not hasattr(self._own, "room"):
                self._own.room = np.empty(CHUNK_BYTES, np.uint8)
            stored = self.weights.read_raw(piece.name, rows, inputs, self._own.room)
            return packer.put_raw(at, stored, piece.tensor, threads=1)
        values = _widened(self.weights.read(piece.name, rows, inputs), packer.k)
        return packer.put(at, values, piece.tensor, threads=1)

    @staticmethod
    def _finite(name: str, values: np.ndarray) -> np.ndarray:
        if not np.isfinite(values).all():
            count = int(np.count_nonzero(~np.isfinite(values)))
            raise ModelError(f"tensor {name} has {count} values that are NaN or infinite: the file is damaged")
        return values


def _widened(values: np.ndarray, k: int) -> np.ndarray:
    if values.shape[1] == k:
        return values
    return np.pad(values, ((0, 0), (0, k - values.shape[1])))
