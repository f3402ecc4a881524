"""Steps whole and in halves, in turn, on ranks of several nodes (or MPILLM_FAKE_NODES), with the model loaded once.

    mpirun -hosts a,b -n 2 python benchmarks/overlap.py --model MODEL.gguf --prompt 512 --batch 32,128

For prefill of one prompt (``pp``) and decode of each batch (``tg``): median rows/s of both ways and their ratio, the
share of the step that waited for exchanges, and of halves what these took behind computing.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import numpy as np

from mpillm import collectives, main
from mpillm.bench import model as bench
from mpillm.bench.figures import SpeedTest
from mpillm.cli import bench as command
from mpillm.engine.overlap import Overlap

WAYS = ("whole", "halves")


def measured(loaded: bench.Loaded, test: SpeedTest, rounds: int, amount: int) -> dict[str, np.ndarray]:
    """Of each way [rounds, 3]: rows/s of the slowest rank, and the shares of its time waited and behind computing."""
    model, replica = loaded.model.model, loaded.replica
    ways = {"whole": None, "halves": Overlap("on", replica, least=2)}
    cache = bench.filled_cache(loaded, bench.blocks_of(test, amount, loaded.place[1]))
    found: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    for i in range(rounds + 1):
        for way in WAYS if i % 2 else WAYS[::-1]:
            model.overlap, before = ways[way], replica.courier.worked
            run = bench.run_test(loaded, test, amount, cache)
            own = run.tokens / run.seconds, run.exchange / run.seconds, (replica.courier.worked - before) / run.whole
            if i:                  # the first round records plans
                found[way].append(min(loaded.ranks.world.allgather(own)))
    return {way: np.array(rows) for way, rows in found.items()}


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="decode steps of a round, or prompts (default 8, and 1)")
    own, others = parser.parse_known_args(argv)
    world = collectives.start()
    given = world.agree(lambda: command.parser().parse_args(["model", *others]))
    loaded = command._load(world, given)
    for test in bench.tests_of([1], given.batch, [0], given.prompt, own.steps if given.tokens else 0):
        amount = own.steps if test.kind == "tg" else 1
        figures = measured(loaded, test, own.rounds, amount)
        if world.rank == 0:
            (whole, waited, _), (halves, left, behind) = (np.median(figures[way], axis=0) for way in WAYS)
            ratios = figures["halves"][:, 0] / figures["whole"][:, 0]
            print(f"{loaded.name} {loaded.weights} {world.size} ranks  {test.name} batch {test.batch:4d}  "
                  f"whole {whole:7.0f} rows/s ({100 * waited:2.0f} % waited)  halves {halves:7.0f} rows/s "
                  f"({100 * left:2.0f} % waited, {100 * behind:2.0f} % behind)  ratio {statistics.median(ratios):.2f}",
                  flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main.main(sys.argv[1:], run))
