"""Which experts a row goes to and with which weights, and the slots of the experts that are held here.

Shape suffixes: T rows of a step, E experts to choose among, K experts of a row, the shared ones among them.
Choices stand by the experts' numbers; shared experts, which every row has with weight 1, are numbered E and on.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.elementwise import REAL
from mpillm.jit.gemm import F32_1, INT, VECTOR, reads
from mpillm.jit.isa.lanes import exponential_of, sum_exponentials
from mpillm.jit.tape import Operation

TINY = np.float32(1e-20)      # beside a sum of sigmoids, as in transformers


@policy.helper
def _sigmoid(x):
    power = exponential_of(-abs(x))
    return (power if x < 0 else np.float32(1)) / (np.float32(1) + power)


@policy.helper
def _keep_best_groups(keys, row, experts, groups, kept, both):
    """Put the keys of experts outside of the ``kept`` best groups at -infinity; of equal groups the lower is kept.

    A group is as good as its best expert, or as its two best together if ``both``.
    """
    size, scores = experts // groups, row + experts
    for g in range(groups):
        first = second = -np.float32(np.inf)
        for e in range(row + g * size, row + (g + 1) * size):
            if keys[e] > first:
                first, second = keys[e], first
            elif keys[e] > second:
                second = keys[e]
        keys[scores + g] = first + second if both else first
    for g in range(groups):
        better = 0
        for h in range(groups):
            if keys[scores + h] > keys[scores + g] or h < g and keys[scores + h] == keys[scores + g]:
                better += 1
        if better >= kept:
            for e in range(row + g * size, row + (g + 1) * size):
                keys[e] = -np.float32(np.inf)


@policy.helper
def _choose(keys, row, experts, count, chosen, own):
    """The ``count`` largest of a row's keys, of equal ones the lower: ``chosen``, ascending; the best is returned."""
    for e in range(experts):
        at = min(e, count)
        while at > 0 and keys[row + e] > keys[row + chosen[own + at - 1]]:
            if at < count:
                chosen[own + at] = chosen[own + at - 1]
            at -= 1
        if at < count:
            chosen[own + at] = e
    best = chosen[own]
    for i in range(1, count):
        e, at = chosen[own + i], i
        while at > 0 and chosen[own + at - 1] > e:
            chosen[own + at] = chosen[own + at - 1]
            at -= 1
        chosen[own + at] = e
    return best


@policy.helper
def _route_part(part, parts, rows, logits, experts, count, shared, sigmoid, correction, groups, groups_kept, both,
                normed, scale, keys, chosen, weights):
    """``chosen`` and ``weights`` [T, K] by ``logits`` [T, E]; ``keys`` [T, E + groups] is room for what decides.

    Scores are a softmax over all experts, or sigmoids, to which ``correction`` is added for the choice. The weights are
    the scores, divided by the sum of those that were chosen if ``normed``, times ``scale``.
    """
    for m in range(part * rows // parts, (part + 1) * rows // parts):
        row, own, key = m * experts, m * (count + shared), m * (experts + groups)
        # A softmax keeps the order of the logits
        for e in range(experts):
            keys[key + e] = _sigmoid(logits[row + e]) + correction[e] if sigmoid else logits[row + e]
        if groups > 0:
            _keep_best_groups(keys, key, experts, groups, groups_kept, both)
        largest = logits[row + _choose(keys, key, experts, count, chosen, own)]
        total = np.float32(0)
        for i in range(own, own + count):
            logit = logits[row + chosen[i]]
            weights[i] = _sigmoid(logit) if sigmoid else exponential_of(logit - largest)
            total += weights[i]
        if sigmoid:
            total = total + TINY if normed else np.float32(1)
        elif not normed:
            total = np.float32(sum_exponentials(logits, row, experts, largest))
        for i in range(own, own + count):
            weights[i] = weights[i] / total * scale
        for i in range(shared):
            chosen[own + count + i], weights[own + count + i] = experts + i, np.float32(1)


@policy.helper
def _place(expert, first, held, experts):
    """Where an expert stands among those held here, its slices behind each other: shared ones last; -1: elsewhere."""
    if expert >= experts:
        return held + expert - experts
    return expert - first if first <= expert < first + held else -1


@policy.helper
def _group_part(part, parts, rows, experts, shared, first, held, count, chosen, starts, slots, sources):
    """One thread's: ``starts`` of the experts held here, the slot of each choice (-1: elsewhere), the row of each slot.

    Held are ``held`` of ``experts`` from ``first`` on, and the ``shared`` ones.
    """
    if part > 0:
        return
    here = held + shared
    for e in range(here + 1):
        starts[e] = 0
    for i in range(rows * count):
        e = _place(chosen[i], first, held, experts)
        if e >= 0:
            starts[e + 1] += 1
    for e in range(here):
        starts[e + 1] += starts[e]
    for i in range(rows * count):
        e = _place(chosen[i], first, held, experts)
        slots[i] = -1
        if e >= 0:
            slot = starts[e]
            slots[i], sources[slot] = slot, i // count
            starts[e] = slot + 1
    # Each start has moved to its expert's end, the next one's start
    for e in range(here, 0, -1):
        starts[e] = starts[e - 1]
    starts[0] = 0


_STARTS, _INDICES = types.int64[::1], types.int32[::1]
_ROUTED = (INT, VECTOR, INT, INT, INT, INT, VECTOR, INT, INT, INT, INT, REAL, F32_1, _INDICES, F32_1)
_GROUPED = (INT, INT, INT, INT, INT, INT, reads(types.int32), _STARTS, _INDICES, _INDICES)


@lru_cache(None)
def route_operation() -> Operation:
    """Which experts a row goes to, and with which weights."""
    return Operation(_route_part, "moe_route", _ROUTED)


@lru_cache(None)
def group_operation() -> Operation:
    """Choices in order of the experts that are held here."""
    return Operation(_group_part, "moe_group", _GROUPED)
