"""One arithmetic per format, through a whole model: a row's bits do not depend on what runs beside it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from made_models import random_tensors, tiny, write_folder
from test_setup import _Alone, asked

from mpillm import kernels
from mpillm.engine import kvcache, setup
from mpillm.jit import policy
from mpillm.models import registry
from mpillm.models.parse import open_model
from mpillm.models.weights import Weights
from mpillm.partition import partition

LENGTH, SEQUENCES = 40, 33


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    config = tiny(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    tensors = {name: tensor / 8 for name, tensor in random_tensors(config).items()}
    model, checkpoint = open_model(write_folder(tmp_path_factory.mktemp("one") / "model", config, tensors))
    with checkpoint:
        yield model, Weights(checkpoint, model)


def rows_of(built, steps: list[tuple[int, int]], blocks: int) -> kernels.Rows:
    """(sequence, position) of each row; sequence s has token (7 s + 3 p) at position p."""
    sequences, positions = np.array(steps, np.int32).T.copy()
    table = np.arange(SEQUENCES * blocks, dtype=np.int32).reshape(SEQUENCES, blocks)
    tokens = (7 * sequences + 3 * positions).astype(np.int64) % 307
    return kernels.Rows(tokens, positions, sequences, table, *built.rope.rows(positions, positions + 1))


def logits_of(built, cache, steps: list[list[tuple[int, int]]]) -> dict[tuple[int, int], bytes]:
    found = {}
    for step in steps:
        rows = rows_of(built, step, 1)
        logits = built(rows, cache, np.arange(len(step)))
        found.update({place: row.tobytes() for place, row in zip(step, logits, strict=True)})
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("weights, kv_type", [("f32", "f32"), ("bf16", "bf16"), ("f16", "f16"), ("q8_0", "q8_0"),
                                              ("q4_0", "bf16"), ("q4_1", "f16")])
def test_alone_in_a_batch_and_in_a_prefill_chunk(opened, weights, kv_type, threads, monkeypatch):
    monkeypatch.setattr(policy._Threads, "count", threads)
    model, tensors = opened
    split = partition(registry.sizes(model, tensors, weights), 1)
    built = setup.load_model(asked(weights=weights), model, tensors, SimpleNamespace(partition=split), 0, _Alone(),
                             None).model

    def run(steps):
        cache = kvcache.allocate(kv_type, model.n_layers, SEQUENCES, model.n_kv_heads, model.head_dim)
        return logits_of(built, cache, steps)

    alone = run([[(s, p)] for s in (0, 5, 32) for p in range(LENGTH)])
    assert all(np.isfinite(np.frombuffer(row, np.float32)).all() for row in alone.values())
    for batch in (2, 7, 16, 33):
        others = [s for s in range(SEQUENCES) if s not in (0, 5, 32)]
        together = sorted([0, 5, 32, *others][:max(batch, 3)])[:batch] if batch > 2 else [0, 5]
        found = run([[(s, p) for s in together] for p in range(LENGTH)])
        for place in alone.keys() & found.keys():
            assert found[place] == alone[place], (batch, place)
        assert len(alone.keys() & found.keys()) >= 2 * LENGTH
    for chunk in (LENGTH, 13):
        found = run([[(s, p) for s in (0, 5, 32) for p in range(start, min(LENGTH, start + chunk))]
                     for start in range(0, LENGTH, chunk)])
        assert found == alone, chunk
