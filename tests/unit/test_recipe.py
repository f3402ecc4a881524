"""Weight recipes: how they are written, what each rule is for, and that the model is the mix that they say."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st
from made_models import random_tensors, tiny, write_folder
from steps import logits_of_splits

from mpillm.cli.options import parser
from mpillm.cli.report import announce_rules, rules_table
from mpillm.config import RunConfig
from mpillm.engine.subject import open_subject
from mpillm.errors import UsageError
from mpillm.models import registry
from mpillm.models.load import memory_format
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import partition
from mpillm.quant.recipe import DEFAULT, FORMATS, GROUPS, parse

RULES = st.dictionaries(st.sampled_from((*GROUPS, DEFAULT)), st.sampled_from(FORMATS), min_size=1)


@given(RULES, st.randoms(use_true_random=False), st.sampled_from(["", " "]))
def test_a_recipe_is_what_is_written(rules, random, space):
    items = list(rules.items())
    random.shuffle(items)
    recipe = parse(f"{space},{space}".join(f"{group}{space}={space}{kind}" for group, kind in items))
    default = rules.get(DEFAULT, "auto")
    assert recipe.default == default and all(recipe.of(group) == rules.get(group, default) for group in GROUPS)
    assert recipe.of("experts", "ffn") == rules.get("experts", rules.get("ffn", default))
    assert parse(str(recipe)) == recipe and str(parse(str(recipe))) == str(recipe)
    assert RunConfig("in.jsonl", weights=str(recipe)).weights == str(recipe)


@given(st.text(alphabet="atnf=,q8_0 bf16de", max_size=30))
def test_any_text_is_a_recipe_or_one_line(text):
    try:
        parse(text)
    except UsageError as error:
        assert "\n" not in str(error) and str(error).startswith("--weights ") and "is not one of" in str(error) \
            or "there twice" in str(error)


def test_a_plain_format_is_a_recipe_without_rules():
    for kind in FORMATS:
        assert str(parse(kind)) == kind and parse(kind).rules == () and parse(kind).of("attn") == kind
    assert str(parse("default=bf16")) == "bf16" and str(parse("default=auto,head=q8_0")) == "head=q8_0"


@pytest.mark.parametrize("text, words", [
    ("int4", "'int4' is not one of auto, f32, bf16, f16, q8_0, q4_0, q4_1, nor a recipe"),
    ("atn=q8_0", "'atn' is not one of attn, ffn, shared, experts, embedding, head, default"),
    ("attn=q8", "'q8' is not one of auto, f32"), ("attn=q8_0,bf16", "'bf16' is not one of attn"),
    ("attn=q8_0,attn=q4_0", "attn is there twice"), ("attn=q8_0,", "'' is not one of attn"), ("", "'' is not one of"),
    ("ffn=" + "x" * 500, "xxx"),
])
def test_what_is_wrong_is_named(text, words):
    with pytest.raises(UsageError) as caught:
        RunConfig("in.jsonl", weights=text)
    message = str(caught.value)
    assert words in message and message.startswith("--weights ") and "\n" not in message and len(message) < 400
    with pytest.raises(UsageError, match="argument --weights: "):
        parser().parse_args(["--prompts", "in.jsonl", "--weights", text])


def test_the_order_of_rules_makes_no_other_run():
    """The resolved option is compared when a run is resumed."""
    one, other = (RunConfig("in.jsonl", weights=text) for text in
                  ("default=bf16,ffn=q4_0,attn=q8_0", "attn=q8_0, ffn=q4_0, default=bf16"))
    assert one.weights == other.weights == "attn=q8_0,ffn=q4_0,default=bf16"
    assert parser().parse_args(["--weights", "ffn=q4_0,attn=q8_0"]).weights == "attn=q8_0,ffn=q4_0"


MIX = {"attn": "q8_0", "ffn": "q4_0", "embedding": "bf16", "head": "f32"}
RECIPE = "attn=q8_0,ffn=q4_0,embedding=bf16,head=f32"


def group_of(name: str) -> str:
    """Which rule a tensor falls under, by its name."""
    return {"self_attn": "attn", "mlp": "ffn", "embed_tokens": "embedding"}.get(name.split(".")[-3] if "layers" in name
                                                                                else name.split(".")[-2], "head")


@contextlib.contextmanager
def opened(path):
    config, checkpoint = open_model(str(path))
    with contextlib.closing(checkpoint):
        yield config, Weights(checkpoint, config)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """80 inputs are no whole blocks: q8_0 fills them up, and the formats beside it must not see that."""
    config = tiny(hidden_size=80)
    tensors = {name: x / 4 if x.ndim == 2 else x for name, x in random_tensors(config).items()}
    return write_folder(tmp_path_factory.mktemp("recipe") / "model", config, tensors), config, tensors


def test_every_matrix_has_the_format_of_its_group(model):
    with opened(model[0]) as (figures, weights):
        for layer in range(2):
            for group in ("qkv", "output", "gate_up", "down"):
                names = registry.layer_matrices(layer, group)
                assert memory_format(weights, names, RECIPE) == MIX[group_of(names[0])]
        assert memory_format(weights, ["model.embed_tokens.weight"], RECIPE) == "bf16"
        assert memory_format(weights, ["lm_head.weight"], RECIPE) == "f32"
        assert registry.formats(figures, weights, RECIPE) == set(MIX.values())
        assert registry.formats(figures, weights, "attn=q8_0") == {"q8_0", "f32"}, "the rest as it is stored"


def test_logits_are_those_of_a_model_of_the_same_mix(model, tmp_path):
    """Values rounded to their formats and held in float32; products of quantised weights round activations too."""
    path, config, tensors = model
    mixed = {}
    for name, x in tensors.items():
        kind = MIX[group_of(name)] if x.ndim == 2 else "f32"
        wide = np.pad(x, ((0, 0), (0, -x.shape[-1] % 32))) if x.ndim == 2 else x
        used = GGMLQuantizationType[kind.upper()]
        mixed[name] = quants.dequantize(quants.quantize(wide, used), used).reshape(wide.shape)[..., :x.shape[-1]]
    write_folder(tmp_path / "mixed", config, mixed)
    wanted = logits_of_splits(tmp_path / "mixed", "f32", (1,))[1]
    plain = logits_of_splits(path, "f32", (1,))[1]
    for tp, found in logits_of_splits(path, RECIPE, (1, 2, 3, 4, 5)).items():
        assert np.std(found - wanted) < 0.02 * np.std(wanted), tp
    assert np.std(plain - wanted) > 0.05 * np.std(wanted), "else the mix could not be told from float32"


def test_heads_that_begin_within_a_block_stand_beside_zeros(model):
    """With 2, 4 and 5 ranks some hold as many stored inputs of o_proj as of down_proj, but not the same ones."""
    wanted = logits_of_splits(model[0], "f32", (1,))[1]
    for tp, found in logits_of_splits(model[0], "q8_0", (1, 2, 4, 5)).items():
        assert np.std(found - wanted) < 0.025 * np.std(wanted), tp


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_rules_that_all_say_one_format_are_that_format(model, kind):
    everything = ",".join(f"{group}={kind}" for group in GROUPS)
    for tp, found in logits_of_splits(model[0], everything, (1, 3)).items():
        assert np.array_equal(found, logits_of_splits(model[0], kind, (tp,))[tp])


def test_the_table_says_what_each_rule_matched(model, caplog):
    with opened(model[0]) as (figures, weights):
        asked = RECIPE.replace(",head=f32", ",experts=q4_1,default=f32")
        split = partition(registry.sizes(figures, weights, asked), 3)
        found = registry.matched(figures, weights, split, asked)
        assert [(m.rule, m.asked, m.formats, m.tensors) for m in found] == [
            ("attn", "q8_0", ("q8_0",), 8), ("ffn", "q4_0", ("q4_0",), 6), ("experts", "q4_1", (), 0),
            ("embedding", "bf16", ("bf16",), 1), (DEFAULT, "f32", ("f32",), 1)]
        vectors = 4 * 80 * 5
        whole = sum(registry.weight_bytes(figures, weights, split, asked, rank) for rank in range(3))
        assert sum(m.nbytes for m in found) == whole - 3 * vectors
        assert registry.matched(figures, weights, split, "q8_0") == ()
    assert "attn" in rules_table(found) and "KiB" in rules_table(found)
    with caplog.at_level(logging.INFO, "mpillm.run"):
        announce_rules(found)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "--weights: the rule experts=q4_1 matches no tensor of this model"]


@pytest.mark.parametrize("asked, kind, idle", [("embedding=q8_0,default=bf16", "q8_0", []),
                                               ("head=q8_0,embedding=q4_0,default=bf16", "q8_0", ["embedding"])])
def test_of_a_tied_model_the_head_rule_counts_before_the_embedding_rule(tmp_path, asked, kind, idle):
    config = tiny(tie_word_embeddings=True)
    write_folder(tmp_path / "m", config, random_tensors(config))
    with opened(tmp_path / "m") as (figures, weights):
        assert memory_format(weights, ["model.embed_tokens.weight"], asked) == kind
        split = partition(registry.sizes(figures, weights, asked), 1)
        assert [m.rule for m in registry.matched(figures, weights, split, asked) if not m.tensors] == idle
    logits_of_splits(tmp_path / "m", asked, (2,))


def test_a_plan_of_experts_has_the_recipe_of_each_role():
    """Bits for attention, shared and routed experts: shared takes ffn's rule, what no rule names the default."""
    where = Path(__file__).parents[2] / "examples/models/DeepSeek-V3/config.json"
    subject, _ = open_subject(str(where), "attn=q8_0,ffn=q4_1,experts=q4_0,default=bf16")
    assert subject.formats == ("bf16", "q4_0", "q4_1", "q8_0")
    recipe = {"attn": "q8_0", "ffn": "q4_1", "shared": "q4_1", "experts": "q4_0"}
    share = partition(registry.sizes(subject.model, subject.weights, subject.asked), 8).shares[3]
    for names, kind, _ in registry.matrices(subject.model, subject.weights, share, subject.asked):
        groups = subject.weights.groups(names[0])
        assert kind == next((recipe[group] for group in groups if group in recipe), "bf16"), names[0]
