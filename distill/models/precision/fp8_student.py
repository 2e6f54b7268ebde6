"""A student whose linear layers compute in fp8 while it trains; parameters, names and saving stay as they are.

Only forwards are replaced, and only in training mode: a student is evaluated and answers as it will be used. Sizes that
gain: a product of [M, K] and [K, N] takes M N K / rate, and quantising for it about M (N + K) / bandwidth, so that what
counts is N K / (N + K), with N over all layers that read the same input. On an H200 they break even at about 400.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from distill_kernels.matmul.fp8_train import fp8_linears, fp8_swiglu_mlp
from distill_kernels.matmul.siblings import SIBLINGS, SiblingOutputs, compute_dtype
from torch import nn
from torch.nn import functional as F

from distill.core.eval_mode import eval_mode
from distill.models.head import bare
from distill.models.layers import find_layers
from distill.models.patch.forward_comparison import is_close
from distill.models.patch.patching import UNDO, replace_forward
from distill.models.patch.shared_input import FP8_GROUP

GAINS_FROM = 512  # N K / (N + K)
GATED = ("gate_proj", "up_proj", "down_proj")


def compute_in_fp8(model: nn.Module) -> int:
    """Have the linear layers of the decoder layers compute in fp8 in training mode, as `unpatch` undoes.

    Call it after `patch` and after adapters are added (whose frozen base layers then compute in fp8), before the
    model is sharded. On a GPU layers that are too small to gain are left; on a CPU, which only emulates, none are.

    Returns:
        How many layers.

    Raises:
        ValueError: None would.
    """
    undo: list[Callable[[], None]] = bare(model).__dict__.setdefault(UNDO, [])
    groups = [group for layer in find_layers(model)[1] for group in _groups(layer) if _gains(group)]
    if not groups:
        raise ValueError(
            f"student.compute: fp8 expected linear layers with sizes divisible by 16 and N K / (N + K) of {GAINS_FROM} "
            "or more, got none; leave compute out"
        )
    for group in groups:
        siblings = SiblingOutputs[torch.Tensor](), group
        for linear in group:
            linear.__dict__[FP8_GROUP] = siblings  # copies of a model have their own
            replace_forward(linear, _linear_forward, undo)
            undo.append(functools.partial(linear.__dict__.pop, FP8_GROUP))
    computed = {linear for group in groups for linear in group}
    verdicts: dict[tuple[object, ...], bool] = {}
    for module in model.modules():
        parts = [getattr(module, name, None) for name in GATED]
        if all(part in computed for part in parts):
            key = (type(module), *(part.weight.shape for part in parts))  # type: ignore[union-attr]
            if key not in verdicts:
                verdicts[key] = _is_swiglu(module)
            if verdicts[key]:
                replace_forward(module, _mlp_forward(module), undo)
    return len(computed)


def _groups(layer: nn.Module) -> Iterator[list[nn.Linear]]:
    """The linear layers of a decoder layer; those that read the same input together."""
    siblings = {names[0]: names for names in SIBLINGS}
    for path, parent in layer.named_modules():
        if "lora_" in path:
            continue
        seen: set[str] = set()
        for name in [name for name, _ in parent.named_children() if name != "base_layer"]:
            names = siblings.get(name, (name,))
            group = [linear for other in names if (linear := _linear(getattr(parent, other, None))) is not None]
            if name in seen or not group:
                continue
            if len(group) < len(names):
                group, names = [linear for linear in [_linear(getattr(parent, name))] if linear is not None], (name,)
            seen.update(names)
            if group:
                yield group


def _linear(module: nn.Module | None) -> nn.Linear | None:
    """A layer that can, or the one inside its adapters."""
    base = module.get_base_layer() if hasattr(module, "get_base_layer") else module  # type: ignore[operator, union-attr]
    fits = type(base) is nn.Linear and base.in_features % 16 == 0 and base.out_features % 16 == 0
    return base if fits else None


def _gains(group: Sequence[nn.Linear]) -> bool:
    inputs, outputs = group[0].in_features, sum(linear.out_features for linear in group)
    return not group[0].weight.is_cuda or inputs * outputs / (inputs + outputs) >= GAINS_FROM


@torch.no_grad()
def _is_swiglu(mlp: nn.Module) -> bool:
    """Return whether a gated MLP without biases computes `down(silu(gate(x)) * up(x))`, by running it."""
    gate, up, down = (getattr(mlp, name) for name in GATED)
    if any(part.bias is not None or part._forward_hooks or part._forward_pre_hooks for part in (gate, up, down)):
        return False
    x = 8 * torch.randn(3, gate.in_features, generator=torch.Generator().manual_seed(0)).to(gate.weight)
    with eval_mode(mlp):
        return is_close(mlp(x), down(F.silu(gate(x)) * up(x)))


def _outputs_of(
    layers: Sequence[nn.Linear], x: torch.Tensor
) -> tuple[dict[nn.Linear, torch.Tensor], Sequence[torch.Tensor]]:
    weights = [layer.weight for layer in layers]
    return dict(zip(layers, fp8_linears(x.to(compute_dtype(x)), *weights), strict=True)), weights


def _linear_forward(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if not linear.training:
        return nn.Linear.forward(linear, x)
    outputs, layers = linear.__dict__[FP8_GROUP]
    y: torch.Tensor = outputs.take(linear, x, functools.partial(_outputs_of, layers))
    return y if linear.bias is None else y + linear.bias.to(y.dtype)


def _mlp_forward(module: nn.Module) -> Callable[..., torch.Tensor]:
    before = getattr(module.forward, "__func__", type(module).forward)

    def forward(mlp: nn.Module, x: torch.Tensor, *residual: torch.Tensor) -> torch.Tensor:
        if not mlp.training:
            return before(mlp, x, *residual)
        y = fp8_swiglu_mlp(x.to(compute_dtype(x)), *(getattr(mlp, name).weight for name in GATED))
        return residual[0] + y if residual else y

    return forward
