"""The lines that batch.py gives to every program: mixed lengths, some behind a common beginning. No other packages.

A line is a line of this program's input: {"prompt_token_ids": [...], "max_tokens": N, "temperature": 0,
"ignore_eos": true}. All programs see the same ids and generate the same number of tokens.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

PROMPT, NEW = (8, 400), (8, 256)      # tokens of a prompt with its common beginning; tokens that are generated
COMMON, SHARE = 150, 0.3              # tokens of the common beginning; share of the lines behind it
FIRST_ID = 256                        # ids below are special tokens and single bytes in many vocabularies


@dataclass(frozen=True)
class Line:
    """Token ids, of which the first ``shared`` are the common beginning."""

    prompt: list[int]
    max_tokens: int
    shared: int = 0


def mixed(count: int, vocab: int, seed: int = 0) -> list[Line]:
    """``count`` lines in random order; lengths are log-normal inside their bounds."""
    rng = random.Random(seed)
    common = [rng.randrange(FIRST_ID, vocab) for _ in range(COMMON)]

    def length(median: float, least: int, most: int) -> int:
        return min(max(round(median * math.exp(rng.gauss(0, 0.9))), least), most)

    behind = set(rng.sample(range(count), round(SHARE * count)))
    lines = []
    for i in range(count):
        shared = COMMON if i in behind else 0
        own = length(64, PROMPT[0], PROMPT[1] - shared)
        prompt = (common if shared else []) + [rng.randrange(FIRST_ID, vocab) for _ in range(own)]
        lines.append(Line(prompt, length(64, *NEW), shared))
    return lines


def write(path: str | os.PathLike[str], lines: list[Line]) -> None:
    """As JSONL; what begins with the same tokens is named in the custom_id."""
    with open(path, "w", encoding="utf-8") as file:
        for i, line in enumerate(lines):
            file.write(json.dumps({"custom_id": f"{i}-shared-{line.shared}", "prompt_token_ids": line.prompt,
                                   "max_tokens": line.max_tokens, "temperature": 0, "ignore_eos": True}) + "\n")


def read(path: str | os.PathLike[str]) -> list[Line]:
    with open(path, encoding="utf-8") as file:
        found = [json.loads(text) for text in file]
    return [Line(line["prompt_token_ids"], line["max_tokens"], int(line["custom_id"].rpartition("-")[2]))
            for line in found]


def prompt_tokens(lines: list[Line]) -> tuple[int, int]:
    """Of all prompts; and of them those that must be computed when the common beginning is computed once."""
    whole = sum(len(line.prompt) for line in lines)
    shared = [line.shared for line in lines if line.shared]
    return whole, whole - sum(shared) + max(shared, default=0)


def groups(lines: list[Line], size: int) -> Iterator[list[Line]]:
    """Lines of about the same length together, ``size`` at a time; in random order, so that a part speaks for all."""
    by_length = sorted(lines, key=lambda line: len(line.prompt) + line.max_tokens)
    made = [by_length[at:at + size] for at in range(0, len(lines), size)]
    random.Random(0).shuffle(made)
    yield from made


class Cut:
    """Counts what is done from now on; a run is over after ``seconds``."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.limit, self.lines, self.tokens, self.seconds = seconds, 0, 0, 0.0
        self._began = time.perf_counter()

    def over(self) -> bool:
        return time.perf_counter() - self._began >= self.limit

    def end(self) -> None:
        self.seconds = time.perf_counter() - self._began

    def row(self) -> dict[str, float]:
        return {"lines": self.lines, "tokens": self.tokens, "seconds": self.seconds}
