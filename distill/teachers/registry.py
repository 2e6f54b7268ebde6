"""Construction of a recipe's teacher from a backend, a store, its rows and a combination.

    source_of(recipe)   =   routes or a mixture ( rows ( store ( backend ) ) , ... )

Each is there where the recipe names it: `teacher.online_cache` a store (`teacher.top_k` one of a batch alone),
`teacher.context`, other `chat_template_kwargs` or `student.vocabulary: cross` other rows than the student's, `teachers`
several teachers.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any, Literal

from distill.objectives.measure import DivergenceUnit
from distill.recipe import PluginTeacherConfig, Recipe, ServedTeacherConfig, StoredTeacherConfig, TeacherConfig
from distill.recipe.teachers import describe_teacher, teacher_prompt
from distill.teachers.backends.local import LocalPlan
from distill.teachers.backends.served.launched import LaunchedPlan
from distill.teachers.backends.served.source import ServerPlan
from distill.teachers.backends.stored.plan import StoredPlan
from distill.teachers.backends.student import AveragePlan
from distill.teachers.base import TeacherPlan
from distill.teachers.combination.source import SeveralPlan
from distill.teachers.rows.context.teacher import ContextPlan
from distill.teachers.rows.retokenised.teacher import CrossPlan

ENTRY_POINTS = "distill.backends"  # group of backends in other packages
# takes a recipe with this teacher alone, the teacher's section (of the class that the plan is for) and its field
PlanMaker = Callable[[Recipe, Any, str], TeacherPlan]
# where stored outputs go: into the folders that the recipe names; nowhere; into a store for every teacher, whose folder
# is set later
Stores = Literal["as set", "unsaved", "everywhere"]


def source_of(recipe: Recipe, *, stores: Stores = "as set") -> TeacherPlan:
    """Return the recipe's teacher, before it is loaded.

    Args:
        stores: Where outputs are stored: as the recipe has it; "unsaved" writes no file, as doctor wants it;
            "everywhere" puts a store around each backend, as `distill cache` fills one.
    """
    description = describe_teacher(recipe)
    members = [source_for(recipe, section, field, stores) for field, section in description.members.items()]
    if not recipe.teachers:
        return members[0]
    return SeveralPlan(recipe, description, members)


def source_for(recipe: Recipe, section: TeacherConfig, field: str, stores: Stores = "as set") -> TeacherPlan:
    """Return one teacher of a recipe, before it is loaded.

    Args:
        section: Section of the teacher; for one of several without its weight and route.
        field: Field of the recipe that holds the section, such as `teachers.1`.
        stores: As of `source_of`.
    """
    alone = recipe.model_copy(update={"teacher": section, "teachers": []}) if recipe.teachers else recipe
    plan = backend_maker(recipe, section, field)(alone, section, field)
    is_stored = section.store is not None or stores == "everywhere"
    if is_stored or (section.is_loaded and section.top_tokens is not None):
        plan = StoredPlan(alone, section, field, plan, writes=stores == "as set")
    prompt = teacher_prompt(recipe.data, section)
    if prompt is not None and recipe.student.vocabulary != "cross":  # the rows of another tokenizer have its template
        plan = ContextPlan(plan, prompt)
    if recipe.student.vocabulary == "cross" and not recipe.teachers:  # on routes by the tokenizer of each teacher
        plan = CrossPlan(plan)
    return plan


def backend_maker(recipe: Recipe, section: TeacherConfig, field: str) -> PlanMaker:
    """Return what makes the plan of a teacher's backend, one of this package or one that another registers.

    Raises:
        ValueError: no installed package registers it.
    """
    if isinstance(section, PluginTeacherConfig):
        return registered_backend(section.backend, field)
    if isinstance(section, StoredTeacherConfig):
        return StoredPlan
    if isinstance(section, ServedTeacherConfig):
        return ServerPlan
    if section.ema_decay is not None:
        return AveragePlan
    return LaunchedPlan if recipe.parallel.teacher == "served" else LocalPlan


def registered_backend(name: str, field: str) -> PlanMaker:
    """Return what makes the plan of a backend that an installed package registers."""
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise ValueError(f"{field}.backend: expected one that an installed package registers ({known}), got {name!r}")
    maker: PlanMaker = found[name].load()
    return maker


def measure_of(recipe: Recipe, stored: Mapping[str, Any] | None = None) -> DivergenceUnit:
    """Return the measure of a run from its result.json or before.json, else from its recipe."""
    return DivergenceUnit(**stored) if stored else source_of(recipe).measure()
