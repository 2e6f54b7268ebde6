"""Label convention: a label is the id of its own token, not shifted; `IGNORE_INDEX` masks a token from the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100


def mask_document_starts(labels: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
    """Return labels [..., S] with the first token of each document masked: no token of its document predicts it.

    Args:
        labels: Token ids [..., S], not shifted.
        position_ids: Positions [..., S], 0 where a document begins; None where each row is one document.
    """
    return labels if position_ids is None else labels.masked_fill(position_ids == 0, IGNORE_INDEX)


def document_bounds(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return begin and end of each document in a packed row, from positions that restart at 0."""
    starts = [index for index, position in enumerate(positions) if position == 0]
    return list(zip(starts, [*starts[1:], len(positions)][: len(starts)], strict=True))


def count_trained_tokens(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the number of trained tokens of a collated batch, int64 []."""
    labels = mask_document_starts(batch["labels"], batch.get("position_ids"))
    return (labels[..., 1:] != IGNORE_INDEX).sum()


def shift_labels(labels: torch.Tensor, ignored: int = IGNORE_INDEX) -> torch.Tensor:
    """Return each position's next label: labels [..., S] moved left by one, `IGNORE_INDEX` at the end."""
    shifted = labels.new_full(labels.shape, ignored)
    shifted[..., :-1] = labels[..., 1:]
    return shifted
