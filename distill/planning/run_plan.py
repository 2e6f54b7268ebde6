"""The plan of a run: placement of the models and number of its steps, from the recipe, its devices and its data.

`distill run` makes it for the devices that it has, `distill check` for devices that may be elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

from distill.core.ranks import world_size
from distill.models.sharding import SINGLE_PROCESS, Placement
from distill.planning.device_plan import DevicePlan
from distill.planning.placement import place
from distill.planning.steps import (
    accumulation_steps,
    data_rows_per_micro_batch,
    require_settings,
    total_steps,
)
from distill.recipe import Recipe
from distill.recipe.resume_policy import tokens_of_step


class RunPlan(NamedTuple):
    """Placement and size of a run.

    Attributes:
        placement: Placement of student and teacher over the processes.
        world: Number of processes that train.
        rows: Rows of the data in a micro-batch on one process.
        accumulation: Micro-batches of an optimizer step on one process.
        tokens_per_step: Positions per optimizer step, over all processes.
    """

    placement: Placement
    world: int
    rows: int
    accumulation: int
    steps: int
    tokens_per_step: int


def plan_run(plan: DevicePlan, rows: int) -> RunPlan:
    """Return the plan of a run over `rows` training rows on the devices of `plan`."""
    return _plan_steps(plan.recipe, rows, place(plan), plan.world)


def plan_steps(recipe: Recipe, rows: int, placement: Placement = SINGLE_PROCESS) -> RunPlan:
    """Return the plan of a run over `rows` training rows on the processes of this launch, for a known placement."""
    world = world_size()
    require_settings(recipe.train, recipe.data, world)
    return _plan_steps(recipe, rows, placement, world)


def _plan_steps(recipe: Recipe, rows: int, placement: Placement, world: int) -> RunPlan:
    train = recipe.train
    data = recipe.data
    accumulation = accumulation_steps(train, data, world)
    micro_rows = data_rows_per_micro_batch(train, data)
    steps = total_steps(train, data, rows, accumulation, world)
    return RunPlan(placement, world, micro_rows, accumulation, steps, tokens_of_step(recipe, world))
