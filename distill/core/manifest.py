"""`manifest.json` of a folder: the size and checksum of every file in it, written last.

XXH3 of 128 bits runs at the speed of memory; it finds what disks and copies spoil, and is no defence against somebody
who means to deceive, who could write another manifest.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from distill.core.files import sync, write_json

MANIFEST = "manifest.json"
SUM = "xxh3_128"
THREADS, BLOCK = 4, 1 << 22


def checksum(path: Path) -> str:
    """XXH3 of a file, 32 hexadecimal digits."""
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def sums_of(folder: Path, *, skip: str = "\0") -> dict[str, dict[str, object]]:
    """Size and checksum of every file below `folder`, by its path in it; its manifest and names in `skip` left out."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if name != MANIFEST and not name.startswith((".", skip))]
    with ThreadPoolExecutor(THREADS) as pool:  # hashing and reading leave Python to the others
        sums = list(pool.map(lambda name: checksum(folder / name), names))
    return {name: {"bytes": (folder / name).stat().st_size, SUM: each} for name, each in zip(names, sums, strict=True)}


def write_manifest(folder: Path, **more: object) -> None:
    """Write the manifest of a folder that nobody writes into any more, and see all of it onto the disk.

    Args:
        more: what else the manifest says.
    """
    with ThreadPoolExecutor(1) as aside:  # the disk writes while the files are summed
        files = aside.submit(sums_of, folder)
        sync(folder)
        write_json(folder / MANIFEST, {**more, "files": files.result()})


def note_files(folder: Path, *names: str) -> None:
    """Enter files of a folder, those that exist, into its manifest; entries of other files stay as they are."""
    try:
        before = (read_manifest(folder) or {}).get("files")
    except ValueError:  # a damaged one, whose entries nobody can hold a file against
        before = None
    files = dict(before) if isinstance(before, Mapping) else {}
    files |= {name: entry_of(folder / name) for name in names if (folder / name).is_file()}
    write_json(folder / MANIFEST, signed({"files": files}))


def forget_file(folder: Path, name: str) -> None:
    """Take the entry of a file that is about to change out of a folder's manifest, where there is one."""
    with contextlib.suppress(ValueError):
        files = (read_manifest(folder) or {}).get("files")
        if isinstance(files, Mapping) and name in files:
            kept = {key: entry for key, entry in files.items() if key != name}
            write_json(folder / MANIFEST, signed({"files": kept}))


def fault_of_noted(folder: Path, name: str) -> str | None:
    """Return what is wrong with a file that a folder's manifest may have an entry of, in words; None for nothing."""
    try:
        files = (read_manifest(folder) or {}).get("files", {})
    except ValueError:
        return None
    return fault_of_files(folder, {name: files[name]}) if isinstance(files, Mapping) and name in files else None


def entry_of(path: Path) -> dict[str, object]:
    """Return the entry of a file in a manifest."""
    return {"bytes": path.stat().st_size, SUM: checksum(path)}


def signed(value: Mapping[str, object]) -> dict[str, object]:
    """Return a section of JSON with its own checksum in it."""
    return {**value, SUM: _sum_of(value)}


def is_signed(value: Mapping[str, object]) -> bool:
    """Return whether a section of JSON is as it was signed; one without a checksum passes."""
    return value.get(SUM) in (None, _sum_of({name: entry for name, entry in value.items() if name != SUM}))


def _sum_of(value: Mapping[str, object]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def fault_of_files(folder: Path, files: object) -> str | None:
    """The first file that is not what its entry says, in words; None where all are.

    Args:
        files: from a manifest that somebody may have spoiled.
    """
    if not isinstance(files, Mapping) or not all(isinstance(entry, Mapping) for entry in files.values()):
        return f"{MANIFEST} lists no files"
    for name, entry in files.items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return f"{MANIFEST} names {name}, outside of the folder"
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != entry.get("bytes"):
            return f"{name} is damaged: expected {entry.get('bytes')} bytes, got {size}"
    with ThreadPoolExecutor(THREADS) as pool:
        sums = list(pool.map(lambda name: checksum(folder / name), files))
    for (name, entry), value in zip(files.items(), sums, strict=True):
        if value != entry.get(SUM):
            return f"{name} is damaged: its checksum is {value}, expected {entry.get(SUM)}"
    return None


def read_manifest(folder: Path) -> dict[str, object] | None:
    """What a folder's manifest says; None where there is none. One that is no section of JSON is a `ValueError`."""
    try:
        value = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not isinstance(value, dict):
        raise ValueError("it is no section of JSON")
    return value
