"""The products of an MLP as its adapters, formats and layouts have them: what forwards of ours ask of a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distill.models.patch.swaps import forward_attribute


def takes_residual(module: Any) -> bool:
    """Return whether a norm or an MLP runs our forward with a residual input; a LayerNorm's has none."""
    return "forward" in module.__dict__ and "residual" in inspect.signature(module.forward).parameters


def is_plain(layer: nn.Module) -> bool:
    """Return whether calling a layer only multiplies by its own weight."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and layer.bias is None and not hooks


def down_of_gated(
    down: Any, gated: Callable[..., torch.Tensor], *parts: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`down(gated(*parts))`, the input of a LoRA layer made again in the backward in place of being kept; added to
    `residual`, where there is one, which is overwritten where no gradient is asked for.
    """
    if residual is not None and not torch.is_grad_enabled():
        return _add_product(down, gated(*parts), residual)
    if residual is not None:
        return residual + down_of_gated(down, gated, *parts)
    recomputed = forward_attribute(down, "recomputed")  # its product with an input that is made again in the backward
    hooked = down._forward_hooks or down._forward_pre_hooks
    if recomputed is not None and not hooked and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        output: torch.Tensor | None = recomputed(down, gated, parts)
        if output is not None:
            return output
    return down(gated(*parts))


def _add_product(layer: nn.Module, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """`residual + layer(x)`, within the product where that is plain."""
    if is_plain(layer) and not torch.compiler.is_compiling():
        plain = type(residual) is torch.Tensor and residual.is_contiguous()
        same = x.dtype == residual.dtype == layer.weight.dtype
        if plain and same and not torch.is_autocast_enabled(x.device.type):
            weight: torch.Tensor = layer.weight  # type: ignore[assignment]
            residual.view(-1, residual.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
            return residual
    return residual + layer(x)
