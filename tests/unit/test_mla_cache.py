"""What latent attention caches, in bytes that are counted, and which modes a model and a memory can have."""

from __future__ import annotations

import dataclasses

import made_deepseek as made
import pytest
from made_models import write_folder

from mpillm import kernels
from mpillm.config import RunConfig
from mpillm.engine import kvcache, setup
from mpillm.errors import ResourceError, UsageError
from mpillm.models import registry
from mpillm.models.config import ModelConfig, RopeScaling
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import Share, Span, partition

V3 = ModelConfig(
    architecture="deepseek_v3", hidden=7168, n_layers=61, n_heads=128, n_kv_heads=1, head_dim=192, intermediate=18432,
    vocab=129280, max_positions=163840, rms_eps=1e-6, rope_theta=1e4, rope=RopeScaling(), tied=False, qkv_bias=False,
    output_bias=False, mlp_bias=False, qk_norm=False, windows=(None,) * 61, bos_id=0, eos_ids=(1,), q_rank=1536,
    kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
ALL = Share(0, 0, 0, Span(0, 128), Span(0, 1), Span(0, 2112), Span(0, 0), Span(0, 0))
LITE = dataclasses.replace(ALL, heads=Span(0, 16))        # DeepSeek-V2-Lite's heads with V3's layers, as in PR 235


@pytest.mark.parametrize("mla, share, kv_type, kv_type_v, wanted", [
    (0, ALL, "f16", "f16", 4_997_120), (0, ALL, "q8_0", "q8_0", 2_654_720),
    (0, LITE, "f16", "f16", 624_640), (0, LITE, "q8_0", "f16", 448_960), (0, LITE, "q8_0", "q8_0", 331_840),
    (1, ALL, "f16", "f16", 132_736), (1, ALL, "q8_0", "f16", 99_796), (1, ALL, "q8_0", "q8_0", 70_516),
    (2, ALL, "f16", "f16", 70_272), (2, ALL, "q8_0", "q8_0", 37_332),
    (3, ALL, "f16", "f16", 70_272), (3, ALL, "q8_0", "q8_0", 37_332)])
def test_bytes_of_a_token(mla, share, kv_type, kv_type_v, wanted):
    run = RunConfig("", kv_type=kv_type, kv_type_v=kv_type_v)
    model = dataclasses.replace(V3, mla=mla)
    assert kvcache.share_block_bytes(run, model, share) == wanted * kernels.BLOCK
    made_here = sum(layer.nbytes for layer in kvcache.share_cache(run, model, share, 2))
    assert made_here == 2 * wanted * kernels.BLOCK


def test_a_rank_without_heads_caches_nothing():
    share = dataclasses.replace(ALL, heads=Span(128, 128), kv_heads=Span(0, 0))
    for mla in range(4):
        assert kvcache.share_block_bytes(RunConfig(""), dataclasses.replace(V3, mla=mla), share) == 0


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    """A model of latent attention, and its weights."""
    config, checkpoint = open_model(write_folder(tmp_path_factory.mktemp("v3"), made.V3, made.tensors(made.V3)))
    yield config, Weights(checkpoint, config)
    checkpoint.close()


def test_auto_is_mode_3_with_larger_steps(latent):
    run, model = setup.decided(RunConfig(""), latent[0])
    assert (run.mla, model.mla, run.chunk) == ("3", 3, setup.LATENT_CHUNK)
    run, model = setup.decided(RunConfig("", prefill_chunk=100), latent[0])
    assert (model.mla, run.chunk) == (3, 100)
    run, model = setup.decided(RunConfig("", mla="1"), latent[0])
    assert (run.mla, model.mla, run.chunk) == ("1", 1, 512)


def test_a_cache_that_is_dealt_out_holds_latents_that_all_heads_attend_to(latent):
    """auto is mode 2 there, with steps as usual; modes that attend to keys of each head name those that do not."""
    run, model = setup.decided(RunConfig("", kv_mode="sharded"), latent[0])
    assert (run.mla, model.mla, run.chunk) == ("2", 2, 512)
    assert setup.decided(RunConfig("", kv_mode="sharded", mla="1", kv_type_v="f16"), latent[0])[1].mla == 1
    for mla in ("0", "3"):
        with pytest.raises(UsageError, match=f"--mla {mla} .* use --mla 1 or 2, or --kv-mode redundant or allgather"):
            setup.decided(RunConfig("", kv_mode="sharded", mla=mla), latent[0])
    with pytest.raises(UsageError, match="--kv-type-v f16: --mla 2 caches no values"):
        setup.decided(RunConfig("", kv_mode="sharded", kv_type_v="f16"), latent[0])
    run, model = setup.decided(RunConfig("", kv_mode="sharded", mla="1"), latent[0])
    split = partition(registry.sizes(model, latent[1], "f32"), 2, "sharded")
    modes = setup.other_modes(run, model, setup.Split(None, split, (), (), None))
    assert "--mla 2" in modes and "--mla 3" not in modes


def test_modes_that_a_model_cannot_have(latent):
    dense = dataclasses.replace(latent[0], architecture="llama", kv_rank=0)
    assert setup.decided(RunConfig(""), dense) == (RunConfig(""), dense)
    with pytest.raises(UsageError, match="--mla 2 is for models with latent attention .*llama has keys and values"):
        setup.decided(RunConfig("", mla="2"), dense)
    with pytest.raises(UsageError, match="--kv-type-v f16: --mla 3 caches no values"):
        setup.decided(RunConfig("", kv_type_v="f16"), latent[0])
    setup.decided(RunConfig("", kv_type_v="f16", mla="1"), latent[0])
    with pytest.raises(UsageError, match="mla"):
        RunConfig("", mla="4")


def test_a_cache_that_does_not_fit_names_the_modes_that_need_less(latent):
    config, weights = latent
    run, model = setup.decided(RunConfig("", mla="0", kv_memory=1000), config)
    split = partition(registry.sizes(model, weights, "f32"), 2)
    modes = setup.other_modes(run, model, setup.Split(None, split, (), (), None))
    with pytest.raises(ResourceError) as raised:
        setup.agree_on_blocks(run, 5, [0, 0], modes)
    assert "--mla 1 (which needs 60.0 KiB for a block instead of 150.0 KiB)" in str(raised.value), raised.value
    assert "--mla 2 (which needs 30.0 KiB" in str(raised.value)
    run, model = setup.decided(RunConfig("", mla="3"), config)
    assert setup.other_modes(run, model, setup.Split(None, split, (), (), None)) == ""
