"""Kills real mpirun jobs at random moments, resumes them, and accounts for every prompt.

    python benchmarks/reliability.py --runs 10 --kills 4 --seed 1

Each run is started with ``--resume`` and struck ``--kills`` times: a rank, its guard, mpirun or all of them killed
with SIGKILL, or signalled to stop, while it starts, runs, or writes its outputs. Ranks and replicas change from one
attempt to the next, tp does not. Then it is let end, and compared, line by line, with a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mpillm.formats.journal import Reader  # noqa: E402
from mpillm.formats.part_records import REQUEST  # noqa: E402

KINDS = ("kill a rank", "kill a guard", "kill mpirun", "kill all", "stop by mpirun", "stop by one rank", "stop twice")
STOPPED, PATIENCE = 75, 40.0
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}


class Job:
    """One mpirun, its processes told by a name that stands on their command lines."""

    def __init__(self, mpirun: str, ranks: int, output: Path, options: list[str]) -> None:
        self.output, self.log = output, output.with_suffix(".log")
        self.parts = output.with_name(output.name + ".parts")
        self.earlier = self.journals()
        command = [mpirun, "-n", str(ranks), sys.executable, "-m", "mpillm.main", "--output", str(output), *options]
        path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                            start_new_session=True,
                                            env=os.environ | ENVIRONMENT | {"PYTHONPATH": path})

    def found(self) -> dict[str, list[int]]:
        """Process numbers: guards, and workers, which are their children."""
        parents = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if str(self.output).encode() in words and b"mpillm.main" in words and b"-n" not in words[:2]:
                    parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
        workers = sorted(pid for pid, parent in parents.items() if parent in parents)
        return {"workers": workers, "guards": sorted(set(parents) - set(workers))}

    def journals(self) -> set[Path]:
        """Those of finished lines, of all attempts."""
        return set(self.parts.glob("requests-*.journal"))

    def runs(self) -> bool:
        """Whether this attempt's first journal is there."""
        return bool(self.journals() - self.earlier)

    def finished(self, *, earlier: bool = False) -> int:
        """Lines in the journals of this attempt, or of those before it."""
        paths = self.earlier if earlier else self.journals() - self.earlier
        return sum(record.kind == REQUEST for path in paths if path.exists() for record in Reader(str(path)))

    def await_lines(self, count: int) -> None:
        """Wait until this attempt has finished so many lines, or has ended."""
        while self.process.poll() is None and self.finished() < count:
            time.sleep(0.02)

    def await_fold(self) -> None:
        """Wait until the outputs are made from the journals, or it has ended."""
        while self.process.poll() is None and not self.output.with_name(self.output.name + ".tmp").exists():
            time.sleep(0.001)

    def await_begin(self) -> float:
        """Wait until it runs, or has ended; the seconds that this took."""
        began = time.monotonic()
        while self.process.poll() is None and not self.runs():
            assert time.monotonic() - began < 120, f"the job does not begin: {self.log.read_text()[-2000:]}"
            time.sleep(0.01)
        return time.monotonic() - began

    def end(self, timeout: float) -> int:
        """The exit code of mpirun; no process of the job is left. AssertionError after ``timeout`` seconds."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.destroy()
            raise AssertionError(f"the job did not end within {timeout} s: {self.log.read_text()[-2000:]}") from None
        until = time.monotonic() + PATIENCE
        while any(self.found().values()):
            if time.monotonic() > until:
                left = self.found()
                self.destroy()
                raise AssertionError(f"mpirun ended with {code}, but processes are left: {left}")
            time.sleep(0.1)
        return code

    def destroy(self) -> None:
        """Kill whatever is there."""
        for pid in [self.process.pid, *(pid for found in self.found().values() for pid in found)]:
            send(pid, signal.SIGKILL)
        self.process.wait()


def send(pid: int, number: int) -> None:
    """A signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def strike(job: Job, kind: str, chance: random.Random) -> None:
    """Do one of ``KINDS`` to a job."""
    found = job.found()
    workers, guards = found["workers"] or [job.process.pid], found["guards"] or [job.process.pid]
    if kind == "kill a rank":
        send(chance.choice(workers), signal.SIGKILL)
    elif kind == "kill a guard":
        send(chance.choice(guards), signal.SIGKILL)
    elif kind == "kill mpirun":
        send(job.process.pid, signal.SIGKILL)
    elif kind == "kill all":
        for pid in [*workers, *guards, job.process.pid]:
            send(pid, signal.SIGKILL)
    elif kind == "stop by one rank":
        send(chance.choice(workers), signal.SIGUSR1)
    else:
        send(job.process.pid, chance.choice([signal.SIGTERM, signal.SIGUSR1]))
        if kind == "stop twice":
            time.sleep(1.3)
            send(job.process.pid, signal.SIGTERM)


@dataclass
class Tally:
    """What happened to all runs."""

    runs: int = 0
    prompts: int = 0
    strikes: Counter[str] = field(default_factory=Counter)
    hit: Counter[str] = field(default_factory=Counter)       # strikes that ended an attempt before it was done
    codes: Counter[int] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    doubled: int = 0
    differing: int = 0

    def row(self) -> str:
        """The sums as a line of a table."""
        figures = (self.runs, sum(self.strikes.values()), sum(self.hit.values()), self.prompts, self.lost, self.doubled,
                   self.differing)
        return "".join(f"| {figure} " for figure in figures) + "|"


def results_of(path: Path) -> list[tuple[int, Any]]:
    """(line, what was answered) of a results file, in its order."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["line"], (line["custom_id"], (line["response"]["body"] or {}).get("choices"), line["error"]))
            for line in lines]


def account(tally: Tally, expected: list[tuple[int, Any]], output: Path, results: Path) -> None:
    """Compare a run's outputs with those of an undisturbed one."""
    found, wanted = results_of(results), dict(expected)
    times = Counter(line for line, _ in found)
    tally.lost += len(set(wanted) - set(times))
    tally.doubled += sum(count - 1 for count in times.values())
    tally.differing += sum(answer != wanted.get(line) for line, answer in found)
    with h5py.File(output) as file:
        lines = file["requests"]["line"][:].tolist()
        rows = file["sequences"]["logits_count"][:] if "logits" in file else None
    tally.lost += len(set(wanted) - set(lines))
    tally.doubled += len(lines) - len(set(lines))
    if rows is not None:
        tally.lost += int((rows == 0).sum())


def torment(tally: Tally, folder: Path, mpirun: str, shapes: list[int], options: list[str], kinds: list[str],
            expected: list[tuple[int, Any]], chance: random.Random, start: float) -> None:
    """One run: an attempt for each of ``kinds``, struck at a random moment, then one that ends; all accounted for.

    ``shapes``: numbers of ranks to choose from; ``start``: seconds that an undisturbed run takes to begin.
    """
    output, results = folder / "out.h5", folder / "out.results.jsonl"
    options = [*options, "--results", str(results), "--resume"]
    for number, kind in enumerate(kinds):
        job = Job(mpirun, chance.choice(shapes), output, options)
        when = chance.choices(("start", "run", "fold"), (2, 7, 1))[0]
        if when == "start":
            time.sleep(chance.uniform(0, start))
        elif when == "run":
            job.await_begin()
            left = len(expected) - job.finished(earlier=True)
            job.await_lines(int(chance.uniform(0, left / (len(kinds) - number))))
            time.sleep(chance.uniform(0, 0.3))
        else:
            job.await_fold()
            time.sleep(chance.uniform(0, 0.02))
        strike(job, kind, chance)
        code = job.end(120)
        tally.strikes[kind] += 1
        tally.codes[code] += 1
        tally.hit[kind] += code != 0
        tally.moments[when] += 1
        if output.exists() and not job.parts.exists():
            break                      # it came too late: nothing is left to strike
    code = Job(mpirun, chance.choice(shapes), output, options).end(300)
    assert code == 0, f"the last attempt ended with {code}: {(folder / 'out.log').read_text()[-3000:]}"
    account(tally, expected, output, results)
    left = [path.name for path in folder.iterdir() if path.suffix in (".parts", ".tmp")]
    assert not left, f"left beside the outputs: {left}"
    tally.runs += 1
    tally.prompts += len(expected)


def undisturbed(folder: Path, mpirun: str, options: list[str],
                ranks: int = 2) -> tuple[tuple[float, float], list[tuple[int, Any]]]:
    """((seconds until it runs, seconds until it ends), results) of a run that nobody disturbs."""
    results = folder / "out.results.jsonl"
    job = Job(mpirun, ranks, folder / "out.h5", [*options, "--results", str(results)])
    start, began = job.await_begin(), time.monotonic()
    code = job.end(600)
    assert code == 0, (folder / "out.log").read_text()[-3000:]
    return (start, time.monotonic() - began), results_of(results)


def write_prompts(path: Path, count: int, vocab: int, tokens: int) -> None:
    """``count`` lines of token ids, of mixed lengths; some draw two samples, one in nine is refused."""
    chance = random.Random(5)
    with open(path, "w") as file:
        for i in range(count):
            line = {"id": f"p{i}", "max_tokens": chance.randint(1, tokens), "ignore_eos": True, "n": 1 + (i % 5 == 0),
                    "prompt_token_ids": [chance.randrange(10, vocab) for _ in range(chance.randint(1, 60))]}
            file.write(json.dumps(line if i % 9 != 8 else {"id": f"p{i}", "prompt_token_ids": [vocab + 1]}) + "\n")


def main() -> int:
    p = argparse.ArgumentParser(description="Kill real mpirun jobs at random, resume them, account for every prompt.")
    p.add_argument("--model", help="default: the demo model")
    p.add_argument("--mpirun", default=str(Path(sys.executable).with_name("mpirun")))
    p.add_argument("--runs", type=int, default=5)
    p.add_argument("--kills", type=int, default=4, help="strikes in each run")
    p.add_argument("--prompts", type=int, default=60)
    p.add_argument("--vocab", type=int, default=49152)
    p.add_argument("--tokens", type=int, default=60)
    p.add_argument("--seed", type=int, default=0)
    given = p.parse_args()
    tally, chance = Tally(), random.Random(given.seed)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_prompts(folder / "in.jsonl", given.prompts, given.vocab, given.tokens)
        options = ["--prompts", str(folder / "in.jsonl"), "--tp", "2", "--max-batch", "4", "--flush-every", "0.3",
                   "--logits", "last", *(["--model", given.model] if given.model else [])]
        (folder / "whole").mkdir()
        spans, expected = undisturbed(folder / "whole", given.mpirun, options)
        for run in range(given.runs):
            own = folder / f"run{run}"
            own.mkdir()
            kinds = [chance.choice(KINDS) for _ in range(given.kills)]
            torment(tally, own, given.mpirun, [2, 4], options, kinds, expected, chance, spans[0])
            print(f"run {run}: {', '.join(kinds)}: {tally.row()}", flush=True)
    print("| runs | strikes | before the end | prompts | lost | doubled | differing |\n|---|---|---|---|---|---|---|")
    print(tally.row())
    print("strikes:", ", ".join(f"{kind} {count} ({tally.hit[kind]} before the end)"
                                for kind, count in sorted(tally.strikes.items())))
    print("moments:", ", ".join(f"{when} {count}" for when, count in sorted(tally.moments.items())))
    print("exit codes of mpirun:", ", ".join(f"{code}: {count}" for code, count in sorted(tally.codes.items())))
    return int(bool(tally.lost or tally.doubled or tally.differing))


if __name__ == "__main__":
    sys.exit(main())
