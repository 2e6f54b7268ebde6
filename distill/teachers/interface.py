"""Protocols of a teacher: its source and the open teacher; the format of its targets is in objectives/targets.py.

    source = source_of(recipe)                 # from the recipe and files alone; no weights are read
    teacher = source.open(context)             # weights are on the device; ready to be queried
    targets = teacher.targets(batch)           # once per micro-batch, without a graph
    loss = teacher.format.loss(section, pairing)

A new backend is one file with a source and a teacher, and a line in `registry.BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import nn

from distill.data.collator import BatchColumns
from distill.models.patch.attention_choice import AttentionChoices
from distill.models.precision.dtypes import Precision, resolve_device, resolve_precision
from distill.models.sharding import SINGLE_PROCESS, Placement
from distill.objectives.targets import Batch, TargetFormat, Targets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from distill.data.load import Splits
    from distill.models.prune.importance import Row
    from distill.recipe import Recipe, Student
    from distill.recipe import Teacher as TeacherSection
    from distill.teachers.footprint import Footprint, FootprintContext
    from distill.teachers.vocabulary import Vocabulary


class AcceptedRows(NamedTuple):
    """Rows that a teacher has outputs for.

    Attributes:
        reading: Tokens that the teacher reads for a student's row: the `same`, the same response after another prompt
            (`context`), or the same text in its own tokens (`retokenised`).
        supports_new_rows: True if the teacher can be queried for rows that were not in the data (on-policy).
        whole_documents: True if rows must hold whole documents, as its outputs were stored: doctor may not cut them.
    """

    reading: Literal["same", "context", "retokenised"] = "same"
    supports_new_rows: bool = True
    whole_documents: bool = False


class Teacher(Protocol):
    """A teacher that is ready to be queried. Methods with a body here are the default of most kinds.

    What only some teachers can do stands in capabilities.py, with the function that asks for it.

    Attributes:
        format: Format of what `targets` returns.
        models: Loaded models by the field of the recipe that names each: to patch, compile, diagnose; empty for a
            cache.
        rows: Rows that the teacher has outputs for.
        columns: Functions that make the columns of a batch that the teacher needs beside the student's.
    """

    format: TargetFormat
    models: Mapping[str, nn.Module]
    rows: AcceptedRows = AcceptedRows()
    columns: Sequence[BatchColumns] = ()

    def targets(self, batch: Batch) -> Targets:
        """Return the teacher's outputs for a collated batch, without a graph; every rank calls this equally often."""
        ...

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        """Return the student's part of a batch; ValueError for a batch without `columns`."""
        return dict(batch)

    def fingerprint(self) -> dict[str, object]:
        """Return a fingerprint of the weights, for the lock file; collective where they are sharded."""
        ...

    def close(self) -> None:
        """Release threads and connections; the teacher cannot be queried afterwards."""
        return


class Calibration(NamedTuple):
    """Rows by which parts are chosen.

    Attributes:
        rows: First rows of the first epoch; empty where the recipe needs none, or where no data were read.
        cache: True if choices are stored on disk.
        shares: True if several processes cut the student, so that the first one chooses for all.
    """

    rows: Sequence[Row] = ()
    cache: bool = False
    shares: bool = True


NO_ROWS = Calibration()


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
    """Device, dtypes and placement with which a source is opened.

    Attributes:
        device: Device of this process.
        precision: Compute dtype, and weight dtypes of both models.
        placement: Distribution of the models over the processes.
        attention: Attention implementations, for a teacher that is patched while it is loaded.
        calibration: Rows that determine the parts of a student cut from the teacher.
    """

    device: torch.device
    precision: Precision
    placement: Placement
    attention: AttentionChoices
    calibration: Calibration = NO_ROWS


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


class TeacherSource(Protocol):
    """A teacher as described by the recipe and the files on this machine; no weights are read.

    What only some sources know stands in source_capabilities.py, with the function that asks for it.

    Attributes:
        recipe: Recipe of the run.
        sections: Sections of the models that will be loaded, by field; empty for a cache.
        shardable: True if the weights may be sharded over the devices.
    """

    recipe: Recipe
    sections: Mapping[str, TeacherSection]
    shardable: bool = True

    def vocabulary(self) -> Vocabulary:
        """Tokenizers, and how data are made with them.

        Raises:
            ValueError: a tokenizer that cannot be read.
        """
        ...

    def problems(self, *, cuda: bool, sharded: bool, family: str | None = None) -> list[str]:
        """Return why its configuration cannot be loaded this way; `family` is the GPU's, None where unknown."""
        return []

    def footprint(self, context: FootprintContext) -> Footprint:
        """Return bytes and FLOPs of a training step, by arithmetic."""
        ...

    def title(self) -> str:
        """Return a readable name."""
        ...

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> Teacher:
        """Load the teacher.

        Raises:
            ValueError: naming the field.
        """
        ...
