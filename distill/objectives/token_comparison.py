"""Comparison of single tokens: the teacher's top-1 token, and the overlap of both models' most probable ones.

The statistics of a loss have sums over tokens alone. What a line of the first batch's report and the metrics of
rollouts need beside them is a capability of target formats with whole distributions; K stored tokens and aligned spans
do not give it directly.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from distill.objectives.targets import HeadForward, TargetFormat, Targets, VocabularyAlignment

TOP = 8  # most probable tokens of each model that `overlap` compares


@runtime_checkable
class ComparesTokens(Protocol):
    """A target format that gives the teacher's most probable tokens."""

    def likeliest(
        self, targets: Targets, rows: torch.Tensor, most: int
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return at most the first `most` of each route's flat `rows`, and the teacher's top-1 token after each (-1 in
        a tie), both int64; by route, "" where there are none."""
        ...

    def overlap(self, pairing: VocabularyAlignment, call: HeadForward, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return for flat `rows` [n] the share of the student's `TOP` most probable tokens that are among the
        teacher's, float32 [n], by route, NaN in the rows of others; "" where there are no routes."""
        ...


def token_comparison(format: TargetFormat) -> ComparesTokens | None:
    """Return the format as one that compares tokens; None for targets that do not give these directly."""
    return format if isinstance(format, ComparesTokens) else None
