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
from mpillm.engine import estimate, kvcache, setup
from mpillm.engine.cost import Machine, total_seconds
from mpillm.engine.estimate import Asked, Mode
from mpillm.engine.measured import read_machine
from mpillm.engine.subject import open_subject
from mpillm.errors import InputError, ModelError, OutputError, ResourceError, UsageError
from mpillm.models import registry
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import partition

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
F16 = Asked(kv_type="f16", kv_type_v="f16")
FAST = Machine(1e11, 1e13, estimate.exchange_figures(range(1, 65), 1e-5, 1e10))


def subject(name: str):
    return open_subject(str(MODELS / name), "auto")[0]


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
    assert [p.exchanges for p in (one, gathered, cut)] == [163, 243, 323]
    assert one.exchange_bytes == 161 * 4 * 8192
    assert gathered.exchange_bytes == one.exchange_bytes + 80 * 2 * 4 * 128
    # Queries of 8 heads to all 4 ranks of a row; outputs and log-sum-exps of 2 heads from all 4
    assert cut.exchange_bytes == gathered.exchange_bytes + 80 * 4 * (8 * 128 + 4 * 2 * 129)
    alone = model.plan(F16, 1, Mode("redundant"))
    assert alone.exchanges == alone.exchange_bytes == 0


def test_every_copy_of_a_kv_head_is_counted_once():
    """9 query heads on 3 KV heads at 5 ranks: rank 1 holds two KV heads."""
    model, columns = subject("SmolLM2-135M"), 30 * 2 * 64 * 2 * 576
    twice = [rank.duplicated_kv_weight_bytes for rank in model.plan(F16, 5, Mode("redundant")).ranks]
    copies = [sum(s.kv_heads.size for s in partition(model._sizes, 5).shares), 3]
    assert sum(twice) == pytest.approx((copies[0] - copies[1]) * columns, abs=5)
    assert twice[1] > twice[0] > 0


# Latent attention: the published byte table, by the run's own cache, and sizes that the models are known by

@pytest.mark.parametrize(("tp", "mla", "kv_type", "kv_type_v", "nbytes"), [
    (1, 0, "f16", "f16", 4_997_120), (1, 0, "q8_0", "q8_0", 2_654_720), (1, 1, "f16", "f16", 132_736),
    (1, 1, "q8_0", "f16", 99_796), (1, 1, "q8_0", "q8_0", 70_516), (1, 2, "f16", "f16", 70_272),
    (1, 3, "f16", "f16", 70_272), (1, 2, "q8_0", "q8_0", 37_332), (1, 3, "q8_0", "q8_0", 37_332),
    # As printed for 16 heads, which each of 8 ranks has
    (8, 0, "f16", "f16", 624_640), (8, 0, "q8_0", "f16", 448_960), (8, 0, "q8_0", "q8_0", 331_840)])
def test_cache_bytes_of_deepseek_v3(tp, mla, kv_type, kv_type_v, nbytes):
    model = dataclasses.replace(subject_once("DeepSeek-V3").model, mla=mla)
    run = RunConfig("", kv_type=kv_type, kv_type_v=kv_type_v, mla=str(mla))
    share = partition(subject_once("DeepSeek-V3")._sizes, tp).shares[0]
    assert sum(layer.nbytes for layer in kvcache.share_cache(run, model, share, 1)) == 64 * nbytes
    planned = subject_once("DeepSeek-V3").plan(Asked(kv_type=kv_type, kv_type_v=kv_type_v), tp, Mode("redundant", mla))
    assert planned.cache_per_token == nbytes


@pytest.mark.parametrize(("name", "total", "active"), [
    ("DeepSeek-V2-Lite", 15.7e9, 2.4e9), ("DeepSeek-V2", 236e9, 21e9), ("DeepSeek-V3", 671e9, 37e9)])
def test_parameters_of_the_deepseek_models(name, total, active):
    model = subject_once(name).model
    found, used = estimate.parameters(model)
    assert found == pytest.approx(total, rel=0.005)
    assert used < active * 1.03 and used + model.vocab * model.hidden > active * 0.99


@pytest.mark.parametrize(("tp", "more"), [(32, 77), (64, 157)])
def test_replicated_latent_projections_cost_reads(tp, more):
    """0.92 G parameters of q_a and kv_a in bf16, on every rank."""
    model = subject_once("DeepSeek-V3")
    replicated = 61 * 7168 * (1536 + 576)
    assert replicated == pytest.approx(0.92e9, rel=0.01)
    one, cut = (model.plan(Asked(), tp, Mode(mode, 3)) for mode in ("redundant", "allgather"))
    twice = {rank.duplicated_kv_weight_bytes for rank in one.ranks}
    assert twice == {round(2 * replicated * (1 - 1 / tp))}
    assert {rank.duplicated_kv_weight_bytes for rank in cut.ranks} == {0}
    held = sum(rank.weight_bytes for rank in one.ranks) - sum(rank.weight_bytes for rank in cut.ranks)
    assert held == pytest.approx(2 * replicated * (tp - 1), rel=0.01), "panels are filled up"
    active = estimate.parameters(model.model)[1]
    assert 100 * replicated * (1 - 1 / tp) / (active / tp) == pytest.approx(more, rel=0.03)
    assert cut.exchange_bytes - one.exchange_bytes == 61 * 4 * (1536 + 576)


@pytest.mark.parametrize("tp", [2, 32, 48])
def test_a_sharded_cache_of_latents(tp):
    """Each rank has 1 / tp of the positions, and hears all queries in the latent's space and its heads' parts."""
    model, asked = subject_once("DeepSeek-V3"), Asked(context=64 * 1024, batch=2, kv_type="f16")
    one, cut = (model.plan(asked, tp, Mode(*mode)) for mode in (("allgather", 3), ("sharded", 2)))
    assert {rank.kv_bytes_per_token for rank in cut.ranks} == {70_272 // tp}
    blocks = -(-1024 // tp)
    assert {rank.cache_bytes for rank in cut.ranks} == {2 * blocks * 64 * 70_272}
    own = -(-128 // tp)
    assert cut.exchange_bytes - one.exchange_bytes == 61 * 4 * (128 * (512 + 64) + tp * own * (512 + 1))
    assert cut.decode.swaps == 3 * 61 and cut.exchanges - one.exchanges == 2 * 61
    assert cut.decode.attention_products * tp == pytest.approx(61 * 128 * (2 * 512 + 64))
    assert [r.weight_bytes for r in cut.ranks] == [
        r.weight_bytes for r in model.plan(asked, tp, Mode("allgather", 2)).ranks]


def test_attention_of_the_latent_modes():
    model = subject_once("DeepSeek-V3").model
    whole, latent, third = (dataclasses.replace(model, mla=mla) for mla in (0, 2, 3))
    one = estimate.attending(whole, 128)
    assert estimate.attending(latent, 128) / one == pytest.approx(3.4)
    assert estimate.attending(third, 128) == estimate.attending(latent, 128)
    assert estimate.attending(third, 128, 4096) / one - 1 == pytest.approx(410 / 4096, rel=0.01)


def test_auto_takes_longer_steps_and_values_have_a_type_where_there_are_some(tmp_path):
    found = planned_json(tmp_path, "--model", MODELS / "DeepSeek-V2-Lite", "--ranks", 2)
    assert found["mla"] == 3 and found["prefill_chunk"] == setup.LATENT_CHUNK and found["kv_type_v"] is None
    found = planned_json(tmp_path, "--model", MODELS / "DeepSeek-V2-Lite", "--ranks", 2, "--mla", 1, "--kv-type",
                         "q8_0", "--kv-type-v", "f16")
    assert found["prefill_chunk"] == 512 and found["kv_type_v"] == "f16"
    assert found["per_rank"][0]["kv_bytes_per_token"] == 27 * (576 // 32 * 34 + 2 * 512)


def test_a_row_of_the_table_is_the_plan_of_its_mode(tmp_path):
    where = ["--model", MODELS / "DeepSeek-V2-Lite", "--ranks", 3]
    table = {row["mode"]: row for row in planned_json(tmp_path, *where)["table"] if row["tp"] == 3}
    for mla, kv_mode in ((0, "redundant"), (1, "redundant"), (2, "redundant"), (2, "sharded")):
        own = planned_json(tmp_path, *where, "--mla", mla, "--kv-mode", kv_mode)
        row = table[f"mla {mla} {kv_mode}"]
        assert row["prefill_chunk"] == own["prefill_chunk"] == 512
        assert row["scratch_bytes"] == max(rank["scratch_bytes"] for rank in own["per_rank"])
    assert table["mla 3 redundant"]["prefill_chunk"] == setup.LATENT_CHUNK


def test_scratch_is_bounded_by_its_option_and_experts_may_be_dealt(tmp_path):
    where = ["--model", MODELS / "DeepSeek-V2-Lite", "--ranks", 5, "--threads-per-rank", 4, "--mla", 3]
    large, small = (planned_json(tmp_path, *where, "--attention-scratch", size)["per_rank"][0]["scratch_bytes"]
                    for size in ("64MiB", "16MiB"))
    assert 8 << 20 < large - small <= 2 * (48 << 20), "of stretches' sums, and of keys and values made of latents"
    cut, dealt = (planned_json(tmp_path, *where, "--moe-split", split)["per_rank"] for split in ("columns", "experts"))
    own, other = ([rank["weight_bytes"] for rank in ranks] for ranks in (cut, dealt))
    assert sum(own) == pytest.approx(sum(other), rel=0.01)
    assert own != other, "whole experts are 13, 13, 13, 13 and 12 of 64"


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
    before = estimate.speed(one, FAST, 1)
    for better in (dataclasses.replace(FAST, read=FAST.read * quicker),
                   dataclasses.replace(FAST, operations=FAST.operations * quicker),
                   dataclasses.replace(FAST, exchanges=tuple((r, n, s / quicker) for r, n, s in FAST.exchanges))):
        after = estimate.speed(one, better, 1)
        assert after.decode >= before.decode * (1 - 1e-9) and after.prefill >= before.prefill * (1 - 1e-9)
    assert estimate.speed(one, FAST, 3).decode == pytest.approx(3 * before.decode)
    assert asked.batch / total_seconds(before.decode_terms) == pytest.approx(before.decode)


@functools.cache
def subject_once(name: str):
    """Opened once."""
    return subject(name)


# The counts are the run's own

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny(torch_dtype="bfloat16")
    path = tmp_path_factory.mktemp("plan") / "model"
    return write_folder(path, config, random_tensors(config), "BF16")


@pytest.mark.parametrize(("tp", "kv_mode", "weights", "kv_type"), [
    (1, "redundant", "auto", "bf16"), (3, "redundant", "q8_0", "f32"), (5, "allgather", "f32", "f16"),
    (5, "sharded", "f32", "bf16"), (8, "redundant", "q4_0", "bf16")])
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
            setup.cache_block_bytes(run, model, split, rank) // (64 * split.partition.places) for rank in range(tp)]
        assert all(0 < r["scratch_bytes"] <= setup.activation_bytes(run, model, share, 2, split.partition.places)
                   for r, share in zip(ranks, split.partition.shares, strict=True))
        assert found["weights"] == list(split.formats) and found["predicted"] is None


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
                         "allgather", "--memory-per-rank", "64GiB", "--bandwidth", 100, "--latency", 5,
                         "--plot", tmp_path / "p.png")
    out = capsys.readouterr().out
    assert "latent 512 + 64" in out and "mla 3 allgather" in out
    assert found["dp"] == 2 and found["tp"] == len(found["per_rank"]) == 4
    assert found["memory"]["fits"] and found["predicted"]["prefill_tokens_per_s"] is None
    assert found["predicted"]["decode_tokens_per_s"] > 0
    assert found["kv_bytes_per_token"]["mla 3 allgather"]["f16"] == 27 * 576 * 2
    assert "mla 2 sharded" in out and found["kv_bytes_per_token"]["mla 2 sharded"]["f16"] == 27 * 576 * 2 // 4
    cut = planned_json(tmp_path, "--model", MODELS / "DeepSeek-V2-Lite", "--ranks", 8, "--kv-mode", "sharded")
    assert (cut["mla"], cut["prefill_chunk"]) == (2, 512)
    assert {row["tp"] for row in found["table"]} == {1, 2, 4}
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (["--model", "SmolLM2-135M", "--ranks", "4", "--mla", "2"], UsageError, "--mla 2 is for models with latent"),
    (["--model", "DeepSeek-V3", "--ranks", "4", "--mla", "2", "--kv-type-v", "f16"], UsageError,
     "--mla 2 caches no values"),
    (["--model", "DeepSeek-V3", "--ranks", "4", "--mla", "3", "--kv-mode", "sharded"], UsageError, "use --mla 1 or 2"),
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
