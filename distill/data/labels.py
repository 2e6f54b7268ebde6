"""What labels mean: a label is the id of its own token, not shifted, and `IGNORE_INDEX` where nothing is learned."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Each position's next label: labels [..., S] moved one to the left, `IGNORE_INDEX` at the end."""
    shifted = labels.new_full(labels.shape, IGNORE_INDEX)
    shifted[..., :-1] = labels[..., 1:]
    return shifted
