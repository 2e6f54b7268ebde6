"""Listener of the terms that compare layers: their metrics, and their projections in checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from distill.objectives.layer_matching import LayerMatching
from distill.objectives.targets import Batch, StepInputs
from distill.training.listeners import StepListener
from distill.training.transformers_compat import TransformersCompat


class LayerTerms(StepListener):
    """Listener that logs each term's mean over the trained tokens, without weight, and saves projections.

    Args:
        matching: Terms between layers, of the objective.
    """

    def __init__(self, matching: LayerMatching, trainer: TransformersCompat) -> None:
        self.matching = matching
        self.trainer = trainer
        self.sums: dict[str, torch.Tensor] = {}

    def forward_done(self, batch: Batch, inputs: StepInputs, output: dict[str, torch.Tensor]) -> None:
        for name, pair in inputs.layers.sums.items() if inputs.layers else ():
            self.sums[name] = pair + self.sums.get(name, 0.0)

    def metrics(self) -> dict[str, float]:
        """Return `hidden_state` and `attention_relation`, of further terms of a type `hidden_state-2` and so on."""
        if not self.sums:
            return {}
        values = self.trainer.sum_over_ranks(torch.stack(list(self.sums.values()))).tolist()
        named = dict(zip(self.sums, values, strict=True))
        self.sums = {}
        return {name: total / count for name, (total, count) in named.items() if count}

    def save(self, checkpoint: Path) -> None:
        self.matching.save(checkpoint, writes=self.trainer.args.should_save)

    def restore(self, checkpoint: Path) -> None:
        self.matching.restore(checkpoint)
