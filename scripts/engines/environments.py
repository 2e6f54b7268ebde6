"""Locations of installed engines, and whether each is installed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
STAMP = "installed-from.txt"


def folder_of(engine: str) -> Path:
    """Return the folder of an engine's environment: under DISTILL_ENGINES, by default `.cache/engines`."""
    return Path(os.environ.get("DISTILL_ENGINES") or ROOT / ".cache" / "engines") / engine


def is_installed(engine: str, *pins: str) -> bool:
    """Return whether an engine is installed from exactly these files of pinned versions.

    Args:
        engine: Name of the environment.
        pins: Files beside this one that decide what is installed.
    """
    stamp = folder_of(engine) / STAMP
    return stamp.is_file() and stamp.read_text() == _hash(pins)


def install_once(engine: str, install: Callable[[Path], None], *pins: str) -> Path:
    """Install an engine unless it is there already from these pins; returns its folder.

    The stamp is written last: an installation that was interrupted is made again.
    """
    folder = folder_of(engine)
    if not is_installed(engine, *pins):
        (folder / STAMP).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        install(folder)
        (folder / STAMP).write_text(_hash(pins))
    return folder


def _hash(pins: tuple[str, ...]) -> str:
    return hashlib.sha256(b"".join((HERE / name).read_bytes() for name in pins)).hexdigest()
