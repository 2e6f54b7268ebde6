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

from distill.models.layers import is_offloaded
from distill.models.patch.shared_input import (
    FP8_GROUP,
    GROUP,
    PLAIN,
    SharedInput,
    projection_forward,
    sharing_forward,
    siblings_of,
)
from distill.models.patch.swaps import OTHER, PatchReport, Role, Swap, apply_swap, replace_forward, restore_forward

MAX_JOINED_WIDTH = 2048  # input width up to which a training step gains; single GEMMs of wider layers fill a GPU


class SharedInputs(Swap):
    """Swap of modules whose sibling projections have one gradient of their input, in a student."""

    kind = "shared_input"

    def __init__(self, model: nn.Module, role: Role, report: PatchReport) -> None:
        self.trains = role == "student"

    def applies(self, module: nn.Module) -> str | None:
        """Accept modules with plain sibling projections; a teacher has no gradients to share."""
        return None if self.trains and siblings_of(module) is not None else OTHER

    def swap(self, module: nn.Module) -> None:
        group = siblings_of(module)
        assert group is not None
        for member in (module, *group.layers.values()):
            member.__dict__[GROUP] = group
        replace_forward(module, sharing_forward(module))
        for layer in group.layers.values():
            replace_forward(layer, projection_forward)

    def restore(self, module: nn.Module) -> None:
        group = module.__dict__[GROUP]
        for layer in group.layers.values():
            restore_forward(layer)
        restore_forward(module)
        for member in (module, *group.layers.values()):
            member.__dict__.pop(GROUP, None)


class _JoinedProjections(SharedInputs):
    """Swap of modules whose sibling projections become one product; see `join_projections`."""

    kind = "joined"

    def __init__(self, *, trains: bool) -> None:
        self.trains = trains
        self.shared: list[nn.Module] = []  # modules whose projections no other swap had grouped before

    def applies(self, module: nn.Module) -> str | None:
        group = _group(module)
        layers = [] if group is None else list(group.layers.values())
        if not layers or any(FP8_GROUP in layer.__dict__ for layer in layers):
            return OTHER
        has_norm = any("norm" in name for name, _ in module.named_children())
        if self.trains and (has_norm or layers[0].in_features > MAX_JOINED_WIDTH):
            return OTHER
        return None if _can_join([layer.weight for layer in layers]) else OTHER

    def swap(self, module: nn.Module) -> None:
        if GROUP not in module.__dict__:
            super().swap(module)
            self.shared.append(module)
        group = module.__dict__[GROUP]
        layers = list(group.layers.values())
        _join([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        if len(biases) == len(layers) and _can_join(biases):
            _join(biases)
        group.joined = True

    def restore(self, module: nn.Module) -> None:
        if module in self.shared:  # the weights of the others stay one after another, and their products one
            super().restore(module)


def join_projections(model: nn.Module, *, trains: bool = False) -> int:
    """Join sibling projections where possible, after `patch` and before the model is sharded.

    Offloaded models, layers in fp8 or other formats, and parameters that share memory already are not changed.

    Args:
        model: A causal language model of transformers, on its final device; adapted projections stay apart.
        trains: True for training steps: wide layers are skipped too, and attention with a norm between projection and
            rotation, which would copy the columns first.

    Returns:
        Number of groups of layers that were joined.
    """
    return 0 if is_offloaded(model) else apply_swap(model, _JoinedProjections(trains=trains))


def _group(module: nn.Module) -> SharedInput | None:
    """Return the group of a module's projections, also where another swap has made it."""
    own: SharedInput | None = module.__dict__.get(GROUP)
    if own is None:
        return siblings_of(module)
    return None if module in own.layers.values() else own


def _can_join(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether parameters are adjacent already, or of one kind, apart in memory and aligned to 16 bytes."""
    if adjacent_as_one(parameters) is not None:
        return True
    first = parameters[0]
    for p in parameters:
        alike = type(p) in PLAIN and (p.dtype, p.device, p.is_meta) == (first.dtype, first.device, False)
        whole = p.is_contiguous() and p.numel() * p.element_size() == p.untyped_storage().nbytes()
        if not (alike and whole and p.is_floating_point() and p.numel() * p.element_size() % 16 == 0):
            return False
    return True


def _join(parameters: Sequence[torch.Tensor]) -> None:
    """Concatenate parameters in memory, unless they are adjacent already."""
    if adjacent_as_one(parameters) is not None:
        return
    parts = torch.cat([p.detach() for p in parameters]).split([len(p) for p in parameters])
    for p, part in zip(parameters, parts, strict=True):
        p.data = part
