"""Text to token ids and back, from a Hugging Face folder or from GGUF metadata.

Special tokens. `encode(parse_special=False)` never yields a special or control id from text. A chat is
encoded as the tokenizer encodes the rendered text, without added specials: what the template prints is all
there is. Special-token text inside the content of messages stays text there. Tokens that are added but not
special (`<think>`, `<tool_call>` in some models) are ordinary vocabulary and are matched everywhere.

Decoding joins the bytes of all tokens before it decodes them, so only what is broken in the whole becomes
U+FFFD. Clean-up of spaces before punctuation (`clean_up_tokenization_spaces`) is never done: it is lossy.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import tokenizers

from mpillm.errors import LineError, ModelError
from mpillm.formats.chat import ChatTemplate, prepare_messages, prepare_tools, template_from_file
from mpillm.formats.gguf_tokenizer import Definition, from_gguf
from mpillm.formats.hf_tokenizer import from_folder
from mpillm.formats.token_bytes import UNREACHABLE, TokenBytes

# Characters that Unicode keeps for internal use; one that the text lacks marks places inside a rendered chat.
_MARKS = [chr(c) for c in range(0xFDD0, 0xFDF0)] + [chr(c) for c in range(0x10FF00, 0x10FFFE)]


class Tokenizer:
    """A tokenizer with its special tokens and its chat template.

    `vocab_size` is one more than the largest id; a model's table may be larger. `bos_id` and `eos_ids` are
    what the tokenizer's files say. Raises ModelError where the definition cannot be used.
    """

    def __init__(self, definition: Definition, chat_template_file: str | None = None) -> None:
        self._document = _document(definition)
        self._hf = _load(self._document, definition.source)
        added = self._hf.get_added_tokens_decoder()
        self._added = {i: t.content for i, t in added.items()}
        self._special = {i: t.content for i, t in added.items() if t.special}
        self._ids = {t: i for i, t in self._special.items()}
        self.vocab_size = (
            max(
                max(self._hf.get_vocab(with_added_tokens=True).values(), default=-1),
                max(self._added, default=-1),
            )
            + 1
        )
        self.bos_id: int | None = self._name_id(definition, "bos_token")
        eos = self._name_id(definition, "eos_token")
        self.eos_ids = definition.eos_ids | (frozenset() if eos is None else {eos})
        unk = self._document["model"].get("unk_token")
        self._unk = self._document["model"].get("unk_id") if unk is None else self._hf.token_to_id(unk)
        self._prefix, self._suffix = self._frame(definition, eos)
        self._bytes = TokenBytes(self._document.get("decoder"), self._hf, self._added, definition.source)
        self.strip_left = self._bytes.strip_left
        self._plain = self._plain_twin(definition.source)
        self._guards: dict[str, tokenizers.Tokenizer] = {}
        self._heads = frozenset(t[:k] for t in self._ids for k in range(1, len(t)))    # proper beginnings
        self._tails = frozenset(t[k:] for t in self._ids for k in range(1, len(t)))    # proper endings
        self._longest = max(map(len, self._ids), default=0)
        longest_first = sorted(self._ids, key=lambda t: (-len(t), t))
        self._special_text = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._chat = (
            ChatTemplate(definition.templates, definition.names)
            if chat_template_file is None
            else template_from_file(chat_template_file, definition.names)
        )

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat.sources)

    # --- text to ids

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """The ids of a text.

        `add_special`: with what the tokenizer puts around a text (usually one BOS); none is put where the
        ids have it already. `parse_special`: special-token text becomes special ids; else it stays
        text. Raises LineError for text that is not Unicode (lone surrogates).
        """
        _check_unicode(text, None)
        ids = self._encode(text) if parse_special else self._encode_plain(text)
        if not add_special:
            return ids
        n, m = len(self._prefix), len(self._suffix)
        before = [] if ids[:n] == self._prefix else self._prefix
        after = [] if m and ids[-m:] == self._suffix else self._suffix
        return before + ids + after

    def encode_chat(self, messages: object, tools: object = None) -> list[int]:
        """The ids of a conversation: the rendered text without added specials.

        Raises LineError for messages that are wrong, that the template refuses, or without a template.
        A last turn by the assistant is taken as finished; a new turn of the assistant follows it.
        """
        try:
            return self._encode_rendered(prepare_messages(messages), prepare_tools(tools))
        except RecursionError as e:
            raise LineError("messages: nested too deeply", param="messages") from e

    def render_chat(self, messages: object, tools: object = None) -> str:
        """The text that the template makes of a conversation."""
        return self._chat.render(prepare_messages(messages), prepare_tools(tools))

    def _encode_rendered(self, messages: list[dict], tools: list[dict] | None) -> list[int]:
        for text in _strings([messages, tools]):
            _check_unicode(text, "messages")
        rendered = self._chat.render(messages, tools)
        _check_unicode(rendered, "messages")
        if not any(self._touches_special(text) for text in _strings([messages, tools])):
            return self._encode(rendered)
        # Render again with the user's special-token text broken by a mark: what matches is the template's.
        mark = next((m for m in _MARKS if m not in rendered), None)
        if mark is None or any(len(t) < 2 for t in self._ids):
            raise LineError(
                "messages: hold the text of a special token that cannot be told from the template's",
                param="messages",
                code="special_token_text",
            )
        roles = {m["role"] for m in messages}
        broken = _map_strings([messages, tools], lambda s: self._break(s, mark, s in roles))
        marked = self._chat.render(*broken)
        own = self._special_text.findall(marked)
        if own == self._special_text.findall(rendered):
            return self._encode(rendered)
        ids = self._guard(mark).encode(marked, add_special_tokens=False).ids
        if [i for i in ids if i in self._special and i != self._unk] != [
            self._ids[t] for t in own if self._ids[t] != self._unk
        ]:
            raise LineError(
                "messages: hold the text of a special token that this tokenizer cannot keep as text",
                param="messages",
                code="special_token_text",
            )
        return ids

    def _touches_special(self, text: str) -> bool:
        """Whether a text holds special-token text, or could complete some at its borders."""
        return bool(self._special_text.search(text) or self._ends(text) or self._begins(text))

    def _ends(self, text: str) -> bool:
        return any(text[-k:] in self._heads for k in range(1, min(len(text), self._longest) + 1))

    def _begins(self, text: str) -> bool:
        return any(text[:k] in self._tails for k in range(1, min(len(text), self._longest) + 1))

    def _break(self, text: str, mark: str, role: bool) -> str:
        """Put the mark inside every special-token text, also such as only begins or ends here.

        Roles are compared by templates, so their borders are left alone.
        """
        at = {i + 1 for t in self._ids for i in _places(text, t)}
        if not role:
            at |= ({len(text)} if self._ends(text) else set()) | ({0} if self._begins(text) else set())
        cuts = [0, *sorted(at), len(text)]
        return mark.join(text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)) if at else text

    def _encode(self, text: str) -> list[int]:
        return list(self._hf.encode(text, add_special_tokens=False).ids)

    def _encode_plain(self, text: str) -> list[int]:
        with _specials_as_text(self._plain):
            ids = list(self._plain.encode(text, add_special_tokens=False).ids)
        wrong = next((i for i in ids if i in self._special and i != self._unk), None)
        if wrong is not None:
            raise LineError(
                f"the prompt holds the text of the special token {self._special[wrong]!r}, "
                "which this tokenizer cannot keep as text",
                code="special_token_text",
            )
        return ids

    # --- ids to text

    def is_special(self, token_id: int) -> bool:
        """Whether an id is that of a special token, which decoding skips."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id that the tokenizer does not know."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """The text of one token on its own; bytes that are no character become U+FFFD."""
        return self._bytes[token_id].decode("utf-8", "replace")

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of a sequence; the space that sentencepiece puts before a text is taken off its begin."""
        data = b"".join(self._bytes[i] for i in ids if not (skip_special and i in self._special))
        text = data.decode("utf-8", "replace")
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self.strip_left) :]

    # --- made once

    def _name_id(self, definition: Definition, name: str) -> int | None:
        return self._hf.token_to_id(definition.names[name]) if name in definition.names else None

    def _frame(self, definition: Definition, eos: int | None) -> tuple[list[int], list[int]]:
        """What stands around a text: the post-processor's, or as add_bos_token and add_eos_token say."""
        inner = self._encode("a")
        whole = list(self._hf.encode("a", add_special_tokens=True).ids)
        at = next((i for i in range(len(whole)) if inner and whole[i : i + len(inner)] == inner), 0)
        prefix, suffix = whole[:at], whole[at + len(inner) :]
        if definition.add_bos is not None and self.bos_id is not None:
            prefix = [i for i in prefix if i != self.bos_id]
            prefix = [self.bos_id, *prefix] if definition.add_bos else prefix
        if definition.add_eos is not None and eos is not None:
            suffix = [i for i in suffix if i != eos]
            suffix = [*suffix, eos] if definition.add_eos else suffix
        return prefix, suffix

    def _plain_twin(self, source: str) -> tokenizers.Tokenizer:
        """A tokenizer whose model cannot spell a special token; itself where it cannot anyway."""
        model = self._document["model"]
        vocab = model.get("vocab", {})
        known = vocab if isinstance(vocab, dict) else {str(entry[0]) for entry in vocab}
        inside = {t for t in self._ids if t in known}
        merges = (
            [m.split(" ") if isinstance(m, str) else m for m in model.get("merges", [])] if inside else []
        )
        spelled = {"".join(m) for m in merges} & inside
        if model.get("type") != "BPE":
            whole = set(inside)
        elif model.get("ignore_merges"):
            whole = {t for t in inside if self._one_piece(t)}
        else:
            whole = {t for t in inside if len(t) == 1}
        whole -= {model.get("unk_token")}
        if not spelled and not whole:
            return self._hf
        names = {t: UNREACHABLE.format(self._ids[t]) for t in whole}
        model = (
            {**model, "merges": [m for m in merges if "".join(m) not in inside]} if merges else dict(model)
        )
        model["vocab"] = (
            {names.get(t, t): i for t, i in vocab.items()}
            if isinstance(vocab, dict)
            else [[names.get(e[0], e[0]), *e[1:]] for e in vocab]
        )
        added = [
            {**t, "content": names.get(t["content"], t["content"])} for t in self._document["added_tokens"]
        ]
        return _load(
            {**self._document, "model": model, "added_tokens": added, "post_processor": None}, source
        )

    def _one_piece(self, text: str) -> bool:
        """Whether a text on its own goes to the model as a whole."""
        splitter = self._hf.pre_tokenizer
        return splitter is None or len(splitter.pre_tokenize_str(text)) == 1

    def _guard(self, mark: str) -> tokenizers.Tokenizer:
        """The tokenizer with the mark taken out of the text after special tokens were found in it."""
        if mark not in self._guards:
            remove = {"type": "Replace", "pattern": {"String": mark}, "content": ""}
            normalizer = self._document.get("normalizer")
            steps = [remove] if normalizer is None else [remove, normalizer]
            added = [
                {**t, "normalized": False} if t.get("special") else t for t in self._document["added_tokens"]
            ]
            model = self._document["model"]
            merges = model.get("merges", [])
            if merges:
                merges = [
                    m
                    for m in merges
                    if (m.replace(" ", "") if isinstance(m, str) else "".join(m)) not in self._ids
                ]
                model = {**model, "merges": merges}
            document = {
                **self._document,
                "added_tokens": added,
                "model": model,
                "normalizer": {"type": "Sequence", "normalizers": steps},
            }
            self._guards[mark] = _load(document, "the tokenizer with marks")
        return self._guards[mark]


def tokenizer_from_gguf(
    metadata: Mapping[str, object], chat_template_file: str | None = None
) -> Tokenizer | None:
    """The tokenizer of a GGUF file's key/values (arrays as lists); None where the file has none.

    Raises ModelError for one that is damaged or unknown, UsageError for a chat template file at fault.
    """
    definition = from_gguf(metadata)
    return None if definition is None else Tokenizer(definition, chat_template_file)


def tokenizer_from_folder(path: str | os.PathLike, chat_template_file: str | None = None) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder: tokenizer.json, else a sentencepiece tokenizer.model.

    None where the folder has none. Raises ModelError for one that is broken or of another kind,
    UsageError for a chat template file at fault.
    """
    definition = from_folder(path)
    return None if definition is None else Tokenizer(definition, chat_template_file)


def _document(definition: Definition) -> dict:
    """The tokenizer.json to load: no truncation, padding or dropout, whatever the file asks for."""
    document = definition.model
    model = document.get("model")
    if not isinstance(model, dict):
        raise ModelError(f"{definition.source}: has no model; the file is damaged")
    document = {
        **document,
        "truncation": None,
        "padding": None,
        "added_tokens": document.get("added_tokens") or [],
    }
    if model.get("dropout") is not None:
        document["model"] = {**model, "dropout": None}
    return document


def _load(document: dict, source: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(document))
    except Exception as e:  # the library raises plain Exception for whatever it cannot read
        raise ModelError(f"{source}: the tokenizer cannot be read: {' '.join(str(e).split())[:200]}") from e


@contextmanager
def _specials_as_text(hf: tokenizers.Tokenizer):
    hf.encode_special_tokens = True
    try:
        yield
    finally:
        hf.encode_special_tokens = False


def _check_unicode(text: str, param: str | None) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise LineError(
            f"the text holds the lone surrogate U+{ord(text[e.start]):04X} at character {e.start}, "
            "which is no Unicode character",
            param=param,
            code="invalid_unicode",
        ) from e


def _places(text: str, part: str) -> Iterable[int]:
    at = text.find(part)
    while at >= 0:
        yield at
        at = text.find(part, at + 1)


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value) if value else value  # NullText stays what it is
    if isinstance(value, dict):
        return {_map_strings(k, change): _map_strings(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [_map_strings(v, change) for v in value]
    return value
