"""One replica's run: its cache, scheduler, sampler and part files, fed from rank 0 until nothing is left."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpillm import kernels
from mpillm.collectives import Replica, World
from mpillm.config import RunConfig, format_size
from mpillm.engine import setup
from mpillm.engine.blocks import BlockLedger, blocks_for
from mpillm.engine.feed import Desk, Feed, Letters, Line
from mpillm.engine.generate import BatchLoop, Ends
from mpillm.engine.guided import Guides
from mpillm.engine.kvcache import share_cache
from mpillm.engine.link import Link
from mpillm.engine.output import ReplicaOutput
from mpillm.engine.request import FailedLine, Request, Sampling, check_defaults, read_request
from mpillm.engine.request import Limits as LineLimits
from mpillm.engine.sampling import Sampler
from mpillm.engine.scheduler import Limits, Scheduler, Sequence
from mpillm.errors import OutputError
from mpillm.formats.parts import RankPart
from mpillm.machine import signals
from mpillm.models.config import ModelConfig

if TYPE_CHECKING:
    from mpillm.engine.text import TextStream  # only roots need a tokenizer, and what it imports

LOG = logging.getLogger("mpillm.run")
NAP = 5e-3             # seconds between looks at the mail when rank 0 only waits for other replicas


@dataclass
class Job:
    """What rank 0 found out before anything is loaded; told to all."""

    path: str
    model: ModelConfig
    parts: str
    context: int
    eos_ids: frozenset[int]
    created: int                     # seconds since 1970
    versions: dict[str, str]
    attempt: int                     # which run on these outputs this is, from 0
    settings: RunConfig              # as they were decided with the model known


class LineReader:
    """Lines to requests, by a run's settings; on the roots of replicas."""

    def __init__(self, settings: RunConfig, model: ModelConfig, context: int, tokenizer: Any | None) -> None:
        """Raises UsageError when a default of the lines cannot be."""
        self._limits = LineLimits(vocab=model.vocab, max_positions=context, bos_id=model.bos_id, model=model.name,
                                  parse_special=settings.parse_special)
        self._tokenizer = tokenizer
        self._defaults = check_defaults(Sampling(
            max_tokens=settings.max_tokens, temperature=settings.temperature, top_p=settings.top_p,
            top_k=settings.top_k, min_p=settings.min_p, stop=settings.stop, stop_token_ids=settings.stop_token_ids,
            ignore_eos=settings.ignore_eos, n=settings.n, logprobs=settings.logprobs), self._limits,
            tokenizer is not None)

    def __call__(self, line: Line) -> Request | FailedLine:
        return read_request(line.number, line.index, line.raw, self._defaults, self._tokenizer, self._limits)


def cache_blocks(world: World, settings: RunConfig, job: Job, split: setup.Split, replica: Replica) -> int:
    """The number of cache blocks, the same on all ranks of the replica. Raises ResourceError."""
    share = split.partition.shares[replica.rank]
    free = world.free_nbytes() - setup.activation_bytes(settings, job.model, share)
    offer = setup.affordable_blocks(
        settings, setup.cache_block_bytes(settings, job.model, split, replica.rank), free)
    if world.rank == 0 and settings.kv_memory is not None and settings.kv_memory > free:
        LOG.warning("--kv-memory %s is more than the %s that are free on a rank: that much is taken",
                    format_size(settings.kv_memory), format_size(max(free, 0)))
    offers = replica.gather(np.array([-1 if offer is None else offer], np.int64))
    agreed = np.zeros(1, np.int64)
    if offers is not None:
        most = settings.max_batch * blocks_for(job.context, kernels.BLOCK)
        agreed[0] = setup.agree_on_blocks(settings, most, [None if o[0] < 0 else int(o[0]) for o in offers],
                                          setup.other_modes(settings, job.model, split))
    replica.bcast(agreed)
    return int(agreed[0])


def open_output(settings: RunConfig, job: Job, split: setup.Split, replica: Replica, own: RankPart,
                tokenizer: Any | None) -> ReplicaOutput:
    """The part files of this rank."""
    return ReplicaOutput(job.parts, job.attempt, replica.index, split.layout.tp, own, is_root=replica.is_root,
                         flush_every=settings.flush_every, keeps_logits=settings.logits != "none",
                         tokenizer=tokenizer, run_seed=settings.seed, created=job.created)


def make_feed(settings: RunConfig, job: Job, tokenizer: Any | None, mail: Letters, desk: Desk | None,
              scheduler: Scheduler, output: ReplicaOutput) -> Feed:
    """Where a root gets its requests; it keeps some more waiting than run."""
    most = settings.max_batch + settings.max_batch // 2

    def room() -> int:
        free = most - scheduler.n_waiting - len(scheduler.running)
        return free if not scheduler.n_waiting or 4 * free >= settings.max_batch else 0

    return Feed(mail, desk, LineReader(settings, job.model, job.context, tokenizer), output.reject, room,
                output.tally)


def run_replica(world: World, settings: RunConfig, job: Job, split: setup.Split, replica: Replica,
                model: setup.LoadedModel, own: RankPart, tokenizer: Any | None, clock: float, mail: Letters,
                desk: Desk | None) -> list[str]:
    """Run requests until none is left or the run is to stop; the paths of the journals that then hold the results.

    ``own``: this rank's journal; ``desk``: on rank 0, which serves the other replicas meanwhile. Raises OutputError,
    ExchangeError.
    """
    share = split.partition.shares[replica.rank]
    widest = max(other.vocab.size for other in split.partition.shares)
    n_blocks = cache_blocks(world, settings, job, split, replica)
    cache = share_cache(settings, job.model, share, n_blocks)
    LOG.info("cache: %d blocks of %d positions, up to %s on rank %d", n_blocks, kernels.BLOCK,
             format_size(sum(layer.nbytes for layer in cache)), world.rank)
    scheduler = Scheduler(BlockLedger(n_blocks), Limits(settings.max_batch, settings.chunk, kernels.BLOCK),
                          context_blocks=blocks_for(job.context, kernels.BLOCK),
                          continuous=settings.batching == "continuous")
    with open_output(settings, job, split, replica, own, tokenizer) as output:
        feed = make_feed(settings, job, tokenizer, mail, desk, scheduler, output) if replica.is_root else None
        link = Link(replica, feed)
        guides = Guides(replica, share.vocab.start, share.vocab.size, job.model.vocab, job.eos_ids,
                        tokenizer if replica.is_root else None)
        loop = BatchLoop(model.model, cache, scheduler, Sampler(link, share.vocab.start, widest), replica, output,
                         Ends(job.eos_ids, job.context), keep_logits=settings.logits,
                         text_stream=text_streams(tokenizer), replica=replica.index, clock_start=clock, link=link,
                         run_seed=settings.seed, guides=guides)
        try:
            loop.run()
        except OutputError as error:
            raise OutputError(f"{error} (what was finished before lies in {job.parts})") from None
        if feed is not None:
            feed.leave()
    if replica.is_root:
        LOG.log(logging.INFO if scheduler.preempted or scheduler.shared_positions else logging.DEBUG,
                "replica %d: %d positions computed (%d of them again after %d preemptions), %d taken from shared "
                "prefixes", replica.index, scheduler.computed_positions, scheduler.recomputed_positions,
                scheduler.preempted, scheduler.shared_positions)
    return output.paths


def text_streams(tokenizer: Any | None) -> Callable[[Sequence], TextStream | None]:
    """What makes the text of a sequence; nothing where there is no tokenizer."""

    def text_stream(sequence: Sequence) -> TextStream | None:
        if tokenizer is None:
            return None
        from mpillm.engine.text import TextStream

        s = sequence.request.sampling
        return TextStream(tokenizer, sequence.prompt.tolist(), s.stop, s.skip_special_tokens,
                          s.include_stop_str_in_output, s.guided is not None)

    return text_stream


def serve_others(desk: Desk) -> None:
    """On rank 0, whose replica is done: serve the other replicas until they are."""
    said = False
    while True:
        desk.serve()
        if not desk.waits:
            return
        if not said:
            LOG.info("replica 0 is done; waiting for others")
            said = True
        if signals.heard():
            desk.ask_to_stop(signals.heard())
        time.sleep(NAP)


def time_left(settings: RunConfig, clock: float) -> Callable[[], float]:
    """Seconds until --time-limit, from ``clock`` (perf_counter) on."""
    limit = settings.time_limit
    return (lambda: math.inf) if limit is None else (lambda: limit - (time.perf_counter() - clock))
