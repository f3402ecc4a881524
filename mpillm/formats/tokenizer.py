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
from mpillm.formats.gguf_tokenizer import SPACE_MARK, Definition, from_gguf, from_sentencepiece

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Characters that Unicode keeps for internal use; one that the text lacks marks places inside a rendered chat.
_MARKS = [chr(c) for c in range(0xFDD0, 0xFDF0)] + [chr(c) for c in range(0x10FF00, 0x10FFFE)]
_UNREACHABLE = "\U0010fffe {} \U0010fffe"


class Tokenizer:
    """A tokenizer with its special tokens and its chat template.

    `vocab_size` is one more than the largest id; a model's table may be larger. `bos_id` and `eos_ids` are what
    the tokenizer's files say. Raises ModelError where the definition cannot be used.
    """

    def __init__(self, definition: Definition, chat_template_file: str | None = None) -> None:
        self._document = _document(definition)
        self._hf = _load(self._document, definition.source)
        added = self._hf.get_added_tokens_decoder()
        self._added = {i: t.content for i, t in added.items()}
        self._special = {i: t.content for i, t in added.items() if t.special}
        self._ids = {t: i for i, t in self._special.items()}
        self.vocab_size = max(max(self._hf.get_vocab(with_added_tokens=True).values(), default=-1),
                              max(self._added, default=-1)) + 1
        self.bos_id: int | None = self._name_id(definition, "bos_token")
        eos = self._name_id(definition, "eos_token")
        self.eos_ids = definition.eos_ids | (frozenset() if eos is None else {eos})
        self._unk = self._hf.token_to_id(str(self._document["model"].get("unk_token")))
        self._prefix, self._suffix = self._frame(definition, eos)
        self._bytes = _TokenBytes(self._document.get("decoder"), self._hf, self._added, definition.source)
        self.strip_left = self._bytes.strip_left
        self._plain = self._plain_twin(definition.source)
        self._guards: dict[str, tokenizers.Tokenizer] = {}
        longest_first = sorted(self._ids, key=lambda t: (-len(t), t))
        self._special_text = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._chat = (ChatTemplate(definition.templates, definition.names) if chat_template_file is None
                      else template_from_file(chat_template_file, definition.names))

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
        # Render again with the user's special-token text broken by a mark: what still matches is the template's.
        mark = next((m for m in _MARKS if m not in rendered), None)
        if mark is None or any(len(t) < 2 for t in self._ids):
            raise LineError("messages: hold the text of a special token that cannot be told from the template's",
                            param="messages", code="special_token_text")
        marked = self._chat.render(*_map_strings([messages, tools], lambda s: self._break(s, mark)))
        own = self._special_text.findall(marked)
        if own == self._special_text.findall(rendered):
            return self._encode(rendered)
        ids = self._guard(mark).encode(marked, add_special_tokens=False).ids
        if [i for i in ids if i in self._special and i != self._unk] != [
                self._ids[t] for t in own if self._ids[t] != self._unk]:
            raise LineError("messages: hold the text of a special token that this tokenizer cannot keep as text",
                            param="messages", code="special_token_text")
        return ids

    def _touches_special(self, text: str) -> bool:
        """Whether a text holds special-token text, or could complete some at its borders."""
        return bool(self._special_text.search(text)) or any(
            text.endswith(t[:k]) or text.startswith(t[-k:]) for t in self._ids for k in range(1, len(t)))

    def _break(self, text: str, mark: str) -> str:
        """Put the mark inside every special-token text, also such as only begins or ends here."""
        at = {i + 1 for t in self._ids for i in _occurrences(text, t)}
        if any(text.endswith(t[:k]) for t in self._ids for k in range(1, len(t))):
            at.add(len(text))
        if any(text.startswith(t[-k:]) for t in self._ids for k in range(1, len(t))):
            at.add(0)
        cuts = [0, *sorted(at), len(text)]
        return mark.join(text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)) if at else text

    def _encode(self, text: str) -> list[int]:
        return list(self._hf.encode(text, add_special_tokens=False).ids)

    def _encode_plain(self, text: str) -> list[int]:
        with _specials_as_text(self._plain):
            ids = list(self._plain.encode(text, add_special_tokens=False).ids)
        wrong = next((i for i in ids if i in self._special and i != self._unk), None)
        if wrong is not None:
            raise LineError(f"the prompt holds the text of the special token {self._special[wrong]!r}, "
                            "which this tokenizer cannot keep as text", code="special_token_text")
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
        return text[min(spaces, self.strip_left):]

    # --- made once

    def _name_id(self, definition: Definition, name: str) -> int | None:
        return self._hf.token_to_id(definition.names[name]) if name in definition.names else None

    def _frame(self, definition: Definition, eos: int | None) -> tuple[list[int], list[int]]:
        """What stands before and after a text: the post-processor's, or as add_bos_token and add_eos_token say."""
        inner = self._encode("a")
        whole = list(self._hf.encode("a", add_special_tokens=True).ids)
        at = next((i for i in range(len(whole)) if inner and whole[i:i + len(inner)] == inner), 0)
        prefix, suffix = whole[:at], whole[at + len(inner):]
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
        merges = [m.split(" ") if isinstance(m, str) else m for m in model.get("merges", [])] if inside else []
        spelled = {"".join(m) for m in merges} & inside
        whole = set() if model.get("type") == "BPE" and not model.get("ignore_merges") else set(inside)
        whole = (whole | {t for t in inside if len(t) == 1}) - {model.get("unk_token")}
        if not spelled and not whole:
            return self._hf
        names = {t: _UNREACHABLE.format(self._ids[t]) for t in whole}
        model = {**model, "merges": [m for m in merges if "".join(m) not in inside]} if merges else dict(model)
        model["vocab"] = ({names.get(t, t): i for t, i in vocab.items()} if isinstance(vocab, dict)
                          else [[names.get(e[0], e[0]), *e[1:]] for e in vocab])
        added = [{**t, "content": names.get(t["content"], t["content"])} for t in self._document["added_tokens"]]
        return _load({**self._document, "model": model, "added_tokens": added, "post_processor": None}, source)

    def _guard(self, mark: str) -> tokenizers.Tokenizer:
        """The tokenizer with the mark taken out of the text after special tokens were found in it."""
        if mark not in self._guards:
            remove = {"type": "Replace", "pattern": {"String": mark}, "content": ""}
            normalizer = self._document.get("normalizer")
            steps = [remove] if normalizer is None else [remove, normalizer]
            added = [{**t, "normalized": False} if t.get("special") else t for t in self._document["added_tokens"]]
            model = self._document["model"]
            merges = model.get("merges", [])
            if merges:
                merges = [m for m in merges if (m.replace(" ", "") if isinstance(m, str) else "".join(m))
                          not in self._ids]
                model = {**model, "merges": merges}
            document = {**self._document, "added_tokens": added, "model": model,
                        "normalizer": {"type": "Sequence", "normalizers": steps}}
            self._guards[mark] = _load(document, "the tokenizer with marks")
        return self._guards[mark]


class _TokenBytes(dict):
    """The bytes of tokens by id, made as they are asked for, by the tokenizer's kind of decoder."""

    def __init__(self, decoder: Any, hf: tokenizers.Tokenizer, added: Mapping[int, str], source: str) -> None:
        super().__init__()
        self._hf, self._added = hf, added
        steps = _flatten(decoder)
        kinds = {step.get("type") for step in steps}
        unknown = kinds - {"ByteLevel", "ByteFallback", "Fuse", "Replace", "Strip", "Metaspace"}
        if unknown:
            raise ModelError(f"{source}: decoder {', '.join(sorted(map(str, unknown)))} is not supported")
        self.byte_level, self.byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self.spaced = not steps         # without a decoder, tokens are words
        self.replacements: list[tuple[str, str]] = []
        self.strip_left = 1 if self.spaced else 0
        for step in steps:
            if step["type"] == "Replace" and "String" in step["pattern"]:
                self.replacements.append((step["pattern"]["String"], step["content"]))
            elif step["type"] == "Strip" and step["content"] == " ":
                self.strip_left = step["start"]
            elif step["type"] == "Metaspace":
                self.replacements.append((step.get("replacement", SPACE_MARK), " "))
                prepends = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
                self.strip_left = 1 if prepends else 0

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = value = self._make(token_id)
        return value

    def _make(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._hf.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None or token == _UNREACHABLE.format(token_id):
            return b""
        if self.byte_level:
            if all(c in _BYTE_OF for c in token):
                return bytes(_BYTE_OF[c] for c in token)
            return token.encode()
        if self.byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes((int(token[3:5], 16),))
        for old, new in self.replacements:
            token = token.replace(old, new)
        return (" " + token if self.spaced else token).encode()


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def tokenizer_from_gguf(metadata: Mapping[str, object], chat_template_file: str | None = None) -> Tokenizer | None:
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
    folder = os.fspath(path)
    config = _read_json(folder, "tokenizer_config.json") or {}
    specials = {**(_read_json(folder, "special_tokens_map.json") or {}), **config}
    document = _read_json(folder, "tokenizer.json")
    names = {n: t for n in _SPECIAL_NAMES if (t := _token_text(specials.get(n))) is not None}
    source = os.path.join(folder, "tokenizer.json")
    if document is None:
        source = os.path.join(folder, "tokenizer.model")
        data = _read(source)
        if data is None:
            other = next((n for n in ("vocab.json", "tekken.json") if os.path.exists(os.path.join(folder, n))), None)
            if other is None:
                return None
            raise ModelError(f"{folder} has {other} but no tokenizer.json, which is needed")
        document, defaults = from_sentencepiece(data, source)
        names = {**defaults, **names}
        _add_tokens(document, _read_json(folder, "added_tokens.json") or {}, config)
        config = {"add_bos_token": True, **config}
    definition = Definition(document, source, names)
    definition.add_bos, definition.add_eos = (
        value if isinstance(value := config.get(key), bool) else None for key in ("add_bos_token", "add_eos_token"))
    definition.templates = _folder_templates(folder, config)
    return Tokenizer(definition, chat_template_file)


def _add_tokens(document: dict, by_text: dict, config: dict) -> None:
    """Add to a sentencepiece vocabulary what the folder's files list beside it."""
    listed = {int(i): t for t, i in by_text.items()}
    listed |= {int(i): t for i, t in (config.get("added_tokens_decoder") or {}).items()}
    known = {t["id"] for t in document["added_tokens"]}
    for i, token in sorted(listed.items()):
        text = _token_text(token)
        if i not in known and text:
            special = bool(token.get("special")) if isinstance(token, dict) else text in _special_texts(config)
            document["added_tokens"].append({"id": i, "content": text, "single_word": False, "lstrip": False,
                                             "rstrip": False, "normalized": False, "special": special})


def _special_texts(config: dict) -> set[str | None]:
    extra = config.get("additional_special_tokens") or []
    return {_token_text(config.get(n)) for n in _SPECIAL_NAMES} | {_token_text(t) for t in extra}


def _folder_templates(folder: str, config: dict) -> dict[str, str]:
    """chat_template.jinja with additional_chat_templates/*.jinja, else the field of tokenizer_config.json."""
    files = {"default": os.path.join(folder, "chat_template.jinja")}
    extra = os.path.join(folder, "additional_chat_templates")
    if os.path.isdir(extra):
        files |= {n[:-6]: os.path.join(extra, n) for n in sorted(os.listdir(extra)) if n.endswith(".jinja")}
    found = {name: data.decode("utf-8", "replace") for name, file in files.items() if (data := _read(file)) is not None}
    field = config.get("chat_template")
    if found or field is None:
        return found
    if isinstance(field, str):
        return {"default": field}
    if isinstance(field, list) and all(
            isinstance(t, dict) and isinstance(t.get("name"), str) and isinstance(t.get("template"), str)
            for t in field):
        return {t["name"]: t["template"] for t in field}
    raise ModelError(f"{folder}/tokenizer_config.json: chat_template is neither text nor a list of name and template")


def _document(definition: Definition) -> dict:
    """The tokenizer.json to load: no truncation, padding or dropout, whatever the file asks for."""
    document = definition.model
    model = document.get("model")
    if not isinstance(model, dict):
        raise ModelError(f"{definition.source}: has no model; the file is damaged")
    document = {**document, "truncation": None, "padding": None, "added_tokens": document.get("added_tokens") or []}
    if model.get("dropout") is not None:
        document["model"] = {**model, "dropout": None}
    return document


def _load(document: dict, source: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(document))
    except Exception as e:      # the library raises plain Exception for whatever it cannot read
        raise ModelError(f"{source}: the tokenizer cannot be read: {' '.join(str(e).split())[:200]}") from e


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as e:
        raise ModelError(f"{path}: cannot be read: {e.strerror or e}") from e


def _read_json(folder: str, name: str) -> dict | None:
    path = os.path.join(folder, name)
    data = _read(path)
    if data is None:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path}: is not JSON: {' '.join(str(e).split())}") from e
    if not isinstance(value, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return value


def _token_text(token: object) -> str | None:
    """A special token is written as its text or as an object with it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _flatten(decoder: Any) -> list[dict]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for d in decoder["decoders"] for step in _flatten(d)]
    return [decoder]


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
        raise LineError(f"the text holds the lone surrogate U+{ord(text[e.start]):04X} at character {e.start}, "
                        "which is no Unicode character", param=param, code="invalid_unicode") from e


def _occurrences(text: str, part: str) -> Iterable[int]:
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
        return change(value) if value else value        # NullText stays what it is
    if isinstance(value, dict):
        return {_map_strings(k, change): _map_strings(v, change) for k, v in value.items()}
    if isinstance(value, list):
        return [_map_strings(v, change) for v in value]
    return value
