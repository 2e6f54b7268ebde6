"""Aggregates of activations over tokens, by which the parts of a model are compared.

l2          sqrt(mean over tokens of x^2)
mean        mean over tokens of |x|
mean_l2     sqrt(mean over rows of (mean over a row's tokens of |x|)^2)
"""

from __future__ import annotations

import torch


class ImportanceScore:
    """Aggregate of activations over tokens.

    Attributes:
        total: Sum by the metric, float64 [units]; None before the first row.
        share: Sum over tokens of each entry's square over the mean square of all, of a norm's input.
        tokens: number of tokens.
        rows: number of rows.
    """

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self.share: torch.Tensor | None = None
        self.tokens = self.rows = 0

    def add(self, activations: torch.Tensor, metric: str) -> None:
        """Add the magnitudes [tokens, units] of one row."""
        each = activations.float()
        found = each.square().sum(0) if metric == "l2" else each.abs().sum(0)
        found = found.double()
        if metric == "mean_l2":
            found = (found / len(each)).square()
        self.total = found if self.total is None else self.total + found
        self.tokens += len(each)
        self.rows += 1

    def add_share(self, inputs: torch.Tensor) -> None:
        """Add a norm's input [tokens, channels]."""
        square = inputs.float().square()
        found = (square / square.mean(-1, keepdim=True).clamp_min(1e-30)).sum(0).double()
        self.share = found if self.share is None else self.share + found

    def value(self, metric: str) -> torch.Tensor:
        assert self.total is not None
        if metric == "mean":
            return (self.total / self.tokens).cpu()
        return (self.total / (self.tokens if metric == "l2" else self.rows)).sqrt().cpu()
