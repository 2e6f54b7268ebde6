"""Values that a teacher is opened with, and a student that is cut from it: device, dtypes, placement, calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from distill.models.dtypes import Precision, resolve_device, resolve_precision
from distill.models.load.shared_weights import SharedCheckpoints
from distill.models.patch.attention_choice import AttentionChoices
from distill.models.sharding import SINGLE_PROCESS, Placement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from distill.data.load import Splits
    from distill.models.prune.importance import CalibrationRow
    from distill.recipe import Recipe, Student


class Calibration(NamedTuple):
    """Rows by which parts are chosen.

    Attributes:
        rows: First rows of the first epoch; empty where the recipe needs none, or where no data were read.
        cache: True if choices are stored on disk.
        shares: True if several processes cut the student, so that the first one chooses for all.
    """

    rows: Sequence[CalibrationRow] = ()
    cache: bool = False
    shares: bool = True


NO_ROWS = Calibration()
NOTHING_SHARED = SharedCheckpoints()


class CutRequest(NamedTuple):
    """A student to cut from its teacher.

    Attributes:
        section: Student section of the recipe, without adapters.
        device, dtype: Device and weight dtype of the student.
        calibration: Rows on which the importance of parts is measured.
    """

    section: Student
    device: torch.device
    dtype: torch.dtype
    calibration: Calibration = NO_ROWS


class CutStudent(NamedTuple):
    """A student that was cut from its teacher.

    Attributes:
        model: The student, in train mode.
        layer_indices: Indices of the teacher's layers in the student; None where they are no longer known.
    """

    model: PreTrainedModel
    layer_indices: list[int] | None


class LoadContext(NamedTuple):
    """Device, dtypes and placement with which a teacher is opened.

    Attributes:
        precision: Compute dtype, and weight dtypes of both models.
        placement: Distribution of the models over the processes.
        attention: Attention implementations, for a teacher that is patched while it is loaded.
        calibration: Rows that determine the parts of a student cut from the teacher.
        checkpoints: Checkpoints that several of the models hold frozen, each read once.
    """

    device: torch.device
    precision: Precision
    placement: Placement
    attention: AttentionChoices
    calibration: Calibration = NO_ROWS
    checkpoints: SharedCheckpoints = NOTHING_SHARED


def calibration_of(recipe: Recipe, splits: Splits) -> Calibration:
    """Return the rows by which a recipe's student is cut from its teacher; none where they are not needed."""
    cut = recipe.student.cut
    if cut is None or not cut.is_calibrated:
        return NO_ROWS
    epochs = splits.epochs
    count = min(cut.chosen_by.rows, len(epochs))
    return Calibration([dict(epochs[number]) for number in range(count)], recipe.data.cache)


def load_context(recipe: Recipe, splits: Splits | None = None) -> LoadContext:
    """Return the context of a single process for a recipe: its device and precision, nothing shared.

    Args:
        splits: Data of the recipe, for a student that is cut by the importance of its parts.
    """
    device = resolve_device(recipe.train)
    calibration = NO_ROWS if splits is None else calibration_of(recipe, splits)
    return LoadContext(device, resolve_precision(recipe, device), SINGLE_PROCESS, AttentionChoices(recipe), calibration)
