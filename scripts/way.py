"""The way of the recipe: the files that a recipe is handed to, from `distill.run.run` on, in the order of the calls.

    visits, climbs = count(way())

A call is followed where one of its arguments is the recipe, a part of it (`recipe.train`) or an object that was made
with it, and where its function is found by name: in the same file, by an import, by `resolve_name` of a constant, or as
a method of `self` or of such an object. Each function is entered once. A climb is a call into a package of a higher
floor; see scripts/house.py.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from scripts.syntax import nodes_of, tree_of

ROOT = Path(__file__).resolve().parents[1]
START = ("distill.run", "run")


class Module(NamedTuple):
    """Definitions of a file, the modules and names that it imports, and its string constants."""

    functions: dict[str, ast.FunctionDef]
    classes: dict[str, ast.ClassDef]
    imports: dict[str, tuple[str, str]]
    constants: dict[str, str]


class Place(NamedTuple):
    """A function of a module; `owner` is the class of a method."""

    module: str
    owner: str
    name: str


@functools.cache
def read(module: str) -> Module | None:
    """Return a module of distill; None for any other."""
    base = ROOT / module.replace(".", "/")
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not path.is_file():
        return None
    tree = tree_of(path)
    found = Module({}, {}, {}, {})
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distill."):
            found.imports.update({each.asname or each.name: (str(node.module), each.name) for each in node.names})
    for top in tree.body:
        if isinstance(top, ast.FunctionDef):
            found.functions[top.name] = top
        elif isinstance(top, ast.ClassDef):
            found.classes[top.name] = top
        elif isinstance(top, ast.Assign) and isinstance(top.value, ast.Constant) and isinstance(top.value.value, str):
            found.constants.update({each.id: top.value.value for each in top.targets if isinstance(each, ast.Name)})
    return found


def way(start: tuple[str, str] = START) -> list[str]:
    """Return the modules that the recipe enters, in the order of the calls; neighbours differ."""
    entered: set[Place] = set()
    modules = list(_follow(Place(start[0], "", start[1]), {"recipe"}, entered))
    return [module for module, _ in groupby(modules)]


def count(modules: Iterable[str], floor_of: dict[str, int]) -> tuple[int, int]:
    """Return the visits to other files, and how many of them are to a higher floor."""
    pairs = list(pairwise(modules))
    return len(pairs), sum(_floor(there, floor_of) > _floor(here, floor_of) for here, there in pairs)


def _floor(module: str, floors: dict[str, int]) -> int:
    parts = module.split(".")
    return next(floors[name] for size in range(len(parts), 0, -1) if (name := ".".join(parts[:size])) in floors)


def _follow(place: Place, carriers: set[str], entered: set[Place]) -> Iterator[str]:
    """Yield the module of a function and of all that it hands the recipe to."""
    module = read(place.module)
    node = None if module is None else _definition(module, place)
    if module is None or node is None or place in entered:
        return
    entered.add(place)
    yield place.module
    carriers, objects = set(carriers), dict[str, Place]()
    if place.owner:
        carriers.add("self.recipe")
        objects["self"] = Place(place.module, place.owner, "")
    for each in _in_order(node):
        if isinstance(each, ast.Assign):
            _alias(each, carriers, objects, place, module)
        elif isinstance(each, ast.Call):
            target = _target(each, objects, place, module)
            given = _given(each, carriers)
            made = isinstance(each.func, ast.Attribute) and ast.unparse(each.func.value) in objects
            if target is not None and (given or made):
                yield from _follow(target, _parameters(target, each, carriers), entered)


def _definition(module: Module, place: Place) -> ast.FunctionDef | None:
    if not place.owner:
        return module.functions.get(place.name)
    body = module.classes[place.owner].body if place.owner in module.classes else []
    return next((each for each in body if isinstance(each, ast.FunctionDef) and each.name == place.name), None)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes inside, arguments before the call that takes them, without functions and what follows errors."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler):
            yield from _in_order(child)
            yield child


def _carries(value: ast.AST, carriers: set[str]) -> bool:
    text = ast.unparse(value)
    is_part = isinstance(value, ast.Name | ast.Attribute)
    return is_part and any(text == name or text.startswith(f"{name}.") for name in carriers)


def _given(call: ast.Call, carriers: set[str]) -> bool:
    return any(_carries(each, carriers) for each in (*call.args, *(given.value for given in call.keywords)))


def _alias(node: ast.Assign, carriers: set[str], objects: dict[str, Place], place: Place, module: Module) -> None:
    (target, *_), value = node.targets, node.value
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    values = value.elts if isinstance(value, ast.Tuple) else [value]
    for name, each in zip(targets, values, strict=False):
        if isinstance(name, ast.Name) and _carries(each, carriers):
            carriers.add(name.id)
        if isinstance(name, ast.Name) and isinstance(each, ast.Call) and _given(each, carriers):
            made = _target(each, objects, place, module)
            if made is not None and made.owner and made.name == "__init__":
                objects[name.id] = made


def _target(call: ast.Call, objects: dict[str, Place], place: Place, module: Module) -> Place | None:
    """Return the function that a call enters; the `__init__` of a class."""
    function = call.func
    if isinstance(function, ast.Attribute) and (owner := objects.get(ast.unparse(function.value))) is not None:
        return owner._replace(name=function.attr)
    if isinstance(function, ast.Call) and ast.unparse(function.func) == "resolve_name":
        (constant,) = function.args
        written = constant.value if isinstance(constant, ast.Constant) else ""
        text = str(module.constants.get(ast.unparse(constant), written))
        where, _, name = text.partition(":")
        return Place(where, "", name) if name else None
    if not isinstance(function, ast.Name):
        return None
    where, name = module.imports.get(function.id, (place.module, function.id))
    there = read(where)
    if there is not None and name in there.imports and name not in {*there.functions, *there.classes}:
        where, name = there.imports[name]  # a package hands it on
        there = read(where)
    if there is None or name not in {*there.functions, *there.classes}:
        return None
    return Place(where, name, "__init__") if name in there.classes else Place(where, "", name)


def _parameters(target: Place, call: ast.Call, carriers: set[str]) -> set[str]:
    """Return the parameters of a function that get the recipe or a part of it."""
    there = read(target.module)
    node = None if there is None else _definition(there, target)
    if node is None:
        return set()
    names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)][bool(target.owner) :]
    found = {name for name, given in zip(names, call.args, strict=False) if _carries(given, carriers)}
    return found | {str(each.arg) for each in call.keywords if _carries(each.value, carriers)}
