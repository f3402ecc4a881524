"""Which instructions kernels use: one of four tiers, chosen once per process, before any kernel is made.

=======  ==============================================================================================
tier     what it needs
=======  ==============================================================================================
generic  nothing: portable vector code of LLVM, on any processor
avx2     AVX2, FMA, F16C
avx512   avx2, and AVX-512 F, BW, VL, DQ, VNNI and BF16 (without BF16 bf16 weights would have a second arithmetic)
amx      avx512, and AMX TILE, BF16, INT8, and the kernel's permission to use tiles
=======  ==============================================================================================

``MPILLM_ISA`` forces one. ``MPILLM_ISA_EMULATE=1`` lets a forced tier that the processor lacks run with emulated
instructions: slow, for tests. All ranks of a run take the lowest tier that one of them has.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from llvmlite import binding

from mpillm.errors import LaunchError

#: from the lowest to the highest
TIERS = ("generic", "avx2", "avx512", "amx")
#: what a tier needs beyond the one before it, by LLVM's names
NEEDS = {
    "generic": (),
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512bf16"),
    "amx": ("amx-tile", "amx-bf16", "amx-int8"),
}
#: Linux, Documentation/arch/x86/xstate.rst: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18
CHOSEN = "chosen"


@dataclass(frozen=True)
class Decision:
    """The tier in use; for every tier ``CHOSEN`` or why not; whether its instructions are emulated."""

    tier: str
    reasons: dict[str, str]
    emulated: bool = False


def features(environment: Mapping[str, str] | None = None) -> frozenset[str]:
    """The features that numba compiles for, by LLVM's names: the processor's, unless numba was told others."""
    environment = os.environ if environment is None else environment
    given = environment.get("NUMBA_CPU_FEATURES")
    if given is None and environment.get("NUMBA_CPU_NAME", "").lower() == "generic":
        given = ""
    if given is not None:
        return frozenset(name[1:] for name in given.split(",") if name.startswith("+"))
    try:
        found = {name for name, there in binding.get_host_cpu_features().items() if there}
    except RuntimeError:                 # LLVM does not know this processor
        found = set()
    if environment.get("NUMBA_ENABLE_AVX", "1") == "0":
        found = {name for name in found if not name.startswith(("avx", "amx", "fma", "f16c"))}
    return frozenset(found)


@lru_cache(None)
def amx_permission() -> str | None:
    """Ask Linux once for this process's use of AMX tiles; why not, or None. Threads started later inherit it."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return "tiles need Linux on x86_64"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0:
        return None
    return f"the kernel does not permit tiles ({os.strerror(ctypes.get_errno())})"


def lacks(name: str, has: Collection[str], permission: Callable[[], str | None]) -> str | None:
    """Why tier ``name`` cannot run on a processor with the features ``has``; None when it can."""
    for step in TIERS[:TIERS.index(name) + 1]:
        missing = [feature for feature in NEEDS[step] if feature not in has]
        if missing:
            return f"the processor has no {', '.join(missing)}"
    return permission() if name == "amx" else None


def decide(has: Collection[str], permission: Callable[[], str | None], forced: str = "", emulate: bool = False,
           declined: Mapping[str, str] | None = None) -> Decision:
    """The highest tier that runs here, or ``forced``; ``declined`` are tiers that failed, with the reason.

    Raises LaunchError for an unknown forced tier, one that this machine lacks, and one that failed.
    """
    declined = declined or {}
    if forced and forced not in TIERS:
        raise LaunchError(f"MPILLM_ISA={forced}: there is no such tier, use one of {', '.join(TIERS)}")
    reasons = {name: declined.get(name) or lacks(name, has, permission) for name in TIERS}
    usable = [name for name in TIERS if reasons[name] is None]
    if not forced:
        tier = usable[-1]
        return Decision(tier, {name: reasons[name] or (CHOSEN if name == tier else f"{tier} is higher")
                               for name in TIERS})
    problem = declined.get(forced) or (None if emulate else reasons[forced])
    if problem:
        raise LaunchError(f"MPILLM_ISA={forced} cannot be used: {problem}; this machine has {', '.join(usable)}, "
                          f"leave MPILLM_ISA unset for the best of them")
    emulated = reasons[forced] is not None
    told = {name: reasons[name] or f"MPILLM_ISA asks for {forced}" for name in TIERS}
    return Decision(forced, {**told, forced: CHOSEN + (", emulated" if emulated else "")}, emulated)


class _State:
    decision: Decision | None = None
    declined: dict[str, str] = {}
    fixed = False                        # set by set_tier


def _decision() -> Decision:
    if _State.decision is None:
        forced, emulate = os.environ.get("MPILLM_ISA", ""), os.environ.get("MPILLM_ISA_EMULATE") == "1"
        _State.decision = decide(features(), amx_permission, forced, emulate, _State.declined)
    return _State.decision


def tier() -> str:
    """The tier that kernels are made for. Raises LaunchError when MPILLM_ISA cannot be had."""
    return _decision().tier


def emulated() -> bool:
    """Whether the tier's instructions are emulated (MPILLM_ISA_EMULATE)."""
    return _decision().emulated


def key() -> str:
    """The tier as a part of kernels' names, so that each has its own entry in the cache."""
    return tier() + ("_emulated" if emulated() else "")


def decisions() -> dict[str, str]:
    """For every tier, from the lowest: ``chosen``, or why it was not."""
    return dict(_decision().reasons)


def at_least(name: str) -> bool:
    """Whether the chosen tier has the instructions of ``name``."""
    return TIERS.index(tier()) >= TIERS.index(name)


def decline(name: str, reason: str) -> str:
    """Give a tier up that failed its self-test; the tier taken instead.

    Raises LaunchError when MPILLM_ISA forces the failed one.
    """
    assert name != "generic", f"the generic tier has nothing below it: {reason}"
    assert not _State.fixed, "tiers are tested before the ranks agree on one"
    _State.declined[name] = reason
    _State.decision = None
    return tier()


def lowest(names: Iterable[str]) -> str:
    """The lowest of the ranks' tiers: what they take together, so that all compute the same bits."""
    return min(names, key=TIERS.index)


def set_tier(name: str) -> None:
    """Take the tier on which the ranks agreed, at most this rank's own; before the first kernel of a model."""
    own = _decision()
    assert name in TIERS and TIERS.index(name) <= TIERS.index(own.tier), f"{name} above this rank's {own.tier}"
    _State.fixed = True
    if name == own.tier:
        return
    low, high = TIERS.index(name), TIERS.index(own.tier)
    reasons = dict(own.reasons)
    for i, other in enumerate(TIERS[:high + 1]):
        reasons[other] = CHOSEN if i == low else f"another rank has only {name}" if i > low else f"{name} is higher"
    _State.decision = Decision(name, reasons, own.emulated and lacks(name, features(), amx_permission) is not None)
