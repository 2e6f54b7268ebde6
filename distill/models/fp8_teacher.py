"""A model whose linear layers, but not its head, are in fp8: made so, or read so a layer at a time."""

from __future__ import annotations

from typing import Any

import torch
from distill_kernels.matmul.fp8 import Fp8Linear, swap_linears_for_fp8
from torch import nn

from distill.models.attention import keep_soft_cap
from distill.models.head import bare
from distill.models.load import TEACHER_SEED, load_config, load_teacher, model_options, without_memory
from distill.models.pruning import find_layers
from distill.recipe import Teacher


def load_a_layer_at_a_time(section: Teacher, *, device: torch.device, dtype: torch.dtype) -> Any:
    """An fp8 teacher that in `dtype` would not fit the device: read into host memory, quantised layer by layer.

    The device never holds more than the quantised layers and one that is not yet. What fp8 costs is not measured then,
    since the teacher as it was is never there to compare with. Random weights are drawn on the device instead.

    Args:
        dtype: Of what stays unquantised: embedding, norms, head.

    Raises:
        ValueError: as `load_teacher`; a teacher without linear layers whose sizes divide by 16.
    """
    drawn = section.init == "random"
    if drawn:
        model = without_memory(load_config(section, "teacher"), model_options(section, dtype))
        keep_soft_cap(model, section.attention, "teacher.attention")
    else:
        model = load_teacher(section, device="cpu", dtype=dtype)
    with torch.random.fork_rng([device] if drawn and device.type == "cuda" else []):
        if drawn:
            torch.manual_seed(TEACHER_SEED)
        for layer in find_layers(model)[1]:
            _draw(model, layer, device)
            swap_linears_for_fp8(layer.to(device))
        _draw(model, model, device)
    model.tie_weights()
    return model.to(device)


@torch.no_grad()
def _draw(model: Any, part: nn.Module, device: torch.device) -> None:
    """Give the parameters of a part of `model` that have no memory yet some on `device`, with random weights."""
    for module in part.modules():
        empty = {name: weight for name, weight in module._parameters.items() if weight is not None and weight.is_meta}
        for name, weight in empty.items():
            module._parameters[name] = nn.Parameter(torch.empty_like(weight, device=device), requires_grad=False)
        if empty:
            model._init_weights(module)


def is_quantised(model: nn.Module) -> bool:
    """Whether some linear layers of `model` are in fp8 already."""
    return any(isinstance(module, Fp8Linear) for module in model.modules())


def quantise(model: nn.Module) -> int:
    """Put the linear layers but the head into fp8, in place; how many.

    Raises:
        ValueError: the model has no linear layer whose sizes divide by 16.
    """
    return len(swap_linears_for_fp8(bare(model)))
