"""Placement of a teacher over several GPUs while it is cached: replicated, or sharded where it does not fit.

Caching has neither gradients nor optimizer states, so that a teacher that a run must shard may well be copied here,
which is faster: copies share nothing. With N tokens in a micro-batch, c the bytes of a number that is computed with, H
the hidden size, A and K those of queries and of keys, I the MLP's width, on each device:

    teacher     as in a run; in shards its part, what is gathered at a time, and its head whole
    student     its weights, by whose gradients the error of K tokens is measured at the end
    forward     N c (4 H + 2 A + 2 K + 3 I), of one layer, and the hidden states
    encoding    about twelve fp32 numbers for each logit of a chunk, none for hidden states
"""

from __future__ import annotations

import torch

from distill.core.units import GIB
from distill.models.gpu_specs import family_in
from distill.models.sharding import ALONE, Sharing
from distill.planning.situation import Situation
from distill.recipe import FromTeacher, Recipe, Student
from distill.teachers.base import TeacherSource
from distill.teachers.cache.encode import CHUNK_ELEMENTS
from distill.teachers.cache.teacher import section_to_load
from distill.teachers.registry import source_of

BYTES_A_LOGIT = 48


def caching_memory(situation: Situation, batch_size: int | None = None, *, sharded: bool = False) -> float:
    """Bytes on each device while the recipe's teacher is cached.

    Args:
        situation: its teacher is one to load.
        batch_size: rows at a time; None for the recipe's.
        sharded: whether the devices hold shards of one teacher.
    """
    recipe, (teacher, *_) = situation.recipe, situation.source.shapes()
    size, footprint = situation.precision.teacher.itemsize, situation.footprint(sharded)
    weights = footprint.weights
    if sharded:
        weights = min(weights, weights / situation.world + footprint.gathered) + teacher.head * size
    tokens = (batch_size or recipe.train.batch_size) * recipe.data.max_length
    forward = tokens * size * (4 * teacher.hidden + 2 * (teacher.query + teacher.key_value) + 3 * teacher.intermediate)
    encoding = min(CHUNK_ELEMENTS["cuda"], tokens * teacher.vocabulary) * BYTES_A_LOGIT
    student = situation.student.shape.parameters * situation.precision.student.itemsize
    return weights + student + forward + encoding


def share_caching(situation: Situation, batch_size: int | None = None, other_bytes: float = 0.0) -> Sharing:
    """Return the placement of the teacher, as requested or by its memory.

    Args:
        other_bytes: of each device that something else takes.
    """
    usable, world = situation.usable - other_bytes, situation.world
    copied, sharded = (caching_memory(situation, batch_size, sharded=way) for way in (False, True))
    if world == 1:
        return ALONE._replace(fits=copied <= usable, why=f"{copied / GIB:.1f} GiB")
    teachers = situation.recipe.parallel.teacher if situation.source.shardable else "copied"
    in_shards = teachers == "sharded" or (teachers == "auto" and copied > usable)
    why = (
        f"of {usable / GIB:.1f} GiB usable on each of {world} GPUs caching takes {copied / GIB:.1f} with a copy of the "
        f"teacher, {sharded / GIB:.1f} with a shard"
    )
    return Sharing("ddp", in_shards, (sharded if in_shards else copied) <= usable, why)


def plan_caching(recipe: Recipe, device: torch.device, world: int, batch_size: int | None = None) -> Sharing:
    """Return the placement of the teacher over the processes of `distill cache`.

    A CPU has no limit here: copies, unless shards are asked for.

    Args:
        recipe: its teacher is one to load.
        batch_size: rows at a time; None for the recipe's.

    Raises:
        ValueError: a teacher that would have to be sharded and cannot.
    """
    source, sharing = _share(recipe, device, world, batch_size, 0)
    for problem in source.problems(
        cuda=device.type == "cuda", sharded=sharing.teacher_sharded, family=family_in(device)
    ):
        raise ValueError(f"{problem} ({sharing.why})")
    return sharing


def _share(
    recipe: Recipe, device: torch.device, world: int, batch_size: int | None, cached_tokens: int
) -> tuple[TeacherSource, Sharing]:
    source = source_of(recipe)
    if world == 1:
        return source, ALONE
    if device.type != "cuda":
        return source, Sharing("ddp", recipe.parallel.teacher == "sharded", True, "as asked for")
    situation = Situation.here(recipe, device, world)
    (teacher, *_) = source.shapes()
    kv_cache = cached_tokens * 2 * teacher.layers * teacher.key_value * situation.precision.teacher.itemsize
    return source, share_caching(situation, batch_size, kv_cache)


def asked_in_shards(
    recipe: Recipe, device: torch.device, world: int, *, batch_size: int, cached_tokens: int = 0, alone: bool = False
) -> bool:
    """Return whether commands that query the teacher over `world` processes shard it, as caching would.

    They load a teacher of `teacher.dtype: fp8` in 16 bits.

    Args:
        recipe, device, world, batch_size: as `plan_caching` takes them.
        cached_tokens: whose keys and values are kept beside, where the teacher generates.
        alone: no student is loaded beside.
    """
    if world <= 1 or recipe.parallel.teacher == "copied":
        return False
    section = section_to_load(recipe)
    if section.dtype == "fp8":
        section = section.model_copy(update={"dtype": "auto"})
    student = Student(from_teacher=FromTeacher(layers=1)) if alone else recipe.student
    recipe = recipe.model_copy(update={"teacher": section, "student": student})
    return _share(recipe, device, world, batch_size, cached_tokens)[1].teacher_sharded


def what_caching_takes(situation: Situation) -> str:
    """Return a description of the memory of caching, for the check of a recipe whose cache does not exist yet."""
    recipe = situation.recipe
    situation = situation.of(recipe.model_copy(update={"teacher": section_to_load(recipe)}))
    sharing = share_caching(situation)
    needed = caching_memory(situation, sharded=sharing.teacher_sharded)
    teacher = "the teacher in shards" if sharing.teacher_sharded else "the teacher whole"
    fits = "" if sharing.fits else ", more than there are"
    return f"{needed / GIB:.1f} GiB on each GPU meanwhile, {teacher}{fits}"
