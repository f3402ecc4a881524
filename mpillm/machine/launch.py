"""What a launcher's environment says about a job, before and after MPI starts; no MPI here."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, MutableMapping

from mpillm.errors import LaunchError
from mpillm.machine.topology import read_text

# mpirun's own variables first: below a scheduler, mpirun starts its daemons with srun, whose figures differ
SIZES = (("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"), ("PMI_SIZE", "mpirun or srun (PMI)"),
         ("MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun"), ("SLURM_STEP_NUM_TASKS", "srun"))
FAKE_NODES = "MPILLM_FAKE_NODES"   # for tests: exchange as if the ranks were on so many nodes, or on those listed
SHARED_BYTES = 1 << 20        # of /dev/shm that MPI maps for each rank of a node
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID",
               "PMI_RANK")
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE", "PMI_SIZE")


def _figure(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else None


def launched(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """(launcher, ranks) as the environment says; None without a launcher's variables."""
    for name, launcher in SIZES:
        size = _figure(environment, name)
        if size is not None:
            return launcher, size
    return None


def local_ranks(environment: Mapping[str, str]) -> int | None:
    """Ranks on this node (an upper bound: PMI_SIZE counts the whole job); None when nothing says so."""
    figures = (_figure(environment, name) for name in LOCAL_SIZES)
    return next((figure for figure in figures if figure is not None), None)


def _once_per_node(environment: Mapping[str, str], error: LaunchError) -> LaunchError:
    """Mark an error that every rank finds by itself: one rank of each node prints it."""
    figures = (_figure(environment, name) for name in LOCAL_RANKS)
    error.agreed, error.quiet = True, (next((f for f in figures if f is not None), 0) != 0)
    return error


def is_first(environment: Mapping[str, str]) -> bool:
    """Whether this process is rank 0 by the launcher's word, or was started without one."""
    return next((rank for name in RANKS if (rank := _figure(environment, name)) is not None), 0) == 0


def missing(environment: Mapping[str, str], reason: Exception) -> LaunchError:
    """What to say when mpi4py, or the MPI library below it, cannot be loaded."""
    first = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
    return _once_per_node(environment, LaunchError(
        f"MPI cannot be loaded ({first}): `pip install mpich mpi4py`, or mpi4py with the machine's own MPI"))


def prepare_environment(environment: MutableMapping[str, str], cpus: int) -> None:
    """Settings that MPI reads once, when it starts; what the user has set stays.

    More ranks than CPUs: waiting ranks give their cores away. An abort prints our line, not MPICH's also.
    LaunchError when the node's shared memory is too small.
    """
    environment.setdefault("MPIR_CVAR_SUPPRESS_ABORT_MESSAGE", "1")
    ranks = local_ranks(environment)
    if ranks is not None and ranks > cpus:
        environment.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
        environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        environment.setdefault("I_MPI_THREAD_YIELD", "2")
    check_shared_memory(environment)


def check_shared_memory(environment: Mapping[str, str], folder: str = "/dev/shm") -> None:
    """LaunchError when the node's shared memory is too small for its ranks: MPI would end by SIGBUS later."""
    ranks = local_ranks(environment)
    if ranks is None or ranks < 2 or not os.path.isdir(folder):
        return
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    if free < ranks * SHARED_BYTES:
        raise _once_per_node(environment, LaunchError(
            f"{folder} has {free >> 10} KiB free, {ranks} ranks need {ranks * SHARED_BYTES >> 10} KiB of it: "
            f"make it larger (mount -o remount,size=1g {folder}; for containers --shm-size=1g)"))


def check_size(environment: Mapping[str, str], size: int, library: str) -> None:
    """LaunchError when MPI sees one rank of a job that a launcher started with more.

    That is what the mpirun of one MPI does with the library of another: N jobs of one rank each.
    """
    job = launched(environment)
    if job is None or size != 1 or job[1] <= 1:
        return
    launcher, expected = job
    name = library.split("\n")[0].strip("\0 ")
    raise _once_per_node(environment, LaunchError(
        f"{launcher} started {expected} ranks, but MPI ({name}) sees 1: "
        "use the mpirun that belongs to this MPI, or srun --mpi=pmi2 or pmix"))


def exchange_node(environment: Mapping[str, str], rank: int, size: int, node: int) -> int:
    """The node of ``rank`` of ``size``, as far as exchanges are concerned: ``node``, unless FAKE_NODES says another."""
    fake = environment.get(FAKE_NODES)
    if not fake:
        return node
    try:
        listed = [int(number) for number in fake.split(",")]
    except ValueError:
        raise LaunchError(f"{FAKE_NODES}={fake}: give a number of nodes, or each rank's node as 0,1,...") from None
    return listed[rank % len(listed)] if len(listed) > 1 else rank * listed[0] // size


def processor_name() -> str:
    """The processor's model, as /proc/cpuinfo has it; the architecture's name where it has none."""
    for line in (read_text("/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
