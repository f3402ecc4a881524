"""Loading reads the bytes of the own slices and hardly more, and holds what it keeps and a few chunks."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import gguf
import pytest
from made_models import random_tensors, tiny, write_folder, write_gguf

from mpillm.formats.checkpoint import Checkpoint
from mpillm.models import load, registry
from mpillm.models.parse import open_checkpoint, open_model, read_config
from mpillm.models.weights import Weights
from mpillm.partition import Partition, Share, Span, partition
from mpillm.quant import layout

ROW_PARALLEL = (".o_proj.weight", ".down_proj.weight")
Q8_BYTES = 34                  # of a block of 32 values


class _Alone:
    def all_reduce(self, array):
        pass


def write(folder: Path, kind: str, **figures) -> str:
    """A random Llama as a folder of one dtype, or as a Q8_0 GGUF file."""
    config = tiny(**figures)
    tensors = random_tensors(config)
    if kind == "Q8_0":
        return write_gguf(folder / "model.gguf", config, tensors, kind=gguf.GGMLQuantizationType.Q8_0)
    return write_folder(folder / kind, config, tensors, kind)


def stored_bytes(checkpoint: Checkpoint, name: str, rows: int, columns: int) -> int:
    """Bytes of rows x columns of a tensor in the file."""
    dtype = checkpoint.tensors[name].dtype
    return rows * columns * Q8_BYTES // 32 if dtype == "Q8_0" else rows * columns * {"F32": 4, "BF16": 2}[dtype]


def file_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all tensors of the file."""
    return sum(stored_bytes(checkpoint, name, info.shape[0] if len(info.shape) == 2 else 1, info.shape[-1])
               for name, info in checkpoint.tensors.items())


def own(share: Share, name: str, head_dim: int) -> Span | None:
    """The outputs (of a row-parallel tensor: the inputs) that a share has of a tensor; None of a vector."""
    if name.endswith(("q_proj.weight", "o_proj.weight")):
        return share.heads.times(head_dim)
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        return share.kv_columns
    if "mlp." in name:
        return share.columns
    return share.vocab if "embed" in name or "lm_head" in name else None


def slices(weights: Weights, share: Share) -> tuple[int, int]:
    """Bytes of a share's slices of all matrices in the file, and the overhead beside them that may be read.

    The overhead: whole vectors, and of a quantised row-parallel matrix the two blocks of a row that the slice cuts.
    """
    checkpoint, matrices, overhead = weights.checkpoint, 0, 0
    for name in weights._stored:
        stored = weights._stored_name(name)
        shape, span = checkpoint.tensors[stored].shape, own(share, name, weights.config.head_dim)
        if span is None:
            overhead += stored_bytes(checkpoint, stored, 1, shape[0])
        elif name.endswith(ROW_PARALLEL):
            matrices += stored_bytes(checkpoint, stored, shape[0], span.size)
            if checkpoint.tensors[stored].dtype == "Q8_0" and span:
                cut = (span.start % 32 > 0) + (span.stop % 32 > 0)
                overhead += Q8_BYTES * shape[0] * cut
        else:
            matrices += stored_bytes(checkpoint, stored, span.size, shape[1])
    return matrices, overhead


def load_share(path: str, split: Partition, rank: int, asked: str) -> tuple[int, Weights]:
    """Bytes that loading a share reads from the file, and the tensors."""
    checkpoint = open_checkpoint(path)
    weights = Weights(checkpoint, read_config(path))
    before = checkpoint.bytes_read
    registry.BUILDERS["llama"](weights.config, load.Loader(weights.config, weights, split.shares[rank], asked,
                                                           _Alone()), None)
    return checkpoint.bytes_read - before, weights


def split_of(path: str, asked: str, tp: int, kv_mode: str = "redundant") -> Partition:
    model, checkpoint = open_model(path)
    with checkpoint:
        return partition(registry.sizes(model, Weights(checkpoint, model), asked), tp, kv_mode)


@pytest.mark.parametrize("kind, asked", [("F32", "auto"), ("BF16", "f32"), ("Q8_0", "auto"), ("Q8_0", "bf16"),
                                         ("F32", "q8_0")])
def test_a_rank_reads_its_slices_and_no_more(tmp_path, kind, asked):
    """For q8_0 in memory a slice is widened to whole blocks whatever the file has: that is overhead, too."""
    path = write(tmp_path, kind)
    for tp in (1, 3, 5):
        split = split_of(path, asked, tp)
        for rank in range(tp):
            read, weights = load_share(path, split, rank, asked)
            matrices, overhead = slices(weights, split.shares[rank])
            if kind == "F32" and asked == "q8_0":
                overhead += sum(4 * 96 * ((span.start % 32) + (-span.stop % 32)) for layer in range(2)
                                for span in (split.shares[rank].heads.times(16), split.shares[rank].columns) if span)
            assert matrices < read <= matrices + overhead, (tp, rank)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_one_rank_reads_every_tensor_once(tmp_path, kind):
    path = write(tmp_path, kind)
    read, weights = load_share(path, split_of(path, "auto", 1), 0, "auto")
    assert read == file_bytes(weights.checkpoint)


def test_a_tied_model_reads_its_table_once(tmp_path):
    path = write(tmp_path, "F32", tie_word_embeddings=True)
    read, weights = load_share(path, split_of(path, "auto", 1), 0, "auto")
    assert read == file_bytes(weights.checkpoint)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("tp", [3, 5])
def test_all_ranks_together_read_the_file_once(tmp_path, kind, tp):
    """With every K/V column computed once, only vectors and cut blocks are read by several ranks."""
    path = write(tmp_path, kind)
    split = split_of(path, "auto", tp, "allgather")
    total = overheads = 0
    for rank in range(tp):
        read, weights = load_share(path, split, rank, "auto")
        total += read
        overheads += slices(weights, split.shares[rank])[1]
    whole = file_bytes(weights.checkpoint)
    assert whole < total <= whole + overheads
    assert total < 1.25 * whole


BIG = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 3000, "num_attention_heads": 8,
       "num_key_value_heads": 4, "head_dim": 32}
CHUNK = 64 << 10


@pytest.mark.parametrize("kind, asked", [("F32", "auto"), ("BF16", "auto"), ("Q8_0", "auto"), ("F32", "q8_0")])
def test_loading_holds_what_it_keeps_and_a_few_chunks(tmp_path, monkeypatch, kind, asked):
    monkeypatch.setattr(load, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(layout, "_HUGE", 1 << 40)       # or large matrices lie where tracemalloc does not look
    path = write(tmp_path, kind, **BIG)
    for tp, rank in ((1, 0), (3, 1)):
        split = split_of(path, asked, tp)
        kept, peak = traced_load(path, split, rank, asked)
        assert kept > 10 * CHUNK, "else a tensor that is read whole would not be seen"
        assert kept <= peak < kept + (2 * load.WORKERS + 1) * CHUNK, (tp, (peak - kept) / CHUNK)


def traced_load(path: str, split: Partition, rank: int, asked: str) -> tuple[int, int]:
    """Bytes of weights that a share keeps, and the most that loading it held at once."""
    load_share(path, split, rank, asked)      # compiles what packs
    with open_checkpoint(path) as checkpoint:
        weights = Weights(checkpoint, read_config(path))
        loader = load.Loader(weights.config, weights, split.shares[rank], asked, _Alone())
        tracemalloc.start()
        try:
            with loader.ahead():
                registry.BUILDERS["llama"](weights.config, loader, None)
            return loader.nbytes, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
