"""Construction of a recipe's teacher from a backend, a store, its rows and a combination.

    source_of(recipe)   =   routes or a mixture ( rows ( store ( backend ) ) , ... )

Each layer exists where the recipe names it: `teacher.online_cache` a store (`teacher.top_k` one of a batch alone),
`teacher.context` or `student.vocabulary: cross` other rows than the student's, `teachers` several teachers. Its module
is imported then.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

from distill.objectives.measure import Measure
from distill.recipe import Recipe
from distill.recipe import Teacher as TeacherSection
from distill.recipe.teachers import describe_teacher
from distill.teachers.interface import TeacherSource
from distill.teachers.source_capabilities import measure_of_source

ENTRY_POINTS = "distill.backends"  # group of backends in other packages
Maker = Callable[[Recipe, TeacherSection, str], TeacherSource]
# by backend; a maker takes a recipe with this teacher alone, the teacher's section and the field that holds it
BACKENDS = {
    "local": "distill.teachers.backends.local:ModelSource",
    "average": "distill.teachers.backends.student:AverageSource",
    "launched": "distill.teachers.backends.served.launched:LaunchedSource",
    "server": "distill.teachers.backends.served.source:ServerSource",
    "cache": "distill.teachers.backends.stored.archived:ArchivedSource",
}
# sources around others
LAYERS = {
    "stored": "distill.teachers.backends.stored.source:StoredSource",
    "context": "distill.teachers.rows.context.teacher:ContextSource",
    "cross": "distill.teachers.rows.retokenised.teacher:CrossSource",
    "several": "distill.teachers.combination.source:SeveralSource",
}


def source_of(recipe: Recipe) -> TeacherSource:
    """Return the recipe's teacher, before it is loaded."""
    description = describe_teacher(recipe)
    members = [source_for(recipe, section, field) for field, section in description.members.items()]
    if not recipe.teachers:
        return members[0]
    several: TeacherSource = resolve_name(LAYERS["several"])(recipe, description, members)
    return several


def source_for(recipe: Recipe, section: TeacherSection, field: str) -> TeacherSource:
    """Return one teacher of a recipe, before it is loaded.

    Args:
        recipe: Recipe of the run.
        section: Section of the teacher; for one of several without its weight and route.
        field: Field of the recipe that holds the section, such as `teachers.1`.
    """
    alone = recipe.model_copy(update={"teacher": section, "teachers": []}) if recipe.teachers else recipe
    source = backend_maker(recipe, section, field)(alone, section, field)
    if section.online_cache is not None or (section.is_loaded and section.top_k is not None):
        source = resolve_name(LAYERS["stored"])(source, section, field)
    if section.context is not None:
        source = resolve_name(LAYERS["context"])(source, section.context)
    if recipe.student.vocabulary == "cross" and not recipe.teachers:  # on routes by the tokenizer of each teacher
        source = resolve_name(LAYERS["cross"])(source)
    return source


def backend_maker(recipe: Recipe, section: TeacherSection, field: str) -> Maker:
    """Return what makes the source of a teacher's backend: one of `BACKENDS`, or one that a package registers.

    Raises:
        ValueError: no installed package registers it.
    """
    if section.backend is None:
        own: Maker = resolve_name(BACKENDS[backend_of(recipe, section)])
        return own
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if section.backend not in found:
        known = ", ".join(sorted(found)) or "none"
        raise ValueError(
            f"{field}.backend: expected one that an installed package registers ({known}), got {section.backend!r}"
        )
    maker: Maker = found[section.backend].load()
    return maker


def backend_of(recipe: Recipe, section: TeacherSection) -> str:
    """Return the name in `BACKENDS` of what computes a teacher's outputs."""
    if not section.is_loaded:
        return section.type
    if section.ema is not None:
        return "average"
    return "launched" if recipe.parallel.teacher == "served" else "local"


def measure_of(recipe: Recipe, stored: Mapping[str, Any] | None = None) -> Measure:
    """Return the measure of a run from its result.json or before.json, else from its recipe."""
    return Measure(**stored) if stored else measure_of_source(source_of(recipe))
