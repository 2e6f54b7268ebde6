"""What labels mean: a label is the id of its own token, not shifted, and `IGNORE_INDEX` where nothing is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100


def within_documents(labels: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
    """Labels [..., S] with `IGNORE_INDEX` at each document's first token, which only another document could predict.

    Args:
        labels: Not shifted.
        position_ids: Of the same shape, 0 where a document begins; None where each row is one.
    """
    return labels if position_ids is None else labels.masked_fill(position_ids == 0, IGNORE_INDEX)


def document_bounds(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Where each document of a packed row begins and ends: it begins where positions restart."""
    starts = [index for index, position in enumerate(positions) if position == 0]
    return list(zip(starts, [*starts[1:], len(positions)], strict=True))


def count_learned(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """How many tokens of a collated batch are learned: int64 []."""
    labels = within_documents(batch["labels"], batch.get("position_ids"))
    return (labels[..., 1:] != IGNORE_INDEX).sum()


def shift_labels(labels: torch.Tensor, ignored: int = IGNORE_INDEX) -> torch.Tensor:
    """Each position's next label: labels [..., S] moved one to the left, `IGNORE_INDEX` at the end."""
    shifted = labels.new_full(labels.shape, ignored)
    shifted[..., :-1] = labels[..., 1:]
    return shifted
