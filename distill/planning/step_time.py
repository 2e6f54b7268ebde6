"""What an optimizer step takes: its arithmetic, what crosses memory and links for it, and the seconds of both.

    seconds of a model = products' FLOPs / (0.72 bf16 peak) + attention's / (0.4 bf16 peak) + bytes / (0.875 bandwidth)
    of a step = student, recomputed layers, both heads, optimizer, exchange + max(teacher's layers, bytes moved / bus)
    with ranks of its own for the teacher: the larger of the training side, on its ranks, and the teacher's layers

In fp8 the decoder's products run at 0.72 of the dense fp8 peak. The teacher's head is the loss's, so its product stays
with those who train. The parts are added: a GPU at its power limit gains nothing by doing two of them at once. A device
whose host cannot keep up takes longer; where a rate is not known there is no time rather than a guess.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

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
    """Of a step on all devices: tokens, how many of them are learned, (query, key) pairs."""

    tokens: float
    learned: float
    pairs: float


class StepTime(NamedTuple):
    """Of one optimizer step: FLOPs on all devices, and seconds; None where the devices' rates are not known."""

    flops: float
    seconds: float | None


def longer_in_bf16(device: Device, weights: float, tokens: float) -> float | None:
    """Seconds that a forward pass takes longer with so many weights in bf16 and not in fp8; None without rates."""
    if device.card is None or not device.card.bf16 or device.card.fp8 is None:
        return None
    return 2 * weights * tokens * (1 / device.card.bf16 - 1 / device.card.fp8) / (SUSTAINED * 1e12)


def step_time(
    situation: Situation, device: Device, tokens: StepTokens, read: StepTokens | None = None
) -> StepTime | None:  # fmt: skip
    """Arithmetic and time of a step; None for a model whose arithmetic is not known.

    Args:
        tokens: of the student.
        read: what the teacher reads in their place; None for the same.
    """
    read = read or tokens
    recipe, student, world, micro = situation.recipe, situation.student, situation.world, situation.accumulation
    soft, footprint, shape = is_soft(recipe.loss), situation.footprint(), student.shape
    teacher = footprint.work if soft else NO_WORK
    if student.work is None or teacher is None:
        return None
    flops = student.work.of(*tokens) + teacher.of(*read)
    if (card := device.card) is None or (peak := card.flops) is None or situation.precision.compute == torch.float32:
        return StepTime(flops, None)
    bandwidth = COPIED * card.bandwidth * 1e9
    bus, link = (REACHED * rate * 1e9 for rate in (card.link, card.peers or card.link))

    def seconds(work: Work, in_fp8: bool = False, tokens: StepTokens = tokens) -> float:
        """Of a device that does all of it."""
        body = card.fp8 * 1e12 if in_fp8 and card.fp8 is not None else peak
        products = (work.token * tokens.tokens / body + work.trained * tokens.learned / peak) / SUSTAINED
        moved = work.token_bytes * tokens.tokens + work.trained_bytes * tokens.learned
        moved += (work.token + work.trained) * world * micro  # weights: a byte a FLOP of one token
        return products + work.pair * tokens.pairs / (ATTENTION * peak) + moved / bandwidth

    fp8 = recipe.student.compute == "fp8"
    students = seconds(student.work, fp8) + seconds(teacher._replace(token=0.0, pair=0.0, token_bytes=0.0))
    if situation.precision.student == torch.float32:  # and its residual stream: 2 bytes more, 4 times a layer and pass
        students += 24 * shape.hidden * shape.layers * tokens.tokens / bandwidth
    if recipe.train.gradient_checkpointing and (again := work_of(student.model, trains=False)) is not None:
        students += seconds(again._replace(trained=0.0, trained_bytes=0.0), fp8)
    dtypes = {section.dtype for section in situation.source.sections.values()}
    teachers = seconds(teacher._replace(trained=0.0, trained_bytes=0.0), dtypes == {"fp8"}, read)
    sharing = sharing_of(situation)
    held = step_memory(situation, sharded=sharing.student_sharded).parts
    optimizer = (3 * held["gradients"] + 2 * held["optimizer states"]) / bandwidth
    exchanged = 2 * held["gradients"]
    if sharing.student_sharded:  # its weights gathered forward and backward, its gradients summed in float32
        exchanged = 2.0 * situation.precision.compute.itemsize * shape.parameters * micro + 4 * shape.trained
    students = students / world + optimizer + exchanged * (1 - 1 / world) / link
    ranks, in_shards = world, sharing.teacher_sharded
    if apart := recipe.parallel.teacher_ranks:
        ranks, (in_shards, _, _, footprint) = apart, teacher_side(situation)
    calls = micro * soft * world / ranks
    teachers = max(teachers / ranks, footprint.moved * calls / bus)
    teachers += footprint.weights * in_shards * (1 - 1 / ranks) * calls / link
    return StepTime(flops, max(students, teachers) if apart else students + teachers)
