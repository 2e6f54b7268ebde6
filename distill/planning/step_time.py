"""Time of an optimizer step: arithmetic, memory and link traffic, and the seconds of each.

    seconds of a model = products' FLOPs / (0.72 bf16 peak) + attention's / (0.4 bf16 peak) + bytes / (0.875 bandwidth)
    of a step = student, recomputed layers, both heads, optimizer, exchange + max(teacher's layers, bytes moved / bus)
    with a teacher server on GPUs of its own: the larger of the training side, on its GPUs, and the teacher's layers

In fp8 the decoder's products run at 0.72 of the dense fp8 peak. The teacher's head is the loss's, so its product stays
with those who train. The parts are added: a GPU at its power limit gains nothing by doing two of them at once. A device
whose host cannot keep up takes longer; where a rate is not known there is no time rather than a guess.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill.models.gpu_specs import GpuSpec
from distill.models.work import NO_WORK, Work, work_of
from distill.planning.devices import REACHED, Device
from distill.planning.memory import step_memory
from distill.planning.sharing import sharing_of, teacher_side
from distill.planning.situation import Situation
from distill.teachers.losses import is_soft

# Of data sheets' rates, by an H200's rows in scripts/bench/results: products of an 8B model's MLP, 8,192 tokens, reach
# 0.70 to 0.77 in bf16, 0.75 to 0.79 in fp8 beside their operands' bytes (rows `fp8`, `gated`); attention 0.42 to 0.59
# forward, 0.31 to 0.43 with a gradient of twice that (`attention`, 4,096 tokens, heads of 64, 128); copies 4.2 of 4.8.
SUSTAINED, ATTENTION, COPIED = 0.72, 0.4, 0.875


class StepTokens(NamedTuple):
    """Tokens of a step on all devices: all of them, trained ones, (query, key) pairs."""

    tokens: float
    learned: float
    pairs: float


class StepTime(NamedTuple):
    """FLOPs of an optimizer step on all devices, and its seconds; None where the devices' rates are unknown."""

    flops: float
    seconds: float | None


def longer_in_bf16(device: Device, weights: float, tokens: float) -> float | None:
    """Seconds that a forward pass takes longer with so many weights in bf16 and not in fp8; None without rates."""
    if device.gpu_spec is None or not device.gpu_spec.bf16 or device.gpu_spec.fp8 is None:
        return None
    return 2 * weights * tokens * (1 / device.gpu_spec.bf16 - 1 / device.gpu_spec.fp8) / (SUSTAINED * 1e12)


class Clock(NamedTuple):
    """Step time on a device with these rates; each model is called `calls` times in a step."""

    gpu_spec: GpuSpec
    peak: float
    tokens: StepTokens
    calls: int

    @property
    def bandwidth(self) -> float:
        """Return the reached memory bandwidth, bytes per second."""
        return COPIED * self.gpu_spec.bandwidth * 1e9

    def seconds(self, work: Work, in_fp8: bool = False) -> float:
        """Return the seconds of `work` on one device."""
        tokens, body = self.tokens, self.gpu_spec.fp8 * 1e12 if in_fp8 and self.gpu_spec.fp8 is not None else self.peak
        products = (work.token * tokens.tokens / body + work.trained * tokens.learned / self.peak) / SUSTAINED
        moved = work.token_bytes * tokens.tokens + work.trained_bytes * tokens.learned
        moved += (work.token + work.trained) * self.calls  # weights: a byte a FLOP of one token
        return products + work.pair * tokens.pairs / (ATTENTION * self.peak) + moved / self.bandwidth


def step_time(
    situation: Situation, device: Device, tokens: StepTokens, read: StepTokens | None = None
) -> StepTime | None:
    """Arithmetic and time of a step; None for a model whose arithmetic is not known.

    Args:
        tokens: of the student.
        read: what the teacher reads in their place; None for the same.
    """
    read = read or tokens
    recipe, student = situation.recipe, situation.student
    teacher = situation.footprint().work if is_soft(recipe.loss) else NO_WORK
    if student.work is None or teacher is None:
        return None
    flops = student.work.of(*tokens) + teacher.of(*read)
    if (
        (gpu_spec := device.gpu_spec) is None
        or (peak := gpu_spec.flops) is None
        or situation.precision.compute == torch.float32
    ):
        return StepTime(flops, None)
    clock = Clock(gpu_spec, peak, tokens, situation.world * situation.accumulation)
    work = clock.seconds(student.work, recipe.student.compute == "fp8")
    work += clock.seconds(teacher._replace(token=0.0, pair=0.0, token_bytes=0.0))
    students = _student_seconds(situation, clock, work)
    teachers = _teacher_seconds(situation, clock._replace(tokens=read), teacher)
    apart = recipe.parallel.teacher_gpus
    return StepTime(flops, max(students, teachers) if apart else students + teachers)


def _student_seconds(situation: Situation, clock: Clock, work: float) -> float:
    """Return the seconds of the training side: `work` seconds of one device, recomputation, optimizer, exchange."""
    recipe, student, shape, world = situation.recipe, situation.student, situation.student.shape, situation.world
    if situation.precision.student == torch.float32:  # and its residual stream: 2 bytes more, 4 times a layer and pass
        work += 24 * shape.hidden * shape.layers * clock.tokens.tokens / clock.bandwidth
    if recipe.train.gradient_checkpointing and (again := work_of(student.model, trains=False)) is not None:
        work += clock.seconds(again._replace(trained=0.0, trained_bytes=0.0), recipe.student.compute == "fp8")
    sharded = sharing_of(situation).student_sharded
    held = step_memory(situation, sharded=sharded).parts
    optimizer = (3 * held["gradients"] + 2 * held["optimizer states"]) / clock.bandwidth
    exchanged = 2 * held["gradients"]
    if sharded:  # its weights gathered forward and backward, its gradients summed in float32
        gathered = 2.0 * situation.precision.compute.itemsize * shape.parameters * situation.accumulation
        exchanged = gathered + 4 * shape.trained
    link = REACHED * (clock.gpu_spec.peers or clock.gpu_spec.link) * 1e9
    return work / world + optimizer + exchanged * (1 - 1 / world) / link


def _teacher_seconds(situation: Situation, clock: Clock, teacher: Work) -> float:
    """Return the seconds of the teacher's layers, on the GPUs that hold it."""
    dtypes = {section.dtype for section in situation.source.sections.values()}
    work = clock.seconds(teacher._replace(trained=0.0, trained_bytes=0.0), dtypes == {"fp8"})
    ranks, in_shards, footprint = situation.world, sharing_of(situation).teacher_sharded, situation.footprint()
    if apart := situation.recipe.parallel.teacher_gpus:
        ranks, (in_shards, _, _, footprint) = apart, teacher_side(situation)
    calls = clock.calls * is_soft(situation.recipe.loss) / ranks
    bus, link = (REACHED * rate * 1e9 for rate in (clock.gpu_spec.link, clock.gpu_spec.peers or clock.gpu_spec.link))
    layers = max(work / ranks, footprint.moved * calls / bus)
    return layers + footprint.weights * in_shards * (1 - 1 / ranks) * calls / link
