"""What an optimizer step takes: its arithmetic, what of an offloaded teacher crosses the bus, and the seconds of both.

    seconds = (student's FLOPs + recomputed ones) / rate + max(teacher's FLOPs / rate, bytes moved / bus)

`rate` is half of the GPUs' dense bf16 peak. Where a rate is not known there is no time rather than a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from distill.models.work import Work
from distill.planning.devices import Device
from distill.planning.teacher_weights import bus_rate
from distill.recipe import Recipe

SUSTAINED = 0.5  # of the bf16 peak that a step is assumed to reach; measured on an H200: 0.58


class StepTime(NamedTuple):
    """Of one optimizer step.

    Attributes:
        flops: on all devices.
        seconds: None where the device's rate, or that of its bus, is not known.
    """

    flops: float
    seconds: float | None


def asks_teacher(recipe: Recipe) -> bool:
    """Whether a step runs a loaded teacher."""
    soft = any(term.weight > 0 and term.type != "cross_entropy" for term in recipe.loss.terms)
    return soft and not recipe.teacher.is_cached


def step_time(
    recipe: Recipe, teachers: Sequence[Work], student: Work, device: Device, *, gpus: int, tokens: float,
    learned: float, pairs: float, compute: torch.dtype, moved: float = 0.0,
) -> StepTime:  # fmt: skip
    """Arithmetic and time of a step.

    Args:
        recipe: loss and checkpointing are read from it.
        teachers, student: FLOPs by token, from `work_of`.
        device: one of `gpus`.
        gpus: how many.
        tokens: of a step on all of them; `learned` of these are trained, `pairs` the (query, key) pairs.
        learned, pairs: see `tokens`.
        compute: dtype of the arithmetic.
        moved: bytes of an offloaded teacher that go to each device.
    """
    of_student = student.of(tokens, learned, pairs)
    of_teachers = sum(work.of(tokens, learned, pairs) for work in teachers) if asks_teacher(recipe) else 0.0
    flops = of_student + of_teachers
    bus = bus_rate(device.name)
    if not device.flops or compute == torch.float32 or (moved and bus is None):
        return StepTime(flops, None)
    again = student.of(tokens, 0, pairs) / 3 if recipe.train.gradient_checkpointing else 0.0
    rate = device.flops * SUSTAINED * gpus
    return StepTime(flops, (of_student + again) / rate + max(of_teachers / rate, moved / bus if bus else 0.0))
