"""PEFT's LoRA layers through our `lora_linear`: the same numbers with less memory and fewer passes over activations.

Only the layer's forward is replaced, so adapters are saved, merged, switched off and loaded as before; whatever is not
the plain case (several adapters, dropout while training, a quantised base, adapters switched off or merged, weights in
shards) goes through PEFT's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from distill_kernels.matmul.lora import lora_linear, lora_linear_of
from torch import nn


def is_lora_linear(module: nn.Module) -> bool:
    """Whether `module` is PEFT's LoRA around a plain, frozen `nn.Linear`."""
    if type(module).__name__ != "Linear" or not hasattr(module, "lora_A"):
        return False
    base: Any = module.get_base_layer()  # type: ignore[operator]
    return type(base) is nn.Linear and not base.weight.requires_grad


def lora_forward(self: Any, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """What takes the place of a LoRA layer's forward."""
    weights = None if args or kwargs else _plain(self, x)
    if weights is None:
        return type(self).forward(self, x, *args, **kwargs)
    weight, _, a, b, scale = weights
    if not _has_own_forward(self):
        return lora_linear(x.to(weight.dtype), *weights)
    y = self.get_base_layer()(x)  # the tensor that its siblings get too
    low = torch.mm(x.reshape(-1, x.shape[-1]).to(weight.dtype), a.t().to(weight.dtype))
    return torch.addmm(y.view(-1, y.shape[-1]), low, b.t().to(weight.dtype), alpha=scale).view(y.shape)


def _has_own_forward(layer: Any) -> bool:
    """Whether the layer inside computes otherwise than by its weight's dtype while it trains: in fp8."""
    base = layer.get_base_layer()
    return base.training and "forward" in base.__dict__


def down_of_gated(
    down: Any, gated: Callable[..., torch.Tensor], *parts: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`down(gated(*parts))`, the input of a LoRA layer made again in the backward in place of being kept; added to
    `residual`, where there is one, which is overwritten where no gradient is asked for."""
    if residual is not None and not torch.is_grad_enabled():
        return _add_product(down, gated(*parts), residual)
    if residual is not None:
        return residual + down_of_gated(down, gated, *parts)
    ours = getattr(down.__dict__.get("forward"), "__func__", None) is lora_forward
    hooked = down._forward_hooks or down._forward_pre_hooks
    if ours and not hooked and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        weights = _plain(down, parts[0])
        if weights is not None and not _has_own_forward(down) and parts[0].dtype == weights[0].dtype:
            return lora_linear_of(gated, parts, *weights)
    return down(gated(*parts))


def _add_product(layer: nn.Module, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """`residual + layer(x)`, within the product where that is plain."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__
    if type(layer) is nn.Linear and layer.bias is None and not (hooks or torch.compiler.is_compiling()):
        plain = type(layer.weight) is nn.Parameter and type(residual) is torch.Tensor and residual.is_contiguous()
        same = x.dtype == residual.dtype == layer.weight.dtype
        if plain and same and not torch.is_autocast_enabled(x.device.type):
            residual.view(-1, residual.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), layer.weight.t())
            return residual
    return residual + layer(x)


def _plain(
    layer: Any, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, float] | None:
    """Weight, bias, A, B and scale, where the layer is the plain case."""
    name, base = _only_adapter(layer), layer.get_base_layer()
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if name is None or base.weight.dtype != dtype or type(base.weight) is not nn.Parameter:
        return None
    return base.weight, base.bias, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]


def _only_adapter(layer: Any) -> str | None:
    """The one adapter in use, where there is nothing about it that `lora_linear` does not compute."""
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return None
    (name,) = layer.active_adapters
    if name not in layer.lora_A or name in getattr(layer, "lora_variant", {}) or layer.use_dora.get(name):
        return None
    dropout = layer.lora_dropout[name]
    if isinstance(dropout, nn.Dropout) and dropout.p > 0 and layer.training:
        return None
    if layer.lora_A[name].bias is not None or layer.lora_B[name].bias is not None:
        return None
    return str(name)
