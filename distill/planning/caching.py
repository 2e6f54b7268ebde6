"""How several GPUs hold a teacher that is cached: a copy each, or shards of one where it does not fit.

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
from distill.models.precision import Precision, resolve_precision
from distill.models.shape import USABLE, Shape, shape_of
from distill.models.sharding import ALONE, Sharing
from distill.planning.memory import gathered_teacher
from distill.planning.sharing import SHARDED_FP8
from distill.planning.teacher_weights import on_device
from distill.recipe import FromTeacher, Recipe, Student
from distill.recipe import Teacher as TeacherSection
from distill.teachers.cache.encode import CHUNK_ELEMENTS

BYTES_A_LOGIT = 48


def loaded_section(section: TeacherSection) -> TeacherSection:
    """The section of a cached teacher as one to load; any other as it is.

    Raises:
        ValueError: it does not say whose words the cache holds.
    """
    if not section.is_cached:
        return section
    if section.model is None and section.init != "random":
        raise ValueError("teacher.model: expected the teacher to run over the data beside type: cache, came none")
    return section.model_copy(update={"type": "model", "path": None})


def caching_memory(
    recipe: Recipe,
    teacher: Shape,
    student: Shape,
    precision: Precision,
    *,
    batch_size: int | None = None,
    world: int = 1,
    sharded: bool = False,
) -> float:
    """Bytes on each device while the recipe's teacher is cached.

    Args:
        recipe: its teacher is one to load.
        teacher, student: from `shape_of`.
        precision: from `resolve_precision`.
        batch_size: rows at a time; None for the recipe's.
        world: devices.
        sharded: whether they hold shards of one teacher.
    """
    size = precision.teacher.itemsize
    held = on_device(recipe.teacher, teacher, precision)
    if sharded:
        held = min(held, held / world + gathered_teacher(teacher, precision)) + teacher.head * size
    tokens = (batch_size or recipe.train.batch_size) * recipe.data.max_length
    forward = tokens * size * (4 * teacher.hidden + 2 * (teacher.query + teacher.key_value) + 3 * teacher.intermediate)
    encoding = min(CHUNK_ELEMENTS["cuda"], tokens * teacher.vocabulary) * BYTES_A_LOGIT
    return held + student.parameters * precision.student.itemsize + forward + encoding


def share_caching(
    recipe: Recipe,
    teacher: Shape,
    student: Shape,
    precision: Precision,
    *,
    usable: float,
    world: int,
    batch_size: int | None = None,
) -> Sharing:
    """Whether `world` devices with `usable` bytes each hold copies or shards, by arithmetic alone; as asked for first.

    Args:
        recipe: its teacher is one to load.
        teacher, student, precision, batch_size: as `caching_memory` takes them.
        usable: bytes of one device that caching may take.
        world: devices.
    """
    copied, sharded = (
        caching_memory(recipe, teacher, student, precision, batch_size=batch_size, world=world, sharded=way)
        for way in (False, True)
    )
    if world == 1:
        return ALONE._replace(fits=copied <= usable, why=f"{copied / GIB:.1f} GiB")
    asked = recipe.parallel.teacher
    if recipe.teacher.offload is not None or recipe.teacher.dtype == "int8":
        asked = "copied"
    in_shards = asked == "sharded" or (asked == "auto" and copied > usable)
    why = (
        f"of {usable / GIB:.1f} GiB usable on each of {world} GPUs caching takes {copied / GIB:.1f} with a copy of the "
        f"teacher, {sharded / GIB:.1f} with a shard"
    )
    return Sharing("ddp", in_shards, (sharded if in_shards else copied) <= usable, why)


def plan_caching(
    recipe: Recipe, device: torch.device, world: int, batch_size: int | None = None, kept_tokens: int = 0
) -> Sharing:
    """How the processes of `distill cache` hold the teacher.

    A CPU has no limit here: copies, unless shards are asked for.

    Args:
        recipe: its teacher is one to load.
        device: of this process.
        world: processes.
        batch_size: rows at a time; None for the recipe's.
        kept_tokens: whose keys and values are kept beside, where the teacher generates.

    Raises:
        ValueError: an fp8 teacher that would have to be sharded.
    """
    from distill.models.meta import meta_models

    if world == 1:
        return ALONE
    if device.type != "cuda":
        found = Sharing("ddp", recipe.parallel.teacher == "sharded", True, "as asked for")
    else:
        teacher, student = (shape_of(model) for model in meta_models(recipe))
        usable = USABLE * torch.cuda.get_device_properties(device).total_memory
        precision = resolve_precision(recipe, device)
        usable -= kept_tokens * 2 * teacher.layers * teacher.key_value * precision.teacher.itemsize
        found = share_caching(recipe, teacher, student, precision, usable=usable, world=world, batch_size=batch_size)
    if found.teacher_sharded and recipe.teacher.dtype == "fp8":
        if recipe.parallel.teacher == "sharded":
            raise ValueError("teacher.dtype: fp8 cannot be sharded (parallel.teacher); use bfloat16, or copies")
        raise ValueError(f"teacher.dtype: {SHARDED_FP8} ({found.why}); use bfloat16")
    return found


def asked_in_shards(
    recipe: Recipe,
    device: torch.device,
    world: int,
    *,
    batch_size: int,
    kept_tokens: int = 0,
    alone: bool = False,
) -> bool:
    """Whether other commands that ask the recipe's teacher over `world` processes hold it in shards, as caching would.

    They load a teacher of `teacher.dtype: fp8` in 16 bits.

    Args:
        recipe, device, world, batch_size, kept_tokens: as `plan_caching` takes them.
        alone: no student is loaded beside.
    """
    if world <= 1 or recipe.parallel.teacher == "copied":
        return False
    section = loaded_section(recipe.teacher)
    if section.dtype == "fp8":
        section = section.model_copy(update={"dtype": "auto"})
    student = Student(from_teacher=FromTeacher(layers=1)) if alone else recipe.student
    recipe = recipe.model_copy(update={"teacher": section, "student": student})
    return plan_caching(recipe, device, world, batch_size, kept_tokens).teacher_sharded


def what_caching_takes(
    recipe: Recipe, teacher: Shape, student: Shape, precision: Precision, *, memory_bytes: int, world: int
) -> str:
    """In words, for the check of a recipe whose cache is still to be made."""
    usable = USABLE * memory_bytes
    recipe = recipe.model_copy(update={"teacher": loaded_section(recipe.teacher)})
    found = share_caching(recipe, teacher, student, precision, usable=usable, world=world)
    needed = caching_memory(recipe, teacher, student, precision, world=world, sharded=found.teacher_sharded)
    held = "the teacher in shards" if found.teacher_sharded else "the teacher whole"
    fits = "" if found.fits else ", more than there are"
    return f"{needed / GIB:.1f} GiB on each GPU meanwhile, {held}{fits}"
