"""Time of on-policy generation in an optimizer step, if all rollouts have the maximum length.

    seconds of one decoding step = layers x latency + (weights + keys and values) / (0.72 bandwidth)

For the built-in decode loop in CUDA graphs. Steps of few sequences are bound by launch latency: 18 us a layer with
fused layers, 50 us without. Within 20 % of the H200 rows `decode_step` in scripts/bench/results (SmolLM2-135M to
Llama-3.2-1B, 1 to 64 sequences). Responses that end early take less, prefilling the prompts takes a little more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from distill_kernels.decoding.fused_linear import MAX_ROWS
from distill_kernels.decoding.plan import FASTER_ON

from distill.data.report import DataReport
from distill.generation.fused_decoder import plain_unsupported_reason
from distill.models.gpu_specs import GpuSpec
from distill.models.shape import Shape
from distill.planning.device_plan import DevicePlan
from distill.planning.devices import Device

# seconds of launch latency per layer
FUSED_LAYER_LATENCY = 18e-6
UNFUSED_LAYER_LATENCY = 50e-6
BANDWIDTH_FRACTION = 0.72  # reached, of a data sheet's bandwidth


class RolloutEstimate(NamedTuple):
    """Rollouts of an optimizer step: their number on all devices, maximum new tokens, and seconds (None if unknown)."""

    number: float
    tokens: int
    seconds: float | None


def estimate_rollouts(plan: DevicePlan, device: Device, data: DataReport, rows: float) -> RolloutEstimate | None:
    """Return the rollouts in a step of `rows` rows of the data; None without on-policy data."""
    recipe = plan.recipe
    student = plan.student.shape
    section = recipe.data.active_on_policy
    length = recipe.data.max_length
    if section is None:
        return None
    documents = max(data.documents, 1)
    prompt = (data.tokens - data.trained_tokens) / documents
    new = int(max(min(section.max_new_tokens, length - prompt), 1))
    number = rows * documents / max(data.rows, 1) * section.fraction
    if device.gpu_spec is None or section.engine != "distill" or plan.precision.compute == torch.float32:
        return RolloutEstimate(number, new, None)
    here = max(number / plan.world, 1.0)
    sequences = min(here, section.batch_size) * (section.max_staleness + 1)
    fused = device.family in FASTER_ON and sequences <= MAX_ROWS and recipe.student.compute != "fp8"
    fused = fused and plain_unsupported_reason(plan.student.model, plan.precision.compute) is None
    token = seconds_per_token(
        student, device.gpu_spec, sequences, prompt + new / 2, plan.precision.student.itemsize, fused
    )
    return RolloutEstimate(number, new, here / sequences * new * token)


def seconds_per_token(
    student: Shape, gpu_spec: GpuSpec, sequences: float, cached: float, itemsize: int, fused: bool
) -> float:
    """Return the seconds of one new token of `sequences` sequences with `cached` tokens each."""
    bytes_read = itemsize if fused or itemsize == 2 else itemsize + 4  # else a copy in 16 bits is written, and read
    read = (student.linear + student.head) * bytes_read + sequences * cached * 4 * student.layers * student.key_value
    return student.layers * (FUSED_LAYER_LATENCY if fused else UNFUSED_LAYER_LATENCY) + read / (
        BANDWIDTH_FRACTION * gpu_spec.bandwidth * 1e9
    )
