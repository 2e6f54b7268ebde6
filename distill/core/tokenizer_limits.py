"""Limits on tokenizers from untrusted sources: the first use runs in a process with bounded memory and time.

A `tokenizer.json` of a few lines can replace each character by a thousand, ten times over, or hold a regular expression
of exponential cost; only the end of its process stops the tokenizers library.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

MOST_BYTES = 4 << 30  # memory of the tokenising process
MOST_SECONDS = 60.0  # for a few lines of text
MOST_GROWTH = 16  # output characters for one input character
PLAIN = {
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "Strip",
    "StripAccents",
    "BertNormalizer",
    "Nmt",
    "ByteLevel",
    "Sequence",
    "Prepend",
    "Replace",
}
_CODE = """
import json, sys
file, config, most, texts = json.load(sys.stdin)
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
except ImportError:
    pass
from tokenizers import AddedToken, Tokenizer
try:
    tokenizer = Tokenizer.from_file(file)
    for token in config:
        tokenizer.add_tokens([AddedToken(**token)])
    for text in texts:
        tokenizer.encode(text)
except MemoryError:
    sys.exit(3)
except BaseException:
    pass  # other faults are reported when the tokenizer is loaded
"""


def may_grow(normalizer: object) -> bool:
    """Return whether a tokenizer's normalizer (parsed JSON) may multiply the length of its input."""
    parts = list(_parts(normalizer))
    grown = 1
    for part in parts:
        added = part.get("content") or part.get("prepend") or ""
        if part.get("type") not in PLAIN or not isinstance(added, str):
            return True
        grown *= max(1, len(added))
    return grown > MOST_GROWTH


def check_tokenizer_limits(folder: Path, name: str, field: str) -> None:
    """Check that the tokenizer in a folder encodes a few lines of text within memory and time limits.

    Args:
        name: The model, as the recipe names it.
        field: The recipe's field that names it.

    Raises:
        ValueError: It exceeds a limit.
    """
    file = folder / "tokenizer.json"
    try:
        state = file.stat()
    except OSError:  # a tokenizer of another format, or none
        return
    fault = _fault(str(file), state.st_mtime_ns, state.st_size)
    if fault:
        raise ValueError(f"{field}: the tokenizer of {name} {fault} on a few lines of text; it is not used")


# `changed` and `size` are keys of the cache only: a file that is written anew is tried again
@functools.lru_cache(64)
def _fault(file: str, changed: int, size: int) -> str:
    """Return the limit that a tokenizer exceeds, in words; empty where it exceeds none or needs no trial."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        parts = list(_parts(content.get("normalizer")))
        searched = [part for part in [*parts, *_parts(content.get("pre_tokenizer"))] if "Regex" in str(part)]
    except (OSError, ValueError, AttributeError, RecursionError):  # reported when the tokenizer is loaded
        return ""
    if not searched and not may_grow(content.get("normalizer")):
        return ""
    patterns = [part.get("pattern") for part in parts]
    named = [str(pattern.get("String", "")) for pattern in patterns if isinstance(pattern, Mapping)]
    printable = "".join(map(chr, range(32, 127)))
    # texts on which growth or backtracking shows: those that the normalizer replaces, and long runs that almost match
    texts = [
        "One text, 2 numbers.\n",
        printable,
        " ".join(named)[:10_000],
        "a" * 60 + "!",
        "1" * 60 + "x",
        " " * 60 + ".",
    ]
    tokens = _config_tokens(Path(file).with_name("tokenizer_config.json"))
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "2"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE],
            input=json.dumps([file, tokens, MOST_BYTES, texts]).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=MOST_SECONDS,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return f"takes more than {MOST_SECONDS:g} s"
    if done.returncode in (3, -getattr(signal, "SIGABRT", 6), -getattr(signal, "SIGKILL", 9)):
        return f"takes more than {MOST_BYTES >> 30} GiB of memory"
    return f"crashes its process (signal {-done.returncode})" if done.returncode < 0 else ""


def _parts(value: object) -> Iterator[Mapping[str, object]]:
    """Yield every object with a type inside a normalizer or pre-tokenizer."""
    if isinstance(value, Mapping):
        if "type" in value:
            yield value
        for inner in value.values():
            yield from _parts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _parts(inner)


def _config_tokens(path: Path) -> list[dict[str, object]]:
    """Return the tokens that a tokenizer_config.json adds; the normalizer is applied to them when they are added."""
    try:
        added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
    except (OSError, ValueError, AttributeError, RecursionError):
        return []
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return [{key: token[key] for key in flags if key in token} for token in added.values() if isinstance(token, dict)]
