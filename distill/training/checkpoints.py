"""Checkpoints in a run's folder: listing, unfinished ones, rotation.

A checkpoint is written into `.unfinished/` and renamed, so that a folder called `checkpoint-N` is complete, whenever
the process was killed. `trainer_state.json` is the last file that `Trainer` writes; `manifest.json` with the checksums
of all files follows it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from transformers import TrainerState, TrainingArguments

CHECKPOINT = "checkpoint-"
UNFINISHED = ".unfinished"
STATE = "trainer_state.json"


def checkpoints(folder: Path, *, damaged: bool = False) -> list[Path]:
    """Return complete checkpoints in `folder` by step; with `damaged` also those without trainer_state.json."""
    return [path for _, path in sorted(_numbered(folder)) if damaged or (path / STATE).is_file()]


def unfinished_checkpoints(folder: Path) -> list[Path]:
    """Return checkpoints in `folder` whose writing was interrupted; they are never loaded."""
    return sorted((folder / UNFINISHED).glob(CHECKPOINT + "*"))


def rotate_checkpoints(folder: Path, limit: int | None, best: str | None = None) -> None:
    """Keep the newest `limit` checkpoints and `best`; others are moved to `.unfinished/`, to be deleted."""
    for old in checkpoints(folder)[: -limit if limit else 0]:
        if best is None or old.name != Path(best).name:
            os.replace(old, folder / UNFINISHED / f"old-{old.name}")


@contextlib.contextmanager
def without_rotation(arguments: TrainingArguments) -> Iterator[int | None]:
    """Disable `Trainer`'s rotation, which runs before the new checkpoint has its name; yields the limit."""
    limit = arguments.save_total_limit
    arguments.save_total_limit = None
    try:
        yield limit
    finally:
        arguments.save_total_limit = limit


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    names = [(path.name.removeprefix(CHECKPOINT), path) for path in folder.glob(CHECKPOINT + "*")]
    return [(int(number), path) for number, path in names if number.isascii() and number.isdecimal()]


def lacks_evaluation(args: TrainingArguments, state: TrainerState) -> bool:
    """Return whether a run ended in the evaluation that was due after the step it resumes from.

    Args:
        args: `TrainingArguments`.
        state: `TrainerState` of the checkpoint; its log has no held-out metrics of that step then.
    """
    step = state.global_step
    every = state.eval_steps
    if args.eval_strategy != "steps" or not step or not every or step % every:
        return False
    here = [row for row in state.log_history if row.get("step") == step]
    return bool(here) and not any(key.startswith("eval_") for row in here for key in row)
