"""What an optimizer step takes: its arithmetic, what of an offloaded teacher crosses the bus, and the seconds of both.

    seconds = (student's FLOPs + recomputed ones) / rate + max(teacher's FLOPs / rate, bytes moved / bus)
    with ranks of its own for the teacher: the larger of the student's and the teacher's, each at the rate of its ranks

`rate` is half of the GPUs' dense bf16 peak; for a teacher in fp8, and for the decoder of a student that computes in it,
36 % of their dense fp8 peak.
Where a rate is not known there is no time rather than a guess.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill.planning.devices import Device
from distill.planning.situation import Situation
from distill.teachers.losses import is_soft

SUSTAINED = 0.5  # of the bf16 peak that a step is assumed to reach; measured on an H200: 0.58
# of the fp8 peak: there a step of 8B to 1B took 341.1 ms with a teacher in bf16 and 269.1 with it in fp8: its 69 % of
# the arithmetic went 1.45 times as fast, where the peak is twice as high
SUSTAINED_FP8 = SUSTAINED * 1.45 / 2


class StepTokens(NamedTuple):
    """Of a step on all devices: tokens, how many of them are learned, (query, key) pairs."""

    tokens: float
    learned: float
    pairs: float


class StepTime(NamedTuple):
    """Of one optimizer step.

    Attributes:
        flops: on all devices.
        seconds: None where the device's rate, or that of its bus, is not known.
    """

    flops: float
    seconds: float | None


def longer_in_bf16(device: Device, weights: float, tokens: float) -> float | None:
    """Seconds that a forward pass takes longer with so many weights in bf16 and not in fp8; None without rates."""
    if device.card is None or not device.flops or device.card.fp8 is None:
        return None
    return 2 * weights * tokens * (1 / (device.flops * SUSTAINED) - 1 / (device.card.fp8 * 1e12 * SUSTAINED_FP8))


def step_time(situation: Situation, device: Device, tokens: StepTokens) -> StepTime | None:
    """Arithmetic and time of a step; None for a model whose arithmetic is not known."""
    student, footprint = situation.student.work, situation.footprint()
    if student is None or footprint.work is None:
        return None
    recipe = situation.recipe
    of_student = student.of(*tokens)
    of_teacher = footprint.work.of(*tokens) if is_soft(recipe.loss) else 0.0
    moved = footprint.moved * situation.accumulation * is_soft(recipe.loss)
    flops, bus = of_student + of_teacher, device.bus_rate
    if not device.flops or situation.precision.compute == torch.float32 or (moved and bus is None):
        return StepTime(flops, None)
    again = student.of(tokens.tokens, 0, tokens.pairs) / 3 if recipe.train.gradient_checkpointing else 0.0
    rate = device.flops * SUSTAINED
    sections = situation.source.sections.values()
    in_fp8 = bool(sections) and all(section.dtype == "fp8" for section in sections)
    peak = device.card.fp8 if device.card is not None else None
    rate_in_fp8 = rate if peak is None else peak * 1e12 * SUSTAINED_FP8
    teachers_rate = rate_in_fp8 if in_fp8 else rate
    apart = recipe.parallel.teacher_ranks
    saved = student.token * tokens.tokens * (1 / rate - 1 / rate_in_fp8) * (recipe.student.compute == "fp8")
    students, teachers = ((of_student + again) / rate - saved) / situation.world, of_teacher / teachers_rate
    if apart is not None:
        return StepTime(flops, max(students, teachers / apart))
    return StepTime(flops, students + max(teachers / situation.world, moved / bus if bus else 0.0))
