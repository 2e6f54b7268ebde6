"""Which kind of teacher a recipe asks for. Recipes spell it in several places; everybody else reads this one value."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from distill.recipe.data import Data
from distill.recipe.loss import Loss
from distill.recipe.models import Student, Teacher, WeightedTeacher
from distill.recipe.train import Parallel, Train

Kind = Literal["model", "cache", "keep", "server", "launched", "mixture", "routed", "cross", "context"]
CHECKPOINT = ("model", "init", "config", "revision", "trust_remote_code")  # fields that say which model it is


class Sections(Protocol):
    """The sections of a recipe that say which teacher it has and what goes with it."""

    teacher: Teacher
    teachers: list[WeightedTeacher]
    student: Student
    data: Data
    loss: Loss
    train: Train
    parallel: Parallel


class TeacherDescription(NamedTuple):
    """What a recipe says of its teacher.

    Attributes:
        kind: as in `distill.teachers.registry.SOURCES`.
        members: the sections, by the field that holds each; of a mixture all of them.
        weights: of the members' probabilities, summing to 1, of routed ones within each route.
        routes: of each member, where rows name their teacher.
    """

    kind: Kind
    members: dict[str, Teacher]
    weights: tuple[float, ...] = (1.0,)
    routes: tuple[str, ...] = ()


def kind_of(recipe: Sections) -> Kind:
    """The kind of teacher."""
    if recipe.teachers:
        return "mixture" if all(teacher.route is None for teacher in recipe.teachers) else "routed"
    if recipe.student.vocabulary == "cross":
        return "cross"
    if recipe.teacher.type == "cache":
        return "cache"
    if recipe.teacher.context is not None and recipe.teacher.type != "server":
        return "context"
    if recipe.teacher.keep is not None:
        return "keep"
    if recipe.teacher.type == "server":
        return "server"
    return "launched" if recipe.parallel.teacher == "served" else "model"


def loaded_section(recipe: Sections, teacher: Teacher | None = None) -> Teacher:
    """The section of the model that is loaded as a teacher, by default as the only one: of `type: student`, the
    student's own checkpoint."""
    teacher = teacher or recipe.teacher
    if teacher.type != "student":
        return teacher
    return teacher.model_copy(update={name: getattr(recipe.student, name) for name in CHECKPOINT})


def describe_teacher(recipe: Sections) -> TeacherDescription:
    """The kind of teacher, with its members."""
    kind = kind_of(recipe)
    if not recipe.teachers:
        return TeacherDescription(kind, {"teacher": loaded_section(recipe)})
    sections: list[WeightedTeacher] = recipe.teachers
    routes = tuple(section.route or "" for section in sections)
    totals = {route: sum(s.weight for s in sections if (s.route or "") == route) for route in routes}
    members = {f"teachers.{number}": loaded_section(recipe, section.alone()) for number, section in enumerate(sections)}
    weights = tuple(section.weight / totals[route] for section, route in zip(sections, routes, strict=True))
    return TeacherDescription(kind, members, weights, routes if kind == "routed" else ())
