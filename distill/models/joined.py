"""Projections that read the same activations (q, k and v; gate and up) as one product, in a model that only answers.

    join_siblings(model)

Their weights lie after each other in memory, and each stays a parameter with its own name: whatever is copied into it
is in the joined one. Of a few rows a product takes as long as its launch, so that of a decoder layer's seven three fall
away.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from distill.models.shared_input import groups_of

JOINED = "_distill_joined"


class _Joined:
    """Outputs of sibling layers, all made when the first of them is called with a tensor, each taken once."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers, self.sizes = layers, [layer.out_features for layer in layers]
        self.weight, self.bias = (self._joined(name) for name in ("weight", "bias"))
        self._source: torch.Tensor | None = None
        self._outputs: dict[nn.Module, torch.Tensor] = {}

    def _joined(self, name: str) -> torch.Tensor | None:
        own = [parameter for layer in self.layers if (parameter := getattr(layer, name)) is not None]
        whole = torch.cat([parameter.detach() for parameter in own]) if own else None
        for parameter, part in zip(own, whole.split(self.sizes) if whole is not None else [], strict=True):
            parameter.data = part
        return whole

    def take(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """The output of `layer` for `x`; None where it was taken before."""
        if self._source is not x:
            assert self.weight is not None
            outputs = F.linear(x, self.weight, self.bias).split(self.sizes, -1)
            self._source, self._outputs = x, dict(zip(self.layers, outputs, strict=True))
        output = self._outputs.pop(layer, None)
        if not self._outputs:
            self._source = None
        return output


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor | None = self.__dict__[JOINED].take(self, x)
    return F.linear(x, self.weight, self.bias) if output is None else output


def join_siblings(model: nn.Module) -> None:
    """Join what can be, in a model that is not trained; before `patch`."""
    for _, group in list(groups_of(model)):
        layers = list(group.layers.values())
        if len({(layer.bias is None, layer.weight.dtype) for layer in layers}) == 1:
            joined = _Joined(layers)
            for layer in layers:
                layer.__dict__[JOINED] = joined
                layer.forward = types.MethodType(_forward, layer)  # type: ignore[method-assign]
