"""Context manager that puts models in eval mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextlib.contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Put all models in eval mode (no dropout) inside the block, then restore the mode of each module."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
