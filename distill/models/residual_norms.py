"""Residual additions fused with the norm that follows, in decoder layers of two known forms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from distill.models.head import decoder_of


def is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal up to a few roundings of the dtype."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    scale = expected.abs().max().float()
    return bool((actual.float() - expected.float()).abs().max() <= 16 * torch.finfo(expected.dtype).eps * scale)


def fusable_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers whose norms run our forward, and the form they have; see `LAYER_FORWARDS`."""
    pre_norm = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    sandwich = pre_norm | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
    for module in model.modules():
        children = {name for name, _ in module.named_children()}
        if "forward" in module.__dict__:
            continue
        if children == pre_norm and _takes_residual(module.post_attention_layernorm):
            yield "pre_norm", module
        elif children == sandwich and _takes_residual(module.pre_feedforward_layernorm):
            yield "sandwich", module


def _takes_residual(norm: Any) -> bool:
    """Whether a norm runs our forward, and that of an RMSNorm: a LayerNorm's takes no residual."""
    return "forward" in norm.__dict__ and "residual" in inspect.signature(norm.forward).parameters


def _attend(layer: Any, hidden_states: torch.Tensor, kwargs: dict[str, object]) -> torch.Tensor:
    return layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)[0]


def _pre_norm_forward(self: Any, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    normed, residual = self.post_attention_layernorm(_attend(self, hidden_states, kwargs), hidden_states)
    return residual + self.mlp(normed)


def _sandwich_forward(self: Any, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    attended = self.post_attention_layernorm(_attend(self, hidden_states, kwargs))
    normed, residual = self.pre_feedforward_layernorm(attended, hidden_states)
    return residual + self.post_feedforward_layernorm(self.mlp(normed))


LAYER_FORWARDS: dict[str, Callable[..., Any]] = {"pre_norm": _pre_norm_forward, "sandwich": _sandwich_forward}


@torch.no_grad()
def layer_matches(layer: nn.Module, *, model: nn.Module, forward: Callable[..., Any]) -> bool:
    """Run one whole layer both ways, called as the decoder calls it."""
    seen: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def remember(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        seen.append((args, kwargs))

    hook = layer.register_forward_pre_hook(remember, with_kwargs=True)
    ids = torch.arange(6, device=next(model.parameters()).device)[None]
    try:
        decoder_of(model)(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    (args, kwargs), *_ = seen
    expected = type(layer).forward(layer, *args, **kwargs)
    if len(args) > 1 or not isinstance(expected, torch.Tensor):
        return False
    try:
        ours = forward(layer, *args, **kwargs)
    except TypeError:  # an MLP that returns more than hidden states (gpt-oss: its router's scores)
        return False
    return is_close(ours, expected)
