"""Words that threads and processes share: ordered loads, stores and additions, and ways to wait."""

from __future__ import annotations

import platform
import time

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpillm.jit.isa import vector as v
from mpillm.jit.isa.vector import I32, I64

_X86 = platform.machine() in ("x86_64", "AMD64")
CLOCK_MONOTONIC = 1


@intrinsic
def load(typingctx, array, index):
    """Word ``index``; what its writer stored before it is seen as well."""
    def codegen(context, b, signature, arguments):
        address = v.at(b, v.data(context, b, signature.args[0], arguments[0]), arguments[1], I64)
        return b.load_atomic(address, ordering="acquire", align=8, typ=I64)

    return types.int64(array, types.intp), codegen


@intrinsic
def store(typingctx, array, index, value):
    """Store word ``index`` after everything that was stored before."""
    def codegen(context, b, signature, arguments):
        address = v.at(b, v.data(context, b, signature.args[0], arguments[0]), arguments[1], I64)
        b.store_atomic(arguments[2], b.bitcast(address, I64.as_pointer()), ordering="release", align=8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), codegen


@intrinsic
def fetch_add(typingctx, array, index, value):
    """Add to word ``index``; what it was before."""
    def codegen(context, b, signature, arguments):
        address = v.at(b, v.data(context, b, signature.args[0], arguments[0]), arguments[1], I64)
        return b.atomic_rmw("add", b.bitcast(address, I64.as_pointer()), arguments[2], "acq_rel")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic
def pause(typingctx):
    """A moment within a polling loop."""
    def codegen(context, b, signature, arguments):
        if _X86:
            v.call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_core(typingctx):
    """Offer this core to others."""
    def codegen(context, b, signature, arguments):
        v.call(b, "sched_yield", I32, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def nap(typingctx, microseconds):
    """Sleep."""
    def codegen(context, b, signature, arguments):
        v.call(b, "usleep", I32, [b.trunc(arguments[0], I32)])
        return context.get_dummy_value()

    return types.void(types.intp), codegen


@intrinsic
def now(typingctx):
    """Monotonic nanoseconds."""
    def codegen(context, b, signature, arguments):
        room = cgutils.alloca_once(b, ir.ArrayType(I64, 2))
        v.call(b, "clock_gettime", I32, [I32(CLOCK_MONOTONIC), b.bitcast(room, v.PTR)])
        whole, rest = (b.load(v.at(b, room, I64(i), I64), typ=I64) for i in (0, 1))
        return b.add(b.mul(whole, I64(1_000_000_000)), rest)

    return types.int64(), codegen


def clock() -> int:
    """The same outside of kernels."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
