"""LoRA students whose merged weights are those of a quantised file while they train.

    y = x Q(W + s B A)^T

The base weight's parameter holds the rounded merged weight, as that of a student without adapters holds its rounded
master weight; what PEFT adds in its forward is already in it, and its layers count as merged. Gradients of A and B are
those of the merged weight through the straight-through estimator: `dB = s dW A^T`, `dA = s B^T dW`. The merged model
that is saved is the one that was trained.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch
from distill_kernels.quantisation.number_format import NumberFormat
from torch import nn
from torch.autograd.function import once_differentiable

from distill.models.precision.quantised_matrix import QuantisedMatrix

ADAPTED = "_distill_adapted_matrix"  # of a linear layer inside a LoRA layer


class Adapter(NamedTuple):
    """A LoRA layer's parts: base layer, A [r, K], B [N, r], and the scaling of their product."""

    layer: nn.Linear
    a: nn.Parameter
    b: nn.Parameter
    scaling: float


class AdaptedMatrix(QuantisedMatrix):
    """One quantised parameter under an adapter: its base weights are frozen, and A and B are trained."""

    def __init__(self, name: str, adapter: Adapter, form: NumberFormat) -> None:
        layer, self.a, self.b, self.scaling = adapter
        super().__init__(name, layer.weight, form)
        layer.__dict__[ADAPTED] = self

    @property
    def master(self) -> torch.Tensor:
        """The merged weights before rounding, fp32 [N, K]."""
        return torch.addmm(self.base, self.b.detach().float(), self.a.detach().float(), alpha=self.scaling)

    def take_gradient(self) -> bool:
        """Return whether there is a gradient in this step; that of the scales was added up by the backward passes."""
        return self.a.grad is not None

    def through_rounding(self, upstream: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the merged weights from that of the rounded ones, and add that of the scales."""
        if self.scales is None or self.gradients is None:
            return upstream
        upstream = upstream.contiguous()
        of_weight, found = self.gradient_of(upstream)
        for own, part in zip(self.gradients, found, strict=True):
            if own is not None and part is not None:
                own += part
        return of_weight


class _RoundedWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, matrix: AdaptedMatrix) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.matrix = matrix
        return matrix.parameter.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        a, b = ctx.saved_tensors
        merged = ctx.matrix.through_rounding(upstream.float())
        scaling = ctx.matrix.scaling
        of_a = b.float().t() @ merged
        of_b = merged @ a.float().t()
        return of_a.mul_(scaling).to(a.dtype), of_b.mul_(scaling).to(b.dtype), None


def _forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    matrix = self.__dict__.get(ADAPTED)
    weight: torch.Tensor = self.weight
    if matrix is not None and torch.is_grad_enabled():
        weight = _RoundedWeight.apply(matrix.a, matrix.b, matrix)
    return nn.functional.linear(x, weight, self.bias)


def use_merged(model: nn.Module, names: set[str]) -> dict[str, Adapter]:
    """Have LoRA layers compute with their base weights alone, which stand for the merged ones from now on.

    Args:
        model: bare model, whose adapters add nothing yet (B is zero).
        names: names of the quantised parameters, without PEFT's.

    Returns:
        The adapters by the name of the weight they are added to.

    Raises:
        ValueError: a layer with several adapters, dropout or weights of another kind.
    """
    found = {}
    layers: list[tuple[str, Any]] = list(model.named_modules())
    for path, layer in layers:
        if not hasattr(layer, "lora_A") or f"{path}.weight" not in names:
            continue
        base = layer.get_base_layer()
        active = list(layer.active_adapters)
        dropout = getattr(layer.lora_dropout[active[0]], "p", 0.0)
        variant = getattr(layer, "lora_variant", {})
        if len(active) != 1 or dropout or variant or type(base) is not nn.Linear or "forward" in base.__dict__:
            raise ValueError(
                f"student.quantise: expected one plain adapter without dropout on a linear layer that computes in its "
                f"weight's dtype, got {path} with {', '.join(active)}, dropout {dropout}"
            )
        base.__dict__["forward"] = types.MethodType(_forward, base)
        layer.merged_adapters = active
        (name,) = active
        parts = layer.lora_A[name].weight, layer.lora_B[name].weight
        found[f"{path}.weight"] = Adapter(base, *parts, float(layer.scaling[name]))
    return found
