"""Exchanges between the ranks of one node, over shared memory: sums, gathers, broadcasts, columns of rows.

Three arrays say where everything is; machine/segment.py makes them:
  flags  int64, shared: one cache line for each (rank, lane), how often that rank has come to a meeting there
  slots  float32, shared: for each lane two halves of ``ranks`` slots and one slot more for results
  state  int64, this rank's own: the figures below, then one cache line for each lane

A *lane* is a thread's share of an exchange: it has its own rows, flags and slots, and meets only the same lane of
the other ranks, so that threads of one rank need no barrier within an exchange. How many lanes take part follows
from the exchange's shape and from LANES, which all ranks of the segment have alike. A thread with several lanes
takes them in ascending order, so that ranks with unlike numbers of threads do not wait for each other in a circle.

An exchange is: turn to the other half, write the own slot, meet, read the others' slots. Who writes into a half
again has met everybody once since, and they had read it by then.

Who waits spins while the cores are free, then yields, then naps. Time counts towards the deadline only while this
process runs, so that a suspended and resumed job goes on. At the deadline STATUS is set, and from then on every
exchange returns at once; Python raises the error (Segment.check).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from mpillm.jit import policy
from mpillm.jit.elementwise import norm_row
from mpillm.jit.gemm import F32_2, ROWS, reads
from mpillm.jit.isa.atomics import clock_ns, load_acquire, nap, pause, store_release, yield_core
from mpillm.jit.isa.generic import flat
from mpillm.jit.isa.sums import add_parts, copy_bytes, sum_parts
from mpillm.jit.parallel import in_parts
from mpillm.jit.tape import Operation

LINE = 8                        # int64 of a cache line: one flag each, or neighbours slow each other down
# Places in the state; SLOT counts float32, DEADLINE nanoseconds
STATUS, MISSING, LANE, DOING = 0, 1, 2, 3
RANKS, RANK, LANES, SLOT, SPINS, YIELDS, DEADLINE = 8, 9, 10, 11, 12, 13, 14
HEADER = 2 * LINE
# Places in a lane's line: meetings, exchanges, nanoseconds waited and spent in exchanges
MEETINGS, TURNS, WAITED, SPENT = 0, 1, 2, 3
#: what DOING names
DOINGS = ("", "an all-reduce", "a gather", "a broadcast", "an exchange of K and V", "a merge of attention's parts",
          "an exchange of queries")
ALL_REDUCE, _GATHER, _BROADCAST, KV, MERGE, QUERIES = range(1, 7)
ARRAYS = 3                      # that swap_columns takes together, at most
NAP, NAP_LIMIT = 20, 500        # microseconds of the first sleep and of the longest
NAP_GROWTH = 1.25               # of each next sleep: oversleeping stays below a quarter of the wait
LONGEST_STEP = 100_000_000      # ns that one look at the clock adds at most to the wait: a stopped process
DIRECT_LIMIT = 1 << 20          # bytes of all ranks' parts, over all lanes: up to here each adds all by itself
LANE_LIMIT = 1 << 12            # elements of a plain sum that one lane takes, before a second one helps


@policy.helper
def _wait(flags, flag, meeting, state, lane, other, doing):
    """Until the flag is there: True; False when the deadline passed, here or in another lane."""
    began = clock_ns()
    last, passed, sleep = began, 0, float(NAP)
    spins, polite = state[SPINS], state[SPINS] + state[YIELDS]
    polls, good = 0, False
    while True:
        good = load_acquire(flags, flag) >= meeting
        if good:
            break
        polls += 1
        if polls <= spins:
            pause()
            continue
        if load_acquire(state, STATUS) != 0:
            break
        if polls <= polite:
            yield_core()
        else:
            nap(int(sleep))
            sleep = min(NAP_GROWTH * sleep, float(NAP_LIMIT))
        now = clock_ns()
        passed += min(now - last, LONGEST_STEP)
        last = now
        if passed >= state[DEADLINE]:
            state[MISSING], state[LANE], state[DOING] = other, lane, doing
            store_release(state, STATUS, 1)
            break
    state[HEADER + LINE * lane + WAITED] += clock_ns() - began
    return good


@policy.helper
def _meet(flags, state, lane, doing):
    """Say that this rank has come so far and wait until all have; False when one did not come."""
    ranks, lanes, line = state[RANKS], state[LANES], HEADER + LINE * lane
    meeting = state[line + MEETINGS] + 1
    state[line + MEETINGS] = meeting
    store_release(flags, (state[RANK] * lanes + lane) * LINE, meeting)
    for other in range(ranks):
        flag = (other * lanes + lane) * LINE
        if load_acquire(flags, flag) < meeting and not _wait(flags, flag, meeting, state, lane, other, doing):
            return False
    return True


@policy.helper
def _turn(state, lane):
    """The first element of the half of the slots whose turn it is."""
    line = HEADER + LINE * lane
    turn = state[line + TURNS] + 1
    state[line + TURNS] = turn
    return (2 * lane + (turn & 1)) * (state[RANKS] + 1) * state[SLOT]


@policy.helper
def _swap(flags, slots, state, lane, y, at, count):
    """Bring y[at:at + count] of all ranks together: (first element, terms) of the parts still to be added.

    terms 0: a rank did not come. The parts stand SLOT elements apart. Above DIRECT_LIMIT each rank has
    added its share of the elements, and what is left is one part, the sum.
    """
    ranks, rank, slot = state[RANKS], state[RANK], state[SLOT]
    half = _turn(state, lane)
    copy_bytes(slots, 4 * (half + rank * slot), y, 4 * at, 4 * count)
    if not _meet(flags, state, lane, ALL_REDUCE):
        return half, 0
    if 4 * ranks * count * state[LANES] <= DIRECT_LIMIT:
        return half, ranks
    units = (count + 15) // 16
    low, high = 16 * (rank * units // ranks), min(16 * ((rank + 1) * units // ranks), count)
    result = half + ranks * slot
    sum_parts(slots, result + low, slots, half + low, slot, ranks, high - low)
    if not _meet(flags, state, lane, ALL_REDUCE):
        return half, 0
    return result, 1


@policy.helper
def _reduce_lane(flags, slots, state, lane, y, x, bias, weight, normed, normed_stride, row, stop_row, n, eps):
    ranks, slot = state[RANKS], state[SLOT]
    at, stop = row * n, stop_row * n
    step = stop - at if ranks == 1 else slot // n * n if n <= slot else slot
    while at < stop:
        end = min(at + step, stop)
        start, terms, parts = at, 1, y
        if ranks > 1:
            start, terms = _swap(flags, slots, state, lane, y, at, end - at)
            parts = slots
            if terms == 0:
                return
        # Row by row, so that the norm finds the row in the cache
        while at < end:
            column = at % n
            count = min(n - column, end - at)
            add_parts(x, at, bias, column, parts, start, slot, terms, count)
            at, start = at + count, start + count
            if at % n == 0:
                if weight.size > 0:
                    norm_row(x, row * n, weight, n, eps, normed, row * normed_stride)
                row += 1


@policy.helper
def reduce_rows(part, parts, flags, slots, state, y, x, bias, weight, normed, normed_stride, rows, n, eps):
    """x += (y summed over the ranks in rank order) + bias; normed = rms_norm(x) * weight. A tape's core.

    y, x f32 [rows * n] (y is left alone), normed f32 with rows ``normed_stride`` apart (not touched if weight has
    size 0), bias and weight f32 [n] or of size 0. Lanes take whole rows, at one row lane 0 alone.
    """
    used = min(state[LANES], rows)
    if n == 0 or load_acquire(state, STATUS) != 0:
        return
    for lane in range(part, used, parts):
        began = clock_ns()
        _reduce_lane(flags, slots, state, lane, y, x, bias, weight, normed, normed_stride, lane * rows // used,
                     (lane + 1) * rows // used, n, np.float32(eps))
        state[HEADER + LINE * lane + SPENT] += clock_ns() - began


@policy.helper
def all_reduce(part, parts, flags, slots, state, x, n):
    """x f32 [n] summed over the ranks in rank order, in place. A tape's core."""
    used = min(state[LANES], 1 + (n - 1) // LANE_LIMIT)
    if state[RANKS] == 1 or load_acquire(state, STATUS) != 0:
        return
    for lane in range(part, used, parts):
        began = clock_ns()
        at, stop = lane * n // used, (lane + 1) * n // used
        while at < stop:
            count = min(state[SLOT], stop - at)
            start, terms = _swap(flags, slots, state, lane, x, at, count)
            if terms == 0:
                return
            sum_parts(x, at, slots, start, state[SLOT], terms, count)
            at += count
        state[HEADER + LINE * lane + SPENT] += clock_ns() - began


@policy.helper
def gather(part, parts, flags, slots, state, data, out, n):
    """n bytes of every rank into rank 0's ``out`` [ranks * n]; others' ``out`` is left alone. A tape's core."""
    if part > 0 or load_acquire(state, STATUS) != 0:
        return
    began, slot = clock_ns(), state[SLOT]
    for at in range(0, n, 4 * slot):
        count = min(4 * slot, n - at)
        half = _turn(state, 0)
        copy_bytes(slots, 4 * (half + state[RANK] * slot), data, at, count)
        if not _meet(flags, state, 0, _GATHER):
            return
        if state[RANK] == 0:
            for other in range(state[RANKS]):
                copy_bytes(out, other * n + at, slots, 4 * (half + other * slot), count)
    state[HEADER + SPENT] += clock_ns() - began


@policy.helper
def broadcast(part, parts, flags, slots, state, data, n):
    """n bytes of rank 0 into every rank's ``data``. A tape's core."""
    if part > 0 or state[RANKS] == 1 or load_acquire(state, STATUS) != 0:
        return
    began, slot = clock_ns(), state[SLOT]
    for at in range(0, n, 4 * slot):
        count = min(4 * slot, n - at)
        half = _turn(state, 0)
        if state[RANK] == 0:
            copy_bytes(slots, 4 * half, data, at, count)
        if not _meet(flags, state, 0, _BROADCAST):
            return
        if state[RANK] != 0:
            copy_bytes(data, at, slots, 4 * half, count)
    state[HEADER + SPENT] += clock_ns() - began


@policy.helper
def _put(slots, to, x, stride, row, low, width):
    """Columns low ... low + width - 1 of a row into a slot."""
    copy_bytes(slots, 4 * to, x, 4 * (row * stride + low), 4 * width)


@policy.helper
def _swap_lane(flags, slots, state, lane, plan, x, x_stride, y, y_stride, z, z_stride, x_out, x_out_stride, y_out,
               y_out_stride, z_out, z_out_stride, at, row, stop):
    """One pass, whose figures begin at plan[at], for rows row ... stop - 1; False when a rank did not come."""
    ranks, slot, step, doing = state[RANKS], state[SLOT], plan[at], plan[1]
    own, others = at + 1, at + 1 + 2 * ARRAYS
    rank = state[RANK]
    width = plan[others + rank * (1 + 3 * ARRAYS)]
    while row < stop:
        count = min(step, stop - row)
        half = _turn(state, lane)
        for m in range(count):
            to = half + rank * slot + m * width
            _put(slots, to, x, x_stride, row + m, plan[own], plan[own + 1])
            _put(slots, to + plan[own + 1], y, y_stride, row + m, plan[own + 2], plan[own + 3])
            _put(slots, to + plan[own + 1] + plan[own + 3], z, z_stride, row + m, plan[own + 4], plan[own + 5])
        if not _meet(flags, state, lane, doing):
            return False
        for other in range(ranks):
            its = others + other * (1 + 3 * ARRAYS)
            for m in range(count):
                start = half + other * slot + m * plan[its]
                if plan[its + 3] > 0:
                    copy_bytes(x_out, 4 * ((row + m) * x_out_stride + plan[its + 2]), slots,
                               4 * (start + plan[its + 1]), 4 * plan[its + 3])
                if plan[its + 6] > 0:
                    copy_bytes(y_out, 4 * ((row + m) * y_out_stride + plan[its + 5]), slots,
                               4 * (start + plan[its + 4]), 4 * plan[its + 6])
                if plan[its + 9] > 0:
                    copy_bytes(z_out, 4 * ((row + m) * z_out_stride + plan[its + 8]), slots,
                               4 * (start + plan[its + 7]), 4 * plan[its + 9])
        row += count
    return True


@policy.helper
def swap_columns(part, parts, flags, slots, state, plan, x, x_stride, y, y_stride, z, z_stride, x_out, x_out_stride,
                 y_out, y_out_stride, z_out, z_out_stride, rows):
    """Columns of rows from the ranks that have them to those that want them. A tape's core.

    x, y, z f32: what this rank has of up to three arrays, x_out, y_out, z_out f32: what it wants of them, rows
    ``..._stride`` elements apart. Lanes take whole rows. plan int64 (machine/swap.py makes it): how many passes, what
    DOING names, then for each pass: rows that fit a slot; of each array the first column that this rank sends and how
    many; of each rank the columns of a row in its slot, and of each array where in that row the wanted ones begin,
    where they go in the row that is filled, and how many they are.
    """
    used = min(state[LANES], rows)
    if load_acquire(state, STATUS) != 0:
        return
    size = 1 + 2 * ARRAYS + state[RANKS] * (1 + 3 * ARRAYS)
    for lane in range(part, used, parts):
        began = clock_ns()
        for i in range(plan[0]):
            if not _swap_lane(flags, slots, state, lane, plan, x, x_stride, y, y_stride, z, z_stride, x_out,
                              x_out_stride, y_out, y_out_stride, z_out, z_out_stride, 2 + i * size,
                              lane * rows // used, (lane + 1) * rows // used):
                return
        state[HEADER + LINE * lane + SPENT] += clock_ns() - began


_run_reduce_rows, _run_all_reduce, _run_swap_columns = map(in_parts, (reduce_rows, all_reduce, swap_columns))


def run_reduce_rows(flags, slots, state, y_MH, x_MH, bias, weight, normed_MH, eps, threads):
    """reduce_rows by itself, in ``threads`` threads."""
    rows, n = x_MH.shape
    _run_reduce_rows((flags, slots, state, flat(y_MH), flat(x_MH), bias, weight, flat(normed_MH), n, rows, n, eps),
                     threads)


def run_all_reduce(flags, slots, state, x, threads):
    """all_reduce by itself."""
    _run_all_reduce((flags, slots, state, x, x.size), threads)


def run_gather(flags, slots, state, data, out, n):
    """gather by itself."""
    gather(0, 1, flags, slots, state, data, out, n)


def run_broadcast(flags, slots, state, data, n):
    """broadcast by itself."""
    broadcast(0, 1, flags, slots, state, data, n)


def run_meet(flags, state, doing):
    """Meet on lane 0, for exchanges that are put together elsewhere; ``doing`` as in DOINGS."""
    if load_acquire(state, STATUS) == 0:
        _meet(flags, state, 0, doing)


def run_sum(out, parts_RN):
    """out = the rows of ``parts`` added in order."""
    sum_parts(out, 0, flat(parts_RN), 0, parts_RN.shape[1], parts_RN.shape[0], parts_RN.shape[1])


def run_swap_columns(flags, slots, state, plan, x, y, z, x_out, y_out, z_out, rows, threads):
    """swap_columns by itself, of arrays without gaps between their rows."""
    _run_swap_columns((flags, slots, state, plan, flat(x), x.shape[1], flat(y), y.shape[1], flat(z), z.shape[1],
                       flat(x_out), x_out.shape[1], flat(y_out), y_out.shape[1], flat(z_out), z_out.shape[1], rows),
                      threads)


def time_reduce_rows(flags, slots, state, y_MH, x_MH, bias, weight, normed_MH, eps, times, threads):
    """Nanoseconds of each of ``times.size`` calls of reduce_rows, one after the other, without Python between."""
    rows, n = x_MH.shape
    for i in range(times.size):
        began = clock_ns()
        _run_reduce_rows((flags, slots, state, flat(y_MH), flat(x_MH), bias, weight, flat(normed_MH), n, rows, n,
                          eps), threads)
        times[i] = clock_ns() - began


WORDS, INPUT, VECTOR, BYTES = types.int64[::1], reads(types.float32), types.float32[::1], types.uint8[::1]
INT, REAL = types.intp, types.float32
_MEMORY = (WORDS, VECTOR, WORDS)
_ROWS = (*_MEMORY, ROWS, F32_2, INPUT, INPUT, F32_2, REAL)
SIGNATURES = {
    run_reduce_rows: (*_ROWS, INT),
    run_all_reduce: (*_MEMORY, VECTOR, INT),
    run_gather: (*_MEMORY, reads(types.uint8), BYTES, INT),
    run_broadcast: (*_MEMORY, BYTES, INT),
    run_swap_columns: (*_MEMORY, WORDS, *[ROWS] * ARRAYS, *[F32_2] * ARRAYS, INT, INT),
    run_meet: (WORDS, WORDS, INT),
    run_sum: (VECTOR, ROWS),
    time_reduce_rows: (*_ROWS, WORDS, INT),
}
#: what every run needs
USUAL = (run_reduce_rows, run_all_reduce, run_gather, run_broadcast, run_swap_columns, run_meet, run_sum)


@lru_cache(None)
def exchange_kernel(function: Any) -> Any:
    return policy.kernel(function, function.__name__, SIGNATURES[function])


@lru_cache(None)
def reduce_operation() -> Operation:
    """reduce_rows in a tape."""
    return Operation(reduce_rows, "reduce_rows", (
        *_MEMORY, VECTOR, VECTOR, INPUT, INPUT, VECTOR, INT, INT, INT, REAL))


@lru_cache(None)
def swap_operation() -> Operation:
    """swap_columns in a tape."""
    return Operation(swap_columns, "swap_columns", (
        *_MEMORY, WORDS, *[INPUT, INT] * ARRAYS, *[VECTOR, INT] * ARRAYS, INT))


def warm_up() -> None:
    """Compile or load what every run needs."""
    reduce_operation(), swap_operation()
    for function in USUAL:
        exchange_kernel(function)
