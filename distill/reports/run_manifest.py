"""Checksums of a run's first and last files, in `manifest.json`, and the metrics from before training.

Checkpoints have manifests of their own; metrics.jsonl is added once it is complete.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from distill.core.folders import KERNELS_FILE, RECIPE_FILE, RESULT_FILE
from distill.core.manifest import add_to_manifest, entry_mismatch
from distill.evaluation.evaluate import HeldOut
from distill.objectives.measure import DivergenceUnit
from distill.training.lock_file import LOCK_FILE

log = logging.getLogger(__name__)

BEFORE_FILE = "before.json"
METRICS_FILE = "metrics.jsonl"
ADAPTER_FOLDER = "adapter"
EXPORT_FOLDER = "export"
# of before.json; held-out metrics and samples follow after training
START = ("started", "command", "device", "summary")
BEGINNING = (RECIPE_FILE, LOCK_FILE, BEFORE_FILE, "attention.json", KERNELS_FILE)
END = (METRICS_FILE, "samples.md", "curves.svg", RESULT_FILE)


def record_start(folder: Path) -> None:
    """Add the files of a run's beginning to its manifest; a lock file damaged since keeps its entry."""
    add_to_manifest(folder, *(name for name in BEGINNING if name != LOCK_FILE or entry_mismatch(folder, name) is None))


def record_end(folder: Path) -> None:
    """Add the files of a run's end to its manifest; those of student/ are in result.json."""
    add_to_manifest(folder, *END, *_files_below(folder, ADAPTER_FOLDER))


def record_export(folder: Path) -> None:
    """Add the files of a run's export/ to its manifest."""
    add_to_manifest(folder, *_files_below(folder, EXPORT_FOLDER))


def _files_below(folder: Path, name: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in (folder / name).rglob("*") if path.is_file())


def read_before(folder: Path, measure: DivergenceUnit) -> tuple[HeldOut, dict[str, list[str]]] | None:
    """Return metrics and responses from before training; None where there are none yet, or they are damaged."""
    path = folder / BEFORE_FILE
    if not path.exists():
        return None
    try:
        fault = entry_mismatch(folder, path.name)
        if fault:
            raise ValueError(fault)
        record = json.loads(path.read_text(encoding="utf-8"))
        if record and set(record) <= set(START):  # the run has not measured the untrained student yet
            return None
        figures: dict[str, Any] = measure.read(record["held_out"])
        figures = {name: math.nan if value is None else value for name, value in figures.items()}
        return HeldOut(**figures), dict(record["answers"])
    except (ValueError, KeyError, TypeError):
        log.warning("%s is damaged; the student is evaluated again", path)
        return None


def read_start(folder: Path) -> dict[str, object]:
    """Return when, by which command and on which device the run was first started; empty where that is not known."""
    try:
        record = json.loads((folder / BEFORE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {name: record[name] for name in START if name in record} if isinstance(record, dict) else {}
