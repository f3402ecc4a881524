"""How fast weights are read and packed, beside the page cache: `python benchmarks/loading.py --model FILE [FILE ...]`.

Each round does three things, of which each file's bytes a second are printed, medians of the rounds: read the files
into buffers that stay in cache ("page cache"); read them into memory that comes anew from the system, as any program
must that keeps them ("into memory"); and load the model as a run of one rank does, which reads and packs ("load"). With
--threads of each. --cold drops the page cache before each (as root): then the disk is what is measured. A round before
them is not counted: it compiles. Where the machine is a virtual one, memory that its host has taken back
comes slowly; the medians say so of "into memory" and "load" alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from mpillm import kernels, main
from mpillm.config import RunConfig
from mpillm.engine import setup
from mpillm.engine.layout import LayoutChoice
from mpillm.jit import policy
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import Layout
from mpillm.quant.layout import allocate

STEP = 4 << 20


class Alone:
    """One rank sums nothing."""

    tp = 1

    def all_reduce(self, array) -> None: ...

    def exchange_arguments(self) -> None: ...

    def check(self) -> None: ...


def files_of(path: str) -> list[Path]:
    place = Path(path)
    return sorted(place.glob("*.safetensors")) or sorted(place.glob("*.gguf")) if place.is_dir() else [place]


def read_all(paths: list[Path], threads: int, keep: bool) -> None:
    """Every byte once, in stretches that the threads share out; into new memory if ``keep``."""
    rooms = {path: memoryview(allocate(path.stat().st_size, np.uint8)) for path in paths} if keep else {}

    def part(number: int) -> None:
        buffer = bytearray(STEP)
        for path in paths:
            fd, size = os.open(path, os.O_RDONLY), path.stat().st_size
            try:
                for at in range(number * STEP, size, threads * STEP):
                    os.preadv(fd, [rooms[path][at:at + STEP] if keep else buffer], at)
            finally:
                os.close(fd)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(part, range(threads)))


def timed(function, *arguments) -> float:
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


def drop_page_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def measure(path: str, given: argparse.Namespace) -> list[tuple[float, ...]]:
    """Seconds of the three, of every round."""
    run, paths = RunConfig("", model=path, weights=given.weights), files_of(path)
    model, checkpoint = open_model(path, False)
    with checkpoint:
        weights = Weights(checkpoint, model)
        run, model = setup.decided(run, model)
        split = setup.choose_split(run, model, weights, 1, 1 << 50, LayoutChoice(Layout(1, 1, 0), "one rank"))
        works = ((read_all, paths, given.threads, False), (read_all, paths, given.threads, True),
                 (setup.load_model, run, model, weights, split, 0, Alone(), None))
        found = []
        for _ in range(given.rounds + 1):
            row = []
            for work in works:
                if given.cold:
                    drop_page_cache()
                row.append(timed(*work))
            found.append(tuple(row))
    return found[1:]


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", required=True, help="GGUF files or Hugging Face folders")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each (needs root)")
    given = parser.parse_args(argv)
    policy.set_threads(given.threads)
    kernels.set_tier(kernels.tested_tier())
    print(f"{'model':30s} {'GB':>6s} {'page cache':>11s} {'into memory':>11s} {'load':>11s}  load of cache, memory")
    for path in given.model:
        size = sum(file.stat().st_size for file in files_of(path)) / 1e9
        cache, memory, load = (size / statistics.median(column) for column in zip(*measure(path, given), strict=True))
        name = f"{Path(path).parent.name}/{Path(path).name}"
        print(f"{name:30s} {size:6.2f} {cache:6.2f} GB/s {memory:6.2f} GB/s {load:6.2f} GB/s  {load / cache:.2f}, "
              f"{load / memory:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main.main(sys.argv[1:], run))
