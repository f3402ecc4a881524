"""The bytes that tokens stand for, by the kind of decoder that a tokenizer.json has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import tokenizers

from mpillm.errors import ModelError
from mpillm.formats.gguf_tokenizer import SPACE_MARK

UNREACHABLE = "\U0010fffe {} \U0010fffe"  # the name of an id that no text may yield


class TokenBytes(dict):
    """The bytes of tokens by id, made as they are asked for, by the tokenizer's kind of decoder."""

    def __init__(self, decoder: Any, hf: tokenizers.Tokenizer, added: Mapping[int, str], source: str) -> None:
        super().__init__()
        self._hf, self._added = hf, added
        steps = _flatten(decoder)
        kinds = {step.get("type") for step in steps}
        unknown = kinds - {"ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip", "Metaspace"}
        if unknown:
            raise ModelError(f"{source}: decoder {', '.join(sorted(map(str, unknown)))} is not supported")
        self.byte_level, self.byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self.spaced = not steps  # without a decoder, tokens are words
        self.replacements: list[tuple[str, str]] = []
        self.strip_left = 1 if self.spaced else 0
        for step in steps:
            if step["type"] == "Replace" and "String" in step["pattern"]:
                self.replacements.append((step["pattern"]["String"], step["content"]))
            elif step["type"] == "Strip" and step["content"] == " ":
                self.strip_left = step["start"]
            elif step["type"] == "Metaspace":
                self.replacements.append((step.get("replacement", SPACE_MARK), " "))
                prepends = step.get("prepend_scheme", "always") != "never" and step.get(
                    "add_prefix_space", True
                )
                self.strip_left = 1 if prepends else 0

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = value = self._make(token_id)
        return value

    def _make(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._hf.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None or token == UNREACHABLE.format(token_id):
            return b""
        if self.byte_level:
            if all(c in _BYTE_OF for c in token):
                return bytes(_BYTE_OF[c] for c in token)
            return token.encode()
        if self.byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes((int(token[3:5], 16),))
        for old, new in self.replacements:
            token = token.replace(old, new)
        return (" " + token if self.spaced else token).encode()


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _flatten(decoder: Any) -> list[dict]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for d in decoder["decoders"] for step in _flatten(d)]
    return [decoder]
