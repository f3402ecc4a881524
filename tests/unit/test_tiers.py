"""The tiers avx512 and amx: products bit by bit against slow twins, with emulated instructions where the machine has
none; the instructions themselves in code compiled for a processor that has them."""

from __future__ import annotations

import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from llvmlite import binding, ir
from numba import types

from mpillm.jit import policy, tiles
from mpillm.jit.isa import amx, amx_codes, avx512, select
from mpillm.jit.isa import vector as v
from mpillm.jit.parallel import in_parts

# Kernels of the tests: the cores in parts, each with its own entry in the cache

run_bf16, run_avx512, run_tile_rows, run_round_rows = (in_parts(core) for core in (
    tiles.tiles_core("bf16"), tiles.bf16_avx512_part, tiles.tile_rows_part, tiles.round_rows_part))
run_q8_0, run_q4_0, run_q4_1, run_q4_k, run_q6_k = (in_parts(tiles.tiles_core(name))
                                                    for name in ("q8_0", "q4_0", "q4_1", "q4_K", "q6_K"))


def tiers_bf16(arguments, threads):
    run_bf16(arguments, threads)


def tiers_avx512(arguments, threads):
    run_avx512(arguments, threads)


def tiers_tile_rows(arguments, threads):
    run_tile_rows(arguments, threads)


def tiers_round_rows(arguments, threads):
    run_round_rows(arguments, threads)


def tiers_q8_0(arguments, threads):
    run_q8_0(arguments, threads)


def tiers_q4_0(arguments, threads):
    run_q4_0(arguments, threads)


def tiers_q4_1(arguments, threads):
    run_q4_1(arguments, threads)


def tiers_q4_k(arguments, threads):
    run_q4_k(arguments, threads)


def tiers_q6_k(arguments, threads):
    run_q6_k(arguments, threads)


def tiers_dot_block(arguments, threads):
    avx512.dot_block(*arguments)


def tiers_configure(arguments, threads):
    amx.configure(*arguments)


KINDS = {np.dtype(kind.name): kind for kind in (types.float32, types.uint16, types.int16, types.int8, types.uint8,
                                                types.int32)}
MADE: dict[str, object] = {}


def call(function, *arguments, threads=1):
    """Run a kernel for the types of these arguments: arrays and integers."""
    if function.__name__ not in MADE:
        kinds = [KINDS[a.dtype][::1] if isinstance(a, np.ndarray) else types.intp for a in arguments]
        name = f"{function.__name__}_{select.key()}"
        MADE[function.__name__] = policy.kernel(function, name, (types.Tuple(kinds), types.intp))
    MADE[function.__name__](arguments, threads)


@pytest.fixture(autouse=True)
def amx_tier(monkeypatch):
    """The tier amx for the kernels made here, emulated where the machine lacks it."""
    lacking = select.lacks("amx", select.features(), select.amx_permission) is not None
    monkeypatch.setattr(select._State, "decision", select.Decision("amx", {}, lacking))
    monkeypatch.setattr(select._State, "declined", {})
    monkeypatch.setattr(select._State, "fixed", False)


# Twins

def f32(values):
    return np.asarray(values).astype(np.float32)


def fma(x, y, z):
    """One rounding (but for ties that 64 bits cannot tell)."""
    return f32(np.longdouble(x) * np.longdouble(y) + np.longdouble(z))


def flush(values):
    return np.where(np.abs(values) < np.float32(2.0 ** -126), np.copysign(np.float32(0), values), values)


def bf16(values):
    """As bf16 words, nearest even."""
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def floats(words):
    """bf16 words as the instructions read them."""
    return flush((words.astype(np.uint32) << 16).view(np.float32))


def naive_amx(x, w, bias):
    """x [M, K], w [N, K] f32; every 32 k: even and odd ones apart, then both added to the output."""
    x, w = (floats(bf16(np.pad(a, ((0, 0), (0, -a.shape[1] % 32))))) for a in (x, w))
    y = np.zeros((len(x), len(w)), np.float32)
    for start in range(0, x.shape[1], 32):
        halves = np.zeros((2, *y.shape), np.float32)
        for k in range(start, start + 32):
            halves[k % 2] = flush(fma(x[:, k, None], w[None, :, k], halves[k % 2]))
        y = flush(y + flush(halves[0] + halves[1]))
    return y + bias if bias.size else y


def naive_avx512(x, w, bias):
    """Pairs of k: the odd one first."""
    x, w = (floats(bf16(np.pad(a, ((0, 0), (0, a.shape[1] % 2))))) for a in (x, w))
    y = np.zeros((len(x), len(w)), np.float32)
    for k in range(0, x.shape[1], 2):
        for i in (k + 1, k):
            y = flush(fma(x[:, i, None], w[None, :, i], flush(y)))
    return y + bias if bias.size else y


def naive_codes(case):
    """x, w codes [M, K], [N, K]; blocks of 32 ascending, scaled in f32."""
    name, y = case.name, np.zeros((len(case.x), len(case.w)), np.float32)
    for block in range(case.x.shape[1] // 32):
        part, above = slice(32 * block, 32 * block + 32), (case.phase + block) // 8
        x, w = case.x[:, part].astype(np.int64), case.w[:, part].astype(np.int64)
        xs, whole = case.x_scales[:, block, None], x.sum(1)[:, None]
        if name in ("q8_0", "q4_0", "q4_1"):
            y = fma(f32(x @ (w - 8 * (name == "q4_0")).T), f32(case.d[None, :, block]) * xs, y)
            if name == "q4_1":
                y = fma(f32(whole) * xs, f32(case.m[None, :, block]), y)
            continue
        d, small = f32(case.d[None, :, above]), case.small[:, :, block].astype(np.int64)
        if name == "q4_K":
            y = fma(f32((x @ w.T) * small[0]), d * xs, y)
            y = fma(f32(whole * small[1]), -(f32(case.m[None, :, above]) * xs), y)
        else:
            parts = [x[:, half] @ (w[:, half] - 32).T for half in (slice(16), slice(16, 32))]
            y = fma(f32(parts[0] * small[0] + parts[1] * small[1]), d * xs, y)
    return y + case.bias


# Packing, slow and obvious

def in_panels(w, together, k):
    """[N, K] to [P][k / together][16][together] with zeros beyond N and K."""
    whole = np.zeros((-(-len(w) // 16) * 16, k), w.dtype)
    whole[:len(w), :w.shape[1]] = w
    panels = whole.reshape(len(whole) // 16, 16, k // together, together).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(panels).reshape(-1)


def in_nibbles(w):
    """Codes 0-15 [N, K] to [P][K/32][4][16][4]: quads 0-3 low, 4-7 high."""
    quads = in_panels(w.astype(np.uint8), 4, w.shape[1]).reshape(-1, 8, 16, 4)
    return np.ascontiguousarray(quads[:, :4] | quads[:, 4:] << 4).reshape(-1)


def aligned(count):
    raw = np.zeros(count + 64, np.uint8)
    return raw[-raw.ctypes.data % 64:][:count]


def room_for(m, n, threads):
    """(y, tail, room), full of what a kernel must not read."""
    room = aligned(threads * amx.SCRATCH)
    room[:] = 0xA5
    return np.full((m, n), np.nan, np.float32), np.full(m * 16, np.nan, np.float32), room


def linear_bf16(x, w, bias, tier="amx", threads=1, beyond=0.0):
    """``beyond``: what stands in the packed weights after K."""
    (m, k), n = x.shape, len(w)
    whole = -(-k // 32) * 32
    w = np.pad(w, ((0, 0), (0, whole - k)), constant_values=beyond) if tier == "amx" else w
    packed = in_panels(bf16(w), 2, whole)
    y, tail, room = room_for(m, n, threads)
    if tier == "amx":
        rows = np.full(tiles.tile_words(m, k), 0x7FC0, np.uint16)
        call(tiers_tile_rows, x.reshape(-1), m, k, rows, threads=threads)
        call(tiers_bf16, rows, m, k, packed, 16 * whole, bias, y.reshape(-1), n, tail, room, threads=threads)
    else:
        rows = np.full(m * (k + k % 2), 0x7FC0, np.uint16)
        call(tiers_round_rows, x.reshape(-1), m, k, rows, threads=threads)
        call(tiers_avx512, rows, m, k, packed, 16 * whole, bias, y.reshape(-1), n, tail, threads=threads)
    return y


HIGHEST = {"q8_0": 127, "q4_0": 15, "q4_1": 15, "q4_K": 15, "q6_K": 63}


def codes_case(name, m, n, k, phase=0):
    """Random codes, the first row and output with the largest; scales of blocks or super-blocks."""
    made, blocks = np.random.default_rng(k + phase), k // 32
    w = made.integers(-128 if name == "q8_0" else 0, HIGHEST[name] + 1, (n, k), np.int8)
    x = made.integers(-127, 128, (m, k), np.int8)
    x[0], w[0] = 127, HIGHEST[name]
    count = -(-(phase + blocks) // 8) if name.endswith("K") else blocks
    d, minimum = (made.standard_normal((n, count)).astype(np.float16) for _ in range(2))
    small = made.integers(-128, 128, (2, n, blocks), np.int8) if name == "q6_K" else \
        made.integers(0, 64, (2, n, blocks), np.uint8)
    return SimpleNamespace(name=name, phase=phase, x=x, x_scales=made.random((m, blocks), np.float32), w=w, d=d,
                           m=minimum, small=small, bias=made.standard_normal(n, np.float32))


def packed_codes(case):
    """(codes, scales) as quant/layout.py has them."""
    k, panels = case.w.shape[1], -(-len(case.w) // 16)
    if case.name == "q8_0":
        codes = in_panels(case.w, 4, k)
    else:
        codes = in_nibbles(case.w & 15)
    if case.name == "q6_K":
        quads = in_panels((case.w >> 4).astype(np.uint8), 4, k).reshape(-1, 2, 4, 64)
        bits = quads[:, :, 0] | quads[:, :, 1] << 2 | quads[:, :, 2] << 4 | quads[:, :, 3] << 6
        codes = np.concatenate([codes.reshape(-1, 256), bits.reshape(-1, 128)], 1)

    def halves(*parts):
        lanes = [in_panels(part.view(np.int16), 1, part.shape[1]).reshape(panels, -1, 1, 16) for part in parts]
        return np.concatenate(lanes, 2).reshape(panels, -1)

    scales = halves(case.d, case.m) if case.name in ("q4_1", "q4_K") else halves(case.d)
    if case.name.endswith("K"):
        small = [in_panels(part, 1, k // 32).reshape(panels, -1, 1, 16) for part in case.small]
        own = np.concatenate(small, 2).reshape(panels, -1).view(np.int16)
        scales = np.concatenate([own, scales], 1)
    return np.ascontiguousarray(codes).reshape(-1), scales.reshape(-1)


def linear_codes(case, rows=slice(None), threads=1):
    x, x_scales = np.ascontiguousarray(case.x[rows]), np.ascontiguousarray(case.x_scales[rows])
    (m, k), n = x.shape, len(case.w)
    sums = x.reshape(m, -1, 16).sum(2, dtype=np.int32).reshape(-1)
    y, tail, room = room_for(m, n, threads)
    run = {"q8_0": tiers_q8_0, "q4_0": tiers_q4_0, "q4_1": tiers_q4_1, "q4_K": tiers_q4_k,
           "q6_K": tiers_q6_k}[case.name]
    call(run, x.reshape(-1), x_scales.reshape(-1), sums, m, k, *packed_codes(case), case.phase, case.bias,
         y.reshape(-1), n, tail, room, threads=threads)
    return y


def same_bits(x, y):
    return x.shape == y.shape and np.array_equal(x.view(np.uint32), y.view(np.uint32))


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


ROWS = (1, 2, 7, 16, 17, 33, 40)
NAIVE = {"amx": naive_amx, "avx512": naive_avx512}


@pytest.mark.parametrize("tier", NAIVE)
@pytest.mark.parametrize("n, k", [(16, 32), (48, 96), (83, 75), (21, 1057), (5, 1)])
def test_bf16_has_the_bits_of_its_twin_for_any_rows_and_threads(tier, n, k):
    x, w, bias = random(40, k), random(n, k, seed=1), random(n, seed=2)
    expected = NAIVE[tier](x, w, bias)
    for m in ROWS:
        for threads in (1, 2, 3):
            assert same_bits(linear_bf16(x[:m], w, bias, tier, threads), expected[:m]), (m, threads)
            last = linear_bf16(x[40 - m:].copy(), w, bias, tier, threads)
            assert same_bits(last, expected[40 - m:]), (m, threads)


@pytest.mark.parametrize("tier", NAIVE)
def test_bf16_without_bias_beyond_a_chunk_of_rows(tier):
    """More rows than share a pass over the weights; more panels than a group."""
    x, w = random(tiles.ROW_CHUNK + 35, 34), random(16 * tiles.GROUP + 40, 34, seed=1)
    nothing = np.zeros(0, np.float32)
    assert same_bits(linear_bf16(x, w, nothing, tier), NAIVE[tier](x, w, nothing))


@pytest.mark.parametrize("tier", NAIVE)
def test_subnormal_numbers_are_zeros(tier):
    """Inputs, products, sums and outputs below 2**-126, as the instructions have it."""
    x, w = random(6, 64), random(20, 64, seed=1)
    x *= np.float32(2.0) ** np.array([0, -40, -62, -63, -64, -127], np.float32)[:, None]
    w *= np.float32(2.0) ** np.tile(np.array([0, -62, -63, -64, -126], np.float32), 4)[:, None]
    nothing = np.zeros(0, np.float32)
    expected = NAIVE[tier](x, w, nothing)
    exact = f32(x.astype(np.float64) @ w.T.astype(np.float64))
    assert np.any((expected == 0) & (exact != 0)), "the case has something to flush"
    assert same_bits(linear_bf16(x, w, nothing, tier), expected)


@pytest.mark.parametrize("tier", NAIVE)
def test_numbers_that_are_not_finite_stay_in_their_row(tier):
    x, w, bias = random(20, 64), random(20, 64, seed=1), random(20, seed=2)
    before = linear_bf16(x, w, bias, tier)
    x[3, 5], x[17, 40], x[18, 1] = np.nan, np.inf, np.uint32(0x7F800001).view(np.float32)
    after = linear_bf16(x, w, bias, tier)
    assert np.isnan(after[3]).all() and np.isnan(after[18]).all() and not np.isfinite(after[17]).any()
    others = [m for m in range(20) if m not in (3, 17, 18)]
    assert same_bits(after[others], before[others])


def test_weights_beyond_k_do_not_count():
    x, w, bias = random(18, 37), random(20, 37, seed=1), random(20, seed=2)
    assert same_bits(linear_bf16(x, w, bias), linear_bf16(x, w, bias, beyond=3.0))


def test_nothing_in_gives_the_bias():
    bias = random(20, seed=2)
    for tier in NAIVE:
        y = linear_bf16(np.zeros((3, 0), np.float32), np.zeros((20, 0), np.float32), bias, tier)
        assert same_bits(y, np.tile(bias, (3, 1)))


@pytest.mark.parametrize("name, phases", [("q8_0", (0,)), ("q4_0", (0,)), ("q4_1", (0,)), ("q4_K", (0, 3)),
                                          ("q6_K", (0, 5))])
def test_codes_have_the_bits_of_their_twin_for_any_rows_and_threads(name, phases):
    for phase in phases:
        for n, k in ((16, 32), (83, 96), (40, 1088)):
            case = codes_case(name, 40, n, k, phase)
            expected = naive_codes(case)
            for m in ROWS:
                for threads in (1, 2):
                    where = (phase, n, k, m, threads)
                    assert same_bits(linear_codes(case, slice(m), threads), expected[:m]), where
                    assert same_bits(linear_codes(case, slice(40 - m, 40), threads), expected[40 - m:]), where


@pytest.mark.parametrize("row_bytes, panel_rows", [(64, 16), (32, 8)])
def test_configurations_are_those_that_the_instructions_take(row_bytes, panel_rows):
    """What LDTILECFG and the products fault on, by the manual; the emulation does not."""
    room = aligned(amx.SCRATCH)
    for size_0, size_1 in [(rows, 0) for rows in range(1, 17)] + [(16, rows) for rows in range(1, 17)]:
        room[:] = 0xA5
        call(tiers_configure, room, 0, size_0, size_1, row_bytes, panel_rows)
        config = room[amx.CONFIG:amx.CONFIG + 64]
        columns, rows = config[16:48].view(np.uint16), config[48:]
        assert config[0] == 1 and not config[1:16].any(), "palette 1, no start row, nothing reserved"
        assert (columns[:8] <= 64).all() and (rows[:8] <= 16).all() and rows[:8].all() and columns[:8].all()
        assert not columns[8:].any() and not rows[8:].any(), "there are eight tiles"
        for r in range(2):
            for p in range(2):
                sums, left, right = amx.SUM + 2 * r + p, amx.ROWS + r, amx.PANELS + p
                assert rows[sums] == rows[left] and columns[sums] == columns[right] == 64
                assert columns[left] == 4 * rows[right] == row_bytes
        assert rows[amx.ROWS] == size_0 and rows[amx.ROWS + 1] == (size_1 or 16)


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_vnni_is_exact_and_does_not_saturate(kind, monkeypatch):
    made, limits = np.random.default_rng(0), np.iinfo(kind)
    codes, x = made.integers(limits.min, limits.max + 1, (8, 16, 4), kind), made.integers(-127, 128, (8, 4), np.int8)
    codes[:2], codes[2:4], x[0], x[1], x[2:4] = limits.max, limits.min, -127, 127, (-127, 127, -127, 127)
    sums = np.full(16, 77, np.int32)
    # An entry for each kind: MADE holds the types of the first call.
    monkeypatch.setitem(globals(), "MADE", {})
    monkeypatch.setattr(tiers_dot_block, "__name__", f"tiers_dot_block_{np.dtype(kind).name}")
    call(tiers_dot_block, codes.reshape(-1), x.reshape(-1), int(x.sum(dtype=np.int64)), sums)
    expected = np.einsum("qlj,qj->l", codes.astype(np.int64), x.astype(np.int64))
    assert np.array_equal(sums, expected)


# The instructions themselves

FEATURES = ("+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni,+avx512bf16,+amx-tile,+amx-bf16,+amx-int8,"
            "+avx2,+fma,+f16c")


def assembly(fill, cpu="sapphirerapids"):
    """What LLVM makes, optimised as by numba, of the functions that ``fill`` adds to a module."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module = ir.Module("tiers")
    module.triple = "x86_64-unknown-linux-gnu"
    fill(module)
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    machine = binding.Target.from_triple(module.triple).create_target_machine(cpu=cpu, features=FEATURES, opt=3)
    options = binding.create_pipeline_tuning_options(speed_level=3)
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return machine.emit_assembly(parsed)


def external(function):
    """Keep a function that nothing calls."""
    function.linkage = "external"
    return function


@pytest.mark.parametrize("cpu", ["sapphirerapids", "graniterapids"])
def test_bf16_tiles_are_instructions(cpu):
    text = assembly(lambda module: external(amx.bf16_function(module, emulate=False)), cpu)
    products = re.findall(r"\ttdpbf16ps\t(.*)", text)
    # 1x1, 1x2, 2x1, 2x2 with and without prefetch; loops may be unrolled.
    assert len(products) >= 2 * (1 + 2 + 2 + 4)
    assert set(products) == {f"%tmm{6 + p}, %tmm{4 + r}, %tmm{2 * r + p}" for r in (0, 1) for p in (0, 1)}
    assert "tileloadd" in text and "tilestored" in text and "tilezero" in text and "prefetcht0" in text
    assert "callq" not in text


@pytest.mark.parametrize("name, instruction", [("q8_0", "tdpbssd"), ("q4_0", "tdpbssd"), ("q4_1", "tdpbsud"),
                                               ("q4_K", "tdpbsud"), ("q6_K", "tdpbssd")])
def test_tiles_of_codes_are_instructions(name, instruction):
    text = assembly(lambda module: external(amx_codes.codes_function(module, amx_codes.FORMATS[name], emulate=False)))
    assert re.search(rf"\t{instruction}\t", text) and re.search(r"vfmadd\w*ps\t.*%zmm", text)
    assert "emulated" not in text


def test_rows_of_avx512_are_instructions_and_stay_in_registers():
    text = assembly(lambda module: external(avx512.rows_function(module, emulate=False)))
    dots = re.findall(r"\tvdpbf16ps\t[^\n]*", text)
    assert len(dots) >= sum(rows * (wide + 1) for rows, wide in avx512.SHAPES.items())
    assert not re.findall(r"\tvmov\w+\t%zmm\d+, [-\d]*\(%rsp\)", text), "sums are spilled to the stack"
    assert "callq" not in text


def test_configuration_release_and_vnni_are_instructions():
    def fill(module):
        function = ir.Function(module, ir.FunctionType(v.V16I, [v.PTR, v.V16I, avx512.V64B, v.I32]), "both")
        b = ir.IRBuilder(function.append_basic_block("entry"))
        address, total, codes, four = function.args
        hardware = amx.tiles(b, None, emulate=False)
        hardware.configure(address)
        hardware.release()
        b.ret(avx512.dot_u8s8(b, total, codes, four, emulate=False))

    text = assembly(fill)
    for instruction in ("ldtilecfg", "tilerelease", "vpdpbusd"):
        assert re.search(rf"\t{instruction}\b", text), instruction
