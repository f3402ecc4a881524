"""Tokenizers of GGUF files, as the tokenizer.json documents that the `tokenizers` library reads.

Two models are known: `gpt2` (byte-level BPE with one of a list of pre-tokenizers) and `llama`
(sentencepiece BPE with scores). Both are rebuilt as the tokenizer.json that is published with such
models, so that the ids are those of the published tokenizer, not those of another program's imitation.
Sources: the GGUF specification; the pre-tokenizers' names and patterns as in llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpillm.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types, both formats

SPACE_MARK = "\u2581"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(contractions: str, digits: str) -> str:
    """Words split where lower case turns to upper case: Mistral's tekken and GPT-4o."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{lead}{_UPPER}*{_LOWER}+{contractions}|{lead}{_UPPER}+{_LOWER}*{contractions}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
    )


_DEEPSEEK_LETTERS = (  # cased letters, as of the Unicode that DeepSeek took
    "\\s?["
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-"
    "\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d"
    "\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-"
    "\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-"
    "\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
_DEEPSEEK_PUNCTUATION = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)

_DIGITS = "digits"  # every numeral a piece of its own


@dataclass(frozen=True)
class Pre:
    """A pre-tokenizer: patterns applied one after the other, and what else published files have with it."""

    patterns: tuple[str, ...]
    nfc: bool = False  # the published tokenizer normalises to NFC first
    ignore_merges: bool = False  # a whole piece that is a token is taken as it is
    add_bos: bool = False  # where add_bos_token is absent


_DIGIT_BYTES = Pre((_DIGITS, _GPT2))
_LLAMA3_PRE = Pre((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_PRE = Pre((_QWEN2,), nfc=True)
_GPT4O_PRE = Pre((_cased(_CONTRACTIONS + "?", r"\p{N}{1,3}"),))

PRE_TOKENIZERS: Mapping[str, Pre] = {
    "default": Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": Pre((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "gpt-2": Pre((_GPT2,)),
    "olmo": Pre((_GPT2,), nfc=True),
    "mpt": Pre((_GPT2,), nfc=True),
    "smollm": _DIGIT_BYTES,
    "starcoder": _DIGIT_BYTES,
    "refact": _DIGIT_BYTES,
    "codeshell": _DIGIT_BYTES,
    "command-r": Pre((_DIGITS, _GPT2), nfc=True),
    "llama-bpe": _LLAMA3_PRE,
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "smaug-bpe": Pre((_LLAMA3,)),
    "qwen2": _QWEN2_PRE,
    "megrez": _QWEN2_PRE,
    "deepseek-r1-qwen": _QWEN2_PRE,
    "tekken": Pre((_cased("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "gpt-4o": _GPT4O_PRE,
    "llama4": _GPT4O_PRE,
    "deepseek-llm": Pre(
        ("[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_PUNCTUATION, r"\s+$", _DEEPSEEK_CJK, _DIGITS)
    ),
    "deepseek-coder": Pre(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _DIGITS)),
    "deepseek-v3": Pre((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
}

# Control tokens that end a text or a turn by their name alone: GGUF has one end token, folders have lists.
_END_NAMES = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<|return|>",
        "<EOT>",
        "</s>",
    )
)


@dataclass
class Definition:
    """What a tokenizer is made of, whatever file it came from."""

    model: dict  # as tokenizer.json has it
    source: str  # for messages
    names: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token ... for the chat template
    add_bos: bool | None = None  # None: as the post-processor says
    add_eos: bool | None = None
    eos_ids: frozenset[int] = frozenset()
    templates: dict[str, str] = field(default_factory=dict)


def from_gguf(metadata: Mapping[str, object]) -> Definition | None:
    """The definition of the tokenizer in GGUF key/values; None where the file has none.

    Raises ModelError for an unknown model or pre-tokenizer, and for values that do not fit together.
    """
    try:
        return _from_gguf(metadata)
    except (TypeError, ValueError) as e:
        raise ModelError(f"GGUF: the tokenizer's values are damaged: {e}") from e


def _from_gguf(metadata: Mapping[str, object]) -> Definition | None:
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    tokens = [_text(t) for t in _array(metadata, "tokens")]
    types = [int(t) for t in _array(metadata, "token_type", [NORMAL] * len(tokens))]
    if not tokens or len(types) != len(tokens):
        raise ModelError(
            f"GGUF: tokenizer.ggml.tokens has {len(tokens)} entries and token_type {len(types)}; "
            "the file is damaged"
        )
    # Padding of the vocabulary is no token: no published tokenizer knows these names.
    types = [UNUSED if t == f"[PAD{i}]" else k for i, (t, k) in enumerate(zip(tokens, types, strict=True))]
    unk = _id(metadata, "unknown", len(tokens))
    if kind == "gpt2":
        model, pre = _byte_level(metadata, tokens, types)
        add_bos: bool = pre.add_bos
    elif kind == "llama":
        scores = [float(s) for s in _array(metadata, "scores")]
        if len(scores) != len(tokens):
            raise ModelError(
                f"GGUF: tokenizer.ggml.tokens has {len(tokens)} entries and scores {len(scores)}; "
                "the file is damaged"
            )
        prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
        unk = types.index(UNKNOWN) if unk is None and UNKNOWN in types else unk
        model, add_bos = sentencepiece_model(tokens, types, scores, unk, bool(prefix)), True
    else:
        raise ModelError(f"GGUF: tokenizer model {kind!r} is not supported (gpt2 and llama are)")
    found = Definition(model, "GGUF metadata")
    ids = {name: _id(metadata, name, len(tokens)) for name in ("bos", "eos", "padding", "eot", "eom")}
    named = {"bos_token": ids["bos"], "eos_token": ids["eos"], "unk_token": unk, "pad_token": ids["padding"]}
    found.names = {name: tokens[i] for name, i in named.items() if i is not None}
    ends = {i for name in ("eos", "eot", "eom") if (i := ids[name]) is not None}
    ends |= {i for i, t in enumerate(tokens) if types[i] == CONTROL and t in _END_NAMES}
    found.eos_ids = frozenset(ends)
    found.add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)) and ids["bos"] is not None
    found.add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and ids["eos"] is not None
    found.templates = _templates(metadata)
    return found


def sentencepiece_model(
    tokens: list[str],
    types: list[int],
    scores: list[float],
    unk: int | None,
    add_prefix: bool,
    merges: list[tuple[str, str]] | None = None,
) -> dict:
    """The tokenizer.json of a sentencepiece BPE: merges from scores, byte fallback, a space before text.

    As in the published files of Llama 2 and Mistral, every stretch of text gets the prefix, also one
    that follows a control token.
    """
    vocab = _vocab(tokens)
    if merges is None:
        merges = _merges_from_scores(tokens, types, scores, vocab)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    steps = [{"type": "Prepend", "prepend": SPACE_MARK}, replace] if add_prefix else [replace]
    decoders: list[dict] = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if add_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _document(
        tokens,
        types,
        normalizer={"type": "Sequence", "normalizers": steps},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        model=_bpe(
            vocab, merges, unk_token=None if unk is None else tokens[unk], byte_fallback=BYTE in types
        ),
    )


def _byte_level(metadata: Mapping[str, object], tokens: list[str], types: list[int]) -> tuple[dict, Pre]:
    """The tokenizer.json of a `gpt2` vocabulary, and the pre-tokenizer that the file names."""
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        raise ModelError(
            "GGUF: tokenizer.ggml.pre is missing, so how text is split is unknown: "
            "convert the model again with a newer converter, or use its Hugging Face folder"
        )
    pre = PRE_TOKENIZERS.get(str(name))
    if pre is None:
        raise ModelError(
            f"GGUF: pre-tokenizer {name!r} (tokenizer.ggml.pre) is unknown; known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}; use the model's Hugging Face folder"
        )
    native = pre.patterns[-1] == _GPT2  # ByteLevel has that pattern built in
    steps = [_splitter(p) for p in (pre.patterns[:-1] if native else pre.patterns)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": native}
    merges = [_pair(_text(m)) for m in _array(metadata, "merges")]
    document = _document(
        tokens,
        types,
        normalizer={"type": "NFC"} if pre.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        model=_bpe(_vocab(tokens), merges, ignore_merges=pre.ignore_merges),
    )
    return document, pre


def _splitter(pattern: str) -> dict:
    if pattern == _DIGITS:
        return {"type": "Digits", "individual_digits": True}
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _merges_from_scores(
    tokens: list[str], types: list[int], scores: list[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """The merges that scores stand for: best score first; splits of one token by the ids of its halves."""
    whole = {t for t, kind in zip(tokens, types, strict=True) if kind not in (UNKNOWN, CONTROL, BYTE)}
    merges: list[tuple[float, int, int, int, str, str]] = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind in (NORMAL, UNUSED):
            halves = ((token[:i], token[i:]) for i in range(1, len(token)))
            merges += [
                (-score, vocab[token], vocab[a], vocab[b], a, b)
                for a, b in halves
                if a in whole and b in whole
            ]
    return [m[4:] for m in sorted(merges)]


def _document(tokens: list[str], types: list[int], **parts: object) -> dict:
    """A tokenizer.json: control tokens special, user-defined ones plain but matched whole."""
    seen: set[str] = set()
    added = []
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and token and token not in seen:
            seen.add(token)
            added.append(
                {
                    "id": i,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": kind != USER_DEFINED,
                }
            )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": None,
        **parts,
    }


def _bpe(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    unk_token: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> dict:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unk_token,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": [list(m) for m in merges],
    }


def _vocab(tokens: list[str]) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens):
        # An empty or repeated text cannot be told from the first; its id keeps a name that no text yields.
        vocab[token if token and token not in vocab else f"\U0010fffe {i} \U0010fffe"] = i
    return vocab


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise ModelError(
            f"GGUF: tokenizer.ggml.merges has {merge!r}, which is not a pair; the file is damaged"
        )
    return left, right


def _array(metadata: Mapping[str, object], name: str, default: list | None = None) -> list:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if value is None:
        raise ModelError(f"GGUF: tokenizer.ggml.{name} is missing; the file's tokenizer cannot be used")
    if isinstance(value, (str, bytes, int, float)):
        raise ModelError(f"GGUF: tokenizer.ggml.{name} is not a list; the file is damaged")
    return list(value)  # type: ignore[call-overload]


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    raise ModelError(f"GGUF: the tokenizer's lists hold a {type(value).__name__} where text belongs")


def _id(metadata: Mapping[str, object], name: str, size: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    number = int(value)  # type: ignore[call-overload]
    return number if 0 <= number < size else None  # an id beyond the list stands for none


def _templates(metadata: Mapping[str, object]) -> dict[str, str]:
    found = {}
    for key, value in metadata.items():
        if key == "tokenizer.chat_template":
            found["default"] = _text(value)
        elif key.startswith("tokenizer.chat_template."):
            found[key[len("tokenizer.chat_template.") :]] = _text(value)
    return found
