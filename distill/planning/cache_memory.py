"""Placement of a teacher over several GPUs while it is cached: replicated, or sharded where it does not fit.

Caching has neither gradients nor optimizer states, so that a teacher that a run must shard may fit whole here, which is
faster: replicas do not communicate. With N tokens in a micro-batch, c the bytes of a number that is computed with, H
the hidden size, A and K those of queries and of keys, I the MLP's width, on each device:

    teacher     as in a run; sharded its part, the gathered layers, and its head whole
    student     its weights, whose gradients measure the error of storing K tokens at the end; none that are held once
                for teacher and student
    forward     N c (4 H + 2 A + 2 K + 3 I), of one layer, and the hidden states
    encoding    about twelve fp32 numbers for each logit of a chunk, none for hidden states
"""

from __future__ import annotations

import torch

from distill.core.units import GIB
from distill.models.gpu_specs import family_in
from distill.models.quantised_checkpoints import saved_bytes
from distill.models.sharding import SINGLE_PROCESS, Placement
from distill.objectives.top_k_encoding import CHUNK_ELEMENTS
from distill.planning.device_plan import DevicePlan
from distill.recipe import FromTeacher, Recipe, Student
from distill.teachers.backends.stored.maker import section_to_load
from distill.teachers.base import TeacherPlan
from distill.teachers.registry import source_of
from distill.teachers.sharing import student_weights

BYTES_PER_LOGIT = 48


def caching_memory(
    plan: DevicePlan, batch_size: int | None = None, *, sharded: bool = False, shares: bool = True
) -> float:
    """Return the bytes on each device while the recipe's teacher is cached.

    Args:
        batch_size: rows at a time; None for the recipe's.
        sharded: whether each device holds a shard of one teacher.
        shares: whether frozen weights that teacher and student have in common are held once, as by `distill cache`.
    """
    recipe = plan.recipe
    (teacher, *_) = plan.source.shapes()
    size = plan.precision.teacher.itemsize
    footprint = plan.footprint(sharded)
    weights = footprint.weights
    if sharded:
        weights = min(weights, weights / plan.world + footprint.gathered) + teacher.head * size
    tokens = (batch_size or recipe.train.batch_size) * recipe.data.max_length
    forward = tokens * size * (4 * teacher.hidden + 2 * (teacher.query + teacher.key_value) + 3 * teacher.intermediate)
    encoding = min(CHUNK_ELEMENTS["cuda"], tokens * teacher.vocabulary) * BYTES_PER_LOGIT
    own = plan.student.shape
    itemsize = plan.precision.student.itemsize
    student = own.parameters * itemsize - saved_bytes(recipe.student.dtype, own.linear, itemsize)
    frozen = student_weights(recipe.student, plan.precision.student, sharded=False)
    if shares and frozen is not None:
        student -= footprint.checkpoints.get(frozen, 0.0)
    return weights + student + forward + encoding


def place_for_caching(
    plan: DevicePlan, batch_size: int | None = None, other_bytes: float = 0.0, *, shares: bool = True
) -> Placement:
    """Return the placement of the teacher, as requested or by its memory.

    Args:
        other_bytes: Bytes on each device that are used by something else.
        shares: As of `caching_memory`.
    """
    usable = plan.usable - other_bytes
    world = plan.world
    copied = caching_memory(plan, batch_size, sharded=False, shares=shares)
    sharded = caching_memory(plan, batch_size, sharded=True, shares=shares)
    if world == 1:
        return SINGLE_PROCESS._replace(fits=copied <= usable, why=f"{copied / GIB:.1f} GiB")
    teachers = plan.recipe.parallel.teacher if plan.source.shardable else "copied"
    in_shards = teachers == "sharded" or (teachers == "auto" and copied > usable)
    why = (
        f"of {usable / GIB:.1f} GiB usable on each of {world} GPUs caching takes {copied / GIB:.1f} with a copy of the "
        f"teacher, {sharded / GIB:.1f} with a shard"
    )
    return Placement("ddp", in_shards, (sharded if in_shards else copied) <= usable, why)


def plan_caching(recipe: Recipe, device: torch.device, world: int, batch_size: int | None = None) -> Placement:
    """Return the placement of the teacher over the processes of `distill cache`.

    A CPU has no memory limit here: replicas, unless the recipe asks for shards.

    Args:
        batch_size: rows at a time; None for the recipe's.

    Raises:
        ValueError: a teacher that would have to be sharded and cannot.
    """
    source, placement = _placement(recipe, device, world, batch_size, 0, shares=True)
    for problem in source.problems(
        cuda=device.type == "cuda", sharded=placement.teacher_sharded, family=family_in(device)
    ):
        raise ValueError(f"{problem} ({placement.why})")
    return placement


def _placement(
    recipe: Recipe, device: torch.device, world: int, batch_size: int | None, cached_tokens: int, *, shares: bool
) -> tuple[TeacherPlan, Placement]:
    source = source_of(recipe)
    if world == 1:
        return source, SINGLE_PROCESS
    if device.type != "cuda":
        return source, Placement("ddp", recipe.parallel.teacher == "sharded", True, "as requested")
    plan = DevicePlan.here(recipe, device, world)
    (teacher, *_) = source.shapes()
    kv_cache = cached_tokens * 2 * teacher.layers * teacher.key_value * plan.precision.teacher.itemsize
    return source, place_for_caching(plan, batch_size, kv_cache, shares=shares)


def shards_for_queries(
    recipe: Recipe, device: torch.device, world: int, *, batch_size: int, cached_tokens: int = 0, alone: bool = False
) -> bool:
    """Return whether commands that query the teacher from `world` processes shard it, by the rule of caching.

    They load a teacher of `teacher.dtype: fp8` in 16 bits.

    Args:
        cached_tokens: tokens in the KV cache, where the teacher generates.
        alone: no student is loaded.
    """
    if world <= 1 or recipe.parallel.teacher == "copied":
        return False
    section = section_to_load(recipe).as_read
    student = Student(from_teacher=FromTeacher(layers=1)) if alone else recipe.student
    recipe = recipe.model_copy(update={"teacher": section, "student": student})
    # such a command reads student and teacher each from its own files
    return _placement(recipe, device, world, batch_size, cached_tokens, shares=False)[1].teacher_sharded


def describe_cache_memory(plan: DevicePlan) -> str:
    """Return a description of the memory of caching, for a recipe whose cache does not exist yet."""
    recipe = plan.recipe
    plan = plan.with_recipe(recipe.model_copy(update={"teacher": section_to_load(recipe)}))
    placement = place_for_caching(plan)
    needed = caching_memory(plan, sharded=placement.teacher_sharded)
    fits = "" if placement.fits else ", more than its memory"
    return f"{needed / GIB:.1f} GiB on each GPU while it is cached, the {placement.teacher_text}{fits}"
