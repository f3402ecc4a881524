"""A weight matrix packed in panels, and what packs it row by row."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from mpillm.errors import UsageError
from mpillm.jit import pack, pack_blocks, policy
from mpillm.jit.isa.quantised import SHAPES
from mpillm.quant import layout

Lost = tuple[int, int]      # values that are not finite, and finite ones that the format cannot hold


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
    Several threads may put rows at once, with ``threads`` 1, if no panel has rows of two of them. Peak memory: the
    packed matrix and a chunk.
    Raises UsageError for an unknown format, and for a quantised one when ``k`` is not a multiple of 32.
    """

    def __init__(self, format: str, n: int, k: int, phase: int = 0, interleaved: int = 1) -> None:
        layout.check_format(format, k)
        assert n >= 0 and k >= 0, f"a matrix of {n} x {k}"
        assert phase in range(8 if format in ("q4_K", "q6_K") else 1), f"phase {phase} of {format}"
        assert interleaved == 1 or n % (interleaved * layout.PANEL) == 0, f"{n} rows of {interleaved} tensors"
        self.format, self.n, self.k, self.phase, self.interleaved = format, n, k, phase, interleaved
        self.overflow = self.nonfinite = self._rows = 0
        self._lock = threading.Lock()
        count = layout.panels_of(n) * layout.panel_stride(format, k)
        self._data: np.ndarray | None = layout.allocate(count, layout.WORDS[format])
        scales = layout.scales_of(format, n, k, phase)
        self._scales = layout.allocate(scales, np.int16) if format in layout.QUANTISED else None

    def put(self, first_row: int, values: np.ndarray, tensor: int = 0, threads: int | None = None) -> Lost:
        """Round and pack ``values`` f32 [r, k] as rows first_row ... first_row + r - 1.

        ``threads``: None for as many as are worth it. Returns what these rows add to ``nonfinite`` and ``overflow``.
        Raises UsageError for values in a K-quant, which nothing here rounds to.
        """
        values = np.ascontiguousarray(values, np.float32)
        if values.size and self.format in layout.QUANTISED:
            raw, lost = self._encoded(values, threads)
            self._put_blocks(first_row, raw, tensor, threads)
            return self._count(*lost)
        self._check(first_row, values.shape)
        if values.size == 0:
            return 0, 0
        threads = threads or self._threads(*values.shape)
        counts = np.zeros(2 * threads, np.int64)
        pack.pack_kernel(self.format)(
            values, first_row, self.interleaved, tensor, self._data, layout.panel_stride(self.format, self.k),
            layout.PAIR[self.format], layout.LIMIT[self.format], counts, threads)
        return self._count(int(counts[0::2].sum()), int(counts[1::2].sum()))

    def takes_raw(self) -> bool:
        """Whether ``put_raw`` takes rows of this format and length."""
        return self.k % layout.PAIR.get(self.format, 1) == 0

    @property
    def raw_bytes(self) -> int:
        """Bytes of a row for ``put_raw``."""
        if self.format in layout.QUANTISED:
            return layout.stored_bytes(self.format, self.k, self.phase)
        return self.k * np.dtype(layout.WORDS[self.format]).itemsize

    def put_raw(self, first_row: int, raw: np.ndarray, tensor: int = 0, threads: int | None = None) -> Lost:
        """Pack rows as a file of this format holds them: ``raw`` uint8 [r, bytes], of blocks those that cover k.

        Of K-quants these are whole super-blocks, of the first of which ``phase`` blocks are passed over. Returns as
        ``put`` does.
        """
        assert raw.dtype == np.uint8 and raw.ndim == 2 and raw.shape[1] == self.raw_bytes, \
            f"{raw.dtype} {raw.shape}, not {self.raw_bytes} bytes"
        put = self._put_blocks if self.format in layout.QUANTISED else self._put_words
        return self._count(put(first_row, raw, tensor, threads), 0)

    def _put_words(self, first_row: int, raw: np.ndarray, tensor: int, threads: int | None) -> int:
        """Pack rows of f32, f16 or bf16, of which two make a word; the number of values that are not finite."""
        pair = layout.PAIR[self.format]
        assert self.takes_raw(), f"{self.k} inputs of {self.format}"
        self._check(first_row, (len(raw), self.k))
        if not raw.size:
            return 0
        assert self._data is not None, "rows after finish()"
        bits, exponent = layout.word_bits(self.format), layout.EXPONENT[self.format]
        word = np.dtype(f"u{bits // 8}")
        threads = threads or self._threads(len(raw), self.k)
        counts = np.zeros(threads, np.int64)
        pack.pack_words_kernel(bits)(
            np.ascontiguousarray(raw).view(word), first_row, self.interleaved, tensor, self._data.view(word),
            layout.panel_stride(self.format, self.k) // pair, exponent, exponent << 16 if pair == 2 else 0, counts,
            threads)
        return int(counts.sum())

    def _put_blocks(self, first_row: int, raw: np.ndarray, tensor: int, threads: int | None) -> int:
        """Pack stored blocks; the number of values whose scale is not finite."""
        self._check(first_row, (len(raw), self.k))
        if not len(raw) or not self.k:
            return 0
        assert self._data is not None and self._scales is not None, "rows after finish()"
        shape, threads = SHAPES[self.format], threads or self._threads(len(raw), self.k)
        counts = np.zeros(threads, np.int64)
        pack_blocks.pack_blocks_kernel()(
            np.ascontiguousarray(raw), first_row, self.interleaved, tensor, shape.number,
            layout.stored_per(self.format), pack_blocks.STORED[self.format], self.k // layout.QUANT_BLOCK, self.phase,
            self._data.view(np.uint8), shape.codes, self._scales.view(np.uint8), 2 * shape.words,
            2 * shape.super_words, counts, threads)
        return int(counts.sum())

    def _encoded(self, values: np.ndarray, threads: int | None) -> tuple[np.ndarray, Lost]:
        """``values`` as stored blocks uint8 [r, bytes], and what of them is lost."""
        if self.format not in layout.ROUNDED:
            raise UsageError(f"weights {self.format} come from a GGUF file only, nothing here rounds to them: use "
                             f"{' or '.join(layout.ROUNDED)}")
        assert values.ndim == 2 and values.shape[1] == self.k, f"rows {values.shape} of {self.k} inputs"
        raw = np.zeros((len(values), layout.stored_bytes(self.format, self.k)), np.uint8)
        threads = threads or self._threads(*values.shape)
        counts = np.zeros(2 * threads, np.int64)
        flat = raw.reshape(-1)
        pack_blocks.encode_kernel()(values, SHAPES[self.format].number, pack_blocks.STORED[self.format], flat,
                                    flat.view(np.int16), counts, threads)
        return raw, (int(counts[0::2].sum()), int(counts[1::2].sum()))

    def _count(self, nonfinite: int, overflow: int) -> Lost:
        with self._lock:
            self.nonfinite += nonfinite
            self.overflow += overflow
        return nonfinite, overflow

    @staticmethod
    def _threads(rows: int, k: int) -> int:
        return max(1, min(policy.threads(), layout.panels_of(rows))) if rows * k > 20000 else 1

    def _check(self, first_row: int, shape: tuple[int, ...]) -> None:
        assert self._data is not None, "rows after finish()"
        assert len(shape) == 2 and shape[1] == self.k, f"rows {shape} of a matrix with {self.k} inputs"
        each = self.n // self.interleaved
        assert 0 <= first_row and first_row + shape[0] <= each, \
            f"rows {first_row} ... {first_row + shape[0] - 1} of {each}"
        with self._lock:
            self._rows += shape[0]

    def matrix(self) -> PackedMatrix:
        """The matrix that is being packed: what is to be read of it are rows that have come."""
        assert self._data is not None, "before finish()"
        return PackedMatrix(self.format, self.n, self.k, self._data, self._scales, self.phase)

    def finish(self) -> PackedMatrix:
        """The packed matrix; lanes beyond its last row hold zeros."""
        assert self._rows == self.n, f"{self._rows} rows came of {self.n}"
        matrix = self.matrix()
        self._data = self._scales = None
        return matrix
