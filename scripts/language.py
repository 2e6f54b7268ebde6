"""The language of docstrings, counted per package: fragments, public names without one, `# fmt: skip`.

    python -m scripts.house --language [PACKAGE ...]

The places in the packages that are named are listed. The exit status is 1 while the whole repository is over its
targets: `FRAGMENT_TARGET` of all docstrings, and no public name without one. `tests/test_house.py` holds each
package to its own bound, which is only ever lowered.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts.syntax import tree_of

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("distill", "kernels", "scripts", "tests")
FRAGMENT_TARGET = 0.02
# a docstring that opens with one of these is a subordinate clause, not a sentence
FRAGMENT_WORDS = frozenset(
    re.findall(r"\w+", "as by from how if in of that to what when where whether which who why with")
)
# tests are read by their names; ruff's rules for docstrings leave them out too
UNDOCUMENTED_FOLDERS = ("distill", "kernels", "scripts")
# their meaning is the base class's, or the decorator's
INHERITED_DECORATORS = frozenset({"override", "overload", "setter", "deleter"})
# methods that PyTorch calls by these names, whose arguments the public function beside them documents
AUTOGRAD_METHODS = frozenset({"forward", "backward", "setup_context", "vmap", "jvp"})
FORMAT_SKIP = re.compile(r"#\s*fmt:\s*(skip|off)\s*(#.*)?$")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class LanguageCount:
    """Docstrings of one package, and the places (`file:line name`) that break a rule.

    Attributes:
        docstrings: number of docstrings, private functions' included.
        fragments: docstrings that open with one of `FRAGMENT_WORDS`, with their first line.
        undocumented: public modules, classes, functions and methods without a docstring.
        unformatted: lines that the formatter is told to leave.
    """

    docstrings: int = 0
    fragments: list[str] = field(default_factory=list)
    undocumented: list[str] = field(default_factory=list)
    unformatted: list[str] = field(default_factory=list)

    @property
    def bounded(self) -> tuple[int, int, int]:
        """The three counts that `tests/test_house.py` bounds, in the order of the fields."""
        return len(self.fragments), len(self.undocumented), len(self.unformatted)


def is_fragment(docstring: str) -> bool:
    """Return whether the docstring opens with a word of `FRAGMENT_WORDS`."""
    first = re.match(r"\W*(\w+)", docstring)
    return first is not None and first[1].lower() in FRAGMENT_WORDS


def package_name(path: Path, root: Path = ROOT) -> str:
    """Return the package a file is counted under: two folders deep in distill/ and kernels/, one elsewhere."""
    folders = path.relative_to(root).parts[:-1]
    if folders[0] == "kernels":
        folders = folders[1:]
    return "/".join(folders[:2]) if folders else "kernels"


def definitions(tree: ast.Module) -> Iterator[tuple[Documented, str, bool]]:
    """Yield the module and each class and function in it: node, dotted name, and whether it is public.

    A definition is public where neither its own name nor that of a class around it begins with an underscore, no
    function is around it, and no decorator says that its meaning is another's.
    """
    yield tree, "", True
    pending: list[tuple[ast.AST, str, bool]] = [(tree, "", True)]
    while pending:
        parent, prefix, public = pending.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{prefix}{node.name}"
                here = public and not node.name.startswith("_")
                decorators = {last_name(decorator) for decorator in node.decorator_list}
                yield node, name, here and not INHERITED_DECORATORS & decorators
                pending.append((node, f"{name}.", here and isinstance(node, ast.ClassDef)))
            else:
                pending.append((node, prefix, public))


class Inheritance:
    """Methods that a base class documents, by the names of classes in the files read."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.bases: dict[str, set[str]] = {}
        self.documented: dict[str, set[str]] = {}
        for node in (node for tree in trees for node in ast.walk(tree)):
            if isinstance(node, ast.ClassDef):
                self.bases.setdefault(node.name, set()).update(base_name(base) for base in node.bases)
                self.documented.setdefault(node.name, set()).update(
                    method.name
                    for method in node.body
                    if isinstance(method, ast.FunctionDef) and ast.get_docstring(method)
                )

    def documents(self, qualified: str) -> bool:
        """Return whether a base class of the class in `Class.method` documents the method."""
        parts = qualified.split(".")
        if len(parts) < 2:
            return False
        pending, seen = [parts[-2]], {parts[-2]}
        while pending:
            bases = self.bases.get(pending.pop(), set()) - seen
            if "Function" in bases and parts[-1] in AUTOGRAD_METHODS:
                return True
            if any(parts[-1] in self.documented.get(base, ()) for base in bases):
                return True
            seen |= bases
            pending += bases
        return False


def base_name(node: ast.expr) -> str:
    """Return the name of a base class without its module and type arguments: `Base` for `module.Base[int]`."""
    return last_name(node.value if isinstance(node, ast.Subscript) else node)


def last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name: `setter` for `value.setter`; empty for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def count_language(root: Path = ROOT, folders: Iterable[str] = FOLDERS) -> dict[str, LanguageCount]:
    """Count the docstrings of every Python file of these folders, by package."""
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    trees = {path: tree_of(path) for path in paths}
    inheritance = Inheritance(trees.values())
    counts: dict[str, LanguageCount] = {}
    for path in paths:
        count = counts.setdefault(package_name(path, root), LanguageCount())
        name = path.relative_to(root)
        documented = name.parts[0] in UNDOCUMENTED_FOLDERS and bool(texts[path].strip())
        for node, qualified, public in definitions(trees[path]):
            place = f"{name}:{getattr(node, 'lineno', 1)} {qualified}".rstrip()
            docstring = ast.get_docstring(node)
            count.docstrings += docstring is not None
            if docstring is not None and is_fragment(docstring):
                count.fragments.append(f"{place}: {docstring.splitlines()[0]}")
            elif docstring is None and documented and public and not inheritance.documents(qualified):
                count.undocumented.append(place)
        for number, line in enumerate(texts[path].splitlines(), 1):
            if FORMAT_SKIP.search(line):
                count.unformatted.append(f"{name}:{number} {line.strip()}")
    return dict(sorted(counts.items()))


def print_language(listed: Iterable[str] = ()) -> bool:
    """Print the counts of every package and the places in those `listed`; return whether the targets are met."""
    counts = count_language()
    listed = list(listed)
    unknown = sorted(set(listed) - set(counts))
    if unknown:
        raise SystemExit(f"expected packages of {', '.join(counts)}, got {', '.join(unknown)}")
    total: Counter[str] = Counter()
    print(f"{'package':<32}{'docstrings':>11}{'fragments':>11}{'':>8}{'undocumented':>14}{'fmt: skip':>11}")
    for package, count in counts.items():
        fragments, undocumented, unformatted = count.bounded
        print_row(package, count.docstrings, fragments, undocumented, unformatted)
        total.update(all=count.docstrings, fragments=fragments, undocumented=undocumented, unformatted=unformatted)
        if package in listed:
            for place in (*count.fragments, *(f"{name}: no docstring" for name in count.undocumented)):
                print(f"    {place}")
            for place in count.unformatted:
                print(f"    {place}")
    print_row("all", total["all"], total["fragments"], total["undocumented"], total["unformatted"])
    return total["fragments"] <= FRAGMENT_TARGET * total["all"] and total["undocumented"] == 0


def print_row(package: str, docstrings: int, fragments: int, undocumented: int, unformatted: int) -> None:
    """Print one line of the table."""
    share = fragments / max(docstrings, 1)
    print(f"{package:<32}{docstrings:>11}{fragments:>11}{share:>8.1%}{undocumented:>14}{unformatted:>11}")
