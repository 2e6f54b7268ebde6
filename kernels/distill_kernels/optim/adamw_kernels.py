"""The arithmetic of AdamW, over many tensors in one launch.

Loshchilov and Hutter, 2019, as `torch.optim.AdamW` computes it, per element at step t:

    g = scale * grad                      scale = min(1, max_grad_norm / (norm + 1e-6)) / loss scale, -1 x to maximise
    p = (1 - lr * weight_decay) * p
    m = beta1 * m + (1 - beta1) * g       v = beta2 * v + (1 - beta2) * g^2
    p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

All arithmetic is fp32. With bf16 parameters, gradients and states a step reads 8 and writes 6 bytes an element, and
2 more are read where the gradients' norm is wanted. Nothing waits for the host: the step number, the norm, the
clipping factor and the finite check stay on the device. One launch does all: who finishes a tensor last counts its
step and leaves the bias corrections of the next one (fp64, slow on some GPUs) where its programs will find them. Where
the programs are so many that the host is ahead of the GPU anyway, a second launch counts: a hundred thousand programs
that count themselves in at one address took 5 % of a step.

Symbols: `bucket` holds tensors that share a launch (multi_tensor.py), `group` is the optimizer's parameter group.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from distill_kernels.launch import tl, triton
from distill_kernels.optim.multi_tensor import TRITON_DTYPES, Bucket, Member, local
from distill_kernels.optim.stochastic_rounding import (
    PHILOX_ROUNDS,
    other16,
    random16,
    reference_other16,
    reference_random16,
    reference_stochastic_round,
    stochastic_round,
)

WARPS = 8
OWN_COUNT_PROGRAMS = 16_384
"""Programs from which a second launch counts steps: they take the GPU 0.1 ms or more, several launches long."""


class UpdateOptions(NamedTuple):
    """Options of `FusedAdamW`; its docstring explains each."""

    state_dtype: torch.dtype | None
    stochastic_rounding: bool
    master_weights: bool
    max_grad_norm: float | None
    skip_nonfinite: bool
    seed: int


class StepControls(NamedTuple):
    """Scalars on the device that decide how, and whether, this step is taken."""

    squares: torch.Tensor | None  # sum of all squared gradients, where clipping or checking
    grad_scale: torch.Tensor | None  # what the loss was multiplied by (torch.amp.GradScaler)
    found_inf: torch.Tensor | None  # not 0: skip (torch.amp.GradScaler)


def reference_adamw(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: torch.Tensor,
    *,
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One AdamW update in the dtype of `parameter`; returns the new parameter and both moments, changes nothing.

    `step` counts this update in: 1 at the first.
    """
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * gradient
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * gradient.square()
    step = step.double()
    step_size = lr / (1 - beta1**step)
    deviation = exp_avg_sq.sqrt() / (1 - beta2**step).sqrt() + eps
    parameter = (1 - lr * weight_decay) * parameter - step_size.to(parameter.dtype) * exp_avg / deviation
    return parameter.to(exp_avg.dtype), exp_avg, exp_avg_sq


@triton.jit(noinline=True)  # in line, its fp64 costs the update eight registers, and with them a block of occupancy
def bias_correction(step, log2_beta):
    """1 - beta^step in fp32, by way of fp64: at beta2 = 0.999 the difference of two numbers near 1."""
    return (1.0 - tl.exp2(step.to(tl.float64) * log2_beta)).to(tl.float32)


@triton.jit
def count_step(row_ptr, log2_betas):
    """Count a step of one tensor, and leave the bias corrections of the next; `row_ptr`: its row of `Bucket.rows`."""
    log2_beta1, log2_beta2 = log2_betas
    step = tl.load(row_ptr) + 1.0
    tl.store(row_ptr, step)
    tl.store(row_ptr + 1, step + 1.0)
    tl.store(row_ptr + 2, log2_beta1)
    tl.store(row_ptr + 3, log2_beta2)
    tl.store(row_ptr + 4, bias_correction(step + 1.0, log2_beta1))
    tl.store(row_ptr + 5, 1.0 / tl.sqrt(bias_correction(step + 1.0, log2_beta2)))


@triton.jit
def skip_step(squares_ptr, found_inf_ptr, HAS_FOUND_INF: tl.constexpr, SKIP: tl.constexpr):
    """Return a value that is not 0 where this step is skipped."""
    skip = 0.0
    if HAS_FOUND_INF:
        skip += tl.load(found_inf_ptr)
    if SKIP:
        skip = tl.where(tl.abs(tl.load(squares_ptr)) < float("inf"), skip, 1.0)
    return skip


@triton.jit(do_not_specialize=["squares_ptr", "found_inf_ptr"])
def count_kernel(rows_ptr, squares_ptr, found_inf_ptr, log2_betas, HAS_FOUND_INF: tl.constexpr, SKIP: tl.constexpr):
    """`count_step` of a tensor a program, for `adamw_kernel` without COUNT."""
    if skip_step(squares_ptr, found_inf_ptr, HAS_FOUND_INF, SKIP) == 0.0:
        count_step(rows_ptr + tl.program_id(0) * 8, log2_betas)


@triton.jit(do_not_specialize=["seed", "squares_ptr", "lr_ptr", "grad_scale_ptr", "found_inf_ptr"])
def adamw_kernel(
    table_ptr,
    gradients_ptr,
    blocks_ptr,
    rows_ptr,
    squares_ptr,
    lr_ptr,
    grad_scale_ptr,
    found_inf_ptr,
    lr,
    log2_betas,
    betas,
    rests,
    eps,
    weight_decay,
    max_norm,
    sign,
    seed,
    LR_ON_DEVICE: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr,
    CLIP: tl.constexpr,
    SKIP: tl.constexpr,
    COUNT: tl.constexpr,
    PARAMETER: tl.constexpr,
    GRADIENT: tl.constexpr,
    STATE: tl.constexpr,
    MASTER: tl.constexpr,
    ALIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update BLOCK elements of one tensor, in place; if COUNT, a tensor's last program to finish counts its step.

    table, gradients, blocks and rows are `multi_tensor.Bucket`'s; the other pointers lead to fp32 scalars (lr's to one
    of its own dtype), read where a constant says that they are there: squares, the sum of all gradients', by CLIP or
    SKIP. betas, and of each its log2 and 1 - beta (made on the host, in fp64).
    """
    log2_beta1, log2_beta2 = log2_betas
    beta1, beta2 = betas
    rest1, rest2 = rests
    # Which tensor, and which of its blocks: element numbers are int64, of tensors beyond 2^31 elements.
    tensor = tl.load(blocks_ptr + 2 * tl.program_id(0))
    first = tl.load(blocks_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK
    row_ptr = rows_ptr + tensor * 8
    step = tl.load(row_ptr) + 1.0
    # What the last launch left is for this step only if it was taken with these betas (a state may have been loaded).
    known = (tl.load(row_ptr + 1) == step) & (tl.load(row_ptr + 2) == log2_beta1) & (tl.load(row_ptr + 3) == log2_beta2)
    correction1 = tl.load(row_ptr + 4)
    correction2 = tl.load(row_ptr + 5)
    parameter_ptr = tl.load(table_ptr + tensor * 8).to(tl.pointer_type(PARAMETER))
    exp_avg_ptr = tl.load(table_ptr + tensor * 8 + 1).to(tl.pointer_type(STATE))
    exp_avg_sq_ptr = tl.load(table_ptr + tensor * 8 + 2).to(tl.pointer_type(STATE))
    size = tl.load(table_ptr + tensor * 8 + 4)
    gradient_ptr = tl.load(gradients_ptr + tensor).to(tl.pointer_type(GRADIENT))
    source_ptr = parameter_ptr
    if MASTER:
        source_ptr = tl.load(table_ptr + tensor * 8 + 3).to(tl.pointer_type(tl.float32))
    # Addresses from a table tell the compiler nothing: without this every access would be of one element.
    if ALIGNED:
        size = tl.multiple_of(size, 16)
        parameter_ptr = tl.multiple_of(parameter_ptr, 16)
        gradient_ptr = tl.multiple_of(gradient_ptr, 16)
        exp_avg_ptr = tl.multiple_of(exp_avg_ptr, 16)
        exp_avg_sq_ptr = tl.multiple_of(exp_avg_sq_ptr, 16)
        source_ptr = tl.multiple_of(source_ptr, 16)

    if LR_ON_DEVICE:
        lr = tl.load(lr_ptr).to(tl.float32)
    scale = sign * 1.0
    if HAS_GRAD_SCALE:
        scale = scale / tl.load(grad_scale_ptr)
    if CLIP:
        factor = max_norm / (tl.sqrt(tl.load(squares_ptr)) * tl.abs(scale) + 1e-6)
        scale = scale * tl.where(factor > 1.0, 1.0, factor)  # a factor of NaN stays NaN

    if skip_step(squares_ptr, found_inf_ptr, HAS_FOUND_INF, SKIP) == 0.0:
        if not known:
            correction1 = bias_correction(step, log2_beta1)
            correction2 = 1.0 / tl.sqrt(bias_correction(step, log2_beta2))
        step_size = lr / correction1
        decay = 1.0 - lr * weight_decay
        offsets = tl.arange(0, BLOCK)
        mask = offsets < size - first
        offsets = first + offsets

        gradient = tl.load(gradient_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
        p = tl.load(source_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(exp_avg_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(exp_avg_sq_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        m = beta1 * m + rest1 * gradient
        v = beta2 * v + rest2 * gradient * gradient
        p = p * decay - step_size * m / (tl.sqrt(v) * correction2 + eps)

        if MASTER:
            tl.store(source_ptr + offsets, p, mask=mask)
        # Rounded once, on the way out. Random bits depend on the seed, the tensor's number, its step and the element,
        # not on how tensors share launches.
        p_stored = p.to(PARAMETER)
        v_stored = v.to(STATE)
        if STOCHASTIC:
            number = tl.load(table_ptr + tensor * 8 + 5).to(tl.int32)
            random = random16(seed, number, step.to(tl.int32), first, BLOCK, ROUNDS)
            if tl.bfloat16 == PARAMETER and not MASTER:
                p_stored = stochastic_round(p, random)
            if tl.bfloat16 == STATE:
                v_stored = stochastic_round(v, other16(random))
        tl.store(parameter_ptr + offsets, p_stored, mask=mask)
        tl.store(exp_avg_ptr + offsets, m.to(STATE), mask=mask)
        tl.store(exp_avg_sq_ptr + offsets, v_stored, mask=mask)

        if COUNT:
            tl.debug_barrier()  # all warps of this program have read the row, or they would not be here
            # addresses anew, rather than in registers from the start
            tensor = tl.load(blocks_ptr + 2 * tl.program_id(0))
            row_ptr = rows_ptr + tensor * 8
            finished_ptr = (row_ptr + 6).to(tl.pointer_type(tl.int32))
            programs = tl.load(table_ptr + tensor * 8 + 6)
            if tl.atomic_add(finished_ptr, 1, sem="relaxed") == programs - 1:  # so have all other programs
                tl.store(finished_ptr, 0)
                count_step(row_ptr, log2_betas)


def update(bucket: Bucket, group: dict[str, Any], options: UpdateOptions, controls: StepControls) -> None:
    """One step for the members of `bucket`, in place, by one launch, or two where programs are many.

    Args:
        bucket: the members and their tables.
        group: the parameter group's learning rate, betas, epsilon, weight decay and `maximize`.
        options: options of the optimizer.
        controls: device scalars of this step.
    """
    lr = group["lr"]
    beta1, beta2 = group["betas"]
    device_lr = lr if isinstance(lr, torch.Tensor) and lr.device == bucket.key.device else None
    tensors = [bucket.table, bucket.gradients, bucket.blocks, bucket.rows]
    dtypes = []
    for signal in (controls.squares, device_lr, controls.grad_scale, controls.found_inf):
        tensors.append(bucket.rows if signal is None else signal.to(bucket.key.device))
        dtypes.append(None if signal is None else signal.dtype)
    specialization = (options, *dtypes)
    constants = bucket.constants.get(specialization)
    if constants is None:
        constants = bucket.constants[specialization] = _constants(
            bucket, options, [dtype is not None for dtype in dtypes]
        )
    logarithms = (math.log2(beta1) if beta1 > 0 else -1e4, math.log2(beta2) if beta2 > 0 else -1e4)
    numbers = (
        float(lr) if device_lr is None else 0.0,
        logarithms,
        (float(beta1), float(beta2)),
        (1.0 - beta1, 1.0 - beta2),
        float(group["eps"]),
        float(group["weight_decay"]),
        float(options.max_grad_norm or 0.0),
        -1.0 if group["maximize"] else 1.0,
        options.seed,
    )
    bucket.update(adamw_kernel, len(bucket.blocks), specialization, tensors, numbers + constants, num_warps=WARPS)
    if counts_in_own_launch(bucket):
        flags = (controls.found_inf is not None, options.skip_nonfinite)
        seen = [tensors[place] for place in (3, 4, 7)]
        bucket.count(count_kernel, len(bucket.members), specialization, seen, (logarithms, *flags), num_warps=1)


def counts_in_own_launch(bucket: Bucket) -> bool:
    """Return whether a separate launch counts the steps of `bucket`."""
    return len(bucket.blocks) >= OWN_COUNT_PROGRAMS


def _constants(bucket: Bucket, options: UpdateOptions, given: list[bool]) -> tuple[Any, ...]:
    """Return the constants of `adamw_kernel` in order; `given`: which controls and learning rate are on the device."""
    key = bucket.key
    rounds = key.state == torch.bfloat16 or (key.parameter == torch.bfloat16 and not key.has_master)
    return (
        *given[1:],
        options.max_grad_norm is not None,
        options.skip_nonfinite,
        not counts_in_own_launch(bucket),
        TRITON_DTYPES[key.parameter],
        TRITON_DTYPES[key.gradient],
        TRITON_DTYPES[key.state],
        key.has_master,
        key.aligned,
        options.stochastic_rounding and rounds,
        PHILOX_ROUNDS,
        bucket.block,
    )


@torch.no_grad()
def update_by_reference(bucket: Bucket, group: dict[str, Any], options: UpdateOptions, controls: StepControls) -> None:
    """One step for the members of `bucket`, in place, in PyTorch."""
    device = bucket.key.device
    scale = torch.tensor(-1.0 if group["maximize"] else 1.0, device=device)
    proceed = torch.tensor(True, device=device)
    if controls.grad_scale is not None:
        scale = scale / controls.grad_scale.to(device)
    if controls.found_inf is not None:
        proceed = proceed & (controls.found_inf.to(device) == 0)
    if controls.squares is not None:
        squares = controls.squares.to(device)
        if options.max_grad_norm is not None:
            scale = scale * (options.max_grad_norm / (squares.sqrt() * scale.abs() + 1e-6)).clamp(max=1.0)
        if options.skip_nonfinite:
            proceed = proceed & squares.isfinite()
    bucket.rows[:, 0] += proceed
    for member in bucket.members:
        _update_member(member, group, options, scale, proceed)


def _update_member(
    member: Member, group: dict[str, Any], options: UpdateOptions, scale: torch.Tensor, proceed: torch.Tensor
) -> None:
    parameter = local(member.owner)
    m = member.tensor("exp_avg")
    v = member.tensor("exp_avg_sq")
    master = member.tensor("master") if "master" in member.state else None
    compute = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    results = reference_adamw(
        (parameter if master is None else master).to(compute),
        member.gradient().to(compute) * scale.to(compute),
        m.to(compute),
        v.to(compute),
        member.state["step"],
        **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")},
    )
    targets = [parameter, m, v] if master is None else [parameter, m, v, master]
    outputs = [*results, results[0]]
    if options.stochastic_rounding and parameter.numel():
        step = int(member.state["step"])
        random = reference_random16(options.seed, member.number, step, parameter.numel())
        random = random.view(parameter.shape).to(parameter.device)
        if parameter.dtype == torch.bfloat16 and master is None:
            outputs[0] = reference_stochastic_round(outputs[0], random)
        if v.dtype == torch.bfloat16:
            outputs[2] = reference_stochastic_round(outputs[2], reference_other16(random))
    for target, output in zip(targets, outputs, strict=False):
        target.copy_(torch.where(proceed, output.to(target.dtype), target))
