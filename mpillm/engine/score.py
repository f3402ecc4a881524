"""Log-likelihoods of a long text in windows, and the perplexity that they give.

Window i begins at token ``i * stride`` and holds ``window`` tokens, the last one fewer. It scores what no window
before it has: in the first all but its first token, in the others the tokens after the first ``window - stride``,
which are context alone. So every token but the very first is scored once, and but for the text's beginning with
at least ``window - stride`` tokens before it (the sliding window of transformers' documentation of perplexity).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mpillm.engine.request import Request, Result, Sampling

SCORING = Sampling(max_tokens=0, prompt_logprobs=0)


@dataclass(frozen=True)
class Window:
    """Tokens ``start .. stop`` of the text, of which ``first .. stop`` are scored."""

    index: int
    start: int
    first: int
    stop: int

    def request(self, ids: Sequence[int], model: str) -> Request:
        """The request that scores it: prefill alone. ``ids``: the whole text."""
        return Request(self.index + 1, self.index, None, "completion", True, (ids[self.start:self.stop],), SCORING,
                       model)


def count_windows(tokens: int, window: int, stride: int) -> int:
    """Windows of a text; 0 where no token has another before it."""
    assert 0 < stride < window, f"a stride of {stride} in windows of {window}"
    return 0 if tokens < 2 else 1 + max(0, -(-(tokens - window) // stride))


def window_at(index: int, tokens: int, window: int, stride: int) -> Window:
    """One of the ``count_windows``."""
    start = index * stride
    return Window(index, start, start + window - stride if index else 1, min(start + window, tokens))


@dataclass(frozen=True)
class Sums:
    """Of one window's scored tokens: their number, and the sums of -log p and of its square, in nats."""

    index: int
    tokens: int
    nll: float
    squares: float

    @classmethod
    def of(cls, window: Window, logprobs: Iterable[float]) -> Sums:
        """``logprobs`` of the scored tokens, in order."""
        nll = -np.fromiter(logprobs, np.float64)
        assert len(nll) == window.stop - window.first, f"{len(nll)} scores in window {window}"
        return cls(window.index, len(nll), math.fsum(nll), math.fsum(nll * nll))


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean -log p, in nats. Standard errors are None for a single token.

    That of the mean takes tokens as independent: the standard deviation of -log p over the square root of their
    number. That of the perplexity follows by the delta method: the perplexity times it.
    """

    tokens: int
    nll_mean: float
    nll_stderr: float | None
    perplexity: float
    perplexity_stderr: float | None
    bits_per_byte: float


def perplexity(sums: Iterable[Sums], nbytes: int) -> Perplexity:
    """Of all windows in any order; the result does not depend on it. ``nbytes``: of the whole text in UTF-8."""
    found = list(sums)
    tokens, total = sum(s.tokens for s in found), math.fsum(s.nll for s in found)
    assert tokens and nbytes, "a text without a scored token"
    mean, error = total / tokens, None
    if tokens > 1:
        variance = max(0.0, math.fsum(s.squares for s in found) - tokens * mean * mean) / (tokens - 1)
        error = math.sqrt(variance / tokens)
    value = math.exp(mean) if mean < 700 else math.inf
    return Perplexity(tokens, mean, error, value, None if error is None else value * error,
                      total / math.log(2) / nbytes)


class ScoreSink:
    """A ``generate.Sink`` that keeps each window's sums, and counts what passed."""

    def __init__(self, tokens: int, window: int, stride: int) -> None:
        self.sums: list[Sums] = []
        self.failure: str | None = None
        self.prefilled = 0
        self._text = tokens, window, stride

    def result(self, result: Result) -> None:
        assert result.prompt_logprobs is not None, "scores were asked for"
        window, (scores,) = window_at(result.request.index, *self._text), result.prompt_logprobs
        self.sums.append(Sums.of(window, (score[0] for score in scores[window.first - window.start:]
                                          if score is not None)))

    def failed(self, request: Request, message: str, code: str, status: int) -> None:
        self.failure = self.failure or f"window {request.index + 1}: {message}"

    def logits(self, keys: np.ndarray, logits: np.ndarray) -> None:
        raise AssertionError("no logits are kept")

    def step(self, record: tuple[int, int, float, float, float, float]) -> None:
        pass

    def so_far(self) -> float:
        """The perplexity of the windows that are done; NaN of none."""
        tokens = sum(s.tokens for s in self.sums)
        return math.exp(min(700.0, sum(s.nll for s in self.sums) / tokens)) if tokens else math.nan

    def progress(self, prefilled: int, generated: int, finished: int) -> None:
        self.prefilled += prefilled
