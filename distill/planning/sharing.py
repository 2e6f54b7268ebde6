"""Placement of student and teacher over several GPUs: replicated or sharded.

The student is copied (DDP: fastest) where weights, gradients, optimizer states and activations fit beside the teacher,
and sharded (FSDP2) where they do not. The teacher is copied too, and sharded only if it does not fit even beside a
sharded student: every micro-step of a sharded teacher gathers all of its weights once. With U usable bytes of a
device, T of the teacher, S(w) of everything else in a step with the student over w devices:

    T + S(1) <= U           student copied,  teacher copied     ("ddp")
    T + S(world) <= U       student sharded, teacher copied     ("fsdp")
    T / world + G + S(world) <= U     both sharded, G the largest gathered unit: a layer and the next, or the head
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from distill.core.units import GIB
from distill.models.gpu_specs import family_in
from distill.models.sharding import ALONE, Sharing, Strategy
from distill.recipe import Parallel, Recipe
from distill.teachers.footprint import Footprint
from distill.teachers.registry import source_of

if TYPE_CHECKING:
    from distill.planning.situation import Situation


class Needs(NamedTuple):
    """Bytes of one device.

    Attributes:
        teacher: of the teacher's weights, whole.
        gathered: of the teacher, whole at any time when it is sharded.
        copied: of everything but the teacher, with a copied student.
        sharded: the same with a sharded student.
    """

    teacher: float
    gathered: float
    copied: float
    sharded: float


class TeacherSide(NamedTuple):
    """Memory of each GPU of a teacher server that the launch starts.

    Attributes:
        sharded: shards of one teacher; else a copy each.
        held: bytes.
        fits: whether a device has them.
        footprint: of a whole copy.
    """

    sharded: bool
    held: float
    fits: bool
    footprint: Footprint


def plan_sharing(recipe: Recipe, device: torch.device, world: int, longest: int = 0) -> Sharing:
    """Return the placement that `parallel` gives for this recipe on `world` devices such as `device`, with the
    reason.

    Sizes are counted on models without memory, so nothing has to be loaded for it. A CPU has no limit here: copies,
    unless shards are asked for.

    Args:
        recipe: the run's.
        device: of this process.
        world: number of devices.
        longest: tokens of the data's longest document; 0 where they have not been read.

    Raises:
        ValueError: a teacher that would have to be sharded and cannot.
    """
    if world == 1:
        return ALONE
    if device.type != "cuda":
        return as_requested(recipe)
    from distill.planning.situation import Situation

    situation = Situation.here(recipe, device, world)._replace(longest=longest)
    sharing = sharing_of(situation)
    for problem in situation.source.problems(cuda=True, sharded=sharing.teacher_sharded, family=family_in(device)):
        raise ValueError(f"{problem} ({sharing.why})")
    return sharing


def as_requested(recipe: Recipe) -> Sharing:
    """Without arithmetic: copies, unless shards are asked for and possible."""
    in_shards = recipe.parallel.teacher == "sharded" and source_of(recipe).shardable
    return Sharing("fsdp" if recipe.parallel.strategy == "fsdp" else "ddp", in_shards, True, "as asked for")


def sharing_of(situation: Situation) -> Sharing:
    """Return the placement on more than one device, by memory estimates alone."""
    from distill.planning.memory import step_memory

    parallel, usable, world = situation.recipe.parallel, situation.usable, situation.world
    ways = [step_memory(situation, sharded=sharded) for sharded in (False, True)]
    others = [way.peak - way.parts["teacher"] for way in ways]
    needs = Needs(ways[0].parts["teacher"], situation.footprint(sharded=True).gathered, *others)
    teachers = "copied" if parallel.teacher == "served" or not situation.source.shardable else parallel.teacher
    sharing = choose_sharing(parallel.strategy, needs, usable, world, teachers)
    why = (
        f"of {usable / GIB:.1f} GiB usable on each of {world} GPUs the teacher takes {needs.teacher / GIB:.1f} "
        f"({min(needs.teacher, needs.teacher / world + needs.gathered) / GIB:.1f} in shards), the student's step "
        f"{needs.copied / GIB:.1f} ({needs.sharded / GIB:.1f} in shards)"
    )
    return sharing._replace(why=why if sharing.fits else why + ", which is too much by this arithmetic")


def choose_sharing(
    strategy: Literal["auto", "ddp", "fsdp"],
    needs: Needs,
    usable: float,
    world: int,
    teachers: Literal["auto", "copied", "sharded"] = "auto",
) -> Sharing:
    """The first of the three ways above that fits; the last one asked for where none does.

    Args:
        teachers: `parallel.teacher`; what is asked for rules out the other ways.
    """
    if world == 1:
        return Sharing("ddp", False, needs.teacher + needs.copied <= usable)
    shard = min(needs.teacher, needs.teacher / world + needs.gathered)
    ways: list[tuple[Strategy, bool, float]] = [
        ("ddp", False, needs.teacher + needs.copied),
        ("fsdp", False, needs.teacher + needs.sharded),
        ("ddp", True, shard + needs.copied),
        ("fsdp", True, shard + needs.sharded),
    ]
    allowed = [way for way in ways if strategy in ("auto", way[0])]
    if teachers != "auto":
        allowed = [way for way in allowed if way[1] == (teachers == "sharded")]
    elif strategy == "auto":  # a copied student beside a sharded teacher is for those who ask for it
        allowed.remove(ways[2])
    for student, in_shards, needed in allowed:
        if needed <= usable:
            return Sharing(student, in_shards, True)
    student, in_shards, _ = allowed[-1]
    return Sharing(student, in_shards, False)


def teacher_side(situation: Situation) -> TeacherSide:
    """Return the placement of the teacher on the server's GPUs."""
    recipe, gpus = situation.recipe, situation.recipe.parallel.teacher_gpus or 1
    plain = situation.of(recipe.model_copy(update={"parallel": Parallel()}))._replace(world=gpus)
    copied, cut, shape = plain.footprint(), plain.footprint(sharded=True), plain.source.shapes()[0]
    tokens = recipe.train.batch_size * recipe.data.max_length
    wide = 2 * shape.hidden + shape.query + 2 * shape.key_value + 3 * shape.intermediate
    answers = 2 * situation.accumulation * tokens * shape.hidden * situation.world / gpus
    work = situation.precision.teacher.itemsize * (tokens * wide + answers)
    ways = {
        False: max(copied.weights + work, copied.loading),
        True: copied.weights / gpus + cut.gathered + work,
    }
    layout = recipe.parallel.teacher_layout
    can_shard = gpus > 1 and not plain.source.problems(cuda=True, sharded=True)
    sharded = layout == "sharded" or (layout == "auto" and can_shard and ways[False] > situation.usable)
    return TeacherSide(sharded, ways[sharded], ways[sharded] <= situation.usable, copied)
