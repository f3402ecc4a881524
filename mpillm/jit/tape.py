"""Operations that find their arguments in memory, and tapes of operations that one call runs.

An operation is a core ``core(part, parts, *arguments)``: a compiled helper that does its share of the work and
returns nothing. It is compiled once, as a C function of (address of the arguments, part, parts), whatever the
number of threads. A tape is a list of them. Every thread runs through the whole tape and meets the others after
each operation, so that a step of a model forks once, not some hundred times, and Python is not asked in between.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mpillm.jit import policy
from mpillm.jit.isa import atomics
from mpillm.jit.isa.vector import F32, I32, I64
from mpillm.jit.parallel import call_part, in_parts

ARRIVED, SPINS, YIELDS, NAP = range(4)     # words of a team's state
STATE_WORDS = 16
Stretch = tuple[bool, Callable[[int], None]]      # whether it may go on elsewhere, and what runs it
Send = Callable[[Callable[[], None]], Callable[[], None]]     # has something done elsewhere; what it returns waits
PATIENCE = 1_000_000_000                   # ns that threads are given to start together
FREE_SPINS, CROWDED_SPINS = 4000, 0        # polls before a thread offers its core: some 40 us, or none


@policy.helper
def _meet(state, target):
    """Say that this thread has come, and wait for the others: spin, then yield, then sleep."""
    atomics.fetch_add(state, ARRIVED, 1)
    polls = 0
    while atomics.load_acquire(state, ARRIVED) < target:
        polls += 1
        if polls <= state[SPINS]:
            atomics.pause()
        elif polls <= state[SPINS] + state[YIELDS]:
            atomics.yield_core()
        else:
            atomics.nap(state[NAP])


@policy.helper
def _run_part(part, parts, operations, count, state, nanoseconds):
    """One thread's way through ``operations`` [count, 2]: address of the function, address of its arguments."""
    began = atomics.clock_ns()
    for i in range(count):
        call_part(operations[2 * i], operations[2 * i + 1], part, parts)
        if parts > 1:
            _meet(state, parts * (i + 1))
        if part == 0:
            ended = atomics.clock_ns()
            nanoseconds[i] += ended - began
            began = ended


_run_team = in_parts(_run_part)


def run_tape(operations, count, state, nanoseconds, parts):
    """Run a tape with a team of ``parts`` threads."""
    state[ARRIVED] = 0
    _run_team((operations, count, state, nanoseconds), parts)


def run_one_by_one(operations, count, state, nanoseconds, parts):
    """The same where threads cannot be had all at once: fork and join for every operation."""
    for i in range(count):
        began = atomics.clock_ns()
        _run_one((operations[2 * i:], state), parts)
        nanoseconds[i] += atomics.clock_ns() - began


@policy.helper
def _one_part(part, parts, operation, state):
    call_part(operation[0], operation[1], part, parts)


_run_one = in_parts(_one_part)

WORDS = types.int64[::1]
SIGNATURE = (WORDS, types.intp, WORDS, WORDS, types.intp)


@dataclass(frozen=True)
class Cell:
    """An argument whose value is given anew for each run of a tape."""

    name: str


UNKNOWN = 1 << 62          # size of an array that is given as a cell


class Operation:
    """A compiled core and the numba types of its arguments, ``part`` and ``parts`` aside."""

    def __init__(self, core: Any, name: str, kinds: Sequence[Any]) -> None:
        self.name, self.kinds = name, tuple(kinds)
        self._compiled = policy.c_function(_entry(core, self.kinds, name), name)
        self.address: int = self._compiled.address

    def words(self, arguments: Sequence[Any]) -> list[int | Cell]:
        """The arguments as 64-bit words: an array's address and size, an integer, the bits of a float."""
        assert len(arguments) == len(self.kinds), f"{self.name}: {len(arguments)} arguments for {len(self.kinds)}"
        return [word for kind, value in zip(self.kinds, arguments, strict=True)
                for word in _words(self.name, kind, value)]

    def __call__(self, *arguments: Any, parts: int = 1) -> None:
        """Run this operation alone."""
        words = np.array([*self.words(arguments), 0], np.int64)
        run_words(np.array([self.address, address_of(words)], np.int64), 1, np.zeros(1, np.int64), parts)


def address_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


_DTYPES = {types.float32: "f4", types.int16: "i2", types.uint16: "u2", types.int8: "i1", types.uint8: "u1",
           types.int32: "i4", types.uint32: "u4", types.int64: "i8", types.float64: "f8"}


def _words(name: str, kind: Any, value: Any) -> list[int | Cell]:
    if isinstance(kind, types.Array):
        if isinstance(value, Cell):
            return [value, UNKNOWN]
        wanted = np.dtype(_DTYPES[kind.dtype])
        assert isinstance(value, np.ndarray) and value.dtype == wanted, \
            f"{name}: an array of {wanted} is needed, not {getattr(value, 'dtype', type(value))}"
        return [address_of(value), value.size]
    if isinstance(value, Cell):
        return [value]
    return [int(np.float32(value).view(np.uint32)) if kind == types.float32 else int(value)]


def _entry_template(arguments, part, parts):
    unpack_and_call(arguments, part, parts)  # noqa: F821 (given to each copy as its global)


def _entry(core: Any, kinds: tuple, name: str) -> FunctionType:
    """A function of (address of words, part, parts) that calls ``core`` with what the words say."""
    @intrinsic
    def unpack_and_call(typingctx, arguments, part, parts):
        call = typingctx.resolve_value_type(core).get_call_type(typingctx, (types.intp, types.intp, *kinds), {})

        def codegen(context, b, signature, values):
            words, part, parts = values
            compiled = core.get_compile_result(call)
            context.active_code_library.add_linking_library(compiled.library)
            at, unpacked = words, []
            for kind in kinds:
                value, taken = _unpack(context, b, kind, at)
                unpacked.append(value)
                at = b.add(at, I64(8 * taken))
            context.call_internal_no_propagate(b, compiled.fndesc, call, [part, parts, *unpacked])
            return context.get_dummy_value()

        return types.void(types.uintp, types.intp, types.intp), codegen

    return FunctionType(_entry_template.__code__, {"unpack_and_call": unpack_and_call}, name)


def _unpack(context: Any, b: ir.IRBuilder, kind: Any, address: Any) -> tuple[Any, int]:
    """A core's argument from memory, and how many words it took."""
    word, size = (b.load(b.inttoptr(b.add(address, I64(8 * i)), I64.as_pointer()), typ=I64) for i in (0, 1))
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, b)
        each = I64(kind.dtype.bitwidth // 8)
        context.populate_array(array, data=b.inttoptr(word, array.data.type), shape=[size], strides=[each],
                               itemsize=each, meminfo=None)
        return array._getvalue(), 2
    return b.bitcast(b.trunc(word, I32), F32) if kind == types.float32 else word, 1


class Tape:
    """Operations in order, recorded once with fixed buffers and run many times with new values of its cells."""

    def __init__(self) -> None:
        self._entries: list[tuple[Operation | Callable[[], None], str]] = []
        self._elsewhere: set[int] = set()
        self._words: list[int] = []
        self._starts: list[int] = []
        self._held: list[Any] = []
        self._cells: dict[str, list[int]] = {}
        self._stretches: list[Stretch] = []
        self.families: list[str] = []
        self._nanoseconds = np.zeros(0, np.int64)

    def add(self, family: str, operation: Operation, *arguments: Any) -> None:
        """Record an operation; ``family`` is what its time is counted under."""
        words = operation.words(arguments)
        self._starts.append(len(self._words))
        for word in words:
            if isinstance(word, Cell):
                self._cells.setdefault(word.name, []).append(len(self._words))
                word = 0
            self._words.append(word)
        self._held.append(arguments)
        self._entries.append((operation, family))

    def call(self, family: str, function: Callable[[], None], elsewhere: bool = False) -> None:
        """Record a Python function: the tape stops for it. ``elsewhere``: another thread may run it (``turns``)."""
        self._starts.append(len(self._words))
        if elsewhere:
            self._elsewhere.add(len(self._entries))
        self._entries.append((function, family))

    def _lay_out(self) -> None:
        self._memory = np.array([*self._words, 0], np.int64)
        self._nanoseconds = np.zeros(len(self._entries), np.int64)
        self.families = [family for _, family in self._entries]
        self._names = list(self._cells)
        self._slots = np.array([slot for slots in self._cells.values() for slot in slots], np.int64)
        self._which = np.repeat(np.arange(len(self._names)), [len(slots) for slots in self._cells.values()])
        base, begin = address_of(self._memory), 0
        for i in range(len(self._entries) + 1):
            if i < len(self._entries) and isinstance(self._entries[i][0], Operation):
                continue
            if i > begin:
                self._stretches.append((False, self._operations(begin, i, base)))
            if i < len(self._entries):
                self._stretches.append((i in self._elsewhere, self._python(i)))
            begin = i + 1

    def _operations(self, begin: int, end: int, base: int) -> Callable[[int], None]:
        found = [operation for operation, _ in self._entries[begin:end] if isinstance(operation, Operation)]
        pairs = np.array([(operation.address, base + 8 * start) for operation, start in
                          zip(found, self._starts[begin:end], strict=True)], np.int64).reshape(-1)
        nanoseconds = self._nanoseconds[begin:end]
        return lambda parts: run_words(pairs, end - begin, nanoseconds, parts)

    def _python(self, index: int) -> Callable[[int], None]:
        function = self._entries[index][0]
        assert not isinstance(function, Operation), "operations run in stretches"

        def run(parts: int) -> None:
            began = time.perf_counter_ns()
            function()
            self._nanoseconds[index] += time.perf_counter_ns() - began

        return run

    def run(self, parts: int) -> None:
        """Run with the cells as they were set."""
        for _, stretch in self._stretches:
            stretch(parts)

    def set(self, values: dict[str, int]) -> None:
        """Give the cells their values: integers, or addresses of arrays (``address_of``). Ends the recording."""
        if not self._stretches:
            self._lay_out()
        self._memory[self._slots] = np.array([values[name] for name in self._names], np.int64)[self._which]

    def turns(self, parts: int, send: Send) -> Iterator[None]:
        """Run, with what may go on elsewhere sent there; each turn ends with something on its way."""
        for elsewhere, stretch in self._stretches:
            if not elsewhere:
                stretch(parts)
                continue
            wait = send(functools.partial(stretch, parts))
            yield
            wait()

    def seconds(self) -> dict[str, float]:
        """Seconds spent in each family of operations since the start."""
        found: dict[str, float] = {}
        for family, nanoseconds in zip(self.families, self._nanoseconds.tolist(), strict=True):
            found[family] = found.get(family, 0.0) + nanoseconds * 1e-9
        return found


def run_in_turns(tapes: Sequence[Tape], parts: int, send: Send) -> None:
    """Run tapes whose cells are set, one going on while what another sent is on its way.

    All begin in their order and stop at the same places, so that they take turns, and what is sent keeps one order.
    """
    running = [tape.turns(parts, send) for tape in tapes]
    while running:
        running = [turns for turns in running if next(turns, True) is None]


class _Team:
    """Whether so many of this process's threads run at the same time, found out at the first use."""

    together: dict[int, bool] = {1: True}
    state = np.zeros(STATE_WORDS, np.int64)


def prepare(crowded: bool) -> None:
    """Say whether threads and ranks outnumber the cores: then waiting threads give their core away at once."""
    _Team.state[SPINS], _Team.state[YIELDS], _Team.state[NAP] = CROWDED_SPINS if crowded else FREE_SPINS, 1000, 50


prepare(False)


@policy.cached
def _runner(name: str) -> Any:
    return policy.kernel({"team": run_tape, "single": run_one_by_one}[name], f"run_tape_{name}", SIGNATURE)


@policy.helper
def _assemble_part(part, parts, state, patience):
    """Wait until all parts run, ``patience`` ns at most; state [1] counts those that saw all."""
    atomics.fetch_add(state, 0, 1)
    began = atomics.clock_ns()
    while atomics.load_acquire(state, 0) < parts:
        if atomics.clock_ns() - began > patience:
            return
        atomics.yield_core()
    atomics.fetch_add(state, 1, 1)


_run_assemble = in_parts(_assemble_part)


def assemble(state, patience, parts):
    """Count in state [1] the parts that met all others."""
    _run_assemble((state, patience), parts)


def warm_up() -> None:
    """Compile or load what runs tapes."""
    _runner("team")


def _runs_together(parts: int) -> bool:
    state = np.zeros(STATE_WORDS, np.int64)
    policy.kernel(assemble, "assemble", (WORDS, types.intp, types.intp))(state, PATIENCE, parts)
    return int(state[1]) == parts


def run_words(operations: np.ndarray, count: int, nanoseconds: np.ndarray, parts: int) -> None:
    """Run ``operations``, with a team of threads if the threading layer lets them run at once."""
    if parts not in _Team.together:
        _Team.together[parts] = _runs_together(parts)
    runner = _runner("team" if _Team.together[parts] else "single")
    runner(operations, count, _Team.state, nanoseconds, parts)
