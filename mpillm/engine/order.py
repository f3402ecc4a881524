"""The order in which lines run: those with a common beginning together, the long ones first.

A line is only sketched here, by the raw text of its prompt; whether it can run is decided where it runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HEAD = 4096            # characters of a prompt that are compared
SHARED = 256           # a common beginning from this many characters on makes a group


@dataclass(frozen=True)
class Sketch:
    """How a line begins; about how many tokens it has, how many it may generate, how many samples it makes."""

    head: str
    prompt: float = 0.0
    new: int = 0
    samples: int = 1

    @property
    def cost(self) -> float:
        """A prompt's tokens run many at a time, those that are generated one by one."""
        return self.prompt / 10 + self.new * self.samples


def sketch(raw: bytes, max_tokens: int) -> Sketch:
    """What a line looks like from afar; of anything that is no request: nothing, cheap.

    ``max_tokens``: of lines that give none.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return Sketch("")
    body = value.get("body", value) if isinstance(value, dict) else None
    if not isinstance(body, dict):
        return Sketch("")
    head, length = _prompt(body)
    wanted = _count(body.get("max_completion_tokens", body.get("max_tokens")), max_tokens)
    return Sketch(head, length / 4, wanted, max(_count(body.get("n"), 1), 1))


def _count(value: Any, default: int) -> int:
    """``value`` if it is a number of tokens or samples, else the default."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 24 else default


def _prompt(body: dict[str, Any]) -> tuple[str, int]:
    """The first characters of the prompt and its length; token ids count four characters each."""
    ids, prompt, messages = body.get("prompt_token_ids"), body.get("prompt"), body.get("messages")
    if isinstance(prompt, list):
        ids = prompt
    if isinstance(ids, list):
        flat = [one for item in ids for one in (item if isinstance(item, list) else [item])]
        return ",".join(map(str, flat[:HEAD // 4])), 4 * len(flat)
    if isinstance(messages, list):
        prompt = "\n".join(str(turn.get("content")) for turn in messages if isinstance(turn, dict))
    if not isinstance(prompt, str):
        return "", 0
    return prompt[:HEAD], len(prompt)


def arrange(sketches: Sequence[Sketch]) -> list[int]:
    """The order of lines (their indices): groups by their longest line, descending; so inside a group.

    Lines that share ``SHARED`` characters with their neighbour in alphabetical order are one group.
    Equals keep their order.
    """
    by_head = sorted(range(len(sketches)), key=lambda i: (sketches[i].head, i))
    groups: list[list[int]] = []
    for i in by_head:
        if groups and _common(sketches[groups[-1][-1]].head, sketches[i].head):
            groups[-1].append(i)
        else:
            groups.append([i])
    for group in groups:
        group.sort(key=lambda i: (-sketches[i].cost, i))
    groups.sort(key=lambda group: (-sketches[group[0]].cost, group[0]))
    return [i for group in groups for i in group]


def _common(a: str, b: str) -> bool:
    return len(a) >= SHARED and a[:SHARED] == b[:SHARED]
