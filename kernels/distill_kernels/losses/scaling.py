"""Scaling of gradients computed in the forward pass: by the upstream gradient, and into the range of fp16.

The upstream gradient of a loss is usually 1. To avoid a host sync the kernel itself checks, and returns at once.
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
    # read on the device: the host would have to wait for it
    if factor == 1.0:
        return
    for block in range(tl.program_id(0), tl.cdiv(elements, BLOCK), tl.num_programs(0)):
        # int64: a head's gradient may have more than 2^31 elements
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        gradient = tl.load(gradient_ptr + at, mask=at < elements).to(tl.float32)
        tl.store(gradient_ptr + at, (gradient * factor).to(gradient_ptr.dtype.element_ty), mask=at < elements)


def scale_gradient_(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Multiply `gradient` in place by `factor` (one element), in fp32 (fp64 for fp64); return `gradient`."""
    if runs_on_triton(gradient) and gradient.dtype != torch.float64 and gradient.is_contiguous():
        programs = min(cdiv(gradient.numel(), BLOCK), 1024)
        if programs:
            _scale_kernel[(programs,)](gradient, factor, gradient.numel(), BLOCK=BLOCK, num_warps=8)
        return gradient
    return gradient.mul_(factor)


def take_scaled_gradients(ctx: Any, upstream: torch.Tensor) -> Sequence[torch.Tensor | None]:
    """Return `ctx.gradients`, computed in the forward pass, times the upstream gradient, in place.

    `ctx` keeps no reference to them, so that autograd takes them without a copy.

    Raises:
        RuntimeError: On a second call.
    """
    if ctx.gradients is None:
        raise RuntimeError(SECOND_BACKWARD)
    gradients: Sequence[torch.Tensor | None] = ctx.gradients
    ctx.gradients = None
    for gradient in gradients:
        if gradient is not None:
            scale_gradient_(gradient, upstream)
    return gradients


def fp16_safe_scale(row_scale: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `row_scale` scaled by a power of two to about 1, and the inverse factor, for fp16; unchanged otherwise.

    Small gradients underflow in fp16, and a gradient scaler acts only after the gradient was computed and rounded.
    """
    if dtype != torch.float16 or not row_scale.numel():
        return row_scale, None
    # A power of two changes no digits, and the maximum stays on the device. The clamp keeps all-zero scales finite.
    exponent = torch.log2(row_scale.abs().max().clamp_min(torch.finfo(torch.float32).tiny)).ceil()
    return row_scale * torch.exp2(-exponent), torch.exp2(exponent)
