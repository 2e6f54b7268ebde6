"""Time of on-policy generation in an optimizer step, if all rollouts have the maximum length.

    a token of all sequences at once = layers x latency + (weights + keys and values) / (0.72 bandwidth)

By our decode loop in CUDA graphs, whose steps of few sequences wait for kernels to begin, 18 us a layer where layers
are fused and 50 us where they are not: within 20 % of H200 rows `decode_step` in scripts/bench/results, SmolLM2-135M
to Llama-3.2-1B, 1 to 64 sequences. Answers that end early make it less, reading the prompts a little more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from distill_kernels.decoding.fused_linear import MAX_ROWS
from distill_kernels.decoding.plan import FASTER_ON

from distill.data.report import DataReport
from distill.models.fused_decoder import why_not_plain
from distill.models.gpu_specs import GpuSpec
from distill.models.shape import Shape
from distill.planning.devices import Device
from distill.planning.situation import Situation

FUSED_LAYER, OWN_LAYER = 18e-6, 50e-6  # seconds that kernels of a layer wait to begin
BANDWIDTH_SHARE = 0.72  # of a data sheet's


class Answers(NamedTuple):
    """Rollouts of an optimizer step: their number on all devices, maximum new tokens, and seconds (None if unknown)."""

    number: float
    tokens: int
    seconds: float | None


def answers_of(situation: Situation, device: Device, data: DataReport, rows: float) -> Answers | None:
    """Return the rollouts in a step of `rows` rows of the data; None without on-policy data."""
    recipe, student = situation.recipe, situation.student.shape
    section, length = recipe.data.own_answers, recipe.data.max_length
    if section is None:
        return None
    documents = max(data.documents, 1)
    prompt = (data.tokens - data.trained_tokens) / documents
    new = int(max(min(section.max_new_tokens, length - prompt), 1))
    number = rows * documents / max(data.rows, 1) * section.fraction
    if device.gpu_spec is None or section.engine != "distill" or situation.precision.compute == torch.float32:
        return Answers(number, new, None)
    here = max(number / situation.world, 1.0)
    seats = min(here, section.batch_size) * (section.ahead + 1)
    fused = device.family in FASTER_ON and seats <= MAX_ROWS and recipe.student.compute != "fp8"
    fused = fused and why_not_plain(situation.student.model, situation.precision.compute) is None
    token = token_seconds(
        student, device.gpu_spec, seats, prompt + new / 2, situation.precision.student.itemsize, fused
    )
    return Answers(number, new, here / seats * new * token)


def token_seconds(student: Shape, gpu_spec: GpuSpec, seats: float, cached: float, itemsize: int, fused: bool) -> float:
    """Return the seconds of one new token of `seats` sequences with `cached` tokens each."""
    bytes_read = itemsize if fused or itemsize == 2 else itemsize + 4  # else a copy in 16 bits is written, and read
    read = (student.linear + student.head) * bytes_read + seats * cached * 4 * student.layers * student.key_value
    return student.layers * (FUSED_LAYER if fused else OWN_LAYER) + read / (BANDWIDTH_SHARE * gpu_spec.bandwidth * 1e9)
