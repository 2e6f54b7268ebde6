"""MLPs of the GPT-2 kind (a product with bias, GELU, a product) on our `bias_gelu`, which adds the bias on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from distill_kernels import bias_gelu
from torch import nn
from transformers.pytorch_utils import Conv1D

NAMES = (
    ("c_fc", "c_proj"),
    ("fc1", "fc2"),
    ("fc_in", "fc_out"),
    ("up_proj", "down_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
)
APPROXIMATIONS: tuple[Literal["none", "tanh"], ...] = ("none", "tanh")


def two_products(module: nn.Module) -> tuple[str, str] | None:
    """The names of an MLP's two products, if it has two, nothing beside them but an activation and dropout."""
    for up, down in NAMES:
        if _has_bias(getattr(module, up, None)) and isinstance(getattr(module, down, None), nn.Module):
            others = [child for name, child in module.named_children() if name not in (up, down)]
            drops = [child for child in others if isinstance(child, nn.Dropout)]
            rate = getattr(module, "residual_dropout", 0.0)  # starcoder2's is a number
            plain = len(others) - len(drops) <= 1 and not any(list(child.parameters()) for child in others)
            return (up, down) if plain and len(drops) <= 1 and rate == 0.0 else None
    return None


def bias_gelu_forward(names: tuple[str, str], approximate: Literal["none", "tanh"]) -> Callable[..., torch.Tensor]:
    """Replacement of such an MLP's forward; a wrapped projection (an adapter) runs its own forward."""
    up_name, down_name = names

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        up = getattr(self, up_name)
        if not _has_bias(up) or "forward" in up.__dict__ or up._forward_hooks or up._forward_pre_hooks:
            return type(self).forward(self, hidden_states)
        weight = up.weight.t() if isinstance(up, Conv1D) else up.weight
        x = bias_gelu(nn.functional.linear(hidden_states, weight), up.bias, approximate)
        x = getattr(self, down_name)(x)
        for child in self.children():
            if isinstance(child, nn.Dropout):
                x = child(x)
        return x

    return forward


def _has_bias(product: object) -> bool:
    return type(product) in (nn.Linear, Conv1D) and getattr(product, "bias", None) is not None
