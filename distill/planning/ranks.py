"""Ranks of its own for the teacher (`parallel.teacher: ranks`): how they hold it, what it takes, when it is faster.

A rank with a copy holds T bytes of the teacher, one of N with shards T / N and the largest gathered unit; each holds
what one layer's forward makes of a micro-batch, and the answers of a step that have not been fetched. A copy each where
that fits (their forwards then wait for nobody), else shards.

With s and t the device-seconds that a step takes of the student and of the teacher, W devices take (s + t) / W where
all of them do both, and max(s / (W - N), t / N) with N ranks for the teacher: never less but for what they exchange. So
they win where the models do not fit together, or not in what else they would have to be: an fp8 teacher that no device
holds beside a student and that cannot be cut. `auto` takes them where `step_time` says so, on GPUs of known rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from distill.core.units import GIB
from distill.planning.devices import Device, find_device
from distill.planning.sharing import TeacherSide, sharing_of, teacher_side
from distill.planning.situation import Situation
from distill.planning.step_time import StepTokens, step_time
from distill.planning.steps import accumulation_steps
from distill.recipe import Recipe, load
from distill.recipe.teachers import kind_of
from distill.teachers.losses import is_soft


def training_ranks(recipe: Recipe, processes: int) -> int:
    """Of so many processes, those that train."""
    return processes - (recipe.parallel.teacher_ranks or 0)


def is_sharded_on_ranks(recipe: Recipe, device: torch.device, students: int) -> bool:
    """Whether the teacher's ranks hold shards of one teacher, rather than a copy each; on CPUs copies unless asked."""
    if device.type != "cuda":
        return recipe.parallel.teacher_layout == "sharded"
    return teacher_side(Situation.here(recipe, device, students)).sharded


def ranks_fault(situation: Situation, side: TeacherSide) -> str | None:
    """Why the teacher's ranks cannot hold it, a line; None where they can."""
    if side.fits:
        return None
    return (
        f"parallel.teacher_ranks: each takes {side.held / GIB:.1f} GiB "
        f"({'in shards' if side.sharded else 'a copy each'}) of {situation.usable / GIB:.1f} GiB usable; more of them, "
        "or fewer bits (teacher.dtype), make it fit"
    )


def choose_ranks(situation: Situation, device: Device) -> Recipe:
    """The recipe, with ranks of its own for the teacher where `parallel.teacher: auto` gains by them.

    Args:
        situation: of all devices, with the recipe as it was given.
        device: one of them.
    """
    recipe, world = situation.recipe, situation.world
    by_itself = recipe.parallel.teacher == "auto" and kind_of(recipe) == "model" and is_soft(recipe.loss)
    if not (by_itself and world > 1 and device.card and device.card.flops):
        return recipe
    sharing = sharing_of(situation)
    works = sharing.fits and not situation.source.problems(
        cuda=True, sharded=sharing.teacher_sharded, family=device.family
    )
    least = _seconds_a_token(situation, device) if works else float("inf")
    best = recipe
    for candidate in _with_ranks(situation):
        seconds = _seconds_a_token(candidate, device)
        if seconds < least and teacher_side(candidate).fits and sharing_of(candidate).fits:
            least, best = seconds, candidate.recipe
    return best


def choose_ranks_here(
    recipe: Recipe, device: torch.device, world: int, find_begun: Callable[[], Path | None]
) -> Recipe:
    """`choose_ranks` for this machine's GPUs; a run that is resumed keeps what the recipe.yaml says that is found."""
    if device.type != "cuda" or world == 1 or recipe.parallel.teacher != "auto":
        return recipe
    if (begun := find_begun()) is not None and begun.is_file():
        before = load(begun, of_run=True).parallel
        parallel = before.model_copy(update={"strategy": recipe.parallel.strategy})
        return recipe.model_copy(update={"parallel": parallel}) if before.teacher == "ranks" else recipe
    return choose_ranks(Situation.here(recipe, device, world), find_device(None))


def _with_ranks(situation: Situation) -> Iterator[Situation]:
    """Each number of ranks that leaves a step of whole micro-batches, as its training ranks see it."""
    recipe, world = situation.recipe, situation.world
    for ranks in range(1, world):
        parallel = recipe.parallel.model_copy(update={"teacher": "ranks", "teacher_ranks": ranks})
        try:
            accumulation_steps(recipe.train, recipe.data, world - ranks)
        except ValueError:
            continue
        yield situation.of(recipe.model_copy(update={"parallel": parallel}))._replace(world=world - ranks)


def _seconds_a_token(situation: Situation, device: Device) -> float:
    data = situation.recipe.data
    tokens = float(situation.recipe.train.batch_size * data.max_length * situation.accumulation * situation.world)
    found = step_time(situation, device, StepTokens(tokens, tokens, tokens * (data.max_length + 1) / 2))
    return float("inf") if found is None or found.seconds is None else found.seconds / tokens
