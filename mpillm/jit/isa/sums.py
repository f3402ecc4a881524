"""Copies and sums of rows of float32 in one order, 16 lanes at a time, of which the exchanges are made.

Sums run over parts in their order: ((p0 + p1) + p2) + ... Offsets and strides are in elements (copies: bytes).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpillm.jit.isa import vector as v
from mpillm.jit.isa.vector import F32, I8, I64, V16F


@intrinsic
def copy_bytes(typingctx, target, to, source, start, n):
    """n bytes from byte ``start`` of one array to byte ``to`` of another; they do not overlap."""
    def codegen(context, b, signature, arguments):
        target, to, source, start, n = arguments
        target = v.at(b, v.data(context, b, signature.args[0], target), to, I8)
        source = v.at(b, v.data(context, b, signature.args[2], source), start, I8)
        cgutils.raw_memcpy(b, target, source, n, 1)
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp, types.intp), codegen


def _total(b: ir.IRBuilder, load: Any, first: Any, stride: Any, terms: Any) -> Any:
    """The parts' sum at one place: a loop over the parts that keeps 16 lanes in a register."""
    total = cgutils.alloca_once_value(b, load(first, 0.0))
    with cgutils.for_range_slice(b, I64(1), terms, I64(1), I64) as (term, _):
        part = load(v.at(b, first, b.mul(stride, term), F32), 0.0)
        b.store(b.fadd(b.load(total, typ=V16F), part), total)
    return b.load(total, typ=V16F)


@intrinsic
def sum_parts(typingctx, out, to, parts, start, stride, terms, n):
    """out[to:to + n] = the sum of ``terms`` rows of ``parts``, the first at ``start``; out may be one of them."""
    def codegen(context, b, signature, arguments):
        out, to, parts, start, stride, terms, n = arguments
        out, parts = (v.data(context, b, signature.args[i], arguments[i]) for i in (0, 2))

        def body(i, load, store):
            store(_total(b, load, v.at(b, parts, b.add(start, i), F32), stride, terms),
                  v.at(b, out, b.add(to, i), F32))

        v.for_lanes(b, n, body)
        return context.get_dummy_value()

    integer = types.intp
    return types.void(out, integer, parts, integer, integer, integer, integer), codegen


@intrinsic
def add_parts(typingctx, x, to, bias, bias_at, parts, start, stride, terms, n):
    """x[to:to + n] += (the sum of the parts) + bias[bias_at:bias_at + n]; a bias of size 0 is none."""
    def codegen(context, b, signature, arguments):
        x, to, bias, bias_at, parts, start, stride, terms, n = arguments
        has_bias = b.icmp_signed(">", context.make_array(signature.args[2])(context, b, bias).nitems, I64(0))
        x, bias, parts = (v.data(context, b, signature.args[i], arguments[i]) for i in (0, 2, 4))

        def rows(with_bias):
            def body(i, load, store):
                total = _total(b, load, v.at(b, parts, b.add(start, i), F32), stride, terms)
                if with_bias:
                    total = b.fadd(total, load(v.at(b, bias, b.add(bias_at, i), F32), 0.0))
                address = v.at(b, x, b.add(to, i), F32)
                store(b.fadd(load(address, 0.0), total), address)

            v.for_lanes(b, n, body)

        with b.if_else(has_bias) as (some, none):
            with some:
                rows(True)
            with none:
                rows(False)
        return context.get_dummy_value()

    integer = types.intp
    return types.void(x, integer, bias, integer, parts, integer, integer, integer, integer), codegen
