"""Linear layers that read the same activations (q, k and v; gate and up), as one node of autograd.

    y_i = x W_i^T + b_i        dx = sum_i g_i W_i        dW_i = g_i^T x        db_i = sum over rows of g_i

with g_i = dL/dy_i. The sum over i is taken inside the products, in their fp32 accumulators: of k layers k - 1
elementwise additions fall away (3 N I numbers moved each, N rows of I inputs), and as many roundings. Under autocast x
is cast and kept once, where each layer casts and keeps its own copy otherwise, all weights are cast in one kernel, and
the products g^T x write the gradients of fp32 weights in fp32. Outputs have the bits of `F.linear`. Products are the
BLAS library's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from distill_kernels.kernel_op import check_tensors
from distill_kernels.losses.projection import product_fp32
from distill_kernels.operands import differentiable_once


def reference_shared_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """The specification, in plain PyTorch."""
    return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that a linear layer computes in: autocast's where it is on and casts `x`, else that of `x`."""
    kind = x.device.type
    casts = x.dtype != torch.float64 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if casts else x.dtype


def _cast(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """`tensors` in `dtype`; those of another one are copied in one kernel."""
    others = [tensor for tensor in tensors if tensor.dtype != dtype]
    if not others:
        return list(tensors)
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in others]
    torch._foreach_copy_(copies, others)
    made = iter(copies)
    return [tensor if tensor.dtype == dtype else next(made) for tensor in tensors]


def _weight_gradient(g: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[O, I], not rounded on its way to `dtype` where that is wider."""
    if dtype != torch.float32 or g.dtype == dtype:
        return (g.t() @ rows).to(dtype)
    return product_fp32(g.t(), rows, torch.empty(g.shape[1], rows.shape[1], dtype=dtype, device=g.device))


class _SharedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, x: torch.Tensor, *operands: torch.Tensor | None) -> Any:
        # cast here and not by autocast, whose cache would keep copies that were made without a graph
        count = len(operands) // 2
        given = [operand for operand in operands if operand is not None]
        ctx.dtypes = (x.dtype, [None if operand is None else operand.dtype for operand in operands])
        casts = iter(_cast(given, dtype))
        cast = [None if operand is None else next(casts) for operand in operands]
        narrow = x.to(dtype)
        needed = ctx.needs_input_grad
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)
        weights = cast[:count] if needed[1] else [None] * count
        ctx.save_for_backward(narrow if any(needed[2 : 2 + count]) else None, *weights)
        return tuple(F.linear(narrow, weight, bias) for weight, bias in zip(cast[:count], cast[count:], strict=True))

    @staticmethod
    @differentiable_once
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:
        x, *weights = ctx.saved_tensors
        count, (dtype, dtypes), dx = len(weights), ctx.dtypes, None
        gradients: list[torch.Tensor | None] = [None] * (2 * count)
        rows = None if x is None else x.reshape(-1, x.shape[-1])
        for place, (g, weight) in enumerate(zip(upstream, weights, strict=True)):
            if g is None:  # an output that was not used
                continue
            g = g.reshape(-1, g.shape[-1])
            if weight is not None:
                dx = g @ weight if dx is None else dx.addmm_(g, weight)
            if ctx.needs_input_grad[2 + place]:
                gradients[place] = _weight_gradient(g, rows, dtypes[place])
            if ctx.needs_input_grad[2 + count + place]:
                gradients[count + place] = g.sum(0, dtype=dtypes[count + place])
        return None, None if dx is None else dx.view(ctx.shape).to(dtype), *gradients


def shared_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """`F.linear(x, weight, bias)` of several weights, with one gradient for x; see above for what that saves.

    Args:
        x: [..., I].
        weights: Each [O_i, I]; those that ask for no gradient get none.
        biases: Each [O_i] or None, as many as weights.

    Returns:
        Each [..., O_i], in autocast's dtype where that is on, as of `F.linear`.

    Raises:
        ValueError: for shapes that do not fit.
    """
    check_tensors(x=x, **{f"weights[{i}]": w for i, w in enumerate(weights)})
    if len(weights) != len(biases) or any(w.dim() != 2 or w.shape[1] != x.shape[-1] for w in weights):
        raise ValueError(
            f"shared_linear: expected x [..., I], weights [O, I] and as many biases, got {list(x.shape)}, "
            f"{[list(w.shape) for w in weights]} and {len(biases)} biases"
        )
    outputs: tuple[torch.Tensor, ...] = _SharedLinear.apply(compute_dtype(x), x, *weights, *biases)
    return outputs
