"""Latent attention in a whole model: all modes alike, at every split, and a row's bits by themselves."""

from __future__ import annotations

import contextlib
import dataclasses

import made_deepseek as made
import numpy as np
import pytest
from made_models import write_folder
from steps import Member, Sums

from mpillm import kernels
from mpillm.engine import kvcache
from mpillm.jit import policy
from mpillm.models import registry
from mpillm.models.load import Loader
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import partition

MODES = (0, 1, 2, 3)
DENSE = {"num_hidden_layers": 2, "first_k_dense_replace": 2}
TOKENS = np.random.default_rng(8).integers(0, 211, 1400)


class Model:
    """One rank's model in a mode, its cache, and steps of it."""

    def __init__(self, path, mla, kv_type="f32", asked="f32", blocks=64):
        self.config, checkpoint = open_model(str(path))
        self.config = dataclasses.replace(self.config, mla=mla)
        with contextlib.closing(checkpoint):
            weights = Weights(checkpoint, self.config)
            split = partition(registry.sizes(self.config, weights, asked), 1)
            loader = Loader(self.config, weights, split.shares[0], asked, Member(Sums(1), 0))
            self.model = registry.BUILDERS[self.config.architecture](self.config, loader, None)
            assert loader.nbytes == registry.weight_bytes(self.config, weights, split, asked, 0)
        heads, key, value = kvcache.form(self.config, split.shares[0])
        self.cache = kvcache.allocate(kv_type, self.config.n_layers, blocks, heads, key, value_dim=value)
        for layer in self.cache:            # what nobody has written must not count
            for array in (layer.keys, layer.values):
                if array is not None:
                    array.view(np.int8)[:] = -1

    def step(self, *parts):
        """Logits of parts (table, prompt's length, first position, tokens), in their order."""
        tokens = np.concatenate([part[3] for part in parts])
        positions = np.concatenate([np.arange(start, start + len(own)) for _, _, start, own in parts])
        sequences = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part[3]) for part in parts])
        behind = positions >= np.repeat([part[1] for part in parts], [len(part[3]) for part in parts])
        order = np.argsort(~behind, kind="stable")
        tokens, positions, sequences = tokens[order], positions.astype(np.int32)[order], sequences[order]
        width = max(len(part[0]) for part in parts)
        table = np.array([[*part[0], *[0] * (width - len(part[0]))] for part in parts], np.int32)
        rows = kernels.Rows(tokens.astype(np.int64), positions, sequences, table,
                            *self.model.rope.rows(positions, positions + 1), generated=int(behind.sum()))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        return self.model(rows, self.cache, place).copy()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setattr(policy._Threads, "count", 1)


@pytest.fixture(scope="module", params=["v3", "v2"])
def folder(request, tmp_path_factory):
    config = {**(made.V3 if request.param == "v3" else made.V2), **DENSE}
    return write_folder(tmp_path_factory.mktemp(request.param), config, small(made.tensors(config)))


def small(tensors):
    """Weights at which logits neither saturate nor vanish."""
    return {name: x / np.sqrt(x.shape[-1]).astype(np.float32) if x.ndim > 1 else x + 1.5
            for name, x in tensors.items()}


def error(found, wanted):
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def chunked(model, tokens, prompt, sizes):
    """Logits of a sequence in steps of these numbers of rows; the last number goes on."""
    table, found, at = range(-(-len(tokens) // 64)), [], 0
    while at < len(tokens):
        size = sizes[min(len(found), len(sizes) - 1)]
        found.append(model.step((table, prompt, at, tokens[at:at + size])))
        at += size
    return np.concatenate(found)


def test_modes_agree(folder):
    tokens = TOKENS[:700]
    wanted = chunked(Model(folder, 0), tokens, 600, [600, 50, 1])
    for mla in (1, 2, 3):
        assert error(chunked(Model(folder, mla), tokens, 600, [600, 50, 1]), wanted) < 2e-5


@pytest.mark.parametrize("kv_type, tolerance", [("f16", 5e-3), ("bf16", 4e-2)])
@pytest.mark.parametrize("mla", MODES)
def test_cache_types_round_and_no_more(folder, mla, kv_type, tolerance):
    tokens = TOKENS[:150]
    wanted = chunked(Model(folder, 0), tokens, 100, [100, 1])
    found = chunked(Model(folder, mla, kv_type), tokens, 100, [100, 1])
    assert 0 < error(found, wanted) < tolerance


@pytest.mark.parametrize("kv_type, asked", [("f32", "f32"), ("bf16", "bf16"), ("f16", "q8_0")])
@pytest.mark.parametrize("mla", MODES)
def test_bits_of_a_row_depend_on_the_row(folder, mla, kv_type, asked, monkeypatch):
    """In another chunking, again after a preemption, beside other sequences, with two threads."""
    model, tokens = Model(folder, mla, kv_type, asked), TOKENS[:600]
    wanted = chunked(model, tokens, 530, [530, 1])
    for sizes in ([200, 400, 530, 1], [7, 64, 100, 600], [600]):
        assert (chunked(model, tokens, 530, sizes) == wanted).all(), sizes
    other = TOKENS[600:900]
    beside = model.step((range(20, 25), 300, 0, other), (range(10), 530, 0, tokens[:540]),
                        (range(30, 31), 3, 0, other[:9]))
    assert (beside[300:840] == wanted[:540]).all()
    monkeypatch.setattr(policy._Threads, "count", 2)
    again = Model(folder, mla, kv_type, asked)
    assert (chunked(again, tokens, 530, [530, 1]) == wanted).all()
