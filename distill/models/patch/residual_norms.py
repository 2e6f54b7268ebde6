"""Residual additions fused with the norm that follows, in decoder layers of two known forms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from distill_kernels.matmul.fp8 import Fp8Linear
from torch import nn

from distill.core.errors import first_line
from distill.models.head import decoder_of
from distill.models.names import PRE_NORM_LAYER, SANDWICH_NORM_LAYER
from distill.models.patch.products import takes_residual
from distill.models.patch.shared_input import cast_dtype
from distill.models.patch.swaps import ModulePattern
from distill.models.trial import FORWARD_ERRORS, Mismatch, compare_forwards


def fusable_form(module: Any) -> str | None:
    """Return the form of a layer whose norms run our forward, of `LAYER_FORWARDS`; None for any other module."""
    children = {name for name, _ in module.named_children()}
    if "forward" in module.__dict__ or not children >= PRE_NORM_LAYER or not takes_residual(module.input_layernorm):
        return None
    if children == PRE_NORM_LAYER and takes_residual(module.post_attention_layernorm):
        return "pre_norm"
    return "sandwich" if children == SANDWICH_NORM_LAYER and takes_residual(module.pre_feedforward_layernorm) else None


def _attend(
    layer: Any, hidden_states: torch.Tensor, kwargs: dict[str, object], casts: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.dtype | None]:
    """Return attention's output, its residual, and the dtype that norms write."""
    dtype = cast_dtype(hidden_states, layer.self_attn, layer.mlp) if casts else None
    fp8 = dtype is None and _reads_fp8(layer.self_attn, layer.input_layernorm.weight, hidden_states)
    normed, hidden_states = layer.input_layernorm(hidden_states, dtype=dtype, and_input=True, fp8=fp8)
    return layer.self_attn(hidden_states=normed, **kwargs)[0], hidden_states, dtype


def _reads_fp8(reader: nn.Module, weight: torch.Tensor, *given: torch.Tensor) -> bool:
    """Return whether the output of a norm for `reader` may be quantised at once: all its GEMMs are in fp8."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or any(x.dtype != weight.dtype for x in given):
        return False
    weights = ((child, getattr(child, "weight", None)) for child in reader.children())
    products = [child for child, own in weights if own is not None and own.dim() > 1]
    return bool(products) and all(type(child) is Fp8Linear and "forward" not in child.__dict__ for child in products)


def _pre_norm_forward(casts: bool, adds: bool) -> Callable[..., torch.Tensor]:
    def forward(self: Any, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        attended, residual, dtype = _attend(self, hidden_states, kwargs, casts)
        fp8 = dtype is None and _reads_fp8(self.mlp, self.post_attention_layernorm.weight, attended, residual)
        normed, residual = self.post_attention_layernorm(attended, residual, dtype, fp8=fp8)
        return self.mlp(normed, residual) if adds else residual + self.mlp(normed)

    return forward


def _sandwich_forward(casts: bool, adds: bool) -> Callable[..., torch.Tensor]:
    def forward(self: Any, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        attended, residual, dtype = _attend(self, hidden_states, kwargs, casts)
        attended = self.post_attention_layernorm(attended)
        fp8 = dtype is None and _reads_fp8(self.mlp, self.pre_feedforward_layernorm.weight, attended, residual)
        normed, residual = self.pre_feedforward_layernorm(attended, residual, dtype, fp8=fp8)
        return residual + self.post_feedforward_layernorm(self.mlp(normed))

    return forward


# by form; each takes whether attention and MLP do nothing with their input but cast it, under autocast, for products,
# and whether the MLP takes the residual that its output is added to
LAYER_FORWARDS: dict[str, Callable[[bool, bool], Callable[..., torch.Tensor]]] = {
    "pre_norm": _pre_norm_forward,
    "sandwich": _sandwich_forward,
}


def layer_matches(layer: nn.Module, *, model: nn.Module, gradients: bool) -> Literal["as it is", "casts"] | Mismatch:
    """Run one whole layer both ways, called as the decoder calls it.

    Args:
        layer: A layer of `model`, of a form of `LAYER_FORWARDS`.
        model: Bare model.
        gradients: Compare gradients as well.

    Returns:
        Which of its two kinds computes what the layer does, or why none does.
    """
    seen: list[tuple[tuple[torch.Tensor, ...], dict[str, object]]] = []

    def remember(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, object]) -> None:
        seen.append((args, kwargs))

    hook = layer.register_forward_pre_hook(remember, with_kwargs=True)
    ids = torch.arange(6, device=next(model.parameters()).device)[None]
    try:
        with torch.no_grad():
            decoder_of(model)(input_ids=ids, use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except FORWARD_ERRORS as error:  # an adapter that needs more inputs (PEFT's Poly: task ids)
        return Mismatch(f"the model does not run on token ids alone ({first_line(error):.120})")
    finally:
        hook.remove()
    (args, kwargs), *_ = seen
    if len(args) != 1:
        return Mismatch("it is called with more than hidden states")
    own: Callable[..., object] = functools.partial(type(layer).forward, layer, **kwargs)
    ours = functools.partial(_layer_forward(layer, "as it is"), layer, **kwargs)
    reason = compare_forwards(layer, own, ours, *args, gradients=gradients)
    if reason:
        return reason
    return "casts" if args[0].dtype == torch.float32 and _only_casts(layer, args[0], kwargs) else "as it is"


@torch.no_grad()
def _only_casts(layer: Any, x: torch.Tensor, kwargs: dict[str, object]) -> bool:
    """Return whether attention and MLP give the same bits, under autocast, for `x` and for `x` cast beforehand."""
    with torch.autocast(x.device.type, torch.bfloat16):
        if cast_dtype(x, layer.self_attn, layer.mlp) is None:
            return False
        try:
            pairs = [[layer.self_attn(hidden_states=each, **kwargs)[0], layer.mlp(each)] for each in (x, x.bfloat16())]
        except RuntimeError:  # computed in fp32 alone
            return False
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def _layer_forward(layer: Any, form: str) -> Callable[..., torch.Tensor]:
    """Return our forward of a layer, which casts where its verdict says so."""
    return LAYER_FORWARDS[fusable_form(layer)](form == "casts", takes_residual(layer.mlp))  # type: ignore[index]


RESIDUAL_NORM = ModulePattern("residual_norm", fusable_form, _layer_forward, layer_matches)
