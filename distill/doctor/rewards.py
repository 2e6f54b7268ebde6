"""Substitutes for a recipe's reward function: doctor runs no code that comes with a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distill.core.labels import IGNORE_INDEX, document_bounds
from distill.generation.documents import RolloutDocument
from distill.generation.function_calls import FunctionInput
from distill.generation.rewards import Rewards


def advantage_of(labels: Sequence[int]) -> float:
    """Return the advantage that doctor assigns to a document: a number from -1.5 to 1.5, by its trained tokens."""
    return (sum(label for label in labels[1:] if label != IGNORE_INDEX) % 7 - 3) / 2


def advantages_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return each token's advantage in a collated batch, that of its document: float32 [B, S]."""
    advantages = torch.zeros(batch["labels"].shape)
    for row, (labels, positions) in enumerate(
        zip(batch["labels"].tolist(), batch["position_ids"].tolist(), strict=True)
    ):
        for begin, end in document_bounds(positions):
            advantages[row, begin:end] = advantage_of(labels[begin:end])
    return advantages


def substitute_rewards(scale: str) -> Rewards:
    """Return rewards of rollouts by their tokens; `scale` as in `Rewards`."""

    def function_input(document: RolloutDocument, answer: Sequence[int]) -> FunctionInput:
        return FunctionInput("", "", "", {"tokens": [0, *answer]})

    return Rewards(lambda asked: [advantage_of(each.row["tokens"]) for each in asked], function_input, scale)  # type: ignore[arg-type]
