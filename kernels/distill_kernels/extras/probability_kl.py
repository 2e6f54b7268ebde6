"""Kullback-Leibler divergence between given probabilities, as torch.nn.functional.kl_div takes them.

With x the input (log-probabilities) and t the target, element by element:

    target probabilities       l = t (log t - x), 0 where t = 0;   dx = -g t,     dt = g (log t + 1 - x)
    target log-probabilities   l = e^t (t - x);                    dx = -g e^t,   dt = g e^t (t - x + 1)

A reduction sums in fp32, each program its part, in a fixed order. For M elements of b bytes, reduced forward reads
2 M b bytes, backward reads M b and writes M b (where only the input needs a gradient).
"""

from __future__ import annotations

from typing import Literal

import torch

from distill_kernels.kernel_op import KernelOp, check_floats, forbid_double_backward
from distill_kernels.launch import cdiv, device_facts, launch, runs_on_triton, tl, triton
from distill_kernels.layers.column_sums import column_sums
from distill_kernels.layers.fast_math import log

Reduction = Literal["none", "sum", "mean", "batchmean"]
_REDUCTIONS = ("none", "sum", "mean", "batchmean")
# fastest in a sweep on an H200
BLOCK = 2048
WARPS = 8
PROGRAMS = 8


def reference_kl_probabilities(
    input: torch.Tensor, target: torch.Tensor, reduction: Reduction = "mean", log_target: bool = False
) -> torch.Tensor:
    """Return `torch.nn.functional.kl_div` with arithmetic in fp32 (fp64 stays fp64): the specification."""
    dtype = torch.promote_types(input.dtype, target.dtype)
    accumulate_dtype = torch.promote_types(dtype, torch.float32)
    loss = torch.nn.functional.kl_div(
        input.to(accumulate_dtype), target.to(accumulate_dtype), reduction="none", log_target=log_target
    )
    if reduction != "none":
        loss = loss.mean() if reduction == "mean" else loss.sum() * _scale(input.shape, reduction)
    return loss.to(dtype)


@triton.jit
def _pointwise(x, target, LOG_TARGET: tl.constexpr):
    if LOG_TARGET:
        return tl.exp(target) * (target - x)
    # 0 log 0 is NaN by arithmetic, and 0 by definition.
    return tl.where(target == 0, 0.0, target * (log(target) - x))


@triton.jit
def _forward_kernel(
    x_ptr, target_ptr, out_ptr, n, scale, LOG_TARGET: tl.constexpr, REDUCE: tl.constexpr, BLOCK: tl.constexpr
):
    # out: the loss of each element, or one partial sum a program
    total = tl.zeros([BLOCK], tl.float32)
    # int64: the tensor may have more than 2^31 elements. Where it reduces, few programs stride over all of it, each
    # always over the same blocks, so that sums are the same every time.
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(first, n, step):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < n
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        target = tl.load(target_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        loss = _pointwise(x, target, LOG_TARGET)
        if REDUCE:
            # A lane keeps its own sum through all blocks: one reduction at the end. Elements past the end add nothing.
            total += tl.where(mask, loss, 0.0)
        else:
            tl.store(out_ptr + offsets, loss.to(out_ptr.dtype.element_ty), mask=mask)
    if REDUCE:
        # Scaled in fp32, before a sum of many elements is rounded to the result's dtype.
        tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0) * scale)


@triton.jit
def _backward_kernel(
    grad_ptr,
    x_ptr,
    target_ptr,
    dx_ptr,
    dtarget_ptr,
    n,
    scale,
    LOG_TARGET: tl.constexpr,
    REDUCE: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DTARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    target = tl.load(target_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if REDUCE:
        # One upstream number, read on the device by every program: the host waits for nothing.
        grad = tl.load(grad_ptr).to(tl.float32) * scale
    else:
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    probability = tl.exp(target) if LOG_TARGET else target
    if NEED_DX:
        tl.store(dx_ptr + offsets, (-grad * probability).to(dx_ptr.dtype.element_ty), mask=mask)
    # Only the target's gradient needs the input: without it this load is compiled away.
    if NEED_DTARGET:
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if LOG_TARGET:
            slope = probability * (target - x + 1.0)
        else:
            # The element's loss is 0 there by definition; the logarithm would make it -inf.
            slope = tl.where(target == 0, 0.0, log(target) + 1.0 - x)
        tl.store(dtarget_ptr + offsets, (grad * slope).to(dtarget_ptr.dtype.element_ty), mask=mask)


def _scale(shape: torch.Size, reduction: str) -> float:
    if reduction == "mean":
        return 1.0 / max(shape.numel(), 1)
    return 1.0 / max(shape[0], 1) if reduction == "batchmean" else 1.0


def _new_output(x, target, reduction, log_target) -> torch.Tensor:
    dtype = torch.promote_types(x.dtype, target.dtype)
    return x.new_empty(x.shape if reduction == "none" else (), dtype=dtype)


def _launch_forward(x: torch.Tensor, target: torch.Tensor, reduction: str, log_target: bool) -> torch.Tensor:
    out = _new_output(x, target, reduction, log_target)
    x = x.contiguous()
    target = target.contiguous()
    count = x.numel()
    reduces = reduction != "none"
    if not count:
        return out.fill_(float("nan") if reduction == "mean" else 0.0)
    programs = cdiv(count, BLOCK)
    written = out
    if reduces:
        programs = min(programs, device_facts(x.device).multiprocessors * PROGRAMS)
        written = torch.empty((programs, 1), dtype=torch.float32, device=x.device)
    launch(
        _forward_kernel,
        (programs,),
        x,
        target,
        written,
        count,
        _scale(x.shape, reduction),
        LOG_TARGET=log_target,
        REDUCE=reduces,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    if reduces:
        column_sums(written, out.view(1))
    return out


def _new_gradients(grad, x, target, reduction, log_target, need_dx, need_dtarget) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape if need_dx else 0), target.new_empty(x.shape if need_dtarget else 0)


def _launch_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    reduction: str,
    log_target: bool,
    need_dx: bool,
    need_dtarget: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    # returns dx and dtarget, each empty where not needed
    dx, dtarget = _new_gradients(grad, x, target, reduction, log_target, need_dx, need_dtarget)
    x = x.contiguous()
    target = target.contiguous()
    if x.numel():
        launch(
            _backward_kernel,
            (cdiv(x.numel(), BLOCK),),
            grad.contiguous(),
            x,
            target,
            dx,
            dtarget,
            x.numel(),
            _scale(x.shape, reduction),
            LOG_TARGET=log_target,
            REDUCE=reduction != "none",
            NEED_DX=need_dx,
            NEED_DTARGET=need_dtarget,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return dx, dtarget


_backward_op = KernelOp("kl_probabilities_backward", _launch_backward, _new_gradients)


def _setup_context(ctx, inputs, output) -> None:
    x, target, ctx.reduction, ctx.log_target = inputs
    ctx.save_for_backward(x, target)


def _backward(ctx, grad):
    x, target = ctx.saved_tensors
    need_dx, need_dtarget = ctx.needs_input_grad[:2]
    dx, dtarget = _backward_op(grad, x, target, ctx.reduction, ctx.log_target, need_dx, need_dtarget)
    return dx if need_dx else None, dtarget if need_dtarget else None, None, None


def _check(input: torch.Tensor, target: torch.Tensor, reduction: str, log_target: bool) -> None:
    check_floats(input=input, target=target)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction: expected one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
    if target.shape != input.shape:
        raise ValueError(f"target: expected input's shape {tuple(input.shape)}, got {tuple(target.shape)}")
    if reduction == "batchmean" and input.dim() == 0:
        raise ValueError("reduction: expected another than 'batchmean' for a scalar input")


_forward_op = KernelOp(
    "kl_probabilities_forward",
    _launch_forward,
    _new_output,
    setup_context=_setup_context,
    backward=_backward,
    check=_check,
)


def kl_probabilities(
    input: torch.Tensor, target: torch.Tensor, reduction: Reduction = "mean", log_target: bool = False
) -> torch.Tensor:
    """Compute KL(target || input) of given probabilities, as `torch.nn.functional.kl_div`; sums are kept in fp32.

    For logits, use `kl_div`, which normalises them itself.

    Args:
        input: Log-probabilities, any shape; fp32, bf16 or fp16.
        target: The same shape; probabilities, or log-probabilities with `log_target`.
        reduction: "none", "sum", "mean" (over all elements) or "batchmean" (over the first dimension: the divergence).
        log_target: True if `target` holds logarithms.

    Returns:
        The loss in the promoted dtype: a scalar, or of the input's shape for "none".

    Raises:
        ValueError: On an unknown reduction, shapes that differ or an unsupported dtype.
    """
    if not runs_on_triton(input):
        _check(input, target, reduction, log_target)
        return forbid_double_backward(reference_kl_probabilities(input, target, reduction, log_target))
    return _forward_op(input, target, reduction, log_target)
