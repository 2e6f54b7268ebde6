"""Time of an optimizer step: arithmetic, memory and link traffic, and the seconds of each.

    seconds of a model = GEMM FLOPs / (0.72 bf16 peak) + attention's / (0.4 bf16 peak) + bytes / (0.875 bandwidth)
    of a step = student, recomputed layers, both heads, optimizer, exchange + max(teacher's layers, bytes moved / bus)
    with a teacher server on GPUs of its own: the larger of the training side, on its GPUs, and the teacher's layers

In fp8 the decoder's GEMMs run at 0.72 of the dense fp8 peak. The teacher's head is part of the loss, so its GEMM stays
on the training GPUs. The parts are added: a GPU at its power limit gains nothing by overlapping them. A device whose
host cannot keep up takes longer; where a rate is unknown there is no estimate.

Rollouts come on top, if all of them have the maximum length:

    seconds of one decoding step = layers x latency + (weights + keys and values) / (0.72 bandwidth)

for the built-in decode loop in CUDA graphs. Steps of few sequences are bound by launch latency: 18 us a layer with
fused layers, 50 us without. Within 20 % of the H200 rows `decode_step` in scripts/bench/results (SmolLM2-135M to
Llama-3.2-1B, 1 to 64 sequences). Responses that end early take less, prefilling the prompts takes a little more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from distill.data.report import DataReport
from distill.generation.support_check import fused_unsupported_reason
from distill.models.flops import NO_FLOPS, FlopCounts, count_flops
from distill.models.gpu_specs import GpuSpec
from distill.models.shape import ModelSizes
from distill.objectives.losses import is_soft
from distill.planning.device_plan import DevicePlan
from distill.planning.devices import LINK_EFFICIENCY, Device
from distill.planning.memory import step_memory
from distill.planning.placement import place, teacher_server_memory

# Fractions of data-sheet rates, from H200 rows in scripts/bench/results: GEMMs of an 8B model's MLP, 8,192 tokens,
# 0.70 to 0.77 in bf16, 0.75 to 0.79 in fp8 beside their operands' bytes (rows `fp8`, `gated`); attention 0.42 to 0.59
# forward, 0.31 to 0.43 with a gradient of twice that (`attention`, 4,096 tokens, heads of 64, 128); copies 4.2 of 4.8.
GEMM_EFFICIENCY = 0.72
ATTENTION_EFFICIENCY = 0.4
COPY_EFFICIENCY = 0.875
# seconds of launch latency per layer
FUSED_LAYER_LATENCY = 18e-6
UNFUSED_LAYER_LATENCY = 50e-6
BANDWIDTH_FRACTION = 0.72  # reached, of a data sheet's bandwidth


class StepTokens(NamedTuple):
    """Tokens of a step on all devices: all tokens, tokens trained on, and (query, key) pairs."""

    tokens: float
    trained: float
    pairs: float


class PredictedStepTime(NamedTuple):
    """FLOPs of an optimizer step on all devices, and its seconds; None where the devices' rates are unknown."""

    flops: float
    seconds: float | None


def extra_seconds_in_bf16(device: Device, weights: float, tokens: float) -> float | None:
    """Return the seconds that a forward pass with so many weights loses in bf16 against fp8; None without rates."""
    if device.gpu_spec is None or not device.gpu_spec.bf16 or device.gpu_spec.fp8 is None:
        return None
    return 2 * weights * tokens * (1 / device.gpu_spec.bf16 - 1 / device.gpu_spec.fp8) / (GEMM_EFFICIENCY * 1e12)


class DeviceClock(NamedTuple):
    """Step time on a device with these rates; each model is called `calls` times in a step."""

    gpu_spec: GpuSpec
    peak: float
    tokens: StepTokens
    calls: int

    @property
    def bandwidth(self) -> float:
        """Return the reached memory bandwidth, bytes per second."""
        return COPY_EFFICIENCY * self.gpu_spec.bandwidth * 1e9

    def seconds(self, flops: FlopCounts, in_fp8: bool = False) -> float:
        tokens = self.tokens
        body = self.gpu_spec.fp8 * 1e12 if in_fp8 and self.gpu_spec.fp8 is not None else self.peak
        products = (flops.token * tokens.tokens / body + flops.trained * tokens.trained / self.peak) / GEMM_EFFICIENCY
        moved = flops.token_bytes * tokens.tokens + flops.trained_bytes * tokens.trained
        moved += (flops.token + flops.trained) * self.calls  # weights: a byte a FLOP of one token
        return products + flops.pair * tokens.pairs / (ATTENTION_EFFICIENCY * self.peak) + moved / self.bandwidth


def step_time(plan: DevicePlan, tokens: StepTokens, read: StepTokens | None = None) -> PredictedStepTime | None:
    """Return FLOPs and time of a step; None for a model whose FLOPs are unknown.

    Args:
        tokens: Tokens that the student reads.
        read: the teacher's tokens; None for the student's.
    """
    read = read or tokens
    recipe = plan.recipe
    student = plan.student
    teacher = plan.footprint().flops if is_soft(recipe.loss) else NO_FLOPS
    if student.flops is None or teacher is None:
        return None
    flops = student.flops.total(*tokens) + teacher.total(*read)
    if (
        (gpu_spec := plan.device.gpu_spec) is None
        or (peak := gpu_spec.flops) is None
        or plan.precision.compute == torch.float32
    ):
        return PredictedStepTime(flops, None)
    clock = DeviceClock(gpu_spec, peak, tokens, plan.world * plan.accumulation)
    work = clock.seconds(student.flops, recipe.student.compute == "fp8")
    # the teacher's head works in the loss, on the training GPUs
    work += clock.seconds(teacher._replace(token=0.0, pair=0.0, token_bytes=0.0))
    students = _student_seconds(plan, clock, work)
    teachers = _teacher_seconds(plan, clock._replace(tokens=read), teacher)
    apart = recipe.parallel.teacher_gpus
    return PredictedStepTime(flops, max(students, teachers) if apart else students + teachers)


def _student_seconds(plan: DevicePlan, clock: DeviceClock, work: float) -> float:
    """Return the seconds of the training side: `work` seconds of one device, recomputation, optimizer, exchange."""
    recipe = plan.recipe
    student = plan.student
    shape = plan.student.shape
    world = plan.world
    if plan.precision.student == torch.float32:  # and its residual stream: 2 bytes more, 4 times a layer and pass
        work += 24 * shape.hidden * shape.layers * clock.tokens.tokens / clock.bandwidth
    if recipe.train.gradient_checkpointing and (again := count_flops(student.model, trains=False)) is not None:
        work += clock.seconds(again._replace(trained=0.0, trained_bytes=0.0), recipe.student.compute == "fp8")
    sharded = place(plan).student_sharded
    held = step_memory(plan, sharded=sharded).parts
    optimizer = (3 * held["gradients"] + 2 * held["optimizer states"]) / clock.bandwidth
    # a ring all-reduce sends each gradient twice: reduce-scatter, then all-gather
    exchanged = 2 * held["gradients"]
    if sharded:  # its weights gathered forward and backward, its gradients summed in float32
        gathered = 2.0 * plan.precision.compute.itemsize * shape.parameters * plan.accumulation
        exchanged = gathered + 4 * shape.trained
    link = LINK_EFFICIENCY * (clock.gpu_spec.peers or clock.gpu_spec.link) * 1e9
    return work / world + optimizer + exchanged * (1 - 1 / world) / link


def _teacher_seconds(plan: DevicePlan, clock: DeviceClock, teacher: FlopCounts) -> float:
    """Return the seconds of the teacher's layers, on the GPUs that hold it."""
    dtypes = {section.dtype for section in plan.source.sections.values()}
    work = clock.seconds(teacher._replace(trained=0.0, trained_bytes=0.0), dtypes == {"fp8"})
    ranks = plan.world
    teacher_sharded = place(plan).teacher_sharded
    footprint = plan.footprint()
    apart = plan.recipe.parallel.teacher_gpus
    if apart:
        ranks = apart
        teacher_sharded, _, _, footprint = teacher_server_memory(plan)
    calls = clock.calls * is_soft(plan.recipe.loss) / ranks
    bus = LINK_EFFICIENCY * clock.gpu_spec.link * 1e9
    link = LINK_EFFICIENCY * (clock.gpu_spec.peers or clock.gpu_spec.link) * 1e9
    layers = max(work / ranks, footprint.moved * calls / bus)
    return layers + footprint.weights * teacher_sharded * (1 - 1 / ranks) * calls / link


class RolloutEstimate(NamedTuple):
    """Rollouts of an optimizer step: their number on all devices, maximum new tokens, and seconds (None if unknown)."""

    number: float
    tokens: int
    seconds: float | None


def estimate_rollouts(plan: DevicePlan, data: DataReport, rows: float) -> RolloutEstimate | None:
    """Return the rollouts in a step of `rows` rows of the data; None without on-policy data."""
    recipe = plan.recipe
    student = plan.student.shape
    device = plan.device
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
    reason = fused_unsupported_reason(plan.student.model, plan.precision.compute, device.family, sequences)
    fused = reason is None and recipe.student.compute != "fp8"  # whose linear layers are no plain ones then
    token = seconds_per_token(
        student, device.gpu_spec, sequences, prompt + new / 2, plan.precision.student.itemsize, fused
    )
    return RolloutEstimate(number, new, here / sequences * new * token)


def seconds_per_token(
    student: ModelSizes, gpu_spec: GpuSpec, sequences: float, cached: float, itemsize: int, fused: bool
) -> float:
    """Return the seconds of one new token of `sequences` sequences with `cached` tokens each."""
    bytes_read = itemsize if fused or itemsize == 2 else itemsize + 4  # else a copy in 16 bits is written, and read
    read = (student.linear + student.head) * bytes_read + sequences * cached * 4 * student.layers * student.key_value
    return student.layers * (FUSED_LAYER_LATENCY if fused else UNFUSED_LAYER_LATENCY) + read / (
        BANDWIDTH_FRACTION * gpu_spec.bandwidth * 1e9
    )
