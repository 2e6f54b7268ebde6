"""`extends:` of a recipe: another recipe that it takes every setting from that it does not set itself.

    extends: chat-8b-to-1b            # a shipped recipe, or a file: base.yaml, ../base.yaml
    data: {source: my-chats.jsonl}
    train: {learning_rate: 1e-5}

The file is searched next to the recipe that names it. Values replace those of the parent as overrides of the command
line do: sections are merged, lists are replaced, and of two settings that exclude each other the child's is kept. All
other paths are relative to the working directory, in the parent too. The name of the parent's runs is not inherited.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distill.core.errors import RecipeError, did_you_mean, expected_got
from distill.recipe.renamed import rename_settings
from distill.recipe.shipped import shipped_recipes
from distill.recipe.yaml_text import merge, parse_yaml

SUFFIXES = (".yaml", ".yml")


def read_recipe_text(path: Path) -> str:
    """Return the text of a recipe's file.

    Raises:
        RecipeError: The file does not exist, or cannot be read as text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError([f"{path}: no such recipe; `distill recipes` lists those that ship"]) from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        undecoded = isinstance(error, UnicodeDecodeError)
        reason = "not UTF-8 text" if undecoded else getattr(error, "strerror", None) or error
        raise RecipeError([f"{str(path)!r}: cannot be read as a recipe: {reason}"]) from None


def parse_extended(text: str, origin: str, folder: Path, children: Sequence[Path] = ()) -> dict[str, object]:
    """Parse the text of a recipe into its tree, merged into those of the recipes that it extends.

    Args:
        origin: Name of the text in error messages.
        folder: Folder that a file in `extends` is relative to.
        children: Files that led to this text, from the one that was asked for on.

    Raises:
        RecipeError: Not YAML, a parent that does not exist, or a recipe that extends itself.
    """
    tree = parse_yaml(text, origin)
    # present names first: a value then meets the one of its parent
    rename_settings(tree)
    if tree.get("extends") is None:
        tree.pop("extends", None)
        return tree
    path = _find_parent(tree.pop("extends"), origin, folder)
    if path in children:
        chain = " -> ".join(file.name for file in (*children[children.index(path) :], path))
        raise RecipeError([f"{origin}: extends: expected a recipe that does not extend this one, got {chain}"])
    inherited = parse_extended(read_recipe_text(path), str(path), path.parent, (*children, path))
    inherited.pop("name", None)
    try:
        merge(inherited, tree)
    except RecipeError as error:
        raise RecipeError([f"{origin}: {fault}, in {path}" for fault in error.faults]) from None
    return inherited


def _find_parent(parent: object, origin: str, folder: Path) -> Path:
    expected = "extends: expected a .yaml file next to this one, or the name of a shipped recipe"
    if not isinstance(parent, str) or not parent:
        raise RecipeError([f"{origin}: {expected_got(expected, parent)}"])
    shipped = {recipe.name: recipe.path for recipe in shipped_recipes()}
    if parent in shipped:
        return shipped[parent].resolve()
    path = folder / Path(parent).expanduser()
    if path.suffix not in SUFFIXES:
        raise RecipeError([f"{origin}: {expected_got(expected, parent)}; {did_you_mean(parent, shipped)}"])
    if not path.is_file():
        raise RecipeError([f"{origin}: extends: {path} does not exist; {did_you_mean(path.stem, shipped)}"])
    return path.resolve()
