"""A Hugging Face folder: config.json and ``*.safetensors``, headers parsed here, values by ``pread``.

A safetensors file is: 8 bytes little-endian length of the header, the header in JSON
(``{name: {dtype, shape, data_offsets}}``), then the values without holes. The published library maps
the file into memory, and aligns nothing: values may begin at odd addresses.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpillm.errors import ModelError
from mpillm.formats import float8
from mpillm.formats.checkpoint import Checkpoint, Rows, Source, Stored, TensorInfo, indices, listing

MAX_HEADER = 100_000_000     # the format's own limit
MAX_JSON = 64 << 20          # config.json and its like
INDEX = "model.safetensors.index.json"

# Bits of a value of each dtype of the format; which of them can be computed with is decode.py's affair.
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
         "F8_E5M2FNUZ": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
         "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


# Files beside the weights on which token ids and prompts depend
BESIDE = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
          "special_tokens_map.json", "added_tokens.json", "generation_config.json")


class SafetensorsFolder(Checkpoint):
    """A folder of safetensors files; ``metadata`` is config.json's content, ``generation`` that of
    generation_config.json (empty if there is none). float8 weights are read as values, with their scales."""

    kind = "hf"

    def __init__(self, path: str) -> None:
        """Read config.json and the headers; raise ModelError for whatever is missing or damaged."""
        super().__init__(path)
        self.metadata = read_json(os.path.join(path, "config.json"))
        generation = os.path.join(path, "generation_config.json")
        self.generation: dict[str, Any] = read_json(generation) if os.path.exists(generation) else {}
        self._float8 = float8.of_folder(path, self.metadata)
        try:
            self._open_files()
        except BaseException:
            self.close()
            raise

    def fingerprint(self) -> Iterator[bytes]:
        yield from super().fingerprint()
        for name in BESIDE:
            path = os.path.join(self.path, name)
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    yield hashlib.sha256(file.read()).digest()

    def unreadable(self, name: str) -> str | None:
        reason = super().unreadable(name)
        if reason is not None or self.tensors[name].dtype != float8.DTYPE:
            return reason
        where = f"{self.file_of(name)}: tensor {name} has type {float8.DTYPE}"
        if self._float8 is None:
            return (f"{where}, but config.json no quantization_config that says how it is scaled: "
                    f"{self._remedy()}")
        shape, scales = self.tensors[name].shape, self._float8.name(name)
        if len(shape) != 2:
            return f"{where} and shape {shape}: two axes are supported"
        if scales not in self.tensors:
            return f"{where}, but tensor {scales} is missing: without it the values are unknown"
        found, allowed = self.tensors[scales], self._float8.allowed(shape)
        if found.shape not in allowed:
            return (f"{self.file_of(scales)}: tensor {scales} has shape {found.shape}, but {name} of shape {shape} "
                    f"has scales of shape {allowed[0]}")
        return super().unreadable(scales)

    def beside(self, name: str) -> tuple[str, ...]:
        if self._float8 is None or self.tensors[name].dtype != float8.DTYPE:
            return ()
        return (self._float8.name(name),)

    def read(self, name: str, rows: Rows = None, cols: range | None = None) -> np.ndarray:
        values = super().read(name, rows, cols)
        if self.beside(name) and values.size:
            self._scale(name, values, rows, cols)
        return values

    def _scale(self, name: str, values: np.ndarray, rows: Rows, cols: range | None) -> None:
        """Turn float8 codes into the weight's values, in place; only the scales of their blocks are read."""
        scheme, shape = self._float8, self.tensors[name].shape
        assert scheme is not None, "who has scales has a scheme"
        index, span = indices(name, rows, shape[0]), range(shape[1]) if cols is None else cols
        height, width = scheme.block(shape)
        down = range(int(index.min()) // height, int(index.max()) // height + 1)
        right = range(span.start // width, (span.stop - 1) // width + 1)
        at = scheme.name(name)
        if len(self.tensors[at].shape) == 2:
            scales = super().read(at, down, right)
        else:
            scales = self.read_flat(at)[down.start:down.stop, None]
        float8.apply(values, index, span, (height, width), scales, (down.start, right.start))

    def _open_files(self) -> None:
        names, index = weight_files(self.path)
        for name in names:
            source = Source(os.path.join(self.path, name))
            self.sources.append(source)
            for stored in read_header(source):
                self.add(stored)
        for tensor, name in index.items():
            if tensor not in self.tensors or os.path.basename(self.file_of(tensor)) != name:
                raise ModelError(f"{os.path.join(self.path, name)}: tensor {tensor} is missing, which "
                                 f"{INDEX} says is there: the download may be incomplete")


def read_json(path: str) -> dict[str, Any]:
    """The object in a JSON file; ModelError for anything else."""
    source = Source(path)
    try:
        if source.size > MAX_JSON:
            raise ModelError(f"{path}: has {source.size} bytes, more than the {MAX_JSON} of any real one")
        return parse_object(path, bytes(source.read(0, source.size)))
    finally:
        source.close()


def parse_object(path: str, text: bytes, unique: bool = False) -> dict[str, Any]:
    """The JSON object in ``text``; anything else, or with ``unique`` a doubled key, is a ModelError."""
    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if unique and key in found:
                raise ModelError(f"{path}: {key!r} is there twice in one object")
            found[key] = value
        return found

    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=collect)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:100]
        raise ModelError(f"{path}: is not valid JSON: {reason}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def weight_files(path: str) -> tuple[list[str], dict[str, str]]:
    """Names of the weight files of a folder, and the index (tensor name to file name; empty without one).

    As transformers chooses: model.safetensors, else the index, else (unlike it) all ``*.safetensors``.
    """
    names = listing(path)
    if "model.safetensors" in names:
        return ["model.safetensors"], {}
    if INDEX in names:
        return _indexed(path, names)
    found = [name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_")]
    if found:
        _check_numbering(path, found)
        return found, {}
    torch = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if torch:
        raise ModelError(f"{path}: has weights only as {torch[0]}, which runs code when it is loaded and is "
                         "not read: save the model again with safetensors")
    if any(name.startswith("adapter_") for name in names):
        raise ModelError(f"{path}: holds an adapter, not a whole model: merge it into its base model first")
    raise ModelError(f"{path}: has no *.safetensors file: the download may be incomplete")


def _indexed(path: str, names: list[str]) -> tuple[list[str], dict[str, str]]:
    where = os.path.join(path, INDEX)
    index = read_json(where).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ModelError(f"{where}: has no weight_map")
    for tensor, name in index.items():
        if not isinstance(name, str) or name in ("", ".", "..") or os.path.basename(name) != name:
            raise ModelError(f"{where}: tensor {tensor} is said to be in {name!r}, which is no file name")
    files = sorted(set(index.values()))
    absent = sorted(set(files) - set(names))
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise ModelError(f"{path}: {absent[0]}{more} of {len(files)} weight files named in {INDEX} missing: "
                         "the download is incomplete")
    return files, index


def _check_numbering(path: str, names: list[str]) -> None:
    """Without an index, names like x-00001-of-00003 still tell what is missing."""
    for name in names:
        match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.safetensors", name)
        if match:
            stem, count = match[1], int(match[3])
            for number in range(1, count + 1):
                wanted = f"{stem}-{number:05d}-of-{count:05d}.safetensors"
                if wanted not in names:
                    raise ModelError(f"{path}: {wanted} is missing beside {name}: the download is incomplete")


def read_header(source: Source) -> list[Stored]:
    """The tensors of one safetensors file; ModelError for a header or an offset that cannot be right."""
    size = source.size
    if size < 8:
        raise source.error(f"has {size} bytes, too few for a safetensors file: truncated or still loading")
    length = int.from_bytes(source.read(0, 8), "little")
    if length > MAX_HEADER or length > size - 8:
        raise source.error(f"states a header of {length} bytes in a file of {size}: "
                           "truncated, or not a safetensors file")
    header = parse_object(source.path, bytes(source.read(8, length)), unique=True)
    header.pop("__metadata__", None)
    found = [_entry(source, name, entry, 8 + length) for name, entry in header.items()]
    _check_layout(source, sorted(found, key=lambda item: (item[0].offset, item[1])), 8 + length)
    return [stored for stored, _ in found]


def _entry(source: Source, name: str, entry: Any, data_start: int) -> tuple[Stored, int]:
    """One tensor of the header and its end in the file."""
    tensor = f"tensor {source.named(name)}"
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise source.error(f"{tensor} lacks one of dtype, shape, data_offsets in the header") from error
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise source.error(f"{tensor} has the unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(_count(n) for n in (*shape, begin, end)):
        raise source.error(f"{tensor} has a shape or offsets that are not a few natural numbers")
    bits = math.prod(shape) * _BITS[dtype]
    if bits != 8 * (end - begin):
        raise source.error(f"{tensor} ({dtype}, shape {tuple(shape)}) takes {-(-bits // 8)} bytes, "
                           f"its offsets {begin} to {end} hold {end - begin}")
    if data_start + end > source.size:
        raise source.error(f"{tensor} ends at byte {data_start + end}, the file at {source.size}: truncated")
    info = TensorInfo(name, tuple(shape), dtype)
    # The size in whole bytes is checked above; types narrower than a byte are never read.
    return Stored(info, source, data_start + begin, max(1, _BITS[dtype] // 8)), data_start + end


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _check_layout(source: Source, items: list[tuple[Stored, int]], data_start: int) -> None:
    """Values follow each other without holes and fill the file, as the format demands."""
    at, before = data_start, "the header"
    for stored, end in items:
        if stored.offset != at:
            what = "overlaps" if stored.offset < at else "leaves a hole behind"
            raise source.error(f"tensor {stored.info.name} {what} {before}: the file is damaged")
        at, before = end, stored.info.name
    if at != source.size:
        raise source.error(f"{source.size - at} bytes follow the last tensor: the file is damaged")
