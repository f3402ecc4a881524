"""GGUF files of the small checkpoints: the same model as the folder, whatever the container and the types.

Where the stored values are the recipe's own (F32, exact BF16), the recorded logits of transformers count; where they
are quantised, the slow twin's on the dequantised weights. None of the files has a tokenizer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from case_list import BY_NAME, new, old
from cases import DECODE, Case, prompts, read_safetensors, write_folder
from comparing import check, run_case, same_bits
from naive_llama import NaiveLlama, llama3
from recorded import Recorded, load_recorded
from to_gguf import write_gguf


def tensors_of(case: Case, folder) -> dict[str, np.ndarray]:
    return read_safetensors(write_folder(case, folder / "folder"))


def expected(case: Case, tensors: dict[str, np.ndarray], salt: int = 0) -> list[Recorded]:
    """What the slow twin makes of a case's prompts."""
    model = NaiveLlama(case.config, tensors)
    return [Recorded(prompt, *model.greedy(prompt, 4)) for prompt in prompts(case, salt)]


@pytest.mark.parametrize("name, kind, ranks", [
    ("biases", "F32", 3),      # permuted rows of weights and biases, two KV heads
    ("ratio1", "F32", 2),      # no output.weight: tied
    ("ratio7", "F32", 5),      # qwen2: nothing permuted
    ("norms", "BF16", 3),      # qwen3
])
def test_the_file_is_the_same_model_as_the_folder(name, kind, ranks, tmp_path):
    case, path = BY_NAME[name], tmp_path / "model.gguf"
    write_gguf(case.config, tensors_of(case, tmp_path), path, kind)
    check(run_case(tmp_path, path, load_recorded(name), ranks), load_recorded(name))


def test_long_context_factors_in_a_tensor_of_their_own(tmp_path):
    case, path = BY_NAME["llama3"], tmp_path / "model.gguf"
    base = case.config["rope_theta"] ** -(np.arange(0, 32, 2) / 32)
    factors = (base / llama3(base, case.config["rope_scaling"])).astype(np.float32)
    assert factors.max() == 8 and factors.min() == 1
    write_gguf(case.config, tensors_of(case, tmp_path), path, "BF16", extra={"rope_freqs.weight": factors})
    check(run_case(tmp_path, path, load_recorded("llama3"), 2), load_recorded("llama3"))


@pytest.mark.parametrize("kind, ranks", [("F16", 1), ("Q8_0", 4), ("Q4_0", 2), ("Q4_1", 3)])
def test_quantised_tensors_are_what_they_dequantise_to(kind, ranks, tmp_path):
    case, path = replace(BY_NAME["tiny"], lengths=(6, 30)), tmp_path / "model.gguf"
    tensors = write_gguf(case.config, tensors_of(case, tmp_path), path, kind)
    wanted = expected(case, tensors)
    check(run_case(tmp_path, path, wanted, ranks), wanted)


EXPERTS = Case("gguf_experts", new("qwen3_moe", (4, 2), 64, head_dim=16, num_experts=8, num_experts_per_tok=2,
                                   moe_intermediate_size=96, norm_topk_prob=True, mlp_only_layers=[],
                                   decoder_sparse_step=1, use_sliding_window=False), lengths=(6, 20))
WIDE_EXPERTS = Case("wide_experts", old("mixtral", (4, 2), 256, 512, num_local_experts=4, num_experts_per_tok=2,
                                        sliding_window=None), lengths=(5, 20))


@pytest.mark.parametrize("case, kind, ranks", [(EXPERTS, "Q8_0", 2), (WIDE_EXPERTS, "Q4_K", 3)])
def test_experts_in_one_tensor(case, kind, ranks, tmp_path):
    path = tmp_path / "model.gguf"
    tensors = write_gguf(case.config, tensors_of(case, tmp_path), path, kind)
    wanted = expected(case, tensors)
    check(run_case(tmp_path, path, wanted, ranks), wanted)


BLOCKS = Case("blocks", new("llama", (12, 4), 256, 768, head_dim=64), lengths=(5, 20))
HALVES = Case("halves", new("llama", (8, 8), 64, 96, head_dim=80), lengths=(5, 20))


@pytest.mark.parametrize("kind, ranks, mode", [("Q4_K", 12, "redundant"), ("Q6_K", 5, "allgather")])
def test_heads_and_columns_smaller_than_a_block_of_256(kind, ranks, mode, tmp_path):
    """A head is a quarter of a block; 768 columns are three blocks over five or twelve ranks."""
    path = tmp_path / "model.gguf"
    tensors = write_gguf(BLOCKS.config, tensors_of(BLOCKS, tmp_path), path, kind)
    wanted = expected(BLOCKS, tensors)
    check(run_case(tmp_path, path, wanted, ranks, mode), wanted)


def test_heads_that_end_inside_a_block_of_32(tmp_path):
    path = tmp_path / "model.gguf"
    tensors = write_gguf(HALVES.config, tensors_of(HALVES, tmp_path), path, "Q8_0")
    wanted = expected(HALVES, tensors)
    check(run_case(tmp_path, path, wanted, 8), wanted)


def test_any_part_of_a_split_set_opens_the_whole(tmp_path):
    case = BY_NAME["tiny"]
    tensors = tensors_of(case, tmp_path)
    write_gguf(case.config, tensors, tmp_path / "set.gguf", split_max_tensors=8)
    parts = sorted(tmp_path.glob("set-*.gguf"))
    assert len(parts) == 3, parts
    wanted = load_recorded("tiny")[:3]
    outputs = [run_case(tmp_path, model, wanted, 2, name=name)
               for name, model in (("first", parts[0]), ("second", parts[1]))]
    check(outputs[0], wanted)
    same_bits(*outputs, ["p0", "p1", "p2"])


def test_the_twin_agrees_with_what_was_recorded():
    """``expected`` is only as good as the twin: here on a case that transformers computed."""
    wanted = load_recorded("tiny")[1]
    case = BY_NAME["tiny"]
    from cases import shapes, values
    model = NaiveLlama(case.config, {name: values(case, name, shape) for name, shape in shapes(case.config).items()})
    ids, _ = model.greedy(wanted.prompt, DECODE)
    assert ids == wanted.ids
