"""Are the files that a recipe names on this machine? Looked at by `validate`, which opens none of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from distill.core.files import near_path
from distill.data.sources import STDLIB, local_path, missing_source
from distill.models.source import resolve_model_source
from distill.recipe import ModelSection, Recipe, Teacher


def path_notes(recipe: Recipe) -> list[str]:
    """What is not here, and names that are taken for the hub's where a file here is called almost so; a line each."""
    return [note for note in (*_of_models(recipe), *_of_data(recipe)) if note]


def _of_models(recipe: Recipe) -> Iterator[str]:
    several = {f"teachers.{number}": teacher for number, teacher in enumerate(recipe.teachers)}
    teachers: dict[str, Teacher] = {**several} or {"teacher": recipe.teacher}
    sections: dict[str, ModelSection] = {**teachers, "student": recipe.student}
    for name, section in sections.items():
        if section.model is not None and section.init == "pretrained":
            try:
                source = resolve_model_source(section.model, f"{name}.model")
                yield "" if source.local else _taken_for_a_hub_id(f"{name}.model", section.model)
            except ValueError as error:
                yield str(error)
    for name, teacher in teachers.items():
        if teacher.path is not None and not Path(teacher.path).expanduser().exists():
            yield f"{name}.path: {teacher.path} does not exist yet{near_path(teacher.path)}; distill cache makes it"
        if teacher.adapter is not None and not Path(teacher.adapter).expanduser().exists():
            yield _taken_for_a_hub_id(f"{name}.adapter", teacher.adapter)


def _of_data(recipe: Recipe) -> Iterator[str]:
    data = recipe.data
    named = [(part.field, part.data.source) for part in data.parts]
    for field, name in (*named, ("data.validation.source", data.validation.source)):
        if name is None or name == STDLIB or name.startswith("synthetic"):
            continue
        place = name if local_path(name).exists() else name.rpartition(":")[0] or name
        yield missing_source(place, field) or _taken_for_a_hub_id(field, place)
    template = data.chat_template
    if template not in ("tokenizer", "none") and not Path(template).expanduser().is_file():
        yield f"data.chat_template: {template} does not exist{near_path(template)}"


def _taken_for_a_hub_id(field: str, name: str) -> str:
    near = "" if local_path(name).exists() else near_path(name)
    return f"{field}: {name} is not here and is taken for a hub id{near}" if near else ""
