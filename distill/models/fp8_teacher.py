"""A model whose linear layers, but not its head, are in fp8: made so, or read so a layer at a time."""

from __future__ import annotations

from typing import Any

import torch
from distill_kernels.matmul.fp8 import Fp8Linear, swap_linears_for_fp8
from torch import nn

from distill.models.head import bare
from distill.models.load import load_teacher
from distill.models.pruning import find_layers
from distill.recipe import Teacher


def load_a_layer_at_a_time(section: Teacher, *, device: torch.device, dtype: torch.dtype) -> Any:
    """An fp8 teacher that in `dtype` would not fit the device: read into host memory, quantised layer by layer.

    The device never holds more than the quantised layers and one that is not yet. What fp8 costs is not measured then,
    since the teacher as it was is never there to compare with.

    Args:
        dtype: Of what stays unquantised: embedding, norms, head.

    Raises:
        ValueError: as `load_teacher`; a teacher without linear layers whose sizes divide by 16.
    """
    model = load_teacher(section, device="cpu", dtype=dtype)
    for layer in find_layers(model)[1]:
        swap_linears_for_fp8(layer.to(device))
    return model.to(device)  # type: ignore[arg-type]


def is_quantised(model: nn.Module) -> bool:
    """Whether some linear layers of `model` are in fp8 already."""
    return any(isinstance(module, Fp8Linear) for module in model.modules())


def quantise(model: nn.Module) -> int:
    """Put the linear layers but the head into fp8, in place; how many.

    Raises:
        ValueError: the model has no linear layer whose sizes divide by 16.
    """
    return len(swap_linears_for_fp8(bare(model)))
