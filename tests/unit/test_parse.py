"""From config.json and GGUF metadata to figures, and from a path to a model."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest
from gguf import GGUFValueType
from hypothesis import given, settings
from hypothesis import strategies as st
from made_models import (
    TINY,
    add_tensors,
    file_of,
    finish,
    gguf_tensors,
    gguf_writer,
    random_tensors,
    tiny,
    write_folder,
    write_gguf,
)

from mpillm.errors import ModelError
from mpillm.models.config import RopeScaling
from mpillm.models.parse import open_checkpoint, open_model, read_config
from mpillm.models.parse_hf import hf_config

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def parsed(generation: dict | None = None, **changes: object):
    return hf_config("config.json", tiny(**changes), generation or {})


def refused(**changes: object) -> str:
    with pytest.raises(ModelError) as caught:
        parsed(**changes)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400 and message.startswith("config.json")
    return message


def test_the_figures():
    c = parsed()
    assert (c.architecture, c.hidden, c.n_layers, c.n_heads, c.n_kv_heads, c.head_dim) == ("llama", 96, 2, 6, 2, 16)
    assert (c.intermediate, c.vocab, c.max_positions, c.rms_eps, c.rope_theta) == (160, 307, 512, 1e-5, 10000.0)
    assert c.rope == RopeScaling() and c.windows == (None, None) and not c.tied and not c.qk_norm
    assert not (c.qkv_bias or c.output_bias or c.mlp_bias) and (c.bos_id, c.eos_ids) == (1, (2,))


def test_defaults_are_those_of_the_classes():
    absent = {"max_position_embeddings": ..., "rms_norm_eps": ..., "rope_theta": ..., "tie_word_embeddings": ...,
              "hidden_act": ..., "bos_token_id": ..., "eos_token_id": ...}
    c = parsed(**absent)
    assert (c.max_positions, c.rms_eps, c.rope_theta, c.tied, c.bos_id, c.eos_ids) == (2048, 1e-6, 1e4, False, 1, (2,))
    c = parsed(**absent, **MISTRAL)
    assert (c.max_positions, c.windows, c.eos_ids) == (131072, (4096, 4096), (2,))
    for names in (QWEN2, QWEN3):
        c = parsed(**absent, **names)
        assert (c.max_positions, c.windows, c.bos_id, c.eos_ids) == (32768, (None, None), None, ())
    assert parsed(**absent, **QWEN3, ).head_dim == 16 and parsed(**QWEN3 | {"head_dim": ...}).head_dim == 128
    assert parsed(architectures=...).architecture == "llama"


@pytest.mark.parametrize("value", [None, ...])
def test_null_is_absent(value):
    assert parsed(head_dim=value).head_dim == 16
    assert parsed(num_key_value_heads=value).n_kv_heads == 6
    assert parsed(rope_scaling=value, rope_theta=value).rope == RopeScaling()
    assert not parsed(attention_bias=value, mlp_bias=value, tie_word_embeddings=value).tied


def test_a_stated_head_width_counts():
    assert parsed(head_dim=24).head_dim == 24
    assert parsed(head_dim=24, hidden_size=100).head_dim == 24


@pytest.mark.parametrize("changes, words", [
    ({"head_dim": ..., "hidden_size": 100}, "100 is no multiple of the 6 heads"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ({"num_key_value_heads": 4}, "6 query heads cannot share 4 KV heads"),
    ({"head_dim": 15}, "width is 15"), ({"head_dim": 0}, "head_dim is 0"),
    ({"head_dim": ..., "num_attention_heads": 32, "num_key_value_heads": 32}, "width is 3"),
    ({"hidden_size": ...}, "hidden_size is missing"), ({"hidden_size": "96"}, "hidden_size is '96'"),
    ({"hidden_size": True}, "hidden_size is True"), ({"hidden_size": -96}, "hidden_size is -96"),
    ({"hidden_size": 96.0}, "hidden_size is 96.0"), ({"vocab_size": 10 ** 400}, "vocab_size is beyond all bounds"),
    ({"num_hidden_layers": 10 ** 9}, "num_hidden_layers is 1000000000"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"), ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"rope_theta": float("inf")}, "rope_theta is inf"), ({"rope_theta": "1e4"}, "rope_theta is '1e4'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"), ({"hidden_act": 5}, "hidden_act is 5"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ({"attention_bias": 1}, "attention_bias is 1"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised by 'gptq'"),
    ({"quantization_config": {}}, "quantised by 'unknown'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"eos_token_id": "2"}, "eos_token_id is '2'"), ({"eos_token_id": [2, None]}, "eos_token_id is"),
    ({"eos_token_id": True}, "eos_token_id is True"),
])
def test_impossible_values_are_named(changes, words):
    assert words in refused(**changes)


@pytest.mark.parametrize("changes", [
    {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}, {"architectures": ["LlamaModel"]},
    {"architectures": ..., "model_type": "gpt2"}, {"architectures": ..., "model_type": ...},
    {"architectures": "LlamaForCausalLM "}, {"architectures": [5]}, {"architectures": {"a": 1}},
    {"architectures": [["x"]]}, {"model_type": "qwen2"}, {"architectures": ["X\n" * 999]},
])
def test_other_architectures_are_refused_by_name(changes):
    message = refused(**changes)
    assert "not supported" in message
    assert "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM" in message


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16, "beta_slow": 2,
        "attention_factor": 1.5, "mscale": 0.7, "mscale_all_dim": 0.9, "truncate": False}


@pytest.mark.parametrize("kind, values, wanted", [
    ("default", {}, RopeScaling()),
    ("linear", {"factor": 2.0}, RopeScaling("linear", 2.0, 512)),
    ("dynamic", {"factor": 3}, RopeScaling("dynamic", 3.0, 512)),
    ("llama3", LLAMA3, RopeScaling("llama3", 8.0, 64, 1.0, 4.0)),
    ("yarn", {"factor": 4.0}, RopeScaling("yarn", 4.0, 512)),
    ("yarn", {"factor": None, "original_max_position_embeddings": 128}, RopeScaling("yarn", 4.0, 128)),
    ("yarn", YARN, RopeScaling("yarn", 4.0, 128, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5, mscale=0.7,
                               mscale_all_dim=0.9, truncate=False)),
])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scalings_in_every_spelling(kind, values, wanted, key):
    # transformers 4
    c = parsed(rope_theta=5e5, rope_scaling={key: kind, **values})
    assert (c.rope, c.rope_theta) == (wanted, 5e5)
    # transformers 5, flat and per layer type
    five = {"rope_type": kind, "rope_theta": 5e5, **values}
    c = parsed(rope_theta=..., torch_dtype=..., dtype="bfloat16", rope_parameters=five)
    assert (c.rope, c.rope_theta) == (wanted, 5e5)
    nested = {"full_attention": five, "sliding_attention": None}
    assert parsed(rope_theta=..., rope_parameters=nested).rope == wanted


def test_rope_figures_in_both_places():
    assert parsed(rope_theta=7.0, rope_parameters={"rope_type": "default"}).rope_theta == 7.0
    both = parsed(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"})
    assert both.rope.kind == "linear"
    outside = parsed(original_max_position_embeddings=99, rope_scaling={"type": "yarn", **YARN})
    assert outside.rope.original_max_positions == 99


@pytest.mark.parametrize("changes, words", [
    ({"rope_scaling": {"type": "longrope"}}, "rope scaling 'longrope' is not supported"),
    ({"rope_scaling": {"type": 5}}, "type is 5"), ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
    ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
    ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor is nan"),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor 4.0"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
    ({"rope_scaling": {"rope_type": "yarn", **YARN}, "rope_theta": 1}, "yarn needs one above 1"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2}, "width 2"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": 5.0}}},
     "rope_parameters differ between full_attention and sliding_attention"),
])
def test_impossible_rope(changes, words):
    assert words in refused(**changes)


@pytest.mark.parametrize("changes, windows", [
    ({"sliding_window": 64}, (None, None)),                                      # llama has none
    (MISTRAL | {"sliding_window": 64}, (64, 64)), (MISTRAL | {"sliding_window": None}, (None, None)),
    (QWEN2 | {"sliding_window": 64}, (None, None)),
    (QWEN2 | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, (None, 64)),
    (QWEN2 | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, (64, 64)),
    (QWEN2 | {"sliding_window": 64, "use_sliding_window": True}, (None, None)),  # from layer 28 on
    (QWEN3 | {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, (None, None)),
    (QWEN3 | {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0,
              "layer_types": ["sliding_attention", "full_attention"]}, (64, None)),
    (QWEN2 | {"layer_types": ["full_attention"] * 2, "sliding_window": None}, (None, None)),
])
def test_sliding_windows(changes, windows):
    assert parsed(**changes).windows == windows


@pytest.mark.parametrize("changes, words", [
    (MISTRAL | {"sliding_window": 0}, "sliding_window is 0"),
    (QWEN2 | {"layer_types": ["sliding_attention"] * 2}, "no sliding window"),
    (QWEN2 | {"layer_types": ["full_attention"]}, "does not list 2 layers"),
    (QWEN2 | {"layer_types": ["linear_attention"] * 2}, "'linear_attention' for layer 0"),
    (QWEN2 | {"max_window_layers": -1}, "max_window_layers is -1"),
])
def test_impossible_windows(changes, words):
    assert words in refused(**changes)


def test_biases_and_norms_of_each_architecture():
    c = parsed(attention_bias=True, mlp_bias=True)
    assert c.qkv_bias and c.output_bias and c.mlp_bias
    c = parsed(**QWEN2, attention_bias=True, mlp_bias=True)
    assert c.qkv_bias and not c.output_bias and not c.mlp_bias and not c.qk_norm
    c = parsed(**QWEN3, attention_bias=True)
    assert c.qkv_bias and c.output_bias and c.qk_norm
    c = parsed(**MISTRAL, attention_bias=True)
    assert not c.qkv_bias and not c.output_bias


def test_end_tokens_are_the_union():
    c = parsed({"eos_token_id": [5, 7]}, eos_token_id=3)
    assert c.eos_ids == (3, 5, 7)
    assert parsed({"eos_token_id": [5, 7]}, eos_token_id=...).eos_ids == (5, 7)
    assert parsed({}, eos_token_id=None).eos_ids == ()
    assert parsed({"bos_token_id": 9}, bos_token_id=None).bos_id == 9
    warnings: list[str] = []
    c = hf_config("x", tiny(eos_token_id=[2, 307, -1]), {}, warnings=warnings)
    assert c.eos_ids == (2,) and len(warnings) == 1 and "outside of the vocabulary of 307" in warnings[0]


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
                    max_leaves=5)
KEYS = sorted({*TINY, "rope_scaling", "rope_parameters", "sliding_window", "layer_types", "use_sliding_window",
               "max_window_layers", "attention_bias", "mlp_bias", "quantization_config", "partial_rotary_factor"})


@given(st.sampled_from([{}, MISTRAL, QWEN2, QWEN3]), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3), JSON,
       st.sampled_from(["linear", "dynamic", "yarn", "llama3", "default"]))
@settings(max_examples=150, deadline=None)
def test_any_config_is_read_or_refused(names, changes, value, kind):
    for config in (tiny(**names | changes), tiny(**names, rope_scaling={"rope_type": kind, **YARN, "factor": value})):
        try:
            found = hf_config("config.json", config, {"eos_token_id": value})
            assert found.n_heads % found.n_kv_heads == 0 and len(found.windows) == found.n_layers
        except ModelError as error:
            assert "\n" not in str(error) and len(str(error)) < 600


# GGUF

def gguf_model(path, changes: dict | None = None, arch: str = "llama", config: dict | None = None,
               tensors: dict | None = None, extra: dict | None = None) -> str:
    """A file of the tiny model with metadata replaced, added, or (None) left out."""
    config = config or tiny()
    writer = gguf_writer(path, config, arch)
    for key, value in (changes or {}).items():
        key = key.replace("ARCH", arch)
        writer.kv_data[0].pop(key, None)
        if value is not None:
            kind = (GGUFValueType.ARRAY if isinstance(value, list) else GGUFValueType.BOOL if isinstance(value, bool)
                    else GGUFValueType.STRING if isinstance(value, str) else GGUFValueType.FLOAT32
                    if isinstance(value, float) else GGUFValueType.INT64)
            writer.add_key_value(key, value, kind)
    add_tensors(writer, gguf_tensors(config, tensors or random_tensors(config), arch) | (extra or {}))
    finish(writer)
    return str(path)


def test_gguf_has_the_figures_of_the_folder(tmp_path):
    for arch, names in (("llama", {}), ("qwen2", QWEN2), ("qwen3", QWEN3)):
        config = tiny(**names, eos_token_id=[2, 5, 9])
        ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 5,
               "tokenizer.ggml.eom_token_id": 9}
        found, reader = open_model(gguf_model(tmp_path / f"{arch}.gguf", ids, arch, config))
        reader.close()
        wanted, reader = open_model(write_folder(tmp_path / arch, config, random_tensors(config)))
        reader.close()
        assert dataclasses.replace(found, rms_eps=1e-5, name="") == dataclasses.replace(wanted, name="")
        assert found.rms_eps == pytest.approx(1e-5) and found.name == f"{arch}.gguf"


@pytest.mark.parametrize("changes, words", [
    ({"general.architecture": "grok"}, "architecture grok is not supported; these are: llama, qwen2, qwen3"),
    ({"general.architecture": None}, "general.architecture is missing"),
    ({"general.type": "adapter"}, "holds a 'adapter'"),
    ({"llama.expert_count": 8}, "expert_used_count is missing"),
    ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "expert_used_count is 9, but there are 8 experts"),
    ({"llama.block_count": 0}, "block_count is 0"), ({"llama.block_count": 2 ** 31}, "block_count is 2147483648"),
    ({"llama.attention.head_count_kv": 4}, "6 query heads cannot share 4"),
    ({"llama.attention.head_count_kv": 0}, "head_count_kv is 0"),
    ({"llama.attention.head_count_kv": [2, 1]}, "differs between layers"),
    ({"llama.attention.value_length": 40}, "value_length is 40"),
    ({"llama.rope.dimension_count": 8}, "dimension_count is 8"),
    ({"llama.context_length": None}, "context_length is missing"),
    ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
    ({"llama.embedding_length": "96"}, "embedding_length is '96'"),
    ({"llama.attention.causal": False}, "attention.causal False"),
    ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
    ({"llama.attention.sliding_window": 8, "llama.attention.sliding_window_pattern": 4}, "has not 2 flags"),
    ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id is 'x'"),
])
def test_gguf_metadata_that_cannot_be(tmp_path, changes, words):
    path = gguf_model(tmp_path / "m.gguf", changes)
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert words in str(caught.value) and "m.gguf" in str(caught.value)


@pytest.mark.parametrize("changes, wanted", [
    ({}, RopeScaling()), ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, RopeScaling()),
    ({"llama.rope.scaling.factor": 4.0}, RopeScaling("linear", 4.0, 512)),
    ({"llama.rope.scale_linear": 2.0}, RopeScaling("linear", 2.0, 512)),
    ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, RopeScaling()),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
      "llama.rope.scaling.original_context_length": 128}, RopeScaling("yarn", 4.0, 128)),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.yarn_beta_fast": 16.0,
      "llama.rope.scaling.yarn_beta_slow": 2.0, "llama.rope.scaling.attn_factor": 0.5},
     RopeScaling("yarn", 4.0, 512, beta_fast=16.0, beta_slow=2.0, attention_factor=0.5 * (0.1 * np.log(4.0) + 1))),
])
def test_gguf_rope(tmp_path, changes, wanted):
    assert read_config(gguf_model(tmp_path / "m.gguf", changes)).rope == wanted


def test_gguf_head_widths(tmp_path):
    config = tiny(head_dim=24)
    assert read_config(gguf_model(tmp_path / "a.gguf", config=config)).head_dim == 24
    neither = {"llama.attention.key_length": None, "llama.attention.value_length": None,
               "llama.rope.dimension_count": None}
    assert read_config(gguf_model(tmp_path / "b.gguf", neither)).head_dim == 16
    uniform = {"llama.attention.head_count": [6, 6], "llama.feed_forward_length": [160, 160]}
    assert read_config(gguf_model(tmp_path / "c.gguf", uniform)).n_heads == 6


def test_gguf_windows(tmp_path):
    window = {"llama.attention.sliding_window": 64}
    assert read_config(gguf_model(tmp_path / "a.gguf", window)).windows == (64, 64)
    window["llama.attention.sliding_window_pattern"] = [True, False]
    assert read_config(gguf_model(tmp_path / "b.gguf", window)).windows == (64, None)


def test_gguf_rope_factors(tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = gguf_model(tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    assert read_config(path).rope.factors == tuple(factors.tolist())
    for wrong, words in ((factors[:5], "shape"), (factors * 0, "not positive"), (factors * np.nan, "not positive")):
        path = gguf_model(tmp_path / "w.gguf", extra={"rope_freqs.weight": wrong})
        with pytest.raises(ModelError, match=f"rope_freqs.weight.*{words}"):
            open_model(path)


# Paths

def test_paths_that_are_no_model(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"hello")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model.safetensors").write_bytes(file_of(random_tensors(tiny())))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "junk.gguf").write_bytes(b"hello there, this is text")
    for path, words in ((tmp_path / "nowhere", "No such file"), ("org/name", "not downloaded"),
                        (tmp_path / "empty", "holds no model"), (tmp_path / "file", "not a GGUF file"),
                        (tmp_path / "bare", "no config.json"), (tmp_path / "pipe", "neither a folder"),
                        (tmp_path / "bare" / "model.safetensors", "give its folder"),
                        (tmp_path / "junk.gguf", "not a GGUF file"), (f"{tmp_path}/a\0b", "null")):
        for function in (open_model, open_checkpoint, read_config):
            with pytest.raises(ModelError, match=words) as caught:
                function(str(path))
            assert "\n" not in str(caught.value)


def test_folders_around_gguf_files(tmp_path):
    (tmp_path / "set").mkdir()
    write_gguf(tmp_path / "set" / "m.gguf", tiny(), random_tensors(tiny()), split_max_tensors=4)
    first, reader = open_model(str(tmp_path / "set"))
    assert reader.kind == "gguf" and len(reader.sources) == 6
    # A config.json beside it, as on a hub, is not the model
    (tmp_path / "set" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert open_model(str(tmp_path / "set"))[0] == first == read_config(str(tmp_path / "set"))
    assert open_checkpoint(str(tmp_path / "set")).tensors == reader.tensors


def test_figures_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    assert read_config(str(tmp_path)).eos_ids == (2, 7)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match="generation_config.json: is not valid JSON"):
        read_config(str(tmp_path))


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b'{"a": ' + b"9" * 5000 + b"}", b"[" * 30000])
def test_damaged_config_json(tmp_path, text):
    write_folder(tmp_path, tiny(), random_tensors(tiny()))
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ModelError, match="config.json") as caught:
        open_model(str(tmp_path))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
