"""Table of the fp64 reference of every target format: no other file in doctor branches on the format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distill.doctor.reference import Reference
from distill.doctor.reference_routed import RoutedReference
from distill.doctor.reference_spans import SpansReference
from distill.doctor.reference_top_k import TopKReference
from distill.objectives.hidden import HiddenFormat
from distill.objectives.targets import TargetFormat
from distill.objectives.top_k import TopKFormat
from distill.teachers.base import Teacher
from distill.teachers.combination.mixture import MixtureFormat
from distill.teachers.combination.routes import RoutedFormat
from distill.teachers.rows.retokenised.teacher import SpansFormat

REFERENCES: dict[type[TargetFormat], type[Reference]] = {
    HiddenFormat: Reference,
    MixtureFormat: Reference,
    TopKFormat: TopKReference,
    SpansFormat: SpansReference,
    RoutedFormat: RoutedReference,
}


def reference_of(teacher: Teacher, weights: Sequence[float] = (1.0,), tokenizers: Any = None) -> Reference:
    """Return the reference for a teacher's format; arguments as of `Reference`."""
    return REFERENCES[type(teacher.format)](teacher, weights, tokenizers)
