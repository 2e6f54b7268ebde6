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

from typing import Literal, NamedTuple

from distill.core.units import GIB
from distill.models.sharding import SINGLE_PROCESS, Placement, Strategy
from distill.planning.device_plan import DevicePlan
from distill.planning.memory import step_memory
from distill.recipe import Parallel
from distill.teachers.footprint import Footprint


class MemoryNeeds(NamedTuple):
    """Bytes of one device.

    Attributes:
        teacher: Bytes of the teacher's weights, unsharded.
        gathered: Bytes of a sharded teacher that are gathered at any time.
        copied: Bytes of everything except the teacher, with a replicated student.
        sharded: the same with a sharded student.
        shared: Bytes of `teacher` that are a copied student's frozen weights too, where neither is sharded.
    """

    teacher: float
    gathered: float
    copied: float
    sharded: float
    shared: float = 0.0


class TeacherServerMemory(NamedTuple):
    """Memory of each GPU of a teacher server that the launch starts.

    Attributes:
        sharded: shards of one teacher; else a copy each.
        fits: True if a device has that much memory.
        footprint: Footprint of an unsharded copy.
    """

    sharded: bool
    held: float
    fits: bool
    footprint: Footprint


def place(plan: DevicePlan) -> Placement:
    """Return the placement of both models on the plan's devices, by `parallel` and memory estimates.

    Sizes are those of models on the meta device, so nothing is loaded. A CPU has no memory limit here: models are
    replicated unless the recipe asks for shards.
    """
    if plan.world == 1:
        return SINGLE_PROCESS
    if plan.device.cuda:
        return estimate_placement(plan)
    parallel = plan.recipe.parallel
    in_shards = parallel.teacher == "sharded" and plan.source.shardable
    return Placement("fsdp" if parallel.strategy == "fsdp" else "ddp", in_shards, True, "as requested")


def estimate_placement(plan: DevicePlan) -> Placement:
    """Return the placement on more than one device, by memory estimates alone."""
    parallel = plan.recipe.parallel
    usable = plan.usable
    world = plan.world
    ways = [step_memory(plan, sharded=sharded) for sharded in (False, True)]
    # the peak includes the teacher, which is placed here: without it what is left is S(1) and S(world)
    others = [way.peak - way.parts["teacher"] for way in ways]
    needs = MemoryNeeds(
        ways[0].parts["teacher"], plan.footprint(sharded=True).gathered, others[0], others[1], ways[0].shared
    )
    strategy = "ddp" if plan.recipe.student.is_whole else parallel.strategy
    teachers = "copied" if parallel.teacher == "served" or not plan.source.shardable else parallel.teacher
    placement = choose_placement(strategy, needs, usable, world, teachers)
    why = (
        f"of {usable / GIB:.1f} GiB usable on each of {world} GPUs the teacher takes {needs.teacher / GIB:.1f} "
        f"({min(needs.teacher, needs.teacher / world + needs.gathered) / GIB:.1f} in shards), the student's step "
        f"{needs.copied / GIB:.1f} ({needs.sharded / GIB:.1f} in shards)"
    )
    return placement._replace(why=why if placement.fits else why + ", which is too much by this arithmetic")


def choose_placement(
    strategy: Literal["auto", "ddp", "fsdp"],
    needs: MemoryNeeds,
    usable: float,
    world: int,
    teachers: Literal["auto", "copied", "sharded"] = "auto",
) -> Placement:
    """The first of the three ways above that fits; the last one asked for where none does.

    Args:
        teachers: `parallel.teacher`; what is asked for rules out the other ways.
    """
    if world == 1:
        return Placement("ddp", False, needs.teacher + needs.copied <= usable)
    # shards with what is gathered at a time may take more than a whole copy, where the head is large
    shard = min(needs.teacher, needs.teacher / world + needs.gathered)
    ways: list[tuple[Strategy, bool, float]] = [
        ("ddp", False, needs.teacher + needs.copied),
        ("fsdp", False, needs.teacher + needs.sharded),
        ("ddp", True, shard + needs.copied + needs.shared),
        ("fsdp", True, shard + needs.sharded),
    ]
    allowed = [way for way in ways if strategy in ("auto", way[0])]
    if teachers != "auto":
        allowed = [way for way in allowed if way[1] == (teachers == "sharded")]
    elif strategy == "auto":  # a copied student beside a sharded teacher is for those who ask for it
        allowed.remove(ways[2])
    for student, in_shards, needed in allowed:
        if needed <= usable:
            return Placement(student, in_shards, True)
    student, in_shards, _ = allowed[-1]
    return Placement(student, in_shards, False)


def teacher_server_memory(plan: DevicePlan) -> TeacherServerMemory:
    """Return the placement of the teacher on the server's GPUs."""
    recipe = plan.recipe
    gpus = plan.recipe.parallel.teacher_gpus or 1
    plain = plan.with_recipe(recipe.model_copy(update={"parallel": Parallel()}))._replace(world=gpus)
    copied = plain.footprint()
    cut = plain.footprint(sharded=True)
    shape = plain.source.shapes()[0]
    tokens = recipe.train.batch_size * recipe.data.max_length
    wide = 2 * shape.hidden + shape.query + 2 * shape.key_value + 3 * shape.intermediate
    answers = 2 * plan.accumulation * tokens * shape.hidden * plan.world / gpus
    work = plan.precision.teacher.itemsize * (tokens * wide + answers)
    ways = {
        False: max(copied.weights + work, copied.loading),
        True: copied.weights / gpus + cut.gathered + work,
    }
    layout = recipe.parallel.teacher_layout
    can_shard = gpus > 1 and not plain.source.problems(cuda=True, sharded=True)
    sharded = layout == "sharded" or (layout == "auto" and can_shard and ways[False] > plan.usable)
    return TeacherServerMemory(sharded, ways[sharded], ways[sharded] <= plan.usable, copied)
