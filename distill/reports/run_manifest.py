"""Checksums of a run's first and last files, in `manifest.json`, and the metrics from before training.

Checkpoints have manifests of their own; metrics.jsonl is added once it is complete.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from distill.core.folders import KERNELS_FILE, RECIPE_FILE, RESULT_FILE
from distill.core.manifest import add_to_manifest, entry_mismatch
from distill.evaluation.evaluate import HeldOut
from distill.generation.task_answers import Accuracy
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


Answers = dict[str, list[str]]  # responses to the sample prompts, by model


class Measured(NamedTuple):
    """Measurement of a run's student.

    Attributes:
        sets: Metrics on each named held-out set.
        teacher_tasks: Accuracy of the teacher in the tasks that it was asked; the first process alone has it.
        answers: Responses to the sample prompts, by model.
    """

    held_out: HeldOut
    sets: dict[str, HeldOut]
    tasks: dict[str, Accuracy]
    answers: Answers
    teacher_tasks: Mapping[str, Accuracy] = MappingProxyType({})

    def teacher_tasks_of(self, name: str) -> dict[str, Accuracy]:
        """Return the teacher's accuracy in a task under `teacher`; empty where it was not asked."""
        return {"teacher": self.teacher_tasks[name]} if name in self.teacher_tasks else {}


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


def read_before(
    folder: Path, measure: DivergenceUnit, sets: Sequence[str] = (), tasks: Sequence[str] = ()
) -> Measured | None:
    """Return the measurement from before training; None where there is none yet, or it is damaged.

    Args:
        sets: Names of the held-out sets that it must have.
        tasks: Names of the tasks that it must have.
    """
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
        own = {name: _read_held_out(record["sets"][name], measure) for name in sets}
        found = {name: Accuracy.of(record["tasks"][name]["before"]) for name in tasks}
        teacher = {
            name: Accuracy.of(record["tasks"][name]["teacher"]) for name in tasks if "teacher" in record["tasks"][name]
        }
        return Measured(_read_held_out(record["held_out"], measure), own, found, dict(record["answers"]), teacher)
    except (ValueError, KeyError, TypeError):
        log.warning("%s is damaged; the student is evaluated again", path)
        return None


def _read_held_out(record: Mapping[str, Any], measure: DivergenceUnit) -> HeldOut:
    found = measure.read(record)
    figures: dict[str, Any] = {name: math.nan if value is None else value for name, value in found.items()}
    return HeldOut(**figures)


def read_start(folder: Path) -> dict[str, object]:
    """Return when, by which command and on which device the run was first started; empty where that is not known."""
    try:
        record = json.loads((folder / BEFORE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {name: record[name] for name in START if name in record} if isinstance(record, dict) else {}
