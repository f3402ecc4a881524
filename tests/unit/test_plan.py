"""Planning: the published byte tables, what can only grow, and the same bytes as the run's own counts."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_models import random_tensors, tiny, write_folder, write_gguf

from mpillm.cli.plan import plan
from mpillm.config import RunConfig
from mpillm.engine import estimate, setup
from mpillm.engine.cost import Machine, total_seconds
from mpillm.engine.estimate import Asked, Mode
from mpillm.engine.measured import read_machine
from mpillm.engine.subject import open_subject
from mpillm.errors import InputError, ModelError, OutputError, ResourceError, UsageError
from mpillm.models import deepseek_sizes as deepseek
from mpillm.models import registry
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import partition, spread

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
F16 = Asked(kv_type="f16", kv_type_v="f16")
FAST = Machine(1e11, 1e13, estimate.exchange_figures(range(1, 65), 1e-5, 1e10))


def subject(name: str):
    return open_subject(str(MODELS / name), "auto")[0]


def figures(name: str) -> deepseek.DeepSeekFigures:
    values = json.loads((MODELS / name / "config.json").read_text())
    found = deepseek.of_config(name, values, name)
    assert found is not None
    return found


def planned_json(tmp_path: Path, *arguments: object) -> dict:
    path = tmp_path / "plan.json"
    assert plan([*map(str, arguments), "--json", str(path)]) == 0
    return json.loads(path.read_text())


# Grouped queries: facts of Llama-3.3-70B, from its config.json by hand

@pytest.mark.parametrize(("tp", "held", "even", "extra", "redundant", "sharded"), [
    (8, 335.5, 335.5, 0.0, 40960, 40960), (16, 335.5, 167.8, 1.9, 40960, 20480),
    (32, 335.5, 83.9, 5.8, 40960, 10240), (64, 335.5, 41.9, 13.5, 40960, 5120)])
def test_duplicated_weights_and_cache_of_a_70b_model(tp, held, even, extra, redundant, sharded):
    model = subject("Llama-3.3-70B")
    one, gathered, cut = (model.plan(F16, tp, Mode(mode)) for mode in estimate.KV_MODES)
    twice = one.ranks[0].duplicated_kv_weight_bytes
    assert twice == pytest.approx(1e6 * (held - even), abs=1e5)
    assert gathered.ranks[0].duplicated_kv_weight_bytes == cut.ranks[0].duplicated_kv_weight_bytes == 0
    more = 100 * (one.decode.read_bytes / gathered.decode.read_bytes - 1)
    assert more == pytest.approx(extra, abs=0.6), "the feed-forward columns level nothing here"
    assert [p.cache_per_token for p in (one, gathered, cut)] == [redundant, redundant, sharded]
    assert cut.alike is one.alike is (tp == 8)
    assert cut.exchange_bytes >= gathered.exchange_bytes >= one.exchange_bytes


def test_exchanges_of_a_step():
    model = subject("Llama-3.3-70B")
    one, gathered, cut = (model.plan(F16, 32, Mode(mode)) for mode in estimate.KV_MODES)
    assert [p.exchanges for p in (one, gathered, cut)] == [163, 243, 403]
    assert one.exchange_bytes == 161 * 4 * 8192
    assert gathered.exchange_bytes == one.exchange_bytes + 80 * 2 * 4 * 128
    assert cut.exchange_bytes == gathered.exchange_bytes + 80 * 4 * 8 * (128 + 129)
    alone = model.plan(F16, 1, Mode("redundant"))
    assert alone.exchanges == alone.exchange_bytes == 0


def test_every_copy_of_a_kv_head_is_counted_once():
    """9 query heads on 3 KV heads at 5 ranks: rank 1 holds two KV heads."""
    model, columns = subject("SmolLM2-135M"), 30 * 2 * 64 * 2 * 576
    twice = [rank.duplicated_kv_weight_bytes for rank in model.plan(F16, 5, Mode("redundant")).ranks]
    copies = [sum(s.kv_heads.size for s in partition(model._sizes, 5).shares), 3]
    assert sum(twice) == pytest.approx((copies[0] - copies[1]) * columns, abs=5)
    assert twice[1] > twice[0] > 0


# Latent attention: the published byte table, and sizes that the models are known by

@pytest.mark.parametrize(("mla", "kv_type", "kv_type_v", "nbytes"), [
    (0, "f16", "f16", 4_997_120), (0, "q8_0", "q8_0", 2_654_720), (1, "f16", "f16", 132_736),
    (1, "q8_0", "f16", 99_796), (1, "q8_0", "q8_0", 70_516), (2, "f16", "f16", 70_272), (3, "f16", "q8_0", 70_272),
    (2, "q8_0", "f16", 37_332), (3, "q8_0", "q8_0", 37_332)])
def test_cache_bytes_of_deepseek_v3(mla, kv_type, kv_type_v, nbytes):
    assert deepseek.cache_bytes(figures("DeepSeek-V3"), mla, kv_type, kv_type_v, 128) == nbytes
    planned = subject("DeepSeek-V3").plan(Asked(kv_type=kv_type, kv_type_v=kv_type_v), 1, Mode("redundant", mla))
    assert planned.cache_per_token == nbytes


@pytest.mark.parametrize(("kv_type", "kv_type_v", "nbytes"), [
    ("f16", "f16", 624_640), ("q8_0", "f16", 448_960), ("q8_0", "q8_0", 331_840)])
def test_cache_bytes_as_printed_for_16_heads(kv_type, kv_type_v, nbytes):
    assert deepseek.cache_bytes(figures("DeepSeek-V3"), 0, kv_type, kv_type_v, 16) == nbytes


@pytest.mark.parametrize(("name", "total", "active"), [
    ("DeepSeek-V2-Lite", 15.7e9, 2.4e9), ("DeepSeek-V2", 236e9, 21e9), ("DeepSeek-V3", 671e9, 37e9)])
def test_parameters_of_the_deepseek_models(name, total, active):
    found = figures(name)
    assert deepseek.parameters(found) == pytest.approx(total, rel=0.005)
    embedded = deepseek.active_parameters(found) + found.vocab * found.hidden
    assert deepseek.active_parameters(found) < active * 1.03 and embedded > active * 0.99


@pytest.mark.parametrize(("tp", "more"), [(32, 77), (64, 157)])
def test_replicated_latent_projections_cost_reads(tp, more):
    found = figures("DeepSeek-V3")
    replicated = 61 * 7168 * (1536 + 576)
    held = sum(m.n * m.k * m.count for m in deepseek.matrices(found, "bf16", tp, 0, "redundant") if m.role == "latent")
    assert held == replicated == pytest.approx(0.92e9, rel=0.01)
    assert 100 * replicated * (1 - 1 / tp) / (deepseek.active_parameters(found) / tp) == pytest.approx(more, rel=0.03)
    split = [sum(m.n * m.k * m.count for m in deepseek.matrices(found, "bf16", tp, rank, "allgather")
                 if m.role == "latent") for rank in range(tp)]
    assert sum(split) == replicated


def test_attention_of_the_latent_modes():
    found = figures("DeepSeek-V3")
    whole, latent = (deepseek.attention_products(found, mla, 128) for mla in (0, 2))
    assert latent / whole == pytest.approx(3.4) and deepseek.attention_products(found, 3, 128) == latent
    assert deepseek.attention_products(found, 3, 128, 4096) / whole - 1 == pytest.approx(410 / 4096, rel=0.01)
    assert deepseek.swaps(found, "sharded")[1] - deepseek.swaps(found, "allgather")[1] == 294_912 + 262_656


@pytest.mark.parametrize("mode", ["redundant", "allgather"])
@pytest.mark.parametrize("tp", [1, 3, 32, 200])
def test_the_ranks_hold_all_of_a_deepseek_model(tp, mode):
    found = figures("DeepSeek-V2")
    held = [m for rank in range(tp) for m in deepseek.matrices(found, "f32", tp, rank, mode)]
    kept = {"router": tp, "latent": tp if mode == "redundant" else 1}
    assert sum(m.n * m.k * m.count / kept.get(m.role, 1) for m in held) == pytest.approx(deepseek.parameters(found))


@given(st.integers(0, 10**6), st.integers(1, 500))
def test_parts_are_those_of_the_partition(total, parts):
    assert tuple(deepseek.part(total, parts, number) for number in range(parts)) == spread(total, parts)


def test_experts_are_read_as_often_as_tokens_choose_them():
    found = figures("DeepSeek-V3")
    assert deepseek.read_share(found, "expert", 1) == pytest.approx(8 / 256)
    assert deepseek.read_share(found, "expert", 10_000) == pytest.approx(1)
    assert deepseek.read_share(found, "embedding", 9) == 0


def test_deepseek_from_gguf_keys():
    found = figures("DeepSeek-V2-Lite")
    keys = {"block_count": 27, "embedding_length": 2048, "feed_forward_length": 10944, "attention.head_count": 16,
            "attention.kv_lora_rank": 512, "attention.key_length": 192, "attention.value_length": 128,
            "rope.dimension_count": 64, "expert_count": 64, "expert_used_count": 6, "expert_shared_count": 2,
            "expert_feed_forward_length": 1408, "leading_dense_block_count": 1, "context_length": 163840}

    def read(values: dict) -> deepseek.DeepSeekFigures:
        named = {f"deepseek2.{key}": value for key, value in values.items()}
        return deepseek.of_gguf("x.gguf", named, 102400, False, found.name)

    assert read(keys) == found
    latent = {**keys, "attention.key_length": 576, "attention.value_length": 512, "attention.key_length_mla": 192,
              "attention.value_length_mla": 128}
    assert read(latent) == found
    with pytest.raises(ModelError, match="expert_used_count is missing"):
        del keys["expert_used_count"]
        read(keys)


# What can only grow

@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["SmolLM2-135M", "DeepSeek-V2-Lite"]), st.integers(1, 24), st.data())
def test_more_work_never_takes_less_and_better_machines_are_never_slower(name, tp, data):
    model = subject_once(name)
    mode = data.draw(st.sampled_from(model.modes()))
    asked = Asked(data.draw(st.integers(1, 8192)), data.draw(st.integers(1, 64)), data.draw(st.integers(1, 2048)))
    more = dataclasses.replace(asked, context=asked.context + data.draw(st.integers(0, 10**5)),
                               batch=asked.batch + data.draw(st.integers(0, 99)))
    one, two = (model.plan(a, tp, mode) for a in (asked, more))
    for small, large in zip(one.ranks, two.ranks, strict=True):
        assert small.weight_bytes == large.weight_bytes and small.kv_bytes_per_token == large.kv_bytes_per_token
        assert small.cache_bytes <= large.cache_bytes and small.scratch_bytes <= large.scratch_bytes
        assert small.cache_bytes >= small.kv_bytes_per_token * asked.context * asked.batch
    assert one.needed_bytes <= two.needed_bytes
    assert one.cache_tokens(one.needed_bytes) is None or one.cache_tokens(one.needed_bytes + (1 << 30)) >= \
        one.cache_tokens(one.needed_bytes)
    quicker = data.draw(st.floats(1, 50))
    before = estimate.speed(one, FAST, asked, 1)
    for better in (dataclasses.replace(FAST, read=FAST.read * quicker),
                   dataclasses.replace(FAST, operations=FAST.operations * quicker),
                   dataclasses.replace(FAST, exchanges=tuple((r, n, s / quicker) for r, n, s in FAST.exchanges))):
        after = estimate.speed(one, better, asked, 1)
        assert after.decode >= before.decode * (1 - 1e-9) and after.prefill >= before.prefill * (1 - 1e-9)
    assert estimate.speed(one, FAST, asked, 3).decode == pytest.approx(3 * before.decode)
    assert asked.batch / total_seconds(before.decode_terms) == pytest.approx(before.decode)


@functools.cache
def subject_once(name: str):
    return subject(name)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 63), st.sampled_from(["bf16", "q8_0", "q4_0"]))
def test_more_ranks_never_hold_more_of_a_deepseek_model(tp, weights):
    found = figures("DeepSeek-V2-Lite")
    few, many = (max(sum(m.nbytes for m in deepseek.matrices(found, weights, n, rank, "redundant"))
                     for rank in (0, n - 1)) for n in (tp, tp + 1))
    assert many <= few


# The counts are the run's own

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny(torch_dtype="bfloat16")
    path = tmp_path_factory.mktemp("plan") / "model"
    return write_folder(path, config, random_tensors(config), "BF16")


@pytest.mark.parametrize(("tp", "kv_mode", "weights", "kv_type"), [
    (1, "redundant", "auto", "bf16"), (3, "redundant", "q8_0", "f32"), (5, "allgather", "f32", "f16"),
    (8, "redundant", "q4_0", "bf16")])
def test_bytes_are_those_of_a_run(folder, tmp_path, tp, kv_mode, weights, kv_type):
    """Without weights (config.json alone) and with them."""
    model, checkpoint = open_model(folder)
    with checkpoint:
        opened = Weights(checkpoint, model)
        run = RunConfig("", weights=weights, kv_mode=kv_mode, kv_type=kv_type, tp=tp)
        split = setup.choose_split(run, model, opened, tp, 1 << 40)
    for where in (folder, folder + "/config.json"):
        found = planned_json(tmp_path, "--model", where, "--ranks", tp, "--kv-mode", kv_mode, "--weights", weights,
                             "--kv-type", kv_type, "--threads-per-rank", 2)
        ranks = found["per_rank"]
        assert [r["weight_bytes"] for r in ranks] == list(split.weight_bytes)
        assert [r["kv_bytes_per_token"] for r in ranks] == [
            setup.cache_block_bytes(run, model, split, rank) // 64 for rank in range(tp)]
        assert [r["scratch_bytes"] for r in ranks] == [
            setup.activation_bytes(run, model, share, 2) for share in split.partition.shares]
        assert found["weights"] == list(split.formats) and found["runs"] and found["predicted"] is None


def test_a_gguf_file_is_planned_by_its_header(tmp_path):
    import gguf

    config = tiny()
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), kind=gguf.GGMLQuantizationType.Q8_0)
    found = planned_json(tmp_path, "--model", path, "--ranks", 2)
    model, checkpoint = open_model(path)
    with checkpoint:
        split = partition(registry.sizes(model, Weights(checkpoint, model), "auto"), 2)
        assert found["per_rank"][1]["weight_bytes"] == registry.weight_bytes(
            model, Weights(checkpoint, model), split, "auto", 1)
    assert found["weights"] == ["q8_0"] and "header" in found["weights_from"]


def test_a_gguf_file_of_deepseek(tmp_path):
    import gguf
    import numpy as np

    path = tmp_path / "deepseek.gguf"
    writer = gguf.GGUFWriter(str(path), "deepseek2")
    for key, value in {"block_count": 2, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4,
                       "attention.kv_lora_rank": 64, "attention.key_length": 64, "attention.value_length": 32,
                       "rope.dimension_count": 32, "context_length": 8192}.items():
        writer.add_uint32(f"deepseek2.{key}", value)
    for name in ("token_embd.weight", "output.weight"):
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(np.ones((80, 64), np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = planned_json(tmp_path, "--model", path, "--ranks", 2, "--mla", 1, "--kv-type", "q8_0", "--kv-type-v", "f16")
    assert found["weights"] == ["q8_0"] and found["runs"] and "header" in found["weights_from"]
    assert found["per_rank"][0]["kv_bytes_per_token"] == 2 * (3 * 34 + 2 * 64)


def test_weights_that_are_not_there_do_not_matter(folder, tmp_path):
    """A clone without git-lfs: the tensors are pointers of a few lines."""
    (tmp_path / "config.json").write_text(Path(folder, "config.json").read_text())
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    found = planned_json(tmp_path, "--model", tmp_path, "--ranks", 2)
    whole = planned_json(tmp_path, "--model", folder, "--ranks", 2)
    assert found["per_rank"] == whole["per_rank"] and "git-lfs" in found["weights_from"]


def test_nothing_that_starts_mpi_is_imported(tmp_path):
    code = ("import sys; from mpillm.cli.plan import plan; "
            f"plan(['--model', {str(MODELS / 'SmolLM2-135M')!r}, '--ranks', '4']); "
            "sys.exit('mpi4py' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "ranks of a replica (redundant)" in done.stdout


# The command

def test_what_is_printed_and_written(tmp_path, capsys):
    found = planned_json(tmp_path, "--model", MODELS / "DeepSeek-V2-Lite", "--ranks", 8, "--tp", 4, "--kv-mode",
                         "sharded", "--memory-per-rank", "64GiB", "--bandwidth", 100, "--latency", 5,
                         "--plot", tmp_path / "p.png")
    out = capsys.readouterr().out
    assert "--kv-mode sharded does not run yet" in out and "mla 3 sharded" in out
    assert found["dp"] == 2 and found["tp"] == len(found["per_rank"]) == 4 and not found["runs"]
    assert found["memory"]["fits"] and found["predicted"]["prefill_tokens_per_s"] is None
    assert found["predicted"]["decode_tokens_per_s"] > 0
    assert found["kv_bytes_per_token"]["mla 3 sharded"]["f16"] == 27 * 576 * 2 // 4
    assert {row["tp"] for row in found["table"]} == {1, 2, 4}
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (["--model", "SmolLM2-135M", "--ranks", "4", "--mla", "2"], UsageError, "--mla 2 is for models with latent"),
    (["--model", "DeepSeek-V3", "--ranks", "4", "--mla", "0", "--kv-mode", "sharded"], UsageError, "--mla 0 caches"),
    (["--model", "SmolLM2-135M", "--ranks", "4", "--tp", "5"], UsageError, "--tp 5 does not go into 4"),
    (["--model", "SmolLM2-135M", "--ranks", "4", "--context", "9000"], UsageError, "beyond the model's 8192"),
    (["--model", "SmolLM2-135M", "--ranks", "0"], UsageError, "--ranks: '0' is not"),
    (["--model", "SmolLM2-135M"], UsageError, "--ranks"),
    (["--model", "SmolLM2-135M", "--ranks", "9000"], UsageError, "no more than 8192"),
    (["--model", "SmolLM2-135M", "--ranks", "4", "--latency", "3"], UsageError, "predict nothing without"),
    (["--model", "SmolLM2-135M", "--ranks", "4", "--machine", "no.json"], InputError, "No such file"),
    (["--model", "SmolLM2-135M", "--ranks", "4", "--json", "no/where"], OutputError, "cannot be written"),
    (["--model", "None", "--ranks", "4"], ModelError, "No such file"),
    (["--model", "Llama-3.3-70B", "--ranks", "64", "--batch", "256", "--memory-per-rank", "12GiB"], ResourceError,
     "redundant at 64 ranks needs .* these fit: sharded at 64 ranks"),
    (["--model", "Llama-3.3-70B", "--ranks", "4", "--memory-per-rank", "1GiB"], ResourceError, "none of the modes"),
])
def test_errors_name_the_value_and_the_remedy(arguments, error, message):
    with pytest.raises(error, match=message):
        plan([str(MODELS / a) if at == 1 else a for at, a in enumerate(arguments)])


def test_a_quantised_type_that_does_not_fit_is_left_out_of_the_table(folder, tmp_path):
    """Heads of 16 values have no blocks of 32."""
    found = planned_json(tmp_path, "--model", folder, "--ranks", 2)
    assert found["kv_bytes_per_token"]["redundant"]["q8_0"] is None
    with pytest.raises(UsageError, match="q8_0 needs head sizes"):
        plan(["--model", folder, "--ranks", "2", "--kv-type", "q8_0"])


def test_the_measured_machine(tmp_path):
    def rate(test, best, unit, **more):
        return {"test": test, "n_ranks": 2, "n_threads": 1, "unit": unit, "best": best, "median": best / 2, **more}

    rows = [rate("read memory", 3e10, "bytes/s"), {**rate("read memory", 4e10, "bytes/s"), "n_threads": 2},
            rate("read L2", 9e11, "bytes/s"), rate("peak f32", 1e11, "operations/s"),
            rate("peak int8 avx2", 4e11, "operations/s"),
            rate("all-reduce shm", 2e-6, "s", nbytes=4096), rate("all-reduce mpi", 9e-6, "s", nbytes=4096)]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(rows))
    assert read_machine(str(path), ("bf16",)) == Machine(2e10, 5e10, ((2, 4096, 1e-6),))
    assert read_machine(str(path), ("q8_0", "q4_0"), 4) == Machine(1e10, 1e11, ((2, 4096, 1e-6),))
    for text in ("[]", "{}", "[1]", "nothing", '[{"test": 1}]'):
        path.write_text(text)
        with pytest.raises(InputError, match="is not what `mpillm bench machine"):
            read_machine(str(path), ("bf16",))
