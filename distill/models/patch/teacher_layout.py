"""Memory layout of a frozen model's weights for the fused kernels: interleaved gate and up projections.

    report = patch(teacher, "teacher")
    report.swapped.update(interleave(teacher))

Gate and up of a gated MLP lie in one matrix, row by row in turn, for the product that computes both and their
activation (matmul/gated.py). Each stays a parameter with its own name, shape and values, a view of every other row:
fingerprints, copies and other products read what they read before. Whatever happens to a layer later (8 bits, an
adapter, a hook, weights moved or put in its place) takes the usual path again, as do few rows, gradients and layers
that are compiled. safetensors refuses such views, so that it is for models that are not saved, or `unpatch` first.

Where the product was measured to win (`matmul.gated.MIN_SIZES`); on an H200 a step of 8B to 1B takes 1.6 % less.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from distill_kernels.launch import device_facts
from distill_kernels.matmul.gated import MIN_SIZES, MinSize, gated_linear, interleave_rows, joined_weight
from distill_kernels.matmul.shared_input import compute_dtype
from torch import nn

from distill.models.layers import is_offloaded
from distill.models.load.shared_weights import is_shared
from distill.models.patch.products import down_of_gated, is_plain
from distill.models.patch.swaps import OTHER, Swap, apply_swap, forward_attribute, replace_forward, restore_forward
from distill.models.sharding import is_sharded

log = logging.getLogger(__name__)

NOT_PLAIN = "no plain frozen layers of 16 bits and that width that no other model shares"
INTERLEAVED = "_distill_interleaved"  # of an MLP: its names, its activation, from how many rows on one product is taken


class _InterleavedMlps(Swap):
    """Swap of gated MLPs of a frozen model for one product of gate and up.

    Args:
        model: Patched model.
        min_size: Number of inputs and rows from which one product is faster; None where it was not measured on such a
            GPU.
    """

    kind = "interleaved"

    def __init__(self, model: nn.Module, min_size: MinSize | None) -> None:
        self.min_size = min_size
        self.whole = not (is_offloaded(model) or is_sharded(model))

    def applies(self, module: nn.Module) -> str | None:
        found = forward_attribute(module, "gated")
        if found is None:
            return OTHER
        if not self.whole or self.min_size is None:
            return "one product is not measured on this GPU" if self.whole else "the model is offloaded or sharded"
        return None if _may_be(*_projections(module, found), self.min_size) else NOT_PLAIN

    def swap(self, module: nn.Module) -> None:
        assert self.min_size is not None
        gated = forward_attribute(module, "gated")
        gate, up = _projections(module, gated)
        gate.weight.data, up.weight.data = interleave_rows(gate.weight, up.weight)
        module.__dict__[INTERLEAVED] = (*gated, self.min_size.rows)
        replace_forward(module, interleaved_forward(module))
        if gate.weight.is_cuda:  # two blocks that were freed do not hold the next one, of twice their size
            torch.cuda.empty_cache()

    @torch.no_grad()
    def restore(self, module: nn.Module) -> None:
        for layer in _projections(module, module.__dict__.pop(INTERLEAVED)):
            layer.weight.data = layer.weight.contiguous()
        restore_forward(module)


@torch.no_grad()
def interleave(model: nn.Module, min_size: MinSize | None = None) -> Counter[str]:
    """Interleave gate and up of the MLPs of a patched, frozen model, in place; a layer at a time is there twice.

    Args:
        model: Patched model.
        min_size: Least number of inputs and rows for one GEMM; None for the number measured on this GPU.

    Returns:
        How many MLPs, by the name they have in a `PatchReport`; a log line says how many stay apart.
    """
    min_size = min_size or MIN_SIZES.get(device_facts(next(model.parameters()).device).family)
    swap = _InterleavedMlps(model, min_size)
    apart = Counter(filter(None, map(swap.applies, model.modules())))
    done = apply_swap(model, swap)
    for reason, count in apart.items():
        log.debug("gate and up of %d MLPs stay apart: %s", count, reason)
    return Counter({swap.kind: done} if done else {})


def interleaved_forward(module: nn.Module) -> Callable[..., torch.Tensor]:
    """Return the replacement of an MLP's forward, which takes one product where that is the way to take."""
    inner: Callable[..., torch.Tensor] = module.forward.__func__  # type: ignore[attr-defined]

    def forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        both = gated_product(self, x)
        if both is None:
            return inner(self, x, residual)
        down = getattr(self, self.__dict__[INTERLEAVED][2])
        return down_of_gated(down, lambda hidden: hidden, both, residual=residual)

    return forward


def gated_product(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """`activation(gate(x)) * up(x)` of an interleaved MLP by one product; None where that is not the way to take."""
    *found, activation, rows = module.__dict__[INTERLEAVED]
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.numel() < rows * x.shape[-1]:
        return None
    gate, up = _projections(module, found)
    if not (is_plain(gate) and is_plain(up) and compute_dtype(x) == x.dtype == gate.weight.dtype):
        return None
    weight = joined_weight(gate.weight, up.weight)
    return None if weight is None else gated_linear(x, weight, None, activation)


def _projections(module: nn.Module, found: Sequence[str]) -> tuple[nn.Linear, nn.Linear]:
    return getattr(module, found[0]), getattr(module, found[1])


def _may_be(gate: nn.Linear, up: nn.Linear, min_size: MinSize) -> bool:
    """Return whether two projections can be interleaved, and whether that is faster."""
    if not (is_plain(gate) and is_plain(up)) or gate.in_features < min_size.inputs:
        return False
    one = gate.weight
    other = up.weight
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    fits = one.dtype in (torch.bfloat16, torch.float16) and not any(size % 8 for size in one.shape)
    # another model computes with the weights too where they are shared, and may be saved
    shared = is_shared(gate.weight) or is_shared(up.weight)
    return alike and fits and one.is_contiguous() and not (shared or one.requires_grad or other.requires_grad)
