"""Rules of the trainer: few private methods of transformers are overridden, nothing sets its attributes from outside.

`python -m scripts.house` prints the places; `tests/test_house.py` holds them to their bounds.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from scripts.syntax import nodes_of

ROOT = Path(__file__).resolve().parents[1]
MOST_OVERRIDES = 8


def private_overrides(root: Path = ROOT) -> list[str]:
    """Return the private methods of transformers' Trainer that distill/ overrides, with their places."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.submodule_search_locations
    upstream = ast.parse(Path(spec.submodule_search_locations[0], "trainer.py").read_text(encoding="utf-8"))
    trainer = next(node for node in upstream.body if isinstance(node, ast.ClassDef) and node.name == "Trainer")
    private = {node.name for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name.startswith("_")}
    private -= {name for name in private if name.startswith("__")}
    classes = [
        (path.relative_to(root).as_posix(), node)
        for path in sorted((root / "distill").rglob("*.py"))
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    ]
    trainers = {"Trainer"}
    while more := {each.name for _, each in classes if trainers & {*map(ast.unparse, each.bases)}} - trainers:
        trainers |= more
    return sorted(
        f"{place}:{each.name}"
        for place, node in classes
        if node.name in trainers
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name in private
    )


def trainer_attributes_set(root: Path = ROOT) -> list[str]:
    """Return the places of distill/ and scripts/ that set an attribute of a trainer, or of a part of it, from outside.

    A trainer is what is called `trainer`, as a variable or as an attribute.
    """
    found = []
    for path in sorted(path for folder in ("distill", "scripts") for path in (root / folder).rglob("*.py")):
        for node in nodes_of(path):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = [part for each in node.targets for part in getattr(each, "elts", [each])]
            elif isinstance(node, ast.AugAssign | ast.AnnAssign):
                targets = [node.target]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                targets = [ast.Attribute(node.args[0], "")]
            if any(isinstance(each, ast.Attribute) and _is_of_trainer(each.value) for each in targets):
                found.append(f"{path.relative_to(root).as_posix()}:{getattr(node, 'lineno', 0)}")
    return found


def _is_of_trainer(owner: ast.expr) -> bool:
    """Return whether an expression is a trainer, or a part of one."""
    while isinstance(owner, ast.Attribute):
        if owner.attr == "trainer":
            return True
        owner = owner.value
    return isinstance(owner, ast.Name) and owner.id == "trainer"


def print_trainer() -> None:
    """Print the overridden private methods, and the places that set attributes from outside."""
    overridden, set_outside = private_overrides(), trainer_attributes_set()
    print(f"{'private methods of Trainer overridden':<44}{len(overridden):>6}, at most {MOST_OVERRIDES}")
    for place in overridden:
        print(f"    {place}")
    print(f"{'attributes of a trainer set from outside':<44}{len(set_outside):>6}")
    for place in set_outside:
        print(f"    {place}")
