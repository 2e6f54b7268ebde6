"""Fake quantisation as a function that autograd differentiates: the definition that trained students are held to."""

from __future__ import annotations

import torch
from distill_kernels.quantisation.formats import reference_fake_quantise, reference_learned_gradients
from distill_kernels.quantisation.number_format import Scales


class _FakeQuantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, name, *parts):
        ctx.save_for_backward(weight, *parts)
        ctx.name = name
        return reference_fake_quantise(weight, name, Scales(*parts) if parts else None)

    @staticmethod
    def backward(ctx, upstream):
        weight, *parts = ctx.saved_tensors
        if not parts:
            return upstream, None
        of_weight, of_scales = reference_learned_gradients(weight, Scales(*parts), upstream, ctx.name)
        return of_weight, None, *(part for part in of_scales if part is not None)


def fake_quantise(weight: torch.Tensor, name: str, scales: Scales | None = None) -> torch.Tensor:
    """Return the file's values of `weight`; the gradient passes through the rounding, and reaches given scales."""
    return _FakeQuantise.apply(weight, name, *(part for part in scales or () if part is not None))
