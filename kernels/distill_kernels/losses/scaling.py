"""Scales of gradients made in the forward pass: the upstream gradient in place, without a host sync, and fp16's range.

The upstream gradient of a loss is most often 1. Only the device knows, so the kernel looks and returns at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distill_kernels.launch import cdiv, runs_on_triton, tl, triton

BLOCK = 8192
SECOND_BACKWARD = (
    "the fused loss was already differentiated: its gradients are made once, in the forward pass; call the loss again"
)


@triton.jit
def _scale_kernel(gradient_ptr, factor_ptr, elements, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor == 1.0:
        return
    for block in range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        gradient = tl.load(gradient_ptr + at, mask=at < elements).to(tl.float32)
        tl.store(gradient_ptr + at, (gradient * factor).to(gradient_ptr.dtype.element_ty), mask=at < elements)


def scale_gradient_(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """`gradient *= factor`, arithmetic in fp32 (fp64 for fp64), `factor` of one element; returns `gradient`."""
    if runs_on_triton(gradient) and gradient.dtype != torch.float64 and gradient.is_contiguous():
        programs = min(cdiv(gradient.numel(), BLOCK), 1024)
        if programs:
            _scale_kernel[(programs,)](gradient, factor, gradient.numel(), BLOCK=BLOCK, num_warps=8)
        return gradient
    return gradient.mul_(factor)


def hand_out(ctx: Any, upstream: torch.Tensor) -> Sequence[torch.Tensor | None]:
    """`ctx.gradients`, made in the forward pass, times the upstream gradient, in place.

    No second reference to them is left, so that autograd takes them instead of copies.

    Raises:
        RuntimeError: The second time.
    """
    if ctx.gradients is None:
        raise RuntimeError(SECOND_BACKWARD)
    gradients: Sequence[torch.Tensor | None] = ctx.gradients
    ctx.gradients = None
    for gradient in gradients:
        if gradient is not None:
            scale_gradient_(gradient, upstream)
    return gradients


def power_of_two(row_scale: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """For fp16, whose small numbers vanish: `row_scale` raised by a power of two to about 1, and the way back.

    A gradient scaler raises the loss only after the gradient was made and rounded.
    """
    if dtype != torch.float16 or not row_scale.numel():
        return row_scale, None
    exponent = torch.log2(row_scale.abs().max().clamp_min(torch.finfo(torch.float32).tiny)).ceil()
    return row_scale * torch.exp2(-exponent), torch.exp2(exponent)
