"""Checkpoint of the last step where evaluating or saving the trained student fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from distill.core.errors import RunError, disk_code, first_line
from distill.training.checkpoints import CHECKPOINT, checkpoints


@contextmanager
def checkpoint_on_failure(trainer: Any, *, together: bool = False) -> Iterator[None]:
    """Write a checkpoint of the last step if the body of the block raises.

    Args:
        trainer: `DistillationTrainer`, after training.
        together: One of several processes may fail alone in the block, without a collective that others wait in: they
            agree afterwards and write the checkpoint together. If False, several processes write none.

    Raises:
        RunError: Names the failure, the checkpoint and the next command. Errors of the disk and of exhausted memory
            are raised unchanged: `translate_errors` turns them into advice.
    """
    fault: Exception | None = None
    try:
        yield
    except Exception as error:  # any failure: the trained weights must be kept
        fault = error
    failed = fault is not None
    several = trainer.accelerator.num_processes > 1
    if several and together:
        failed = trainer.mean_over_ranks(float(failed)) > 0
    if not failed:
        return
    folder = Path(trainer.args.output_dir)
    kept = f"{CHECKPOINT}{trainer.state.global_step}"
    full = fault is not None and disk_code(fault) is not None
    if (together or not several) and folder / kept not in checkpoints(folder) and not full:
        trainer.save_checkpoint()
    if fault is None:
        raise RunError("another process of this run failed after the last step")
    if full or isinstance(fault, torch.OutOfMemoryError | MemoryError):
        raise fault
    ways = "continue with --resume"
    if folder / kept in checkpoints(folder):
        ways = (
            f"its weights are in {folder / kept}: --resume continues from there, and distill export {folder / kept} "
            "-o FOLDER writes them as a student"
        )
    raise RunError(f"{first_line(fault)}; the student is trained, {ways}") from fault
