"""A frozen linear layer with a low-rank adapter (LoRA, Hu et al., 2021): y = x W^T + bias + s (x A^T) B^T.

    z = x A^T,   y = x W^T + bias,   y += s z B^T                    the last in place, in the product's own epilogue
    dz = s g B,  dx = g W,  dx += dz A,  dA = dz^T x,  dB = s g^T z      with g = dL/dy; W and bias get no gradient

For N tokens, I inputs, O outputs, rank r << I, O and 2-byte numbers, what the adapter moves beside the bare layer is,
in bytes: forward 2 N I (z) + 4 N O (the addition); backward 2 N O (dz) + 4 N I (the addition) + 2 N I (dA) + 2 N O
(dB). Kept for the backward: x as it came, shared with every other layer that keeps it, and z. PEFT's own layer, with
float32 adapters under autocast, casts x to float32 and back and keeps that copy (2 N I bytes a layer, three times the
same for q, k and v), and multiplies and adds in kernels of their own: 12 N I + 12 N O forward.

Where x is cheap to compute, as from gate and up in an MLP, `lora_linear_recomputed` keeps x's own inputs, which are
kept anyway, and recomputes x for dA: 2 N I bytes less for one more memory-bound kernel.

Products are the BLAS library's; dA and dB are accumulated and returned in float32 where the adapters are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from distill_kernels.kernel_op import check_tensors
from distill_kernels.losses.projection import matmul_fp32
from distill_kernels.operands import differentiable_once, non_view_output


def reference_lora_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the adapted linear layer in plain PyTorch: the specification."""
    return F.linear(x, weight, bias) + scale * F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype))


def _forward(x: Any, weight: Any, bias: Any, a: Any, b: Any, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and z."""
    with torch.autocast(x.device.type, enabled=False):
        rows = x.reshape(-1, x.shape[-1])
        low = F.linear(rows, a.to(x.dtype))
        out = F.linear(rows, weight, bias)
        out.addmm_(low, b.to(x.dtype).t(), alpha=scale)
    return out.view(*x.shape[:-1], weight.shape[0]), low


def _backward(
    g: torch.Tensor, x: Any, weight: Any, a: Any, b: Any, low: Any, scale: float, required: tuple[bool, bool, bool]
) -> tuple[Any, Any, Any]:
    """Return dx, dA and dB; None for those not `required`."""
    rows = x.reshape(-1, x.shape[-1])
    g = g.reshape(-1, g.shape[-1])
    d_low = (g @ b.to(g.dtype)).mul_(scale)
    dx = da = db = None
    if required[0]:
        dx = (g @ weight).addmm_(d_low, a.to(g.dtype)).view(x.shape)
    if required[1]:
        da = _matmul_accumulated(d_low.t(), rows, a.dtype)
    if required[2]:
        db = _matmul_accumulated(g.t(), low, b.dtype).mul_(scale)
    return dx, da, db


class _LoraLinear(torch.autograd.Function):
    """LoRA layer whose input is one tensor, or a function of several that is recomputed in the backward.

    A function and no op: its products are PyTorch's, and `function` is Python.
    """

    @staticmethod
    def forward(ctx: Any, function: Any, weight: Any, bias: Any, a: Any, b: Any, scale: float, *parts: Any) -> Any:
        x = parts[0] if function is None else function(*parts)
        out, low = _forward(x, weight, bias, a, b, scale)
        ctx.save_for_backward(weight, a, b, low, *parts)
        ctx.function = function
        ctx.scale = scale
        return non_view_output(out)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        need = ctx.needs_input_grad
        (weight, a, b, low, *parts) = ctx.saved_tensors
        if ctx.function is None:
            dx, da, db = _backward(upstream, parts[0], weight, a, b, low, ctx.scale, (need[6], need[3], need[4]))
            return None, None, None, da, db, None, dx
        with torch.enable_grad():  # of what they were made by, which may have places for their gradients
            leaves = [part if part.requires_grad else part.detach().requires_grad_() for part in parts]
            x = ctx.function(*leaves)
        dx, da, db = _backward(upstream, x.detach(), weight, a, b, low, ctx.scale, (True, need[3], need[4]))
        return None, None, None, da, db, None, *torch.autograd.grad(x, leaves, dx)


def _matmul_accumulated(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`left right` accumulated in float32 (float64 for float64), in `dtype`."""
    if left.dtype == torch.float64:
        return left @ right
    out = torch.empty(left.shape[0], right.shape[1], dtype=torch.float32, device=left.device)
    return matmul_fp32(left, right, out).to(dtype)


def lora_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """`x W^T + bias + scale (x A^T) B^T` with gradients for x, A and B; W and bias are frozen.

    Args:
        x: [..., I], in the dtype of `weight`.
        weight: [O, I]; no gradient is made for it.
        bias: [O] or None; the same.
        a: [r, I], any floating dtype; cast to that of `x` for the products, its gradient is in its own.
        b: [O, r], likewise.
        scale: Factor of the adapter, alpha / r.

    Returns:
        [..., O] in the dtype of `x`.

    Raises:
        ValueError: for shapes that do not fit, dtypes that differ, or a weight that requires a gradient.
    """
    _check(x, weight, bias, a, b)
    return _LoraLinear.apply(None, weight, bias, a, b, float(scale), x)


def lora_linear_recomputed(
    function: Callable[..., torch.Tensor],
    parts: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`lora_linear(function(*parts), ...)` that keeps `parts` and calls `function` again in the backward.

    Args:
        function: Function of tensors, cheap, deterministic, differentiable; for example `swiglu`.
        parts: Arguments of `function`; each gets a gradient.
        weight, bias, a, b, scale: See `lora_linear`.

    Returns:
        [..., O], in the dtype of the parts.

    Raises:
        ValueError: as `lora_linear`.
    """
    _check(parts[0], weight, bias, a, b, shape=False)
    return _LoraLinear.apply(function, weight, bias, a, b, float(scale), *parts)


def _check(x: torch.Tensor, weight: Any, bias: Any, a: Any, b: Any, shape: bool = True) -> None:
    check_tensors(x=x, weight=weight, bias=bias, a=a, b=b)
    fits = a.shape[1] == weight.shape[1] and b.shape == (weight.shape[0], a.shape[0])
    if not fits or (shape and x.shape[-1] != weight.shape[1]):
        raise ValueError(
            f"lora_linear: expected x [..., I], weight [O, I], a [r, I], b [O, r], got {list(x.shape)}, "
            f"{list(weight.shape)}, {list(a.shape)}, {list(b.shape)}"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"lora_linear: expected x in the weight's dtype {weight.dtype}, got {x.dtype}")
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        raise ValueError("lora_linear: expected a frozen weight and bias; a trained one needs an ordinary linear layer")
