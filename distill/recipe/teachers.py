"""The teachers of a recipe: their sections, mixing weights and routes."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from distill.recipe.data import Data
from distill.recipe.loss import Loss
from distill.recipe.models import Student, Teacher, WeightedTeacher
from distill.recipe.train import Parallel, Train

CHECKPOINT = ("model", "init", "config", "revision", "trust_remote_code")  # fields that identify the model


class Sections(Protocol):
    """The sections of a recipe that define its teacher and the settings that depend on it."""

    teacher: Teacher
    teachers: list[WeightedTeacher]
    student: Student
    data: Data
    loss: Loss
    train: Train
    parallel: Parallel


class TeacherDescription(NamedTuple):
    """The teachers of a recipe, with mixing weights and routes.

    Attributes:
        members: their sections, by field of the recipe.
        weights: mixing weights of the members' probabilities, summing to 1, with routes within each route.
        routes: route of each member; empty without routes.
    """

    members: dict[str, Teacher]
    weights: tuple[float, ...] = (1.0,)
    routes: tuple[str, ...] = ()


def loaded_section(recipe: Sections, teacher: Teacher | None = None) -> Teacher:
    """Return the section of the model to load as a teacher (by default the only one)."""
    teacher = teacher or recipe.teacher
    if teacher.type != "student":
        return teacher
    return teacher.model_copy(update={name: getattr(recipe.student, name) for name in CHECKPOINT})


def teacher_sections(recipe: Sections) -> dict[str, Teacher]:
    """Return the recipe's teachers as they are written, by the recipe's field of each."""
    several: dict[str, Teacher] = {f"teachers.{number}": teacher for number, teacher in enumerate(recipe.teachers)}
    return several or {"teacher": recipe.teacher}


def describe_teacher(recipe: Sections) -> TeacherDescription:
    """Return the teachers of a recipe."""
    if not recipe.teachers:
        return TeacherDescription({"teacher": loaded_section(recipe)})
    sections: list[WeightedTeacher] = recipe.teachers
    routes = tuple(section.route or "" for section in sections)
    totals = {route: sum(s.weight for s in sections if (s.route or "") == route) for route in routes}
    members = {f"teachers.{number}": loaded_section(recipe, section.alone()) for number, section in enumerate(sections)}
    weights = tuple(section.weight / totals[route] for section, route in zip(sections, routes, strict=True))
    return TeacherDescription(members, weights, routes if any(routes) else ())


def reads_student_rows(recipe: Sections) -> bool:
    """Return whether a single loaded model is the teacher, reads the student's rows and has no store."""
    teacher = recipe.teacher
    plain = teacher.is_loaded and teacher.context is None and teacher.online_cache is None
    return plain and not recipe.teachers and recipe.student.vocabulary != "cross"
