"""Teacher servers started with a run (`parallel.teacher: served`): their placement, and when `auto` starts one.

A GPU with a copy holds T bytes of the teacher, one of N with shards T / N and the largest gathered unit; each holds the
activations of one layer's forward over a micro-batch, and the step's outputs that have not been fetched. Each GPU gets
a copy where that fits (no communication between them), else a shard.

With s and t the device-seconds of student and teacher in a step, W devices take (s + t) / W where all of them compute
both, and max(s / (W - N), t / N) with N devices for the teacher, which is never less. So a server is for models that do
not fit on one device together, for instance an fp8 teacher, which cannot be sharded, on devices without room for a
student. `auto` takes one where no other placement fits, with as few GPUs as hold the teacher.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from distill.core.ranks import world_size
from distill.core.units import GIB
from distill.objectives.losses import is_soft
from distill.planning.device_plan import DevicePlan
from distill.planning.placement import TeacherServerMemory, estimate_placement, teacher_server_memory
from distill.planning.steps import accumulation_steps
from distill.recipe import Recipe, load
from distill.recipe.teachers import reads_student_rows


def training_gpus(recipe: Recipe, gpus: int) -> int:
    """Return how many of the GPUs train.

    Raises:
        ValueError: the teacher server leaves none.
    """
    teachers = recipe.parallel.teacher_gpus or 0
    if gpus <= teachers:
        raise ValueError(
            f"parallel.teacher_gpus: expected fewer than the {gpus} GPUs there are, since the others train, got "
            f"{teachers}; or set parallel.teacher to copied or sharded"
        )
    return gpus - teachers


def teacher_servers(recipe: Recipe, device: torch.device) -> AbstractContextManager[None]:
    """Return the context in which the run's teacher servers work, on CPUs with shards only if the recipe says so."""
    from distill.teachers.backends.served.launched import launched_servers

    sharded = recipe.parallel.teacher_layout == "sharded"
    if device.type == "cuda":
        sharded = teacher_server_memory(DevicePlan.here(recipe, device, world_size())).sharded
    return launched_servers(recipe, device, sharded=sharded)


def teacher_server_problem(plan: DevicePlan, side: TeacherServerMemory) -> str | None:
    """Return the error that the server's GPUs cannot hold the teacher, one line; None where they can."""
    if side.fits:
        return None
    return (
        f"parallel.teacher_gpus: expected at most {plan.usable / GIB:.1f} GiB on each, got {side.held / GIB:.1f} GiB "
        f"({'a shard each' if side.sharded else 'a copy each'}); raise teacher_gpus or lower teacher.dtype"
    )


def choose_teacher_server(plan: DevicePlan) -> Recipe:
    """Return the recipe, with a teacher server on separate GPUs where `parallel.teacher: auto` finds no other way.

    Args:
        plan: Plan for all devices, with the recipe as given.
    """
    recipe = plan.recipe
    by_itself = recipe.parallel.teacher == "auto" and is_soft(recipe.loss) and reads_student_rows(recipe)
    if not (by_itself and plan.world > 1 and plan.device.cuda):
        return recipe
    placement = estimate_placement(plan)
    sharded = placement.teacher_sharded
    if placement.fits and not plan.source.problems(cuda=True, sharded=sharded, family=plan.device.family):
        return recipe
    for candidate in _with_servers(plan):
        if teacher_server_memory(candidate).fits and estimate_placement(candidate).fits:
            return candidate.recipe
    return recipe


def assign_gpus(recipe: Recipe, gpus: int, resumed_recipe: Path | None) -> tuple[int, Recipe]:
    """Return the number of this machine's GPUs that train, and the recipe with `parallel.teacher: auto` resolved.

    Args:
        resumed_recipe: recipe.yaml of a run that is resumed, whose choice is kept; None for a new run.
    """
    if recipe.parallel.teacher == "auto" and resumed_recipe is not None and resumed_recipe.is_file():
        before = load(resumed_recipe).parallel
        if before.teacher == "served":
            parallel = before.model_copy(update={"strategy": recipe.parallel.strategy})
            recipe = recipe.model_copy(update={"parallel": parallel})
    elif recipe.parallel.teacher == "auto" and torch.cuda.is_available():
        recipe = choose_teacher_server(DevicePlan.here(recipe, torch.device("cuda", 0), gpus))
    return training_gpus(recipe, gpus), recipe


def _with_servers(plan: DevicePlan) -> Iterator[DevicePlan]:
    """Yield the training GPUs' plan for each number of server GPUs that leaves whole micro-batches, fewest first."""
    recipe = plan.recipe
    world = plan.world
    for gpus in range(1, world):
        parallel = recipe.parallel.model_copy(update={"teacher": "served", "teacher_gpus": gpus})
        try:
            accumulation_steps(recipe.train, recipe.data, world - gpus)
        except ValueError:
            continue
        yield plan.with_recipe(recipe.model_copy(update={"parallel": parallel}))._replace(world=world - gpus)
