"""The student's own checkpoint as a teacher: frozen, or as an exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from distill.models.average import RunningAverage
from distill.teachers.backends.local import LoadedTeacher, ModelSource, truncated
from distill.teachers.capabilities import FollowsStudent
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.interface import LoadContext
from distill.teachers.vocabulary import Vocabulary


class AveragedTeacher(LoadedTeacher, FollowsStudent):
    """An EMA of the student: after each step, `share` times itself plus (1 - `share`) times the student.

    Args:
        model: the student's checkpoint; other arguments as of `LoadedTeacher`.
        share: decay of the average, above 0 and below 1.
    """

    def __init__(self, model: nn.Module, share: float, *, field: str = "teacher", tokenizer: Any = None) -> None:
        super().__init__(model, field=field, tokenizer=tokenizer)
        self.share, self.average = share, RunningAverage(self.model, share)

    def truncated_copy(self, layers: Sequence[int]) -> AveragedTeacher:
        return AveragedTeacher(truncated(self.model, layers), self.share, field=next(iter(self.models)))

    def update_ema(self, student: nn.Module) -> None:
        self.average.update(student)

    def save(self, checkpoint: Path) -> None:
        self.average.save(checkpoint)

    def restore(self, checkpoint: Path) -> None:
        self.average.restore(checkpoint)


class AverageSource(ModelSource):
    """The source of an `AveragedTeacher`; arguments as of `ModelSource`."""

    def footprint(self, context: FootprintContext) -> Footprint:
        """Return the model's footprint, with the average in float32 where its weights are narrower."""
        plain, size = super().footprint(context), context.precision.teacher.itemsize
        return plain._replace(weights=plain.weights + (4 * self.meta().shape.parameters if size < 4 else 0))

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> AveragedTeacher:
        if context.placement.student_sharded:
            raise ValueError(f"{self.field}.ema: a running average needs the student whole; set parallel.strategy: ddp")
        assert self.section.ema is not None
        tokenizer = vocabulary.teacher_tokenizer
        return AveragedTeacher(self.load(context), self.section.ema, field=self.field, tokenizer=tokenizer)
