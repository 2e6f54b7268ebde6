"""Names of ours that tests replace by `monkeypatch.setattr`: each ties a test to how something is done.

`python -m scripts.house` prints the counts; `tests/test_house.py` holds them to their bounds.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from scripts.syntax import nodes_of

ROOT = Path(__file__).resolve().parents[1]
OURS = ("distill", "distill_kernels", "scripts")


def patched_names(root: Path = ROOT) -> list[str]:
    """Return the qualified name of what each call replaces, constants and functions, sorted."""
    return sorted(name for path in (root / "tests").glob("*.py") for name in _patched_in(nodes_of(path)))


def _patched_in(nodes: list[ast.AST]) -> list[str]:
    imported = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
            imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            imported |= {each.asname: each.name for each in node.names if each.asname and each.name.startswith(OURS)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr"]
    found = []
    for owner, *rest in (call.args for call in calls):
        if isinstance(owner, ast.Constant):
            name = str(owner.value)
        else:
            first, *parts = ast.unparse(owner).split(".")
            name = ".".join([imported.get(first, first), *parts, ast.unparse(rest[0]).strip("'")])
        if name.partition(".")[0] in OURS:
            found.append(name)
    return found


def count_patched(root: Path = ROOT) -> Counter[str]:
    """Return how many functions and how many constants (names in capitals) tests replace."""
    return Counter("constants" if name.rpartition(".")[2].isupper() else "functions" for name in patched_names(root))
