"""Small tokenizers for tests, as GGUF key/values."""

from __future__ import annotations

import json

from mpillm.formats.gguf_tokenizer import from_gguf
from mpillm.formats.token_bytes import _BYTE_OF

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


def byte_level(merges=("h e", "l l", "he ll", "hell o", "Ġ w", "D E", "DE F"), specials=("<|im_start|>", "<|im_end|>"),
               plain=("<think>",), pre="gpt-2", template=CHATML, **more) -> dict:
    """A byte-level BPE: ids 0 ... are the specials, then the plain added tokens, 256 bytes, the merges' products."""
    tokens = [*specials, *plain, *_BYTE_OF, *(m.replace(" ", "") for m in merges)]
    types = [CONTROL] * len(specials) + [USER_DEFINED] * len(plain) + [NORMAL] * (256 + len(merges))
    found = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": list(merges),
             "bos_token_id": 0, "eos_token_id": 1, **more}
    metadata = {f"tokenizer.ggml.{k}": v for k, v in found.items() if v is not None}
    return metadata | ({"tokenizer.chat_template": template} if template is not None else {})


def sentencepiece(words=("▁a", "▁b", "ab", "▁ab", "▁▁", "▁▁▁", "▁H", "el", "lo", "▁Hel", "▁Hello"), template=None,
                  **more) -> dict:
    """A sentencepiece BPE: unk, bos, eos, 256 bytes, words by falling score, single characters."""
    letters = sorted({c for w in words for c in w} | set("xyz"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words, *letters]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(words) + len(letters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [-1000.0 - i for i in range(len(letters))]
    found = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": types, "scores": scores,
             "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **more}
    metadata = {f"tokenizer.ggml.{k}": v for k, v in found.items() if v is not None}
    return metadata | ({"tokenizer.chat_template": template} if template is not None else {})


def folder(path, metadata: dict, config: dict | None = None, change=None) -> str:
    """The same tokenizer as a Hugging Face folder; `change` may edit the tokenizer.json first."""
    definition = from_gguf(metadata)
    document = json.loads(json.dumps(definition.model))
    if change is not None:
        document = change(document) or document
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(document))
    (path / "tokenizer_config.json").write_text(json.dumps({**definition.names, **(config or {})}))
    return str(path)


def bos_processor(document: dict, token: str, token_id: int) -> dict:
    """Put a post-processor that begins every text with a token."""
    document["post_processor"] = {
        "type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                                               {"Sequence": {"id": "B", "type_id": 1}}],
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}}}
    return document
