"""What threads and processes meet by: atomic words, pauses, the clock. For every processor that LLVM knows.

The functions of libc are called from the compiled code by their names, so that kernels out of the cache on disk
find them too. Inline assembly is not used: llvmlite ends the process at it.
"""

from __future__ import annotations

import platform
import time

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpillm.jit.isa import vector as v
from mpillm.jit.isa.vector import I32, I64, PTR

_WORD = 8
_VOID = ir.VoidType()
#: how a processor is told that a loop only waits: (LLVM's intrinsic, its arguments)
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", ()), "AMD64": ("llvm.x86.sse2.pause", ()),
           "aarch64": ("llvm.aarch64.hint", (1,)), "arm64": ("llvm.aarch64.hint", (1,))}
_MONOTONIC = getattr(time, "CLOCK_MONOTONIC", 1)


def _word(context, b, kind, array, index):
    return v.at(b, v.data(context, b, kind, array), index, I64)


@intrinsic
def load_acquire(typingctx, words, index):
    """words[index] of an int64 array; what its writer wrote before is seen by what follows."""
    def codegen(context, b, signature, arguments):
        return b.load_atomic(_word(context, b, signature.args[0], *arguments), "acquire", _WORD, typ=I64)

    return types.int64(words, types.intp), codegen


@intrinsic
def store_release(typingctx, words, index, value):
    """words[index] = value in an int64 array; who sees it sees all that was written before."""
    def codegen(context, b, signature, arguments):
        b.store_atomic(arguments[2], _word(context, b, signature.args[0], *arguments[:2]), "release", _WORD)
        return context.get_dummy_value()

    return types.void(words, types.intp, types.int64), codegen


@intrinsic
def fetch_add(typingctx, words, index, value):
    """words[index] += value in an int64 array, in one piece; what stood there before."""
    def codegen(context, b, signature, arguments):
        address = _word(context, b, signature.args[0], *arguments[:2])
        return b.atomic_rmw("add", address, arguments[2], "acq_rel")

    return types.int64(words, types.intp, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tell the core that this loop only waits; nothing on processors without such a word."""
    def codegen(context, b, signature, arguments):
        if platform.machine() in _PAUSES:
            name, values = _PAUSES[platform.machine()]
            v.call(b, name, _VOID, [I32(value) for value in values])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_core(typingctx):
    """Let another runnable thread have this core (sched_yield)."""
    def codegen(context, b, signature, arguments):
        v.call(b, "sched_yield", I32, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def nap(typingctx, microseconds):
    """Sleep for below a second (usleep)."""
    def codegen(context, b, signature, arguments):
        v.call(b, "usleep", I32, [b.trunc(arguments[0], I32)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def clock_ns(typingctx):
    """Nanoseconds of the monotonic clock: int64, comparable within one machine."""
    def codegen(context, b, signature, arguments):
        moment = cgutils.alloca_once(b, I64, size=2)
        v.call(b, "clock_gettime", I32, [I32(_MONOTONIC), b.bitcast(moment, PTR)])
        seconds = b.load(v.at(b, moment, I64(0), I64), typ=I64)
        return b.add(b.mul(seconds, I64(1_000_000_000)), b.load(v.at(b, moment, I64(1), I64), typ=I64))

    return types.int64(), codegen
