"""A whole copy of a model that trains, which answers with the weights that it was given last."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from distill.models.cards import runs_our_kernels
from distill.models.joined import join_siblings
from distill.models.patching import UNDO, patch
from distill.models.shared_input import GROUP

FILE, STEP = "answers_from.safetensors", "step"  # of a checkpoint


class Snapshot:
    """The copy, and the optimizer step of its weights (None before it was given any).

    Args:
        model: before DDP or FSDP wrap it. The copy has its classes' own forwards, without losses and attention of ours,
            with our layers where they are launched.
    """

    def __init__(self, model: nn.Module) -> None:
        self.step: int | None = None
        self.model = copy.deepcopy(model).requires_grad_(False)
        for module in self.model.modules():
            for name in ("forward", UNDO, GROUP):
                module.__dict__.pop(name, None)
        if runs_our_kernels(next(self.model.parameters()).device):
            patch(self.model, "teacher", attention=None, log_it=False)
            join_siblings(self.model)
        self._trained = [name for name, p in model.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def take(self, model: nn.Module, step: int) -> None:
        """The weights of `model` after `step` optimizer steps; where they lie in shards, all processes must call it."""
        own, theirs = dict(self.model.named_parameters()), dict(model.named_parameters())
        for name in self._trained:
            weight = theirs[name]
            own[name].copy_(weight.full_tensor() if isinstance(weight, DTensor) else weight)
        self.step = step

    def save(self, checkpoint: Path) -> None:
        """Write it into a checkpoint's folder."""
        own = dict(self.model.named_parameters())
        # safetensors takes no tensors that share memory
        weights = {name: own[name].detach().to("cpu", copy=True) for name in self._trained}
        save_file({STEP: torch.tensor(self.step)} | weights, checkpoint / FILE)

    @torch.no_grad()
    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint."""
        state, own = load_file(checkpoint / FILE), dict(self.model.named_parameters())
        self.step = int(state[STEP])
        for name in self._trained:
            own[name].copy_(state[name])
