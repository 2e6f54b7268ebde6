"""Exponential moving average of a model's weights:

w <- share w + (1 - share) w_other        added up in float32 or wider
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from distill.models.head import bare

FILE = "teacher.safetensors"  # of a checkpoint


class RunningAverage:
    """Exponential moving average, and the model that holds it.

    Args:
        model: initial value; its weights are changed in place, and may be moved before the first step.
        share: Decay of the average per step, above 0 and below 1.
    """

    def __init__(self, model: nn.Module, share: float) -> None:
        self.model, self.share = model, share
        self.weights: dict[str, torch.Tensor] = {}  # wide weights are the average, narrow ones get a copy of it

    @torch.no_grad()
    def update(self, other: nn.Module) -> None:
        """Update the average by the weights of `other`, bare or inside PEFT.

        Raises:
            ValueError: they are not the same weights by name.
        """
        own, theirs = dict(self.model.named_parameters()), dict(bare(other).named_parameters())
        if own.keys() != theirs.keys():
            raise ValueError(f"teacher.ema: expected the student's weights, got {min(own.keys() ^ theirs.keys())}")
        self.weights = self.weights or {name: p.detach() if _is_wide(p) else p.float() for name, p in own.items()}
        new = [theirs[name].to(weight.dtype) for name, weight in self.weights.items()]
        torch._foreach_lerp_(list(self.weights.values()), new, 1 - self.share)
        self._write(own)

    def save(self, checkpoint: Path) -> None:
        """Write the average into a checkpoint's folder."""
        save_file(self.weights, checkpoint / FILE)

    @torch.no_grad()
    def restore(self, checkpoint: Path) -> None:
        """Load the average from a checkpoint."""
        state, own = load_file(checkpoint / FILE), dict(self.model.named_parameters())
        self.weights = {n: p.detach().copy_(state[n]) if _is_wide(p) else state[n].to(p.device) for n, p in own.items()}
        self._write(own)

    def _write(self, own: Mapping[str, nn.Parameter]) -> None:
        for name, weight in self.weights.items():
            if not _is_wide(own[name]):
                own[name].copy_(weight)


def _is_wide(parameter: torch.Tensor) -> bool:
    return parameter.dtype.itemsize >= 4
