"""Settings that may change when a run is resumed: memory, speed and logging, nothing that changes training.

    plan = resume_plan(recipe, folder, processes=2)    # ValueError names the first setting that must not change
    plan.lines()                                       # differences from the settings that the run began with
    plan.recipe_text(last)                             # recipe.yaml, with a comment for each change and its step

The order of rows depends on the seed alone, each comes once per epoch for any number of processes, and a step keeps its
rows (`recipe/resume_policy.py`). `Trainer` counts skipped micro-batches with the present settings, not those in the
checkpoint (transformers 5.17 and 5.23): the next rows are those of an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn
from transformers import TrainingArguments

from distill.core import console
from distill.core.diff_settings import Change, diff_settings
from distill.core.errors import quote
from distill.core.finished_run import finished_result
from distill.core.folders import RECIPE_FILE, root_of
from distill.core.ranks import broadcast_from_rank0, is_main_process, world_size
from distill.core.run_lock import RunLock
from distill.models.head import unwrap_peft
from distill.recipe import Recipe, dump, load
from distill.recipe.resume_policy import FREE, STEP, is_free, rows_of_step, tokens_of_step, why_batch_size_stays
from distill.recipe.yaml_text import parse_yaml
from distill.training.checkpoints import CHECKPOINT, checkpoints, find_valid_checkpoint, unfinished_checkpoints
from distill.training.lock_file import LOCK_FILE, read_lock

SHARDS = "pytorch_model_fsdp*"  # what accelerate calls a student's weights under FSDP: a file, or a folder of shards


class ResumePlan(NamedTuple):
    """Present recipe of a resumed run, compared with the recipe it has used so far.

    Attributes:
        changed: Settings that differ from that file.
        began: Settings that differ from the run's first recipe (lock.yaml, where it exists).
        processes: Number of processes of the run so far.
    """

    recipe: Recipe
    path: Path
    changed: Sequence[Change]
    began: Sequence[Change]
    processes: int

    def lines(self) -> list[str]:
        """Return one line that names the differences from the run's first recipe; none without any."""
        if not self.began:
            return []
        changes = "; ".join(f"{name} {quote(now)} (at the start {quote(was)})" for name, was, now in self.began)
        return [f"resumed with changed settings that keep the training steps the same: {changes}"]

    def notes(self, arguments: TrainingArguments, student: nn.Module, *, rows: int) -> list[str]:
        """Return one line for each effect that a changed micro-batch size has on training all the same.

        Args:
            rows: Number of rows of the training data.

        Raises:
            ValueError: `dataloader_drop_last` would drop other rows than before, or the last checkpoint is sharded and
                the student is not, or the other way round.
        """
        _require_same_layout(checkpoints(self.path.parent)[-1:], sharded=bool(arguments.fsdp))
        sizes = next(((was, now) for name, was, now in self.changed if name == "train.batch_size"), None)
        if sizes is None:
            return []
        _require_same_epochs(sizes, arguments, rows)
        dropout = getattr(unwrap_peft(student).config, "attention_dropout", 0) or 0
        if dropout > 0 or any(isinstance(part, nn.Dropout) and part.p > 0 for part in student.modules()):
            return ["dropout uses other random numbers than with the previous micro-batch size"]
        return []

    def recipe_text(self, last: Path | None) -> str:
        """Return recipe.yaml: the present settings, with a comment for each change at this and earlier resumes.

        Args:
            last: Checkpoint that the run continues from.
        """
        step = 0 if last is None else last.name.removeprefix(CHECKPOINT)
        comments = [line for line in self.path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        comments += [f"# {name}: {quote(was)} up to step {step}, then {quote(now)}" for name, was, now in self.changed]
        return "".join(f"{line}\n" for line in comments) + dump(self.recipe)


def resume_plan(recipe: Recipe, folder: Path, *, processes: int) -> ResumePlan:
    """Check that `recipe` makes the remaining training steps of the run in `folder`, and return what changed.

    Raises:
        ValueError: A setting changed that must not; the message names it, the old and the new value.
    """
    path = folder / RECIPE_FILE
    old = _where_it_lies(load(path), recipe, folder)
    # both go the same way through text, so that only what the file would show counts as a change
    was = parse_yaml(dump(old), str(path))
    now = parse_yaml(dump(recipe), "recipe")
    changed = diff_settings(was, now)
    for name, before, after in changed:
        if name not in STEP and not is_free(name):
            raise ValueError(
                f"--resume: {name} differs from {path}: expected {quote(before)}, got {quote(after)}; a resumed run "
                f"may change {', '.join(FREE)}, and train.batch_size where a step keeps its rows; restore the "
                "setting, or start a new run with --name"
            )
    lock = read_lock(folder / LOCK_FILE) if (folder / LOCK_FILE).exists() else {}
    # recipe.yaml has the changes of earlier resumes already: what is printed is the difference from the first start
    since_start = diff_settings(lock.get("recipe", was), now)
    began = [change for change in since_start if change.name in STEP or is_free(change.name)]
    began = [change for change in began if change.name != "output_dir"]
    plan = ResumePlan(recipe, path, changed, began, lock.get("processes", processes))
    if recipe.data.streaming and plan.processes != processes:
        raise ValueError(
            f"--resume: with data.streaming each process reads its share of the rows: expected {plan.processes} "
            f"processes, got {processes}"
        )
    if any(name in STEP for name, _, _ in changed) or plan.processes != processes:
        _require_same_rows(old, plan, processes)
    return plan


def _where_it_lies(old: Recipe, recipe: Recipe, folder: Path) -> Recipe:
    """Return the old recipe with the student of the stage before named as the present one names it.

    A later stage's `student.model` is a folder inside of the whole run's, which may have been moved or renamed since.
    """
    root = root_of(folder).absolute()
    before = Path(old.student.model or "")
    present = Path(recipe.student.model or "").absolute()
    if not present.is_relative_to(root) or present == root:
        return old
    within = present.relative_to(root)
    if before.parts[-len(within.parts) :] != within.parts:
        return old
    student = old.student.model_copy(update={"model": recipe.student.model})
    return old.model_copy(update={"student": student})


def smaller_batch(recipe: Recipe, processes: int) -> tuple[int, int]:
    """Return at most half of `train.batch_size`, and the `train.tokens_per_step` with which a step keeps its rows."""
    rows = rows_of_step(recipe, processes)
    half = max(recipe.train.batch_size // 2, 1)
    return next(size for size in range(half, 0, -1) if rows % (size * processes) == 0), rows * recipe.data.max_length


def _require_same_rows(old: Recipe, plan: ResumePlan, processes: int) -> None:
    train = plan.recipe.train
    length = plan.recipe.data.max_length
    rows = rows_of_step(old, plan.processes)
    changes = train.batch_size != old.train.batch_size
    # on other processes the same rows must still divide into whole micro-batches of the same size
    if plan.processes != processes and (changes or rows % (train.batch_size * processes)):
        raise ValueError(
            f"--resume: a step of this run has {rows} rows: expected train.batch_size {old.train.batch_size} on "
            f"{plan.processes} processes, got {train.batch_size} on {processes}; continue on {plan.processes} processes"
        )
    why = why_batch_size_stays(plan.recipe)
    if changes and why is not None:
        raise ValueError(
            f"--resume: train.batch_size: expected {old.train.batch_size}, since {why}; got {train.batch_size}; "
            "train.gradient_checkpointing: true saves memory too"
        )
    if rows % (train.batch_size * processes):
        sizes = [size for size in range(old.train.batch_size, 0, -1) if rows % (size * processes) == 0]
        raise ValueError(
            f"--resume: train.batch_size: a step of this run has {rows} rows on {processes} device(s), so expected "
            f"one of {', '.join(map(str, sizes))}; got {train.batch_size}"
        )
    if tokens_of_step(plan.recipe, processes) != rows * length:
        raise ValueError(
            f"--resume: train.tokens_per_step: a step of this run has {rows} rows x data.max_length {length}, so "
            f"expected {rows * length}; got {quote(train.tokens_per_step)}"
        )


def _require_same_layout(last: list[Path], *, sharded: bool) -> None:
    """Check that the last checkpoint is sharded if and only if the student is: weights are read as they lie."""
    for checkpoint in last:
        shards = any(checkpoint.glob(SHARDS))
        if shards and not sharded:
            raise ValueError(
                f"--resume: {checkpoint} holds a sharded student (parallel.strategy: fsdp on several processes), which "
                "one process cannot read; continue on several"
            )
        if sharded and not shards:
            raise ValueError(
                f"--resume: {checkpoint} holds an unsharded student, written by one process, but several processes "
                "with parallel.strategy: fsdp read shards; continue on one process"
            )


def _require_same_epochs(sizes: tuple[int, int], arguments: TrainingArguments, rows: int) -> None:
    """Check that `dataloader_drop_last` drops the same rows with the previous and the present micro-batch size."""
    if not arguments.dataloader_drop_last:
        return
    before, now = (rows // (size * arguments.world_size) * size * arguments.world_size for size in sizes)
    if before != now:
        raise ValueError(
            f"--resume: train.arguments.dataloader_drop_last keeps {before} of {rows} rows in an epoch with "
            f"train.batch_size {sizes[0]}, and {now} with {sizes[1]}; keep {sizes[0]}"
        )


def resume_point(recipe: Recipe, run_lock: RunLock, *, unverified: bool) -> tuple[ResumePlan, Path | None]:
    """Lock the run's folder, and return what has changed since the run's start and the checkpoint to continue from.

    Args:
        run_lock: Lock on the run's folder; the first process acquires it.
        unverified: Also continue from a checkpoint without a manifest.

    Raises:
        SystemExit: Code 0, where the run is finished.
    """
    folder = run_lock.folder
    # The lock comes first: a run that is still alive could write the very checkpoint that is read next. One process
    # validates, and all continue from what it found.
    if is_main_process():
        run_lock.acquire()
    resumed = resume_plan(recipe, folder, processes=world_size())
    last, refused = broadcast_from_rank0(lambda: find_valid_checkpoint(folder, unverified=unverified))
    # a finished run without a checkpoint would be repeated from its first step
    is_over = last is None and broadcast_from_rank0(lambda: finished_result(folder)) is not None
    if is_main_process():
        unused = [f"{path} is unfinished and is not used" for path in unfinished_checkpoints(folder)]
        where = f"continuing from {last}" if last else "no checkpoint yet: starting at step 0"
        if is_over:
            where = f"{folder} is finished and has no checkpoint: nothing to train; --name starts another run"
        for line in [*unused, *refused, *resumed.lines(), where]:
            console.print_lines(line)
    if is_over:
        raise SystemExit(0)
    return resumed, last
