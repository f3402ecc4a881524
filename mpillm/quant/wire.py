"""Number types in which parts of a sum travel between nodes, in blocks of 32 values.

f32: exact, 128 bytes a block. bf16: rounded to nearest even, 64 bytes. q8_0: 32 codes of 8 bits and one scale, as
in GGUF's format of this name, but the scale in float32 (36 bytes), so that it neither overflows nor loses small
blocks. A row's last block is filled up with zeros: a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import numpy as np

BLOCK = 32
#: bytes of a block
NBYTES = {"f32": 128, "bf16": 64, "q8_0": 36}


def blocks(x: np.ndarray) -> np.ndarray:
    """The blocks of the rows of x f32 [M, n], f32 [M * ceil(n / 32), 32]; x itself where no filling is needed."""
    rows, n = x.shape
    if n % BLOCK == 0:
        return x.reshape(-1, BLOCK)
    filled = np.zeros((rows, -(-n // BLOCK) * BLOCK), np.float32)
    filled[:, :n] = x
    return filled.reshape(-1, BLOCK)


def encode(wire: str, values: np.ndarray) -> np.ndarray:
    """uint8 [B, NBYTES] of f32 [B, 32]. NaN stays NaN; in q8_0 a NaN or infinity makes its whole block NaN."""
    if wire == "f32":
        return values.view(np.uint8).reshape(len(values), NBYTES["f32"])
    if wire == "bf16":
        bits = values.view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16).view(np.uint8)
    coded = np.empty((len(values), NBYTES["q8_0"]), np.uint8)
    with np.errstate(all="ignore"):
        scales = np.abs(values).max(1, keepdims=True) / np.float32(127)
        codes = np.rint(np.clip(values / scales, -127, 127))
    coded[:, :4] = scales.view(np.uint8)
    coded[:, 4:] = np.where(np.isfinite(codes), codes, 0).astype(np.int8).view(np.uint8)
    return coded


def decode(wire: str, coded: np.ndarray) -> np.ndarray:
    """f32 [..., B, 32] of contiguous uint8 [..., B, NBYTES]."""
    if wire == "f32":
        return coded.view(np.float32)
    if wire == "bf16":
        return (coded.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    scales = np.ascontiguousarray(coded[..., :4]).view(np.float32)
    with np.errstate(invalid="ignore"):
        return coded[..., 4:].view(np.int8).astype(np.float32) * scales


def round_rows(wire: str, x: np.ndarray) -> None:
    """x f32 [M, n] as it arrives after travelling, in place."""
    if wire != "f32" and x.size:
        values = decode(wire, encode(wire, blocks(x)))
        x[:] = values.reshape(len(x), -1)[:, :x.shape[1]]
