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
from distill_kernels.matmul.siblings import compute_dtype
from distill_kernels.operands import differentiable_once


def reference_shared_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """The specification, in plain PyTorch."""
    return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


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
    def forward(ctx: Any, dtype: torch.dtype, biased: Sequence[int], x: torch.Tensor, *operands: torch.Tensor) -> Any:
        # cast here and not by autocast, whose cache would keep copies that were made without a graph
        count, needed = len(operands) - len(biased), ctx.needs_input_grad[2:]
        ctx.dtypes, ctx.count, ctx.biased = [x.dtype, *(t.dtype for t in operands)], count, biased
        x, cast = x.to(dtype), _cast(operands, dtype)
        biases = dict(zip(biased, cast[count:], strict=True))
        ctx.set_materialize_grads(False)
        kept = cast[:count] if needed[0] else []
        ctx.save_for_backward(x if any(needed[1 : 1 + count]) else None, *kept)
        return tuple(F.linear(x, weight, biases.get(place)) for place, weight in enumerate(cast[:count]))

    @staticmethod
    @differentiable_once
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:
        (x, *weights), needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        gradients: list[torch.Tensor | None] = [None] * len(needed)
        flat = {place: g.reshape(-1, g.shape[-1]) for place, g in enumerate(upstream) if g is not None}  # those in use
        dx = None
        for place, g in flat.items():
            if weights:
                dx = g @ weights[place] if dx is None else dx.addmm_(g, weights[place])
            if needed[1 + place]:
                gradients[1 + place] = _weight_gradient(g, x.reshape(-1, x.shape[-1]), ctx.dtypes[1 + place])
        for at, place in enumerate(ctx.biased, 1 + ctx.count):
            if needed[at] and place in flat:
                gradients[at] = flat[place].sum(0, dtype=ctx.dtypes[at])
        if dx is not None:
            shape = next(g.shape[:-1] for g in upstream if g is not None)
            gradients[0] = dx.view(*shape, -1).to(ctx.dtypes[0])
        return None, None, *gradients


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
    biased = [place for place, bias in enumerate(biases) if bias is not None]
    given = [bias for bias in biases if bias is not None]
    outputs: tuple[torch.Tensor, ...] = _SharedLinear.apply(compute_dtype(x), biased, x, *weights, *given)
    return outputs
