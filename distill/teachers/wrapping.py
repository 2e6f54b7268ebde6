"""Teachers around teachers: the outer one reads other rows, or stores outputs, and delegates the rest to the inner.

    routes  ->  rows (a context, another tokenizer)  ->  store  ->  backend (a model here, a server)

Each layer is a `Teacher` whose inner teacher gets batches of its own, made by the inner teacher's own collator. So
every kind of rows works with every backend, stored or not. Sources and vocabularies are nested in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distill.models.flops import FlopCounts
from distill.models.shape import Shape
from distill.recipe import Data, Generate, ModelSection
from distill.teachers.base import (
    Batch,
    Collate,
    Prompt,
    Targets,
    Teacher,
    TeacherSource,
    VocabularyAlignment,
)
from distill.teachers.calibration import CutRequest, CutStudent
from distill.teachers.footprint import Footprint, FootprintContext, SmallerTeacher
from distill.teachers.measure import Measure
from distill.teachers.vocabulary import Match, Vocabulary

if TYPE_CHECKING:
    from distill.data.load import Splits


class WrappingTeacher(Teacher):
    """A teacher that delegates what it does not do itself to an inner teacher.

    Args:
        inner: the teacher inside; its format is this one's unless a subclass has another.
    """

    def __init__(self, inner: Teacher) -> None:
        self.inner, self.format, self.models = inner, inner.format, inner.models
        self.supports_new_rows, self.whole_documents = inner.supports_new_rows, inner.whole_documents
        self.ahead = inner.ahead

    def inner_batch(self, batch: Batch) -> Batch:
        """Return the batch that the inner teacher reads."""
        return batch

    def collate(self, plain: Collate) -> Collate:
        return self.inner.collate(plain)

    def submit(self, batch: Batch) -> None:
        self.inner.submit(self.inner_batch(batch))

    def fault_of(self, batches: Sequence[Batch]) -> str | None:
        return self.inner.fault_of([self.inner_batch(batch) for batch in batches])

    def targets(self, batch: Batch) -> Targets:
        return self.inner.targets(self.inner_batch(batch))

    def student_batch(self, batch: Batch, needs_targets: bool) -> dict[str, torch.Tensor]:
        return self.inner.student_batch(batch, needs_targets)

    def head_rows(self) -> list[int]:
        return self.inner.head_rows()

    def head_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.inner.head_tensors()

    def flops_per_token(self) -> dict[str, FlopCounts | None]:
        return {f"{self.prefix}{name}": work for name, work in self.inner.flops_per_token().items()}

    def parameters_text(self) -> str:
        return self.inner.parameters_text()

    def to(self, device: torch.device) -> None:
        self.inner.to(device)

    def cut_student(self, request: CutRequest) -> CutStudent:
        return self.inner.cut_student(request)

    def quantise(self) -> None:
        self.inner.quantise()

    def validate_first_batch(self, batch: Batch, student: nn.Module | None, pairing: VocabularyAlignment) -> list[str]:
        return self.inner.validate_first_batch(self.inner_batch(batch), student, pairing)

    def respond(self, prompts: Sequence[Prompt], settings: Generate) -> list[str] | None:
        return self.inner.respond(prompts, settings)

    @property
    def is_collective(self) -> bool:
        return self.inner.is_collective

    def fingerprint(self) -> dict[str, object]:
        return self.inner.fingerprint()

    def follow(self, student: nn.Module) -> None:
        self.inner.follow(student)

    def save(self, checkpoint: Path) -> None:
        self.inner.save(checkpoint)

    def restore(self, checkpoint: Path) -> None:
        self.inner.restore(checkpoint)

    def flush(self) -> None:
        self.inner.flush()

    def close(self) -> None:
        self.inner.close()


class WrappingSource(TeacherSource):
    """The source of a `WrappingTeacher`; it delegates what it does not do itself to the inner teacher's source."""

    def __init__(self, inner: TeacherSource) -> None:
        self.inner, self.recipe, self.sections = inner, inner.recipe, inner.sections
        self.shardable = inner.shardable

    @property
    def is_to_be_made(self) -> bool:
        """True where a command has to make the inner teacher's cache first."""
        return self.inner.is_to_be_made

    @property
    def config_section(self) -> ModelSection:
        return self.inner.config_section

    @property
    def tokenizer_section(self) -> ModelSection:
        return self.inner.tokenizer_section

    def shapes(self) -> list[Shape]:
        return self.inner.shapes()

    def vocabulary(self) -> Vocabulary:
        return self.inner.vocabulary()

    def measure(self) -> Measure:
        return self.inner.measure()

    def note_data(self, splits: Splits) -> None:
        self.inner.note_data(splits)

    def data_problems(self, splits: Splits) -> list[str]:
        return self.inner.data_problems(splits)

    def follow(self, other: TeacherSource) -> None:
        if isinstance(other, type(self)):
            self.inner.follow(other.inner)

    def problems(self, *, cuda: bool, sharded: bool, family: str | None = None) -> list[str]:
        return self.inner.problems(cuda=cuda, sharded=sharded, family=family)

    def footprint(self, context: FootprintContext) -> Footprint:
        return self.inner.footprint(context)

    def smaller(self, family: str | None = None) -> list[SmallerTeacher]:
        return self.inner.smaller(family)

    def title(self) -> str:
        return self.inner.title()

    def size_text(self) -> str:
        return self.inner.size_text()


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
        splits: as the student reads them.
        row: maps a student's row to the teacher's: `input_ids`, `labels`, `position_ids`.
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
