"""Activation-aware scaling before rounding (AWQ; Lin et al., 2023, arXiv 2306.00978).

A linear layer's input columns are multiplied by `s` and what produces the input is divided by it, which changes nothing
before rounding; columns with large activations then have smaller errors. `s = a^alpha`, normalised, where `a` is the
root mean square of each input; alpha is the one of 20 whose rounding costs least, `tr((W - Q) H (W - Q)^T)`.

An input is produced by a norm, or by the linear layer before it (values before the output projection, up before down).
Each change is made only where the decoder layer's output stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from distill_kernels.quantisation.formats import reference_fake_quantise
from torch import nn

from distill.models.precision.linear_group import Group

STEPS = 20  # values of alpha in [0, 1)
BEFORE = {"o_proj": "v_proj", "down_proj": "up_proj"}
UNCHANGED = 1e-3  # largest relative change of a layer's output


def balance(
    layer: nn.Module, groups: Sequence[Group], formats: Mapping[str, str], run: Callable[[], torch.Tensor]
) -> int:
    """Scale the linear layers of a decoder layer; returns the number of groups that were scaled.

    Args:
        layer: decoder layer.
        groups: its linear layers by their inputs.
        formats: format of each weight.
        run: returns the layer's output on some rows.
    """
    producers = _producers(layer, groups, run)
    count = 0
    for group, producer in zip(groups, producers, strict=True):
        if producer is None:
            continue
        scale = _best(group, formats)
        linears = list(group.linears.values())
        before = run()
        changed = [parameter for module in (producer, *linears) for parameter in module.parameters(recurse=False)]
        kept = [parameter.clone() for parameter in changed]
        for shift in (0.0, 1.0):  # of norms that multiply by 1 + weight
            for linear in linears:
                linear.weight.mul_(scale)
            for parameter in producer.parameters(recurse=False):
                parts = parameter.T if parameter.dim() == 2 else parameter  # rows of a linear layer are its outputs
                parts.add_(shift).div_(scale).sub_(shift)
            if float((run() - before).norm()) <= UNCHANGED * float(before.norm()):
                group.hessian /= scale[:, None] * scale
                count += 1
                break
            for parameter, value in zip(changed, kept, strict=True):
                parameter.copy_(value)
    return count


def _best(group: Group, formats: Mapping[str, str]) -> torch.Tensor:
    """Return the scale of each column [K] whose rounding costs least."""
    size = (group.hessian.diagonal() / max(group.tokens, 1)).sqrt().clamp_min(1e-4)
    best = torch.ones_like(size)
    least = torch.inf
    for step in range(STEPS):
        scale = size ** (step / STEPS)
        scale /= (scale.max() * scale.min()).sqrt()
        cost = 0.0
        for name, linear in group.linears.items():
            weight = linear.weight.float()
            error = reference_fake_quantise(weight * scale, formats[name]) / scale - weight
            cost += float(((error @ group.hessian) * error).sum())
        if cost < least:
            best = scale
            least = cost
    return best


def _producers(layer: nn.Module, groups: Sequence[Group], run: Callable[[], torch.Tensor]) -> list[nn.Module | None]:
    """Return what produces the input of each group: a norm or a linear layer; None where it is neither."""
    inputs: dict[nn.Module, torch.Tensor] = {}
    outputs: list[tuple[nn.Module, object]] = []
    modules = dict(layer.named_modules())
    names = {module: name for name, module in modules.items()}

    def see(module: nn.Module, args: tuple[torch.Tensor, ...], output: object) -> None:
        outputs.append((module, output))
        if isinstance(module, nn.Linear):
            inputs[module] = args[0]

    handles = [module.register_forward_hook(see) for module in modules.values()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    found: list[nn.Module | None] = []
    for group in groups:
        first = next(iter(group.linears.values()))
        norms = [module for module, output in outputs if output is inputs[first]]
        norms = [module for module in norms if [p.dim() for p in module.parameters(recurse=False)][:1] == [1]]
        parent, _, last = names[first].rpartition(".")
        before = modules.get(f"{parent}.{BEFORE[last]}".lstrip(".")) if last in BEFORE else None
        fits = isinstance(before, nn.Linear) and before.out_features == first.in_features
        found.append(norms[0] if norms else before if fits else None)
    return found
