"""Which tier is taken: from made-up processors, by force, after a failed self-test, by agreement; and the start."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from mpillm.errors import LaunchError
from mpillm.jit import selftest
from mpillm.jit.isa import select

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx512bf16"}
AMX = AVX512 | {"amx-tile", "amx-bf16", "amx-int8"}


def granted():
    return None


def refused():
    return "the kernel does not permit tiles (Operation not supported)"


@pytest.fixture
def fresh(monkeypatch):
    """A process that has not chosen yet, on a processor with everything."""
    for name, value in (("decision", None), ("declined", {}), ("fixed", False)):
        monkeypatch.setattr(select._State, name, value)
    monkeypatch.setattr(select, "features", lambda: frozenset(AMX))
    monkeypatch.setattr(select, "amx_permission", granted)
    for name in ("MPILLM_ISA", "MPILLM_ISA_EMULATE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("has, permission, tier, reasons", [
    (set(), granted, "generic", {"avx2": "the processor has no avx2, fma, f16c"}),
    ({"neon"}, granted, "generic", {"amx": "the processor has no avx2, fma, f16c"}),
    (AVX2 - {"f16c"}, granted, "generic", {"avx2": "the processor has no f16c"}),
    (AVX2, granted, "avx2", {"generic": "avx2 is higher"}),
    (AVX512 - {"avx512bf16"}, granted, "avx2", {"avx512": "the processor has no avx512bf16"}),
    (AVX512 - {"fma"}, granted, "generic", {"avx512": "the processor has no fma"}),
    (AVX512, granted, "avx512", {"amx": "the processor has no amx-tile, amx-bf16, amx-int8"}),
    (AMX, granted, "amx", {"avx512": "amx is higher"}),
    (AMX - {"amx-int8"}, granted, "avx512", {"amx": "the processor has no amx-int8"}),
    (AMX - {"avx512vnni"}, granted, "avx2", {"amx": "the processor has no avx512vnni"}),
    (AMX, refused, "avx512", {"amx": refused()}),
])
def test_the_highest_tier_that_runs(has, permission, tier, reasons):
    decision = select.decide(has, permission)
    assert (decision.tier, decision.reasons[tier], decision.emulated) == (tier, "chosen", False)
    assert list(decision.reasons) == list(select.TIERS)
    assert {name: decision.reasons[name] for name in reasons} == reasons


def test_permission_is_asked_for_only_where_there_are_tiles():
    def asked():
        raise AssertionError("asked")

    assert select.decide(AVX512, asked).tier == "avx512"


def test_forced_tiers():
    decision = select.decide(AMX, granted, "avx2")
    assert decision.tier == "avx2" and decision.reasons["amx"] == "MPILLM_ISA asks for avx2"
    with pytest.raises(LaunchError, match="MPILLM_ISA=avx512 cannot be used: the processor has no avx512f.*has generic,"
                                          " avx2, leave MPILLM_ISA unset"):
        select.decide(AVX2, granted, "avx512")
    with pytest.raises(LaunchError, match="does not permit tiles"):
        select.decide(AMX, refused, "amx")
    with pytest.raises(LaunchError, match="MPILLM_ISA=sse: there is no such tier, use one of generic, avx2"):
        select.decide(AMX, granted, "sse", emulate=True)


def test_emulation_is_for_what_is_forced_and_lacking():
    assert select.decide(AVX2, granted, "", emulate=True).tier == "avx2"
    decision = select.decide(AVX2, granted, "amx", emulate=True)
    assert decision.tier == "amx" and decision.emulated and decision.reasons["amx"] == "chosen, emulated"
    assert not select.decide(AMX, granted, "amx", emulate=True).emulated


def test_numba_told_of_another_processor():
    assert select.features({"NUMBA_CPU_NAME": "generic"}) == frozenset()
    assert select.features({"NUMBA_CPU_FEATURES": "+avx2,-avx512f,+fma"}) == {"avx2", "fma"}
    assert not select.features({"NUMBA_ENABLE_AVX": "0"}) & set(AMX)


def test_lowest():
    assert select.lowest(["amx", "avx512", "avx2", "amx"]) == "avx2"
    assert select.lowest(["amx"]) == "amx"


def test_ranks_agree_on_a_lower_tier(fresh):
    assert select.tier() == "amx" and select.at_least("avx512")
    select.set_tier("avx2")
    assert select.tier() == select.key() == "avx2" and not select.at_least("avx512")
    assert select.decisions() == {"generic": "avx2 is higher", "avx2": "chosen",
                                  "avx512": "another rank has only avx2", "amx": "another rank has only avx2"}
    with pytest.raises(AssertionError, match="above"):
        select.set_tier("amx")


def test_emulated_kernels_have_names_of_their_own(fresh):
    fresh.setattr(select, "features", lambda: frozenset(AVX2))
    fresh.setenv("MPILLM_ISA", "amx")
    fresh.setenv("MPILLM_ISA_EMULATE", "1")
    assert (select.tier(), select.key()) == ("amx", "amx_emulated")


def wrong():
    return False


def broken():
    raise ValueError("no such\ninstruction")


@pytest.mark.parametrize("checks, tier, reasons", [
    ({}, "amx", {}),
    ({"amx": {"TDPBSSD": wrong}}, "avx512", {"amx": "its self-test failed: TDPBSSD gives other bits than it should"}),
    ({"amx": {"TDPBF16PS": broken}, "avx512": {"VPDPBUSD": lambda: True, "VDPBF16PS": wrong}}, "avx2",
     {"amx": "its self-test failed (ValueError: no such instruction)",
      "avx512": "its self-test failed: VDPBF16PS gives other bits than it should"}),
])
def test_a_tier_that_fails_its_self_test_is_declined(fresh, checks, tier, reasons):
    fresh.setattr(selftest, "CHECKS", checks)
    assert selftest.tested_tier() == tier == select.tier()
    assert {name: select.decisions()[name] for name in reasons} == reasons


def test_a_forced_tier_that_fails_ends_the_run(fresh):
    fresh.setenv("MPILLM_ISA", "amx")
    fresh.setattr(selftest, "CHECKS", {"amx": {"TDPBF16PS": wrong}})
    with pytest.raises(LaunchError, match="MPILLM_ISA=amx cannot be used: its self-test failed: TDPBF16PS gives"):
        selftest.tested_tier()


@pytest.mark.parametrize("tier", ["avx512", "amx"])
def test_self_tests_pass_with_the_right_instructions(tier):
    """In a process of its own: instructions are emulated where the machine lacks them."""
    code = "from mpillm.jit import selftest; print(selftest.tested_tier())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "MPILLM_ISA": tier, "MPILLM_ISA_EMULATE": "1"})
    assert done.stdout.strip() == tier, done.stderr


@pytest.mark.parametrize("name", ["VDPBF16PS", "VPDPBUSD", "TDPBF16PS", "TDPBSSD"])
def test_self_tests_compare_every_bit(name, monkeypatch):
    """One wrong bit in one output is enough; nothing is compiled here."""
    check, shown, filled, flips = selftest.CHECKS["amx"][name], [], [], [0]

    def remember(left, right):
        shown.append(right.reshape(-1))
        return True

    def fill(function, *arguments):
        """The expected output, but for the last bit of the last number."""
        for array in arguments:
            if isinstance(array, np.ndarray) and array.size == shown[0].size and array.itemsize == 4:
                expected = shown[len(filled) % len(shown)]
                array.view(np.int32)[:] = expected.astype(np.int64).astype(np.uint32).view(np.int32)
                array.view(np.int32)[-1] ^= flips[-1]
                filled.append(function)

    monkeypatch.setattr(selftest, "run", lambda *arguments: None)
    with monkeypatch.context() as within:
        within.setattr(selftest.np, "array_equal", remember)
        check()
    monkeypatch.setattr(selftest, "run", fill)
    assert check()
    flips.append(1)
    assert not check()


WRONG = """
from mpillm.jit.isa import amx, avx512, vector as v
plain, words = amx.four_products, avx512.halves
avx512._emulate_bf16 = lambda b, total, *pair: v.fma(b, *(words(b, word)[0] for word in pair), total)
amx.four_products = lambda b, total, left, right, signed: plain(b, total, left, right, (True, False))
amx.halves = lambda b, word: words(b, word)[::-1]
from mpillm.jit import selftest
print(*(check() for check in selftest.CHECKS["amx"].values()))
"""


@pytest.mark.slow
def test_self_tests_see_a_processor_that_computes_otherwise(tmp_path):
    """One that drops a product, one that takes signed codes as unsigned; swapped halves are the same sum."""
    done = subprocess.run([sys.executable, "-c", WRONG], capture_output=True, text=True, timeout=600,
                          env={**os.environ, "MPILLM_ISA": "amx", "MPILLM_ISA_EMULATE": "1",
                               "NUMBA_CACHE_DIR": str(tmp_path)})
    assert done.stdout.split() == ["False", "True", "True", "False"], done.stderr
