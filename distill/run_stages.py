"""Stages of a recipe: each is a run of its own, and the next one starts from its student."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from distill.core import console
from distill.core.finished_run import finished_result, require_finished_student
from distill.core.interrupts import stop_run_on_sigterm
from distill.core.ranks import broadcast_from_rank0, is_main_process
from distill.recipe import Recipe
from distill.run_results import RunResult
from distill.teachers.registry import source_of
from distill.training.lock_file import LOCK_FILE, check_same, locked_data, read_lock
from distill.training.resuming import resume_plan

# recipe, folder, folders of the earlier stages, lock file that the run must agree with
RunOne = Callable[[Recipe, Path, tuple[Path, ...], Path | None], RunResult]


def run_stages(recipe: Recipe, folder: Path, run_one: RunOne, *, resumes: bool, lock: Path | None) -> RunResult:
    """Run the stages of a recipe that are not finished, and write the file that it names.

    Args:
        recipe: Recipe with or without stages.
        folder: Folder of the whole run.
        run_one: Runs one stage.
        resumes: Leave out stages that are finished, after checking them.
        lock: Lock file that the last stage must agree with.

    Returns:
        Result of the last stage.
    """
    names = [stage.name for stage in recipe.stages]
    *earlier, (folder, recipe) = stages = list(recipe.stage_runs(folder))
    if recipe.export is not None:
        from distill.reports.served_file import check_export  # gguf takes a fifth of a second

        check_export(stages)
    before: tuple[Path, ...] = ()
    for number, (own, stage) in enumerate(earlier):
        finished = resumes and broadcast_from_rank0(functools.partial(finished_result, own)) is not None
        _print_heading(names, number, own, finished=finished)
        if finished:
            _check_finished(stage, own)
        else:
            run_one(stage, own, before, None)
        # read before the next stage loads it: a damaged student would train on without a word
        broadcast_from_rank0(functools.partial(require_finished_student, own))
        before = (*before, own)
    if names:
        _print_heading(names, len(earlier), folder)
    try:
        result = run_one(recipe, folder, before, lock)
    except SystemExit:  # of a run that was finished before, and may have been ended while it wrote its file
        _export(recipe, folder)
        raise
    _export(recipe, folder)
    return result


def _print_heading(names: Sequence[str], number: int, folder: Path, *, finished: bool = False) -> None:
    if is_main_process():
        title = f"stage {number + 1} of {len(names)}: {names[number]}"
        console.print_lines(f"\n{title}, in {folder}{', finished' if finished else ''}")


def _check_finished(recipe: Recipe, folder: Path) -> None:
    """Check that a finished stage was made by this recipe, from these data; every rank reads them.

    Its teacher is compared by the next stage that loads it, since that reads the weights anyway.

    Raises:
        ValueError: A setting or the data differ; the message names the first difference.
    """
    path = folder / LOCK_FILE
    lock = read_lock(path)
    resume_plan(recipe, folder, processes=lock["processes"])
    vocabulary = source_of(recipe).vocabulary()
    with console.announced("reading", recipe.data.source):
        splits = vocabulary.read(recipe.data, recipe.train.seed)
    data = locked_data(recipe, splits, vocabulary)
    origin = f"--resume: {path} (move {folder} away to train the stage again)"
    check_same({"data": lock["data"]}, {"data": data}, origin)


def _export(recipe: Recipe, folder: Path) -> None:
    """Write the file of a finished run where the recipe has one, unless it is there already."""
    there = (folder / "export").is_dir()
    if recipe.export is not None and is_main_process() and not there and finished_result(folder) is not None:
        from distill.reports.served_file import export_run  # gguf takes a fifth of a second

        with stop_run_on_sigterm("exporting"):
            export_run(folder)
