"""Capabilities of sources: what only some of them know, and for each the one function that asks for it.

As in capabilities.py: everybody else calls the function below a protocol, which looks through the layers around a
backend's source and knows what holds for a source without the capability.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from distill.objectives.measure import KL, Measure
from distill.recipe import ModelSection
from distill.teachers.interface import TeacherSource

if TYPE_CHECKING:
    from distill.data.load import Splits
    from distill.models.shape import Shape
    from distill.teachers.footprint import SmallerTeacher


class SourcePart(NamedTuple):
    """A source inside another.

    Attributes:
        source: The inner source.
        splits_of: Function from the outer source's rows to those that the inner teacher reads.
        number: Index of the teacher among several, from 0; None for a single one.
    """

    source: TeacherSource
    splits_of: Callable[[Splits], Splits]
    number: int | None = None


@runtime_checkable
class SourceLayer(Protocol):
    """A source around others, whose teachers' outputs are stored, aligned or combined."""

    def parts(self) -> Sequence[SourcePart]:
        """Return the sources inside, the first one first."""
        ...


def parts_of(source: TeacherSource) -> Sequence[SourcePart]:
    """Return the sources directly inside a source; none for a backend's."""
    return source.parts() if isinstance(source, SourceLayer) else ()


def only_part(source: TeacherSource) -> TeacherSource | None:
    """Return the source inside a layer around one; None for a backend's, and for several teachers."""
    return next((part.source for part in parts_of(source) if part.number is None), None)


def of_member(number: int | None, text: str) -> str:
    """Return a message with the field of one of several teachers."""
    return text if number is None else re.sub("^teacher[.]", f"teachers.{number}.", text)


# ---------------------------------------------------------------- the model


@runtime_checkable
class NamesFiles(Protocol):
    """A source whose model's files are not those of the sections that it loads."""

    def config_section(self) -> ModelSection:
        """Return the model whose configuration the teacher has."""
        ...

    def tokenizer_section(self) -> ModelSection:
        """Return the model whose tokenizer the teacher has."""
        ...


class SectionFiles:
    """Configuration and tokenizer of a model that is loaded whole.

    Args:
        section: Section of the recipe that names the model.
    """

    def __init__(self, section: ModelSection) -> None:
        self.section = section

    def config_section(self) -> ModelSection:
        """Return the section."""
        return self.section

    def tokenizer_section(self) -> ModelSection:
        """Return the section."""
        return self.section


def files_of(source: TeacherSource) -> NamesFiles:
    """Return where the configuration and the tokenizer of the (first) teacher are."""
    if isinstance(source, NamesFiles):
        return source
    for part in parts_of(source):
        return files_of(part.source)
    return SectionFiles(next(iter(source.sections.values())))


def shapes_of(source: TeacherSource) -> list[Shape]:
    """Return the sizes of the teachers, the first one first; also of those whose weights are not loaded."""
    if parts := parts_of(source):
        return [shape for part in parts for shape in shapes_of(part.source)]
    from distill.models.load.meta_models import meta_config, meta_model

    field = next(iter(source.sections), "teacher")
    return [meta_model(meta_config(files_of(source).config_section(), field), field).shape]


@runtime_checkable
class DescribesStored(Protocol):
    """A source of outputs that are stored or received, whose size is not that of weights."""

    def size_text(self) -> str:
        """Return the size as readable text."""
        ...


def source_size_text(source: TeacherSource) -> str:
    """Return a teacher's size as readable text, before it is loaded."""
    if isinstance(source, DescribesStored):
        return source.size_text()
    if (inner := only_part(source)) is not None:
        return source_size_text(inner)
    return f"{sum(shape.parameters for shape in shapes_of(source)) / 1e6:,.2f} M parameters"


@runtime_checkable
class KnowsMaker(Protocol):
    """A source of a model that other processes hold, for the records of what is stored of it."""

    def stored_dtype(self) -> str:
        """Return the dtype that stores the received numbers without loss."""
        ...

    def maker(self) -> dict[str, object] | None:
        """Return the identity of the model, as `teacher_identity` does; None where that is not known."""
        ...


@runtime_checkable
class OffersSmaller(Protocol):
    """A source of a model that can be held in less memory."""

    def smaller(self, family: str | None = None) -> list[SmallerTeacher]:
        """Return other ways of holding it on GPUs of a family, which need less memory."""
        ...


def smaller_teachers(source: TeacherSource, family: str | None = None) -> list[SmallerTeacher]:
    """Return other ways of holding the one teacher of a recipe on GPUs of a family; none for several teachers."""
    if isinstance(source, OffersSmaller):
        return source.smaller(family)
    return [] if (inner := only_part(source)) is None else smaller_teachers(inner, family)


# ---------------------------------------------------------------- outputs and data


@runtime_checkable
class Measures(Protocol):
    """A source of targets whose divergence is not the KL over the vocabulary."""

    def measure(self) -> Measure:
        """Return name, unit and key of its divergence."""
        ...


def measure_of_source(source: TeacherSource) -> Measure:
    """Return name, unit and key of the divergence to a teacher."""
    if isinstance(source, Measures):
        return source.measure()
    return KL if (inner := only_part(source)) is None else measure_of_source(inner)


@runtime_checkable
class MadeByCommand(Protocol):
    """A source of outputs that another command stores."""

    def is_to_be_made(self) -> bool:
        """Return whether that command has not been run yet."""
        ...


def is_to_be_made(source: TeacherSource) -> bool:
    """Return whether another command has to store the teacher's outputs first."""
    if isinstance(source, MadeByCommand):
        return source.is_to_be_made()
    return (inner := only_part(source)) is not None and is_to_be_made(inner)


@runtime_checkable
class NotesData(Protocol):
    """A source that has to know the documents of a run before its teacher is opened."""

    def note_data(self, splits: Splits) -> None:
        """Note the rows that the teacher will read, in its own reading."""
        ...


def note_data(source: TeacherSource, splits: Splits) -> None:
    """Note the rows of a run in all sources that have to know them.

    Args:
        source: Source of the run's teacher.
        splits: Training and held-out rows of the student.
    """
    if isinstance(source, NotesData):
        source.note_data(splits)
        return
    for part in parts_of(source):
        note_data(part.source, part.splits_of(splits))


@runtime_checkable
class ChecksData(Protocol):
    """A source whose teacher cannot be queried for every document."""

    def data_problems(self, splits: Splits) -> list[str]:
        """Return why the teacher cannot be used for these rows, in its own reading: documents that are missing."""
        ...


def data_problems(source: TeacherSource, splits: Splits) -> list[str]:
    """Return why a teacher cannot be used for the rows of a run, in the order of the sources inside.

    Args:
        source: Source of the run's teacher.
        splits: Training and held-out rows of the student.
    """
    if isinstance(source, ChecksData):
        return source.data_problems(splits)
    found = [(part.number, data_problems(part.source, part.splits_of(splits))) for part in parts_of(source)]
    return [of_member(number, text) for number, texts in found for text in texts]


@runtime_checkable
class CachesState(Protocol):
    """A source that keeps what it has asked servers or read of the data."""

    def copy_cached_state(self, other: TeacherSource) -> None:
        """Copy from another recipe's source what holds for this one too."""
        ...


def copy_cached_state(source: TeacherSource, other: TeacherSource) -> None:
    """Copy from another recipe's source what holds for this one too, where both have the same layers."""
    if isinstance(source, CachesState):
        source.copy_cached_state(other)
    elif isinstance(other, type(source)):
        for own, given in zip(parts_of(source), parts_of(other), strict=False):
            copy_cached_state(own.source, given.source)
