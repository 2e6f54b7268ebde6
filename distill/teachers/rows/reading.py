"""A teacher that reads other tokens than the student: a second reading of each row, in a batch of its own.

Beside the student's columns a batch holds the teacher's, made by the inner teacher's own collator and named with the
prefix `teacher_`: `teacher_input_ids`, `teacher_labels`, `teacher_valid_rows` and what else it needs. Labels of the
teacher's reading stand at the tokens whose prediction is compared, so that its outputs are computed, stored or queried
there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from distill.data.collator import Collator
from distill.objectives.span_loss import Spans, SpanTargets
from distill.objectives.targets import Batch, Targets
from distill.objectives.top_k import TopKTargets, spread
from distill.teachers.backends.local import LoadedTeacher
from distill.teachers.interface import Collate, Teacher
from distill.teachers.wrapping import WrappingTeacher

OWN = ("input_ids", "labels", "position_ids")
PREFIX = "teacher_"
Row = Mapping[str, Any]


class ReadingTeacher(WrappingTeacher):
    """A teacher whose inner teacher reads the columns named `teacher_...` of a batch.

    Args:
        teacher: the inner teacher, or a causal language model.

    Attributes:
        reading: as of `AcceptedRows`.
        needed: columns without which a batch cannot be compared: the teacher's ids, and what aligns both readings.
        only_for_rollouts: columns by which answers of the batch can be replaced, and that nothing else reads.
    """

    prefix = PREFIX
    reading: Literal["context", "retokenised"]
    needed: tuple[str, ...]
    only_for_rollouts: tuple[str, ...] = ()

    def __init__(self, teacher: Teacher | nn.Module) -> None:
        super().__init__(LoadedTeacher(teacher) if isinstance(teacher, nn.Module) else teacher)
        self.rows = self.rows._replace(reading=self.reading)

    @property
    def pad_token_id(self) -> int:
        """Token id that pads the teacher's rows; any id does."""
        model: Any = next(iter(self.models.values()), None)
        return (0 if model is None else getattr(model.config, "pad_token_id", None)) or 0

    def inner_batch(self, batch: Batch) -> dict[str, torch.Tensor]:
        names = [name for name in batch if name.startswith(PREFIX) and name not in self.needed[1:]]
        return {name.removeprefix(PREFIX): batch[name] for name in names}

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        if missing := sorted({"input_ids", "labels", *self.needed} - set(batch)):
            raise ValueError(
                f"batch: expected {', '.join(missing)} too, as {type(self).__name__}.collate gives them; got "
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
        student, begins = targets.spans.student, rows + 1
        spans = Spans(torch.stack([begins, begins + student[:, 1] - student[:, 0]], 1), targets.spans.teacher)
        return targets._replace(spans=spans, student_ids=ids)
    if isinstance(targets, TopKTargets):
        return TopKTargets._make(part if part is None else moved(part, at, rows, ids.shape) for part in targets)
    if isinstance(targets, tuple):
        return tuple(moved(part, at, rows, ids.shape) for part in targets)
    assert isinstance(targets, torch.Tensor)
    return moved(targets, at, rows, ids.shape)


class SecondReading:
    """A collator of rows that hold `teacher_input_ids` and `teacher_position_ids` beside the student's columns.

    Args:
        plain: collator of the student's batch.
        pad_token_id: the teacher's; any id does.
        inner: wraps a plain collator into the teacher's; None for a plain one.
    """

    def __init__(self, plain: Collate, pad_token_id: int, inner: Callable[[Collate], Collate] | None = None) -> None:
        self.plain = plain
        given = getattr(plain, "collator", plain)
        self.padding_side: Literal["right", "left"] = getattr(given, "padding_side", "right")
        own = Collator(
            pad_token_id,
            getattr(given, "pad_to_multiple_of", None),
            self.padding_side,
            getattr(given, "omit_plain_positions", True),
        )
        self.teacher = own if inner is None else inner(own)

    @staticmethod
    def teacher_row(row: Row) -> Row:
        """Return the teacher's reading of a row: `input_ids`, `labels` at the compared tokens, `position_ids`."""
        raise NotImplementedError

    def both(self, rows: Sequence[Row]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the student's batch, and the teacher's under names with the prefix.

        Raises:
            ValueError: rows without the teacher's reading.
        """
        if any(f"{PREFIX}input_ids" not in row for row in rows):
            raise ValueError("rows: expected teacher_input_ids and teacher_position_ids, which the recipe's data have")
        batch = self.plain([{name: row[name] for name in OWN} for row in rows])
        teacher = self.teacher([self.teacher_row(row) for row in rows])
        return batch, {PREFIX + name: value for name, value in teacher.items()}

    def begin(self, width: int, length: int) -> int:
        """Return the column at which a row of `length` tokens begins in a batch of this width."""
        return (width - length) * (self.padding_side == "left")
