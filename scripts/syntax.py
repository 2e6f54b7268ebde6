"""Syntax trees of Python files, parsed once in a process: each rule of the house looks at all of them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


def tree_of(path: Path) -> ast.Module:
    """Return a file's syntax tree, not to be changed; a file that has changed since is read again."""
    return _parsed(path, path.stat().st_mtime_ns)[0]


def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree, in the order of `ast.walk`."""
    return _parsed(path, path.stat().st_mtime_ns)[1]


@functools.cache
def _parsed(path: Path, modified: int) -> tuple[ast.Module, list[ast.AST]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tree, list(ast.walk(tree))
