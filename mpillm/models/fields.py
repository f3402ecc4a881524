"""Typed fields of a model's description, be it config.json or GGUF metadata; null counts as absent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpillm.errors import ModelError
from mpillm.models.config import RopeScaling

MAX_FIGURE = 1 << 40         # no honest figure of a model is larger
MAX_LAYERS = 10_000


class Fields:
    """Looks keys up in ``values``; each message begins with ``where`` and names the key and its value."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where, self.values = where, values

    def error(self, text: str) -> ModelError:
        """A ModelError about this description."""
        return ModelError(f"{self.where}: {text}")

    def get(self, key: str) -> Any:
        """The value, None if absent or null."""
        return self.values.get(key)

    def absent(self, key: str) -> bool:
        """Whether the key is not there at all (null is there)."""
        return key not in self.values

    def positive(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 up; without a default it must be there."""
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{key} is missing")
        if not _whole(value) or not 1 <= value <= MAX_FIGURE:
            raise self.error(f"{key} is {shown(value)}, it must be a positive whole number")
        return value

    def natural(self, key: str, default: int) -> int:
        """A whole number from 0 up."""
        value = self.get(key)
        if value is None:
            return default
        if not _whole(value) or not 0 <= value <= MAX_FIGURE:
            raise self.error(f"{key} is {shown(value)}, it must be a whole number from 0 up")
        return value

    def number(self, key: str, default: float | None = None, sign: str = "positive") -> float:
        """A finite number: ``positive``, from ``zero`` up, or of ``any`` sign; needed without a default."""
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{key} is missing")
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and -1e30 < value < 1e30
        if not good or sign != "any" and value < 0 or sign == "positive" and value == 0:
            wanted = {"positive": "a positive number", "zero": "a number from 0 up", "any": "a number"}[sign]
            raise self.error(f"{key} is {shown(value)}, it must be {wanted}")
        return float(value)

    def optional(self, key: str) -> float | None:
        """A number from 0 up, None if absent."""
        return None if self.get(key) is None else self.number(key, sign="zero")

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} is {shown(value)}, it must be true or false")
        return value

    def text(self, key: str) -> str | None:
        """A string, None if absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{key} is {shown(value)}, it must be a string")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """An object, empty if absent."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(f"{key} is {shown(value)}, it must be an object")
        return value

    def token_ids(self, key: str) -> list[int]:
        """One token id or a list of them; empty if absent."""
        value = self.get(key)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_whole(token) for token in found):
            raise self.error(f"{key} is {shown(value)}, it must be a token id or a list of them")
        return found


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A value for a message: one line, bounded."""
    if isinstance(value, int) and abs(value) > MAX_FIGURE:
        return "beyond all bounds"
    text = repr(value) if not isinstance(value, float) or math.isfinite(value) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def head_figures(fields: Fields, hidden: int, n_heads: int, n_kv_heads: int, stated: int | None) -> int:
    """Check head counts against each other and return the width of a head (``stated``, or derived)."""
    if n_heads % n_kv_heads:
        raise fields.error(f"{n_heads} query heads cannot share {n_kv_heads} KV heads evenly")
    if stated is None and hidden % n_heads:
        raise fields.error(f"the hidden size {hidden} is no multiple of the {n_heads} heads, "
                           "and the width of a head is not stated")
    head_dim = hidden // n_heads if stated is None else stated
    if head_dim % 2:
        raise fields.error(f"the head width is {head_dim}, rotary positions need an even one")
    return head_dim


def known_ids(fields: Fields, found: list[int], vocab: int, warnings: list[str]) -> tuple[int, ...]:
    """Distinct token ids within the vocabulary, ascending; others are left out with a warning."""
    good = tuple(sorted({token for token in found if 0 <= token < vocab}))
    bad = sorted({token for token in found if not 0 <= token < vocab})
    if bad:
        warnings.append(f"{fields.where}: token id {shown(bad[0])} is outside of the vocabulary of {vocab}: "
                        "ignored")
    return good


def checked_rope(fields: Fields, theta: float, rope: RopeScaling, head_dim: int) -> RopeScaling:
    """The scaling, or ModelError where its formula has no value for these figures."""
    if rope.kind == "yarn" and theta <= 1.0:
        raise fields.error(f"the rotary base is {theta}: yarn needs one above 1")
    if rope.kind == "dynamic" and head_dim <= 2:
        raise fields.error(f"heads of width {head_dim}: dynamic rope scaling needs wider ones")
    return rope
