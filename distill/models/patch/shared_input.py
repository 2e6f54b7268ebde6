"""Projections of a layer that read the same activations (q, k and v; gate and up), computed as one by the first called.

A patched attention or MLP opens its group for the length of its own call. The first projection that is called with a
tensor computes all of them (`shared_linear`) and leaves the others' outputs (`SiblingOutputs`); what is left when the
module returns is dropped. Modules, parameters, names and hooks stay as they are. Without gradients (but for weights
that are joined, see joined_projections.py), while compiling, and for anything but a plain `nn.Linear` with its whole
weight on the device (adapters, hooks that may fetch or change a weight, sharded or offloaded weights), each layer
computes its own output.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from distill_kernels.matmul.shared_input import shared_linear
from distill_kernels.matmul.siblings import SiblingOutputs, sibling_groups
from distill_kernels.operands import adjacent_as_one
from torch import nn

GROUP = "_distill_shared_input"
FP8_GROUP = "_distill_fp8_siblings"  # of a projection that computes in fp8 while it trains, with siblings of its own
PLAIN = (torch.Tensor, nn.Parameter)


class SharedInput:
    """Sibling projections of one module.

    Args:
        layers: The projections, by the names they have in the module.
    """

    def __init__(self, layers: dict[str, nn.Linear]) -> None:
        self.layers = layers
        self.is_open = False
        self.joined = False  # the weights lie after each other, unless they have been moved since
        self.wasted = False  # an output was made that nobody took: the module calls its projections in another way
        self.outputs: SiblingOutputs[torch.Tensor] = SiblingOutputs()

    def fits(self) -> bool:
        """Return whether all are plain linear layers of one input width, with forwards of their own."""
        layers = self.layers.values()
        plain = all(type(layer) is nn.Linear and "forward" not in layer.__dict__ for layer in layers)
        return plain and len({layer.in_features for layer in layers}) == 1

    def is_intact(self, module: nn.Module) -> bool:
        """Return whether `module` still calls these projections unchanged: none wrapped (an adapter) or replaced."""
        own = module._modules
        return all(own.get(name) is layer and _is_ours(layer) for name, layer in self.layers.items())

    def compute(self, x: torch.Tensor) -> tuple[dict[Hashable, torch.Tensor], list[torch.Tensor]] | None:
        """The outputs of all, and their weights and biases; None where each has to compute its own."""
        layers = list(self.layers.values())
        weights = [each.weight for each in layers]
        biases = [each.bias for each in layers]
        read = [tensor for tensor in (*weights, *biases) if tensor is not None]
        if any(type(t) not in PLAIN or t.device != x.device or not t.numel() for t in (x, *read)):
            return None
        trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *read))
        able = not x.is_inference() if trained else adjacent_as_one(weights) is not None
        if not able:
            return None
        outputs: dict[Hashable, torch.Tensor] = dict(zip(layers, shared_linear(x, weights, biases), strict=True))
        return outputs, read

    def close(self, returned: bool) -> None:
        self.outputs.drop()
        self.wasted = self.wasted or (returned and self.outputs.wasted)
        self.is_open = False
        self.outputs.wasted = False


def _is_ours(layer: nn.Module) -> bool:
    hooks = layer._forward_pre_hooks or layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks
    forward = getattr(layer.__dict__.get("forward"), "__func__", None)
    ours = forward is projection_forward or FP8_GROUP in layer.__dict__
    return ours and type(layer) is nn.Linear and not hooks


def siblings_of(module: nn.Module) -> SharedInput | None:
    """Return the sibling projections of a module that may be computed as one: plain linear layers."""
    children: dict[str, Any] = {name: layer for name, layer in module._modules.items() if layer is not None}
    for layers in sibling_groups(children):
        group = SharedInput(layers)
        if len(layers) > 1 and group.fits() and isinstance(module.forward, types.MethodType):
            return group
    return None


def projection_forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        group = self.__dict__[GROUP]
        if group.is_open and (group.joined or torch.is_grad_enabled()):
            output: torch.Tensor | None = group.outputs.take(self, x, group.compute)
            if output is not None:
                return output
    return nn.functional.linear(x, self.weight, self.bias)


def sharing_forward(module: nn.Module) -> Callable[..., object]:
    """Run the module's own forward with its group of projections open."""
    inner: Callable[..., object] = module.forward.__func__  # type: ignore[attr-defined]

    @functools.wraps(inner)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():
            return inner(self, *args, **kwargs)
        group = self.__dict__[GROUP]
        if not (group.joined or torch.is_grad_enabled()) or group.is_open or group.wasted or not group.is_intact(self):
            return inner(self, *args, **kwargs)
        group.is_open = True
        returned = False
        try:
            output = inner(self, *args, **kwargs)
            returned = True
        finally:
            group.close(returned)
        return output

    return forward


def cast_dtype(x: torch.Tensor, *modules: nn.Module) -> torch.dtype | None:
    """The dtype that autocast gives to `x` in the projections of all `modules`; None where one does not cast it."""
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    groups = [module.__dict__.get(GROUP) for module in modules]
    intact = all(group is not None and group.is_intact(m) for m, group in zip(modules, groups, strict=True))
    return torch.get_autocast_dtype(x.device.type) if intact else None
