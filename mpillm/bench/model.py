"""Prefill and decode speed of a loaded model, by the engine's own batch loop, scheduler, sampler and cache.

Prompts are random token ids. What stands in the cache before (the depth) is random keys and values in the cache's type
and layout, written once into all its blocks: the time of a step does not depend on the values. A sequence of "tg128"
begins with its last prompt token; that step is not counted, the next 128 are. "pp512" ends with the choice of the
first token.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpillm import kernels
from mpillm.bench.figures import Costs, Piece, SpeedTest, budget
from mpillm.config import RunConfig, format_size
from mpillm.engine import probe
from mpillm.engine.blocks import BlockLedger, blocks_for
from mpillm.engine.generate import STEP_RECORD, BatchLoop, Ends
from mpillm.engine.kvcache import form, share_block_bytes, share_cache
from mpillm.engine.probe import Ranks, Reader
from mpillm.engine.request import Request, Result, Sampling
from mpillm.engine.sampling import Sampler
from mpillm.engine.scheduler import Limits, Scheduler, Sequence
from mpillm.engine.setup import LoadedModel, Split
from mpillm.errors import ModelError
from mpillm.kernels import LayerCache
from mpillm.models.config import ModelConfig

LOG = logging.getLogger("mpillm.bench")
FAMILIES = ("gemm", "attention", "elementwise", "sampling", "exchange")
#: operations of a plan -> family, where it has another name
FAMILY_OF = {"linear": "gemm", "quantise": "elementwise", "norm": "elementwise", "rope": "elementwise",
             "silu": "elementwise", "lookup": "elementwise", "experts": "gemm", "latent": "gemm"}
LIMIT_SECONDS = 0.3           # of measuring the machine's limits, before each test and after


@dataclass
class Loaded:
    """A model on this rank and what it takes to run it."""

    ranks: Ranks
    settings: RunConfig
    config: ModelConfig
    split: Split
    model: LoadedModel
    costs: Costs
    weights: str                  # format or formats in memory
    name: str

    @property
    def replica(self) -> Any:
        assert self.ranks.replica is not None, "a model runs on a replica"
        return self.ranks.replica


@dataclass
class _Sink:
    """Takes the engine's results and forgets them; a failed sequence ends the measurement."""

    failures: list[str] = field(default_factory=list)
    steps: list[tuple[int, int, float, float, float, float]] = field(default_factory=list)

    def step(self, record: tuple[int, int, float, float, float, float]) -> None:
        self.steps.append(record)

    def result(self, result: Result) -> None:
        pass

    def failed(self, request: Request, message: str, code: str, status: int) -> None:
        self.failures.append(message)

    def logits(self, keys: np.ndarray, logits: np.ndarray) -> None:
        pass

    def progress(self, prefilled: int, generated: int, finished: int) -> None:
        pass


@dataclass(frozen=True)
class Run:
    """One measured run of a test: what was counted of it, in how many seconds."""

    tokens: int
    seconds: float
    exchange: float               # seconds of it in exchanges, waiting included
    step: float                   # seconds of the step that shows what is affordable
    whole: float                  # seconds of all steps, those that are not counted included
    families: dict[str, float]    # of them in kernels, exchanges aside


def sequences_of(test: SpeedTest, amount: int, vocab: int) -> list[Sequence]:
    """The sequences of a run: ``test.batch`` that generate ``amount`` tokens, or ``amount`` that are prefilled."""
    rng = np.random.default_rng(0)
    decode = test.kind == "tg"
    length = max(test.depth, 1) if decode else test.depth + test.count
    most = amount + 1 if decode else 1
    sampling = Sampling(max_tokens=most, temperature=0.0, ignore_eos=True)
    made = []
    for i in range(test.batch if decode else amount):
        prompt = rng.integers(0, vocab, length).astype(np.int32)
        request = Request(i + 1, i, None, "completion", True, (prompt.tolist(),), sampling, "")
        made.append(Sequence(request, 0, 0, prompt, most, seed=0,
                             computed=length - 1 if decode else test.depth))
    return made


def blocks_of(test: SpeedTest, amount: int) -> int:
    """Cache blocks that the sequences of a run take together."""
    decode = test.kind == "tg"
    positions = max(test.depth, 1) + amount if decode else test.depth + test.count
    return (test.batch if decode else amount) * blocks_for(positions, kernels.BLOCK)


def planned_steps(test: SpeedTest, amount: int, chunk: int) -> Iterator[list[Piece]]:
    """The counted steps of a run, found by running the scheduler without a model."""
    sequences = sequences_of(test, amount, 1)
    scheduler = _scheduler(sequences, blocks_of(test, amount), chunk)
    while parts := scheduler.plan():
        if test.kind == "pp" or parts[0].sequence.generated:
            yield [Piece(part.start, part.count, part.completes) for part in parts]
        for part in parts:
            if part.completes:
                part.sequence.generated.append(0)
            part.sequence.finished = len(part.sequence.generated) == part.sequence.max_tokens
        scheduler.done(parts)


def _scheduler(sequences: list[Sequence], n_blocks: int, chunk: int) -> Scheduler:
    chunk = max(chunk, len(sequences))       # a step's budget holds the first token of every sequence
    scheduler = Scheduler(BlockLedger(n_blocks), Limits(len(sequences), chunk, kernels.BLOCK),
                          context_blocks=n_blocks // len(sequences), share=False)
    refused = scheduler.add(sequences)
    assert not refused, f"{n_blocks} blocks do not hold the sequences"
    return scheduler


def filled_cache(loaded: Loaded, n_blocks: int) -> list[LayerCache]:
    """A cache of which every block holds the same random keys and values, of standard deviation 1."""
    config, settings = loaded.config, loaded.settings
    share = loaded.split.partition.shares[loaded.replica.rank]
    cache = share_cache(settings, config, share, n_blocks)
    kv_heads, key, value = form(config, share)
    rng = np.random.default_rng(0)
    count, zero = kernels.BLOCK, np.zeros(kv_heads, np.int32)
    k, v = (rng.standard_normal((count, kv_heads * size), np.float32) for size in (key, value))
    heads, nothing = kernels.Heads(key, 0, zero, zero, value), np.zeros(count, np.int64)
    # A first block through the cache's own write; copies of it for the others
    rows = kernels.Rows(nothing, np.arange(count, dtype=np.int32), nothing.astype(np.int32), np.zeros((1, 1), np.int32),
                        np.ones((count, 1), np.float32), np.zeros((count, 1), np.float32))
    for layer in cache if kv_heads else ():
        plan = kernels.Plan(count)
        plan.cache_write(k, None if layer.values is None else v, heads, layer)
        plan.run(rows, nothing[:0])
        for array in (layer.keys, layer.values):
            if array is not None:
                array[1:] = array[:1]
    return cache


def run_test(loaded: Loaded, test: SpeedTest, amount: int, cache: list[LayerCache]) -> Run:
    """One run of ``amount`` tokens ("tg") or sequences ("pp") on ``cache``. Raises ModelError."""
    replica, settings = loaded.replica, loaded.settings
    sequences = sequences_of(test, amount, loaded.config.vocab)
    scheduler = _scheduler(sequences, blocks_of(test, amount), settings.chunk)
    shares, sink = loaded.split.partition.shares, _Sink()
    share = shares[replica.rank]
    sampler = Sampler(replica, share.vocab.start, max(other.vocab.size for other in shares))
    loaded.ranks.meet()
    before, began = kernel_seconds(loaded.model.model), time.perf_counter()
    loop = BatchLoop(loaded.model.model, cache, scheduler, sampler, replica, sink, Ends(frozenset(), 1 << 60),
                     keep_logits="none", text_stream=lambda sequence: None, replica=0, clock_start=began)
    loop.run()
    steps = np.array(sink.steps, STEP_RECORD)
    ended = time.perf_counter() - began
    if sink.failures:
        raise ModelError(f"{loaded.name} cannot be measured: {sink.failures[0]}")
    families = {name: seconds - before[name] for name, seconds in kernel_seconds(loaded.model.model).items()}
    exchange, first = steps["communication_s"], float(steps["start_s"][0] + steps["total_s"][0])
    if test.kind == "tg":
        return Run(test.batch * amount, ended - first, float(exchange[1:].sum()), float(steps["total_s"][-1]),
                   ended, families)
    return Run(amount * test.count, ended, float(exchange.sum()), float(steps["total_s"][0]), ended, families)


def kernel_seconds(model: Any) -> dict[str, float]:
    """Seconds by kernel family since the start; exchanges are counted by the ranks."""
    found = dict.fromkeys(FAMILIES, 0.0)
    for name, seconds in [*model.seconds().items(), *kernels.Spent.seconds.items()]:
        if name != "exchange":
            found[FAMILY_OF.get(name, name)] += seconds
    return found


def family_shares(run: Run) -> dict[str, Any]:
    """Shares of a run's time: of exchanges, of kernel families, of Python, which is what is in neither."""
    families = {**run.families, "exchange": run.exchange}
    return {"comm_fraction": run.exchange / run.seconds if run.seconds else 0.0,
            "python_fraction": max(0.0, 1.0 - sum(families.values()) / run.whole), "family_seconds": families}


class MachineLimits:
    """The machine's read bandwidth and peak, measured anew around each test: they drift."""

    def __init__(self, loaded: Loaded, nbytes: int | None) -> None:
        self.ranks, self.reader = loaded.ranks, Reader(loaded.ranks, nbytes)
        tier = kernels.tier()
        self.key = probe.peak_of_format(loaded.weights, tier, probe.common_peaks(self.ranks.world))

    def measure(self) -> tuple[float, float]:
        """(bytes/s, operations/s) of all ranks together."""
        threads = self.ranks.threads
        return (self.reader.memory(threads, LIMIT_SECONDS).best,
                probe.peak(self.ranks, self.key, threads, LIMIT_SECONDS / 3).best)


def measure_model(loaded: Loaded, tests: list[SpeedTest], repetitions: int, seconds: float,
                  read_nbytes: int | None = None) -> Iterator[dict[str, Any]]:
    """A row for each test that memory allows, the same on every rank. Raises ModelError.

    ``seconds`` bound each test's repetitions (`figures.budget`); ``read_nbytes``: the buffer of the bandwidth's
    measurement, None = far more than the caches hold.
    """
    limits = MachineLimits(loaded, read_nbytes)
    for test in tests:
        row = _measure_test(loaded, test, repetitions, seconds, limits)
        if row is not None:
            yield row


def _measure_test(loaded: Loaded, test: SpeedTest, repetitions: int, seconds: float,
                  limits: MachineLimits) -> dict[str, Any] | None:
    world, chunk = loaded.ranks.world, loaded.settings.chunk
    whole = test.count if test.kind == "tg" else test.batch
    # Try one step (of one sequence, where they run one behind another): it warms up, and shows what is affordable
    first = min(2, whole) if test.kind == "tg" else 1
    cache = _cache_for(loaded, test, first)
    if cache is None:
        return None
    trial = run_test(loaded, test, first, cache)
    cache.clear()
    step = max(world.allgather(trial.step))
    repetitions, amount = budget(test, step, min(chunk, test.count), seconds, repetitions)
    cache = _cache_for(loaded, test, amount)
    if cache is None:
        return None
    run_test(loaded, test, min(first, amount), cache)       # records the plan of a step on this cache
    before = limits.measure()
    runs = [run_test(loaded, test, amount, cache) for _ in range(repetitions)]
    after = limits.measure()
    cache.clear()
    return _row(loaded, test, amount, runs, [max(pair) for pair in zip(before, after, strict=True)],
                limits.key)


def _cache_for(loaded: Loaded, test: SpeedTest, amount: int) -> list[LayerCache] | None:
    """A filled cache for a run; None, with a line, when one of the ranks lacks the memory."""
    world, config = loaded.ranks.world, loaded.config
    share = loaded.split.partition.shares[loaded.replica.rank]
    needed = blocks_of(test, amount) * share_block_bytes(loaded.settings, config, share)
    free = world.free_nbytes()
    if max(world.allgather(needed - int(0.9 * free))) > 0:
        if world.rank == 0:
            LOG.warning("%s at batch %d is left out: its cache takes %s on a rank, which has %s free", test.name,
                        test.batch, format_size(needed), format_size(free))
        return None
    return filled_cache(loaded, blocks_of(test, amount))


def _row(loaded: Loaded, test: SpeedTest, amount: int, runs: list[Run],
         limits: list[float], key: tuple[str, str]) -> dict[str, Any]:
    """The figures of a test, summed over the ranks where they are theirs."""
    world = loaded.ranks.world
    steps = list(planned_steps(test, amount, loaded.settings.chunk))
    own = np.array([sum(map(loaded.costs.bytes_of, steps)), sum(map(loaded.costs.operations_of, steps))])
    moved, operations = map(float, np.sum(world.allgather(own), axis=0))
    speeds = [run.tokens / run.seconds for run in runs]
    middle = runs[int(np.argsort(speeds)[len(speeds) // 2])]
    tokens = middle.tokens
    seconds = tokens / statistics.median(speeds)
    row = {
        "test": test.name, "batch": test.batch, "depth": test.depth, "n_ranks": world.size,
        "n_threads": loaded.ranks.threads, "weights": loaded.weights, "avg_ts": statistics.fmean(speeds),
        "stddev_ts": statistics.stdev(speeds) if len(speeds) > 1 else 0.0, "median_ts": statistics.median(speeds),
        "bandwidth_fraction": moved / seconds / limits[0], "peak_fraction": operations / seconds / limits[1],
        **family_shares(middle),
        "bytes_per_token": moved / tokens, "operations_per_token": operations / tokens,
        "bandwidth": limits[0], "peak": limits[1], "peak_of": " ".join(key),
        "limit_ts": tokens / max(moved / limits[0], operations / limits[1]),
        "repetitions": len(runs), "n_measured": amount, "n_steps": len(steps), "kv_type": loaded.settings.kv_type,
        "kv_type_v": loaded.settings.kv_type_v, "model": loaded.name}
    return world.bcast(row)


def tests_of(prompt_batches: list[int], batches: list[int], depths: list[int], prompt: int,
             tokens: int) -> list[SpeedTest]:
    """All tests, prefill before decode at each depth; a count of 0 leaves its kind out."""
    kinds = (("pp", prompt, prompt_batches), ("tg", tokens, batches))
    return [SpeedTest(kind, count, batch, depth) for depth in depths for kind, count, batches in kinds if count
            for batch in batches]


__all__ = ["Loaded", "measure_model", "tests_of"]
