"""The recipes and model architectures that come with the package, from a clone or from an installed wheel."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import NamedTuple

from distill.core.errors import RecipeError, did_you_mean

SCHEMA_FILE = "recipe.schema.json"
MODELINE = "# yaml-language-server: $schema="  # tells editors where a file's schema is


class ShippedRecipe(NamedTuple):
    """A recipe that comes with the package: its name on the command line, its file, and the title in its header."""

    name: str
    path: Path
    title: str


@functools.cache
def shipped_folder() -> Path:
    """Return the folder of recipes and architectures: a clone's `recipes/`, or the wheel's `distill_recipes`."""
    clone = Path(__file__).resolve().parents[2] / "recipes"
    if (clone / "architectures").is_dir():
        return clone
    spec = importlib.util.find_spec("distill_recipes")
    assert spec is not None and spec.submodule_search_locations, "the installed package lacks its recipes"
    return Path(next(iter(spec.submodule_search_locations)))


def shipped_recipes() -> list[ShippedRecipe]:
    return [ShippedRecipe(path.stem, path, _title(path)) for path in sorted(shipped_folder().glob("*.yaml"))]


def shipped_architectures() -> list[str]:
    """Return the names that `config:` takes in a recipe, such as `llama-3.2-1b`."""
    return sorted(path.parent.name for path in shipped_folder().glob("architectures/*/config.json"))


def find_recipe(argument: str | Path) -> Path:
    """Return the recipe file that a command-line argument names: a path, or the bare name of a shipped recipe.

    A path to a shipped recipe works from any folder (`recipes/quickstart.yaml`).

    Raises:
        RecipeError: there is neither; suggests the nearest name.
    """
    path = Path(argument)
    if _is_file(path):
        return path
    known = {recipe.name: recipe.path for recipe in shipped_recipes()}
    name = path.stem if path.suffix in (".yaml", ".yml") else path.name
    if path.parent in (Path(), Path("recipes")) and name in known:
        return known[name]
    raise RecipeError([f"{str(argument)!r}: no such recipe file, nor a shipped recipe; {did_you_mean(name, known)}"])


def find_architecture(config: str, field: str = "config") -> Path:
    """Return the config.json that a recipe's `config:` names: a file, a folder that holds one, or a shipped name.

    Raises:
        RecipeError: none of these; names `field`.
    """
    candidates = [Path(config), Path(config, "config.json")]
    name = config.removeprefix("architectures/")
    if name == Path(name).name:
        candidates.append(shipped_folder() / "architectures" / name / "config.json")
    for candidate in candidates:
        if _is_file(candidate):
            return candidate
    expected = "expected a config.json, a folder with one, or a shipped architecture"
    raise RecipeError([f"{field}: {expected}, got {config!r}; {did_you_mean(config, shipped_architectures())}"])


def copy_recipe(name: str, destination: Path | None = None) -> Path:
    """Copy a shipped recipe, by default into the working directory; never overwrite a file.

    The copy refers to the schema by an absolute path, so that editors find it from any folder.

    Raises:
        RecipeError: no such recipe, the file exists, or it cannot be written.
    """
    source = find_recipe(name)
    target = Path(destination or Path())
    if target.is_dir():
        target = target / source.name
    elif target.suffix not in (".yaml", ".yml"):
        raise RecipeError([f"{target}: expected a folder that exists, or a file that ends in .yaml"])
    try:
        with target.open("x", encoding="utf-8") as file:
            schema = (source.parent / SCHEMA_FILE).resolve().as_uri()
            file.write(source.read_text(encoding="utf-8").replace(MODELINE + SCHEMA_FILE, MODELINE + schema, 1))
    except FileExistsError:
        raise RecipeError(
            [f"{target}: exists already; name another file: distill recipes copy {name} my.yaml"]
        ) from None
    except OSError as error:
        raise RecipeError([f"{target}: cannot be written: {error.strerror}"]) from None
    return target


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # not a valid name of a file
        return False


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        first = next((line for line in file if not line.startswith(MODELINE)), "")
    return first.lstrip("# ").strip() if first.startswith("#") else ""
