"""Learned projection of the student's hidden states to the teacher's width, for losses that compare layers."""

from __future__ import annotations

import math

import torch
from torch import nn


class LayerProjection(nn.Module):
    """Linear map of the student's hidden states to the teacher's width, trained with the student.

    It has no entry in state dicts: a saved or exported student does not have it, and checkpoints hold it in a file of
    its own (`distill.objectives.layer_matching`).

    Args:
        teacher: Width of the teacher's hidden states.
        student: Width of the student's; where both are equal the map begins as the identity.
        like: Tensor whose device and dtype the weight gets.
    """

    def __init__(self, teacher: int, student: int, like: torch.Tensor) -> None:
        super().__init__()
        weight = torch.eye(student)
        if teacher != student:
            generator = torch.Generator().manual_seed(0)
            weight = torch.randn(teacher, student, generator=generator) / math.sqrt(student)
        self.weight = nn.Parameter(weight.to(like.device, like.dtype))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return states [..., teacher's width] of states [..., student's width]."""
        if not torch.is_autocast_enabled(states.device.type):
            states = states.to(self.weight.dtype)
        return nn.functional.linear(states, self.weight)

    def _save_to_state_dict(self, *args: object, **kwargs: object) -> None:
        return

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        return
