"""Which tier of instructions the kernels of this process are made of."""

from __future__ import annotations

import os
from functools import lru_cache

from llvmlite import binding

from mpillm.errors import LaunchError

#: from the plainest on
TIERS = ("generic", "avx2")


@lru_cache(None)
def tier() -> str:
    """The best tier of this processor, or the one that MPILLM_ISA names.

    Raises LaunchError for a name that is unknown, or a tier that this processor does not have.
    """
    found = ["generic"]
    if binding.get_host_cpu_features().get("avx2", False):
        found.append("avx2")
    forced = os.environ.get("MPILLM_ISA")
    if not forced:
        return found[-1]
    if forced not in TIERS:
        raise LaunchError(f"MPILLM_ISA is {forced!r}: use one of {', '.join(TIERS)}")
    if forced not in found:
        raise LaunchError(f"MPILLM_ISA is {forced}, but this processor has {', '.join(found)} only: unset it")
    return forced
