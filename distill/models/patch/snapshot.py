"""Unsharded copy of a model that trains, for generation with the weights of the last `copy_from`."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distill.models.gpu_specs import runs_our_kernels
from distill.models.patch.joined_projections import join_projections
from distill.models.patch.patching import patch
from distill.models.patch.shared_input import GROUP
from distill.models.patch.swaps import FORWARDS, SWAPPED


class Snapshot:
    """Frozen, unsharded copy of `model` on this device, as `Snapshot.model`.

    Args:
        model: before DDP or FSDP wrap it. The copy has its classes' own forwards, without losses and attention of ours,
            with our layers where they are launched.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        for module in self.model.modules():
            for name in ("forward", SWAPPED, FORWARDS, GROUP):
                module.__dict__.pop(name, None)
        if runs_our_kernels(next(self.model.parameters()).device):
            patch(self.model, "teacher", attention=None, log_it=False)
            join_projections(self.model)
        self._trained = [name for name, p in model.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def copy_from(self, model: nn.Module) -> None:
        """The weights of `model` as they are; where they lie in shards, all processes must call it."""
        own = dict(self.model.named_parameters())
        theirs = dict(model.named_parameters())
        for name in self._trained:
            weight = theirs[name]
            own[name].copy_(weight.full_tensor() if isinstance(weight, DTensor) else weight)
