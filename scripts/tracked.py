"""Check that every tracked file is of a kind that belongs into the repository: `python -m scripts.tracked`.

What tools leave behind (caches, sockets, editors' copies, core dumps, weights) is of another kind, or lies in a folder
that only one kind belongs into. Prints each file that is refused, with the reason, and exits with 1.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 1 << 20  # bytes; rows of a benchmark and the recipe schema stay far below
# by top folder ("" for files at the top): the endings, and the whole names, that belong there
KINDS: dict[str, tuple[str, ...]] = {
    "": (
        ".md",
        ".toml",
        ".gitignore",
        ".pre-commit-config.yaml",
        "LICENSE",
        "CITATION.cff",
        "constraints.txt",
        "Dockerfile",
        ".dockerignore",
    ),
    ".ci": ("run", ".py"),
    ".devcontainer": ("devcontainer.json",),
    "distill": (".py", ".css", ".mjs", ".yaml", "py.typed", "reference_results.json"),
    "docs": (".md", ".ipynb", ".svg", ".css", ".jsonl", ".csv", ".parquet", ".txt"),
    "kernels": (".py", "py.typed", "pyproject.toml", "LICENSE"),
    "recipes": (".py", ".yaml", ".jsonl", "config.json", "recipe.schema.json"),
    "scripts": (".py", ".jsonl", ".yaml", ".svg", ".md", ".txt"),
    "tests": (".py", ".jsonl", ".yaml", "golden_runs.json", "recorded_vllm.json.xz", "stored_by_0_1.tar.xz"),
}
PROGRAMS = {".ci/run"}


class File(NamedTuple):
    """A tracked file: its path, its mode as git writes it, and its size in bytes."""

    path: str
    mode: str
    size: int


def tracked(root: Path = ROOT) -> list[File]:
    """Return all files in git's index that are also in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-sz"], cwd=root, capture_output=True, text=True, check=True).stdout
    files = []
    for entry in filter(None, listed.split("\0")):
        head, path = entry.split("\t", 1)
        if (root / path).is_symlink() or (root / path).exists():
            files.append(File(path, head.split()[0], (root / path).lstat().st_size))
    return files


def fault(file: File) -> str | None:
    """Return the reason why a file does not belong into the repository, or None."""
    path = PurePosixPath(file.path)
    folder = path.parts[0] if len(path.parts) > 1 else ""
    if folder not in KINDS:
        return f"{folder}/ is no folder of the repository; expected one of {', '.join(filter(None, KINDS))}"
    if not any(path.name == kind or (kind.startswith(".") and path.suffix == kind) for kind in KINDS[folder]):
        return f"expected one of {', '.join(KINDS[folder])} in {folder or 'the top folder'}"
    if file.mode != ("100755" if file.path in PROGRAMS else "100644"):
        return f"mode {file.mode}; expected a plain file, executable only for {', '.join(PROGRAMS)}"
    if file.size > LARGEST:
        return f"{file.size:,} bytes; expected at most {LARGEST:,}"
    return None


def main(root: Path = ROOT) -> int:
    """Print the refused files and return the exit status."""
    refused = [f"{file.path}: {reason}" for file in tracked(root) if (reason := fault(file))]
    print("\n".join(refused) or "every tracked file is of a known kind")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
