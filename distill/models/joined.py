"""Projections that read the same activations (q, k and v; gate and up) as one product, in a model that only answers.

    join_siblings(model)

Their weights lie after each other in memory, and each stays a parameter with its own name: whatever is copied into it
is in the joined one. Of a few rows a product takes as long as its launch, so that of a decoder layer's seven three fall
away.
"""

from __future__ import annotations

import types
from collections.abc import Hashable

import torch
from distill_kernels.matmul.siblings import SiblingOutputs
from torch import nn
from torch.nn import functional as F

from distill.models.shared_input import groups_of

JOINED = "_distill_joined"


class _Joined:
    """Sibling layers whose weights are one."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers, self.sizes = layers, [layer.out_features for layer in layers]
        self.weight, self.bias = self._joined("weight"), self._joined("bias")
        self.parameters = [parameter for layer in layers for parameter in layer.parameters()]
        self.outputs: SiblingOutputs[torch.Tensor] = SiblingOutputs()

    def _joined(self, name: str) -> torch.Tensor | None:
        own = [parameter for layer in self.layers if (parameter := getattr(layer, name)) is not None]
        whole = torch.cat([parameter.detach() for parameter in own]) if own else None
        for parameter, part in zip(own, whole.split(self.sizes) if whole is not None else [], strict=True):
            parameter.data = part
        return whole

    def compute(self, x: torch.Tensor) -> tuple[dict[Hashable, torch.Tensor], list[nn.Parameter]]:
        assert self.weight is not None
        outputs = F.linear(x, self.weight, self.bias).split(self.sizes, -1)
        return dict(zip(self.layers, outputs, strict=True)), self.parameters


def _forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    joined: _Joined = self.__dict__[JOINED]
    output = joined.outputs.take(self, x, joined.compute)
    assert output is not None
    return output


def join_siblings(model: nn.Module) -> None:
    """Join what can be, in a model that is not trained; before `patch`."""
    for _, group in list(groups_of(model)):
        layers = list(group.layers.values())
        if len({(layer.bias is None, layer.weight.dtype) for layer in layers}) == 1:
            joined = _Joined(layers)
            for layer in layers:
                layer.__dict__[JOINED] = joined
                layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]
