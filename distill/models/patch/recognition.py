"""Modules that our kernels can compute, recognised by running them: norms, MLPs, rotary embeddings.

A candidate module runs on a random input, and each fused forward of its kind is compared with its own
(`models/trial.py`). Each `ModulePattern` is an entry of `patching.SWAPS`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from distill_kernels import bias_gelu
from distill_kernels.layers.glu import geglu, swiglu
from distill_kernels.layers.layer_norm import layer_norm
from distill_kernels.layers.rms_norm import add_rms_norm, rms_norm, rms_norm_and_input
from distill_kernels.layers.rope import rope
from distill_kernels.matmul.fp8 import Fp8Linear, fp8_rms_norm
from torch import nn
from transformers.pytorch_utils import Conv1D

from distill.models.names import GATED_MLPS, PLAIN_MLPS, ROTARY_FUNCTION, GatedNames
from distill.models.patch.products import down_of_gated
from distill.models.patch.swaps import ModulePattern, epsilon_of
from distill.models.trial import Mismatch, compare_forwards, perturbed

ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "silu": swiglu,
    "gelu_tanh": functools.partial(geglu, approximate="tanh"),
    "gelu": geglu,
}
APPROXIMATIONS: tuple[Literal["none", "tanh"], ...] = ("none", "tanh")


def _random(module: nn.Module, *shape: int, scale: float = 1.0) -> torch.Tensor:
    held = next(itertools.chain(module.parameters(), module.buffers()))
    dtype = held.dtype if held.is_floating_point() and held.itemsize > 1 else torch.bfloat16  # quantised weights
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(*shape, generator=generator) * scale).to(held.device, dtype)


def _takes_one_input(module: nn.Module) -> bool:
    """Return whether hidden states are a module's only input: no gate (Mamba 2) and no layer index."""
    inputs = inspect.signature(module.forward).parameters.values()
    return len([one for one in inputs if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]) == 1


def _closest(
    module: nn.Module, x: torch.Tensor, forwards: Mapping[str, Callable[..., torch.Tensor]], gradients: bool
) -> str | Mismatch:
    """Return the name of the forward that computes what the module does, or how the closest one differs."""
    try:
        with perturbed(module), torch.no_grad():
            expected = module(x).float()
            errors = {name: (forward(x).float() - expected).norm().item() for name, forward in forwards.items()}
    except (TypeError, ValueError):
        return Mismatch("it takes more than hidden states")
    # in 16 bits several activations may be close
    name = min(errors, key=errors.__getitem__)
    return compare_forwards(module, module.forward, forwards[name], x, gradients=gradients) or name


# ---- norms


def layer_norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return layer_norm(x, self.weight, self.bias, self.eps)


def looks_like_rms_norm(module: nn.Module) -> bool:
    """Return whether a module may be an RMSNorm, from its parameters."""
    parameters = dict(module.named_parameters(recurse=False))
    return (
        list(parameters) == ["weight"]
        and parameters["weight"].dim() == 1
        and not list(module.children())
        and epsilon_of(module) is not None
        and _takes_one_input(module)
    )


def rms_norm_form(module: Any, *, gradients: bool, **_: object) -> str | Mismatch:
    """Return the form of an RMSNorm, found by running the module, or how it differs from every known form."""
    eps = epsilon_of(module)
    forwards = {form: functools.partial(rms_norm_forward(form, eps), module) for form in ("llama", "gemma")}
    return _closest(module, _random(module, 3, module.weight.shape[0], scale=3.0), forwards, gradients)


def rms_norm_forward(form: str, eps: float | None) -> Callable[..., Any]:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        and_input: bool = False,
        fp8: bool = False,
    ) -> Any:
        if fp8:
            return fp8_rms_norm(hidden_states, self.weight, eps, form, residual)  # type: ignore[arg-type]
        if residual is not None:
            return add_rms_norm(hidden_states, residual, self.weight, eps, form, dtype)  # type: ignore[arg-type]
        norm = rms_norm_and_input if and_input else rms_norm
        return norm(hidden_states, self.weight, eps, form, dtype)  # type: ignore[arg-type]

    return forward


LAYER_NORM = ModulePattern(
    "layer_norm",
    lambda module: type(module) is nn.LayerNorm and len(module.normalized_shape) == 1,
    lambda module, form: layer_norm_forward,
)
RMS_NORM = ModulePattern(
    "rms_norm", looks_like_rms_norm, lambda module, form: rms_norm_forward(form, epsilon_of(module)), rms_norm_form
)


# ---- gated MLPs


def gated_names(module: nn.Module) -> GatedNames | None:
    for names in GATED_MLPS:
        if all(isinstance(getattr(module, name, None), nn.Module) for name in names if name):
            return names
    return None


def gated_activation(module: nn.Module, *, gradients: bool, **_: object) -> str | Mismatch:
    """Return the activation of a gated MLP, found by running the module, or how it differs from the known ones."""
    names = gated_names(module)
    assert names is not None
    first = getattr(module, names[0])
    if not hasattr(first, "in_features") or not _takes_one_input(module):
        return Mismatch("it takes more than hidden states")
    forwards = {name: functools.partial(gated_forward(names, name), module) for name in ACTIVATIONS}
    # large, so that the activations differ by more than rounding
    return _closest(module, _random(module, 3, first.in_features, scale=8.0), forwards, gradients)


def gated_forward(names: GatedNames, activation: str) -> Callable[..., Any]:
    gate_name, up_name, down_name = names
    gated = ACTIVATIONS[activation]

    def forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        down = getattr(self, down_name)
        parts = [getattr(self, name)(x) for name in (gate_name, up_name) if name is not None]
        if type(down) is Fp8Linear and len(parts) == 2 and not (down._forward_hooks or down._forward_pre_hooks):
            y = down.forward_gated(parts[0], parts[1], activation)  # type: ignore[arg-type]
            return y if residual is None else residual + y
        return down_of_gated(down, gated, *parts, residual=residual)

    return forward


GATED_MLP = ModulePattern(
    "glu",
    gated_names,
    lambda module, activation: gated_forward(gated_names(module), activation),  # type: ignore[arg-type]
    gated_activation,
)


# ---- MLPs of the GPT-2 kind: a product with bias, GELU, a product


def gelu_of(module: Any, *, gradients: bool, **_: object) -> str | Mismatch:
    names = two_products(module)
    assert names is not None
    weight = getattr(module, names[0]).weight
    width = weight.shape[0] if isinstance(getattr(module, names[0]), Conv1D) else weight.shape[1]
    forwards: dict[str, Callable[..., torch.Tensor]] = {
        name: functools.partial(bias_gelu_forward(names, name), module) for name in APPROXIMATIONS
    }
    return _closest(module, _random(module, 3, width, scale=8.0), forwards, gradients)


def two_products(module: nn.Module) -> tuple[str, str] | None:
    """The names of an MLP's two products, if it has two, nothing beside them but an activation and dropout."""
    for up, down in PLAIN_MLPS:
        if _has_bias(getattr(module, up, None)) and isinstance(getattr(module, down, None), nn.Module):
            others = [child for name, child in module.named_children() if name not in (up, down)]
            drops = [child for child in others if isinstance(child, nn.Dropout)]
            rate = getattr(module, "residual_dropout", 0.0)  # starcoder2's is a number
            plain = len(others) - len(drops) <= 1 and not any(list(child.parameters()) for child in others)
            return (up, down) if plain and len(drops) <= 1 and rate == 0.0 else None
    return None


def bias_gelu_forward(names: tuple[str, str], approximate: Literal["none", "tanh"]) -> Callable[..., torch.Tensor]:
    """A wrapped projection (an adapter) runs its own forward."""
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


BIAS_GELU_MLP = ModulePattern(
    "bias_gelu",
    two_products,
    lambda module, approximate: bias_gelu_forward(two_products(module), approximate),  # type: ignore[arg-type]
    gelu_of,
)


# ---- rotary embeddings


def rotary_function(module: nn.Module) -> Any:
    """The forward of an attention module that calls `apply_rotary_pos_emb` from its own file, undecorated."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return (
        forward
        if code is not None and ROTARY_FUNCTION in code.co_names and ROTARY_FUNCTION in forward.__globals__
        else None
    )


def with_our_rotary(forward: Any) -> Callable[..., Any]:
    """The same code with `apply_rotary_pos_emb` bound to our kernel; other users of that file are not touched."""
    namespace = dict(forward.__globals__)
    namespace[ROTARY_FUNCTION] = _apply_rotary
    ours = types.FunctionType(forward.__code__, namespace, forward.__name__, forward.__defaults__, forward.__closure__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


def _apply_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    # projections are used nowhere else, so that they may be overwritten where no gradient is recorded
    in_place = not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad))
    if unsqueeze_dim == 1:
        return rope(q, k, cos, sin, in_place=in_place)
    q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, in_place=in_place)
    return q.transpose(1, 2), k.transpose(1, 2)


def rotary_form(module: nn.Module, *, gradients: bool, **_: object) -> str | Mismatch:
    """Return the form of a rotary embedding function, found by running it, or how it differs from the known one."""
    rotate = rotary_function(module).__globals__[ROTARY_FUNCTION]
    width = getattr(module, "head_dim", None)
    if not isinstance(width, int):
        return Mismatch("its heads have no one width")
    q = _random(module, 1, 4, 5, width)
    k = _random(module, 1, 2, 5, width).flip(-1)
    angle = torch.rand(1, 5, width // 2, generator=torch.Generator().manual_seed(0)) * 6
    angle = torch.cat([angle, angle], -1).to(q)

    def by(rotate: Callable[..., object]) -> Callable[..., object]:
        return lambda q, k: rotate(q, k, angle.cos(), angle.sin())

    return compare_forwards(nn.Module(), by(rotate), by(_apply_rotary), q, k, gradients=gradients) or "half-split"


ROTARY_EMBEDDING = ModulePattern(
    "rope", rotary_function, lambda module, form: with_our_rotary(rotary_function(module)), rotary_form
)
