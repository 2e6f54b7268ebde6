"""After the last step: what is trained is kept, whatever fails while it is measured and saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from distill.core.faults import RunError, disk_code, first_line
from distill.training.checkpoints import CHECKPOINT, checkpoints


@contextmanager
def trained_weights_kept(trainer: Any, *, together: bool = False, exports: bool = True) -> Iterator[None]:
    """Leave a checkpoint of the last step where an exception ends what is done inside.

    Args:
        trainer: `DistillationTrainer`, after training.
        together: Of several processes one may fail alone inside, while no other waits for it: they agree afterwards
            and write the checkpoint together. Otherwise several processes write none.
        exports: `distill export` can make a student of the checkpoint: it is no adapter to a base that is nowhere.

    Raises:
        RunError: what failed, where the checkpoint is, and how to go on. What a disk refuses, and memory that is used
            up, is raised as it came: `explained` says what to do.
    """
    fault: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the weights are worth more
        fault = error
    failed, several = fault is not None, trainer.accelerator.num_processes > 1
    if several and together:
        failed = trainer.mean(float(failed)) > 0
    if not failed:
        return
    folder, kept = Path(trainer.args.output_dir), f"{CHECKPOINT}{trainer.state.global_step}"
    full = fault is not None and disk_code(fault) is not None
    if (together or not several) and folder / kept not in checkpoints(folder) and not full:
        trainer._save_checkpoint(trainer.model, None)
    if fault is None:
        raise RunError("another process of this run failed after the last step")
    if full or isinstance(fault, torch.OutOfMemoryError | MemoryError):
        raise fault
    ways = "continue with --resume"
    if folder / kept in checkpoints(folder):
        ways = f"its weights are in {folder / kept}: --resume goes on from there" + (
            f", and distill export {folder / kept} -o FOLDER writes them as a student" if exports else ""
        )
    raise RunError(f"{first_line(fault)}; the student is trained, {ways}") from fault
