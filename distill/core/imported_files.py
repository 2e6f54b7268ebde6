"""Files that a user's Python file imports from its own folder, which its behaviour depends on as on itself."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path


def hash_imported_files(file: Path, code: bytes) -> dict[str, str]:
    """Return the SHA-256 of each module below a file's folder that it imports, directly or through others.

    The text is searched, imports inside functions included; nothing is run. Installed packages are left out, and so are
    modules whose names are computed.

    Args:
        file: Path of the file; its folder is where imports are looked up.

    Returns:
        Hashes by path relative to the folder, with slashes, in their order.
    """
    folder = file.resolve().parent
    found: dict[Path, str] = {}
    waiting = list(_modules(code, folder, folder))
    while waiting:
        path = waiting.pop()
        if path in found or path == file.resolve():
            continue
        content = path.read_bytes()
        found[path] = hashlib.sha256(content).hexdigest()
        waiting += _modules(content, folder, path.parent)
    return {path.relative_to(folder).as_posix(): found[path] for path in sorted(found)}


def _modules(code: bytes, folder: Path, package: Path) -> Iterator[Path]:
    """Yield the files below `folder` that a module in `package` imports."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):  # raised where the code is run, with the user's line
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(folder, folder, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            start = folder
            if node.level:  # relative: one dot is the module's own package
                start = [package, *package.parents][min(node.level - 1, len(package.parents))]
            parts = node.module.split(".") if node.module else []
            for alias in node.names:  # a name may be a module too
                yield from _files(folder, start, [*parts, alias.name])


def _files(folder: Path, start: Path, parts: list[str]) -> Iterator[Path]:
    """Yield the files that importing a dotted name runs, as far as they stand below `folder`."""
    place = start
    for part in parts:
        place = place / part
        for path in (place / "__init__.py", place.with_name(f"{part}.py")):
            if path.is_file() and path.resolve().is_relative_to(folder):
                yield path.resolve()
                break
