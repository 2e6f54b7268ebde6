"""`manifest.json` of a folder: the size and checksum of every file in it, written last.

XXH3 (128 bits) runs at memory speed. It detects corruption by disks and copies; it does not protect against tampering,
since a manifest can be rewritten.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from distill.core.files import apply_umask, sync, write_json

MANIFEST = "manifest.json"
SUM = "xxh3_128"
THREADS = 4
BLOCK = 1 << 22


def checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def file_checksums(folder: Path, *, skip: str = "\0") -> dict[str, dict[str, object]]:
    """Return size and checksum by relative path; not of the manifest, nor of paths that begin with a dot or `skip`."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if name != MANIFEST and not name.startswith((".", skip))]
    with ThreadPoolExecutor(THREADS) as pool:  # hashing and reading release the GIL
        sums = list(pool.map(lambda name: checksum(folder / name), names))
    return {name: {"bytes": (folder / name).stat().st_size, SUM: each} for name, each in zip(names, sums, strict=True)}


def write_manifest(folder: Path, **more: object) -> None:
    """Write the manifest of a folder that is complete, with the entries `more`, and sync the folder to disk."""
    with ThreadPoolExecutor(1) as aside:  # the disk writes while the checksums are computed
        files = aside.submit(file_checksums, folder)
        apply_umask(folder)
        sync(folder)
        write_json(folder / MANIFEST, {**more, "files": files.result()})


def add_to_manifest(folder: Path, *names: str) -> None:
    """Add the files of a folder that exist to its manifest; entries of other files are kept."""
    try:
        before = (read_manifest(folder) or {}).get("files")
    except ValueError:  # a damaged manifest, whose entries are useless
        before = None
    files = dict(before) if isinstance(before, Mapping) else {}
    files |= {name: manifest_entry(folder / name) for name in names if (folder / name).is_file()}
    write_json(folder / MANIFEST, with_checksum({"files": files}))


def remove_from_manifest(folder: Path, name: str) -> None:
    with contextlib.suppress(ValueError):
        files = (read_manifest(folder) or {}).get("files")
        if isinstance(files, Mapping) and name in files:
            kept = {key: entry for key, entry in files.items() if key != name}
            write_json(folder / MANIFEST, with_checksum({"files": kept}))


def entry_mismatch(folder: Path, name: str) -> str | None:
    """Return how a file differs from its entry in the folder's manifest, in words; None if it does not or has none."""
    try:
        files = (read_manifest(folder) or {}).get("files", {})
    except ValueError:
        return None
    return first_damaged_file(folder, {name: files[name]}) if isinstance(files, Mapping) and name in files else None


def manifest_entry(path: Path) -> dict[str, object]:
    return {"bytes": path.stat().st_size, SUM: checksum(path)}


def with_checksum(value: Mapping[str, object]) -> dict[str, object]:
    return {**value, SUM: _sum_of(value)}


def has_valid_checksum(value: Mapping[str, object]) -> bool:
    """Return whether a section of JSON matches its checksum; one without a checksum passes."""
    return value.get(SUM) in (None, _sum_of({name: entry for name, entry in value.items() if name != SUM}))


def _sum_of(value: Mapping[str, object]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def first_damaged_file(folder: Path, files: object) -> str | None:
    """Return a description of the first file that differs from its manifest entry; None where none does.

    Args:
        files: The `files` of a manifest; may be malformed.
    """
    if not isinstance(files, Mapping) or not all(isinstance(entry, Mapping) for entry in files.values()):
        return f"{MANIFEST} lists no files"
    for name, entry in files.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{MANIFEST} names {name}, outside of the folder"
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != entry.get("bytes"):
            return f"{name} is damaged: expected {entry.get('bytes')} bytes, got {size}"
    with ThreadPoolExecutor(THREADS) as pool:
        sums = list(pool.map(lambda name: checksum(folder / name), files))
    for (name, entry), value in zip(files.items(), sums, strict=True):
        if value != entry.get(SUM):
            return f"{name} is damaged: its checksum is {value}, expected {entry.get(SUM)}"
    return None


def read_manifest(folder: Path) -> dict[str, object] | None:
    """Return the manifest of a folder; None where there is none."""
    try:
        value = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value
