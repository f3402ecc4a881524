"""The figures behind `mpillm bench`: bytes and operations of a step, budgets, which limit counts, what is emitted."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from llvmlite import binding, ir

from mpillm import kernels
from mpillm.bench import machine, model, plot
from mpillm.bench.figures import Costs, Piece, SpeedTest, budget, costs
from mpillm.engine import probe
from mpillm.errors import UsageError
from mpillm.jit import measure
from mpillm.models.config import ModelConfig, RopeScaling
from mpillm.partition import Sizes, partition

FIGURES = ModelConfig("llama", hidden=96, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=16, intermediate=160, vocab=320,
                      max_positions=512, rms_eps=1e-5, rope_theta=1e4, rope=RopeScaling(), tied=False, qkv_bias=False,
                      output_bias=False, mlp_bias=False, qk_norm=False, windows=(None, None), bos_id=1, eos_ids=(2,))


def shares(tp):
    sizes = Sizes(hidden=96, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=16, intermediate=160, vocab=320,
                  column_unit=16, bytes_attn=2, bytes_ffn=2, bytes_vocab=2)
    return partition(sizes, tp).shares


def test_names_are_llama_benchs():
    tests = model.tests_of([1], [1, 8], [0, 4096], 512, 128)
    assert [(t.name, t.batch) for t in tests] == [
        ("pp512", 1), ("tg128", 1), ("tg128", 8),
        ("pp512 @ d4096", 1), ("tg128 @ d4096", 1), ("tg128 @ d4096", 8)]
    assert [t.kind for t in model.tests_of([1], [1], [0], 0, 4)] == ["tg"]
    assert [t.kind for t in model.tests_of([1], [1], [0], 4, 0)] == ["pp"]


@pytest.mark.parametrize("tp", [1, 2])
def test_operations_are_those_of_the_matrices_and_the_positions(tp):
    parts = [costs(FIGURES, share, 1000, 100, 64, 64) for share in shares(tp)]
    weights = 2 * (96 * (6 + 2 + 2 + 6) * 16 + 3 * 96 * 160)
    pieces = [Piece(0, 3, False), Piece(10, 1, True)]      # rows that attend to 1, 2, 3 and 11 positions
    expected = 2 * 4 * weights + 2 * 96 * 320 + 2 * 4 * 6 * 16 * (1 + 2 + 3 + 11)
    assert sum(part.operations_of(pieces) for part in parts) == expected


def test_bytes_are_weights_once_and_the_cache_of_every_sequence():
    c = Costs(1000, 2.0, 0, 0, 0, (None, None))
    assert c.bytes_of([Piece(9, 1, True)]) == 1000 + 2 * (1 + 10)
    assert c.bytes_of([Piece(9, 1, True)] * 3) == 1000 + 3 * 2 * (1 + 10)
    assert c.bytes_of([Piece(4, 4, True)]) == 1000 + 2 * (4 + 8)      # a chunk reads what stands before it once
    half = dataclasses.replace(c, windows=(4, None))
    assert half.bytes_of([Piece(9, 1, True)]) == 1000 + 2 * (1 + (4 + 10) / 2)
    assert half.bytes_of([Piece(8, 2, True)]) == 1000 + 2 * (2 + (5 + 10) / 2)


def test_of_experts_the_chosen_are_read():
    c = Costs(1000, 0.0, 0, 0, 0, (None,), routed_bytes=800, chosen=0.25)
    assert c.bytes_of([Piece(9, 1, True)]) == 200 + 200
    assert c.bytes_of([Piece(9, 1, True)] * 2) == 200 + 800 * (1 - 0.75 ** 2)
    assert c.bytes_of([Piece(0, 500, False)]) == pytest.approx(1000)


def test_only_an_untied_embedding_is_not_read():
    (share,) = shares(1)
    assert costs(FIGURES, share, 1000, 100, 64, 64).weight_bytes == 900
    assert costs(dataclasses.replace(FIGURES, tied=True), share, 1000, 100, 64, 64).weight_bytes == 1000


@pytest.mark.parametrize(("test", "step", "expected"), [
    (SpeedTest("tg", 128, 8, 0), 0.01, (3, 128)),        # 3.84 s of 10
    (SpeedTest("tg", 128, 8, 0), 0.05, (1, 128)),        # 6.4 s: once
    (SpeedTest("tg", 128, 8, 0), 1.0, (1, 10)),
    (SpeedTest("tg", 128, 8, 0), 100.0, (1, 4)),
    (SpeedTest("tg", 2, 8, 0), 100.0, (1, 2)),
    (SpeedTest("pp", 512, 32, 0), 0.1, (3, 32)),
    (SpeedTest("pp", 512, 32, 0), 1.0, (1, 10)),
    (SpeedTest("pp", 512, 32, 0), 60.0, (1, 1)),
    (SpeedTest("pp", 1024, 4, 0), 1.0, (1, 4)),          # two steps a sequence
])
def test_budget(test, step, expected):
    assert budget(test, step, 512, 10.0, 3) == expected


def test_planned_steps_of_decode_begin_behind_the_depth():
    steps = list(model.planned_steps(SpeedTest("tg", 5, 3, 100), 5, 64))
    assert [[(p.start, p.count, p.chooses) for p in step] for step in steps] == [
        [(position, 1, True)] * 3 for position in range(100, 105)]
    assert [p.start for step in model.planned_steps(SpeedTest("tg", 2, 1, 0), 2, 64) for p in step] == [1, 2]


def test_planned_steps_of_prefill_are_chunks_one_sequence_behind_another():
    steps = list(model.planned_steps(SpeedTest("pp", 10, 4, 7), 2, 8))
    assert [[(p.start, p.count, p.chooses) for p in step] for step in steps] == [
        [(7, 8, False)], [(15, 2, True), (7, 6, False)], [(13, 4, True)]]
    assert model.blocks_of(SpeedTest("pp", 60, 4, 5), 2) == 4        # 65 positions are two blocks of 64


def test_a_whole_batch_starts_together_however_small_the_chunk():
    first, *_ = model.planned_steps(SpeedTest("tg", 3, 5, 0), 3, 2)
    assert len(first) == 5


@pytest.mark.parametrize(("weights", "tier", "available", "expected"), [
    ("bf16", None, [("amx", "bf16"), ("avx512", "bf16"), ("any", "f32")], ("amx", "bf16")),
    ("bf16", "avx512", [("amx", "bf16"), ("avx512", "bf16"), ("any", "f32")], ("avx512", "bf16")),
    ("bf16", None, [("avx2", "int8"), ("any", "f32")], ("any", "f32")),
    ("q4_0", None, [("avx2", "int8"), ("any", "f32")], ("avx2", "int8")),
    ("q8_0", "generic", [("amx", "int8"), ("any", "f32")], ("amx", "int8")),
    ("f32", None, [("amx", "bf16"), ("any", "f32")], ("any", "f32")),
])
def test_the_peak_is_that_of_the_tier(weights, tier, available, expected):
    assert probe.peak_of_format(weights, tier, available) == expected


def test_cache_sizes(tmp_path):
    caches = [("1", "Data", "32K"), ("2", "Unified", "512K"), ("3", "Unified", "32M")]
    for index, (level, kind, size) in enumerate(caches):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", "0-3,8")):
            (folder / name).write_text(text + "\n")
    assert [probe.cache_of(level, str(tmp_path)) for level in (1, 2, 3, 4)] == [
        (0, 1), (512 << 10, 5), (32 << 20, 5), (0, 1)]


@pytest.mark.parametrize(("last_cache", "free", "ranks", "expected"), [
    (32 << 20, 64 << 30, 1, 1 << 30), (504 << 20, 64 << 30, 1, 2016 << 20), (4 << 30, 1 << 40, 2, 4 << 30),
    (32 << 20, 2 << 30, 2, 256 << 20), (32 << 20, 1 << 20, 8, 1 << 20),
])
def test_the_buffer_is_far_larger_than_the_cache(last_cache, free, ranks, expected):
    assert probe.buffer_nbytes(last_cache, free, ranks) == expected


def test_thread_counts():
    assert [machine.thread_counts(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_shares_of_the_time():
    run = model.Run(tokens=10, seconds=2.0, exchange=0.5, step=0.1, whole=2.5,
                    families={"gemm": 1.0, "attention": 0.25})
    shares = model.family_shares(run)
    assert shares == {"comm_fraction": 0.25, "python_fraction": pytest.approx(0.3),
                      "family_seconds": {"gemm": 1.0, "attention": 0.25, "exchange": 0.5}}


def test_kernel_time_is_put_into_families_without_the_exchanges(monkeypatch):
    monkeypatch.setattr(kernels.Spent, "seconds", {"sampling": 0.5, "lookup": 0.25})
    spent = {"linear": 2.0, "quantise": 0.125, "norm": 0.0625, "attention": 1.0, "exchange": 4.0}
    found = model.kernel_seconds(SimpleNamespace(seconds=lambda: spent))
    assert found == {"gemm": 2.0, "attention": 1.0, "elementwise": 0.4375, "sampling": 0.5, "exchange": 0.0}


def test_reading_reads_every_line():
    data = np.zeros(64 * 32, np.uint8)
    out = np.zeros(16, np.int64)
    for line in (0, 15, 16, 31):
        data[:] = 0
        data.view(np.int32)[16 * line + 3] = 5
        out[:] = 0
        measure.read_kernel()(data, 32, 1, out, 2)
        assert out[0] + out[8] == 5 and (out[0] == 5) == (line < 16)


X86 = "x86" in binding.get_default_triple() or "i386" in binding.get_default_triple()


@pytest.mark.skipif(not X86, reason="emits instructions of x86")
@pytest.mark.parametrize(("step", "words", "kind", "operand", "instruction"), [
    (measure._dpbusd, measure.V16I, measure.V16I, measure.V64B, "vpdpbusd"),
    (measure._dpbf16, measure.V16I, measure.V16F, measure.V32BF, "vdpbf16ps"),
    (measure._maddubs, measure.V8I, measure.V8I, measure.V32B, "vpmaddubsw"),
])
def test_the_instructions_that_are_meant(step, words, kind, operand, instruction):
    """Compiled for a processor that has them; this one need not."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = ir.Module()
    module.triple = "x86_64-unknown-linux-gnu"
    function = ir.Function(module, ir.FunctionType(words, [words, words]), "step")
    b = ir.IRBuilder(function.append_basic_block())
    acc, x = function.args
    b.ret(b.bitcast(step(b, b.bitcast(acc, kind), b.bitcast(x, operand)), words))
    target = binding.Target.from_triple(module.triple).create_target_machine(cpu="sapphirerapids")
    assert instruction in target.emit_assembly(binding.parse_assembly(str(module)))


def test_the_tiles_configuration():
    config = measure.tile_config()
    assert config[0] == 1 and config[16:32].view(np.uint16).tolist() == [64] * 8 and config[48:56].tolist() == [16] * 8
    assert not config[1:16].any() and not config[56:].any()


def row(test, batch, depth, speed):
    return {"test": test, "batch": batch, "depth": depth, "avg_ts": speed, "stddev_ts": 1.0, "limit_ts": 2 * speed,
            "model": "m", "weights": "bf16", "n_ranks": 1, "n_threads": 2, "bandwidth": 1e10}


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("b", b"\x89PNG"), ("c.pdf", b"%PDF")])
def test_the_picture(tmp_path, name, begins):
    pytest.importorskip("matplotlib")
    path = str(tmp_path / name)
    plot.check(path)
    plot.draw([row("tg8", 1, 0, 10), row("tg8", 8, 0, 50), row("tg8 @ d64", 1, 64, 5), row("pp8", 1, 0, 90)], path)
    assert open(path, "rb").read().startswith(begins)


def test_an_unknown_picture_is_refused():
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match="speed.txt: name a file that ends in png, pdf, svg"):
        plot.check("speed.txt")
