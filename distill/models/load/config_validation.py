"""Validation of configurations and weight files before a library opens them.

A configuration may name code to fetch, or a model that fills the memory before it has a weight; an index may name
pickles, or files of somebody else. All of that is read here as plain JSON and refused in one line.
"""

from __future__ import annotations

import functools
import json
import re
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

CONFIG = "config.json"
INDEX_SUFFIX = ".safetensors.index.json"
MOST_BYTES = 64 << 20  # of a JSON file beside the weights
MOST_LAYERS = 4096
SETTLED = 2_000_000_000  # nanoseconds after which a file that changes has another time
LAYERS = re.compile(r"(n|num|block)_?(\w+_)?(layers?|count)|\w+_layers")
# the attention and the experts of a model may be code on the hub, told by the name
FETCHED = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
PLAIN_NAME = re.compile(r"[\w][\w.-]*\.safetensors")


def read_json(path: Path, field: str) -> dict[str, Any]:
    """A JSON object from a plain file of at most 64 MiB; else a `ValueError`."""
    try:
        if not path.is_file():
            raise ValueError("it is no plain file")
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it holds more than {MOST_BYTES >> 20} MiB")
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{field}: {path} is no usable JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{field}: expected an object in {path}, got {type(content).__name__}")
    return content


def check_config(values: Mapping[str, Any], field: str, name: str, *, trusted: bool = False) -> None:
    """Hold that a configuration fetches no code (unless it is `trusted`) and has layers that can be counted out.

    Args:
        trusted: `trust_remote_code` was set.
    """
    for key, value in _entries(values):
        if key in FETCHED and not trusted:
            for choice in value.values() if isinstance(value, Mapping) else [value]:
                if choice is not None and not (isinstance(choice, str) and choice.isidentifier()):
                    raise ValueError(
                        f"{field}: the config.json of {name} names {choice!r}, an attention implementation that "
                        f"would be fetched as code; take the line {key} out, or set trust_remote_code"
                    )
        if LAYERS.fullmatch(key) and isinstance(value, int) and abs(value) > MOST_LAYERS:
            raise ValueError(f"{field}: expected at most {MOST_LAYERS:,} for {key} in {name}, got {value}")


def _entries(values: Any) -> Iterator[tuple[str, Any]]:
    waiting = [values]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            yield from ((str(key), value) for key, value in part.items())
            waiting += part.values()
        elif isinstance(part, list):
            waiting += [item for item in part if isinstance(item, Mapping | list)]


def check_model_folder(folder: Path, field: str) -> None:
    read_json(folder / CONFIG, field)
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(INDEX_SUFFIX):
            check_index(path, field, folder)
    for path in folder.glob("*.safetensors"):
        if not path.is_file():
            raise ValueError(f"{field}: expected a plain file of weights, got {path}")


def check_index(path: Path, field: str, folder: Path | None = None) -> list[str]:
    """Hold that an index names safetensors files beside it and nothing else, and return their names.

    Args:
        folder: Folder of the files; None where they are still to be fetched.

    Raises:
        ValueError: naming the file that it should not name.
    """
    places = read_json(path, field).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{field}: expected a weight_map of tensors to files in {path}")
    names = sorted(set(map(str, places.values())))
    for name in names:
        if not PLAIN_NAME.fullmatch(name):
            raise ValueError(
                f"{field}: {path} names {name!r}; expected safetensors files in the same folder: others may hold "
                "pickles, which can run code when loaded, or be somebody else's"
            )
        if folder is not None and not (folder / name).is_file():
            raise ValueError(f"{field}: {path} names {name}, which is not in {folder}")
    return names


# GGUF

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT = 8
_LIST = 9
MOST_ENTRIES = 1 << 20


def check_gguf(path: Path, field: str) -> tuple[object, object]:
    """Read a GGUF file's header and hold that it stays within the file and tells of a model with layers to be counted.

    Returns:
        Its layers and hidden size.

    Raises:
        ValueError: naming the fault.
    """
    values, _ = _read_header(path, field)
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str):
        raise ValueError(f"{field}: expected the name of an architecture in {path}, got {architecture!r}")
    layers = values.get(f"{architecture}.block_count")
    if not isinstance(layers, int) or not 0 < layers <= MOST_LAYERS:
        raise ValueError(
            f"{field}: expected 1 to {MOST_LAYERS:,} for {architecture}.block_count in {path}, got {layers}"
        )
    for name, value in values.items():
        if isinstance(value, int) and name.endswith(("_length", "_count")) and not 0 <= value <= 1 << 31:
            raise ValueError(f"{field}: {path} holds {value} for {name}")
    return layers, values.get(f"{architecture}.embedding_length")


def gguf_tensors(path: Path, field: str) -> tuple[str, list[str]]:
    """A GGUF file's architecture, and the names of its tensors."""
    values, names = _read_header(path, field)
    return str(values.get("general.architecture")), names


def _read_header(path: Path, field: str) -> tuple[dict[str, Any], list[str]]:
    """Return the header, kept for as long as the file is the same: a plan asks ten times, a vocabulary takes a second.

    A file that has just been written is read each time, since its next change may have the same time.
    """
    try:
        state = path.stat()
        age = time.time_ns() - state.st_mtime_ns
        if age < SETTLED:
            return _header_of(path, state.st_size)
        return _kept_header(path, state.st_size, (state.st_dev, state.st_ino, state.st_mtime_ns))
    except (OSError, ValueError, struct.error, OverflowError) as error:
        raise ValueError(f"{field}: {path} is no GGUF file that can be read: {error}") from error


@functools.lru_cache(maxsize=16)
def _kept_header(path: Path, size: int, version: tuple[int, int, int]) -> tuple[dict[str, Any], list[str]]:
    return _header_of(path, size)


def _header_of(path: Path, size: int) -> tuple[dict[str, Any], list[str]]:
    with path.open("rb") as file:
        return _header(file, size)


def _header(file: BinaryIO, size: int) -> tuple[dict[str, Any], list[str]]:
    """The keys and their numbers and texts, without lists; and the tensors' names."""

    def number(kind: str) -> Any:
        return struct.unpack("<" + kind, _bytes(struct.calcsize("<" + kind)))[0]

    def _bytes(count: int) -> bytes:
        if count > size - file.tell():
            raise ValueError("it ends within its header")
        return file.read(count)

    def text() -> str:
        return _bytes(number("Q")).decode("utf-8")

    def value(kind: int) -> Any:
        if kind == _TEXT:
            return text()
        if kind != _LIST:
            if kind not in _NUMBERS:
                raise ValueError(f"it holds a value of the unknown type {kind}")
            return number(_NUMBERS[kind])
        inner = number("I")
        count = number("Q")
        if inner == _TEXT:
            for _ in range(count):
                _bytes(number("Q"))
        elif inner in _NUMBERS:
            width = struct.calcsize("<" + _NUMBERS[inner]) * count
            if width > size - file.tell():
                raise ValueError("it ends within its header")
            file.seek(width, 1)
        else:
            raise ValueError(f"it holds a list of the unknown type {inner}")
        return None

    if _bytes(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = number("I")
    tensors = number("Q")
    keys = number("Q")
    if version not in (2, 3):
        raise ValueError(f"expected version 2 or 3, got {version}")
    if max(tensors, keys) > MOST_ENTRIES:
        raise ValueError(f"expected at most {MOST_ENTRIES:,} tensors and keys, got {max(tensors, keys):,}")
    values: dict[str, Any] = {}
    for _ in range(keys):
        key = text()
        if key in values:
            raise ValueError(f"it holds {key!r} twice")
        values[key] = value(number("I"))
    names: list[str] = []
    for _ in range(tensors):
        name = text()
        dimensions = number("I")
        names.append(name)
        if dimensions > 4:
            raise ValueError(f"{name!r} has {dimensions} dimensions")
        shape = [number("Q") for _ in range(dimensions)]
        number("I")
        if 0 in shape or number("Q") >= size:
            raise ValueError(f"{name!r} has no values in the file")
    return values, names
