"""A teacher server that the launch starts (`parallel.teacher: served`): how its GPUs hold the teacher, when it pays.

A GPU with a copy holds T bytes of the teacher, one of N with shards T / N and the largest gathered unit; each holds the
activations of one layer's forward over a micro-batch, and the answers of a step that have not been fetched. A copy each
where that fits (their forwards then wait for nobody), else shards.

With s and t the device-seconds that a step takes of the student and of the teacher, W devices take (s + t) / W where
all of them do both, and max(s / (W - N), t / N) with N for the teacher: never less but for what they exchange. So a
server wins where the models do not fit together, or not in what else they would have to be: an fp8 teacher that no
device holds beside a student and that cannot be cut. `auto` takes one where `step_time` says so, on GPUs of known
rates, when `distill run` starts the processes that train.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from distill.core.units import GIB
from distill.planning.devices import Device, find_device
from distill.planning.sharing import TeacherSide, sharing_of, teacher_side
from distill.planning.situation import Situation
from distill.planning.step_time import StepTokens, step_time
from distill.planning.steps import accumulation_steps
from distill.recipe import Recipe, load
from distill.recipe.teachers import reads_as_the_student
from distill.teachers.losses import is_soft


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


def is_sharded_where_served(recipe: Recipe, device: torch.device, students: int) -> bool:
    """Return whether the server holds shards of one teacher, rather than a copy each; on CPUs copies unless asked."""
    if device.type != "cuda":
        return recipe.parallel.teacher_layout == "sharded"
    return teacher_side(Situation.here(recipe, device, students)).sharded


def served_fault(situation: Situation, side: TeacherSide) -> str | None:
    """Return why the server's GPUs cannot hold the teacher, a line; None where they can."""
    if side.fits:
        return None
    return (
        f"parallel.teacher_gpus: each takes {side.held / GIB:.1f} GiB "
        f"({'in shards' if side.sharded else 'a copy each'}) of {situation.usable / GIB:.1f} GiB usable; more of them, "
        "or fewer bits (teacher.dtype), make it fit"
    )


def choose_served(situation: Situation, device: Device) -> Recipe:
    """Return the recipe, with a teacher server on GPUs of its own where `parallel.teacher: auto` gains by it.

    Args:
        situation: of all devices, with the recipe as it was given.
        device: one of them.
    """
    recipe, world = situation.recipe, situation.world
    by_itself = recipe.parallel.teacher == "auto" and is_soft(recipe.loss) and reads_as_the_student(recipe)
    if not (by_itself and world > 1 and device.gpu_spec and device.gpu_spec.flops):
        return recipe
    sharing = sharing_of(situation)
    works = sharing.fits and not situation.source.problems(
        cuda=True, sharded=sharing.teacher_sharded, family=device.family
    )
    least = _seconds_a_token(situation, device) if works else float("inf")
    best = recipe
    for candidate in _with_servers(situation):
        seconds = _seconds_a_token(candidate, device)
        if seconds < least and teacher_side(candidate).fits and sharing_of(candidate).fits:
            least, best = seconds, candidate.recipe
    return best


def share_out(recipe: Recipe, gpus: int, begun: Path | None) -> tuple[int, Recipe]:
    """Return how many of this machine's GPUs train, and the recipe with what `parallel.teacher: auto` comes to.

    Args:
        begun: recipe.yaml of a run that is resumed, which keeps what it says; None for a new run.
    """
    if recipe.parallel.teacher == "auto" and begun is not None and begun.is_file():
        before = load(begun, of_run=True).parallel
        if before.teacher == "served":
            parallel = before.model_copy(update={"strategy": recipe.parallel.strategy})
            recipe = recipe.model_copy(update={"parallel": parallel})
    elif recipe.parallel.teacher == "auto" and (device := find_device(None)).gpu_spec is not None:
        recipe = choose_served(Situation.here(recipe, torch.device("cuda", 0), gpus), device)
    return training_gpus(recipe, gpus), recipe


def _with_servers(situation: Situation) -> Iterator[Situation]:
    """Each number of GPUs for the server that leaves a step of whole micro-batches, as those that train see it."""
    recipe, world = situation.recipe, situation.world
    for gpus in range(1, world):
        parallel = recipe.parallel.model_copy(update={"teacher": "served", "teacher_gpus": gpus})
        try:
            accumulation_steps(recipe.train, recipe.data, world - gpus)
        except ValueError:
            continue
        yield situation.of(recipe.model_copy(update={"parallel": parallel}))._replace(world=world - gpus)


def _seconds_a_token(situation: Situation, device: Device) -> float:
    data = situation.recipe.data
    tokens = float(situation.recipe.train.batch_size * data.max_length * situation.accumulation * situation.world)
    found = step_time(situation, device, StepTokens(tokens, tokens, tokens * (data.max_length + 1) / 2))
    return float("inf") if found is None or found.seconds is None else found.seconds / tokens
