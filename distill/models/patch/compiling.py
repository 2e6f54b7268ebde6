"""`torch.compile` for each decoder layer: on top of our kernels it fuses what they leave, between the products.

A layer is the right unit: all layers share one compiled graph, so that compiling takes seconds and not minutes, and
what sits between layers (gradient checkpointing, FSDP2's gathering) stays outside of the graph.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch import nn

from distill.models.layers import find_layers, is_offloaded

log = logging.getLogger(__name__)


def compile_layers(model: nn.Module, backend: str = "inductor", **options: Any) -> int:
    """Have each decoder layer of `model` compiled when it is first called; parameters and names stay as they are.

    Call it after `patch`, before the model is sharded.

    Args:
        model: A causal language model of transformers, bare or inside PEFT.

    Returns:
        How many layers; none of an offloaded model, whose parameters change places in every call.
    """
    if is_offloaded(model):
        log.warning("the layers of the offloaded teacher are not compiled: their weights change places in every call")
        return 0
    _, layers = find_layers(model)
    for layer in layers:
        layer.compile(backend=backend, **options)
    return len(layers)


def uncompiled() -> contextlib.AbstractContextManager[object]:
    """Within it compiled layers run as if they were not: for answers that grow by one token a call."""
    return torch.compiler.set_stance("force_eager")
