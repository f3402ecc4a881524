"""The tiny Llama with a tokenizer and a chat template of its own: byte-level BPE, 307 tokens."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from case_list import BY_NAME
from cases import write_folder
from tokenizers import decoders, models, pre_tokenizers, processors

CASE = BY_NAME["tiny"]
SPECIAL = ["<pad>", "<s>", "</s>", "<|turn|>"]
BOS, EOS, TURN, OTHER_END = 1, 2, 3, 9
MERGES = [("D", "E"), ("DE", "F"), ("Ċ", "Ċ"), (".", "ĊĊ")]
LETTERS = "etaoinsrhldcu"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system turns here.') }}"
    "{% endif %}<|turn|>{{ m.role }}: {{ m.content }}{% endfor %}{% if add_generation_prompt %}<|turn|>assistant: "
    "{% endif %}")


def tokenizer() -> tokenizers.Tokenizer:
    """The tokenizer; a start token is added to bare texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(MERGES)
    for a in LETTERS:
        for b in LETTERS:
            if len(SPECIAL) + len(alphabet) + len(merges) < CASE.config["vocab_size"]:
                merges.append((a, b))
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet, *(a + b for a, b in merges)])}
    assert len(vocab) == CASE.config["vocab_size"]
    made = tokenizers.Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return made


def write_model(folder: Path) -> Path:
    """The folder: end tokens are named in three files, by three different ids."""
    write_folder(CASE, folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, OTHER_END]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|turn|>", "pad_token": "<pad>",
        "add_bos_token": True, "chat_template": TEMPLATE}))
    return folder


def token(text: str) -> int:
    """The id of a piece as the vocabulary spells it."""
    found = tokenizer().token_to_id(text)
    assert found is not None, text
    return found
