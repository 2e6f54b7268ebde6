"""PEFT's LoRA layers through our `lora_linear`: the same numbers with less memory and fewer passes over activations.

Only the layer's forward is replaced, so adapters are saved, merged, switched off and loaded as before; whatever is not
the plain case (several adapters, dropout while training, a quantised base, adapters switched off or merged, weights in
shards) goes through PEFT's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from distill_kernels.matmul.lora import lora_linear, lora_linear_recomputed, lora_linears
from distill_kernels.matmul.siblings import SIBLINGS
from distill_kernels.operands import adjacent_as_one
from torch import nn

from distill.models.patch.shared_input import GROUP, SharedInput, sharing_forward


def is_lora_linear(module: nn.Module) -> bool:
    """Return whether `module` is PEFT's LoRA around a plain, frozen `nn.Linear`."""
    if type(module).__name__ != "Linear" or not hasattr(module, "lora_A"):
        return False
    base: Any = module.get_base_layer()  # type: ignore[operator]
    return type(base) is nn.Linear and not base.weight.requires_grad


class SharedAdapters(SharedInput):
    """Sibling projections that are LoRA layers, computed as one while their base weights are joined."""

    def forwards(self, module: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., object]]]:
        """Return the replacement forward of `module`; its projections run `lora_forward` already."""
        yield module, sharing_forward(module)

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
    return getattr(layer.__dict__.get("forward"), "__func__", None) is lora_forward and not hooks


def adapted_groups(model: nn.Module) -> Iterator[tuple[nn.Module, SharedAdapters]]:
    """Modules of a patched `model` with sibling projections that are LoRA layers, and these."""
    for module in model.modules():
        for names in SIBLINGS:
            layers = {name: layer for name in names if (layer := getattr(module, name, None)) is not None}
            ours = len(layers) == len(names) and all(map(_is_ours, layers.values()))
            if ours and len({layer.in_features for layer in layers.values()}) == 1:
                yield module, SharedAdapters(layers)


def lora_forward(self: Any, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """Replacement of a LoRA layer's forward."""
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
            return lora_linear_recomputed(gated, parts, *weights)
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
