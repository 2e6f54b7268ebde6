"""Table of the fp64 reference of every target format: no other file in doctor branches on the format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distill.doctor.reference import MixtureReference, Reference
from distill.doctor.reference_context import ContextMixtureReference, ContextReference, ContextTopKReference
from distill.doctor.reference_routed import RoutedReference
from distill.doctor.reference_spans import SpansReference
from distill.doctor.reference_top_k import TopKReference
from distill.objectives.hidden import HiddenFormat
from distill.objectives.targets import TargetFormat
from distill.objectives.top_k import TopKFormat
from distill.teachers.combination.mixture import MixtureFormat
from distill.teachers.combination.routes import RoutedFormat
from distill.teachers.interface import Teacher
from distill.teachers.rows.retokenised.teacher import SpansFormat

# by what targets are, and by the rows that the teacher reads
REFERENCES: dict[tuple[type[TargetFormat], str], type[Reference]] = {
    (HiddenFormat, "same"): Reference,
    (HiddenFormat, "context"): ContextReference,
    (TopKFormat, "same"): TopKReference,
    (TopKFormat, "context"): ContextTopKReference,
    (SpansFormat, "retokenised"): SpansReference,
    (MixtureFormat, "same"): MixtureReference,
    (MixtureFormat, "context"): ContextMixtureReference,
    (RoutedFormat, "same"): RoutedReference,
}
BY_NAME = {reference.__name__: reference for reference in REFERENCES.values()}


def reference_of(teacher: Teacher, weights: Sequence[float] = (1.0,), tokenizers: Any = None) -> Reference:
    """Return the reference for a teacher's format; arguments as of `Reference`."""
    return REFERENCES[type(teacher.format), teacher.rows.reading](teacher, weights, tokenizers)
