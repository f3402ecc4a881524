"""A weight matrix packed in panels, and what packs it row by row."""

from __future__ import annotations

from dataclasses import dataclass, field
import numpy as np

from mpillm.jit import pack, policy
from mpillm.quant import layout


@dataclass
class PackedMatrix:
    """n outputs x k inputs in ``format``; ``data`` and ``scales`` are one-dimensional, see layout.py."""

    format: str
    n: int
    k: int
    data: np.ndarray
    scales: np.ndarray | None
    stride: int = field(init=False)          # elements of a panel

    def __post_init__(self) -> None:
        self.stride = layout.panel_stride(self.format, self.k)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


class Packer:
    """Takes the rows of a matrix in chunks of any size and order, each row once.

    ``nonfinite`` counts NaN and infinite values that came in, ``overflow`` finite ones that the format
    cannot hold (q8_0: 32 for a block whose scale it cannot hold). Peak memory: the packed matrix and a chunk.
    Raises UsageError for an unknown format, and for q8_0 when ``k`` is not a multiple of 32.
    """

    def __init__(self, format: str, n: int, k: int) -> None:
        layout.check_format(format, k)
        assert n >= 0 and k >= 0, f"a matrix of {n} x {k}"
        self.format, self.n, self.k = format, n, k
        self.overflow = self.nonfinite = self._rows = 0
        count = layout.panels_of(n) * layout.panel_stride(format, k)
        self._data: np.ndarray | None = layout.allocate(count, layout.WORDS[format])
        scales = layout.scales_of(format, n, k)
        self._scales = layout.allocate(scales, np.int16) if format == "q8_0" else None

    def put(self, first_row: int, values: np.ndarray) -> None:
        """Round and pack ``values`` f32 [r, k] as rows first_row ... first_row + r - 1."""
        values = np.ascontiguousarray(values, np.float32)
        self._check(first_row, values.shape)
        if values.size == 0:
            return
        threads = min(policy.threads(), layout.panels_of(len(values))) if values.size > 20000 else 1
        counts = np.zeros(2 * threads, np.int64)
        kernel = pack.pack_kernel(self.format)
        if self.format == "q8_0":
            kernel(values, first_row, self._data, self._scales, counts, threads)
        else:
            kernel(values, first_row, self._data, layout.panel_stride(self.format, self.k),
                   layout.PAIR[self.format], layout.LIMIT[self.format], counts, threads)
        self.nonfinite += int(counts[0::2].sum())
        self.overflow += int(counts[1::2].sum())

    def put_q8_0(self, first_row: int, scales: np.ndarray, codes: np.ndarray) -> None:
        """Pack q8_0 rows as they are: scales f16 [r, k/32], codes int8 [r, k]. Only in format q8_0."""
        assert self.format == "q8_0", f"q8_0 rows do not go into {self.format}"
        self._check(first_row, codes.shape)
        assert scales.shape == (len(codes), self.k // layout.QUANT_BLOCK), f"scales {scales.shape}"
        assert scales.dtype == np.float16 and codes.dtype == np.int8, f"{scales.dtype}, {codes.dtype}"
        if codes.size == 0:
            return
        pack.pack_codes_kernel()(np.ascontiguousarray(codes), first_row, self._data)
        rows = first_row + np.arange(len(codes))
        assert self._scales is not None, "a q8_0 matrix has scales"
        panels = self._scales.reshape(-1, self.k // layout.QUANT_BLOCK, layout.PANEL)
        panels[rows // layout.PANEL, :, rows % layout.PANEL] = scales.view(np.int16)
        self.nonfinite += layout.QUANT_BLOCK * int(np.count_nonzero(~np.isfinite(scales)))

    def _check(self, first_row: int, shape: tuple[int, ...]) -> None:
        assert self._data is not None, "rows after finish()"
        assert len(shape) == 2 and shape[1] == self.k, f"rows {shape} of a matrix with {self.k} inputs"
        assert 0 <= first_row and first_row + shape[0] <= self.n, \
            f"rows {first_row} ... {first_row + shape[0] - 1} of {self.n}"
        self._rows += shape[0]

    def finish(self) -> PackedMatrix:
        """The packed matrix; lanes beyond its last row hold zeros."""
        assert self._rows == self.n, f"{self._rows} rows came of {self.n}"
        assert self._data is not None, "finish() comes once"
        matrix = PackedMatrix(self.format, self.n, self.k, self._data, self._scales)
        self._data = self._scales = None
        return matrix
