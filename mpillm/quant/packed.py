"""A weight matrix packed in panels, and what packs it row by row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mpillm.errors import UsageError
from mpillm.jit import pack, pack_blocks, policy
from mpillm.jit.isa.quantised import SHAPES
from mpillm.quant import layout


@dataclass
class PackedMatrix:
    """n outputs x k inputs in ``format``; ``data`` and ``scales`` are one-dimensional, see layout.py."""

    format: str
    n: int
    k: int
    data: np.ndarray
    scales: np.ndarray | None
    phase: int = 0                           # of the first block in its super-block
    stride: int = field(init=False)          # elements of a panel

    def __post_init__(self) -> None:
        self.stride = layout.panel_stride(self.format, self.k)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


class Packer:
    """Takes the rows of a matrix in chunks of any size and order, each row once.

    ``nonfinite`` counts NaN and infinite values that came in (32 for a block that came quantised with such a
    scale), ``overflow`` finite ones that the format cannot hold (32 for a block whose scale it cannot hold).
    ``phase`` is for slices of K-quants, see layout.py. With ``interleaved`` tensors of whole panels each, panel p of
    tensor i becomes panel p * interleaved + i: the rows of each are numbered from 0.
    Peak memory: the packed matrix and a chunk.
    Raises UsageError for an unknown format, and for a quantised one when ``k`` is not a multiple of 32.
    """

    def __init__(self, format: str, n: int, k: int, phase: int = 0, interleaved: int = 1) -> None:
        layout.check_format(format, k)
        assert n >= 0 and k >= 0, f"a matrix of {n} x {k}"
        assert phase in range(8 if format in ("q4_K", "q6_K") else 1), f"phase {phase} of {format}"
        assert interleaved == 1 or n % (interleaved * layout.PANEL) == 0, f"{n} rows of {interleaved} tensors"
        self.format, self.n, self.k, self.phase, self.interleaved = format, n, k, phase, interleaved
        self.overflow = self.nonfinite = self._rows = 0
        count = layout.panels_of(n) * layout.panel_stride(format, k)
        self._data: np.ndarray | None = layout.allocate(count, layout.WORDS[format])
        scales = layout.scales_of(format, n, k, phase)
        self._scales = layout.allocate(scales, np.int16) if format in layout.QUANTISED else None

    def put(self, first_row: int, values: np.ndarray, tensor: int = 0) -> None:
        """Round and pack ``values`` f32 [r, k] as rows first_row ... first_row + r - 1.

        Raises UsageError for values in a K-quant, which nothing here rounds to.
        """
        values = np.ascontiguousarray(values, np.float32)
        if values.size and self.format in layout.QUANTISED:
            self._put_blocks(first_row, self._encoded(values), tensor)
            return
        self._check(first_row, values.shape)
        if values.size == 0:
            return
        threads = self._threads(*values.shape)
        counts = np.zeros(2 * threads, np.int64)
        pack.pack_kernel(self.format)(
            values, first_row, self.interleaved, tensor, self._data, layout.panel_stride(self.format, self.k),
            layout.PAIR[self.format], layout.LIMIT[self.format], counts, threads)
        self._count(counts)

    def put_raw(self, first_row: int, raw: np.ndarray, tensor: int = 0) -> None:
        """Pack rows as a GGUF file holds them: ``raw`` uint8 [r, bytes], the stored blocks that cover k.

        Of K-quants these are whole super-blocks, of the first of which ``phase`` blocks are passed over.
        """
        assert self.format in layout.QUANTISED, f"blocks do not go into {self.format}"
        size = layout.stored_bytes(self.format, self.k, self.phase)
        assert raw.dtype == np.uint8 and raw.ndim == 2 and raw.shape[1] == size, \
            f"{raw.dtype} {raw.shape}, not {size} bytes"
        self.nonfinite += self._put_blocks(first_row, raw, tensor)

    def _put_blocks(self, first_row: int, raw: np.ndarray, tensor: int) -> int:
        """Pack stored blocks; the number of values whose scale is not finite."""
        self._check(first_row, (len(raw), self.k))
        if not len(raw) or not self.k:
            return 0
        assert self._data is not None and self._scales is not None, "rows after finish()"
        shape, threads = SHAPES[self.format], self._threads(len(raw), self.k)
        counts = np.zeros(threads, np.int64)
        pack_blocks.pack_blocks_kernel()(
            np.ascontiguousarray(raw), first_row, self.interleaved, tensor, shape.number,
            layout.stored_per(self.format), pack_blocks.STORED[self.format], self.k // layout.QUANT_BLOCK, self.phase,
            self._data.view(np.uint8), shape.codes, self._scales.view(np.uint8), 2 * shape.words,
            2 * shape.super_words, counts, threads)
        return int(counts.sum())

    def _encoded(self, values: np.ndarray) -> np.ndarray:
        """``values`` as stored blocks uint8 [r, bytes]."""
        if self.format not in layout.ROUNDED:
            raise UsageError(f"weights {self.format} come from a GGUF file only, nothing here rounds to them: use "
                             f"{' or '.join(layout.ROUNDED)}")
        assert values.ndim == 2 and values.shape[1] == self.k, f"rows {values.shape} of {self.k} inputs"
        raw = np.zeros((len(values), layout.stored_bytes(self.format, self.k)), np.uint8)
        threads = self._threads(*values.shape)
        counts = np.zeros(2 * threads, np.int64)
        flat = raw.reshape(-1)
        pack_blocks.encode_kernel()(values, SHAPES[self.format].number, pack_blocks.STORED[self.format], flat,
                                    flat.view(np.int16), counts, threads)
        self._count(counts)
        return raw

    def _count(self, counts: np.ndarray) -> None:
        self.nonfinite += int(counts[0::2].sum())
        self.overflow += int(counts[1::2].sum())

    @staticmethod
    def _threads(rows: int, k: int) -> int:
        return max(1, min(policy.threads(), layout.panels_of(rows))) if rows * k > 20000 else 1

    def _check(self, first_row: int, shape: tuple[int, ...]) -> None:
        assert self._data is not None, "rows after finish()"
        assert len(shape) == 2 and shape[1] == self.k, f"rows {shape} of a matrix with {self.k} inputs"
        each = self.n // self.interleaved
        assert 0 <= first_row and first_row + shape[0] <= each, \
            f"rows {first_row} ... {first_row + shape[0] - 1} of {each}"
        self._rows += shape[0]

    def finish(self) -> PackedMatrix:
        """The packed matrix; lanes beyond its last row hold zeros."""
        assert self._rows == self.n, f"{self._rows} rows came of {self.n}"
        assert self._data is not None, "finish() comes once"
        matrix = PackedMatrix(self.format, self.n, self.k, self._data, self._scales, self.phase)
        self._data = self._scales = None
        return matrix
