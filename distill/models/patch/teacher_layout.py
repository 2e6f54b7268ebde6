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

import torch
from distill_kernels.launch import device_facts
from distill_kernels.matmul.gated import MIN_SIZES, MinSize, gated_linear, interleave_rows, joined_weight
from distill_kernels.matmul.shared_input import compute_dtype
from torch import nn

from distill.models.layers import is_offloaded
from distill.models.sharding import is_sharded

log = logging.getLogger(__name__)

GATED = "_distill_gated"  # of an MLP that `patch` knows: names of gate and up, and the activation
INTERLEAVED = "_distill_interleaved"  # the same and from how many rows on, where the two are interleaved


@torch.no_grad()
def interleave(model: nn.Module, min_size: MinSize | None = None) -> Counter[str]:
    """Interleave gate and up of the MLPs of a patched, frozen model, in place; a layer at a time is there twice.

    Args:
        min_size: from how many inputs and rows on one product is taken; None for what was measured on such a GPU.

    Returns:
        How many MLPs, by the name they have in a `PatchReport`; a log line says how many stay apart.
    """
    min_size = min_size or MIN_SIZES.get(device_facts(next(model.parameters()).device).family)
    whole, apart, done = not (is_offloaded(model) or is_sharded(model)), 0, Counter[str]()
    for module in model.modules():
        if (found := module.__dict__.get(GATED)) is None:
            continue
        gate, up = _projections(module, found)
        if min_size is None or not whole or not _may_be(gate, up, min_size):
            apart += 1
            continue
        gate.weight.data, up.weight.data = interleave_rows(gate.weight, up.weight)
        module.__dict__[INTERLEAVED] = (*found, min_size.rows)
        done["interleaved"] += 1
        if gate.weight.is_cuda:  # two blocks that were freed do not hold the next one, of twice their size
            torch.cuda.empty_cache()
    if apart:
        why = (
            "no plain frozen layers of 16 bits and that width"
            if min_size
            else "one product is not measured on this GPU"
        )
        log.debug("gate and up of %d MLPs stay apart: %s", apart, why if whole else "the model is offloaded or sharded")
    return done


@torch.no_grad()
def separate(module: nn.Module) -> None:
    """Give the projections of an MLP memory of their own again, where they are interleaved, and forget what it is."""
    module.__dict__.pop(GATED, None)
    for layer in _projections(module, found) if (found := module.__dict__.pop(INTERLEAVED, None)) else ():
        layer.weight.data = layer.weight.contiguous()


def gated_product(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """`activation(gate(x)) * up(x)` of an interleaved MLP by one product; None where that is not the way to take."""
    found = module.__dict__.get(INTERLEAVED)
    if found is None or torch.compiler.is_compiling() or torch.is_grad_enabled() or x.numel() < found[3] * x.shape[-1]:
        return None
    gate, up = _projections(module, found)
    if not (_is_plain(gate) and _is_plain(up) and compute_dtype(x) == x.dtype == gate.weight.dtype):
        return None
    weight = joined_weight(gate.weight, up.weight)
    return None if weight is None else gated_linear(x, weight, None, found[2])


def _projections(module: nn.Module, found: tuple[str, ...]) -> tuple[nn.Linear, nn.Linear]:
    return getattr(module, found[0]), getattr(module, found[1])


def _is_plain(layer: nn.Module) -> bool:
    """Return whether calling a layer only multiplies by its own weight."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or "forward" in layer.__dict__
    return type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and layer.bias is None and not hooks


def _may_be(gate: nn.Linear, up: nn.Linear, min_size: MinSize) -> bool:
    """Return whether two projections can be interleaved, and whether that is faster."""
    if not (_is_plain(gate) and _is_plain(up)) or gate.in_features < min_size.inputs:
        return False
    one, other = gate.weight, up.weight
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    fits = one.dtype in (torch.bfloat16, torch.float16) and not any(size % 8 for size in one.shape)
    return alike and fits and one.is_contiguous() and not (one.requires_grad or other.requires_grad)
