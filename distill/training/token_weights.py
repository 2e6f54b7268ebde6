"""Listener of token weights: their mean and the share of those that are 0."""

from __future__ import annotations

import torch

from distill.objectives.targets import Batch, StepInputs
from distill.training.listeners import StepListener
from distill.training.transformers_compat import TransformersCompat


class TokenWeightMetrics(StepListener):
    """Listener that logs token weights, and ends the run at one that is negative or not finite."""

    def __init__(self, trainer: TransformersCompat) -> None:
        self.trainer = trainer
        self.sums: torch.Tensor | None = None

    def forward_done(self, batch: Batch, inputs: StepInputs, output: dict[str, torch.Tensor]) -> None:
        sums = output["token_weights"].double()
        self.sums = sums if self.sums is None else self.sums + sums

    def metrics(self) -> dict[str, float]:
        """Return `token_weight`, the mean over the trained tokens before normalisation, and `token_weight_zero`.

        Raises:
            ValueError: A weight is negative or not finite. On a GPU it is known here at the earliest without a wait.
        """
        if self.sums is None:
            return {}
        tokens, total, zeros, faulty = self.trainer.sum_over_ranks(self.sums).tolist()
        self.sums = None
        if faulty:
            raise ValueError(
                f"loss.token_weights: expected finite weights of at least 0, got others for {faulty:,.0f} of "
                f"{tokens:,.0f} tokens"
            )
        return {"token_weight": total / tokens, "token_weight_zero": zeros / tokens} if tokens else {}
