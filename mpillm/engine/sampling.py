"""Choosing tokens from logits that are split over the vocabulary.

Each rank looks at its own columns and sends, for each row, its maximum and sum of exponentials, the best
of its Gumbel-perturbed logits, and its first few candidates; never the row. The root of the replica
decides and tells the rest, so unlike hosts cannot disagree. Where the candidates do not reach the mass
that ``top_p`` asks for, the rows concerned go round again with more of them.

Sampling is Gumbel-max: the token is ``argmax(logit / T + noise(seed, position, id))`` over what the
truncations keep, so it depends neither on the split nor on the batch. The order is vLLM's: bias and
penalties, temperature, min_p, top_k, top_p.  Temperatures below ``GREEDY`` are the limit t -> 0;
``top_p = 0`` keeps the best token alone.  Logprobs are those of the model's own logits, before all that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from mpillm import kernels
from mpillm.engine.request import Sampling

GREEDY = 1e-5
FIRST_CANDIDATES = 64
CONTINUE, FINISHED, WIDEN, NOT_FINITE, NONE_ALLOWED, TOO_COMPLEX = range(6)

# Columns of a rank's message for a row; candidates follow them.
RAW_MAX, RAW_SUM, TARGET, SCORE, SCORE_ID, SCORE_RAW, TEMP_MAX, TEMP_SUM, FIXED = range(9)


class RootExchange(Protocol):
    """Small arrays to the root of a replica and back."""

    is_root: bool

    def gather(self, array: np.ndarray) -> list[np.ndarray] | None: ...

    def bcast(self, array: np.ndarray) -> None: ...


@dataclass
class Row:
    """One row of logits and what is wanted of it."""

    sampling: Sampling
    position: int                    # of the token that is chosen
    seed: int
    prompt: np.ndarray
    generated: list[int]
    choose: bool                     # False: score ``target`` only
    target: int = -1                 # the prompt's own next token, for prompt logprobs
    alternatives: int = 0            # best raw tokens to report
    banned: tuple[int, ...] = ()     # end tokens, while min_tokens is not reached
    allowed: np.ndarray | None = None    # bool, of this rank's ids: what the text's form lets come next

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < GREEDY

    @property
    def truncated(self) -> bool:
        s = self.sampling
        return self.choose and not self.greedy and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)

    @property
    def plain(self) -> bool:
        return self.choose and not self.greedy and not self.truncated

    def candidates(self) -> int:
        """Candidates to ask of each rank at first."""
        if not self.choose or self.plain:
            return 0
        return 1 if self.greedy else max(FIRST_CANDIDATES, min(self.sampling.top_k, 1024))


@dataclass
class Decision:
    """What the root found out about a row; ranks other than the root know token and flag alone."""

    token: int = -1
    flag: int = CONTINUE
    logprob: float = np.nan          # of the chosen token, or of the target
    top: list[tuple[int, float]] | None = None


class Sampler:
    """Decides the rows of each step, together with the other ranks of the replica."""

    def __init__(self, exchange: RootExchange, first_id: int, widest: int) -> None:
        """``first_id``: of this rank's vocabulary rows; ``widest``: the most rows that a rank of the replica has."""
        self.exchange, self.first_id, self.widest = exchange, first_id, widest

    def decide(self, logits: np.ndarray, rows: list[Row],
               judge: Callable[[int, Decision], int]) -> list[Decision]:
        """Decisions for ``logits`` float32 [rows, local vocabulary].

        ``judge(row index, decision)`` runs on the root for each chosen token and returns the flag
        (CONTINUE, FINISHED or TOO_COMPLEX), which every rank is told.
        """
        decisions = [Decision() for _ in rows]
        pending, count = list(range(len(rows))), max((row.candidates() for row in rows), default=0)
        while pending:
            count = min(count, self.widest)
            pending, count = self._round(logits, rows, pending, count, decisions, judge), count * 8
        return decisions

    def _round(self, logits: np.ndarray, rows: list[Row], pending: list[int], count: int,
               decisions: list[Decision], judge: Callable[[int, Decision], int]) -> list[int]:
        asked = [rows[i] for i in pending]
        n_top = max(row.alternatives for row in asked)
        message = self._message(logits[pending] if len(pending) < len(rows) else logits, asked, count, n_top)
        parts = self.exchange.gather(message)
        told = np.empty((len(pending), 2), np.int64)
        if parts is not None:
            merged = Merged(np.stack(parts), count, n_top)
            for at, index in enumerate(pending):
                decision = merged.decision(rows[index], at)
                if decision.flag == CONTINUE and rows[index].choose:
                    decision.flag = judge(index, decision)
                decisions[index] = decision
                told[at] = decision.token, decision.flag
        self.exchange.bcast(told)
        for at, index in enumerate(pending):
            decisions[index].token, decisions[index].flag = int(told[at, 0]), int(told[at, 1])
        return [index for at, index in enumerate(pending) if told[at, 1] == WIDEN]

    def _message(self, logits: np.ndarray, rows: list[Row], count: int, n_top: int) -> np.ndarray:
        n_local = logits.shape[1]
        message = np.full((len(rows), FIXED + 1 + 2 * n_top + 3 * count), -np.inf)
        message[:, RAW_SUM] = message[:, TEMP_SUM] = 0
        message[:, FIXED] = n_local
        if not n_local:
            return message
        processed = self._processed(logits, rows)
        if count == 1 and not n_top and processed is logits:
            # Most steps: every row takes its best token
            message[:, RAW_MAX], message[:, RAW_SUM], ids = kernels.best_parts(logits)
            message[:, FIXED + 1], message[:, FIXED + 2] = message[:, RAW_MAX], ids + self.first_id
            message[:, FIXED + 3] = message[:, RAW_MAX]
            if all(row.greedy and row.choose for row in rows):
                return message
            count = 0
        else:
            message[:, RAW_MAX], message[:, RAW_SUM] = kernels.log_sum_exp_parts(logits)
        if n_top:
            values, ids = kernels.top_k(logits, n_top)
            tops = message[:, FIXED + 1:FIXED + 1 + 2 * n_top].reshape(len(rows), n_top, 2)
            tops[:, :values.shape[1], 0], tops[:, :values.shape[1], 1] = values, ids + self.first_id
        if count:
            values, ids = kernels.top_k(processed, count)
            found = message[:, FIXED + 1 + 2 * n_top:].reshape(len(rows), count, 3)
            found[:, :values.shape[1], 0], found[:, :values.shape[1], 1] = values, ids + self.first_id
            found[:, :values.shape[1], 2] = np.take_along_axis(logits, ids, 1)
        for at, row in enumerate(rows):
            if 0 <= row.target - self.first_id < n_local:
                message[at, TARGET] = logits[at, row.target - self.first_id]
            if row.plain:
                score, best = kernels.gumbel_best(processed[at], row.sampling.temperature, -np.inf, row.seed,
                                                  row.position, self.first_id)
                message[at, SCORE:SCORE_RAW + 1] = score, best + self.first_id, logits[at, best]
            elif row.truncated:
                message[at, TEMP_MAX:TEMP_SUM + 1] = _tempered_parts(processed[at], row.sampling.temperature)
        return message

    def _processed(self, logits: np.ndarray, rows: list[Row]) -> np.ndarray:
        """Logits after bias and penalties; the same array where no row has any."""
        changed = [at for at, row in enumerate(rows) if row.choose and _has_processors(row)]
        if not changed:
            return logits
        logits = logits.copy()
        for at in changed:
            apply_processors(logits[at], rows[at], self.first_id)
        return logits


def _has_processors(row: Row) -> bool:
    s = row.sampling
    return bool(s.logit_bias or s.allowed_token_ids is not None or row.allowed is not None or row.banned
                or s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1)


def apply_processors(logits: np.ndarray, row: Row, first_id: int) -> None:
    """vLLM's processors on a slice of one row, in place; ``logits`` float32 [n] begin at ``first_id``."""
    s, n = row.sampling, len(logits)

    def local(ids: np.ndarray) -> np.ndarray:
        ids = ids.astype(np.int64) - first_id
        return ids[(ids >= 0) & (ids < n)]

    if s.allowed_token_ids is not None:
        allowed = local(np.asarray(s.allowed_token_ids))
        kept = logits[allowed]
        logits[:] = -np.inf
        logits[allowed] = kept
    if row.allowed is not None:
        np.copyto(logits, np.float32(-np.inf), where=~row.allowed)
    if row.banned:
        logits[local(np.asarray(row.banned))] = -np.inf
    for token, bias in s.logit_bias:
        if first_id <= token < first_id + n:
            logits[token - first_id] += np.float32(bias)
    generated = np.asarray(row.generated, np.int64)
    if s.repetition_penalty != 1:
        seen = local(np.unique(np.concatenate([row.prompt.astype(np.int64), generated])))
        penalty = np.float32(s.repetition_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    if (s.frequency_penalty or s.presence_penalty) and len(generated):
        ids, times = np.unique(generated, return_counts=True)
        mine = (ids >= first_id) & (ids < first_id + n)
        logits[ids[mine] - first_id] -= (np.float32(s.frequency_penalty) * times[mine].astype(np.float32)
                                         + np.float32(s.presence_penalty))


def _tempered_parts(logits: np.ndarray, temperature: float) -> tuple[float, float]:
    top = float(logits.max())
    if top == -np.inf:
        return top, 0.0
    return top, float(np.exp((logits.astype(np.float64) - top) / temperature).sum())


class Merged:
    """Every rank's message about each row, [ranks, rows, words] in rank order, put together."""

    def __init__(self, parts: np.ndarray, count: int, n_top: int) -> None:
        self._parts, self._count, self._n_top = parts, count, n_top
        heads = self._heads = parts[:, :, :FIXED]
        top = heads[:, :, RAW_MAX].max(0)
        total = heads[0, :, RAW_SUM] if len(heads) == 1 else np.zeros(len(top))
        with np.errstate(all="ignore"):
            for head in heads if len(heads) > 1 else ():           # in rank order
                total += np.where(head[:, RAW_SUM] == 0, 0, head[:, RAW_SUM] * np.exp(head[:, RAW_MAX] - top))
            self._finite = (np.isfinite(top) & np.isfinite(total)).tolist()
            self._log_sum = (top + np.log(total)).tolist()
        first = FIXED + 1 + 2 * n_top
        self._best = _best(parts[:, :, first:first + 3]) if count else None

    @cached_property
    def _sampled(self) -> list[list[float]]:
        return _best(self._heads[:, :, SCORE:SCORE_RAW + 1])

    def decision(self, row: Row, at: int) -> Decision:
        """The decision for row ``at``."""
        if not self._finite[at]:
            return Decision(flag=NOT_FINITE)
        log_sum, parts = self._log_sum[at], self._parts[:, at]
        alternatives = _alternatives(row, parts, self._n_top, log_sum)
        if not row.choose:
            return Decision(logprob=float(self._heads[:, at, TARGET].max()) - log_sum, top=alternatives)
        if row.truncated:
            return self._truncated(row, at, alternatives)
        best = self._best if row.greedy else self._sampled
        assert best is not None, "a greedy row has candidates"
        score, token, raw = best[at]
        if score == -np.inf:
            return Decision(flag=NONE_ALLOWED)
        return Decision(token=int(token), logprob=raw - log_sum, top=alternatives)

    def _truncated(self, row: Row, at: int, alternatives: list[tuple[int, float]] | None) -> Decision:
        """The same from candidates, of which the truncations keep some."""
        parts, count = self._parts[:, at], self._count
        found = parts[:, FIXED + 1 + 2 * self._n_top:].reshape(-1, 3)
        found = found[found[:, 0] > -np.inf]
        if not len(found):
            return Decision(flag=NONE_ALLOWED)
        found = found[np.lexsort((found[:, 1], -found[:, 0]))]
        kept = _truncated(row, found, _bound(parts, count, self._n_top), self._heads[:, at])
        if kept is None:
            return Decision(flag=WIDEN)
        chosen = 0
        if kept > 1:
            noise = kernels.gumbel_noise(row.seed, row.position, found[:kept, 1].astype(np.int64))
            chosen = int(np.argmax(found[:kept, 0] / row.sampling.temperature + noise))
        return Decision(token=int(found[chosen, 1]), logprob=float(found[chosen, 2]) - self._log_sum[at],
                        top=alternatives)


def _best(triples: np.ndarray) -> list[list[float]]:
    """For each row of [ranks, rows, (score, id, raw)] the triple of the highest score, ties by lower id."""
    best = triples[0].copy()
    for other in triples[1:]:
        better = (other[:, 0] > best[:, 0]) | ((other[:, 0] == best[:, 0]) & (other[:, 1] < best[:, 1]))
        best[better] = other[better]
    return best.tolist()


def _alternatives(row: Row, parts: np.ndarray, n_top: int,
                  log_sum: float) -> list[tuple[int, float]] | None:
    if not row.alternatives:
        return None
    tops = np.concatenate([part[FIXED + 1:FIXED + 1 + 2 * n_top].reshape(n_top, 2) for part in parts])
    tops = tops[np.isfinite(tops[:, 1])]
    tops = tops[np.lexsort((tops[:, 1], -tops[:, 0]))][:row.alternatives]
    return [(int(token), float(value) - log_sum) for value, token in tops]


def _bound(parts: np.ndarray, count: int, n_top: int) -> float:
    """No token that was not sent has a logit above this; -inf when every rank sent all that it has."""
    last = [part[FIXED + 1 + 2 * n_top:].reshape(count, 3)[-1, 0] for part in parts if part[FIXED] > count]
    return max(last, default=-np.inf)


def _truncated(row: Row, found: np.ndarray, bound: float, heads: np.ndarray) -> int | None:
    """How many of the sorted candidates min_p, top_k and top_p keep; None when more are needed to tell."""
    s = row.sampling
    complete = bound == -np.inf
    sure = found if complete else found[found[:, 0] > bound]
    scaled = (sure[:, 0] - found[0, 0]) / s.temperature
    kept, known = len(sure), complete
    if s.min_p > 0:
        above = int(np.count_nonzero(scaled >= np.log(s.min_p)))
        known = known or above < kept
        kept = above
    if s.top_k > 0 and kept >= s.top_k:
        kept, known = s.top_k, True
    if not known and (s.top_k > 0 or s.min_p > 0):
        return None
    if s.top_p >= 1:
        return max(kept, 1)
    mass = np.cumsum(np.exp(scaled[:kept]))
    if s.top_k > 0 or s.min_p > 0:
        whole = mass[-1]
    else:                       # never from the candidates: their number depends on the rest of the batch
        whole = sum(heads[r, TEMP_SUM] * np.exp((heads[r, TEMP_MAX] - found[0, 0]) / s.temperature)
                    for r in range(len(heads)) if heads[r, TEMP_SUM])
    reached = int(np.searchsorted(mass, s.top_p * whole))
    if reached < kept:
        return reached + 1
    return max(kept, 1) if known else None
