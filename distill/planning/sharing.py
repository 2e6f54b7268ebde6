"""How several GPUs share a run: who is copied to each of them, and who is cut into shards.

The student is copied (DDP: fastest) where weights, gradients, optimizer states and activations fit beside the teacher,
and sharded (FSDP2) where they do not. The teacher is copied too, and sharded only if it does not fit even beside a
sharded student: every micro-step of a sharded teacher gathers all of its weights once. With U usable bytes of a
device, T of the teacher, S(w) of everything else in a step with the student over w devices:

    T + S(1) <= U           student copied,  teacher copied     ("ddp")
    T + S(world) <= U       student sharded, teacher copied     ("fsdp")
    T / world + G + S(world) <= U     both sharded, G the largest gathered unit: a layer and the next, or the head
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from distill.models.sharding import ALONE, Sharing, Strategy
from distill.recipe import Recipe

if TYPE_CHECKING:
    from distill.models.precision import Precision
    from distill.models.shape import Shape

GIB = 2**30
SHARDED_FP8 = "an fp8 teacher cannot be sharded, and it does not fit whole"


def plan_sharing(recipe: Recipe, device: torch.device, world: int) -> Sharing:
    """What `parallel` comes to for this recipe on `world` devices such as `device`, and why.

    Sizes are counted on models without memory, so nothing has to be loaded for it. A CPU has no limit here: copies,
    unless shards are asked for. A teacher whose answers are read from disk takes no memory.

    Raises:
        ValueError: an fp8 teacher that would have to be sharded.
    """
    from distill.models.meta import meta_models
    from distill.models.precision import resolve_precision
    from distill.models.shape import USABLE, shape_of

    asked = recipe.parallel
    if world == 1:
        return ALONE
    if recipe.teacher.is_cached:
        return Sharing("fsdp" if asked.strategy == "fsdp" else "ddp", False, True, "no teacher is loaded")
    if device.type != "cuda":
        return Sharing("fsdp" if asked.strategy == "fsdp" else "ddp", asked.teacher == "sharded", True, "as asked for")
    teacher, student = (shape_of(model) for model in meta_models(recipe))
    precision, total = resolve_precision(recipe, device), torch.cuda.get_device_properties(device).total_memory
    chosen = sharing_of(recipe, teacher, student, precision, memory_bytes=total, usable=USABLE * total, world=world)
    if chosen.teacher_sharded and recipe.teacher.dtype == "fp8":
        raise ValueError(f"teacher.dtype: {SHARDED_FP8} ({chosen.why}); use bfloat16")
    return chosen


def sharing_of(
    recipe: Recipe,
    teacher: Shape,
    student: Shape,
    precision: Precision,
    *,
    memory_bytes: int,
    usable: float,
    world: int,
) -> Sharing:
    """What `parallel` comes to on `world` devices, by arithmetic alone.

    Args:
        recipe: What is asked for.
        teacher, student: Sizes, from `distill.models.shape.shape_of`.
        precision: From `resolve_precision`.
        memory_bytes: Of one device.
        usable: Bytes of these that a run may take.
        world: Devices, more than one.
    """
    from distill.planning.memory import gathered_teacher, step_memory
    from distill.planning.steps import accumulation_steps

    ways = [
        step_memory(
            recipe, teacher, student, precision, memory_bytes=memory_bytes, world=world, sharded=sharded,
            accumulation=accumulation_steps(recipe.train, recipe.data, world),
        )
        for sharded in (False, True)
    ]  # fmt: skip
    held, gathered = ways[0].parts["teacher"], gathered_teacher(teacher, precision)
    copied, sharded = (way.peak - way.parts["teacher"] for way in ways)
    never_sharded = recipe.teacher.offload is not None or recipe.teacher.dtype == "int8"
    chosen = choose_sharing(
        recipe.parallel.strategy, teacher=held, gathered=gathered, copied=copied, sharded=sharded, usable=usable,
        world=world, teachers="copied" if never_sharded else recipe.parallel.teacher,
    )  # fmt: skip
    why = (
        f"of {usable / GIB:.1f} GiB usable on each of {world} GPUs the teacher takes {held / GIB:.1f} "
        f"({min(held, held / world + gathered) / GIB:.1f} in shards), the student's step {copied / GIB:.1f} "
        f"({sharded / GIB:.1f} in shards)"
    )
    return chosen._replace(why=why if chosen.fits else why + ", which is too much by this arithmetic")


def choose_sharing(
    asked: Literal["auto", "ddp", "fsdp"],
    *,
    teacher: float,
    gathered: float,
    copied: float,
    sharded: float,
    usable: float,
    world: int,
    teachers: Literal["auto", "copied", "sharded"] = "auto",
) -> Sharing:
    """The first of the three ways above that fits; the last one asked for where none does.

    Args:
        asked: `parallel.strategy`.
        teacher: Bytes of the teacher's weights.
        gathered: Bytes of the teacher that are whole at any time when it is sharded.
        copied: Bytes a device of everything but the teacher, with a copied student.
        sharded: The same with a sharded student.
        usable: Bytes of one device.
        world: Devices.
        teachers: `parallel.teacher`; what is asked for rules out the other ways.
    """
    if world == 1:
        return Sharing("ddp", False, teacher + copied <= usable)
    in_shards = min(teacher, teacher / world + gathered)
    ways: list[tuple[Strategy, bool, float]] = [("ddp", False, teacher + copied), ("fsdp", False, teacher + sharded)]
    ways += [("ddp", True, in_shards + copied), ("fsdp", True, in_shards + sharded)]
    wanted = [way for way in ways if asked in ("auto", way[0])]
    if teachers != "auto":
        wanted = [way for way in wanted if way[1] == (teachers == "sharded")]
    elif asked == "auto":  # a copied student beside a sharded teacher is for those who ask for it
        wanted.remove(ways[2])
    for student, teacher_sharded, needed in wanted:
        if needed <= usable:
            return Sharing(student, teacher_sharded, True)
    student, teacher_sharded, _ = wanted[-1]
    return Sharing(student, teacher_sharded, False)
