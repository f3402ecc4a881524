"""The batch loop: plan a step, run the model, decide tokens, hand out finished requests.

Every rank of a replica runs this same loop on the same requests; only the root judges ends and text.
Shape suffixes: T rows of a step, S rows whose logits are wanted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mpillm.engine.guided import Follower, Guides
from mpillm.engine.request import Choice, Request, Result, Timing, resolve_max_tokens, sequence_seed
from mpillm.engine.sampling import (
    CONTINUE,
    FINISHED,
    NONE_ALLOWED,
    NOT_FINITE,
    TOO_COMPLEX,
    Decision,
    Row,
    Sampler,
)
from mpillm.engine.scheduler import Part, Scheduler, Sequence
from mpillm.kernels import LayerCache, Rows
from mpillm.machine.guard import board
from mpillm.models.llama import Llama

if TYPE_CHECKING:
    from mpillm.engine.link import Link
    from mpillm.engine.text import TextStream

STEP_RECORD = np.dtype([("rows_prefill", np.int32), ("rows_decode", np.int32), ("start_s", np.float64),
                        ("total_s", np.float64), ("communication_s", np.float64), ("waited_s", np.float64)])


IDLE = 2e-3            # seconds between looks for requests when nothing runs

# What a line is told that could not be finished: message, code, status.
FAILURES = {
    NOT_FINITE: ("the model's logits are not finite here: a key or value is beyond the range of --kv-type (f16 ends "
                 "at 65504: use bf16 or f32), or the model is damaged", "not_finite", 500),
    NONE_ALLOWED: ("no token is left to choose: allowed_token_ids, logit_bias, min_tokens and the text's form (such "
                   "as response_format) together forbid all", "no_token_allowed", 400),
    TOO_COMPLEX: ("the text's form (such as response_format) became too complex to follow: give a simpler one",
                  "form_too_complex", 400),
}


class Ticker(Protocol):
    """Counts the seconds that exchanges took since it was last reset, and the seconds waited since the start."""

    seconds: float

    @property
    def waited(self) -> float: ...


class Sink(Protocol):
    """Where results go; only the root of a replica hands out results, every rank its logits."""

    def result(self, result: Result) -> None: ...

    def failed(self, request: Request, message: str, code: str, status: int) -> None: ...

    def logits(self, keys: np.ndarray, logits: np.ndarray) -> None: ...

    def step(self, record: tuple[int, int, float, float, float, float]) -> None:
        """One step's figures, in the order of ``STEP_RECORD``."""

    def progress(self, prefilled: int, generated: int, finished: int) -> None: ...


@dataclass
class Ends:
    """What ends a sequence, beside its own parameters."""

    eos_ids: frozenset[int]
    context: int


@dataclass
class _Live:
    """What the root keeps about a running sequence."""

    stream: TextStream | None
    follower: Follower | None = None     # of a guided text
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_scores: list[tuple[float, list[tuple[int, float]] | None]] = field(default_factory=list)
    finish_reason: str = "length"
    stop_reason: str | int | None = None
    started: float | None = None
    prefilled: float | None = None
    first_token: float | None = None


def sequences_of(requests: list[Request], ends: Ends, run_seed: int, keep_logits: str = "none",
                 salt: Callable[[int], bytes] = lambda length: b"", prompts_apart: bool = False) -> list[Sequence]:
    """One sequence for each item and sample of the requests, in order.

    ``salt(prompt length)``: what keys and values depend on beside the token ids (`Rope.salt`); ``prompts_apart``:
    behind the prompt on its length too.
    """
    found = []
    for request in requests:
        whole = request.sampling.prompt_logprobs is not None or keep_logits == "all"
        for item, prompt in enumerate(request.prompts):
            ids = np.asarray(prompt, np.int32)      # shared by the samples
            found += [Sequence(request, item, sample, ids,
                               resolve_max_tokens(request.sampling, len(ids), ends.context),
                               sequence_seed(run_seed, request, item, sample), whole_prompt=whole,
                               salt=salt(len(ids)),
                               salt_behind=len(ids).to_bytes(8, "little") if prompts_apart else b"")
                      for sample in range(request.sampling.n)]
    return found


class BatchLoop:
    """Runs all sequences of a replica to their ends."""

    def __init__(self, model: Llama, cache: list[LayerCache], scheduler: Scheduler, sampler: Sampler,
                 ticker: Ticker, sink: Sink, ends: Ends, *, keep_logits: str,
                 text_stream: Callable[[Sequence], TextStream | None], replica: int, clock_start: float,
                 link: Link | None = None, run_seed: int = 0, guides: Guides | None = None) -> None:
        """``link``: where more requests come from, and the wish to stop; the sampler's exchange. Without one the
        loop runs what was added to the scheduler."""
        self.model, self.cache, self.scheduler, self.sampler = model, cache, scheduler, sampler
        self.ticker, self.sink, self.ends, self.link, self.run_seed = ticker, sink, ends, link, run_seed
        self.keep_logits, self.text_stream, self.replica = keep_logits, text_stream, replica
        self.clock_start, self.guides = clock_start, guides
        self.is_root = sampler.exchange.is_root
        self._live: dict[Sequence, _Live] = {}
        self._finished: dict[int, dict[tuple[int, int], tuple[Choice, Timing, _Live]]] = {}
        self._broken: dict[int, tuple[str, str, int]] = {}
        self.n_steps = 0

    def run(self) -> int:
        """Run until nothing is left, or until the link says to stop; why, 0: everything is done."""
        while True:
            parts = self.scheduler.plan()
            if parts:
                board().say(f"computing step {self.n_steps}, {len(parts)} sequences, "
                            f"{sum(part.count for part in parts)} rows")
                self._step(parts)
            if self.link is None:
                if not parts:
                    return 0
                continue
            requests = self.link.news()
            if self.link.stop:
                return self.link.stop
            if requests:
                self.admit(requests)
            elif not parts:
                if self.link.closed:
                    return 0
                board().say("waiting for requests")
                self.sink.progress(0, 0, 0)          # what is finished goes to the disk in time
                time.sleep(IDLE)

    def admit(self, requests: list[Request]) -> None:
        """Requests join the batch; those that the empty cache could not hold fail."""
        refused = self.scheduler.add(sequences_of(
            requests, self.ends, self.run_seed, self.keep_logits, self.model.rope.salt, self.model.prompts_apart))
        ledger, block = self.scheduler.ledger, self.scheduler.limits.block
        for sequence, blocks in refused if self.is_root else ():
            self.sink.failed(sequence.request, (
                f"prompt of {len(sequence.prompt)} tokens with max_tokens {sequence.max_tokens} needs {blocks} cache "
                f"blocks, the whole cache has {ledger.n_blocks} ({ledger.n_blocks * block} positions): "
                "raise --kv-memory or lower max_tokens"), "cache_too_small", 400)
        if refused:
            self.sink.progress(0, 0, len(refused))

    def _now(self) -> float:
        return time.perf_counter() - self.clock_start

    def _step(self, parts: list[Part]) -> None:
        start, self.ticker.seconds = self._now(), 0.0
        waited = self.ticker.waited
        for part in parts:
            live = self._live.setdefault(part.sequence, _Live(None))
            if live.started is None:
                live.started = start
                live.stream = self.text_stream(part.sequence) if self.is_root else None
                if self.is_root and self.guides is not None and part.sequence.max_tokens:
                    live.follower = self.guides.follow(part.sequence.request.sampling)
        rows, wanted, owners = self._rows(parts)
        if len(wanted):
            logits = self.model(rows, self.cache, wanted)
            self._store_logits(logits, owners)
            self._decide(logits, owners)
        else:
            self.model(rows, self.cache, wanted)
        self._account(parts, start, waited)

    def _rows(self, parts: list[Part]) -> tuple[Rows, np.ndarray, list[tuple[Part, int]]]:
        """The arrays of a step; the rows whose logits are wanted, and of each its part and position."""
        counts = [p.count for p in parts]
        starts = np.array([p.start for p in parts])
        slots = np.array([p.sequence.slot for p in parts])
        prompts = np.array([len(p.sequence.prompt) for p in parts])
        if all(p.decodes for p in parts):
            tokens, positions = np.array([p.sequence.generated[-1] for p in parts], np.int64), starts
        else:
            tokens = np.concatenate([p.sequence.tokens(p.start, p.start + p.count) for p in parts])
            positions = np.concatenate([np.arange(p.start, p.start + p.count) for p in parts])
            slots, prompts = np.repeat(slots, counts), np.repeat(prompts, counts)
        generated, place = 0, np.arange(len(positions))
        if self.model.prompts_apart:
            # Rows behind their prompts go first, whatever step they are in
            behind = positions >= prompts
            generated, order = int(behind.sum()), np.argsort(~behind, kind="stable")
            tokens, positions, slots, prompts = tokens[order], positions[order], slots[order], prompts[order]
            place[order] = np.arange(len(order))
        cos, sin = self.model.rope.rows(positions, np.maximum(prompts, positions + 1))
        wanted, owners, first = [], [], 0
        for part in parts:
            for position in self._wanted_positions(part):
                wanted.append(place[first + position - part.start])
                owners.append((part, position))
            first += part.count
        rows = Rows(tokens, positions.astype(np.int32), slots.astype(np.int32), self.scheduler.block_table, cos, sin,
                    generated=generated)
        return rows, np.array(wanted, np.int64), owners

    def _wanted_positions(self, part: Part) -> range:
        """Positions of a part whose next-token logits are computed."""
        stop = part.start + part.count
        if part.sequence.whole_prompt:      # rows that are recomputed after a preemption were dealt with before
            return range(max(part.start, part.sequence.scored), stop)
        if part.completes and (part.sequence.max_tokens or self.keep_logits != "none"):
            return range(stop - 1, stop)
        return range(0)

    def _store_logits(self, logits: np.ndarray, owners: list[tuple[Part, int]]) -> None:
        if self.keep_logits == "none":
            return
        kept, keys = [], []
        for at, (part, position) in enumerate(owners):
            sequence = part.sequence
            if self._keeps(sequence, position):
                kept.append(at)
                choice = sequence.item * sequence.request.sampling.n + sequence.sample
                keys.append((sequence.request.index, choice, position, 0))
        if kept:
            rows = logits if len(kept) == len(logits) else logits[kept]
            self.sink.logits(np.array(keys, np.int64), rows)

    def _keeps(self, sequence: Sequence, position: int) -> bool:
        """Whether the logits of this position are stored."""
        last_of_prompt = len(sequence.prompt) - 1
        if self.keep_logits == "generated":
            return position >= last_of_prompt and sequence.max_tokens > 0
        return self.keep_logits == "all" or position == last_of_prompt

    def _decide(self, logits: np.ndarray, owners: list[tuple[Part, int]]) -> None:
        rows, indices = [], []
        for at, (part, position) in enumerate(owners):
            row = self._sampling_row(part, position)
            if row is not None:
                rows.append(row)
                indices.append(at)
        if not rows:
            return
        if self.guides is not None:
            self.guides.share(rows, [self._live[owners[at][0].sequence].follower for at in indices])

        def judge(index: int, decision: Decision) -> int:
            return self._judge(owners[indices[index]][0].sequence, decision)

        chosen = logits if len(indices) == len(logits) else np.ascontiguousarray(logits[indices])
        for at, decision in zip(indices, self.sampler.decide(chosen, rows, judge), strict=True):
            self._take(*owners[at], decision)

    def _sampling_row(self, part: Part, position: int) -> Row | None:
        sequence = part.sequence
        s = sequence.request.sampling
        choose = position == sequence.length - 1 and sequence.max_tokens > 0
        target = -1
        if s.prompt_logprobs is not None and position + 1 < len(sequence.prompt):
            target = int(sequence.prompt[position + 1])
        if not choose and target < 0:
            return None
        early = choose and len(sequence.generated) < s.min_tokens
        banned = tuple(self.ends.eos_ids) + s.stop_token_ids if early else ()
        alternatives = (s.logprobs or 0) if choose else (s.prompt_logprobs or 0)
        return Row(s, position + 1, sequence.seed, sequence.prompt, sequence.generated, choose, target,
                   alternatives, banned)

    def _judge(self, sequence: Sequence, decision: Decision) -> int:
        """On the root: does the sequence end with this token?"""
        live, s, token = self._live[sequence], sequence.request.sampling, decision.token
        count = len(sequence.generated) + 1
        ended = (token in self.ends.eos_ids and not s.ignore_eos)
        if ended or token in s.stop_token_ids:
            live.finish_reason = "stop"
            live.stop_reason = None if ended and token not in s.stop_token_ids else token
            # An end token is not a part of the text, unless it was asked for.
            if live.stream is not None and s.include_stop_str_in_output:
                live.stream.push(token)
            return FINISHED
        if live.follower is not None:
            live.follower.advance(token)
            if live.follower.broken:
                return TOO_COMPLEX
        if live.stream is not None:
            matched = live.stream.push(token, search=count >= s.min_tokens)
            if matched is not None:
                live.finish_reason, live.stop_reason = "stop", matched
                return FINISHED
        if live.follower is not None and live.follower.complete:
            # Even below min_tokens: there is nothing more that the text could say.
            live.finish_reason = "stop"
            return FINISHED
        return FINISHED if count >= sequence.max_tokens else CONTINUE

    def _take(self, part: Part, position: int, decision: Decision) -> None:
        """Account for a decision on every rank."""
        sequence, live = part.sequence, self._live[part.sequence]
        if decision.flag in FAILURES:
            sequence.finished = True
            self._broken.setdefault(sequence.request.index, FAILURES[decision.flag])
            return
        if position + 1 < len(sequence.prompt):
            if self.is_root:
                live.prompt_scores.append((decision.logprob, decision.top))
            return
        sequence.generated.append(decision.token)
        sequence.finished = decision.flag == FINISHED
        if self.is_root:
            live.logprobs.append(decision.logprob)
            if sequence.request.sampling.logprobs is not None:
                live.top.append(decision.top or [])

    def _account(self, parts: list[Part], start: float, waited: float) -> None:
        end, prefilled, generated = self._now(), 0, 0
        for part in parts:
            sequence, live = part.sequence, self._live[part.sequence]
            prefilled += 0 if part.decodes else part.count
            if part.completes and live.prefilled is None:
                live.prefilled = end
                if sequence.max_tokens == 0:
                    sequence.finished = True
            generated += part.completes and bool(sequence.generated)
            if sequence.generated and live.first_token is None:
                live.first_token = end
        finished = [part.sequence for part in parts if part.sequence.finished]
        self.scheduler.done(parts)
        n_done = sum(self._collect(sequence, end) for sequence in finished)
        total = self._now() - start
        decoded = sum(part.count for part in parts) - prefilled
        self.n_steps += 1
        self.sink.step((prefilled, decoded, start, total, self.ticker.seconds, self.ticker.waited - waited))
        self.sink.progress(prefilled, generated, n_done)

    def _collect(self, sequence: Sequence, now: float) -> bool:
        """On the root: note a finished sequence; hand out its request when it was the last. True then."""
        live, request = self._live.pop(sequence), sequence.request
        if not self.is_root:
            self._broken.pop(request.index, None)
            return False
        text = live.stream.finish() if live.stream is not None else ""
        if live.stream is not None and live.stream.stopped is not None:
            live.finish_reason, live.stop_reason = "stop", live.stream.stopped
        choice = Choice(sequence.item, sequence.sample, sequence.item * request.sampling.n + sequence.sample,
                        sequence.generated, live.logprobs,
                        live.top if request.sampling.logprobs is not None else None, text,
                        live.finish_reason, live.stop_reason)
        assert live.started is not None, "a sequence finished that never ran"
        prefilled = live.prefilled if live.prefilled is not None else now
        first = live.first_token if live.first_token is not None else now
        timing = Timing(live.started, prefilled - live.started, first, now - first)
        done = self._finished.setdefault(request.index, {})
        done[sequence.item, sequence.sample] = choice, timing, live
        if len(done) < len(request.prompts) * request.sampling.n:
            return False
        self._hand_out(request, [done[key] for key in sorted(done)])
        del self._finished[request.index]
        return True

    def _hand_out(self, request: Request, done: list[tuple[Choice, Timing, _Live]]) -> None:
        broken = self._broken.pop(request.index, None)
        if broken is not None:
            self.sink.failed(request, *broken)
            return
        scores = None
        if request.sampling.prompt_logprobs is not None:
            scores = [[None, *done[item * request.sampling.n][2].prompt_scores]
                      for item in range(len(request.prompts))]
        self.sink.result(Result(request, [c for c, _, _ in done], [t for _, t, _ in done], self.replica, scores))
