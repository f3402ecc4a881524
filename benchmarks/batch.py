"""A batch of prompts with mixed lengths: generated tokens/s of this program and of others, interleaved, in one run.

    python benchmarks/make_model.py --out DIR --from MODEL
    python benchmarks/batch.py --folder DIR --llama-python llama-env/bin/python \\
        --transformers-python torch-env/bin/python [--vllm-python ...] --out batch.md --json batch.json

Every program gets the lines of workload.py (the same token ids, greedy, the same number of tokens to generate) and all
cores; each round runs every program once, in a process of its own, on the weights that it can read. tokens/s: generated
tokens over the time from the first prefill to the last token, without loading, compiling and a first call; for this
program from the steps in its HDF5 output, text and files included. "whole": the seconds of the whole process.

Others: llama.cpp with 32 sequences that others join, the common beginning computed once ("batch"), and by one
`Llama.generate` after another ("alone"); transformers' `generate` in padded batches of 32 lines of about equal
length; vLLM's `LLM.generate`. `--batching static` is this program with the batch fixed.

"of limit": share of what the machine allows, were nothing lost: the prompts' tokens at the limit of a prefill of 512,
the generated ones at that of a decode step of 32 rows (`mpillm bench model`: read bandwidth or arithmetic peak, the
slower), common beginnings once. float32 is held against the limit of bf16.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peers
import workload
from peers import HERE, MPIRUN, Case

BATCH = 32
STATIC = "mpillm --batching static"


@dataclass
class Found:
    """What the rounds gave, by case; limits in tokens/s by weights and test; versions, failures."""

    speeds: dict[Case, list[float]] = field(default_factory=lambda: defaultdict(list))
    whole: dict[Case, list[float]] = field(default_factory=lambda: defaultdict(list))
    lines: dict[Case, int] = field(default_factory=dict)
    limits: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    measured: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    versions: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def cases_of(given: argparse.Namespace, path: str) -> list[Case]:
    """Every program on every type, in the order of a round; ``path``: the lines."""
    cases, cores, folder = [], given.threads, str(given.folder / "hf")
    tests = ("--threads", str(cores), "--workload", path, "--seconds", str(given.seconds))
    for weights in given.types.split(","):
        model = str(given.folder / f"{weights}.gguf")
        own = []
        for name, ranks, more in (("mpillm", cores, ("--tp", str(cores))), ("mpillm", 1, ("--tp", "1")),
                                  (f"mpillm, {cores} replicas", cores, ("--tp", "1")),
                                  (STATIC, cores, ("--tp", str(cores), "--batching", "static"))):
            own.append(Case(name, weights, cores, ranks, (
                MPIRUN, "-n", str(ranks), sys.executable, "-m", "mpillm.main", "--model", model, "--prompts", path,
                "--max-batch", str(BATCH), "--threads-per-rank", str(cores // ranks), "--log-level", "warning", *more)))
        cases += own[:1]
        if given.llama_python:
            llama = (given.llama_python, str(HERE / "peer_llama_cpp.py"), "--model", model, *tests)
            cases += [Case("llama.cpp, batch", weights, cores, 1, llama),
                      Case("llama.cpp, alone", weights, cores, 1, (*llama, "--alone"))]
        for program, python, script in (("vLLM", given.vllm_python, "peer_vllm.py"),
                                        ("transformers", given.transformers_python, "peer_transformers.py")):
            if weights == "bf16" and python:
                cases += [Case(program, named, cores, 1, (python, str(HERE / script), "--model", folder,
                                                          "--dtype", dtype, *tests)) for dtype, named in dtypes()]
        cases += own[1:]
    return cases


def dtypes() -> list[tuple[str, str]]:
    """What torch computes in: float32, and bfloat16 where the processor multiplies it (else some ten times slower)."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        able = re.search(r"\b(avx512_bf16|amx_bf16)\b", file.read())
    return [("float32", "f32"), *([("bfloat16", "bf16")] if able else [])]


def seconds_of_steps(output: str) -> float:
    """Seconds from this program's first step, on any rank, to the end of its last."""
    import h5py

    with h5py.File(output) as file:
        steps = file["steps"][:]
    ends = steps["start_s"] + steps["compute_s"] + steps["communication_s"] + steps["wait_s"]
    return float(ends.max() - steps["start_s"].min())


def run(case: Case, found: Found) -> None:
    """Run a case once; its figures into ``found``."""
    with tempfile.TemporaryDirectory() as folder:
        output, began = os.path.join(folder, "out.h5"), time.perf_counter()
        printed = peers.execute(case, found.failures, ("--output", output) if case.ours else ())
        whole = time.perf_counter() - began
        if printed is None:
            return
        if case.ours:
            told: dict[str, Any] = {"seconds": seconds_of_steps(output)}
            with open(os.path.join(folder, "out.results.jsonl"), encoding="utf-8") as file:
                usage = [json.loads(line)["response"]["body"]["usage"] for line in file]
            told |= {"tokens": sum(one["completion_tokens"] for one in usage), "lines": len(usage)}
        else:
            told = json.loads(printed.splitlines()[-1])
            found.versions[case.program.partition(",")[0]] = f"{told['version']} ({told['info']})"
    found.speeds[case].append(told["tokens"] / told["seconds"])
    found.whole[case].append(whole)
    found.lines[case] = min(told["lines"], found.lines.get(case, told["lines"]))


def limits(given: argparse.Namespace, weights: str, found: Found) -> None:
    """What the machine allows on these weights, all cores at work."""
    command = (MPIRUN, "-n", str(given.threads), sys.executable, "-m", "mpillm.main", "bench", "model", "--model",
               str(given.folder / f"{weights}.gguf"), "--depth", "0", "--prompt-batch", "1", "--batch", str(BATCH),
               "--tokens", "16", "--repetitions", "1", "--threads-per-rank", "1", "--log-level", "warning")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.json")
        case = Case("mpillm bench", weights, given.threads, given.threads, command)
        if peers.execute(case, found.failures, ("--json", path)) is None:
            return
        for row in json.loads(Path(path).read_text()):
            found.limits[weights, row["test"][:2]].append(row["limit_ts"])
            found.measured[weights].append(f"{row['bandwidth'] / 1e9:.1f} GB/s, {row['peak'] / 1e9:.0f} G operations/s "
                                           f"in {row['peak_of']}")


def limit_of(weights: str, lines: list[workload.Line], found: Found) -> float | None:
    """Generated tokens/s if prompts and tokens ran at the machine's limits."""
    same = "bf16" if weights == "f32" else weights
    prefill, decode = (found.limits.get((same, test)) for test in ("pp", "tg"))
    if not prefill or not decode:
        return None
    generated = sum(line.max_tokens for line in lines)
    seconds = (workload.prompt_tokens(lines)[1] / statistics.median(prefill)
               + generated / statistics.median(decode))
    return generated / seconds


def table(cases: list[Case], lines: list[workload.Line], found: Found) -> list[str]:
    """Markdown lines; "ours / theirs" is this program's best, in the same weights, over that program.

    float32 is compared with this program's bf16.
    """
    middle = {case: statistics.median(values) for case, values in found.speeds.items()}
    rows = ["| weights | program | ranks x threads | tokens/s | of limit | ours / theirs | whole, s |",
            "|---|---|---|---|---|---|---|"]
    for case in cases:
        if case not in middle:
            continue
        limit, ours = limit_of(case.weights, lines, found), best_of(case.weights, middle)
        compared = f"{ours / middle[case]:.2f}" if ours and (not case.ours or case.program == STATIC) else ""
        share = f"{100 * middle[case] / limit:.0f} %" if limit else "-"
        done = "" if found.lines[case] == len(lines) else f" (cut after {found.lines[case]} lines)"
        rows.append(f"| {case.weights} | {case.program}{done} | {case.ranks} x {case.cores // case.ranks} | "
                    f"{middle[case]:.1f} | {share} | {compared} | {statistics.median(found.whole[case]):.0f} |")
    return rows


def best_of(weights: str, middle: dict[Case, float]) -> float | None:
    """This program's best tokens/s on these weights, with the batch as it is by default."""
    same = "bf16" if weights == "f32" else weights
    return max((speed for case, speed in middle.items()
                if case.ours and case.program != STATIC and case.weights == same), default=None)


def caption(given: argparse.Namespace, lines: list[workload.Line], found: Found) -> list[str]:
    from mpillm.machine.launch import processor_name

    whole, once = workload.prompt_tokens(lines)
    text = [f"{given.folder.name}: {len(lines)} prompts of {min(len(line.prompt) for line in lines)} to "
            f"{max(len(line.prompt) for line in lines)} tokens ({whole} together, {once} with the common beginning of "
            f"{sum(line.shared > 0 for line in lines)} prompts counted once), "
            f"{min(line.max_tokens for line in lines)} to {max(line.max_tokens for line in lines)} generated "
            f"({sum(line.max_tokens for line in lines)}). Medians of {given.rounds} interleaved round(s). "
            f"{processor_name()}, {os.cpu_count()} CPUs."]
    text += [f"Limits of {weights}: {'; '.join(dict.fromkeys(said))}." for weights, said in found.measured.items()]
    text += [f"{program}: {version}." for program, version in sorted(found.versions.items())]
    text += [f"Not measured: {name}: {why}." for name, why in found.failures.items()]
    return ["", *text]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers.add_programs(parser)
    parser.add_argument("--threads", type=int, default=2, help="cores: threads of one rank, and as many ranks of one")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the lines")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600.0, help="after which the others take no more lines")
    parser.add_argument("--out", type=Path, help="Markdown; else on stdout")
    parser.add_argument("--json", type=Path, help="all rounds' figures")
    given = parser.parse_args()
    vocab = json.loads((given.folder / "hf" / "config.json").read_text())["vocab_size"]
    lines, found = workload.mixed(given.prompts, vocab, given.seed), Found()
    peers.not_given(given, found.failures)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "lines.jsonl")
        workload.write(path, lines)
        cases = cases_of(given, path)
        for number in range(given.rounds):
            for weights in given.types.split(","):
                limits(given, weights, found)
            for case in cases:
                print(f"round {number + 1}: {case.program}, {case.weights}, {case.ranks} rank(s)", end="",
                      file=sys.stderr, flush=True)
                run(case, found)
                said = f"{found.speeds[case][-1]:.1f} tokens/s" if case in found.speeds else "not measured"
                print(f": {said}", file=sys.stderr, flush=True)
                finish(given, cases, lines, found)
    if not given.out:
        print(text_of(given, cases, lines, found), end="")


def text_of(given: argparse.Namespace, cases: list[Case], lines: list[workload.Line], found: Found) -> str:
    return "\n".join(table(cases, lines, found) + caption(given, lines, found)) + "\n"


def finish(given: argparse.Namespace, cases: list[Case], lines: list[workload.Line], found: Found) -> None:
    """Write what there is so far: a run that is stopped leaves what it measured."""
    if given.out:
        given.out.write_text(text_of(given, cases, lines, found))
    if given.json:
        rows = [{"program": case.program, "weights": case.weights, "cores": case.cores, "ranks": case.ranks,
                 "lines": found.lines[case], "ts": speeds, "whole_s": found.whole[case],
                 "limit_ts": limit_of(case.weights, lines, found)} for case, speeds in found.speeds.items()]
        given.json.write_text(json.dumps({"rows": rows, "versions": found.versions, "failures": found.failures},
                                         indent=1) + "\n")


if __name__ == "__main__":
    main()
