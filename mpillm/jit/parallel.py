"""Fork and join: one compiled loop over threads that every kernel shares.

numba compiles a ``prange`` together with all that it calls, several times over. Here the loop calls a
function by its address, so that a kernel is compiled once, for one thread or many.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from mpillm.jit.isa.vector import I64, PTR

PART = ir.FunctionType(ir.VoidType(), [PTR, I64, I64])


@intrinsic
def call_part(typingctx, address, shared, part, parts):
    """Call the C function at ``address`` with the address of its arguments, its part and the number of parts."""
    def codegen(context, b, signature, arguments):
        address, shared, part, parts = arguments
        function = b.inttoptr(address, PART.as_pointer())
        b.call(function, [b.inttoptr(shared, PTR), part, parts])
        return context.get_dummy_value()

    return types.void(types.uintp, types.uintp, types.intp, types.intp), codegen


@njit(parallel=True, nogil=True)
def _fork(address, shared, parts):
    for part in prange(parts):
        call_part(address, shared, part, parts)


def in_parts(core: Any) -> Any:
    """The operation ``run(arguments, parts)``: ``core(part, parts, *arguments)`` for every part.

    ``core`` is a compiled helper that returns and raises nothing; one part runs in the caller's thread.
    """
    @intrinsic
    def run(typingctx, arguments, parts):
        integers, addresses = (types.intp, types.intp), (types.uintp, types.uintp, types.intp)
        core_type, fork_type = (typingctx.resolve_value_type(function) for function in (core, _fork))
        core_call = core_type.get_call_type(typingctx, (*integers, *arguments.types), {})
        fork_call = fork_type.get_call_type(typingctx, addresses, {})

        def codegen(context, b, signature, values):
            packed = cgutils.alloca_once_value(b, values[0])
            compiled = core.get_compile_result(core_call)
            trampoline = _trampoline(context, b, compiled, core_call, values[0].type)
            forked = _fork.get_compile_result(fork_call)
            context.active_code_library.add_linking_library(forked.library)
            with b.if_else(b.icmp_signed(">", values[1], I64(1))) as (several, one):
                with several:
                    pointers = [b.ptrtoint(pointer, I64) for pointer in (trampoline, packed)]
                    context.call_internal_no_propagate(b, forked.fndesc, fork_call, [*pointers, values[1]])
                with one:
                    b.call(trampoline, [b.bitcast(packed, PTR), I64(0), I64(1)])
            return context.get_dummy_value()

        return types.void(arguments, types.intp), codegen

    return run


def _trampoline(context: Any, b: ir.IRBuilder, compiled: Any, call: Any, packed: Any) -> ir.Function:
    """A C function that unpacks the stored arguments and calls the compiled ``core``."""
    symbol = f"{b.function.name}.{compiled.fndesc.qualname}"
    assert symbol not in b.module.globals, "a kernel runs each of its parts once"
    context.active_code_library.add_linking_library(compiled.library)
    function = ir.Function(b.module, PART, symbol)
    function.linkage = "internal"
    inner = ir.IRBuilder(function.append_basic_block("entry"))
    shared, part, parts = function.args
    restored = inner.load(shared, typ=packed)
    fields = [inner.extract_value(restored, i) for i in range(len(packed.elements))]
    context.call_internal_no_propagate(inner, compiled.fndesc, call, [part, parts, *fields])
    inner.ret_void()
    return function
