"""Fake quantisation as a function that autograd differentiates: the definition that trained students are held to."""

from __future__ import annotations

import torch
from distill_kernels.quantisation.formats import reference_fake_quantise, reference_learned_gradients


class _FakeQuantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, scale, name):
        ctx.save_for_backward(weight, scale)
        ctx.name = name
        return reference_fake_quantise(weight, name, scale)

    @staticmethod
    def backward(ctx, upstream):
        weight, scale = ctx.saved_tensors
        if scale is None:
            return upstream, None, None
        return *reference_learned_gradients(weight, scale, upstream, ctx.name), None


def fake_quantise(weight: torch.Tensor, name: str, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return the file's values of `weight`; the gradient passes through the rounding, and reaches given scales."""
    return _FakeQuantise.apply(weight, scale, name)
