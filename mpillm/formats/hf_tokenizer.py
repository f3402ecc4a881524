"""Tokenizers of Hugging Face folders: tokenizer.json or tokenizer.model, and the files beside them.

tokenizer_config.json and special_tokens_map.json name the special tokens; add_bos_token and add_eos_token,
where they are given, decide over the post-processor. A chat template in a file of its own wins over
the field.
"""

from __future__ import annotations

import json
import os

from mpillm.errors import ModelError
from mpillm.formats.gguf_tokenizer import Definition
from mpillm.formats.sentencepiece import from_sentencepiece

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def from_folder(path: str | os.PathLike) -> Definition | None:
    """The definition of the folder's tokenizer; None where there is none, ModelError for a broken one."""
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
            other = next(
                (n for n in ("vocab.json", "tekken.json") if os.path.exists(os.path.join(folder, n))), None
            )
            if other is None:
                return None
            raise ModelError(f"{folder} has {other} but no tokenizer.json, which is needed")
        document, defaults = from_sentencepiece(data, source)
        names = {**defaults, **names}
        _add_tokens(document, _read_json(folder, "added_tokens.json") or {}, config)
        config = {"add_bos_token": True, **config}
    definition = Definition(document, source, names)
    definition.add_bos, definition.add_eos = (
        value if isinstance(value := config.get(key), bool) else None
        for key in ("add_bos_token", "add_eos_token")
    )
    definition.templates = _folder_templates(folder, config)
    return definition


def _add_tokens(document: dict, by_text: dict, config: dict) -> None:
    """Add to a sentencepiece vocabulary what the folder's files list beside it."""
    listed = {int(i): t for t, i in by_text.items()}
    listed |= {int(i): t for i, t in (config.get("added_tokens_decoder") or {}).items()}
    known = {t["id"] for t in document["added_tokens"]}
    for i, token in sorted(listed.items()):
        text = _token_text(token)
        if i not in known and text:
            special = (
                bool(token.get("special")) if isinstance(token, dict) else text in _special_texts(config)
            )
            document["added_tokens"].append(
                {
                    "id": i,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": special,
                }
            )


def _special_texts(config: dict) -> set[str | None]:
    extra = config.get("additional_special_tokens") or []
    return {_token_text(config.get(n)) for n in _SPECIAL_NAMES} | {_token_text(t) for t in extra}


def _folder_templates(folder: str, config: dict) -> dict[str, str]:
    """chat_template.jinja with additional_chat_templates/*.jinja, else the field of tokenizer_config.json."""
    files = {"default": os.path.join(folder, "chat_template.jinja")}
    extra = os.path.join(folder, "additional_chat_templates")
    if os.path.isdir(extra):
        files |= {n[:-6]: os.path.join(extra, n) for n in sorted(os.listdir(extra)) if n.endswith(".jinja")}
    found = {
        name: data.decode("utf-8", "replace")
        for name, file in files.items()
        if (data := _read(file)) is not None
    }
    field = config.get("chat_template")
    if found or field is None:
        return found
    if isinstance(field, str):
        return {"default": field}
    if isinstance(field, list) and all(
        isinstance(t, dict) and isinstance(t.get("name"), str) and isinstance(t.get("template"), str)
        for t in field
    ):
        return {t["name"]: t["template"] for t in field}
    raise ModelError(
        f"{folder}/tokenizer_config.json: chat_template is neither text nor a list of name and template"
    )


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
