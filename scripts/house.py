"""Structure metrics of the code: layers, upward imports, cycles, branches on the kind of teacher, lines.

    python -m scripts.house
    python -m scripts.house --language [PACKAGE ...]        docstrings instead; see scripts/language.py

A package imports from packages on lower floors only. Imports inside functions and under TYPE_CHECKING count.
`tests/test_house.py` holds these figures.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scripts import way
from scripts.language import print_language
from scripts.patched import count_patched
from scripts.syntax import nodes_of
from scripts.trainer_rules import print_trainer

ROOT = Path(__file__).resolve().parents[1]

# the longest name that fits a module counts
FLOORS = {
    "distill_kernels": 0,
    "distill.core": 1,
    "distill.recipe": 2,
    "distill.models": 3,
    "distill.data": 3,
    "distill.generation": 4,
    "distill.objectives": 4,
    "distill.teachers": 5,
    "distill.planning": 6,
    "distill.training": 7,
    "distill.evaluation": 7,
    "distill.doctor": 8,
    "distill.reports": 8,
    "distill.caching": 8,
    "distill.serving": 8,
    "distill.run": 9,
    "distill.run_results": 9,
    "distill.run_phases": 9,
    "distill.commands": 9,
    "distill.cli": 9,
    "distill.__main__": 9,
}
TOP = max(FLOORS.values())
MOST_LINES = 420
# a line counts as a branch on the kind of teacher where it is an `if`, `elif`, `while`, conditional expression,
# comprehension's `if`, `and`/`or`, `isinstance` or `getattr` that reads one of these
KIND = re.compile(
    r"""\.members\b | getattr\([^()]*"(members|head|describe|describe_batch|unshard)" | \bis_cached\b
    | \bvocabulary\s*(==|!=|in)\s*\(?"cross" | \.teachers\b | \btype\s*==\s*"cache" | teacher\.path\b
    | \bin\s+EIGHT_BITS | \bdtype\s*(==|!=|in)\s*\(?"(fp8|int8)" | \.offload\b | \bteacher_sharded\b
    | isinstance\([^()]*(TeacherGroup|TeacherCache|Objective|Cached|Across|Several)\w*""",
    re.VERBOSE,
)
BRANCH = re.compile(r"\b(if|elif|while|and|or|not|isinstance|getattr|for)\b|==|!=")
TEXT = re.compile(r"""f?"[^"]{12,}"|f?"[^"]*$""")
PASSED = re.compile(r"\w+=[\w.]*teacher_sharded\b")
HOME = ("distill/teachers/", "distill/recipe/")
# module that is imported, package whose modules are counted, most of them
LOADED = (
    ("distill", "distill", 1),
    ("distill.cli", "distill", 31),
    ("distill.models.head", "distill", 30),
    ("distill.run", "distill", 110),
    ("distill_kernels", "distill_kernels", 2),
    ("distill_kernels.losses.fused", "distill_kernels", 23),
)


class InternalImport(NamedTuple):
    """Import of one module of ours by another: file and line, importing module, imported module, names."""

    place: str
    importer: str
    imported: str
    names: tuple[str, ...]


def module_name(path: Path, root: Path = ROOT) -> str:
    """Return a file's module name: `distill.models.head` for distill/models/head.py, without kernels/."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    parts = parts[1:] if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files(*folders: str, root: Path = ROOT) -> list[Path]:
    """Return all Python files of these folders, sorted."""
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


@functools.cache
def internal_imports(root: Path = ROOT) -> list[InternalImport]:
    """Return every import of one module of ours by another."""
    paths = files("distill", "kernels", root=root)
    modules = {module_name(path, root) for path in paths}
    found = []
    for path in paths:
        importer = module_name(path, root)
        for node in nodes_of(path):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            place = f"{path.relative_to(root)}:{node.lineno}"
            if isinstance(node, ast.Import):
                found += [
                    InternalImport(place, importer, alias.name, ()) for alias in node.names if alias.name in modules
                ]
            elif node.module and node.level == 0:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    if inner in modules:
                        found.append(InternalImport(place, importer, inner, ()))
                    elif node.module in modules:
                        found.append(InternalImport(place, importer, node.module, (alias.name,)))
    return found


def package_of(module: str) -> str | None:
    """Return the entry of `FLOORS` that a module belongs to, or None."""
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((name for name in names if name in FLOORS), None)


def packages_without_floor(root: Path = ROOT) -> list[str]:
    """Return the modules whose package has no floor."""
    names = [module_name(path, root) for path in files("distill", "kernels", root=root)]
    return [name for name in names if name != "distill" and package_of(name) is None]


def upward_imports(root: Path = ROOT) -> list[InternalImport]:
    """Return imports from a higher floor, or from another package of the same one."""
    wrong = []
    for item in internal_imports(root):
        here, there = package_of(item.importer), package_of(item.imported)
        if here is None or there is None or here == there:
            continue
        same_top = FLOORS[here] == FLOORS[there] == TOP
        if FLOORS[there] >= FLOORS[here] and not same_top:
            wrong.append(item)
    return wrong


def private_imports(root: Path = ROOT) -> list[InternalImport]:
    """Return imports of a private name of another package of ours."""
    return [
        item
        for item in internal_imports(root)
        if any(name.startswith("_") and not name.startswith("__") for name in item.names)
        and item.importer.rpartition(".")[0] != item.imported.rpartition(".")[0]
    ]


def import_cycles(root: Path = ROOT) -> list[list[str]]:
    """Return the sets of files that import each other, each of two or more, sorted (Tarjan, 1972)."""
    graph: dict[str, set[str]] = {}
    for item in internal_imports(root):
        if item.importer != item.imported:
            graph.setdefault(item.importer, set()).add(item.imported)
            graph.setdefault(item.imported, set())
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                components.append(sorted(component))

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return components


def teacher_kind_branches(root: Path = ROOT) -> list[tuple[str, str]]:
    """Return the lines outside of recipe/ and teachers/ that branch on the kind of teacher: place and text.

    Comments and docstrings do not count, nor lines that only pass such a value on.
    """
    found = []
    for path in files("distill", root=root):
        name = path.relative_to(root).as_posix()
        if name.startswith(HOME):
            continue
        found += [(f"{name}:{number}", line.strip()) for number, line in code_lines(path) if branches_on_kind(line)]
    return found


def branches_on_kind(line: str) -> bool:
    """Return whether a line of code branches on the kind of teacher; strings and values passed on do not count."""
    code = PASSED.sub("", TEXT.sub('""', line))
    return bool(KIND.search(code) and BRANCH.search(code))


_FORK_EACH = """
import os, sys, torch
import accelerate, datasets, peft, transformers.trainer, transformers.models.auto.modeling_auto  # once, not in each
for statement in sys.argv[1:]:
    if os.fork() == 0:
        exec(statement)
        ours = [name for name in sys.modules if name.partition(".")[0] in ("distill", "distill_kernels")]
        print(*sorted(ours), flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(1)
"""


def loaded_modules(*statements: str, root: Path = ROOT) -> dict[str, list[str]]:
    """Return the modules of ours that each statement loads in a fresh interpreter that has other packages, sorted."""
    command = [sys.executable, "-c", _FORK_EACH, *statements]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    if done.returncode:
        raise RuntimeError(f"{statements}: {done.stderr.strip().splitlines()[-1]}")
    return dict(zip(statements, map(str.split, done.stdout.splitlines()), strict=True))


def of_package(names: list[str], package: str) -> list[str]:
    """Return the names of modules of a package."""
    return [name for name in names if name.partition(".")[0] == package]


def code_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of a file's lines that are neither comment nor docstring."""
    text = path.read_text(encoding="utf-8")
    skipped: set[int] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(text.splitlines(), 1):
        if number not in skipped and not line.lstrip().startswith("#"):
            yield number, line.split("  # ")[0]


def count_lines(folder: str, root: Path = ROOT) -> int:
    """Return the number of lines of all Python files of a folder."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files(folder, root=root))


def files_too_long(root: Path = ROOT) -> list[str]:
    """Return the files over `MOST_LINES`, with their length."""
    lengths = {
        path: len(path.read_text().splitlines()) for path in files("distill", "kernels", "scripts", "tests", root=root)
    }
    return [f"{path.relative_to(root)} {length}" for path, length in lengths.items() if length > MOST_LINES]


def count_any(folder: str, root: Path = ROOT) -> int:
    """Count the uses of `Any` in code, imports aside; uses of its aliases count as well."""
    count = 0
    for path in files(folder, root=root):
        names = {"Any"} | {
            target.id
            for node in nodes_of(path)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == "Any"
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        count += sum(isinstance(node, ast.Name) and node.id in names for node in nodes_of(path))
    return count


def long_signatures(root: Path = ROOT, most: int = 6) -> list[tuple[str, int]]:
    """Return functions of distill/ with more than `most` arguments (`self` and `cls` aside): place and count."""
    found = []
    for path in files("distill", root=root):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                count = len([name for name in given if name not in ("self", "cls")])
                if count > most:
                    found.append((f"{path.relative_to(root).as_posix()}:{node.name}", count))
    return found


def protocol_members(root: Path = ROOT) -> dict[str, int]:
    """Count the public members of each Protocol of distill/: annotated attributes, properties and methods."""
    counts: dict[str, int] = {}
    for path in files("distill", root=root):
        for node in nodes_of(path):
            if not isinstance(node, ast.ClassDef) or "Protocol" not in map(ast.unparse, node.bases):
                continue
            attributes = {
                a.target.id for a in node.body if isinstance(a, ast.AnnAssign) and isinstance(a.target, ast.Name)
            }
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            public = {name for name in attributes | methods if not name.startswith("_")}
            counts[f"{path.relative_to(root).as_posix()}:{node.name}"] = len(public)
    return counts


def capability_places(root: Path = ROOT) -> dict[str, list[str]]:
    """Return the places of distill/ that ask for each capability by `isinstance`, by the capability.

    A capability is a Protocol that is decorated with `runtime_checkable`; its name is unique.
    """
    nodes = [
        (path.relative_to(root).as_posix(), node) for path in files("distill", root=root) for node in nodes_of(path)
    ]
    found: dict[str, list[str]] = {
        node.name: []
        for _, node in nodes
        if isinstance(node, ast.ClassDef) and "runtime_checkable" in map(ast.unparse, node.decorator_list)
    }
    for name, node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            for asked in ast.walk(node.args[1]):
                if isinstance(asked, ast.Name) and asked.id in found:
                    found[asked.id].append(f"{name}:{node.lineno}")
    return found


def pairs_refused_by_hand() -> int:
    """Count the pairs of settings that are refused without a property that one requires and the other lacks."""
    from distill.recipe.compatibility import APART

    return len(APART)


def main() -> None:
    """Print the counts that are asked for."""
    parser = argparse.ArgumentParser(description="Count how far the code keeps to the rules of the house.")
    parser.add_argument(
        "--language", nargs="*", metavar="PACKAGE", help="count docstrings; list the places in these packages"
    )
    listed = parser.parse_args().language
    if listed is None:
        print_structure()
    else:
        sys.exit(0 if print_language(listed) else 1)


def print_structure() -> None:
    """Print floors, cycles, branches, long signatures, lines and uses of `Any`."""
    wrong, rings, asked, hidden, long = (
        upward_imports(),
        import_cycles(),
        teacher_kind_branches(),
        private_imports(),
        long_signatures(),
    )
    print(f"{'imports upward or sideways':<44}{len(wrong):>6}")
    for item in wrong:
        print(f"    {item.place:<48}{item.importer} -> {item.imported} {', '.join(item.names)}")
    print(f"{'cycles of files':<44}{len(rings):>6}")
    for ring in rings:
        print(f"    {', '.join(ring)}")
    print(f"{'private names of other packages':<44}{len(hidden):>6}")
    for item in hidden:
        print(f"    {item.place:<48}{item.imported}: {', '.join(item.names)}")
    print(f"{'branches on the kind of teacher outside':<44}{len(asked):>6}")
    for place, line in asked:
        print(f"    {place:<44}{line}")
    loaded = loaded_modules(*(f"import {module}" for module, _, _ in LOADED))
    for module, package, most in LOADED:
        count = len(of_package(loaded[f"import {module}"], package))
        print(f"files of {package} that {module} loads: {count}, at most {most}")
    visits, climbs = way.count(way.way(), FLOORS)
    print(f"{'visits of the recipe to other files':<44}{visits:>6}, {climbs} of them to a higher floor")
    print(f"{'pairs of settings refused by hand':<44}{pairs_refused_by_hand():>6}")
    for name, count in sorted(protocol_members().items(), key=lambda item: (-item[1], item[0])):
        print(f"members of {name:<60}{count:>6}")
    for name, places in sorted(capability_places().items()):
        print(f"{f'places that ask for {name}':<44}{len(places):>6}    {', '.join(places)}")
    print_trainer()
    patched = count_patched()
    for kind in ("constants", "functions"):
        reasons = {reason: count for (each, reason), count in sorted(patched.items()) if each == kind}
        listed = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
        print(f"{f'{kind} of ours that tests replace':<44}{sum(reasons.values()):>6}    {listed}")
    print(f"{'functions over six arguments':<44}{len(long):>6}")
    for place, number in long:
        print(f"    {place:<64}{number:>4}")
    for name in files_too_long():
        print(f"over {MOST_LINES} lines: {name}")
    for folder in ("distill", "kernels", "tests", "scripts"):
        print(f"{folder + '/':<44}{count_lines(folder):>6} lines, Any {count_any(folder)}")
    for name in ("distill/teachers/interface.py", "distill/recipe", "distill/core"):
        path = ROOT / name
        if path.exists():
            print(f"{name:<44}{count_any(name) if path.is_dir() else path.read_text().count('Any'):>6} Any")


if __name__ == "__main__":
    main()
