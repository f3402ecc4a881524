"""The weight formats in memory: exact where the file's values are exact in them, close where they are not."""

from __future__ import annotations

import numpy as np
import pytest
from case_list import BY_NAME, new
from cases import Case, prompts, read_safetensors, shapes, values, write_folder
from comparing import check, run_case, same_bits
from naive_llama import NaiveLlama
from recorded import Recorded, load_recorded, relative_error
from to_gguf import write_gguf

from mpillm import kernels


@pytest.mark.parametrize("name, weights", [("ratio4", "bf16"), ("nine", "f16")])
def test_exact_in_the_format_of_the_file(name, weights, tmp_path, monkeypatch):
    if kernels.tier() in ("avx512", "amx"):
        monkeypatch.setenv("MPILLM_ISA", "avx2")        # the higher ones round what bf16 weights multiply
    wanted = load_recorded(name)
    model = write_folder(BY_NAME[name], tmp_path / "model")
    check(run_case(tmp_path, model, wanted, 2, weights=weights), wanted)


def test_auto_keeps_what_the_file_has(tmp_path):
    wanted = load_recorded("ratio4")
    model = write_folder(BY_NAME["ratio4"], tmp_path / "model")
    same_bits(run_case(tmp_path, model, wanted, 1, weights="auto", name="auto"),
              run_case(tmp_path, model, wanted, 1, weights="bf16", name="bf16"), ["p0", "p3"])


class RoundedInputs(NaiveLlama):
    """The twin of quantised weights: what is multiplied is rounded to eight bits in blocks of 32, as ggml does."""

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return super().linear(rounded(x), name)

    def head(self, x: np.ndarray) -> np.ndarray:
        return super().head(rounded(x))


def rounded(x: np.ndarray) -> np.ndarray:
    blocks = x.reshape(len(x), -1, 32)
    d = np.abs(blocks).max(axis=2, keepdims=True) / 127
    q = blocks / np.where(d > 0, d, 1)
    return (np.sign(q) * np.floor(np.abs(q) + 0.5) * d.astype(np.float16)).reshape(x.shape)


BLOCKS = Case("blocks", new("llama", (12, 4), 256, 768, head_dim=64), lengths=(5, 20))


@pytest.mark.parametrize("case, kind, ranks", [
    (BY_NAME["tiny"], "Q8_0", 1), (BY_NAME["tiny"], "Q4_0", 3), (BLOCKS, "Q4_K", 5),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (BY_NAME["tiny"], "Q8_0", 3), (BY_NAME["tiny"], "Q4_1", 3), (BLOCKS, "Q6_K", 3)))],
    ids=lambda x: getattr(x, "name", str(x)))
def test_quantised_formats_round_inputs_to_eight_bits_and_nothing_else(case, kind, ranks, tmp_path):
    """Most rows agree to float32's precision; in some a value came to the other side of a rounding border, and what
    follows from that is no more than the rounding itself does. Slices of K-quants begin inside their blocks, none
    inside a block of 32: there each rank would round its part of the block by itself."""
    path = tmp_path / "model.gguf"
    tensors = write_gguf(case.config, read_safetensors(write_folder(case, tmp_path / "folder")), path, kind)
    twin, exact = RoundedInputs(case.config, tensors), NaiveLlama(case.config, tensors)
    wanted = [Recorded(prompt, *exact.greedy(prompt, 4)) for prompt in list(prompts(case))[:3]]
    found, rows = run_case(tmp_path, path, wanted, ranks, weights="auto"), []
    for i, prompt in enumerate(wanted):
        logits = found.logits(f"p{i}")[:len(prompt.prompt)]
        rows += [relative_error(*pair) for pair in zip(logits, twin.logits(prompt.prompt), strict=True)]
        assert 1e-3 < relative_error(logits, exact.logits(prompt.prompt)) < 0.05
    assert np.median(rows) < 1e-5 and max(rows) < 0.05, sorted(rows)


def test_keys_and_values_of_other_types_are_exchanged_as_any(tmp_path):
    """v as Q6_K beside q and k as Q4_K, as files of type Q4_K_M have it: two products, whose results are swapped."""
    path = tmp_path / "model.gguf"
    tensors = write_gguf(BLOCKS.config, read_safetensors(write_folder(BLOCKS, tmp_path / "folder")), path, "Q4_K",
                         others={"v_proj": "Q6_K"})
    wanted = [Recorded(prompt, *NaiveLlama(BLOCKS.config, tensors).greedy(prompt, 3))
              for prompt in list(prompts(BLOCKS))[:2]]
    found = [run_case(tmp_path, path, wanted, 3, mode, weights="auto") for mode in ("redundant", "allgather")]
    same_bits(*found, ["p0", "p1"])
    for i, prompt in enumerate(wanted):
        logits = found[0].logits(f"p{i}")[:len(prompt.prompt)]
        assert relative_error(logits, prompt.logits[:len(prompt.prompt)]) < 0.05


def test_the_recipe_is_not_flat():
    """A model whose layers add nothing would pass any comparison: each of them has to matter."""
    case, prompt = BY_NAME["tiny"], load_recorded("tiny")[2].prompt
    tensors = {name: values(case, name, shape) for name, shape in shapes(case.config).items()}
    whole = NaiveLlama(case.config, tensors).logits(prompt)
    for name in tensors:
        if "proj" in name:
            without = NaiveLlama(case.config, tensors | {name: np.zeros_like(tensors[name])}).logits(prompt)
            assert relative_error(without, whole) > 0.05, name
