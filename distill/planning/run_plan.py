"""The plan of a run: placement of the models and number of its steps, computed once from the recipe and its data."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from distill.core.ranks import world_size
from distill.models.sharding import SINGLE_PROCESS, Placement
from distill.planning.placement import plan_placement
from distill.planning.steps import accumulation_steps, data_rows_per_micro_batch, require_settings, total_steps
from distill.recipe import Recipe

if TYPE_CHECKING:
    from distill.data.load import Splits


class RunPlan(NamedTuple):
    """Placement and size of a run.

    Attributes:
        placement: Placement of student and teacher over the processes.
        world: Number of processes that train.
        rows: Rows of the data in a micro-batch on one process.
        accumulation: Micro-batches of an optimizer step on one process.
        steps: Optimizer steps of the run.
        tokens_per_step: Positions per optimizer step, over all processes.
    """

    placement: Placement
    world: int
    rows: int
    accumulation: int
    steps: int
    tokens_per_step: int


def plan_run(recipe: Recipe, splits: Splits, device: torch.device) -> RunPlan:
    """Return the plan of a run on processes with devices such as `device`.

    Args:
        recipe: The run's recipe.
        splits: Data of the run; the longest document bounds the memory of rollouts.
        device: Device of this process.

    Raises:
        ValueError: A teacher that would have to be sharded and cannot, or a step that is no whole number of
            micro-batches.
    """
    placement = SINGLE_PROCESS
    world = world_size()
    if world > 1:
        placement = plan_placement(recipe, device, world, longest=splits.report.longest)
    return plan_steps(recipe, len(splits.train), placement)


def plan_steps(recipe: Recipe, rows: int, placement: Placement = SINGLE_PROCESS) -> RunPlan:
    """Return the plan of a run over `rows` training rows, for a placement that is known.

    Raises:
        ValueError: Settings that no run can have, see `require_settings`.
    """
    train = recipe.train
    data = recipe.data
    world = world_size()
    require_settings(train, data, world)
    accumulation = accumulation_steps(train, data, world)
    tokens = train.batch_size * data.max_length * accumulation * world
    micro_rows = data_rows_per_micro_batch(train, data)
    steps = total_steps(train, data, rows, accumulation, world)
    return RunPlan(placement, world, micro_rows, accumulation, steps, tokens)
