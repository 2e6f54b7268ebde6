"""Arguments and output shared by the commands: the recipe and its overrides, `--json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from distill.core import console
from distill.core.folders import RECIPE_FILE, RUNS, check_folder
from distill.core.imported_files import hash_imported_files
from distill.recipe import Recipe, load
from distill.recipe.shipped import find_architecture, find_recipe, shipped_recipes
from distill.recipe.teachers import teacher_sections


def complete_recipe(incomplete: str) -> list[str]:
    names = [recipe.name for recipe in shipped_recipes()]
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    files = [str(path) + ("/" if path.is_dir() else "") for path in folder.glob("*")] if folder.is_dir() else []
    files = [name for name in files if name.endswith((".yaml", ".yml", "/"))]
    return [name for name in [*names, *files] if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    return [path.name for path in sorted(RUNS.glob(f"{incomplete}*")) if (path / RECIPE_FILE).is_file()]


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A recipe file, or the name of a shipped recipe.", autocompletion=complete_recipe
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY.SUB=VALUE", help="Overrides of the recipe's settings; values are YAML."),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", autocompletion=complete_run)
]
TargetArgument = Annotated[
    str,
    typer.Argument(metavar="RUN_OR_MODEL", help="A run, or a model's folder or hub id.", autocompletion=complete_run),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TeacherModel = Annotated[str | None, typer.Option(metavar="MODEL", help="Generate with this teacher too.")]
WithTeacher = Annotated[bool, typer.Option("--with-teacher", help="Generate with the run's teacher too.")]
RENAMED_OPTIONS = {"--beside-teacher": "--with-teacher"}  # former name: present name
MaxNewTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of new tokens.")]
Temperature = Annotated[float, typer.Option(metavar="T", min=0.0, help="Sampling temperature; 0 for greedy.")]


def rename_options(arguments: Sequence[str]) -> list[str]:
    """Return a command line with the present names of its options; a line names each former one, read until 1.0."""
    for former in RENAMED_OPTIONS.keys() & set(arguments):
        console.print_error(f"{former}: is the former name of {RENAMED_OPTIONS[former]}, and is read until 1.0")
    return [RENAMED_OPTIONS.get(argument, argument) for argument in arguments]


def load_recipe(argument: str, overrides: Sequence[str] | None) -> tuple[Path, Recipe]:
    """Return the path of a recipe and its resolved content.

    Raises:
        ValueError: The recipe is invalid, a `config:` that is needed does not exist, or a store's path is a file.
    """
    path = find_recipe(argument)
    recipe = load(path, overrides or ())
    for field, spec in (("teacher.config", recipe.teacher), ("student.config", recipe.student)):
        if spec.init == "random" and spec.config is not None:
            find_architecture(spec.config, field)
    for name, teacher in teacher_sections(recipe).items():
        for field, folder in teacher.places.items():
            if field != "adapter":
                check_folder(Path(folder).expanduser(), f"{name}.{field}")
    return path, recipe


def plugin_override(plugin: Path | None) -> list[str]:
    """Return the overrides of `--plugin FILE`: the file, its hash and those of the modules of its folder that it
    imports, which tell later what code has run.

    Raises:
        ValueError: The file cannot be read.
    """
    if plugin is None:
        return []
    try:
        code = plugin.read_bytes()
        modules = hash_imported_files(plugin, code)
    except OSError as error:
        raise ValueError(f"--plugin {plugin}: cannot be read: {error.strerror}") from None
    file = {"file": str(plugin), "sha256": hashlib.sha256(code).hexdigest(), "modules": modules}
    return [f"loss.plugin={json.dumps(file)}"]


def load_models(target: str, teacher: str | None, with_teacher: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a target's student, preceded by its teacher if requested, and the tokenizer of each model's prompts.

    It is the student's; a recipe's teacher has its own variables of the chat template, and one of other tokens its own.
    """
    from distill.evaluation.targets import find_target, load_target, load_teacher_of, teacher_tokenizer

    source = find_target(target)
    models: dict[str, Any] = {}
    tokenizers: dict[str, Any] = {}
    with console.spinner("loading"):
        student, tokenizers["student"] = load_target(source)
        if teacher is not None or with_teacher:
            models["teacher"] = load_teacher_of(source, teacher, command="generate")
            tokenizers["teacher"] = teacher_tokenizer(source, teacher, tokenizers["student"])
    return {**models, "student": student}, tokenizers


def print_json(value: object) -> None:
    """Print `value` as JSON; numbers that are not finite become null, which JSON has no other notation for."""
    console.print_verbatim(json.dumps(console.to_jsonable(value), indent=2, ensure_ascii=False))
