"""A teacher in fp8, and what that costs: the divergence between the teacher before and after, on one real batch.

`teacher.dtype: fp8` loads the teacher in bf16 and quantises its linear layers, but not its head, once the run's own
batches exist to measure the damage on. The figure is printed beside the student's own divergence: a teacher that moves
by a hundredth of what the student has to learn is worth its speed, one that moves by half of it is not.
"""

from __future__ import annotations

from typing import Any

import torch
from distill_kernels.matmul.fp8 import Fp8Linear, swap_linears_for_fp8
from torch import nn

from distill.models.load import load_teacher
from distill.models.pruning import find_layers
from distill.recipe import Teacher


def load_a_layer_at_a_time(section: Teacher, *, device: torch.device, dtype: torch.dtype) -> Any:
    """An fp8 teacher that in `dtype` would not fit the device: read into host memory, quantised layer by layer.

    The device never holds more than the quantised layers and one that is not yet. What fp8 costs is not measured then,
    since the teacher as it was is never there to compare with.

    Args:
        section: The recipe's `teacher`.
        device: Where the model goes.
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
