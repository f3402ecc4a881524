"""The prompts file as a file: empty, blank, a device, a pipe, packed, with lines that no program should split."""

from __future__ import annotations

import gzip
import json
import os
import threading

import h5py
import pytest
from program import run
from tiny_text import write_model

RUN = ("--temperature", 0, "--max-tokens", 3, "--weights", "f32", "--kv-type", "f32", "--ignore-eos")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write_model(folder / "model")
    return folder


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n\t\n", None], ids=["empty", "blank", "/dev/null"])
def test_nothing_to_do_is_done(content, folder):
    prompts = folder / "nothing.jsonl"
    if content is None:
        prompts = type(prompts)("/dev/null")
    else:
        prompts.write_bytes(content)
    outputs = run(folder, 2, folder / "model", prompts, *RUN, name="nothing")
    assert outputs.results.read_bytes() == b""
    with h5py.File(outputs.hdf5) as file:
        assert file.attrs["schema_version"] == 2
        for name in ("requests", "sequences", "tokens", "logprobs", "steps"):
            assert len(file[name]) == 0, name
        assert len(file["ranks"]) == 2


BYTES = (b'\xef\xbb\xbf{"id":"a","prompt":"x"}\r\n\r\n{"id":"b","prompt":"caf\xe9"}\n\n{"id":"c","prompt":"y"}')


def check(outputs) -> None:
    assert [(r["line"], r["custom_id"], r["response"]["status_code"]) for r in outputs.lines] == [
        (1, "a", 200), (3, None, 400), (5, "c", 200)]


def test_mark_windows_ends_blanks_latin_1_and_no_last_newline(folder):
    plain = folder / "plain.jsonl"
    plain.write_bytes(BYTES)
    first = run(folder, 2, folder / "model", plain, *RUN, name="plain")
    check(first)
    packed = folder / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(BYTES))
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    feeder = threading.Thread(target=lambda: pipe.open("wb").write(BYTES), daemon=True)
    feeder.start()
    for name, prompts in (("packed", packed), ("pipe", pipe)):
        outputs = run(folder, 1, folder / "model", prompts, *RUN, name=name)
        check(outputs)
        assert [outputs.ids(name) for name in "ac"] == [first.ids(name) for name in "ac"]


def test_default_outputs_stand_beside_the_prompts(folder):
    from program import launch
    prompts = folder / "beside.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    ended = launch(2, ["--prompts", prompts, *RUN], env={"MPILLM_MODEL": str(folder / "model")})
    assert ended.code == 0, ended.stderr
    (result,) = map(json.loads, (folder / "beside.results.jsonl").read_text().splitlines())
    assert result["response"]["status_code"] == 200
    with h5py.File(folder / "beside.h5") as file:
        assert json.loads(file.attrs["config"])["prompts"] == str(prompts)


def test_a_folder_without_tokenizer_runs_ids_and_says_so_of_texts(folder):
    bare = folder / "bare"
    os.makedirs(bare)
    for name in ("config.json", "model.safetensors"):
        os.link(folder / "model" / name, bare / name)
    outputs = run(folder, 2, bare, [
        {"id": "ids", "prompt_token_ids": [1, 2, 3]}, {"id": "text", "prompt": "x"},
        {"id": "chat", "messages": [{"role": "user", "content": "x"}]},
        {"id": "stop", "prompt_token_ids": [1], "stop": "x"}],
        *RUN, name="bare")
    assert len(outputs.ids("ids")) == 3
    for name in ("text", "chat", "stop"):
        line = outputs.by_id[name]
        assert line["response"]["status_code"] == 400 and "tokenizer" in line["error"]["message"]
