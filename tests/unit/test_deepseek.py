"""DeepSeek-V2 and V3: figures, and where files keep tensors, in every layout that is about."""

from __future__ import annotations

import dataclasses
import math

import gguf
import ml_dtypes
import numpy as np
import pytest
from made_deepseek import KV_LAYOUTS, V2, V3, YARN, tensors, write_gguf
from made_float8 import write_float8
from made_models import write_folder

from mpillm.errors import ModelError
from mpillm.models.config import Routing
from mpillm.models.parse import open_model
from mpillm.models.parse_hf import hf_config
from mpillm.models.weights import Weights, expected

HEADS, NOPE, ROPE, VALUE, RANK = 10, 24, 8, 40, 72


def halves_apart(rows: np.ndarray) -> np.ndarray:
    """Pairs that are neighbours as two halves."""
    return np.concatenate([rows[0::2], rows[1::2]])


def wanted(name: str, x: np.ndarray) -> np.ndarray:
    """A tensor with its rotated rows in halves, by slicing."""
    part, out = name.split(".")[-2], x.copy()
    if part in ("q_proj", "q_b_proj"):
        for head in range(HEADS):
            at = head * (NOPE + ROPE) + NOPE
            out[at:at + ROPE] = halves_apart(x[at:at + ROPE])
    elif part == "kv_a_proj_with_mqa":
        out[RANK:] = halves_apart(x[RANK:])
    return out


def opened(path: str) -> Weights:
    config, checkpoint = open_model(path)
    return Weights(checkpoint, config)


def test_figures():
    third = hf_config("c", V3 | {"rope_scaling": YARN}, {})
    assert (third.architecture, third.n_kv_heads, third.head_dim, third.rotated) == ("deepseek_v3", 1, 32, 8)
    assert (third.q_rank, third.kv_rank, third.nope_dim, third.rope_dim, third.value_dim) == (96, 72, 24, 8, 40)
    assert third.routing == Routing("sigmoid", True, 4, 2, 2, True, 2.5) and third.dense == (0,)
    assert (third.experts, third.experts_chosen, third.shared_experts, third.expert_intermediate) == (8, 3, 2, 64)
    assert third.interleaved and third.latent and third.windows == (None,) * 3 and third.context == 40 * 64
    sharper = (0.1 * math.log(40) + 1) ** 2
    assert third.softmax_scale == pytest.approx(32 ** -0.5 * sharper, rel=1e-12)
    second = hf_config("c", V2, {})
    assert second.routing == Routing("softmax", False, 4, 2, 1, False, 1.5) and second.q_rank == 0
    assert second.softmax_scale == 32 ** -0.5
    assert hf_config("c", V2 | {"topk_method": "greedy"}, {}).routing == Routing(normed=False, scale=1.5)
    assert hf_config("c", V2 | {"n_routed_experts": None}, {}).experts == 0


def test_absent_keys_have_the_values_of_transformers_classes():
    least = {"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 5,
             "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 90}
    third = hf_config("c", least, {})
    assert (third.q_rank, third.kv_rank, third.nope_dim, third.rope_dim, third.value_dim) == (1536, 512, 128, 64, 128)
    assert third.routing == Routing("sigmoid", True, 8, 4, 2, True, 2.5) and third.dense == (0, 1, 2)
    assert (third.experts, third.experts_chosen, third.shared_experts, third.expert_intermediate) == (256, 8, 1, 2048)
    assert (third.bos_id, third.eos_ids, third.max_positions, third.rms_eps) == (0, (1,), 4096, 1e-6)
    second = hf_config("c", least | {"architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 6}, {})
    assert second.routing == Routing(normed=False) and second.dense == ()
    assert (second.experts, second.shared_experts, second.expert_intermediate) == (64, 2, 1407)
    assert (second.bos_id, second.eos_ids, second.max_positions) == (1, (2,), 2048)


@pytest.mark.parametrize("stated, interleaved", [
    ({}, True), ({"rope_interleave": True}, True), ({"rope_interleave": False}, False),
    ({"rope_interleave": None}, False)])
def test_pairs_are_neighbours_unless_the_config_says_no(stated, interleaved):
    assert hf_config("c", V3 | stated, {}).interleaved is interleaved
    assert hf_config("c", V2 | stated, {}).interleaved, "transformers' V2 has no such option"


def test_normed_weights_are_left_out_of_the_second_with_a_warning():
    warnings: list[str] = []
    assert not hf_config("c", V2 | {"norm_topk_prob": True}, {}, "", warnings).routing.normed
    assert len(warnings) == 1 and "norm_topk_prob" in warnings[0]


@pytest.mark.parametrize("config, changes, words", [
    (V3, {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7: rotary positions need an even width"),
    (V3, {"n_group": 3}, r"8 experts cannot be cut into 3 groups \(n_group\)"),
    (V3, {"n_group": 8}, r"into 8 groups \(n_group\) of equal size, of 2 or more"),
    (V3, {"topk_group": 5}, r"topk_group is 5, but there are 4 groups \(n_group\)"),
    (V3, {"num_experts_per_tok": 5}, r"num_experts_per_tok is 5, but the 2 best groups \(topk_group\) have 4 experts"),
    (V3, {"num_experts_per_tok": 9}, r"num_experts_per_tok is 9, but there are 8 experts"),
    (V3, {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported: it must be 'sigmoid' here"),
    (V3, {"topk_method": "greedy"}, "topk_method 'greedy' is not supported: it must be 'noaux_tc' here"),
    (V3, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported: it must be 1"),
    (V3, {"kv_lora_rank": 0}, "kv_lora_rank is 0, it must be a positive whole number"),
    (V3, {"q_lora_rank": -1}, "q_lora_rank is -1"), (V3, {"v_head_dim": 1.5}, "v_head_dim is 1.5"),
    (V3, {"rope_interleave": 1}, "rope_interleave is 1, it must be true or false"),
    (V2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported for deepseek_v2"),
    (V2, {"n_group": None}, "n_group is missing"), (V2, {"mlp_bias": True}, "mlp_bias true is not supported"),
    (V2, {"routed_scaling_factor": -1}, "routed_scaling_factor is -1")])
def test_impossible_figures_are_named(config, changes, words):
    with pytest.raises(ModelError, match=words) as caught:
        hf_config("c", config | changes, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [V2, V3, V3 | {"q_lora_rank": None}], ids=["v2", "v3", "v3 without q_lora"])
@pytest.mark.parametrize("layout", ["folder", *KV_LAYOUTS])
def test_every_layout_gives_the_same_tensors(tmp_path, config, layout):
    found = tensors(config)
    path = write_folder(tmp_path / "m", config, found) if layout == "folder" else \
        write_gguf(tmp_path / "m.gguf", config, found, layout)
    weights = opened(path)
    assert weights.config.architecture == config["model_type"]
    for name, shape in expected(weights.config):
        x = wanted(name, found[name])
        assert weights.has(name) and weights.info(name).shape == shape == x.shape
        assert np.array_equal(weights.read(name), x), name
        rows = range(1, len(x), 3)
        assert np.array_equal(weights.read(name, rows), x[1::3]), name
        if x.ndim == 2:
            assert np.array_equal(weights.read(name, range(5, 8), range(3, 20)), x[5:8, 3:20]), name
    kv_b = found["model.layers.1.self_attn.kv_b_proj.weight"].reshape(HEADS, NOPE + VALUE, RANK)
    for heads in (range(HEADS), range(3, 5), range(9, 10), range(4, 4)):
        keys, values = weights.kv_b(1, heads)
        assert np.array_equal(keys, kv_b[heads.start:heads.stop, :NOPE])
        assert np.array_equal(values, kv_b[heads.start:heads.stop, NOPE:])


def test_pairs_that_are_halves_already_stay(tmp_path):
    config = V3 | {"rope_interleave": False}
    found = tensors(config)
    weights = opened(write_folder(tmp_path / "m", config, found))
    for name in ("q_b_proj", "kv_a_proj_with_mqa"):
        name = f"model.layers.2.self_attn.{name}.weight"
        assert np.array_equal(weights.read(name), found[name])


@pytest.mark.parametrize("layout", KV_LAYOUTS)
def test_gguf_states_the_figures_of_the_folder(tmp_path, layout):
    milder = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
    for config in (V2 | {"rope_scaling": YARN}, V3 | {"rope_scaling": milder}):
        folder = opened(write_folder(tmp_path / "m", config, tensors(config))).config
        file = opened(write_gguf(tmp_path / "m.gguf", config, tensors(config), layout)).config
        different = {field.name for field in dataclasses.fields(file)
                     if getattr(file, field.name) != getattr(folder, field.name)}
        assert different <= {"rms_eps", "rope", "bos_id", "eos_ids", "name"}, different
        assert file.softmax_scale == pytest.approx(folder.softmax_scale, rel=1e-6)
        assert file.rope.attention_factor == 1.0


@pytest.mark.parametrize("layout", KV_LAYOUTS)
def test_quantised_rows_are_permuted_like_others(tmp_path, layout):
    config = V3 | {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "q_lora_rank": 96, "v_head_dim": 32}
    weights = opened(write_gguf(tmp_path / "m.gguf", config, tensors(config), layout, gguf.GGMLQuantizationType.Q8_0))
    for part in ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"):
        name = f"model.layers.1.self_attn.{part}.weight"
        assert weights.info(name).dtype == "Q8_0"
        values = weights.read(name)
        if weights.in_rows(name):
            raw = weights.read_raw(name, range(3, 70))
            assert np.array_equal(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0), values[3:70])
        assert np.abs(values - wanted_quantised(name, config)).max() < 0.01
    assert weights.in_rows("model.layers.1.self_attn.kv_b_proj.weight") == (layout == "whole")


def wanted_quantised(name: str, config: dict) -> np.ndarray:
    x = tensors(config)[name].copy()
    if "q_b_proj" in name:
        by_head = x.reshape(HEADS, 40, -1)
        by_head[:, 32:] = np.concatenate([by_head[:, 32::2], by_head[:, 33::2]], axis=1)
    elif "kv_a_proj" in name:
        x[64:] = halves_apart(x[64:])
    return x


def test_layers_that_predict_further_tokens_are_left_out_knowingly(tmp_path):
    weights = opened(write_folder(tmp_path / "m", V3, tensors(V3, ahead=2)))
    assert weights.checkpoint.warnings == [] and len(weights.checkpoint.notes) == 1
    assert "left out 4 tensors of layers that predict further tokens" in weights.checkpoint.notes[0]


def test_tensors_of_another_shape_or_none_are_named(tmp_path):
    found = tensors(V3)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    with pytest.raises(ModelError, match=f"tensor {name} is missing"):
        open_model(write_folder(tmp_path / "a", V3, {k: x for k, x in found.items() if k != name}))
    with pytest.raises(ModelError, match=r"kv_b_proj.weight has shape \(600, 72\), but .* give \(640, 72\)"):
        name = "model.layers.1.self_attn.kv_b_proj.weight"
        open_model(write_folder(tmp_path / "b", V3, found | {name: found[name][:600]}))
    file = write_gguf(tmp_path / "c.gguf", V3 | {"v_head_dim": 40}, found, "stacked")
    config, checkpoint = open_model(file)
    with pytest.raises(ModelError, match=r"attn_v_b.weight has shape \(10, 40, 72\), but .* \(10, 41, 72\) or \(410,"):
        Weights(checkpoint, dataclasses.replace(config, value_dim=41)).check()


def test_gguf_without_corrections_has_none(tmp_path):
    found = {name: x for name, x in tensors(V3).items() if "correction" not in name}
    weights = opened(write_gguf(tmp_path / "m.gguf", V3, found, "whole"))
    assert weights.config.routing.bias and not weights.has("model.layers.1.mlp.gate.e_score_correction_bias")


@pytest.mark.parametrize("block", [(128, 128), (32, 64)], ids=str)
@pytest.mark.parametrize("scale_dtype", ["F32", "BF16", "F8_E8M0"])
def test_float8_at_any_slice_is_its_dequantised_twin(tmp_path, block, scale_dtype):
    """Heads' rows and latents' borders lie off the blocks, whose last ones are cut."""
    twin = write_float8(tmp_path / "m", V3, tensors(V3), block, scale_dtype)
    weights = opened(str(tmp_path / "m"))
    rng = np.random.default_rng(1)
    for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        name = f"model.layers.1.self_attn.{part}.weight"
        x = wanted(name, twin[name])
        assert weights.info(name).dtype == "F8_E4M3"
        for _ in range(12):
            rows, cols = (slice(*sorted(rng.integers(0, n + 1, 2))) for n in x.shape)
            got = weights.read(name, range(rows.start, rows.stop), range(cols.start, cols.stop))
            assert np.array_equal(got, x[rows, cols]), (part, rows, cols)
    whole = twin["model.layers.2.self_attn.kv_b_proj.weight"].reshape(HEADS, NOPE + VALUE, RANK)
    for tp in (1, 3, 4, 10, 13):
        for rank in range(tp):
            heads = range(rank * HEADS // tp, (rank + 1) * HEADS // tp)
            keys, values = weights.kv_b(2, heads)
            assert np.array_equal(keys, whole[heads.start:heads.stop, :NOPE])
            assert np.array_equal(values, whole[heads.start:heads.stop, NOPE:])
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight",
                 "model.layers.2.mlp.shared_experts.down_proj.weight"):
        assert np.array_equal(weights.read(name, range(7, 61), range(5, 59)), twin[name][7:61, 5:59])


@pytest.mark.parametrize("wrong, words", [
    (lambda shape: None, r"kv_b_proj.weight_scale_inv.* is missing|kv_b_proj.* no .*scale"),
    (lambda shape: (shape[0] + 1, *shape[1:]), r"\(6, 1\).*\(5, 1\)")])
def test_scales_that_are_missing_or_of_another_shape_stop(tmp_path, wrong, words):
    def change(items):
        out = []
        for name, dtype, shape, data in items:
            if name.endswith("layers.1.self_attn.kv_b_proj.weight_scale_inv"):
                changed = wrong(shape)
                if changed is None:
                    continue
                shape, data = changed, np.ones(changed, ml_dtypes.bfloat16 if dtype == "BF16" else np.float32).tobytes()
            out.append((name, dtype, shape, data))
        return out

    write_float8(tmp_path / "m", V3, tensors(V3), change=change)
    with pytest.raises(ModelError, match=words):
        open_model(str(tmp_path / "m"))
