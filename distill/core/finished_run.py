"""Result of a finished run, and whether its student is as it was saved.

The checksums of the student's files are in result.json, whose own checksum is in the run's manifest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distill.core.errors import first_line, quote
from distill.core.folders import RESULT_FILE
from distill.core.manifest import entry_mismatch, first_damaged_file


def read_result(folder: Path) -> dict[str, Any]:
    """Return the content of a run's result.json.

    Raises:
        ValueError: It is missing or damaged; the message says how.
    """
    mismatch = entry_mismatch(folder, RESULT_FILE)
    if mismatch is not None:
        raise ValueError(mismatch)
    try:
        result = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{RESULT_FILE} is damaged: {first_line(error)}") from error
    if not isinstance(result, dict):
        raise ValueError(f"{RESULT_FILE} is damaged: expected a section of JSON, got {quote(result)}")
    return result


def finished_result(folder: Path) -> dict[str, Any] | None:
    """Return the content of a finished run's result.json; None where it is missing, empty, damaged or of no run."""
    try:
        result = read_result(folder)
    except ValueError:
        return None
    return result if isinstance(result.get("files"), dict) and "after" in result else None


def student_error(folder: Path) -> str | None:
    """Return how the student of a run differs from the one that was saved, in words; None where it does not.

    None too for a run without result.json, whose student has no checksums.
    """
    path = folder / RESULT_FILE
    if not path.is_file():
        return entry_mismatch(folder, RESULT_FILE)  # missing, where the manifest names it
    try:
        result = read_result(folder)
    except ValueError as error:
        return str(error)
    if "files" not in result:
        return f"{RESULT_FILE} is damaged: it has no checksums of the student's files"
    error_of_files = first_damaged_file(folder / "student", result["files"])
    return None if error_of_files is None else f"student: {error_of_files}"


def require_finished_student(folder: Path) -> None:
    """Check that the student of a finished run, which another stage starts from, has the bytes that were written."""
    error = f"{RESULT_FILE} is damaged" if finished_result(folder) is None else student_error(folder)
    if error is not None:
        raise ValueError(
            f"{folder}: {error}; the next stage would start from it: restore the file, or move {folder} away to train "
            "that stage again"
        )
