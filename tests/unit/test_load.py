"""Loading a share: its bytes are those that were planned, and what cannot be kept is named."""

from __future__ import annotations

import json
from contextlib import nullcontext

import gguf
import numpy as np
import pytest
from made_models import finish, gguf_tensors, gguf_writer, random_tensors, tiny, write_folder, write_gguf
from steps import logits_of_splits

from mpillm import kernels
from mpillm.errors import ModelError
from mpillm.models import load as load_module
from mpillm.models import registry
from mpillm.models.load import Loader, apart, memory_format
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import partition


class _Alone:
    def all_reduce(self, array):
        pass


def opened(path):
    config, checkpoint = open_model(str(path))
    return config, Weights(checkpoint, config)


def load(config, weights, tp, rank, asked, kv_mode="redundant"):
    split = partition(registry.sizes(config, weights, asked), tp, kv_mode)
    loader = Loader(config, weights, split.shares[rank], asked, _Alone())
    return registry.BUILDERS[config.architecture](config, loader, None), loader.nbytes, split


def test_loading_ahead_packs_the_same_and_names_what_is_damaged(tmp_path, monkeypatch):
    """Nobody waits for a matrix before the next one begins; an error ends what still reads."""
    monkeypatch.setattr(load_module, "CHUNK_BYTES", 4096)
    config = tiny()
    figures, weights = opened(write_folder(tmp_path / "whole", config, random_tensors(config)))
    split = partition(registry.sizes(figures, weights, "auto"), 2, "redundant")
    found = []
    for ahead in (False, True):
        loader = Loader(figures, weights, split.shares[1], "auto", _Alone())
        with loader.ahead() if ahead else nullcontext():
            model = registry.BUILDERS["llama"](figures, loader, None)
        block = model.blocks[1]
        found.append([loader.nbytes, *(layer.weight.data.tobytes() for layer in (
            *block.attention.qkv, block.attention.output, block.mlp.gate_up, block.mlp.down))])
    assert found[0] == found[1]

    tensors = random_tensors(config)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][5, -3] = np.nan
    figures, weights = opened(write_folder(tmp_path / "damaged", config, tensors))
    loader = Loader(figures, weights, split.shares[1], "auto", _Alone())
    with pytest.raises(ModelError, match=f"tensor {name} has 1 values that are NaN"), loader.ahead():
        registry.BUILDERS["llama"](figures, loader, None)
    assert not loader._pending and not loader._open


@pytest.mark.parametrize("asked", ["auto", "f32", "bf16", "f16", "q8_0", "q4_1"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bytes_are_as_planned(tmp_path, asked, kind):
    config = tiny(model_type=kind, attention_bias=True, **({"mlp_bias": True} if kind == "llama" else {}))
    config["architectures"] = [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]]
    path = write_folder(tmp_path / kind, config, random_tensors(config))
    figures, weights = opened(path)
    for tp in (1, 3, 5, 7):
        for mode in ("redundant", "allgather"):
            for rank in range(tp):
                _, loaded, split = load(figures, weights, tp, rank, asked, mode)
                assert loaded == registry.weight_bytes(figures, weights, split, asked, rank), (tp, mode, rank)


BLOCKS = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q4_K": (256, 144),
          "Q6_K": (256, 210)}
HALVES = {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}           # where a block has float16, else at 0


def stored(kind, n, k, seed=0):
    """Random blocks with scales that are small."""
    block, size = BLOCKS[kind]
    raw = np.random.default_rng(seed).integers(0, 256, (n, k // block, size), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        raw[..., at:at + 2] = np.array([0.01], np.float16).view(np.uint8)
    return raw.reshape(n, -1)


def write_blocks(path, kinds):
    """A GGUF model of random blocks; ``kinds``: type of a tensor by the end of its GGUF name, '' for the rest."""
    config = tiny(hidden_size=256, intermediate_size=768, num_attention_heads=8, num_key_value_heads=4, head_dim=32)
    writer = gguf_writer(path, config)
    for name, values in gguf_tensors(config, random_tensors(config), "llama").items():
        kind = next((kind for end, kind in kinds.items() if name.endswith(f"{end}.weight")), None)
        if kind is None or values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, stored(kind, *values.shape), raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)
    return path


def test_auto_keeps_what_the_file_has(tmp_path):
    for kind, expected in (("Q8_0", "q8_0"), ("Q4_0", "q4_0"), ("Q4_1", "q4_1"), ("Q4_K", "q4_K"), ("Q6_K", "q6_K"),
                           ("Q5_0", "bf16")):
        _, weights = opened(write_blocks(tmp_path / f"{kind}.gguf", {"": kind}))
        name = "model.layers.0.mlp.down_proj.weight"
        assert memory_format(weights, [name], "auto") == expected
        assert memory_format(weights, [name], "f32") == "f32"
    config = tiny()
    for kind, expected in (("F32", "f32"), ("F16", "f16"), ("BF16", "bf16")):
        path = write_gguf(tmp_path / f"{kind}.gguf", config, random_tensors(config),
                          kind=gguf.GGMLQuantizationType[kind])
        assert memory_format(opened(path)[1], ["model.layers.0.mlp.down_proj.weight"], "auto") == expected


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K"])
def test_blocks_are_loaded_as_they_are_stored(tmp_path, kind):
    """Slices of o_proj and down_proj begin inside a block of 256; every value is the file's."""
    figures, weights = opened(write_blocks(tmp_path / "m.gguf", {"": kind}))
    down, output = (f"model.layers.1.{name}.weight" for name in ("mlp.down_proj", "self_attn.o_proj"))
    for tp in (1, 3, 5, 8):
        for rank in range(tp):
            model, loaded, split = load(figures, weights, tp, rank, "auto")
            assert loaded == registry.weight_bytes(figures, weights, split, "auto", rank), (tp, rank)
            share, block = split.shares[rank], model.blocks[1]
            for layer, name, span in ((block.mlp.down, down, share.columns),
                                      (block.attention.output, output, share.heads.times(32))):
                if not span.size:
                    continue
                assert layer.weight.format == kind[:-1].lower() + kind[-1] and layer.before == 0
                found = kernels.lookup(layer.weight, np.arange(256))
                assert np.array_equal(found, weights.read(name, None, span.range())), (tp, rank, name)


def test_tensors_of_one_product_that_differ(tmp_path):
    """Files of type Q4_K_M hold v as Q6_K: runs that keep their formats, and the bytes that were planned."""
    figures, weights = opened(write_blocks(tmp_path / "m.gguf", {"attn_v": "Q6_K", "": "Q4_K"}))
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    assert memory_format(weights, names, "auto") == "bf16" and memory_format(weights, names[:2], "auto") == "q4_K"
    assert apart(weights, names, "auto") == [("q4_K", range(0, 2)), ("q6_K", range(2, 3))]
    assert apart(weights, names, "q8_0") == [("q8_0", range(0, 3))]
    split = partition(registry.sizes(figures, weights, "auto"), 2, "redundant")
    loader = Loader(figures, weights, split.shares[1], "auto", _Alone())
    kv = split.shares[1].kv_columns
    spans, bare = [loader.query_rows(), kv, kv], [name.removesuffix(".weight") for name in names]
    parts = loader.columns_apart(bare, spans)
    assert [part.weight.format for part in parts] == ["q4_K", "q6_K"]
    assert [part.n_full for part in parts] == [256 + 128, 128]
    whole = np.concatenate([weights.read(name, span.range()) for name, span in zip(names, spans, strict=True)])
    found = np.concatenate([kernels.lookup(part.weight, np.arange(part.weight.n)) for part in parts])
    assert np.array_equal(found, whole)


def test_a_model_of_mixed_products_computes_what_its_values_give(tmp_path):
    path = write_blocks(tmp_path / "m.gguf", {"attn_v": "Q6_K", "": "Q4_K"})
    figures, weights = opened(path)
    assert registry.formats(figures, weights, "auto") == {"q4_K", "q6_K"}
    kinds = registry.qkv_formats(weights, 1, "auto")
    assert kinds == ("q4_K", "q4_K", "q6_K") and registry.qkv_formats(weights, 1, "bf16") == ("bf16",) * 3
    by_rows = (2 * 148 + 210 + 148) / 256 / 4       # 8 heads of q, 4 of k and of v
    assert registry.sizes(figures, weights, "auto").bytes_attn == pytest.approx(by_rows, rel=1e-12)

    config = tiny(hidden_size=256, intermediate_size=768, num_attention_heads=8, num_key_value_heads=4, head_dim=32)
    write_folder(tmp_path / "twin", config, {name: weights.read(name) for name in random_tensors(config)})
    wanted = logits_of_splits(tmp_path / "twin", "f32", (1,))[1]
    for tp, found in logits_of_splits(path, "auto", (1, 3, 4)).items():
        assert np.std(found - wanted) < 0.05 * np.std(wanted), tp


def test_a_block_whose_scale_is_not_finite_is_named(tmp_path):
    path = write_blocks(tmp_path / "m.gguf", {"": "Q4_K"})
    figures, weights = opened(path)
    before, last = weights.read_raw("model.layers.1.mlp.up_proj.weight"), weights.checkpoint
    data = bytearray(path.read_bytes())
    info = last._stored["blk.1.ffn_up.weight"]
    assert data[info.offset:info.offset + 144] == before[0, :144].tobytes()
    data[info.offset + 2:info.offset + 4] = b"\x00\x7c"
    path.write_bytes(data)
    figures, weights = opened(path)
    with pytest.raises(ModelError, match=r"layers.1.mlp.up_proj.weight has 256 values that are NaN or infinite"):
        load(figures, weights, 1, 0, "auto")


def test_a_nan_in_the_file_is_named(tmp_path):
    config = tiny()
    tensors = random_tensors(config)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    figures, weights = opened(write_folder(tmp_path / "m", config, tensors))
    with pytest.raises(ModelError, match=r"layers.1.mlp.up_proj.weight has 1 values that are NaN"):
        load(figures, weights, 1, 0, "bf16")


def test_values_beyond_float16_are_counted(tmp_path):
    config = tiny()
    tensors = random_tensors(config)
    tensors["model.layers.0.mlp.down_proj.weight"][:2, 0] = 1e6
    figures, weights = opened(write_folder(tmp_path / "m", config, tensors))
    with pytest.raises(ModelError, match=r"down_proj.weight has 2 values beyond the range of f16: use --weights bf16"):
        load(figures, weights, 1, 0, "f16")
    load(figures, weights, 1, 0, "bf16")


def test_a_nan_in_a_norm_or_bias_is_named(tmp_path):
    config = tiny(attention_bias=True)
    for name in ("model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.q_proj.bias"):
        tensors = random_tensors(config)
        tensors[name][1] = np.inf
        figures, weights = opened(write_folder(tmp_path / json.dumps(name)[1:-1], config, tensors))
        with pytest.raises(ModelError, match=name.replace(".", r"\.") + " has 1 values"):
            load(figures, weights, 1, 0, "f32")
