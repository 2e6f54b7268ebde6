"""A teacher that reads other tokens than the student: a second reading of each row, in a batch of its own.

Beside the student's columns a batch holds the teacher's, a batch with the inner teacher's own columns, named with the
prefix `teacher_`: `teacher_input_ids`, `teacher_labels`, `teacher_valid_rows` and what else it needs. Labels of the
teacher's reading stand at the tokens whose prediction is compared, so that its outputs are computed, stored or queried
there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from distill.data.collator import BatchColumns, BatchRow, Collator
from distill.data.load import Splits
from distill.objectives.span_loss import Spans, SpanTargets
from distill.objectives.targets import Batch, Targets
from distill.objectives.top_k import TopKTargets, spread
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.base import InnerPlan, InnerTeacher, Teacher, TeacherPlan

PREFIX = "teacher_"


class ReadingTeacher(Teacher):
    """A teacher whose inner teacher reads the columns named `teacher_...` of a batch; it has that one's format unless
    a subclass has another.

    Args:
        teacher: the inner teacher, or a causal language model.

    Attributes:
        reading: as of `AcceptedRows`.
        reads: makes the teacher's columns.
        needed: columns without which a batch cannot be compared: the teacher's ids, and what aligns both readings.
        only_for_rollouts: columns by which answers of the batch can be replaced, and that nothing else reads.
    """

    prefix = PREFIX
    reading: Literal["context", "retokenised"]
    reads: type[ReadingColumns]
    needed: tuple[str, ...]
    only_for_rollouts: tuple[str, ...] = ()

    def __init__(self, teacher: Teacher | nn.Module) -> None:
        self.inner = LoadedTeacher(teacher) if isinstance(teacher, nn.Module) else teacher
        self.format = self.inner.format
        self.models = self.inner.models
        self.rows = self.inner.rows._replace(reading=self.reading)
        self.columns = (self.reads(tuple(self.inner.columns)),)

    def parts(self) -> list[InnerTeacher]:
        return [InnerTeacher(self.inner, self.prefix, self.inner_batch)]

    def inner_batch(self, batch: Batch) -> dict[str, torch.Tensor]:
        names = [name for name in batch if name.startswith(PREFIX) and name not in self.needed[1:]]
        return {name.removeprefix(PREFIX): batch[name] for name in names}

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        missing = sorted({"input_ids", "labels", *self.needed} - set(batch))
        if missing:
            raise ValueError(
                f"batch: expected {', '.join(missing)} too, which Collator adds with columns=teacher.columns; got "
                f"{sorted(batch)}"
            )
        own = {*self.needed, *self.only_for_rollouts}
        return {name: value for name, value in batch.items() if name not in own and not name.startswith(PREFIX)}


def moved(values: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return values at flat positions of one batch, moved to those of another.

    Args:
        values: [B, S', ...], or [B * S'].
        rows: int64 [M], flat positions in `values`; `places` those in the result.
        shape: [B, S] of the result.

    Returns:
        [B, S, ...], or [B * S]; 0 elsewhere.
    """
    if values.dim() == 1:
        return spread(values[rows], places, shape).flatten()
    return spread(values.flatten(0, 1)[rows], places, shape)


def at_positions(targets: Targets, at: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> Targets:
    """Return the targets of a teacher's batch for the student's: at its positions, and 0 elsewhere.

    Args:
        targets: hidden states, of one teacher or several; K tokens; or hidden states over aligned spans.
        at: int64 [M], flat positions in the teacher's batch, of spans in the student's part of it.
        rows: int64 [M], the flat positions in the student's batch that predict the same tokens.
        ids: int64 [B, S], the student's tokens.
    """
    if isinstance(targets, SpanTargets):  # a span's first token is predicted at its row
        student = targets.spans.student
        begins = rows + 1
        spans = Spans(torch.stack([begins, begins + student[:, 1] - student[:, 0]], 1), targets.spans.teacher)
        return targets._replace(spans=spans, student_ids=ids)
    if isinstance(targets, TopKTargets):
        return TopKTargets._make(part if part is None else moved(part, at, rows, ids.shape) for part in targets)
    if isinstance(targets, tuple):
        return tuple(moved(part, at, rows, ids.shape) for part in targets)
    assert isinstance(targets, torch.Tensor)
    return moved(targets, at, rows, ids.shape)


class ReadingPlan(TeacherPlan):
    """The plan of a `ReadingTeacher`.

    Attributes:
        reads: as of `ReadingTeacher`.
    """

    reads: type[ReadingColumns]

    def __init__(self, inner: TeacherPlan) -> None:
        super().__init__(inner.recipe, inner.section, inner.field)
        self.inner = inner
        self.sections = inner.sections
        self.shardable = inner.shardable

    def parts(self) -> list[InnerPlan]:
        return [InnerPlan(self.inner, self.inner_splits)]

    def inner_splits(self, splits: Splits) -> Splits:
        """The rows are made from the student's when they are accessed."""
        return splits.read_as(lambda rows: TeacherRows(rows, self.reads.teacher_row))


class TeacherRows(Sequence[Mapping[str, Any]]):
    """Rows as a teacher reads them.

    Args:
        row: Function from a student's row to the teacher's: `input_ids`, `labels`, `position_ids`.
    """

    def __init__(self, rows: Any, row: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        self.rows = rows
        self.row = row

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        return self.row(self.rows[number])


@dataclass(frozen=True)
class ReadingColumns:
    """Columns of the teacher's reading, of rows that hold `teacher_input_ids` and `teacher_position_ids` too.

    Attributes:
        inner: Columns of the teacher inside, over its own tokens.
    """

    inner: Sequence[BatchColumns] = ()

    def __call__(
        self, rows: Sequence[BatchRow], batch: Mapping[str, Any], collator: Collator
    ) -> dict[str, torch.Tensor]:
        """Return the teacher's batch of the rows, under names with the prefix."""
        if any(f"{PREFIX}input_ids" not in row for row in rows):
            raise ValueError("rows: expected teacher_input_ids and teacher_position_ids, which the recipe's data have")
        own = replace(collator, pad_token_id=0, columns=self.inner, custom=None)  # any id does, every vocabulary has 0
        return {PREFIX + name: value for name, value in own(list(map(self.teacher_row, rows))).items()}

    @staticmethod
    def teacher_row(row: BatchRow) -> BatchRow:
        """Return the teacher's reading of a row: `input_ids`, `labels` at the compared tokens, `position_ids`."""
        raise NotImplementedError
