"""Projections with the same input (q, k and v; gate and up) as one GEMM over concatenated weights.

    join_projections(model)

The weights are laid out one after another in memory, and each stays a parameter with its own name, a view of the
joined weight. While a model trains, the joined gradient is one GEMM too, whose rows are the parameters' gradients
(distill_kernels.matmul.shared_input). A decoder layer then has four GEMMs instead of seven, without those that are too
small to fill a GPU, such as k's and v's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from distill_kernels.operands import adjacent_as_one
from torch import nn

from distill.models.head import bare
from distill.models.layers import is_offloaded
from distill.models.patch.lora_forward import adapted_groups
from distill.models.patch.patching import UNDO, share_input
from distill.models.patch.shared_input import FP8_GROUP, GROUP, PLAIN, groups_of

MAX_JOINED_WIDTH = 2048  # input width up to which a training step gains; single GEMMs of wider layers fill a GPU


def join_projections(model: nn.Module, *, trains: bool = False) -> int:
    """Join sibling projections where possible, after `patch` and before the model is sharded.

    Offloaded models, layers in fp8 or other formats, and parameters that share memory already are not changed.

    Args:
        model: A causal language model of transformers, bare or inside PEFT, on its final device.
        trains: For training steps: also skip wide layers, and attention with a norm between projection and rotation,
            which would copy the columns first.

    Returns:
        Number of groups of layers that were joined.
    """
    if is_offloaded(model):
        return 0
    undo, joined = bare(model).__dict__.setdefault(UNDO, []), 0
    own = [(module, module.__dict__[GROUP]) for module in model.modules() if GROUP in module.__dict__]
    groups = [(module, group) for module, group in own if module not in group.layers.values()]
    for module, group in [*groups, *groups_of(model), *adapted_groups(model)]:
        layers = group.weights()
        names = [name for name, _ in module.named_children()]
        unfit = trains and (layers[0].in_features > MAX_JOINED_WIDTH or any("norm" in name for name in names))
        if unfit or any(FP8_GROUP in layer.__dict__ for layer in layers):
            continue
        if _join([layer.weight for layer in layers]):
            biases = [layer.bias for layer in layers if layer.bias is not None]
            if len(biases) == len(layers):
                _join(biases)
            if GROUP not in module.__dict__:
                share_input(module, group, undo)
            group.joined = True
            joined += 1
    return joined


def _join(parameters: Sequence[torch.Tensor]) -> bool:
    """Concatenate parameters in memory, if all are of one kind and aligned to 16 bytes; return whether they are."""
    if adjacent_as_one(parameters) is not None:
        return True
    first = parameters[0]
    for p in parameters:
        alike = type(p) in PLAIN and (p.dtype, p.device, p.is_meta) == (first.dtype, first.device, False)
        whole = p.is_contiguous() and p.numel() * p.element_size() == p.untyped_storage().nbytes()
        if not (alike and whole and p.is_floating_point() and p.numel() * p.element_size() % 16 == 0):
            return False
    parts = torch.cat([p.detach() for p in parameters]).split([len(p) for p in parameters])
    for p, part in zip(parameters, parts, strict=True):
        p.data = part
    return True
