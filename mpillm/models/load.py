"""Building layers from a checkpoint: one tensor at a time, of each only the slice that is owned here.

Peak memory is the packed slices plus one chunk of rows (``CHUNK_BYTES``) of the tensor that is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpillm import kernels
from mpillm.errors import ModelError
from mpillm.layers.embedding import VocabEmbedding, VocabHead
from mpillm.layers.linear import ColumnLinear, Reducer, RowLinear
from mpillm.models.config import ModelConfig
from mpillm.models.weights import Weights
from mpillm.partition import Share, Span

CHUNK_BYTES = 8 << 20
Q8_BLOCK = 32

_KEPT = {"F32": "f32", "BF16": "bf16", "F16": "f16", "Q8_0": "q8_0"}


def memory_format(weights: Weights, names: Sequence[str], asked: str) -> str:
    """The format in memory of tensors that are packed together.

    ``auto`` keeps what the file has when a kernel exists for it, and takes bf16 otherwise; tensors that
    differ take bf16 when all are quantised or bf16, else f32, which loses nothing.
    """
    if asked != "auto":
        return asked
    kept = {_KEPT.get(weights.info(name).dtype, "bf16") for name in names}
    if len(kept) == 1:
        return kept.pop()
    return "bf16" if kept <= {"bf16", "q8_0"} else "f32"


@dataclass
class _Piece:
    """Rows of one tensor in a packed matrix."""

    name: str
    rows: Span


class Loader:
    """Reads a share of a model's weights into packed layers."""

    def __init__(self, config: ModelConfig, weights: Weights, share: Share, asked: str,
                 reducer: Reducer) -> None:
        self.config, self.weights, self.share = config, weights, share
        self.asked, self.reducer = asked, reducer
        self.nbytes = 0

    # Spans of outputs, in rows of the checkpoint's matrices.

    def query_rows(self) -> Span:
        return Span(self.share.heads.start * self.config.head_dim, self.share.heads.stop * self.config.head_dim)

    def columns(self, names: Sequence[str], spans: Sequence[Span]) -> ColumnLinear:
        """One column-parallel product of the ``spans`` of outputs of several tensors, below each other."""
        pieces = [_Piece(name + ".weight", span) for name, span in zip(names, spans, strict=True)]
        n_in = self.weights.info(pieces[0].name).shape[1]
        n_full = sum(self.weights.info(piece.name).shape[0] for piece in pieces)
        weight = self._pack(pieces, range(n_in))
        return ColumnLinear(weight, self._biases(names, spans), n_full)

    def rows(self, name: str, span: Span) -> RowLinear:
        """A row-parallel product of the inputs ``span``; quantised slices begin and end on block borders."""
        n_out, k_full = self.weights.info(name + ".weight").shape
        first, last = span.start, span.stop
        if self._format([name + ".weight"]) == "q8_0" and span.size:
            first -= first % Q8_BLOCK
            last = min(-(-last // Q8_BLOCK) * Q8_BLOCK, k_full)
        weight = self._pack([_Piece(name + ".weight", Span(0, n_out))], range(first, last))
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
        return self._pack([_Piece(name, self.share.vocab)], range(self.config.hidden))

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

    def _pack(self, pieces: Sequence[_Piece], columns: range) -> kernels.PackedMatrix:
        """Stream the pieces, a chunk of rows at a time, into one packed matrix."""
        packed_as = self._format([piece.name for piece in pieces])
        k = len(columns)
        k_stored = -(-k // Q8_BLOCK) * Q8_BLOCK if packed_as == "q8_0" else k
        packer = kernels.Packer(packed_as, sum(piece.rows.size for piece in pieces), k_stored)
        if not k:                       # a rank that owns no inputs adds nothing to the sum
            packer.put(0, np.zeros((packer.n, 0), np.float32))
        at = 0
        for piece in pieces if k else ():
            raw = packed_as == "q8_0" and self.weights.info(piece.name).dtype == "Q8_0" and k == k_stored
            step = max(1, CHUNK_BYTES // (4 * k))
            for first in range(piece.rows.start, piece.rows.stop, step):
                rows = range(first, min(first + step, piece.rows.stop))
                if raw:
                    packer.put_q8_0(at, *self.weights.read_q8_0(piece.name, rows, columns))
                else:
                    packer.put(at, _widened(self.weights.read(piece.name, rows, columns), k_stored))
                at += len(rows)
                self._refuse_lost_values(packer, piece.name, packed_as)
        matrix = packer.finish()
        self.nbytes += matrix.nbytes
        return matrix

    @staticmethod
    def _refuse_lost_values(packer: kernels.Packer, name: str, packed_as: str) -> None:
        if packer.nonfinite:
            raise ModelError(f"tensor {name} has {packer.nonfinite} values that are NaN or infinite: "
                             "the file is damaged")
        if packer.overflow:
            raise ModelError(f"tensor {name} has {packer.overflow} values beyond the range of {packed_as}: "
                             "use --weights bf16 or f32")

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
