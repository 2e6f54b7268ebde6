"""Cache of tokenised data on disk, keyed by content.

The key is a hash of everything that affects the tokens: the rows' digest, the tokenizer, the template, the columns, the
lengths. Files are written to a temporary folder and renamed when complete, so that a killed run leaves no partial data;
their sizes are checked before use.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distill.core.errors import DISK, RunError
from distill.core.files import atomic_folder
from distill.core.startup import cache_root

logger = logging.getLogger(__name__)

VERSION = 10  # increase when the same data would be tokenised differently
TOKENIZERS = 2  # version of `tokenizer_hash`, stored in teacher caches: a change invalidates all of them


def cache_key(*parts: object) -> str:
    """Return the folder name for `parts`, values of plain JSON types."""
    return _hash(VERSION, *parts)


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def tokenizer_hash(tokenizer: Any) -> str:
    """Return a hash of everything that affects a tokenizer's encoding; padding and truncation are ignored."""
    import tokenizers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        state.pop("padding", None)
        state.pop("truncation", None)
    else:
        state = sorted(tokenizer.get_vocab().items())
    specials = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    return _hash(TOKENIZERS, type(tokenizer).__name__, state, specials, tokenizers.__version__)


def cached_folder(key: str, build: Callable[[Path], None], *, cache: bool) -> tuple[Path, bool]:
    """Return the folder that `build` fills, now or in an earlier call, and whether it was found in the cache.

    Args:
        build: Function that writes files into an empty folder.
        cache: Use the cache; else build in a temporary folder that is deleted when the process ends.
    """
    if not cache:
        folder = Path(_temporary().name, key)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        build(folder)
        return folder, False
    final = cache_root() / key
    if _complete(final):
        return final, True
    try:
        cache_root().mkdir(parents=True, exist_ok=True)
        if not os.access(cache_root(), os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(
            f"data.cache: the folder {cache_root()} is not writable ({error.strerror}); set DISTILL_CACHE to another "
            "one, or data.cache: false"
        ) from error
    try:
        with atomic_folder(final) as building:
            build(building)
            sizes = {path.name: path.stat().st_size for path in building.iterdir()}
            (building / "complete.json").write_text(json.dumps(sizes))
            # only now that another one is ready to take its place
            if final.exists() and not _complete(final):
                logger.warning("tokenised data in %s is damaged and is made again", final)
                shutil.rmtree(final, ignore_errors=True)
    except OSError as error:  # numpy raises without an errno when it cannot write everything
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and _complete(final):
            return final, False  # another process has written the same content
        reason = DISK.get(error.errno or 0, error.strerror or str(error))
        reason = DISK[errno.ENOSPC] if "requested and" in reason else reason
        raise RunError(
            f"data.cache: {cache_root()}: {reason}; make room there, or set DISTILL_CACHE to a folder with more"
        ) from error
    return final, False


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="distill-data-")


def _complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / "complete.json").read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False
