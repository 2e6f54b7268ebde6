"""A student whose linear layers compute in fp8 while it trains; parameters, names and saving stay as they are.

Only forwards are replaced, and only in training mode: a student is evaluated and answers as it will be used. Sizes that
gain: a product of [M, K] and [K, N] takes M N K / rate, and quantising for it about M (N + K) / bandwidth, so that what
counts is N K / (N + K), with N over all layers that read the same input. On an H200 they break even at about 400.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from distill_kernels.matmul.fp8_train import fp8_linears, fp8_swiglu_mlp
from distill_kernels.matmul.siblings import SiblingOutputs, compute_dtype, sibling_groups
from torch import nn
from torch.nn import functional as F

from distill.core.eval_mode import eval_mode
from distill.models.layers import find_layers
from distill.models.names import SEPARATE_GATED
from distill.models.patch.shared_input import FP8_GROUP
from distill.models.patch.swaps import (
    OTHER,
    ModulePattern,
    PatchReport,
    Swap,
    apply_swap,
    replace_forward,
    restore_forward,
)
from distill.models.trial import Mismatch, is_close

GAINS_FROM = 512  # N K / (N + K)


def compute_in_fp8(model: nn.Module) -> int:
    """Have the linear layers of the decoder layers compute in fp8 in training mode, as `unpatch` undoes.

    Call it after `patch` and after adapters are added (whose frozen base layers then compute in fp8), before the
    model is sharded. On a GPU layers that are too small to gain are left; on a CPU, which only emulates, none are.

    Returns:
        How many layers.

    Raises:
        ValueError: None would.
    """
    linears = _Fp8Linears(model)
    if not linears.groups:
        raise ValueError(
            f"student.compute: fp8 expected linear layers with sizes divisible by 16 and N K / (N + K) of {GAINS_FROM} "
            "or more, got none; leave compute out"
        )
    count = apply_swap(model, linears)
    apply_swap(model, FP8_MLP(model, "student", PatchReport("")))
    return count


class _Fp8Linears(Swap):
    """Swap of linear layers for products in fp8, those that read the same input together.

    Args:
        model: Student model.
    """

    kind = "fp8"

    def __init__(self, model: nn.Module) -> None:
        self.groups: dict[nn.Linear, tuple[SiblingOutputs[torch.Tensor], list[nn.Linear]]] = {}
        for group in (group for layer in find_layers(model)[1] for group in _groups(layer) if _gains(group)):
            self.groups |= dict.fromkeys(group, (SiblingOutputs[torch.Tensor](), group))

    def applies(self, module: nn.Module) -> str | None:
        return None if module in self.groups else OTHER

    def swap(self, module: Any) -> None:
        module.__dict__[FP8_GROUP] = self.groups[module]  # copies of a model have their own
        replace_forward(module, _linear_forward)

    def restore(self, module: nn.Module) -> None:
        module.__dict__.pop(FP8_GROUP)
        restore_forward(module)


def _groups(layer: nn.Module) -> Iterator[list[nn.Linear]]:
    """The linear layers of a decoder layer; those that read the same input together."""
    for path, parent in layer.named_modules():
        if "lora_" in path:
            continue
        fitting = {name: _linear(child) for name, child in parent.named_children() if name != "base_layer"}
        linears = {name: linear for name, linear in fitting.items() if linear is not None}
        for group in sibling_groups(linears):
            yield list(group.values())


def _linear(module: nn.Module | None) -> nn.Linear | None:
    """A layer that can, or the one inside its adapters."""
    base = module.get_base_layer() if hasattr(module, "get_base_layer") else module  # type: ignore[operator, union-attr]
    fits = type(base) is nn.Linear and base.in_features % 16 == 0 and base.out_features % 16 == 0
    return base if fits else None


def _gains(group: Sequence[nn.Linear]) -> bool:
    inputs = group[0].in_features
    outputs = sum(linear.out_features for linear in group)
    return not group[0].weight.is_cuda or inputs * outputs / (inputs + outputs) >= GAINS_FROM


def _projects_in_fp8(mlp: nn.Module) -> bool:
    parts: list[Any] = [getattr(mlp, name, None) for name in SEPARATE_GATED]
    return all(isinstance(part, nn.Module) and FP8_GROUP in part.__dict__ for part in parts)


@torch.no_grad()
def _swiglu_form(mlp: nn.Module, **_: object) -> str | Mismatch:
    """Return the form of a gated MLP without biases that computes `down(silu(gate(x)) * up(x))`, by running it."""
    gate, up, down = (getattr(mlp, name) for name in SEPARATE_GATED)
    if any(part.bias is not None or part._forward_hooks or part._forward_pre_hooks for part in (gate, up, down)):
        return Mismatch("it has biases or hooks")
    x = 8 * torch.randn(3, gate.in_features, generator=torch.Generator().manual_seed(0)).to(gate.weight)
    with eval_mode(mlp):
        return "swiglu" if is_close(mlp(x), down(F.silu(gate(x)) * up(x))) else Mismatch("it is no SwiGLU")


def _outputs_of(
    layers: Sequence[nn.Linear], x: torch.Tensor
) -> tuple[dict[nn.Linear, torch.Tensor], Sequence[torch.Tensor]]:
    weights = [layer.weight for layer in layers]
    return dict(zip(layers, fp8_linears(x.to(compute_dtype(x)), *weights), strict=True)), weights


def _linear_forward(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if not linear.training:
        return nn.Linear.forward(linear, x)
    outputs, layers = linear.__dict__[FP8_GROUP]
    y: torch.Tensor = outputs.take(linear, x, functools.partial(_outputs_of, layers))
    return y if linear.bias is None else y + linear.bias.to(y.dtype)


def _mlp_forward(module: nn.Module) -> Callable[..., torch.Tensor]:
    before = getattr(module.forward, "__func__", type(module).forward)

    def forward(mlp: nn.Module, x: torch.Tensor, *residual: torch.Tensor) -> torch.Tensor:
        if not mlp.training:
            return before(mlp, x, *residual)
        y = fp8_swiglu_mlp(x.to(compute_dtype(x)), *(getattr(mlp, name).weight for name in SEPARATE_GATED))
        return residual[0] + y if residual else y

    return forward


FP8_MLP = ModulePattern("fp8_mlp", _projects_in_fp8, lambda mlp, form: _mlp_forward(mlp), _swiglu_form)
