"""GPU memory of a training step, computed from both configurations.

With N tokens in a micro-batch, w the bytes of a trained weight, c of what is computed in (2 for bfloat16), r of the
residual stream (the embedding's dtype), H the hidden size, A heads x head width, K key-value heads x head width, I the
MLP's width, V the vocabulary, L layers; what reads one norm's output keeps one copy of it, as it is computed with, but
for PEFT's LoRA layers under autocast, each of which keeps its own (ours do not):

    teacher         parameters x bytes of its dtype; fewer in 8 bits and offloaded (`teachers/backends/local.py`)
    student         parameters x w, gradients trained x w, AdamW states 2 x trained x w (or of their own dtype)
    activations     N L (2 r H norms' inputs + c (q + g) H normed inputs + c (3 A + 2 K) attention + 3 c I MLP), q = 3
                    and g = 2 for PEFT's layers under autocast, else 1 and 1; 2 c I for an MLP without gate; row
                    statistics in fp32
      checkpointed  N L r H, and one layer of the above
      in fp8        N L (2 H normed inputs + (A + I) one byte each + c (3 A + 2 K) + 2 c I), for all but LoRA's
    weight copies   linear weights x c under autocast, kept for the backward; none in fp8
    loss            the workspace that `distill_kernels` plans, the head's copy, and dW
    cached teacher  no weights but, of stored hidden states, the head; of N tokens what was stored, as it comes from
                    the disk and at its positions; K stored tokens have no logits: the workspace is the student's alone
    quantised       4 bytes a weight for its master, 20 a learned scale of the format's blocks; with adapters 12 a
                    weight of the largest matrix while its gradients are computed
    in nf4          the linear weights take 4.13 bits each; one of them is there dequantised, in c bytes a weight
    optimizer       torch's AdamW keeps one temporary the size of the trained weights; fused ones none

The peak is the largest of three moments: inside the loss, in the backward, in the optimizer; with an fp8 teacher also
while it is loaded, since it comes in bfloat16 and is quantised on the device (a layer at a time where it does not fit
in bfloat16). The CUDA context and the allocator's fragmentation come on top: a device counts as full at 95 %.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from distill_kernels.losses.plan import plan_chunks
from distill_kernels.losses.projection import TILE

from distill.generation.tasks import BATCH
from distill.models.precision.quantised_student import quantised_bytes
from distill.models.quantised_checkpoints import saved_bytes
from distill.models.shape import ModelSizes
from distill.objectives.losses import is_soft
from distill.planning.device_plan import DevicePlan
from distill.planning.layer_memory import layer_memory
from distill.planning.steps import FUSED
from distill.teachers.sharing import student_weights

LOADING = "loading of the teacher"
# bytes of optimizer state per trained weight, in units of the weight's own bytes, by a part of the optimizer's name
STATES = {"8bit": 0.5, "4bit": 0.25, "adafactor": 0.01, "sgd": 0.0, "lion": 1.0}


class Memory(NamedTuple):
    """Bytes on each GPU.

    Attributes:
        parts: bytes by name, in the order to print.
        moments: bytes in use at the three moments that may be the peak.
        logits_avoided: bytes of the full fp32 logits that the fused loss never holds.
        shared: bytes of the teacher's weights that are the student's frozen weights too.
    """

    parts: dict[str, float]
    moments: dict[str, float]
    logits_avoided: float
    shared: float = 0.0

    @property
    def peak(self) -> float:
        return max(self.moments.values())


def layer_activations(
    shape: ModelSizes, *, compute: int, residual: int, autocast: bool, apart: bool = False, fp8: bool = False
) -> float:
    """Return the bytes per token that one layer keeps for its backward.

    Args:
        apart: each projection casts and keeps a copy of its input.
        fp8: inputs of its GEMMs are kept with one byte per number.
    """
    normed = compute if autocast or residual == compute else residual
    attention = 2 * shape.query + (shape.query + 2 * shape.key_value)
    first, second = (3, 2 if shape.gated else 1) if autocast and apart else (1, 1)
    mlp = (3 if shape.gated else 2) * shape.intermediate
    if fp8:
        mlp -= shape.intermediate
        in_bytes = 2 * shape.hidden + shape.query + shape.intermediate
        return 2 * residual * shape.hidden + in_bytes + compute * (attention + mlp) + 4 * (shape.heads + 6)
    return (
        2 * residual * shape.hidden
        + normed * (first + second) * shape.hidden
        + compute * (attention + mlp)
        + 4 * (shape.heads + 2)
    )


def step_memory(plan: DevicePlan, *, sharded: bool = False, teacher_sharded: bool = False) -> Memory:
    """Return the memory of each GPU in a training step with the fused kernels.

    Args:
        sharded: FSDP: weights, gradients and states of the student are divided by the devices.
        teacher_sharded: The teacher's weights are too, and gathered a layer at a time.
    """
    recipe = plan.recipe
    precision = plan.precision
    world = plan.world
    student = plan.student.shape
    teacher = plan.footprint(teacher_sharded)
    # The loss compares the columns that both have; a larger student keeps its own columns where there is no soft term.
    columns = min(student.vocabulary, *(shape.vocabulary for shape in plan.source.shapes()))
    accumulation = plan.accumulation
    tokens = recipe.train.batch_size * recipe.data.max_length
    compute = precision.compute.itemsize
    weight = precision.student.itemsize
    lora = student.rank > 0
    autocast = precision.autocast is not None
    trained_bytes = 4 if lora else weight
    share = world if sharded else 1
    soft = is_soft(recipe.loss)
    models = 2 if soft and teacher.logits else 1

    # LoRA: base weights in their dtype, adapters in fp32. Full training: everything is in `weight`, and the LoRA part
    # of the product is 0.
    weights = ((student.parameters - student.trained * lora) * weight + student.trained * trained_bytes * lora) / share
    weights -= saved_bytes(recipe.student.dtype, student.linear, weight)
    # frozen weights that the teacher holds too are counted as the teacher's
    frozen = student_weights(recipe.student, precision.student, sharded=sharded)
    shared = teacher.checkpoints.get(frozen, 0.0) if frozen is not None else 0.0
    weights -= shared
    gradients = student.trained * trained_bytes / share
    optimizer = recipe.train.optimizer
    states = next((f for part, f in STATES.items() if part in optimizer), 2.0) * gradients
    if optimizer == FUSED:
        width = {"auto": trained_bytes, "float32": 4, "bfloat16": 2}[recipe.train.optimizer_states]
        masters = 4 if recipe.train.master_weights and trained_bytes < 4 else 0
        states = student.trained * (2 * width + masters) / share
    quantised = recipe.student.quantise
    rounding = None if quantised is None else quantised_bytes(plan.student.model, quantised)
    if rounding is not None:
        states += rounding.states / share
    temporary = gradients if optimizer == "adamw_torch" else 0.0
    # DDP keeps gradients a second time, flattened, for the all-reduce; FSDP reduces its shards in place.
    buckets = gradients if world > 1 and not sharded else 0.0
    # FSDP2 gathers one layer's weights at a time, and the head's when the loss needs them.
    gathered = (student.linear / student.layers + student.head) * compute if sharded else 0.0

    # our LoRA layers keep each input once, as it is; PEFT's keep a copy of each adapted input, in fp32 without autocast
    ours = lora and weight == compute and not (recipe.student.lora and recipe.student.lora.dropout)
    in_4_bits = recipe.student.dtype == "nf4"  # PEFT's layers, whose input under autocast is in the compute dtype
    fp8 = recipe.student.compute == "fp8"
    one_layer = tokens * layer_activations(
        student, compute=compute, residual=weight, autocast=autocast and not ours, apart=lora, fp8=fp8 and not lora
    )
    if (fp8 and lora) or not ours:
        one_layer += tokens * student.adapted / student.layers * (compute if autocast else 4)
    elif student.gated and not in_4_bits:  # the input of the projection down is made again
        one_layer -= tokens * student.intermediate * compute
    stream = tokens * weight * student.hidden
    checkpointed = recipe.train.gradient_checkpointing
    activations = stream * student.layers if checkpointed else one_layer * student.layers
    layers = layer_memory(plan, share)
    activations += 2 * stream + tokens * teacher.token_bytes * soft + layers.states
    # Checkpointing recomputes one layer in the backward: its activations come on top of the kept streams.
    again = one_layer if checkpointed else 0.0
    # gradients inside one layer: of the MLP's three wide tensors, and of the stream
    inside = tokens * (compute * 3 * student.intermediate + 2 * weight * student.hidden)
    if rounding is not None:
        inside += rounding.temporary
    if in_4_bits:  # the weight of the largest product, and the product before the adapter's is added to it
        inside += compute * student.intermediate * (student.hidden + tokens)
    is_narrow = lora and rounding is None  # base weights that autocast copies nothing of
    copies = 0.0 if is_narrow or fp8 or not autocast else student.linear * compute / share

    head_trained = not lora
    columns = columns if soft else student.vocabulary
    head_gradient = student.head * weight if head_trained else 0.0
    if teacher.workspace is not None:
        workspace = teacher.workspace
    else:
        workspace = _workspace(plan, tokens, columns, int(head_gradient), models)
    if teacher.wide_head_gradient and autocast:
        # the sum over chunks is in fp32 until the last one is added
        head_gradient *= 4 / weight
    if autocast:
        workspace += student.head * compute
    teacher_weights = teacher.held(world, sharded=teacher_sharded)
    rollouts = _rollout_cache(plan, student, compute)
    tasks = _task_cache(plan, student, compute)
    own = recipe.data.active_on_policy
    answering = student.parameters * weight if own is not None and sharded else 0.0
    held = teacher_weights + weights + states + layers.projections + buckets + rollouts + tasks + answering
    accumulated = gradients if accumulation > 1 else 0.0
    # Three moments. In the loss: all activations, the workspace and dW, no gradient of a layer yet. At the start of the
    # backward: dW and the first layer's gradients beside all activations. At its end: all gradients and one layer.
    forward = held + accumulated + copies + activations
    in_loss = forward + workspace + head_gradient + stream
    start = forward + head_gradient + 2 * stream + inside + again + gathered
    # a tied weight gets two dense gradients, of the head and of the embedding, before autograd adds them
    dense = 2 * head_gradient if student.tied else head_gradient
    end = held + gradients + one_layer + inside + (dense if accumulation > 1 or student.tied else 0.0) + gathered
    parts = {
        "teacher": teacher_weights,
        "student": weights,
        "gradients": gradients,
        "optimizer states": states,
        "activations": activations + again,
        "weight copies": copies,
        "loss workspace": workspace,
        "head gradient": head_gradient,
        "optimizer temporary": temporary,
    }
    if buckets:
        parts["gradient buckets"] = buckets
    if gathered:
        parts["gathered weights"] = gathered
    if rollouts:
        parts["cache of rollouts"] = rollouts
    if tasks:
        parts["cache of tasks"] = tasks
    if answering:
        parts["copy that generates rollouts"] = answering
    if layers.states:
        parts["states of layers"] = layers.states
        parts["activations"] -= layers.states
    if layers.projections:
        parts["layer projections"] = layers.projections
    moments = {"loss": in_loss, "backward": max(start, end), "optimizer": held + gradients + temporary}
    if recipe.eval.batch_size is not None:
        # no backward: the activations of one layer, beside what goes into the loss; neither gradients nor dW
        evaluated = recipe.eval.batch_size * recipe.data.max_length
        passing = (one_layer + 2 * stream) / tokens + teacher.token_bytes * soft
        logits = teacher.workspace or _workspace(plan, evaluated, columns, 0, models)
        moments["evaluation"] = held + copies + evaluated * passing + logits
    if teacher.loading:
        moments[LOADING] = teacher.loading
    return Memory(parts, moments, logits_avoided=float(models) * tokens * columns * 4, shared=shared)


def _rollout_cache(plan: DevicePlan, student: ModelSizes, compute: int) -> float:
    """Return the bytes of the KV cache of on-policy rollouts, which is kept for the last two batch sizes."""
    section = plan.recipe.data.active_on_policy
    length = plan.recipe.data.max_length
    if section is None or section.engine != "distill":
        return 0.0
    if plan.longest:
        length = min(length, plan.longest + section.max_new_tokens)
    return (
        1.5
        * section.batch_size
        * (section.max_staleness + 1)
        * length
        * 2
        * student.layers
        * student.key_value
        * compute
    )


def _task_cache(plan: DevicePlan, student: ModelSizes, compute: int) -> float:
    """Return the bytes of the KV cache in which a student that is not sharded answers the longest of its tasks."""
    tasks = [task for task in plan.recipe.eval.tasks if task.is_generated]
    if not tasks:
        return 0.0
    length = plan.recipe.data.max_length + max(task.max_new_tokens for task in tasks)
    sequences = plan.recipe.eval.batch_size or BATCH
    return 2.0 * sequences * length * student.layers * student.key_value * compute


def _workspace(plan: DevicePlan, rows: int, columns: int, head_gradient: int, models: int) -> float:
    precision = plan.precision
    narrow = precision.student != torch.float32
    logit = 4 if precision.compute == torch.float32 else 2
    chunks = plan_chunks(
        rows,
        columns,
        logit_bytes=logit,
        models=models,
        weight_bytes=head_gradient,
        memory_bytes=plan.device.memory_bytes,
        weight_16_bit=narrow,
    )
    # rows of the buffer are padded to 64 columns, so that each begins at 128 bytes
    width = -(-columns // 64) * 64
    numbers = models * 2 * chunks.chunk_rows * -(-columns // TILE) * 4
    extra = 0 if head_gradient else chunks.extra_rows  # these rows lie where dW comes to lie
    return float((chunks.buffer_rows + extra) * width * logit + numbers)
