"""PEFT's LoRA layers through our `lora_linear`: the same numbers with less memory and fewer passes over activations.

Only the layer's forward is replaced, so adapters are saved, merged, switched off and loaded as before; whatever is not
the plain case (several adapters, dropout while training, a quantised base, adapters switched off or merged, weights in
shards) goes through PEFT's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from distill_kernels.matmul.lora import lora_linear, lora_linear_recomputed, lora_linears
from distill_kernels.operands import adjacent_as_one
from torch import nn

from distill.models.patch.shared_input import GROUP, SharedInput
from distill.models.patch.swaps import Kind, trait_of


def is_lora_linear(module: nn.Module) -> bool:
    """Return whether `module` is PEFT's LoRA around a plain, frozen `nn.Linear`."""
    if type(module).__name__ != "Linear" or not hasattr(module, "lora_A"):
        return False
    base: Any = module.get_base_layer()  # type: ignore[operator]
    return type(base) is nn.Linear and not base.weight.requires_grad


class SharedAdapters(SharedInput):
    """Sibling projections that are LoRA layers, computed as one while their base weights are joined."""

    swaps_layers = False  # they run `lora_forward`

    def fits(self) -> bool:
        """Return whether all run our forward on one input, without hooks."""
        layers = self.layers.values()
        return all(map(_is_ours, layers)) and len({layer.in_features for layer in layers}) == 1

    def is_intact(self, module: nn.Module) -> bool:
        """Return whether `module` still calls these LoRA layers, with our forward and without hooks."""
        own = module._modules
        return self.joined and all(own.get(name) is layer and _is_ours(layer) for name, layer in self.layers.items())

    def weights(self) -> list[nn.Linear]:
        """The frozen layers inside."""
        return [layer.get_base_layer() for layer in self.layers.values()]  # type: ignore[operator]

    def compute(self, x: torch.Tensor) -> tuple[dict[Hashable, torch.Tensor], list[torch.Tensor]] | None:
        """The outputs of all, and what they depend on; None where each has to compute its own."""
        layers = list(self.layers.values())
        parts = [_plain(layer, x) for layer in layers]
        plain = [part for part in parts if part is not None]
        bases = [base for base, *_ in plain]
        if len(plain) < len(layers) or adjacent_as_one(bases) is None or not torch.is_grad_enabled():
            return None
        if any(_has_own_forward(layer) for layer in layers) or len({(a.dtype, b.dtype) for *_, a, b, _ in plain}) > 1:
            return None
        biases = [bias for _, bias, *_ in plain]
        made = lora_linears(x.to(bases[0].dtype), bases, biases, [(a, b, scale) for *_, a, b, scale in plain])
        outputs: dict[Hashable, torch.Tensor] = dict(zip(layers, made, strict=True))
        return outputs, [tensor for part in plain for tensor in part[:4] if isinstance(tensor, torch.Tensor)]


def _is_ours(layer: nn.Module) -> bool:
    hooks = layer._forward_pre_hooks or layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return trait_of(layer, "group_kind") is SharedAdapters and not hooks


def lora_recomputed(
    layer: Any, gated: Callable[..., torch.Tensor], parts: tuple[torch.Tensor, ...]
) -> torch.Tensor | None:
    """Return a LoRA layer's product with `gated(*parts)`, made again in the backward; None where it is not plain."""
    weights = _plain(layer, parts[0])
    if weights is None or _has_own_forward(layer) or parts[0].dtype != weights[0].dtype:
        return None
    return lora_linear_recomputed(gated, parts, *weights)


def lora_forward(self: Any, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    group = self.__dict__.get(GROUP)
    if group is not None and group.is_open and not (args or kwargs or torch.compiler.is_compiling()):
        output: torch.Tensor | None = group.outputs.take(self, x, group.compute)
        if output is not None:
            return output
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


lora_forward.__dict__.update(recomputed=lora_recomputed, group_kind=SharedAdapters)
LORA_LINEAR = Kind("lora", is_lora_linear, lambda module, form: lora_forward)
