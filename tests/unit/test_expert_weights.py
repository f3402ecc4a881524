"""Experts' figures and weights: where files keep them, what a rank reads and holds, and what is refused."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_models import finish, gguf_tensors, gguf_writer, random_tensors, tiny, write_folder

from mpillm import kernels
from mpillm.errors import ModelError, UsageError
from mpillm.models import registry
from mpillm.models.load import Loader
from mpillm.models.load_experts import read_experts
from mpillm.models.parse import open_model
from mpillm.models.parse_hf import hf_config
from mpillm.models.stated import stated_model
from mpillm.models.weights import Weights
from mpillm.partition import Sizes, Span, partition, phase_bytes, step_bytes

COUNT, WIDTH, HIDDEN = 5, 64, 96
MIXTRAL = tiny(architectures=["MixtralForCausalLM"], model_type="mixtral", intermediate_size=WIDTH,
               num_local_experts=COUNT, num_experts_per_tok=2)
QWEN3 = tiny(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", moe_intermediate_size=WIDTH,
             num_experts=COUNT, num_experts_per_tok=3, norm_topk_prob=True)
PARTS = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}


class _Alone:
    tp = 1

    def all_reduce(self, array):
        pass

    def exchange_arguments(self):
        return None


def expert_values(layer: int, part: str) -> np.ndarray:
    rng = np.random.default_rng([layer, len(part)])
    return rng.uniform(-1, 1, (COUNT, *PARTS[part])).astype(np.float32)


def others(config: dict) -> dict[str, np.ndarray]:
    """All tensors but experts, a router included."""
    tensors = {name: x for name, x in random_tensors(config).items() if ".mlp." not in name}
    for layer in range(2):
        router = np.random.default_rng(layer).normal(size=(COUNT, HIDDEN)).astype(np.float32)
        block = "block_sparse_moe" if config["model_type"] == "mixtral" else "mlp"
        tensors[f"model.layers.{layer}.{block}.gate.weight"] = router
    if config["model_type"] == "qwen3_moe":
        for layer in range(2):
            for name in ("q_norm", "k_norm"):
                tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = np.ones(16, np.float32)
    return tensors


def apart(config: dict) -> dict[str, np.ndarray]:
    """A folder's tensors, each expert's by themselves."""
    names = {"gate": "w1", "up": "w3", "down": "w2"} if config["model_type"] == "mixtral" else {}
    block = "block_sparse_moe" if names else "mlp"
    return others(config) | {
        f"model.layers.{layer}.{block}.experts.{e}.{names.get(part, f'{part}_proj')}.weight": x
        for layer in range(2) for part in PARTS for e, x in enumerate(expert_values(layer, part))}


def fused(config: dict) -> dict[str, np.ndarray]:
    """The same with a layer's gate and up in one tensor of three axes, and its down projections in another."""
    tensors = {name.replace("block_sparse_moe", "mlp"): x for name, x in others(config).items()}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        tensors[at + "gate_up_proj"] = np.concatenate([expert_values(layer, part) for part in ("gate", "up")], axis=1)
        tensors[at + "down_proj"] = expert_values(layer, "down")
    return tensors


def as_gguf(path, stacked: bool) -> str:
    """A Mixtral as GGUF files have it; old ones have each expert's tensors by themselves."""
    writer = gguf_writer(path, MIXTRAL)
    writer.add_expert_count(COUNT)
    writer.add_expert_used_count(2)
    tensors = {name: x for name, x in others(MIXTRAL).items() if "block_sparse_moe" not in name}
    for name, x in gguf_tensors(MIXTRAL, tensors, "llama").items():
        writer.add_tensor(name, x)
    for layer in range(2):
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight",
                          others(MIXTRAL)[f"model.layers.{layer}.block_sparse_moe.gate.weight"])
        for part in PARTS:
            values = expert_values(layer, part)
            if stacked:
                writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", values)
            for e, x in enumerate(() if stacked else values):
                writer.add_tensor(f"blk.{layer}.ffn_{part}.{e}.weight", x)
    finish(writer)
    return str(path)


def write(folder, how: str) -> str:
    if how.startswith("gguf"):
        return as_gguf(folder / "m.gguf", how == "gguf")
    config = QWEN3 if "qwen3" in how else MIXTRAL
    return write_folder(folder / how, config, fused(config) if "fused" in how else apart(config))


def loaders(path: str, tp: int, asked: str, moe_split: str = "columns"):
    config, checkpoint = open_model(path)
    weights = Weights(checkpoint, config)
    split = partition(registry.sizes(config, weights, asked), tp, "redundant", moe_split)
    for rank, share in enumerate(split.shares):
        yield config, weights, split, rank, Loader(config, weights, share, asked, _Alone())
    checkpoint.close()


@pytest.mark.parametrize("how", ["mixtral", "mixtral fused", "qwen3", "qwen3 fused", "gguf", "gguf old"])
def test_every_layout_of_files_gives_the_same_slices(tmp_path, how):
    path = write(tmp_path, how)
    for config, weights, split, rank, loader in loaders(path, 3, "f32"):
        before = weights.checkpoint.bytes_read
        layer, span = read_experts(loader, "model.layers.1.").experts, split.shares[rank].columns
        read = weights.checkpoint.bytes_read - before
        assert read == 4 * COUNT * HIDDEN * (3 * span.size + 1), "a rank reads its own slices"
        gate_up = kernels.lookup(layer.gate_up, np.arange(layer.gate_up.n)).reshape(COUNT, -1, 2, 16, HIDDEN)
        for tensor, part in enumerate(("gate", "up")):
            found = gate_up[:, :, tensor].reshape(COUNT, -1, HIDDEN)
            assert np.array_equal(found, expert_values(1, part)[:, span.start:span.stop]), part
        down = kernels.lookup(layer.down, np.arange(layer.down.n)).reshape(COUNT, HIDDEN, -1)
        assert np.array_equal(down, expert_values(1, "down")[:, :, span.start:span.stop])
        assert (layer.router.chosen, layer.router.normed) == (config.experts_chosen, True)


@pytest.mark.parametrize("moe_split", ["columns", "experts"])
@pytest.mark.parametrize("asked", ["f32", "bf16", "q8_0"])
@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 3, "mlp_only_layers": [1]}])
def test_bytes_are_known_before_loading(tmp_path, asked, changes, moe_split):
    config = QWEN3 | changes
    tensors = apart(config)
    if changes:
        tensors = {name: x for name, x in tensors.items() if not name.startswith("model.layers.1.mlp")}
        dense = random_tensors(tiny(intermediate_size=160, num_hidden_layers=3))
        tensors |= {name: x for name, x in dense.items() if name.startswith(("model.layers.1.mlp", "model.layers.2."))
                    and "layers.2.mlp" not in name}
        tensors |= {name.replace("layers.0", "layers.2"): x for name, x in tensors.items() if "layers.0.mlp" in name}
        tensors |= {f"model.layers.2.self_attn.{name}.weight": np.ones(16, np.float32) for name in ("q_norm", "k_norm")}
    path = write_folder(tmp_path / "m", config, tensors)
    for tp in (1, 3, 6):
        for figures, weights, split, rank, loader in loaders(path, tp, asked, moe_split):
            registry.BUILDERS["qwen3_moe"](figures, loader, None)
            assert loader.nbytes == registry.weight_bytes(figures, weights, split, asked, rank), (tp, rank)


def test_figures_of_both_architectures():
    found = hf_config("c", MIXTRAL, {})
    assert (found.experts, found.experts_chosen, found.expert_intermediate) == (COUNT, 2, WIDTH)
    assert found.routing.normed and found.has_experts(0) and found.windows == (None, None)
    found = hf_config("c", QWEN3 | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3],
                                    "norm_topk_prob": False}, {})
    assert found.dense == (0, 2, 3, 4) and not found.routing.normed and found.qk_norm
    renamed = {key: value for key, value in QWEN3.items() if key != "num_experts"} | {"num_local_experts": 7}
    assert hf_config("c", renamed, {}).experts == 7


@pytest.mark.parametrize("changes, words", [
    ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6, but there are 5 experts (num_local_experts)"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0"), ({"num_local_experts": -1}, "num_local_experts is -1"),
    ({"num_local_experts": 10 ** 6}, "num_local_experts is 1000000, more than 4096"),
    ({"intermediate_size": None}, "intermediate_size is missing")])
def test_impossible_figures_are_named(changes, words):
    with pytest.raises(ModelError) as caught:
        hf_config("c", MIXTRAL | changes, {})
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("changes, words", [
    ({"moe_intermediate_size": 1.5}, "moe_intermediate_size is 1.5"), ({"norm_topk_prob": 1}, "norm_topk_prob is 1"),
    ({"mlp_only_layers": 3}, "mlp_only_layers is 3"), ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0")])
def test_impossible_figures_of_qwen3_are_named(changes, words):
    with pytest.raises(ModelError) as caught:
        hf_config("c", QWEN3 | changes, {})
    assert words in str(caught.value)


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    tensors = apart(MIXTRAL)
    name = "model.layers.1.block_sparse_moe.experts.4.w3.weight"
    whole = tensors.pop(name)
    with pytest.raises(ModelError, match=rf"tensor {name} .*is missing"):
        open_model(write_folder(tmp_path / "a", MIXTRAL, tensors))
    with pytest.raises(ModelError, match=rf"tensor {name} .*has shape \(63, 96\), but .* give \(64, 96\)"):
        open_model(write_folder(tmp_path / "b", MIXTRAL, tensors | {name: whole[:63]}))
    tensors = fused(MIXTRAL)
    name = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(ModelError, match=rf"tensor {name} .*has shape \(4, 96, 64\), but .* give \(5, 96, 64\)"):
        open_model(write_folder(tmp_path / "c", MIXTRAL, tensors | {name: tensors[name][:4]}))


SIZES = st.builds(Sizes, hidden=st.just(64), n_layers=st.integers(2, 4), n_heads=st.just(6), n_kv_heads=st.just(2),
                  head_dim=st.just(8), intermediate=st.integers(1, 300), vocab=st.just(400), experts=st.integers(2, 9),
                  experts_chosen=st.integers(1, 2), dense_layers=st.integers(0, 1),
                  dense_intermediate=st.integers(0, 200), shared=st.integers(0, 2))


@settings(max_examples=90, deadline=None)
@given(SIZES, st.integers(1, 9), st.sampled_from(["columns", "experts"]))
def test_a_step_reads_the_chosen_experts_once(s, tp, moe_split):
    p = partition(s, tp, moe_split=moe_split)
    split = [x.columns if moe_split == "columns" else x.experts for x in p.shares]
    whole = {x.experts if moe_split == "columns" else x.columns for x in p.shares}
    assert whole == {Span(0, s.experts if moe_split == "columns" else s.intermediate)}
    for spans, total in ((split, s.intermediate if moe_split == "columns" else s.experts),
                         ([x.dense_columns for x in p.shares], s.dense_intermediate),
                         ([x.shared_columns for x in p.shares], s.shared * s.intermediate)):
        assert spans[0].start == 0 and spans[-1].stop == total
        assert all(one.stop == other.start for one, other in zip(spans, spans[1:], strict=False))
    sparse = 3 * s.intermediate * s.hidden * (s.n_layers - s.dense_layers) * s.bytes_ffn
    dense = 3 * s.dense_intermediate * s.hidden * s.dense_layers * s.bytes_ffn
    ranks = range(tp)
    assert sum(phase_bytes(p, r)[1] for r in ranks) == pytest.approx(sparse * (s.experts_chosen + s.shared) + dense)
    one, many, all_of_them = (sum(step_bytes(p, r, rows) for r in ranks) for rows in (1, 2, 10 ** 6))
    assert one <= many <= all_of_them * (1 + 1e-9)
    assert all_of_them - one == pytest.approx(sparse * (s.experts - s.experts_chosen), abs=1e-3)


def test_experts_are_dealt_whole_where_slices_would_cut_quantisation_blocks():
    s = Sizes(64, 2, 6, 2, 8, 96, 320, experts=7, experts_chosen=2)
    assert [partition(s, tp, moe_split="auto").moe_split for tp in (1, 3, 4)] == ["columns", "columns", "experts"]
    assert [share.experts.size for share in partition(s, 4, moe_split="auto").shares] == [2, 2, 2, 1]
    dense = Sizes(64, 2, 6, 2, 8, 32, 320)
    assert partition(dense, 4, moe_split="auto").moe_split == "columns"
    with pytest.raises(UsageError, match="moe-split experts is for models with experts"):
        partition(dense, 4, moe_split="experts")
    with pytest.raises(UsageError, match="moe-split 'rows' is unknown: use columns, experts or auto"):
        partition(s, 4, moe_split="rows")


def test_models_without_experts_have_no_columns_of_that_kind():
    s = Sizes(64, 2, 4, 2, 16, 96, 320)
    assert [share.dense_columns for share in partition(s, 3).shares] == [Span(0, 0)] * 3


def test_gguf_with_shared_experts_is_refused(tmp_path):
    writer = gguf_writer(tmp_path / "m.gguf", MIXTRAL)
    writer.add_expert_count(COUNT)
    writer.add_expert_used_count(2)
    writer.add_expert_shared_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((307, HIDDEN), np.float32),
                      raw_dtype=gguf.GGMLQuantizationType.F32)
    finish(writer)
    with pytest.raises(ModelError, match="expert_shared_count is 1, which is not supported"):
        open_model(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("how", ["mixtral", "qwen3"])
def test_config_json_alone_gives_the_same_bytes(tmp_path, how):
    path = write(tmp_path, how)
    config, stated = stated_model(f"{path}/config.json")
    for _, weights, split, rank, _ in loaders(path, 3, "bf16"):
        wanted = registry.weight_bytes(config, weights, split, "bf16", rank)
        assert registry.weight_bytes(config, stated, split, "bf16", rank) == wanted
