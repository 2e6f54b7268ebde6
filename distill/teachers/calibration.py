"""Parts of a teacher for a student that is cut from it: chosen by rows of the training data, once for equal inputs.

The choice is stored in the cache of tokenised data (`data.cache`), by the hash of the teacher's weights, the rows, the
settings, the device and the dtype; of several connected processes the first one chooses for all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from distill.core.environment import device_name
from distill.core.ranks import broadcast_from_rank0
from distill.data.token_cache import cache_key, cached_folder
from distill.models.layers import layer_count, layer_indices
from distill.models.load.fingerprint import fingerprint
from distill.models.loading import load_student
from distill.models.prune.importance import CalibrationRow, select_parts
from distill.models.prune.narrow import Selection
from distill.teachers.load_context import Calibration, CutRequest, CutStudent

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from distill.recipe import FromTeacher

VERSION = 3  # increase when the same inputs would give another choice
FILE = "found.json"


def cut_identity(cut: FromTeacher, total: int) -> list[int] | dict[str, object]:
    """Return what names the student of a stored teacher: the layers it has of `total`, or the settings that choose."""
    if not cut.is_calibrated:
        return layer_indices(cut, total)
    apart = None if cut.experts else {"experts"}  # how experts are chosen matters where some go
    return {**cut.model_dump(exclude_none=True), "importance": cut.chosen_by.model_dump(exclude=apart)}


def cut_from(teacher: PreTrainedModel, request: CutRequest) -> CutStudent:
    """Return the student of a request, cut from a loaded teacher.

    Raises:
        ValueError: no rows to choose by, or a teacher that cannot be cut so.
    """
    section = request.section
    cut = section.from_teacher
    to = {"device": request.device, "dtype": request.dtype}
    assert cut is not None
    if not cut.is_calibrated:
        student = load_student(section, teacher=teacher, device=request.device, dtype=request.dtype)
        return CutStudent(student, layer_indices(cut, layer_count(teacher.config)))
    calibration = request.calibration

    def choose() -> Selection:
        return stored_selection(teacher, cut, calibration)

    selection = broadcast_from_rank0(choose) if calibration.shares else choose()
    student = load_student(section, teacher=teacher, selection=selection, **to)  # type: ignore[arg-type]
    return CutStudent(student, list(selection.layers))


def stored_selection(teacher: nn.Module, cut: FromTeacher, calibration: Calibration) -> Selection:
    """Return the choice from the cache, or choose and store it.

    Args:
        teacher: Model to cut, not patched, not sharded.
        cut: Shape of the student, whose parts are chosen by rows.
    """
    inputs = ["parts", VERSION, *_inputs(teacher, cut, calibration.rows)]
    text = stored_text(inputs, lambda: select_parts(teacher, cut, calibration.rows).to_json(), calibration.cache)
    return Selection.from_json(text)


def stored_text(inputs: Sequence[object], compute: Callable[[], str], cache: bool) -> str:
    """Return a text that follows from `inputs`, plain JSON values, from the cache; else compute and store it."""
    made: list[str] = []

    def build(folder: Path) -> None:
        made.append(compute())
        (folder / FILE).write_text(made[0])

    folder, _ = cached_folder(cache_key(*inputs), build, cache=cache)
    return made[0] if made else (folder / FILE).read_text()


def _inputs(teacher: nn.Module, cut: FromTeacher, rows: Sequence[CalibrationRow]) -> list[object]:
    """Return everything that a choice depends on, in plain JSON types."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps({name: list(map(int, row[name])) for name in sorted(_read(row))}).encode())
    weight = next(teacher.parameters())
    config: object = teacher.config.to_dict()  # type: ignore[union-attr,operator]
    return [
        fingerprint(teacher),
        config,
        cut_identity(cut, 0),
        digest.hexdigest(),
        str(weight.dtype),
        device_name(weight.device),
        torch.__version__,
    ]


def _read(row: Mapping[str, object]) -> list[str]:
    return [name for name in ("input_ids", "labels", "position_ids") if name in row]
