"""Checkpoints in a run's folder: which are complete, which are not, and taking old ones away.

A checkpoint is written into `.unfinished/` and renamed, so that a folder called `checkpoint-N` is whole, whenever the
process was killed. `trainer_state.json` is the last file `Trainer` writes; `manifest.json` then sums them all up.
"""

from __future__ import annotations

import os
from pathlib import Path

CHECKPOINT, UNFINISHED, STATE = "checkpoint-", ".unfinished", "trainer_state.json"


def checkpoints(folder: Path, *, damaged: bool = False) -> list[Path]:
    """Complete checkpoints in `folder`, by step; with `damaged` also those that have lost their trainer_state.json."""
    return [path for _, path in sorted(_numbered(folder)) if damaged or (path / STATE).is_file()]


def half_written(folder: Path) -> list[Path]:
    """Checkpoints in `folder` whose writing was cut off; nothing reads them."""
    return sorted((folder / UNFINISHED).glob(CHECKPOINT + "*"))


def drop_old(folder: Path, limit: int | None, best: str | None = None) -> None:
    """Keep the newest `limit` checkpoints, and `best`; an old one loses its name before it is deleted."""
    for old in checkpoints(folder)[: -limit if limit else 0]:
        if best is None or old.name != Path(best).name:
            os.replace(old, folder / UNFINISHED / f"old-{old.name}")


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    names = [(path.name.removeprefix(CHECKPOINT), path) for path in folder.glob(CHECKPOINT + "*")]
    return [(int(number), path) for number, path in names if number.isascii() and number.isdecimal()]
