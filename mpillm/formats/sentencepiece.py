"""The tokenizer.json of a sentencepiece file (`tokenizer.model`), read from protobuf's wire format.

Field numbers are those of sentencepiece's ModelProto: 1 pieces (1 text, 2 score, 3 type), 2 the trainer's
settings (3 the kind of model; 40-43 the ids of unk, bos, eos, pad), 3 the normalizer's (2 its character map,
3 whether a space is put before a text).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from mpillm.errors import ModelError
from mpillm.formats.gguf_tokenizer import NORMAL, SPACE_MARK, UNKNOWN, USER_DEFINED, sentencepiece_model


def from_sentencepiece(data: bytes, source: str) -> tuple[dict, dict[str, str]]:
    """The tokenizer.json of a `tokenizer.model` file (protobuf ModelProto), and the names of its specials.

    Only BPE models without character normalisation (Llama, Mistral); others raise ModelError.
    """
    missing = "and tokenizer.json is missing"
    try:
        pieces, trainer, normalizer = _sentencepiece_fields(data)
    except (ValueError, LookupError, AttributeError, TypeError, struct.error) as e:
        raise ModelError(
            f"{source} is not a sentencepiece model, {missing}: put tokenizer.json beside it"
        ) from e
    if trainer.get(3, 1) != 2 or normalizer.get(2):
        raise ModelError(
            f"{source} is a sentencepiece model other than plain BPE, {missing}: put tokenizer.json beside it"
        )
    if not pieces:
        raise ModelError(f"{source} holds no tokens, {missing}: put tokenizer.json beside it")
    tokens = [p[0].replace(SPACE_MARK, " ") if p[2] == USER_DEFINED else p[0] for p in pieces]
    types, scores = [p[2] for p in pieces], [p[1] for p in pieces]
    unk = types.index(UNKNOWN) if UNKNOWN in types else None
    model = sentencepiece_model(tokens, types, scores, unk, bool(normalizer.get(3, 1)))
    defaults = {"unk_token": (40, 0), "bos_token": (41, 1), "eos_token": (42, 2), "pad_token": (43, -1)}
    ids = {name: _signed(trainer.get(number, default)) for name, (number, default) in defaults.items()}
    return model, {name: tokens[i] for name, i in ids.items() if 0 <= i < len(tokens)}


def _signed(value: object) -> int:
    number = int(value)  # type: ignore[call-overload]
    return number - (1 << 64) if number >> 63 else number


def _sentencepiece_fields(data: bytes) -> tuple[list[tuple[str, float, int]], dict, dict]:
    """Pieces (text, score, type), and the trainer's and normalizer's scalar fields by number."""
    pieces: list[tuple[str, float, int]] = []
    trainer: dict = {}
    normalizer: dict = {}
    for number, value in _protobuf(data):
        if number == 1:
            piece = dict(_protobuf(value))
            pieces.append((piece[1].decode("utf-8"), float(piece.get(2, 0.0)), int(piece.get(3, NORMAL))))
        elif number == 2:
            trainer = dict(_protobuf(value))
        elif number == 3:
            normalizer = dict(_protobuf(value))
    return pieces, trainer, normalizer


def _protobuf(data: object) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) of a protobuf message: ints, floats (32 and 64 bits) and bytes."""
    if not isinstance(data, bytes):
        raise ValueError("a message was expected")
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise ValueError("field number 0")
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
        elif wire == 5:
            yield number, struct.unpack_from("<f", data, at)[0]
            at += 4
        elif wire == 1:
            yield number, struct.unpack_from("<d", data, at)[0]
            at += 8
        elif wire == 2:
            size, at = _varint(data, at)
            if size > len(data) - at:
                raise ValueError("a field runs past the end")
            yield number, data[at : at + size]
            at += size
        else:
            raise ValueError(f"wire type {wire}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 10 bytes")
