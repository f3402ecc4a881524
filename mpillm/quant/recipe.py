"""Which format the weights take in memory: one for all, or one for each group of tensors.

A recipe is written ``attn=q8_0,ffn=q4_0,default=bf16``; a plain format is one without rules. Groups that no rule
names take the default, and that is ``auto`` where it is not given.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from mpillm.errors import UsageError

FORMATS = ("auto", "f32", "bf16", "f16", "q8_0", "q4_0", "q4_1")
GROUPS = ("attn", "ffn", "shared", "experts", "embedding", "head")
DEFAULT = "default"


@dataclass(frozen=True)
class Recipe:
    """``rules``: (group, format) in the order of GROUPS; ``default``: of all other tensors."""

    rules: tuple[tuple[str, str], ...]
    default: str

    def of(self, *groups: str) -> str:
        """The format of a tensor that belongs to these groups: the first rule for one of them counts."""
        rule = self.rule(*groups)
        return self.default if rule == DEFAULT else dict(self.rules)[rule]

    def rule(self, *groups: str) -> str:
        """The group whose rule counts for a tensor of these groups; DEFAULT where there is none."""
        named = dict(self.rules)
        return next((group for group in groups if group in named), DEFAULT)

    def __str__(self) -> str:
        """The one way to write it; a plain format where there are no rules."""
        if not self.rules:
            return self.default
        rest = [] if self.default == "auto" else [(DEFAULT, self.default)]
        return ",".join(f"{group}={kind}" for group, kind in [*self.rules, *rest])


@functools.lru_cache(maxsize=64)
def parse(text: str) -> Recipe:
    """The recipe that ``text`` writes. Raises UsageError for an unknown or doubled group and an unknown format."""
    if "=" not in text:
        return Recipe((), _format(text, text))
    found: dict[str, str] = {}
    for part in text.split(","):
        group, equals, kind = (piece.strip() for piece in part.partition("="))
        if not equals or group not in (*GROUPS, DEFAULT):
            known = ", ".join((*GROUPS, DEFAULT))
            raise UsageError(f"--weights {_shown(text)}: {_shown(group)} is not one of {known}, each followed by = and "
                             "a format")
        if group in found:
            raise UsageError(f"--weights {_shown(text)}: {group} is there twice")
        found[group] = _format(text, kind)
    default = found.pop(DEFAULT, "auto")
    return Recipe(tuple((group, found[group]) for group in GROUPS if group in found), default)


def _format(text: str, kind: str) -> str:
    if kind in FORMATS:
        return kind
    if kind == text:
        raise UsageError(f"--weights {_shown(text)} is not one of {', '.join(FORMATS)}, nor a recipe like "
                         "attn=q8_0,ffn=q4_0,default=bf16")
    raise UsageError(f"--weights {_shown(text)}: {_shown(kind)} is not one of {', '.join(FORMATS)}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:97] + "...")
