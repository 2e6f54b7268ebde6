"""Memory of a local teacher, and ways of holding it that need less.

Memory of the weights, in bytes: P parameters, D of them in the decoder's linear layers, b bytes per weight as loaded:

    resident       P b
    fp8, int8      D + (P - D) b                  linear layers except the LM head: one byte a weight; fp8: and experts
    nf4            D 4.13 / 8 + (P - D) b         the same layers in 4 bits and their scales
    quantised      D bits / 8 + (P - D) b         bits of the checkpoint; P b where they are unknown
    offloaded      (P - layers) b + 2 x (largest layer) b      on the device; the layers are in host memory

An fp8 teacher is loaded in 16 bits and then quantised, or layer by layer where it does not fit in 16 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distill.models.adapters import adapter_parameters
from distill.models.dtypes import Precision
from distill.models.fp8_teacher import expert_weights, find_skipped
from distill.models.gpu_specs import has_fp8
from distill.models.meta_models import meta_student
from distill.models.quantised_checkpoints import saved_bytes
from distill.models.shape import USABLE, ModelSizes
from distill.recipe import LoadedTeacherConfig
from distill.recipe.models import LOW_BITS
from distill.teachers.footprint import Footprint, FootprintContext, SmallerTeacher

if TYPE_CHECKING:
    from distill.teachers.backends.local import LocalPlan


def model_footprint(source: LocalPlan, context: FootprintContext) -> Footprint:
    """Return the footprint by the formulas at the head of this file."""
    precision = context.precision
    section = source.section
    shape = source.meta().shape
    size = precision.teacher.itemsize
    layers = float(shape.layered * size) if section.offload is not None else 0.0
    in_16_bits = find_skipped(source.meta().model, section.fp8_skip).weights  # the others are in fp8
    experts = expert_weights(source.meta().model) if section.dtype == "fp8" else 0
    whole = loading_bytes(source, precision) if section.dtype == "fp8" else 0.0
    weights = placed_bytes(section, shape, precision, experts) + in_16_bits * (size - 1)
    # adapters beside the weights are in float32
    beside = 0 if section.adapter is None or section.merge_adapter else 4 * adapter_parameters(section.adapter)
    frozen = source.frozen_weights(precision, sharded=context.sharded)
    return Footprint(
        weights=weights + beside,
        checkpoints={own: weights for own in frozen if not own.unlike_files},
        gathered=max(2 * shape.linear / shape.layers, shape.head) * size if context.sharded else 0.0,
        host=layers,
        moved=layers,
        loading=whole if whole <= USABLE * context.memory_bytes else 0.0,  # otherwise it is loaded layer by layer
        token_bytes=size * shape.hidden,
        flops=source.meta().flops,
    )


def smaller_variants(source: LocalPlan, family: str | None = None) -> list[SmallerTeacher]:
    """Return variants with less memory, in 8 bits and offloaded; empty where it is one of these already, and where its
    adapter is not merged.
    """
    recipe = source.recipe
    section = source.section
    if section.offload is not None or section.dtype in LOW_BITS or not section.merge_adapter:
        return []
    bits = "fp8" if has_fp8(family) else "int8"
    in_8_bits = recipe.model_copy(update={"teacher": section.model_copy(update={"dtype": bits})})
    effect = "changes the teacher's outputs slightly" + (": the run prints by how much" if bits == "fp8" else "")
    copied = recipe.parallel.model_copy(update={"teacher": "copied"})
    offloaded = section.model_copy(update={"offload": "cpu"})
    offload = SmallerTeacher(
        "teacher.offload=cpu",
        recipe.model_copy(update={"teacher": offloaded, "parallel": copied}),
        "teacher.offload to cpu, all but two of the teacher's layers, which cross the bus instead",
        "its layers cross the bus in every micro-batch",
        same_targets=True,
    )
    if bits == "int8" and section.init == "random":  # bitsandbytes quantises files as it reads them
        return [offload]
    saved = f"teacher.dtype to {bits}, half of the teacher's layers"
    return [SmallerTeacher(f"teacher.dtype={bits}", in_8_bits, saved, effect), offload]


def loading_bytes(source: LocalPlan, precision: Precision) -> float:
    """Return the bytes of teacher and student at loading, before the teacher is quantised."""
    meta = source.meta()
    section = source.recipe.student
    student = meta_student(section, meta.config).shape
    adapters = student.trained if student.rank else 0
    size = precision.student.itemsize
    weights = (student.parameters - adapters) * size - saved_bytes(section.dtype, student.linear, size) + 4 * adapters
    return float(meta.shape.parameters * precision.teacher.itemsize + weights)


def placed_bytes(section: LoadedTeacherConfig, shape: ModelSizes, precision: Precision, experts: int) -> float:
    """Return the bytes of an unsharded teacher's weights on its device; offloaded layers are not counted.

    Args:
        experts: Weights of its experts that are in fp8.
    """
    size = precision.teacher.itemsize
    if section.offload is not None:
        return float(shape.parameters - shape.layered + 2 * shape.largest_layer) * size
    if section.dtype in LOW_BITS or shape.stored_bits is None:
        saved = saved_bytes(section.dtype, shape.linear, size)
    else:
        saved = shape.linear * (size - shape.stored_bits / 8)
    saved += experts * (size - 1)
    return shape.parameters * size - saved
