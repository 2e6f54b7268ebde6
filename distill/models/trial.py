"""Run both and compare: what decides whether a replacement of ours computes what a model's own code does.

    compare_forwards(module, own, ours, x)      a module: outputs and gradients, on perturbed parameters
    distances(ours, own) <= ...                 a model: hidden states or logits, a token at a time
    relative_error(ours, own) <= ...            the same, of all entries together

Every trial takes its tolerance from the table below. Each stands far above the rounding of what is compared and far
below what a wrong weight, position or mask changes.

Initial values can hide a difference: with a residual weight of 1 or a bias of 0, a replacement that ignores the
parameter gives the right output and misses its gradient. Both forwards of a module therefore run on perturbed vectors
and scalars, and for a student the gradients of the inputs and of every parameter are compared, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from distill.core.errors import first_line

Forward = Callable[..., object]
# raised by a forward that was written for another kind of module
FORWARD_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)
NOISE = 0.3  # of a perturbation, relative to the parameter's root mean square

# ---- tolerances: of one module
ROUNDINGS = 16  # an output's error, in units of eps, relative to its largest entry
# a gradient's error, relative to its norm: in units of eps, but not less than LEAST
GRADIENT_ROUNDINGS = 32
LEAST = 1e-4
NEGLIGIBLE = 1e-3  # relative to the largest gradient's norm: below it a gradient is rounding error
# ---- of a whole model, relative
LOGIT_ROUNDINGS = 8  # logits from hidden states and head, in units of eps, relative to the largest (head)
# rows of one shape are mostly the same to the bit; a document alone is of another shape, and rounds otherwise
SAME_SHAPE_ROUNDINGS = 2  # a token's hidden states, but not less than LEAST (patch/packed)
OTHER_SHAPE_ROUNDINGS = 16
OTHER_KERNEL = 0.1  # hidden states of two attentions, or in 8 bits: other sums change which experts tokens get
CUT_WEIGHTS = 1e-3  # logits of a small model in float32, cut or with zeros there (prune/width_trial)
# logits of decoding with a cache: in units of eps, but not more than OTHER_KERNEL (generation/support_check)
DECODED_ROUNDINGS = 1e3
FUSED_STEP_FLOAT32 = 1e-4  # logits of the fused decoding step (generation/support_check)
FUSED_STEP_16_BITS = 0.05
EMBEDDING = 2e-2  # embeddings as one multiple of their table, in 16 bits (prune/narrow)


def rounding(dtype: torch.dtype, units: float) -> float:
    """Return `units` of rounding errors of `dtype`, but not less than `LEAST`."""
    return max(units * torch.finfo(dtype).eps, LEAST)


@dataclass(frozen=True)
class Mismatch:
    """Reason why a replacement is not used."""

    reason: str


def distances(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the relative distance of each token, float64 [..., T], of two [..., T, hidden]."""
    one = one.double()
    other = other.double()
    return (one - other).norm(dim=-1) / one.norm(dim=-1).clamp_min(1e-30)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference of two tensors, relative to that of `expected`."""
    return float((actual - expected).norm() / expected.norm())


def is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    scale = expected.abs().max().float()
    error = (actual.float() - expected.float()).abs().max()
    return bool(error <= ROUNDINGS * torch.finfo(expected.dtype).eps * scale)


def compare_forwards(
    module: nn.Module, own: Forward, ours: Forward, *inputs: torch.Tensor, gradients: bool
) -> Mismatch | None:
    """Compare two forwards of `module` on perturbed parameters.

    Args:
        module: Module in eval mode; its parameters are perturbed inside, and restored.
        own, ours: Called with `inputs`; each returns a tensor or several.
        gradients: Compare those of the inputs and of every parameter as well.

    Returns:
        The difference; None where there is none.
    """
    with perturbed(module), _differentiable(module, gradients) as parameters:
        results = []
        tried = {"its forward has other inputs or outputs": own, "the fused forward does not run on it": ours}
        for otherwise, forward in tried.items():
            try:
                results.append(_run(forward, inputs, parameters, gradients))
            except torch.OutOfMemoryError:
                raise
            except FORWARD_ERRORS as error:
                return Mismatch(f"{otherwise} ({first_line(error):.120})")
    (expected, wanted), (actual, given) = results
    if len(actual) != len(expected) or not all(map(is_close, actual, expected)):
        return Mismatch("its output differs")
    largest = max((tensor.norm().item() for tensor in wanted.values()), default=0.0)
    for name, gradient in wanted.items():
        allowed = rounding(gradient.dtype, GRADIENT_ROUNDINGS)
        distance = (given[name].double() - gradient.double()).norm().item()
        if not distance <= allowed * max(gradient.double().norm().item(), NEGLIGIBLE * largest):
            return Mismatch(f"the gradient of its {name} differs")
    return None


def _run(
    forward: Forward, inputs: tuple[torch.Tensor, ...], parameters: Mapping[str, nn.Parameter], gradients: bool
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the outputs, and the gradients by name of inputs and parameters for one upstream gradient."""
    with torch.set_grad_enabled(gradients):
        given = [tensor.detach().clone().requires_grad_(gradients) for tensor in inputs]
        result = forward(*given)
        outputs = list(result) if isinstance(result, tuple | list) else [result]
        if not all(isinstance(output, torch.Tensor) for output in outputs):
            raise TypeError("it returns more than tensors")
        found = [output for output in outputs if isinstance(output, torch.Tensor)]
        if not gradients:
            return [output.detach() for output in found], {}
        total = torch.stack([(output.double() * _noise(output).double()).sum() for output in found]).sum()
        leaves = {f"input {number}": tensor for number, tensor in enumerate(given)} | dict(parameters)
        grown = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return [output.detach() for output in found], dict(zip(leaves, grown, strict=True))


@contextlib.contextmanager
def perturbed(module: nn.Module) -> Iterator[None]:
    """Add noise to the vectors, scalars and constants among the parameters of `module` inside the context."""
    before = {parameter: parameter.data for parameter in module.parameters() if _hides(parameter)}
    try:
        for number, (parameter, data) in enumerate(before.items()):
            size = data.float().square().mean().sqrt().clamp_min(1e-3)
            scale = torch.where(size > 1e-3, size, 1.0)
            parameter.data = (data + NOISE * scale * _noise(data, number)).to(data.dtype)
        yield
    finally:
        for parameter, data in before.items():
            parameter.data = data


def _hides(parameter: nn.Parameter) -> bool:
    """Return whether a replacement could ignore a parameter without changing the output: vectors and constants."""
    if not _is_plain(parameter) or not parameter.numel():
        return False
    flat = parameter.detach().flatten()
    return flat.numel() == max(parameter.shape, default=1) or bool(flat[0] == flat[-1] and (flat == flat[0]).all())


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter and parameter.is_floating_point() and parameter.itemsize > 1


@contextlib.contextmanager
def _differentiable(module: nn.Module, gradients: bool) -> Iterator[dict[str, nn.Parameter]]:
    """Require gradients of all floating-point parameters of `module`, which it yields, inside the context."""
    if not gradients:
        yield {}
        return
    parameters = {name: parameter for name, parameter in module.named_parameters() if _is_plain(parameter)}
    before = [parameter.requires_grad for parameter in parameters.values()]
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    try:
        yield parameters
    finally:
        for parameter, required in zip(parameters.values(), before, strict=True):
            parameter.requires_grad_(required)


def _noise(like: torch.Tensor, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(like.device, like.dtype if like.dtype != torch.float64 else torch.float64)
