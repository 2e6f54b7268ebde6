"""Linear layers that read the same activations (q, k and v; gate and up), as one node of autograd.

    y_i = x W_i^T + b_i        dx = sum_i g_i W_i        dW_i = g_i^T x        db_i = sum over rows of g_i

with g_i = dL/dy_i. The sum over i is taken inside the products, in their fp32 accumulators: of k layers k - 1
elementwise additions fall away (3 N I numbers moved each, N rows of I inputs), and as many roundings. Under autocast x
is cast and kept once, where each layer casts and keeps its own copy otherwise, all weights are cast in one kernel, and
the products g^T x write the gradients of fp32 weights in fp32. Outputs have the bits of `F.linear`. Products are the
BLAS library's.

Weights that are adjacent in memory (`adjacent_as_one`), and biases likewise, are one weight W = [W_1; W_2; ...]: one
product gives all y_i as columns of one matrix, one gives dx and one gives dW where the g_i are adjacent as well.
Small outputs (k and v) alone do not fill a GPU. Kernels that compute the g_i can ask where to write them
 (`gradient_slots`), as the gradients of `rope` and `glu` do.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from distill_kernels.kernel_op import check_tensors
from distill_kernels.losses.projection import matmul_fp32
from distill_kernels.matmul.siblings import compute_dtype
from distill_kernels.operands import adjacent_as_one, differentiable_once
from distill_kernels.torch_internals import foreach_copy_

_NODE = "_SharedLinearBackward"
_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "TransposeBackward0")


def reference_shared_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Return each layer's output in plain PyTorch: the specification."""
    return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def _cast(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return `tensors` in `dtype`; others are cast in one kernel, and stay adjacent if they are."""
    others = [tensor for tensor in tensors if tensor.dtype != dtype]
    if not others:
        return list(tensors)
    whole = adjacent_as_one(others)
    if whole is not None:
        copies = list(whole.to(dtype).split([len(tensor) for tensor in others]))
    else:
        copies = [torch.empty_like(tensor, dtype=dtype) for tensor in others]
        foreach_copy_(copies, others)
    made = iter(copies)
    return [tensor if tensor.dtype == dtype else next(made) for tensor in tensors]


def _weight_gradient(g: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return dW [O, I] in `dtype`, without an intermediate rounding where that is wider."""
    if dtype != torch.float32 or g.dtype == dtype:
        return (g.t() @ rows).to(dtype)
    return matmul_fp32(g.t(), rows, torch.empty(g.shape[1], rows.shape[1], dtype=dtype, device=g.device))


def products(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[tuple[torch.Tensor, ...], bool]:
    """Return the outputs of all layers, and whether they are columns of one matrix (adjacent weights and biases)."""
    given = [bias for bias in biases if bias is not None]
    weight = adjacent_as_one(weights)
    bias = adjacent_as_one(given) if len(given) == len(biases) else None
    if weight is None or (bias is None and given):
        return tuple(map(functools.partial(F.linear, x), weights, biases)), False
    return F.linear(x, weight, bias).split([len(part) for part in weights], -1), True


class _SharedLinear(torch.autograd.Function):
    """A function and no op: its products are PyTorch's, and its node hands out slots for its outputs' gradients."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, biased: Sequence[int], x: torch.Tensor, *operands: torch.Tensor) -> Any:
        # cast here and not by autocast, whose cache would keep copies that were made without a graph
        count = len(operands) - len(biased)
        needed = ctx.needs_input_grad[2:]
        ctx.dtypes = [x.dtype, *(t.dtype for t in operands)]
        ctx.count = count
        ctx.biased = biased
        x = x.to(dtype)
        parts = [operands] if adjacent_as_one(operands[:count]) is None else [operands[:count], operands[count:]]
        cast = [tensor for part in parts for tensor in _cast(part, dtype)]
        weights = cast[:count]
        given = cast[count:]
        ctx.set_materialize_grads(False)
        kept = weights if needed[0] else []
        ctx.save_for_backward(x if any(needed[1 : 1 + count]) else None, *kept)
        ctx.sizes = [len(weight) for weight in weights]
        ctx.rows = x.shape[:-1].numel()
        ctx.whole = None
        ctx.claimed = False
        biases = dict(zip(biased, given, strict=True))
        outputs, ctx.joined = products(x, weights, [biases.get(place) for place in range(count)])
        return outputs

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:
        (x, *weights) = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        gradients: list[torch.Tensor | None] = [None] * len(needed)
        flat = {place: g.reshape(-1, g.shape[-1]) for place, g in enumerate(upstream) if g is not None}  # those in use
        rows = None if x is None else x.reshape(-1, x.shape[-1])
        dx = None
        whole = joined_gradient(ctx, flat)
        weight = adjacent_as_one(weights) if weights and whole is not None else None
        if whole is not None and weight is not None:
            dx = whole @ weight
        elif weights:
            for place, g in flat.items():
                dx = g @ weights[place] if dx is None else dx.addmm_(g, weights[place])
        trained = [place for place in flat if needed[1 + place]]
        if whole is not None and rows is not None and len(trained) == ctx.count:
            gradients[1 : 1 + ctx.count] = _weight_gradient(whole, rows, ctx.dtypes[1]).split(ctx.sizes)
        else:
            for place in trained:
                assert rows is not None
                gradients[1 + place] = _weight_gradient(flat[place], rows, ctx.dtypes[1 + place])
        sums = whole.sum(0, dtype=ctx.dtypes[-1]).split(ctx.sizes) if whole is not None and ctx.biased else None
        for at, place in enumerate(ctx.biased, 1 + ctx.count):
            if needed[at] and place in flat:
                gradients[at] = flat[place].sum(0, dtype=ctx.dtypes[at]) if sums is None else sums[place]
        if dx is not None:
            shape = next(g.shape[:-1] for g in upstream if g is not None)
            gradients[0] = dx.view(*shape, -1).to(ctx.dtypes[0])
        return None, None, *gradients


def joined_gradient(ctx: Any, flat: dict[int, torch.Tensor]) -> torch.Tensor | None:
    """Return all upstream gradients as one matrix; None unless they were given slots in one."""
    whole = ctx.whole
    ctx.whole = None
    if whole is None or len(flat) < ctx.count:
        return None
    for place, own in enumerate(whole.split(ctx.sizes, 1)):
        if flat[place].data_ptr() != own.data_ptr() or flat[place].stride() != own.stride():
            own.copy_(flat[place])  # or autograd has added another gradient to the one written there
    return whole


class GradientSlots:
    """Slots for the gradients of some outputs of one `shared_linear`, columns of one matrix.

    Attributes:
        sizes: O_i of these outputs.
        width: Length of a row over all outputs, the sum of all O_i.
    """

    def __init__(self, node: Any, places: Sequence[int]) -> None:
        self._node = node
        self._places = places
        self.sizes = [node.sizes[place] for place in places]
        self.width = sum(node.sizes)

    def make(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Allocate the slots, each [N, O_i] with rows `width` apart, in the dtype of `like`."""
        self._node.whole = like.new_empty(self._node.rows, self.width)
        parts = self._node.whole.split(self._node.sizes, 1)
        return [parts[place] for place in self._places]


def gradient_slots(*outputs: torch.Tensor) -> GradientSlots | None:
    """Return the gradient slots of `outputs` of one `shared_linear` with joined weights, or of reshaped views of them.

    They are returned once; None the next time, and for other tensors.
    """
    found: list[tuple[Any, int]] = []
    for output in outputs:
        node: Any = output.grad_fn
        place = output.output_nr
        while node is not None and node.name() in _VIEWS:
            node, place = node.next_functions[0]
        if node is None or node.name() != _NODE or not node.joined or node.claimed:
            return None
        found.append((node, place))
    if any(node is not found[0][0] for node, _ in found):
        return None
    found[0][0].claimed = True
    return GradientSlots(found[0][0], [place for _, place in found])


def shared_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """`F.linear(x, weight, bias)` of several weights, with one gradient for x; see above for what that saves.

    Args:
        x: Input, [..., I].
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
    dtype = compute_dtype(x)
    if not torch.is_grad_enabled():
        return products(x.to(dtype), _cast(weights, dtype), [None if b is None else b.to(dtype) for b in biases])[0]
    biased = [place for place, bias in enumerate(biases) if bias is not None]
    given = [bias for bias in biases if bias is not None]
    outputs: tuple[torch.Tensor, ...] = _SharedLinear.apply(dtype, biased, x, *weights, *given)
    return outputs
