"""What may be set anew where a run is resumed: memory, speed and records, nothing of what an optimizer step learns.

    plan = resume_plan(recipe, folder, processes=2)    # ValueError names the first setting that has to stay
    plan.lines()                                       # what differs from what the run began with
    plan.recipe_text(last)                             # recipe.yaml, with a comment that says what changed and when

Rows come in an order that the seed alone gives, each once an epoch however many processes share it, and a step keeps
its rows (`recipe/same_step.py`). `Trainer` counts what it skips in micro-batches of the settings it is given, not of
those in the checkpoint (transformers 5.17 and 5.23): the rows that follow are the ones an undisturbed run would take.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from transformers import TrainingArguments

from distill.core.faults import differences, show
from distill.core.folders import RECIPE_FILE
from distill.models.head import bare
from distill.recipe import Recipe, dump, load
from distill.recipe.same_step import FREE, STEP, rows_of_step, tokens_of_step, why_batch_size_stays
from distill.recipe.yaml_text import parse_yaml
from distill.training.checkpoints import CHECKPOINT, checkpoints
from distill.training.lock import LOCK_FILE, read_lock

SHARDS = "pytorch_model_fsdp*"  # what accelerate calls a student's weights under FSDP: a file, or a folder of shards


class ResumePlan(NamedTuple):
    """A recipe beside the one that its run has gone by.

    Attributes:
        recipe: of now.
        path: the run's recipe.yaml.
        changed: name, last value and present value of what differs from that file.
        began: the same against what the run began with (lock.yaml, where it is there).
        processes: of the run so far.
    """

    recipe: Recipe
    path: Path
    changed: tuple[tuple[str, Any, Any], ...]
    began: tuple[tuple[str, Any, Any], ...]
    processes: int

    def lines(self) -> list[str]:
        """One line that names what differs from what the run began with; none where nothing does."""
        if not self.began:
            return []
        changes = "; ".join(f"{name} {show(now)}, {show(was)} when the run began" for name, was, now in self.began)
        return [f"resumed with other settings, for the same steps: {changes}"]

    def notes(self, arguments: TrainingArguments, student: nn.Module, *, rows: int) -> list[str]:
        """What another micro-batch changes all the same, a line each.

        Args:
            arguments: of now.
            student: as loaded.
            rows: of the training data.

        Raises:
            ValueError: `dataloader_drop_last` would cut off other rows than before, or the last checkpoint holds the
                student in shards and it is whole now, or the other way round.
        """
        _require_same_layout(checkpoints(self.path.parent)[-1:], sharded=bool(arguments.fsdp))
        sizes = next(((was, now) for name, was, now in self.changed if name == "train.batch_size"), None)
        if sizes is None:
            return []
        _require_same_epochs(sizes, arguments, rows)
        dropout = getattr(bare(student).config, "attention_dropout", 0) or 0
        if dropout > 0 or any(isinstance(part, nn.Dropout) and part.p > 0 for part in student.modules()):
            return ["dropout draws other random numbers than with the micro-batches of before"]
        return []

    def recipe_text(self, last: Path | None) -> str:
        """recipe.yaml: the present settings, and a comment for each that changed, at this and at earlier resumes.

        Args:
            last: the checkpoint that the run goes on from.
        """
        step = 0 if last is None else last.name.removeprefix(CHECKPOINT)
        comments = [line for line in self.path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        comments += [f"# {name}: {show(was)} up to step {step}, then {show(now)}" for name, was, now in self.changed]
        return "".join(f"{line}\n" for line in comments) + dump(self.recipe)


def resume_plan(recipe: Recipe, folder: Path, *, processes: int) -> ResumePlan:
    """Hold that `recipe` makes the steps that the run in `folder` has left to make.

    Args:
        recipe: of now.
        folder: the run's.
        processes: of now.

    Raises:
        ValueError: naming the first setting that has to stay, the old and the new value.
    """
    path = folder / RECIPE_FILE
    old = load(path, of_run=True)
    was, now = parse_yaml(dump(old), str(path)), parse_yaml(dump(recipe), "recipe")
    changed = tuple(differences(was, now))
    for setting, before, after in changed:
        if setting not in STEP + FREE:
            name, one, other = next(differences(_numbered({setting: before}), _numbered({setting: after})))
            raise ValueError(
                f"--resume: the recipe differs from {path}: there {name} is {show(one)}, now {show(other)}; "
                f"of a run that is resumed {', '.join(FREE)} may be changed, and train.batch_size where a step "
                "keeps its rows; continue with the other settings as they were, or start a new run with --name"
            )
    lock = read_lock(folder / LOCK_FILE) if (folder / LOCK_FILE).exists() else {}
    plan = ResumePlan(recipe, path, changed, _since(lock.get("recipe", was), now), lock.get("processes", processes))
    if any(name in STEP for name, _, _ in changed) or plan.processes != processes:
        _require_same_rows(old, plan, processes)
    return plan


def smaller_batch(recipe: Recipe, processes: int) -> tuple[int, int]:
    """At most half of `train.batch_size`, and the `train.tokens_per_step` with which a step keeps its rows."""
    rows = rows_of_step(recipe, processes)
    half = max(recipe.train.batch_size // 2, 1)
    return next(size for size in range(half, 0, -1) if rows % (size * processes) == 0), rows * recipe.data.max_length


@contextmanager
def without_known_warnings() -> Iterator[None]:
    """Keep `Trainer` from warning of the settings that `ResumePlan.lines` has named."""
    logger = logging.getLogger("transformers.trainer_utils")

    def other(record: logging.LogRecord) -> bool:
        return "do not match the ones in the `trainer_state.json`" not in str(record.msg)

    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def _since(began: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[tuple[str, Any, Any], ...]:
    """What differs of the settings that may."""
    values = [(name, _at(began, name), _at(now, name)) for name in STEP + FREE if name != "output_dir"]
    return tuple((name, was, value) for name, was, value in values if was != value)


def _at(tree: Mapping[str, Any], name: str) -> Any:
    value: Any = tree
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _numbered(value: Any) -> Any:
    """Lists as sections, so that what differs is named by its place."""
    if isinstance(value, list):
        value = {str(number): part for number, part in enumerate(value)}
    return {name: _numbered(part) for name, part in value.items()} if isinstance(value, dict) else value


def _require_same_rows(old: Recipe, plan: ResumePlan, processes: int) -> None:
    train, length = plan.recipe.train, plan.recipe.data.max_length
    rows = rows_of_step(old, plan.processes)
    changes = train.batch_size != old.train.batch_size
    if plan.processes != processes and (changes or rows % (train.batch_size * processes)):
        raise ValueError(
            f"--resume: a step of this run takes {rows} rows, {old.train.batch_size} at a time on {plan.processes} "
            f"processes; got {train.batch_size} on {processes}: continue on as many processes as before"
        )
    if changes and (why := why_batch_size_stays(plan.recipe)):
        raise ValueError(
            f"--resume: train.batch_size has to stay {old.train.batch_size}: {why}; got {train.batch_size}; "
            "train.gradient_checkpointing: true saves memory too"
        )
    if rows % (train.batch_size * processes):
        sizes = [size for size in range(old.train.batch_size, 0, -1) if rows % (size * processes) == 0]
        raise ValueError(
            f"--resume: train.batch_size: a step of this run takes {rows} rows on {processes} device(s), so expected "
            f"one of {', '.join(map(str, sizes))}; got {train.batch_size}"
        )
    if tokens_of_step(plan.recipe, processes) != rows * length:
        raise ValueError(
            f"--resume: train.tokens_per_step: a step of this run takes {rows} rows x data.max_length {length}, so "
            f"expected {rows * length}; got {show(train.tokens_per_step)}"
        )


def _require_same_layout(last: list[Path], *, sharded: bool) -> None:
    """One process holds a student whole that several cut into shards; weights and optimizer are read as they lie."""
    for checkpoint in last:
        shards = any(checkpoint.glob(SHARDS))
        if shards and not sharded:
            raise ValueError(
                f"--resume: {checkpoint} holds the student in shards (parallel.strategy: fsdp on several processes), "
                "which one process cannot read; continue on several"
            )
        if sharded and not shards:
            raise ValueError(
                f"--resume: {checkpoint} holds the student whole, as one process writes it, and several would read "
                "shards (parallel.strategy: fsdp); continue on one process"
            )


def _require_same_epochs(sizes: tuple[int, int], arguments: TrainingArguments, rows: int) -> None:
    """Where the rest of an epoch is dropped, how much of it is what the micro-batches of all processes leave."""
    if not arguments.dataloader_drop_last:
        return
    before, now = (rows // (size * arguments.world_size) * size * arguments.world_size for size in sizes)
    if before != now:
        raise ValueError(
            f"--resume: train.arguments.dataloader_drop_last leaves {before} of {rows} rows in an epoch with "
            f"train.batch_size {sizes[0]}, and {now} with {sizes[1]}; keep {sizes[0]}"
        )
