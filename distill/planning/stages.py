"""`distill check` of a recipe with `stages:`: every stage is planned, of which none need have been trained.

A later stage starts from the student of the one before. Its configuration, and its tokenizer where that is on this
machine, are written into a temporary folder in place of the trained student, which gives all sizes without weights.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from safetensors.torch import save_file

from distill.core.folders import runs_folder
from distill.models.meta_models import meta_config, pruned_config
from distill.planning.devices import Device
from distill.planning.preflight import Preflight, check
from distill.recipe import Recipe
from distill.teachers.registry import source_of


def check_stages(
    recipe: Recipe, device: Device, *, gpus: int = 1, read_data: bool = True
) -> list[tuple[str, Recipe, Preflight]]:
    """Return name, recipe and report of each stage of a recipe; see `preflight.check`. Problems name the stage.

    Raises:
        ValueError: a setting that no run can have, in a stage that the message names.
    """
    found = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, recipe.name)
        here = str(folder)
        there = str(runs_folder(recipe.output_dir) / recipe.name)
        made: set[str] = set()
        for number, (own, stage) in enumerate(recipe.stage_runs(folder)):
            field = f"stages.{number} ({recipe.stages[number].name})"
            untrained = stage.student.model in made
            try:
                report = check(stage, device, gpus=gpus, read_data=read_data, untrained=untrained)
                _write_planned(stage, own / "student", tokenizer=report.vocabulary_ok is not None)
            except ValueError as error:
                raise ValueError(f"{field}: {str(error).replace(here, there)}") from error
            report.problems = [f"{field}: {line.replace(here, there)}" for line in report.problems]
            report.notes = [line.replace(here, there) for line in report.notes]
            report.vocabulary = report.vocabulary.replace(here, there)
            made.add(str(own / "student"))
            found.append((recipe.stages[number].name, stage, report))
    return found


def _write_planned(stage: Recipe, student: Path, *, tokenizer: bool) -> None:
    """Write what the next stage's plan reads of the student of a stage: the files of a trained one but its weights."""
    source = source_of(stage)
    teacher = meta_config(source.config_section(), "teacher") if stage.student.is_cut else None
    student.mkdir(parents=True)
    pruned_config(stage.student, teacher).save_pretrained(student)
    save_file({}, student / "model.safetensors")  # without it the folder would not be taken for a model's
    if tokenizer:
        read = source.vocabulary().tokenizer
        if read is not None:
            read.save_pretrained(student)
