"""What an optimizer step takes: its arithmetic, what of an offloaded teacher crosses the bus, and the seconds of both.

    seconds = (student's FLOPs + recomputed ones) / rate + max(teacher's FLOPs / rate, bytes moved / bus)

`rate` is half of the GPUs' dense bf16 peak. Where a rate is not known there is no time rather than a guess.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill.planning.devices import Device, bus_rate
from distill.planning.situation import Situation
from distill.teachers.losses import is_soft

SUSTAINED = 0.5  # of the bf16 peak that a step is assumed to reach; measured on an H200: 0.58


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


def step_time(situation: Situation, device: Device, tokens: StepTokens) -> StepTime | None:
    """Arithmetic and time of a step; None for a model whose arithmetic is not known."""
    student, footprint = situation.student.work, situation.footprint()
    if student is None or footprint.work is None:
        return None
    recipe = situation.recipe
    of_student = student.of(*tokens)
    of_teacher = footprint.work.of(*tokens) if is_soft(recipe.loss) else 0.0
    moved = footprint.moved * situation.accumulation * is_soft(recipe.loss)
    flops, bus = of_student + of_teacher, bus_rate(device.name)
    if not device.flops or situation.precision.compute == torch.float32 or (moved and bus is None):
        return StepTime(flops, None)
    again = student.of(tokens.tokens, 0, tokens.pairs) / 3 if recipe.train.gradient_checkpointing else 0.0
    rate = device.flops * SUSTAINED * situation.world
    return StepTime(flops, (of_student + again) / rate + max(of_teacher / rate, moved / bus if bus else 0.0))
