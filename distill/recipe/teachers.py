"""The teachers of a recipe: their sections, mixing weights and routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from pydantic import JsonValue

from distill.recipe.data import Data
from distill.recipe.loss import Loss
from distill.recipe.models import Student
from distill.recipe.stages import Export, Stage
from distill.recipe.teacher_config import AnyTeacher, AnyWeightedTeacher, Context, TeacherConfig
from distill.recipe.train import Parallel, Train

CHECKPOINT = ("model", "init", "config", "revision", "trust_remote_code")  # fields that identify the model


class Sections(Protocol):
    """The sections of a recipe that define its teacher and the settings that depend on it."""

    teacher: AnyTeacher
    teachers: list[AnyWeightedTeacher]
    student: Student
    data: Data
    loss: Loss
    train: Train
    parallel: Parallel
    export: Export | None
    stages: list[Stage]


class TeacherDescription(NamedTuple):
    """The teachers of a recipe, with mixing weights and routes.

    Attributes:
        members: sections of the teachers, by field of the recipe.
        weights: mixing weights of the members' probabilities, summing to 1, with routes within each route.
        routes: route of each member; empty without routes.
    """

    members: dict[str, TeacherConfig]
    weights: tuple[float, ...] = (1.0,)
    routes: tuple[str, ...] = ()


class TeacherPrompt(NamedTuple):
    """Prompts that a teacher reads in place of the student's.

    Attributes:
        context: privileged context; None where the messages are the student's.
        chat_template_kwargs: variables of the chat template, those of the student's prompts or others.
        rendered_alike: whether the chat template has the same variables for student and teacher.
    """

    context: Context | None
    chat_template_kwargs: dict[str, JsonValue]
    rendered_alike: bool


def teacher_kwargs(data: Data, teacher: TeacherConfig) -> dict[str, JsonValue]:
    own = teacher.chat_template_kwargs
    return data.chat_template_kwargs if own is None else own


def teacher_prompt(data: Data, teacher: TeacherConfig) -> TeacherPrompt | None:
    """Return the prompts of a teacher; None where it reads the student's."""
    kwargs = teacher_kwargs(data, teacher)
    alike = kwargs == data.chat_template_kwargs
    return None if teacher.context is None and alike else TeacherPrompt(teacher.context, kwargs, alike)


def loaded_section(recipe: Sections, teacher: TeacherConfig | None = None) -> TeacherConfig:
    teacher = teacher or recipe.teacher
    if teacher.type != "student":
        return teacher
    return teacher.model_copy(update={name: getattr(recipe.student, name) for name in CHECKPOINT})


def teacher_sections(recipe: Sections) -> dict[str, TeacherConfig]:
    """Return the recipe's teachers as they are written, by the recipe's field of each."""
    if not recipe.teachers:
        return {"teacher": recipe.teacher}
    return {f"teachers.{index}": teacher for index, teacher in enumerate(recipe.teachers)}


def describe_teacher(recipe: Sections) -> TeacherDescription:
    if not recipe.teachers:
        return TeacherDescription({"teacher": loaded_section(recipe)})
    sections = recipe.teachers
    routes = tuple(section.route or "" for section in sections)
    totals = {route: sum(s.weight for s in sections if (s.route or "") == route) for route in routes}
    members = {f"teachers.{number}": loaded_section(recipe, section.alone()) for number, section in enumerate(sections)}
    weights = tuple(section.weight / totals[route] for section, route in zip(sections, routes, strict=True))
    return TeacherDescription(members, weights, routes if any(routes) else ())


def reads_student_rows(recipe: Sections) -> bool:
    """Return whether a single loaded model is the teacher, reads the student's rows and has no store."""
    teacher = recipe.teacher
    own_prompt = teacher_prompt(recipe.data, teacher) is not None
    plain = teacher.is_loaded and not own_prompt and teacher.store is None
    return plain and not recipe.teachers and recipe.student.vocabulary != "cross"


def written_teachers(recipe: Sections) -> Sequence[TeacherConfig]:
    return recipe.teachers or [recipe.teacher]


def first_teacher(recipe: Sections, holds: Callable[[TeacherConfig], bool]) -> tuple[str, TeacherConfig] | None:
    for number, teacher in enumerate(written_teachers(recipe)):
        if holds(teacher):
            return (f"teachers.{number}" if recipe.teachers else "teacher"), teacher
    return None


def mixed_teachers(recipe: Sections) -> list[tuple[str, TeacherConfig]]:
    """Return field and section of the teachers that share a route with another one."""
    routes = [teacher.route for teacher in recipe.teachers]
    several = [n for n, route in enumerate(routes) if routes.count(route) > 1]
    return [(f"teachers.{number}", recipe.teachers[number]) for number in several]
