"""``mpillm perplexity`` against transformers' figures, and lines of a run that score prompts alone."""

from __future__ import annotations

import json
import math
import random

import h5py
import pytest
from make_perplexity import RECORDED, TEXT
from program import EXACT, launch, run
from tiny_text import BOS, tokenizer, write_model

from mpillm.cli import perplexity
from mpillm.engine import score
from mpillm.errors import InputError, OutputError, UsageError

F32 = ("--weights", "f32", "--kv-type", "f32")
FIGURES = {(f["window"], f["stride"]): f for f in json.loads(RECORDED.read_text())["figures"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("perplexity")
    write_model(folder / "model")
    (folder / "text.txt").write_bytes(TEXT.encode())
    return folder


def score_text(folder, ranks: int, *options, name: str) -> dict:
    """What the command wrote; what it printed says the same."""
    path = folder / f"{name}.json"
    ended = launch(ranks, ["perplexity", "--model", folder / "model", "--text", folder / "text.txt", "--json", path,
                           *F32, *options])
    assert ended.code == 0 and "Traceback" not in ended.stderr, ended.stderr[-3000:]
    found = json.loads(path.read_text())
    spread = f" +- {found['perplexity_stderr']:.4f} ({found['tokens']} tokens scored, "
    assert ended.stdout.startswith(f"perplexity {found['perplexity']:.4f}{spread}"), ended.stdout
    return found


def check(found: dict, recorded: dict) -> None:
    for name in ("tokens", "window", "stride"):
        assert found[name] == recorded[name], name
    for name in ("nll_mean", "nll_stderr"):
        assert found[name] == pytest.approx(recorded[name], rel=2e-6), name
    assert found["perplexity"] == pytest.approx(math.exp(recorded["nll_mean"]), rel=1e-4)
    assert found["perplexity_stderr"] == pytest.approx(found["perplexity"] * recorded["nll_stderr"], rel=1e-4)
    bits = recorded["nll_mean"] * recorded["tokens"] / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits / len(TEXT.encode()), rel=1e-5)


@pytest.fixture(scope="module")
def whole(folder) -> dict:
    """One rank, the default window and stride."""
    return score_text(folder, 1, name="whole")


def test_the_figures_are_those_of_transformers(whole):
    check(whole, FIGURES[512, 256])
    assert (whole["windows"], whole["start_tokens"], whole["layout"]["tp"], whole["layout"]["dp"]) == (3, 1, 1, 1)
    assert whole["weight_formats"] == ["f32"] and whole["kv_type"] == "f32" and len(whole["text_sha256"]) == 64


def test_short_windows_over_replicas_of_two_ranks(folder):
    found = score_text(folder, 4, "--layout", "2x2", "--window", 9, "--stride", 8, "--prefill-chunk", 20, name="split")
    check(found, FIGURES[9, 8])
    assert found["windows"] == 102 and (found["layout"]["tp"], found["layout"]["dp"]) == (2, 2)


def test_a_sharded_cache_scores_alike(folder):
    found = score_text(folder, 3, "--tp", 3, "--kv-mode", "sharded", "--prefill-chunk", 100, name="sharded")
    check(found, FIGURES[512, 256])
    assert found["kv_mode"] == "sharded"


def test_lines_of_a_run_that_score_are_prefilled_alone_and_give_the_same(folder, whole):
    ids = tokenizer().encode(TEXT).ids
    windows = [score.window_at(i, len(ids), 512, 256) for i in range(3)]
    assert ids[0] == BOS and windows[-1].stop == len(ids)
    own = {"max_tokens": 0, "prompt_logprobs": 0}
    lines = [{"id": str(w.index), "prompt_token_ids": ids[w.start:w.stop], **own} for w in windows]
    lines.append({"id": "echo", "prompt_token_ids": ids[:512], "max_tokens": 0, "echo": True, "logprobs": 0})
    outputs = run(folder, 1, folder / "model", lines, *EXACT, "--logits", "none", name="lines")
    with h5py.File(outputs.hdf5) as file:
        steps = file["steps"][:]
    assert steps["rows_decode"].sum() == 0
    assert steps["rows_prefill"].sum() == sum(w.stop - w.start for w in windows) + 512
    nll = []
    for window in windows:
        (choice,) = outputs.by_id[str(window.index)]["response"]["body"]["choices"]
        scores = [None if at is None else next(iter(at.values()))["logprob"] for at in choice["prompt_logprobs"]]
        assert scores[0] is None and outputs.ids(str(window.index)) == []
        nll += scores[window.first - window.start:]
    assert len(nll) == whole["tokens"] and -sum(nll) / len(nll) == pytest.approx(whole["nll_mean"], rel=1e-7)
    (choice,) = outputs.by_id["echo"]["response"]["body"]["choices"]
    assert choice["logprobs"]["token_logprobs"][1:512] == nll[:511]


def prepared(folder, *options) -> tuple[perplexity.Plan, perplexity.Text]:
    given, settings = perplexity.parse(["--text", str(folder / "text.txt"), "--model", str(folder / "model"), *options])
    text = perplexity.Text()
    return perplexity.prepare(given, settings, text)[1], text


def test_the_text_is_read_as_a_prompt_is(folder):
    plan, text = prepared(folder, "--window", "100")
    assert (plan.window, plan.stride, plan.tokens) == (100, 50, 812)
    assert text.ids.tolist() == tokenizer().encode(TEXT).ids and text.nbytes == len(TEXT.encode())
    (folder / "special.txt").write_text("<s>a")
    for options, begin in (((), [BOS]), (("--parse-special",), [BOS, BOS])):
        _, text = prepared(folder, "--text", str(folder / "special.txt"), *options)
        assert text.ids.tolist()[:len(begin)] == begin and (text.ids[1] == BOS) == (len(begin) == 2)


@pytest.mark.parametrize("options, error, words", [
    (["--window", "513"], UsageError, "--window 513 is beyond the model's 512 positions"),
    (["--window", "1"], UsageError, "--window 1 is too small"),
    (["--window", "10", "--stride", "10"], UsageError, "--stride 10 must be below --window 10"),
    (["--stride", "0"], UsageError, "--stride 0 is too small"),
    (["--text", "EMPTY"], InputError, "EMPTY has 1 token(s): a score needs two"),
    (["--text", "/no/such.txt"], InputError, "/no/such.txt: No such file"),
    (["--json", "/no/such/x.json"], OutputError, "/no/such/x.json cannot be written"),
    (["--max-tokens", "3"], UsageError, "mpillm perplexity --help lists the options"),
])
def test_mistakes_are_named(folder, options, error, words):
    (folder / "EMPTY").write_text("")
    with pytest.raises(error) as caught:
        prepared(folder, *(str(folder / word) if word == "EMPTY" else word for word in options))
    assert words in str(caught.value)


def test_a_model_without_a_tokenizer_is_refused_with_another_way(folder):
    bare = folder / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((folder / "model" / name).read_bytes())
    with pytest.raises(UsageError, match="has no tokenizer: .* prompt_logprobs 0 and max_tokens 0"):
        prepared(folder, "--model", str(bare))


def test_fresh_texts_live(folder):
    """transformers computes now: needs torch (``make test-reference``)."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from make_perplexity import record

    seed = random.randrange(10**9)
    rng = random.Random(seed)
    print(f"seed {seed}")
    text = "".join(rng.choice("etaoin srhl\n.DEFé") for _ in range(rng.randrange(300, 900)))
    (folder / "fresh.txt").write_bytes(text.encode())
    window = rng.randrange(20, 200)
    stride = rng.randrange(5, window)
    found = score_text(folder, 2, "--text", folder / "fresh.txt", "--tp", 2, "--window", window, "--stride", stride,
                       name="fresh")
    expected = record(folder / "model", text, window, stride)
    assert found["tokens"] == expected["tokens"]
    for name in ("nll_mean", "nll_stderr"):
        assert found[name] == pytest.approx(expected[name], rel=2e-6), name
