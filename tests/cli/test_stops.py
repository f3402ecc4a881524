"""What stops a run before any work: one line that names the value and the remedy, the documented code, all ranks."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from case_list import BY_NAME
from cases import encoded, read_safetensors, write_folder, write_safetensors
from program import launch, write_lines
from tiny_text import write_model
from to_gguf import write_gguf

TINY = BY_NAME["tiny"]
USAGE, MODEL, INPUT, OUTPUT, MEMORY = 2, 3, 4, 5, 6
SECONDS = 60      # generous: the machine may be busy; a rank that waits for another waits for ever


def stop(folder: Path, code: int, words: tuple[str, ...], *arguments, model: Path | None = None, prompts=None,
         ranks: int = 1) -> str:
    """Run it: ends with the code, one error line with these words, and nothing else changed in the folder."""
    out = folder / "out"
    out.mkdir(exist_ok=True)
    prompts = prompts or write_lines(folder / "in.jsonl", [{"prompt_token_ids": [1, 2, 3], "max_tokens": 2}])
    before = sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*"))
    model = model or write_folder(TINY, folder / "model")
    ended = launch(ranks, ["--model", model, "--prompts", prompts, "--output", out / "o.h5", "--results",
                           out / "o.jsonl", *arguments], timeout=SECONDS)
    assert ended.code == code, (ended.code, ended.stderr[-3000:])
    assert len(ended.errors) == 1, ended.stderr[-3000:]
    assert "Traceback" not in ended.stderr and len(ended.errors[0]) < 600
    for word in words:
        assert word in ended.errors[0], (word, ended.errors[0])
    assert sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*")) == before, "an output was touched"
    return ended.errors[0]


@pytest.mark.parametrize("arguments, words", [
    (["--tp", 3], ("tp 3", "2")),
    (["--weights", "int3"], ("int3", "q8_0")),
    (["--kv-mode", "rows"], ("rows", "allgather", "sharded")),
    (["--max-batch", 0], ("max-batch", "0")),
    (["--temperature", "-1"], ("temperature", "-1")),
    (["--nonsense"], ("--nonsense",)),
    (["--max-model-len", 100000], ("100000", "512")),
], ids=lambda value: str(value[0]))
def test_options(arguments, words, tmp_path):
    stop(tmp_path, USAGE, words, *arguments, ranks=2)


def test_outputs_that_exist_or_cannot_be(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "o.h5").write_bytes(b"somebody's")
    stop(tmp_path, OUTPUT, ("o.h5", "--overwrite"))
    # not even then: it is no HDF5 file, so it may be precious
    stop(tmp_path, OUTPUT, ("o.h5",), "--overwrite")
    (tmp_path / "out" / "o.h5").unlink()
    stop(tmp_path, OUTPUT, ("absent",), "--output", tmp_path / "absent" / "o.h5")
    (tmp_path / "out" / "o.jsonl").write_text("mine\n")
    stop(tmp_path, OUTPUT, ("o.jsonl", "--overwrite"))


def test_memory_that_holds_no_block(tmp_path):
    out = stop_anywhere(tmp_path, MEMORY, "--kv-memory", 100)
    assert "--kv-memory 100" in out


def stop_anywhere(folder: Path, code: int, *arguments) -> str:
    """As ``stop``, for what shows only after the start."""
    prompts = write_lines(folder / "in.jsonl", [{"prompt_token_ids": [1, 2, 3], "max_tokens": 2}])
    ended = launch(2, ["--model", write_folder(TINY, folder / "model"), "--prompts", prompts, "--output",
                       folder / "o.h5", "--results", folder / "o.jsonl", *arguments], timeout=SECONDS)
    assert ended.code == code and len(ended.errors) == 1, (ended.code, ended.stderr[-3000:])
    assert "Traceback" not in ended.stderr
    assert not (folder / "o.h5").exists() and not (folder / "o.jsonl").exists()
    return ended.errors[0]


def test_prompts_that_cannot_be_read(tmp_path):
    stop(tmp_path, INPUT, ("absent.jsonl",), prompts=tmp_path / "absent.jsonl")
    stop(tmp_path, INPUT, ("folder",), prompts=tmp_path)
    wide = tmp_path / "wide.jsonl"
    wide.write_text('{"prompt_token_ids": [1]}\n', encoding="utf-16")
    stop(tmp_path, INPUT, ("UTF-16", "UTF-8"), prompts=wide)


def broken(name: str, folder: Path) -> Path:
    """The tiny folder with one thing wrong."""
    path = write_folder(replace(TINY, shards=3) if "shard" in name else TINY, folder / "broken")
    config = json.loads((path / "config.json").read_text())
    weights, tensors = path / "model.safetensors", encoded(TINY)
    if name == "absent":
        shutil.rmtree(path)
    elif name == "empty":
        shutil.rmtree(path)
        path.mkdir()
    elif name == "a text":
        shutil.rmtree(path)
        path.write_text("not a model")
    elif name == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif name == "header":
        weights.write_bytes(b"\xff" * 7 + weights.read_bytes()[7:])
    elif name == "absent shard":
        (path / "model-00002-of-00003.safetensors").unlink()
    elif name == "pointer":
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 805096\n")
    elif name == "no head":
        write_safetensors(weights, {key: value for key, value in tensors.items() if key != "lm_head.weight"})
    elif name == "shape":
        write_safetensors(weights, tensors | {"model.norm.weight": ("F32", (95,), tensors["model.norm.weight"][2][4:])})
    elif name == "nan":
        key = "model.layers.1.mlp.up_proj.weight"
        values = np.frombuffer(tensors[key][2], np.float32).copy()
        values[1234] = np.nan
        write_safetensors(weights, tensors | {key: ("F32", tensors[key][1], values.tobytes())})
    elif name.startswith("dtype "):
        size = {"F64": 8, "BOOL": 1}[name[6:]]
        write_safetensors(weights, tensors | {"model.norm.weight": (name[6:], (96,), bytes(96 * size))})
    else:
        key, value = name.split("=")
        config[key] = json.loads(value)
    if path.is_dir() and name != "empty":
        (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name, words", [
    ("absent", ("broken",)), ("empty", ("config.json",)), ("a text", ("broken",)), ("cut", ("model.safetensors",)),
    ("header", ("model.safetensors",)), ("absent shard", ("model-00002-of-00003.safetensors",)),
    ("pointer", ("git-lfs",)), ("no head", ("lm_head.weight", "--tie-embeddings")),
    ("shape", ("model.norm.weight", "95", "96")),
    *((f"dtype {kind}", ("model.norm.weight", kind)) for kind in ("F64", "BOOL")),
    ('architectures=["GPT2LMHeadModel"]', ("GPT2LMHeadModel", "LlamaForCausalLM")),
    ("num_key_value_heads=4", ("4", "6")), ("num_key_value_heads=0", ("num_key_value_heads", "0")),
    ("hidden_act=\"gelu\"", ("gelu", "silu")), ("head_dim=15", ("15",)),
])
def test_models(name, words, tmp_path):
    stop(tmp_path, MODEL, words, model=broken(name, tmp_path))


def test_a_nan_is_named_by_the_rank_that_reads_it(tmp_path):
    """Seen only when the weights are loaded: one of two ranks ends the job for both."""
    error = stop_anywhere(tmp_path, MODEL, "--model", broken("nan", tmp_path))
    assert "model.layers.1.mlp.up_proj.weight" in error


@pytest.mark.parametrize("name", ["a part is missing", "two sets", "cut", "big-endian", "experts"])
def test_gguf_files(name, tmp_path):
    tensors = read_safetensors(write_folder(TINY, tmp_path / "folder"))
    at = tmp_path / "gguf"
    at.mkdir()
    more = {"split_max_tensors": 8} if name in ("a part is missing", "two sets") else {}
    if name == "big-endian":
        import gguf
        more["endianess"] = gguf.GGUFEndian.BIG
    write_gguf(TINY.config, tensors, at / "m.gguf", architecture="mixtral" if name == "experts" else None, **more)
    files = sorted(at.glob("*.gguf"))
    words: tuple[str, ...] = (files[0].name,)
    if name == "a part is missing":
        files[2].unlink()
        words = (files[2].name,)
    elif name == "two sets":
        write_gguf(TINY.config, tensors, tmp_path / "n.gguf", split_max_tensors=6)
        sorted(tmp_path.glob("n-*.gguf"))[1].replace(files[1])
        words = (files[1].name,)
    elif name == "cut":
        files[0].write_bytes(files[0].read_bytes()[:-100])
    elif name == "experts":
        words = ("mixtral", "qwen2")
    stop(tmp_path, MODEL, words, model=files[0])


def test_a_stop_is_quick(tmp_path):
    """Five ranks, of which one finds the fault: all are gone in seconds."""
    write_model(tmp_path / "model")
    began = time.monotonic()
    stop(tmp_path, INPUT, ("absent",), prompts=tmp_path / "absent", ranks=5)
    assert time.monotonic() - began < SECONDS
