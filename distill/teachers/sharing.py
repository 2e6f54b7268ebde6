"""Frozen weights of a student, and which of them a teacher has too: one copy of both is held (models/load)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from distill.core.units import GIB
from distill.models.flops import count_text
from distill.models.load.shared_weights import FrozenWeights, frozen_weights, shared_among
from distill.models.loading import STUDENT_SEED
from distill.recipe import Student


def student_weights(section: Student, dtype: torch.dtype, *, sharded: bool) -> FrozenWeights | None:
    """Return the weights under a student's adapters; None for one that trains its weights or is cut from a teacher.

    Args:
        sharded: Whether the student is sharded over the processes, so that none holds its weights as they are.
    """
    if section.lora is None or section.is_cut:
        return None
    unlike_files = ""
    if section.cut is not None:
        unlike_files = "student.from_teacher"
    elif section.lora.init == "pissa":
        unlike_files = "student.lora.init: pissa"
    elif section.quantise is not None:
        unlike_files = "student.quantise"
    elif section.vocabulary == "extend":
        unlike_files = "student.vocabulary: extend"
    elif sharded:
        unlike_files = "the student is sharded (FSDP2)"
    return frozen_weights(section, "student", dtype, STUDENT_SEED, unlike_files)


def shared_with(teachers: Sequence[FrozenWeights], student: FrozenWeights | None) -> bool:
    """Return whether a student's frozen weights are those of a teacher."""
    return student is not None and not student.unlike_files and student in teachers


def sharing_text(
    teachers: Sequence[FrozenWeights], student: FrozenWeights | None, models: Mapping[str, nn.Module]
) -> str:
    """Return which models hold one copy of weights, or why the student has its own of a teacher's checkpoint.

    Args:
        teachers, student: Weights as planned.
        models: Loaded models by the recipe's field.

    Returns:
        One line; empty where no two models read the same files, or the student trains all its weights.
    """
    shared = shared_among(models)
    text = ""
    if shared.saved:
        holders = " and ".join(filter(None, [", ".join(shared.holders[:-1]), shared.holders[-1]]))
        size = f"{shared.saved / GIB:.2f} GiB"
        text = f"{holders} hold one copy of {count_text(shared.numbers)} frozen parameters, {size} less"
    if student is None or shared_with(teachers, student):
        return text
    reasons = [why_apart(teacher, student) for teacher in teachers if teacher.reads_the_files_of(student)]
    if not reasons:
        return text
    own = f"the student holds its own copy of a teacher's checkpoint: {reasons[0]}"
    return f"{text}; {own}" if text else own


def why_apart(teacher: FrozenWeights, student: FrozenWeights) -> str:
    """Return why a teacher and a student of the same files do not hold one copy."""
    if teacher.unlike_files or student.unlike_files:
        return teacher.unlike_files or student.unlike_files
    if (teacher.dtype, teacher.quantised) != (student.dtype, student.quantised):
        dtypes = [w.quantised or str(w.dtype).removeprefix("torch.") for w in (teacher, student)]
        return f"the teacher is in {dtypes[0]}, the student in {dtypes[1]}"
    return f"teacher.attention is {teacher.attention}, student.attention {student.attention}"
