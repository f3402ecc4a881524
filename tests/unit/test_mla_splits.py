"""DeepSeek's weights, cut: every mode, rank count, float8 block and GGUF layout gives the same."""

from __future__ import annotations

import json

import gguf
import made_deepseek as made
import numpy as np
import pytest
from made_float8 import write_float8
from made_models import write_folder
from steps import logits_of_splits

from mpillm.errors import ModelError, UsageError

MODES = (0, 1, 2, 3)
COUNTS = (1, 3, 4, 10, 13)
TOKENS = np.random.default_rng(3).integers(0, 211, 21)
CONFIG = {**made.V3, "num_hidden_layers": 2}


def small(tensors):
    """Weights at which logits neither saturate nor vanish."""
    return {name: x / np.sqrt(x.shape[-1]).astype(np.float32) if x.ndim > 1 else x * np.float32(0.2) + 1
            for name, x in tensors.items()}


def error(found, wanted):
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def usual_error(found, wanted):
    """Of the middle row: where weights are rounded, some rows choose other experts."""
    return np.median(np.abs(found - wanted).max(axis=1)) / np.abs(wanted).max()


@pytest.fixture(scope="module")
def tensors():
    return small(made.tensors(CONFIG))


@pytest.fixture(scope="module")
def wanted(tensors, tmp_path_factory):
    """Logits of one rank in mode 0."""
    folder = write_folder(tmp_path_factory.mktemp("plain"), CONFIG, tensors)
    return logits_of_splits(folder, "f32", (1,), TOKENS)[1]


@pytest.mark.parametrize("kv_mode", ["redundant", "allgather"])
@pytest.mark.parametrize("mla", MODES)
def test_every_split(mla, kv_mode, tensors, wanted, tmp_path):
    folder = write_folder(tmp_path, CONFIG, tensors)
    found = logits_of_splits(folder, "f32", COUNTS, TOKENS, mla, kv_mode)
    for tp in COUNTS:
        assert error(found[tp], wanted) < 1e-5, tp
    if kv_mode == "allgather":
        for tp, other in logits_of_splits(folder, "f32", (3, 13), TOKENS, mla).items():
            assert (found[tp] == other).all(), "the modes of exchange differ"


@pytest.mark.parametrize("mla, kind, bound", [(1, "f32", 1e-5), (2, "f32", 1e-5), (1, "bf16", 0.03), (2, "f16", 0.01),
                                              (2, "bf16", 0.03)])
@pytest.mark.parametrize("config", [CONFIG, {**CONFIG, "q_lora_rank": None}], ids=["latent queries", "queries"])
def test_a_sharded_cache(config, mla, kind, bound, tmp_path):
    """As many ranks as blocks, fewer, more, and more than heads: all attend, each merges its own heads' parts."""
    tokens = np.random.default_rng(4).integers(0, 211, 200)
    folder = write_folder(tmp_path, config, small(made.tensors(config)))
    wanted = logits_of_splits(folder, "f32", (1,), tokens, mla, kv_type=kind)[1]
    counts = (1, 2, 3, 4, 6, 13) if kind == "f32" else (3,)
    for tp, found in logits_of_splits(folder, "f32", counts, tokens, mla, "sharded", kind).items():
        assert usual_error(found, wanted) < bound / 3 and (kind != "f32" or error(found, wanted) < bound), tp
        assert (found == wanted).all() == (tp == 1), "a cache that is dealt out is summed in another order"


@pytest.mark.parametrize("mla", MODES)
@pytest.mark.parametrize("block, scale", [((128, 128), "F32"), ((32, 64), "BF16"), ((128, 128), "F8_E8M0")])
def test_float8(mla, block, scale, tensors, tmp_path):
    twin = write_float8(tmp_path / "f8", CONFIG, tensors, block, scale)
    folder = write_folder(tmp_path / "twin", CONFIG, twin)
    wanted = logits_of_splits(folder, "f32", (1,), TOKENS)[1]
    for tp, found in logits_of_splits(tmp_path / "f8", "f32", (1, 3, 13), TOKENS, mla).items():
        assert error(found, wanted) < 1e-5, tp


@pytest.mark.parametrize("mla", MODES)
@pytest.mark.parametrize("layout", made.KV_LAYOUTS)
def test_gguf_layouts(mla, layout, tensors, wanted, tmp_path):
    path = made.write_gguf(tmp_path / "m.gguf", CONFIG, tensors, layout)
    for tp, found in logits_of_splits(path, "f32", (1, 4), TOKENS, mla).items():
        assert error(found, wanted) < 1e-5, tp


@pytest.mark.parametrize("mla", MODES)
@pytest.mark.parametrize("layout", made.KV_LAYOUTS)
def test_quantised_gguf_keeps_or_widens(mla, layout, tmp_path):
    """What is stored in blocks stays so where rows stay rows; what is turned becomes bf16."""
    config = {**CONFIG, "kv_lora_rank": 96, "qk_nope_head_dim": 32, "hidden_size": 192}
    tensors = small(made.tensors(config))
    path = made.write_gguf(tmp_path / "q.gguf", config, tensors, layout, gguf.GGMLQuantizationType.Q8_0)
    wanted = logits_of_splits(made.write_gguf(tmp_path / "f.gguf", config, tensors), "f32", (1,), TOKENS)[1]
    found = logits_of_splits(path, "auto", (1, 3), TOKENS, mla)
    assert usual_error(found[1], wanted) < 0.03 and usual_error(found[3], wanted) < 0.03


@pytest.mark.parametrize("asked, tolerance", [("bf16", 0.03), ("q8_0", 0.03), ("q4_1", 0.4)])
@pytest.mark.parametrize("mla", MODES)
def test_asked_formats(mla, asked, tolerance, tensors, wanted, tmp_path):
    """Also where a head's widths are no whole blocks: zeros fill them up."""
    folder = write_folder(tmp_path, CONFIG, tensors)
    for tp, found in logits_of_splits(folder, asked, (1, 3), TOKENS, mla).items():
        assert usual_error(found, wanted) < tolerance, tp


def test_rope_interleave_false_has_the_halves_apart(tensors, wanted, tmp_path):
    """Rows with the halves of pairs apart, and the word for it, are the same model."""
    turned = dict(tensors)
    for name, x in tensors.items():
        if "q_b_proj" in name:
            x = x.reshape(10, 32, -1).copy()
            x[:, 24:] = x[:, 24:].reshape(10, 4, 2, -1).swapaxes(1, 2).reshape(10, 8, -1)
        elif "kv_a_proj" in name:
            x = x.copy()
            x[72:] = x[72:].reshape(4, 2, -1).swapaxes(0, 1).reshape(8, -1)
        turned[name] = x.reshape(tensors[name].shape)
    folder = write_folder(tmp_path, {**CONFIG, "rope_interleave": False}, turned)
    for mla in MODES:
        assert error(logits_of_splits(folder, "f32", (3,), TOKENS, mla)[3], wanted) < 1e-5


def test_scales_that_are_missing_or_of_another_shape(tensors, tmp_path):
    def without(items):
        return [item for item in items if not item[0].endswith("kv_b_proj.weight_scale_inv")]

    write_float8(tmp_path / "a", CONFIG, tensors, change=without)
    with pytest.raises(ModelError, match="scale"):
        logits_of_splits(tmp_path / "a", "f32", (1,), TOKENS)

    def narrower(items):
        return [(name, kind, (1, *shape[1:]), data[:4 * shape[1]]) if name.endswith("kv_b_proj.weight_scale_inv")
                else (name, kind, shape, data) for name, kind, shape, data in items]

    write_float8(tmp_path / "b", CONFIG, tensors, change=narrower)
    with pytest.raises(ModelError, match="kv_b_proj"):
        logits_of_splits(tmp_path / "b", "f32", (1,), TOKENS)


def test_an_odd_rope_width_stops(tensors, tmp_path):
    folder = write_folder(tmp_path, {**CONFIG, "qk_rope_head_dim": 7}, tensors)
    with pytest.raises(ModelError, match="7"):
        logits_of_splits(folder, "f32", (1,), TOKENS)
    assert json.loads((tmp_path / "config.json").read_text())["qk_rope_head_dim"] == 7


@pytest.mark.parametrize("mla", (1, 2, 3))
def test_q8_0_cache_needs_whole_blocks(mla, tensors, tmp_path):
    from mpillm.engine import kvcache
    from mpillm.models.parse import open_model

    config, checkpoint = open_model(write_folder(tmp_path, CONFIG, tensors))
    checkpoint.close()
    with pytest.raises(UsageError, match="blocks of 32, this model's are 80"):
        kvcache.block_bytes("q8_0", config.n_layers, 1, config.kv_rank + config.rope_dim, value_dim=0)
