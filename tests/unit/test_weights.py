"""Tensors under one set of names: folder and GGUF agree, heads are tied as they should be, absences are named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from made_models import (
    add_tensors,
    encode,
    finish,
    gguf_tensors,
    gguf_writer,
    random_tensors,
    safetensors_bytes,
    tiny,
    write_folder,
    write_gguf,
)

from mpillm.errors import ModelError
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights, expected

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
BIASED = tiny(attention_bias=True, mlp_bias=True)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def opened(path: str, **options: bool) -> Weights:
    config, checkpoint = open_model(path, **options)
    return Weights(checkpoint, config)


def refused(path: str, **options: bool) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(path, **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)


@pytest.mark.parametrize("config", [BIASED, tiny(head_dim=24), tiny(**QWEN2), tiny(**QWEN3),
                                    tiny(num_key_value_heads=1)],
                         ids=["biases", "wide heads", "qwen2", "qwen3", "one KV head"])
def test_gguf_and_folder_hold_the_same_tensors(tmp_path, config):
    tensors = random_tensors(config)
    arch = config["model_type"]
    for path in (write_folder(tmp_path / "hf", config, tensors),
                 write_gguf(tmp_path / "m.gguf", config, tensors, arch)):
        weights = opened(path)
        assert [name for name, _ in expected(weights.config) if not weights.has(name)] == []
        assert {name for name, _ in expected(weights.config)} == tensors.keys()
        for name, x in tensors.items():
            assert weights.info(name).shape == x.shape and weights.info(name).name == name
            assert np.array_equal(weights.read(name), x), name


@pytest.fixture(scope="module")
def quantised(tmp_path_factory) -> Weights:
    config = tiny(attention_bias=True)
    path = tmp_path_factory.mktemp("q") / "m.gguf"
    return opened(write_gguf(path, config, random_tensors(config), kind=GGMLQuantizationType.Q8_0))


@given(st.sampled_from(["q_proj", "k_proj", "v_proj"]), st.integers(0, 96), st.integers(0, 96), st.integers(0, 3),
       st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_slices_of_permuted_rows(quantised, part, first, last, left, right):
    name = f"model.layers.1.self_attn.{part}"
    full, bias = quantised.read(name + ".weight"), quantised.read(name + ".bias")
    rows = range(min(first, last, len(full)), min(max(first, last), len(full)))
    cols = range(32 * min(left, right), 32 * max(left, right))
    wanted = full[rows.start:rows.stop, cols.start:cols.stop]
    assert np.array_equal(quantised.read(name + ".weight", rows, cols), wanted)
    assert np.array_equal(quantised.read(name + ".bias", rows), bias[rows.start:rows.stop])
    raw = quantised.read_raw(name + ".weight", rows, cols)
    values = dequantize(raw, GGMLQuantizationType.Q8_0) if raw.size else np.zeros(wanted.shape)
    assert np.array_equal(values, wanted)


def test_quantised_values_are_near_the_originals(quantised):
    tensors = random_tensors(tiny(attention_bias=True))
    for name, x in tensors.items():
        assert np.abs(quantised.read(name) - x).max() <= (0.005 if x.ndim == 2 else 0), name


# The output head

def test_tied_without_a_head(tmp_path):
    config = tiny(tie_word_embeddings=True)
    weights = opened(write_folder(tmp_path, config, random_tensors(config)))
    assert weights.config.tied and not weights.has(HEAD) and weights.checkpoint.warnings == []


def test_tied_with_the_same_head(tmp_path):
    config = tiny(tie_word_embeddings=True)
    tensors = random_tensors(config)
    weights = opened(write_folder(tmp_path, config, tensors | {HEAD: tensors[EMBEDDING]}))
    assert weights.config.tied and not weights.has(HEAD) and weights.checkpoint.warnings == []


@pytest.mark.parametrize("row", [0, 306])
def test_tied_with_another_head_is_untied_and_said(tmp_path, row):
    config = tiny(tie_word_embeddings=True)
    tensors = random_tensors(config)
    head = tensors[EMBEDDING].copy()
    head[row, -1] += 1
    path = write_folder(tmp_path, config, tensors | {HEAD: head})
    weights = opened(path)
    assert not weights.config.tied and np.array_equal(weights.read(HEAD), head)
    assert len(weights.checkpoint.warnings) == 1 and "differs from the embedding" in weights.checkpoint.warnings[0]
    forced = opened(path, tie_embeddings=True)
    assert forced.config.tied and not forced.has(HEAD) and forced.checkpoint.warnings == []


def test_tied_with_nothing_but_a_head(tmp_path):
    config = tiny(tie_word_embeddings=True)
    tensors = random_tensors(config)
    tensors[HEAD] = tensors.pop(EMBEDDING)
    weights = opened(write_folder(tmp_path, config, tensors))
    assert weights.config.tied and np.array_equal(weights.read(EMBEDDING), tensors[HEAD])


@pytest.mark.parametrize("stated", [False, None, ...])
def test_untied_without_a_head(tmp_path, stated):
    config = tiny(tie_word_embeddings=stated)
    path = write_folder(tmp_path, config, random_tensors(config, head=False))
    assert "tensor lm_head.weight is missing" in refused(path)
    assert opened(path, tie_embeddings=True).config.tied


def test_gguf_ties_when_no_part_has_the_head(tmp_path):
    untied, tied = random_tensors(tiny()), random_tensors(tiny(), head=False)
    assert opened(write_gguf(tmp_path / "t.gguf", tiny(), tied)).config.tied
    # The head is in the last of six parts
    last = {name: untied[name] for name in untied if name != HEAD} | {HEAD: untied[HEAD]}
    write_gguf(tmp_path / "s.gguf", tiny(), last, split_max_tensors=4)
    weights = opened(str(tmp_path / "s-00001-of-00006.gguf"))
    assert not weights.config.tied and np.array_equal(weights.read(HEAD), untied[HEAD])
    assert "00006-of" in weights.checkpoint.file_of("output.weight")


# What is missing, wrong or too much

@pytest.mark.parametrize("name", [name for name in random_tensors(BIASED) if ".layers.0." not in name])
def test_each_missing_tensor_is_named(tmp_path, name):
    tensors = random_tensors(BIASED)
    del tensors[name]
    if name == HEAD:
        assert f"tensor {name} is missing" in refused(write_folder(tmp_path / "hf", BIASED, tensors))
        return
    assert f"tensor {name} is missing" in refused(write_folder(tmp_path / "hf", BIASED, tensors))
    message = refused(write_gguf(tmp_path / "m.gguf", BIASED, tensors))
    assert "is missing" in message and (name in message or name == EMBEDDING)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight",
                                  "model.norm.weight", EMBEDDING, HEAD])
def test_a_wrong_shape_is_shown_with_the_right_one(tmp_path, name):
    tensors = random_tensors(tiny())
    shape = tensors[name].shape
    tensors[name] = np.zeros((shape[0] + 32, *shape[1:]), np.float32)
    message = refused(write_folder(tmp_path, tiny(), tensors))
    assert f"tensor {name} has shape {tensors[name].shape}" in message and f"give {shape}" in message


@pytest.mark.parametrize("dtype", ["F64", "I64", "U8", "BOOL"])
def test_a_type_that_is_not_computed_with_stops(tmp_path, dtype):
    tensors, name = random_tensors(tiny()), "model.layers.1.mlp.up_proj.weight"
    path = write_folder(tmp_path, tiny(), tensors)
    items = [(n, dtype if n == name else "F32", x.shape, encode(x, dtype if n == name else "F32"))
             for n, x in tensors.items()]
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(items))
    assert f"tensor {name} has type {dtype}" in refused(path)


def test_mixed_types_are_read_each_by_its_own_header(tmp_path):
    tensors = random_tensors(tiny())
    kinds = {n: "F32" if "norm" in n else "F16" if n.endswith("0.self_attn.o_proj.weight") else "BF16" for n in tensors}
    path = write_folder(tmp_path, tiny(torch_dtype="bfloat16"), tensors)
    (tmp_path / "model.safetensors").write_bytes(
        safetensors_bytes([(n, kinds[n], x.shape, encode(x, kinds[n])) for n, x in tensors.items()]))
    weights = opened(path)
    for name, x in tensors.items():
        assert weights.info(name).dtype == kinds[name]
        assert np.abs(weights.read(name) - x).max() <= {"F32": 0, "F16": 5e-4, "BF16": 4e-3}[kinds[name]]


def test_tensors_that_the_architecture_does_not_use(tmp_path):
    tensors = random_tensors(BIASED) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    weights = opened(write_folder(tmp_path / "hf", tiny(), tensors))
    # As in transformers: no attention_bias in the config, no bias in the sum
    assert not weights.has("model.layers.0.self_attn.q_proj.bias")
    assert len(weights.checkpoint.warnings) == 1 and "left out 14 tensors" in weights.checkpoint.warnings[0]
    with pytest.raises(ModelError, match="q_proj.bias is missing"):
        weights.read("model.layers.0.self_attn.q_proj.bias")
    writer = gguf_writer(tmp_path / "m.gguf", tiny())
    extra = {"blk.0.ffn_down.scale": np.ones(1, np.float32), "rope_freqs.weight": np.ones(8, np.float32)}
    add_tensors(writer, gguf_tensors(tiny(), random_tensors(tiny()), "llama") | extra)
    finish(writer)
    assert "tensor blk.0.ffn_down.scale has no place" in refused(str(tmp_path / "m.gguf"))


def test_gguf_biases_that_no_layer_has_are_zero(tmp_path):
    tensors = {name: x for name, x in random_tensors(BIASED).items()
               if not name.endswith(".bias") or "q_proj" in name or "k_proj" in name}
    weights = opened(write_gguf(tmp_path / "m.gguf", tiny(), tensors))
    assert weights.config.qkv_bias and not weights.config.output_bias and not weights.config.mlp_bias
    assert weights.has("model.layers.1.self_attn.k_proj.bias")
    assert not weights.has("model.layers.1.self_attn.v_proj.bias")
    assert np.array_equal(weights.read("model.layers.1.self_attn.k_proj.bias"),
                          tensors["model.layers.1.self_attn.k_proj.bias"])


def test_check_of_other_figures(tmp_path):
    weights = opened(write_folder(tmp_path, tiny(), random_tensors(tiny())))
    weights.check()
    with pytest.raises(ModelError, match="shape"):
        weights.check(dataclasses.replace(weights.config, intermediate=161))
