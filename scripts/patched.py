"""Names of ours that tests replace by `setattr` of a monkeypatch: each ties a test to how something is done.

Each is replaced through one of the fixtures of tests/replaced.py, whose name gives the reason; "none" is any other.
`python -m scripts.house` prints the counts; `tests/test_house.py` holds them to their bounds.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from scripts.syntax import nodes_of

ROOT = Path(__file__).resolve().parents[1]
OURS = ("distill", "distill_kernels", "scripts")
REASONS = ("fault", "hardware", "library", "limit", "watch", "without")  # fixtures of tests/replaced.py
NO_REASON = "none"


class Patched(NamedTuple):
    """A name that a test replaces.

    Attributes:
        name: Qualified name, of a constant in capitals.
        reason: One of REASONS, or NO_REASON.
    """

    name: str
    reason: str

    @property
    def kind(self) -> str:
        """Kind of what is replaced: "constants" or "functions"."""
        return "constants" if self.name.rpartition(".")[2].isupper() else "functions"


def patched_names(root: Path = ROOT) -> list[Patched]:
    """Return what each call replaces, sorted by name."""
    return sorted(each for path in (root / "tests").glob("*.py") for each in _patched_in(nodes_of(path)))


def _patched_in(nodes: list[ast.AST]) -> list[Patched]:
    imported = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
            imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            imported |= {each.asname: each.name for each in node.names if each.asname and each.name.startswith(OURS)}
    found = []
    for node in nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr"):
            continue
        owner, *rest = node.args
        if isinstance(owner, ast.Constant):
            name = str(owner.value)
        elif isinstance(owner, ast.JoinedStr):
            name = ast.unparse(owner)[2:-1]
        else:
            first, *parts = ast.unparse(owner).split(".")
            name = ".".join([imported.get(first, first), *parts, ast.unparse(rest[0]).strip("'")])
        if name.partition(".")[0] in OURS:
            fixture = ast.unparse(node.func.value)
            found.append(Patched(name, fixture if fixture in REASONS else NO_REASON))
    return found


def count_patched(root: Path = ROOT) -> Counter[tuple[str, str]]:
    """Return how many functions and how many constants tests replace, by kind and reason."""
    return Counter((each.kind, each.reason) for each in patched_names(root))
