"""Command `validate`: check a recipe and the existence of the files that it names, and print every setting."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from distill.commands.arguments import AsJson, Overrides, RecipeArgument, load_recipe, print_json
from distill.core import console
from distill.core.errors import RunError
from distill.core.files import suggest_path
from distill.data.sources import STDLIB, local_path, missing_file
from distill.models.load.source import PACKAGE_PREFIX, resolve_model_source
from distill.recipe import ModelSection, Recipe, dump
from distill.recipe.library_names import optimizer_problem
from distill.recipe.teachers import teacher_sections
from distill.recipe.unusual_values import unusual_settings


def validate(recipe: RecipeArgument, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a recipe and print it with every setting filled in; loads no model.

    If files that it names do not exist, prints one line for each instead; exit code 1.

    \b
    distill validate chat-8b-to-1b.yaml
    distill validate quickstart train.steps=20 --json
    """
    _, resolved = load_recipe(recipe, overrides)
    faults = path_errors(resolved)
    if faults:
        raise RunError("\n".join(faults))
    lora = resolved.student.lora
    if lora is not None and lora.targets not in ("all-linear", ["all-linear"]):
        from distill.models.meta_models import check_lora_targets

        check_lora_targets(resolved.student, resolved.teacher)
    if as_json:
        print_json(resolved.model_dump(mode="json"))
    else:
        print(dump(resolved).rstrip())  # verbatim: wrapped lines would be another YAML file
    # a recipe may be written on another machine than it runs on: an absent package is a note here
    packages = [
        problem for _, stage in resolved.stage_runs(Path()) if (problem := optimizer_problem(stage.train.optimizer))
    ]
    for note in dict.fromkeys([*path_notes(resolved), *packages, *unusual_settings(resolved)]):
        console.print_error(note)


def path_errors(recipe: Recipe) -> list[str]:
    return [note for note in (*_missing_models(recipe), *_missing_data(recipe)) if note]


def path_notes(recipe: Recipe) -> list[str]:
    """Return notes on names taken for hub ids although a similar file exists, and on caches still to be made."""
    notes = []
    for name, section in _models(recipe).items():
        if section.model is not None and section.init == "pretrained":
            fault = _absent_package(section.model, f"{name}.model")
            if fault:
                notes.append(fault)
            with contextlib.suppress(ValueError):  # reported by `path_errors`
                if not resolve_model_source(section.model, f"{name}.model").local:
                    notes.append(_hub_id_note(f"{name}.model", section.model))
    for name, teacher in teacher_sections(recipe).items():
        absent = {field: place for field, place in teacher.places.items() if not Path(place).expanduser().exists()}
        path = absent.get("path")
        if path is not None:
            notes.append(f"{name}.path: {path} does not exist yet{suggest_path(path)}; distill cache makes it")
        adapter = absent.get("adapter")
        if adapter is not None:
            notes.append(_hub_id_note(f"{name}.adapter", adapter))
    notes += [_hub_id_note(field, place) for field, place in _sources(recipe) if not missing_file(place, field)]
    return [note for note in notes if note]


def _models(recipe: Recipe) -> dict[str, ModelSection]:
    return {**teacher_sections(recipe), "student": recipe.student}


def _sources(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the fields that name data, each with its file, folder or hub id."""
    data = recipe.data
    named = [(part.field, part.data.source) for part in [*data.parts, *data.set_parts]]
    for field, name in (*named, ("data.validation.source", data.validation.source)):
        if name is not None and name != STDLIB and name.partition(":")[0] != "synthetic":
            yield field, name if local_path(name).exists() else name.rpartition(":")[0] or name


def _missing_models(recipe: Recipe) -> Iterator[str]:
    for name, section in _models(recipe).items():
        if section.model is not None and section.init == "pretrained":
            if _absent_package(section.model, f"{name}.model"):
                continue  # reported by `path_notes`, as models of the hub are
            try:
                resolve_model_source(section.model, f"{name}.model")
            except ValueError as error:
                yield str(error)


def _absent_package(model: str, field: str) -> str | None:
    package = model.removeprefix(PACKAGE_PREFIX).partition("/")[0]
    if not model.startswith(PACKAGE_PREFIX) or not package.isidentifier() or importlib.util.find_spec(package):
        return None
    try:
        resolve_model_source(model, field)
    except ValueError as error:
        return str(error)
    return None


def _missing_data(recipe: Recipe) -> Iterator[str]:
    for field, place in _sources(recipe):
        yield missing_file(place, field) or ""
    template = recipe.data.chat_template
    if template not in ("tokenizer", "none") and not Path(template).expanduser().is_file():
        yield f"data.chat_template: {template} does not exist{suggest_path(template)}"


def _hub_id_note(field: str, name: str) -> str:
    near = "" if local_path(name).exists() else suggest_path(name)
    return f"{field}: {name} does not exist here and is taken for a hub id{near}" if near else ""
