"""``mpillm doctor``: what a run would find on this machine, and what stands in its way."""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from mpillm import __version__
from mpillm.cli.report import printable
from mpillm.config import format_size
from mpillm.errors import LaunchError, MpillmError
from mpillm.machine import affinity, launch, memory, numa, topology

EXAMPLES = """\
examples:
  mpillm doctor                       this machine; starts no MPI job
  srun -N 1 -n 1 mpillm doctor        a compute node, which may differ from the login node
  MPILLM_ISA=avx2 mpillm doctor       whether these instructions can be had
"""
NEEDED = ("numpy", "numba", "llvmlite", "mpi4py", "h5py", "safetensors", "gguf", "tokenizers", "jinja2", "rich")
#: of the processor's features, those that decide something
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512bf16",
            "amx-tile", "amx-bf16", "amx-int8", "neon", "dotprod", "bf16", "i8mm", "sve")
HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/enabled"
#: asks for the MPI library in a process of its own: a broken one may end it
ASK_MPI = ("import mpi4py\nmpi4py.rc.initialize = mpi4py.rc.finalize = False\nfrom mpi4py import MPI\n"
           "print(MPI.Get_library_version())")
MPI_SECONDS = 60

Line = tuple[str, str, MpillmError | None]     # name, what was found, what forbids a run


def parser() -> argparse.ArgumentParser:
    """The parser of ``mpillm doctor``."""
    return argparse.ArgumentParser(
        prog="mpillm doctor", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Print what a run would find here: packages, processor, cores, memory, MPI, kernels. "
                    "The exit code is 0 if a run would work.")


def doctor(argv: list[str]) -> int:
    """Print what is found as it is found; 0. Raises the first error that a run would end with."""
    parser().parse_args(argv)
    if not launch.is_first(os.environ):
        return 0
    problems: list[MpillmError] = []
    for name, found, problem in findings():
        mark = "" if problem is None else "  <- a run ends here"
        print(f"{name:<14} {printable(found)}{mark}", flush=True)
        if problem is not None:
            problems.append(problem)
    if problems:
        raise problems[0]
    print("A run would work here.")
    return 0


def findings() -> Iterator[Line]:
    """All lines, those that take long last."""
    yield "mpillm", __version__, None
    yield "python", f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})", None
    yield packages(NEEDED)
    yield from machine_lines()
    yield shared_memory(os.environ)
    yield mpi_library(os.environ)
    yield from kernel_lines()


def packages(names: tuple[str, ...]) -> Line:
    """Versions of what a run imports; a missing one ends it."""
    found, missing = [], []
    for name in names:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    problem = LaunchError(f"missing: {', '.join(missing)}: pip install {' '.join(missing)}") if missing else None
    return "packages", ", ".join(found) + "".join(f", no {name}" for name in missing), problem


def machine_lines(root: str = "/") -> Iterator[Line]:
    """Processor, cores, memory, huge pages."""
    yield "processor", f"{launch.processor_name()} ({platform.machine()})", None
    try:
        mask = affinity.own_mask()
    except (AttributeError, OSError):
        mask = frozenset(range(os.cpu_count() or 1))
    cores = topology.read_topology(os.path.join(root, "sys"), fallback=mask)
    yield "cores", describe_cores(cores, mask, topology.cpu_quota(root)), None
    try:
        yield "memory", f"{format_size(memory.available_nbytes(root))} available", None
    except OSError as error:
        yield "memory", f"unknown ({error})", None
    yield "NUMA memory", numa_memory(cores, root), None
    yield "huge pages", huge_pages(root), None


def describe_cores(cores: topology.Topology, mask: frozenset[int], quota: float | None) -> str:
    """In words: the cores and CPUs of this process, NUMA domains, the quota of its control groups."""
    own = cores.within(mask)
    domains = sorted({core.domain for core in own})
    text = (f"{len(own)} of {len(cores.cores)} (CPUs {topology.format_cpu_list(mask)}), "
            f"NUMA domain{'s' if len(domains) > 1 else ''} {topology.format_cpu_list(domains)}")
    return text + (", no CPU quota" if quota is None else f", a CPU quota of {quota:g} cores")


def numa_memory(node: topology.Topology, root: str = "/") -> str:
    """The memory of each NUMA domain, and whether a rank's memory can be bound to it."""
    if not node.with_memory():
        return "one domain: nothing to bind"
    parts = []
    for domain in node.domains:
        free = f"{format_size(memory.domain_nbytes(domain.number, root))} of {format_size(domain.nbytes)} free"
        near = "" if domain.number in node.cpu_domains() else ", no cores"
        parts.append(f"domain {domain.number}: {free}{near}" if domain.nbytes else
                     f"domain {domain.number}: none, nearest is {topology.format_cpu_list(domain.nearest)}")
    return "; ".join(parts) + "; " + bindable(node.with_memory())


def bindable(domains: tuple[int, ...]) -> str:
    """Whether pages bound to each domain lie there; tried in a thread of its own, which has its own policy."""
    said: list[str] = []

    def attempt() -> None:
        try:
            for domain in domains:
                numa.bind((domain,))
                found = numa.touched_domains()
                if found != (domain,):
                    said.append(f"memory bound to domain {domain} lies in {topology.format_cpu_list(found)}")
        except OSError as error:
            said.append(f"memory cannot be bound ({error.strerror}): it lies where it is touched first")

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return said[0] if said else "memory can be bound"


def huge_pages(root: str = "/") -> str:
    """Whether large weights get huge pages; the word in brackets of Linux' setting."""
    text = topology.read_text(os.path.join(root, HUGE_PAGES)) or ""
    chosen = re.search(r"\[(\w+)\]", text)
    if chosen is None:
        return "this kernel has none: reading weights is some per cent slower"
    if chosen[1] == "never":
        return "never: reading weights is some per cent slower (ask for madvise)"
    return chosen[1]


def shared_memory(environment: Mapping[str, str], folder: str = "/dev/shm") -> Line:
    """Room for what MPI and the ranks of a node share."""
    if not os.path.isdir(folder):
        return "shared memory", f"there is no {folder}: ranks exchange through MPI alone", None
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    # As many ranks as CPUs, unless a launcher has said how many.
    ranks = launch.local_ranks(environment) or len(os.sched_getaffinity(0))
    try:
        launch.check_shared_memory({**environment, "PMI_SIZE": str(ranks)}, folder)
    except LaunchError as error:
        return "shared memory", f"{folder}: {format_size(free)} free for {ranks} ranks", error
    return "shared memory", f"{folder}: {format_size(free)} free", None


def mpi_library(environment: Mapping[str, str]) -> Line:
    """The library below mpi4py, asked in a process of its own that does not join a job."""
    alone = {name: value for name, value in environment.items()
             if not name.startswith(("PMI_", "PMIX_", "OMPI_", "MPI_", "HYDI_", "HYDRA_"))}
    try:
        done = subprocess.run([sys.executable, "-c", ASK_MPI], capture_output=True, text=True, timeout=MPI_SECONDS,
                              env=alone, errors="replace")
        text, said = done.stdout.strip("\0 \n"), done.stderr.strip().splitlines()
        reason = None if done.returncode == 0 and text else said[-1] if said else f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        text, reason = "", f"no answer within {MPI_SECONDS} s"
    if reason is None:
        return "MPI", " ".join(text.splitlines()[0].strip("\0").split()), None
    error = launch.missing(environment, Exception(reason))
    return "MPI", f"cannot be loaded ({reason})", error


def kernel_lines() -> Iterator[Line]:
    """The kernels: compiler, cache, instructions, and whether one that is made now computes rightly."""
    yield "C compiler", "none needed: numba makes the kernels with the LLVM that it contains", None
    try:
        from mpillm.jit import policy, selftest
        from mpillm.jit.isa import select
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        yield "kernels", reason, LaunchError(f"numba cannot be loaded ({reason}): pip install -U numba")
        return
    yield "kernel cache", cache_state(policy.CACHE_DIR), None
    has = select.features()
    yield "features", ", ".join(name for name in FEATURES if name in has) or "none that matter", None
    try:
        tier = selftest.tested_tier()
    except MpillmError as error:
        yield "instructions", "MPILLM_ISA cannot be had", error
        return
    yield "instructions", tier + (", emulated (MPILLM_ISA_EMULATE)" if select.emulated() else ""), None
    for name, reason in select.decisions().items():
        if name != tier:
            yield f"  not {name}", reason, None
    problem = selftest.compiling()
    yield "test kernel", problem or "compiled, and right", LaunchError(
        f"kernels cannot be made here: {problem}; reinstall numba and llvmlite") if problem else None


def cache_state(folder: str | None) -> str:
    """Where compiled kernels are, how many files and bytes."""
    if folder is None:
        return "none: kernels are compiled in memory at every start (set NUMBA_CACHE_DIR to a folder of your own)"
    sizes = []
    for path in Path(folder).rglob("*.nbc"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:              # another run tidied up
            continue
    state = f"{len(sizes)} kernel(s), {format_size(sum(sizes))}" if sizes else \
        "empty: the first run compiles for a minute or so"
    return f"{folder} ({state})"
