"""Teachers around teachers: the outer one reads other rows, or stores outputs, and delegates the rest to the inner.

    routes  ->  rows (a context, another tokenizer)  ->  store  ->  backend (a model here, a server)

Each layer is a `Teacher` whose inner teacher gets batches of its own, with the inner teacher's own columns. So every
kind of rows works with every backend, stored or not. Sources and vocabularies are nested in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from distill.objectives.targets import Batch, Targets
from distill.recipe import Data
from distill.teachers.capabilities import Layer, Part
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.interface import Teacher, TeacherSource
from distill.teachers.source_capabilities import SourceLayer, SourcePart
from distill.teachers.vocabulary import Match, Vocabulary

if TYPE_CHECKING:
    from distill.data.load import Splits


class WrappingTeacher(Teacher, Layer):
    """A teacher that delegates what it does not do itself to an inner teacher.

    Args:
        inner: the teacher inside; its format is this one's unless a subclass has another.

    Attributes:
        prefix: of the columns of a batch that the inner teacher reads.
    """

    prefix = ""

    def __init__(self, inner: Teacher) -> None:
        self.inner, self.format, self.models = inner, inner.format, inner.models
        self.rows, self.columns = inner.rows, inner.columns

    def parts(self) -> list[Part]:
        """Return the inner teacher, with its columns of a batch."""
        return [Part(self.inner, self.prefix, self.inner_batch)]

    def inner_batch(self, batch: Batch) -> Batch:
        """Return the batch that the inner teacher reads."""
        return batch

    def targets(self, batch: Batch) -> Targets:
        return self.inner.targets(self.inner_batch(batch))

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        return self.inner.student_batch(batch, needs_targets)

    def fingerprint(self) -> dict[str, object]:
        return self.inner.fingerprint()

    def close(self) -> None:
        self.inner.close()


class WrappingSource(TeacherSource, SourceLayer):
    """The source of a `WrappingTeacher`; it delegates what it does not do itself to the inner teacher's source."""

    def __init__(self, inner: TeacherSource) -> None:
        self.inner, self.recipe, self.sections = inner, inner.recipe, inner.sections
        self.shardable = inner.shardable

    def parts(self) -> list[SourcePart]:
        """Return the inner source, with the rows that its teacher reads."""
        return [SourcePart(self.inner, self.inner_splits)]

    def inner_splits(self, splits: Splits) -> Splits:
        """Return the rows that the inner teacher reads."""
        return splits

    def vocabulary(self) -> Vocabulary:
        return self.inner.vocabulary()

    def problems(self, *, cuda: bool, sharded: bool, family: str | None = None) -> list[str]:
        return self.inner.problems(cuda=cuda, sharded=sharded, family=family)

    def footprint(self, context: FootprintContext) -> Footprint:
        return self.inner.footprint(context)

    def title(self) -> str:
        return self.inner.title()


class WrappingVocabulary(Vocabulary):
    """The vocabulary of a `WrappingSource`: the inner one, with data that are read in another way.

    Args:
        inner: the inner source's vocabulary.
        read: makes the data of a recipe's `data` section and a seed.
    """

    def __init__(self, inner: Vocabulary, read: Callable[[Data, int], Splits]) -> None:
        self.inner, self._read = inner, read
        self.recipe, self.top_k = inner.recipe, inner.top_k

    @property
    def tokenizer(self) -> Any:
        """Tokenizer that makes the data; None for random tokens."""
        return self.inner.tokenizer

    @property
    def teacher_tokenizer(self) -> Any:
        """Tokenizer of the teacher's prompts."""
        return self.inner.teacher_tokenizer

    @property
    def student_tokenizer(self) -> Any:
        """Tokenizer of the student."""
        return self.inner.student_tokenizer

    @property
    def id_bound(self) -> int | None:
        return self.inner.id_bound

    def tokenizers(self) -> list[Any] | None:
        return self.inner.tokenizers()

    def read(self, data: Data, seed: int) -> Splits:
        return self._read(data, seed)

    def prepare(self) -> None:
        self.inner.prepare()

    def fit(self, student: Any) -> None:
        self.inner.fit(student)

    def match(self, teacher_rows: list[int], student_rows: int) -> Match:
        return self.inner.match(teacher_rows, student_rows)


def readings_of(splits: Splits, row: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Splits:
    """Return the rows of a data set as a teacher reads them.

    Args:
        splits: Training and held-out rows of the student.
        row: Function from a student's row to the teacher's: `input_ids`, `labels`, `position_ids`.
    """
    train, validation = (TeacherRows(rows, row) for rows in (splits.train, splits.validation))
    return splits._replace(train=train, validation=validation)


class TeacherRows(Sequence[Mapping[str, Any]]):
    """Rows as a teacher reads them, made from the student's when they are accessed."""

    def __init__(self, rows: Any, row: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        self.rows, self.row = rows, row

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        return self.row(self.rows[number])
