"""What the commands share: the recipe and its overrides as arguments, `--json`, and how a result leaves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from distill.commands.paths import teachers_of
from distill.core import console
from distill.core.folders import RECIPE_FILE, RUNS, check_folder
from distill.recipe import Recipe, load
from distill.recipe.shipped import find_architecture, find_recipe, shipped_recipes


def complete_recipe(incomplete: str) -> list[str]:
    """Shell completion: shipped names, and recipe files below the folder typed so far."""
    names = [recipe.name for recipe in shipped_recipes()]
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    files = [str(path) + ("/" if path.is_dir() else "") for path in folder.glob("*")] if folder.is_dir() else []
    files = [name for name in files if name.endswith((".yaml", ".yml", "/"))]
    return [name for name in [*names, *files] if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Shell completion: runs under runs/."""
    return [path.name for path in sorted(RUNS.glob(f"{incomplete}*")) if (path / RECIPE_FILE).is_file()]


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A recipe file, or the name of one that ships.", autocompletion=complete_recipe
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY.SUB=VALUE", help="Settings that replace the recipe's; the value is YAML."),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, or its name under runs/.", autocompletion=complete_run)
]
TargetArgument = Annotated[
    str,
    typer.Argument(metavar="RUN_OR_MODEL", help="A run, or a model's folder or hub id.", autocompletion=complete_run),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
BesideModel = Annotated[str | None, typer.Option(metavar="MODEL", help="Answer beside this teacher.")]
BesideTeacher = Annotated[bool, typer.Option("--beside-teacher", help="Answer beside the run's own teacher.")]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Length of an answer at most.")]
Temperature = Annotated[float, typer.Option(metavar="T", min=0.0, help="0 for the likeliest token.")]


def load_recipe(argument: str, overrides: Sequence[str] | None) -> tuple[Path, Recipe]:
    """The recipe's file and its resolved content; a `config:` that is read must exist, a store be no file."""
    path = find_recipe(argument)
    recipe = load(path, overrides or ())
    for field, spec in (("teacher.config", recipe.teacher), ("student.config", recipe.student)):
        if spec.init == "random" and spec.config is not None:
            find_architecture(spec.config, field)
    for name, teacher in teachers_of(recipe).items():
        for field, folder in (("keep", teacher.keep), ("path", teacher.path)):
            if folder is not None:
                check_folder(Path(folder).expanduser(), f"{name}.{field}")
    return path, recipe


def plugin_override(plugin: Path | None) -> list[str]:
    """What `--plugin FILE` adds to a recipe: the file and its hash, so that a resolved recipe says which code it ran.

    Raises:
        ValueError: the file cannot be read.
    """
    if plugin is None:
        return []
    try:
        code = plugin.read_bytes()
    except OSError as error:
        raise ValueError(f"--plugin {plugin}: cannot be read: {error.strerror}") from None
    return [f"loss.plugin={{file: {json.dumps(str(plugin))}, sha256: '{hashlib.sha256(code).hexdigest()}'}}"]


def models_to_answer(target: str, teacher: str | None, beside: bool) -> tuple[dict[str, Any], Any]:
    """A target's student, after its teacher where one is asked for, and the student's tokenizer."""
    from distill.evaluation.targets import find_target, load_its_teacher, load_target

    without_bars()
    source = find_target(target)
    with console.working("loading"):
        student, tokenizer = load_target(source)
        models = {"teacher": load_its_teacher(source, teacher)} if teacher is not None or beside else {}
    return {**models, "student": student}, tokenizer


def without_bars() -> None:
    """Keep transformers from drawing bars of its own, into pipes and logs too; ours say what takes a while."""
    import transformers

    transformers.utils.logging.disable_progress_bar()


def say_json(value: object) -> None:
    """Print `value` as JSON; what is not finite becomes null, since JSON has no word for it."""
    console.say_verbatim(json.dumps(console.plain(value), indent=2, ensure_ascii=False))
