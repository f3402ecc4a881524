"""float8 checkpoints: every value by the scale of its own block, at any slice and split; wrong scales are named."""

from __future__ import annotations

import contextlib
import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_float8 import quantise, spread, write_float8
from made_models import encode, random_tensors, safetensors_bytes, tiny, write_folder
from steps import logits_of_splits

from mpillm.errors import ModelError
from mpillm.formats.decode import decode
from mpillm.formats.float8 import scheme
from mpillm.formats.safetensors import SafetensorsFolder
from mpillm.models import registry
from mpillm.models.load import memory_format
from mpillm.models.parse import open_model, read_config
from mpillm.models.weights import Weights
from mpillm.partition import partition

BLOCKS = [(128, 128), (32, 64)]
# Ten heads of 24 over 160: no figure of a matrix is a multiple of 128, and no head begins on a block's border.
UNEVEN = dict(hidden_size=160, intermediate_size=304, num_attention_heads=10, num_key_value_heads=5, head_dim=24)
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


@pytest.mark.parametrize("dtype, twin", [("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E8M0", ml_dtypes.float8_e8m0fnu)])
def test_every_code(dtype, twin):
    codes, found = np.arange(256, dtype=np.uint8).reshape(2, 128), np.empty((2, 128), np.float32)
    decode(dtype, codes, 1, found)
    assert found.tobytes() == np.where(np.isnan(found), found, codes.view(twin).astype(np.float32)).tobytes()
    assert np.array_equal(np.isnan(found), np.isnan(codes.view(twin).astype(np.float32)))


def small(path, block, scale_dtype="F32", shape=(300, 217)):
    """A folder of one float8 matrix 'w', and what it stands for; written once."""
    x = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    codes, scale = quantise(x, block, scale_dtype)
    if not path.exists():
        path.mkdir()
        (path / "config.json").write_text(json.dumps(
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}))
        (path / "model.safetensors").write_bytes(safetensors_bytes([
            ("w", "F8_E4M3", x.shape, codes.tobytes()),
            ("w_scale_inv", scale_dtype, scale.shape, scale.tobytes())]))
    return codes.astype(np.float32) * spread(scale, block, x.shape)


@pytest.mark.parametrize("block, scale_dtype", [((128, 128), "F32"), ((32, 64), "BF16"), ((7, 300), "F8_E8M0"),
                                                ((1000, 1), "F32")])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_slice_has_the_scales_of_its_own_blocks(tmp_path_factory, block, scale_dtype, data):
    path = tmp_path_factory.getbasetemp() / f"float8-{block[0]}"
    full = small(path, block, scale_dtype)
    n, k = full.shape
    rows = data.draw(st.one_of(
        st.none(), st.lists(st.integers(0, n - 1), max_size=40).map(lambda r: np.array(r, np.int64)),
        st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda r: range(min(r), max(r)))))
    first, last = sorted(data.draw(st.tuples(st.integers(0, k), st.integers(0, k))))
    with SafetensorsFolder(str(path)) as reader:
        found = reader.read("w", rows, range(first, last))
        wanted = full[np.arange(n) if rows is None else np.asarray(rows, np.int64)][:, first:last]
        assert found.shape == wanted.shape and found.tobytes() == np.ascontiguousarray(wanted).tobytes()


def test_a_slice_reads_its_codes_and_the_scales_of_its_blocks(tmp_path):
    small(tmp_path / "m", (32, 64))
    with SafetensorsFolder(str(tmp_path / "m")) as reader:
        before = reader.bytes_read
        reader.read("w", range(40, 70), range(60, 70))
        assert reader.bytes_read - before == 30 * 10 + 4 * 2 * 2, "rows in 2 blocks, columns in 2"


@pytest.mark.parametrize("strategy, shapes", [("tensor", [(), (1,), (1, 1)]), ("channel", [(50, 1), (50,)]),
                                              ("block", [(4, 2)])])
def test_compressed_tensors(tmp_path, strategy, shapes):
    """One scale for a tensor, a row, or a block, as compressed-tensors lays them."""
    x = np.random.default_rng(3).normal(size=(50, 70)).astype(np.float32)
    block = {"tensor": (50, 70), "channel": (1, 70), "block": (16, 64)}[strategy]
    codes, scale = quantise(x, block)
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "block_structure": [16, 64]}
    for at, shape in enumerate(shapes):
        path = tmp_path / str(at)
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"quantization_config": {
            "quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}}))
        (path / "model.safetensors").write_bytes(safetensors_bytes([
            ("w", "F8_E4M3", x.shape, codes.tobytes()), ("w_scale", "F32", shape, scale.tobytes())]))
        with SafetensorsFolder(str(path)) as reader:
            found = reader.read("w", range(11, 47), range(3, 69))
            wanted = codes.astype(np.float32) * spread(scale, block, x.shape)
            assert np.array_equal(found, wanted[11:47, 3:69])


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("names, scale_dtype", [({}, "F32"), (QWEN3, "BF16")])
def test_logits_are_those_of_the_dequantised_checkpoint(tmp_path, block, names, scale_dtype):
    config = tiny(**UNEVEN, **names)
    tensors = {name: x / 8 for name, x in random_tensors(config).items()}
    twin = write_float8(tmp_path / "float8", config, tensors, block, scale_dtype, kept=("layers.1.mlp.down_proj",))
    write_folder(tmp_path / "twin", config, twin)
    wanted = logits_of_splits(tmp_path / "twin", "f32", (1, 3, 4, 10))
    found = logits_of_splits(tmp_path / "float8", "f32", (1, 3, 4, 10))
    for tp, logits in wanted.items():
        assert np.array_equal(found[tp], logits), f"{tp} ranks"
        assert np.abs(logits - wanted[1]).max() < 1e-4 * np.abs(wanted[1]).max(), f"{tp} ranks"


def test_in_memory_it_is_bf16_by_default(tmp_path):
    """And the bytes are those of bf16, or of what is asked."""
    config = tiny(**UNEVEN)
    write_float8(tmp_path / "m", config, random_tensors(config), (32, 64))
    figures, checkpoint = open_model(str(tmp_path / "m"))
    with contextlib.closing(checkpoint):
        weights = Weights(checkpoint, figures)
        assert memory_format(weights, ["model.layers.0.mlp.up_proj.weight"], "auto") == "bf16"
        assert registry.formats(figures, weights, "auto") == {"bf16", "f32"}, "embedding and head are float32 here"
        split = partition(registry.sizes(figures, weights, "q8_0"), 3)
        assert registry.formats(figures, weights, "q8_0") == {"q8_0"}
        assert sum(registry.weight_bytes(figures, weights, split, "q8_0", rank) for rank in range(3)) < 2 << 20
        assert not checkpoint.warnings, "scales are used"


def refused(path) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(str(path))[1].close()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


NAME = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize("change, words", [
    (lambda items: [item for item in items if item[0] != NAME + "_scale_inv"],
     ["k_proj.weight has type F8_E4M3", f"tensor {NAME}_scale_inv is missing"]),
    # 120 rows in blocks of 32 are 4, and not 3 of 40
    (lambda items: [(n, d, (3, 3), encode(np.ones((3, 3)), "F32")) if n == NAME + "_scale_inv" else (n, d, s, x)
                    for n, d, s, x in items], ["has shape (3, 3)", "of shape (120, 160)", "scales of shape (4, 3)"]),
    (lambda items: [(n, "I64", s, encode(np.ones(s), "I64")) if n == NAME + "_scale_inv" else (n, d, s, x)
                    for n, d, s, x in items], ["_scale_inv has type I64"]),
    (lambda items: [(n, "F8_E5M2" if n == NAME else d, s, x) for n, d, s, x in items],
     [f"tensor {NAME} has type F8_E5M2", "convert the model to BF16"]),
])
def test_wrong_scales_stop_with_both_shapes(tmp_path, change, words):
    config = tiny(**UNEVEN)
    write_float8(tmp_path / "m", config, random_tensors(config), (32, 64), change=change)
    message = refused(tmp_path / "m")
    assert all(word in message for word in words), message


def test_float8_without_a_scheme_stops(tmp_path):
    config = tiny(**UNEVEN, quantization_config=None)
    write_float8(tmp_path / "m", config, random_tensors(config))
    assert "config.json no quantization_config" in refused(tmp_path / "m")


def test_a_scale_that_is_nan_is_named(tmp_path):
    config = tiny(**UNEVEN)
    write_float8(tmp_path / "m", config, random_tensors(config), change=lambda items: [
        (n, d, s, encode(np.full(s, np.nan), "F32") if n == NAME + "_scale_inv" else x) for n, d, s, x in items])
    with pytest.raises(ModelError, match="k_proj.weight has .* values that are NaN or infinite"):
        logits_of_splits(tmp_path / "m", "auto", (1,))


@pytest.mark.parametrize("stated, words", [
    ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "format 'e5m2'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128]"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size is [0, 128]"),
    ({"quant_method": "fp8", "weight_block_size": "128"}, "weight_block_size is '128'"),
    ({"quant_method": "fbgemm_fp8"}, "quantised by 'fbgemm_fp8'"), ("fp8", "quantised by 'fp8'"),
    ({"quant_method": "compressed-tensors"}, "other than one config group"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}},
     "4 bits, type 'int'"),
    ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {
        "num_bits": 8, "type": "float", "strategy": "group"}}}}, "strategy 'group'"),
])
def test_other_schemes_are_named(tmp_path, stated, words):
    with pytest.raises(ModelError) as caught:
        scheme("config.json", {"quantization_config": stated})
    assert words in str(caught.value) and str(caught.value).startswith("config.json: ")
    (tmp_path / "config.json").write_text(json.dumps(tiny(quantization_config=stated)))
    with pytest.raises(ModelError) as without_weights:
        read_config(str(tmp_path))
    assert words in str(without_weights.value)
