"""Loading a share: its bytes are those that were planned, and what cannot be kept is named."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
from made_models import random_tensors, tiny, write_folder, write_gguf

from mpillm.errors import ModelError
from mpillm.models import registry
from mpillm.models.load import Loader, memory_format
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


@pytest.mark.parametrize("asked", ["auto", "f32", "bf16", "f16", "q8_0"])
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


def test_auto_keeps_what_the_file_has(tmp_path):
    config = tiny(hidden_size=128, intermediate_size=256)
    tensors = random_tensors(config)
    for kind, expected in (("F32", "f32"), ("F16", "f16"), ("Q8_0", "q8_0"), ("Q4_0", "bf16"), ("Q6_K", "bf16")):
        path = write_gguf(tmp_path / f"{kind}.gguf", config, tensors, kind=gguf.GGMLQuantizationType.Q8_0
                          if kind == "Q6_K" else gguf.GGMLQuantizationType[kind])
        _, weights = opened(path)
        name = "model.layers.0.mlp.down_proj.weight"
        if kind != "Q6_K":
            assert memory_format(weights, [name], "auto") == expected
        assert memory_format(weights, [name], "f32") == "f32"


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
