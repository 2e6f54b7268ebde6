"""Projections that read the same activations (q, k and v; gate and up) as one product: their weights become one.

    join_siblings(model)

The weights come to lie after each other in memory, and each stays a parameter with its own name: whatever is copied
into it is in the joined one. While a model trains, the joined gradient likewise is one product, whose rows are the
parameters' gradients (distill_kernels.matmul.shared_input). Of a decoder layer's seven products three fall away, and
with them those that are too small to fill a GPU, such as k's and v's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from distill_kernels.operands import adjacent_as_one
from torch import nn

from distill.models.head import bare
from distill.models.lora_forward import adapted_groups
from distill.models.offload import is_offloaded
from distill.models.patching import UNDO, share_input
from distill.models.shared_input import FP8_GROUP, GROUP, PLAIN, groups_of

WIDEST = 2048  # inputs of layers that a training step gains from; products of wider ones fill a GPU, one by one


def join_siblings(model: nn.Module, *, trains: bool = False) -> int:
    """Join what can be, after `patch` and before the model is sharded.

    Left as they are: offloaded models, layers in fp8 or other formats, and parameters that share memory already.

    Args:
        model: A causal language model of transformers, bare or inside PEFT, on its final device.
        trains: For training steps: wide layers are left as well, and attention that puts a norm between projection and
            rotation, which would copy their columns first.

    Returns:
        How many groups of layers were joined.
    """
    if is_offloaded(model):
        return 0
    undo, joined = bare(model).__dict__.setdefault(UNDO, []), 0
    own = [(module, module.__dict__[GROUP]) for module in model.modules() if GROUP in module.__dict__]
    groups = [(module, group) for module, group in own if module not in group.layers.values()]
    for module, group in [*groups, *groups_of(model), *adapted_groups(model)]:
        layers = group.weights()
        names = [name for name, _ in module.named_children()]
        unfit = trains and (layers[0].in_features > WIDEST or any("norm" in name for name in names))
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
    """Lay them after each other, where all are of one kind and each begins where a kernel may load 16 bytes at once."""
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
