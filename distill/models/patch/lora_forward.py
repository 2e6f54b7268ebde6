"""PEFT's LoRA layers through our `lora_linear`: the same numbers with less memory and fewer passes over activations.

Only the layer's forward is replaced, so adapters are saved, merged, switched off and loaded as before; whatever is not
the plain case (several adapters, dropout while training, a quantised base, adapters switched off or merged, weights in
shards) goes through PEFT's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from distill_kernels.matmul.lora import lora_linear, lora_linear_recomputed
from torch import nn

from distill.models.patch.swaps import ModulePattern


def is_lora_linear(module: nn.Module) -> bool:
    """Return whether `module` is PEFT's LoRA around a plain, frozen `nn.Linear`."""
    if type(module).__name__ != "Linear" or not hasattr(module, "lora_A"):
        return False
    base: Any = module.get_base_layer()  # type: ignore[operator]
    return type(base) is nn.Linear and not base.weight.requires_grad


def lora_recomputed(
    layer: Any, gated: Callable[..., torch.Tensor], parts: tuple[torch.Tensor, ...]
) -> torch.Tensor | None:
    """Return a LoRA layer's product with `gated(*parts)`, made again in the backward; None where it is not plain."""
    weights = _plain(layer, parts[0])
    if weights is None or _has_own_forward(layer) or parts[0].dtype != weights[0].dtype:
        return None
    return lora_linear_recomputed(gated, parts, *weights)


def lora_forward(self: Any, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
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
    """Return whether the wrapped layer computes in another dtype than its weight's while training: in fp8."""
    base = layer.get_base_layer()
    return base.training and "forward" in base.__dict__


def _plain(
    layer: Any, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, float] | None:
    """Weight, bias, A, B and scale, where the layer is the plain case."""
    name = _only_adapter(layer)
    base = layer.get_base_layer()
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


lora_forward.__dict__.update(recomputed=lora_recomputed)
LORA_LINEAR = ModulePattern("lora", is_lora_linear, lambda module, form: lora_forward)
