"""PEFT's LoRA layers through our `lora_linear`: the same numbers with less memory and fewer passes over activations.

Only the layer's forward is replaced, so adapters are saved, merged, switched off and loaded as before; whatever is not
the plain case (several adapters, dropout while training, a quantised base, adapters switched off or merged, weights in
shards) goes through PEFT's own forward.
"""

from __future__ import annotations

from typing import Any

import torch
from distill_kernels.matmul.lora import lora_linear
from torch import nn


def is_lora_linear(module: nn.Module) -> bool:
    """Whether `module` is PEFT's LoRA around a plain, frozen `nn.Linear`."""
    if type(module).__name__ != "Linear" or not hasattr(module, "lora_A"):
        return False
    base: Any = module.get_base_layer()  # type: ignore[operator]
    return type(base) is nn.Linear and not base.weight.requires_grad


def lora_forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What takes the place of a LoRA layer's forward."""
    name = _only_adapter(self)
    base = self.get_base_layer()
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if name is None or args or kwargs or base.weight.dtype != dtype or type(base.weight) is not nn.Parameter:
        return type(self).forward(self, x, *args, **kwargs)
    a, b = self.lora_A[name].weight, self.lora_B[name].weight
    return lora_linear(x.to(dtype), base.weight, base.bias, a, b, self.scaling[name])


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
