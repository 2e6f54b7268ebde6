"""Multiplying gradients made in the forward pass by the upstream gradient, in place and without a host sync."""

from __future__ import annotations

import torch


def scale_gradient_(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """`gradient *= factor` for a one-element `factor` on the same device; returns `gradient`."""
    return gradient.mul_(factor.to(gradient.dtype) if gradient.dtype == torch.float64 else factor)
