"""Listeners of what single parts of a loss measure: token weights, terms between layers, routers.

Each sums on the device and is read once per logging step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from distill.objectives.layer_matching import LayerMatching
from distill.objectives.router_losses import RouterSums
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


class LayerTerms(StepListener):
    """Listener that logs the mean of each term between layers over the trained tokens, without weight.

    It also saves the projections of these terms in checkpoints.
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


class RouterMetrics(StepListener):
    """Listener that logs figures of the student's routers; an evaluation adds its micro-batches by `add`.

    Args:
        reduce: Function that returns the sum of a tensor over the ranks; every rank calls it.
    """

    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.reduce = reduce
        self.sums: RouterSums | None = None

    def forward_done(self, batch: Batch, inputs: StepInputs, output: dict[str, torch.Tensor]) -> None:
        self.add(inputs)

    def add(self, inputs: StepInputs) -> None:
        """Count a micro-batch whose forward is done. Launches a few small kernels, never waits."""
        found = None if inputs.layers is None else inputs.layers.router_sums
        if found is None:
            return
        # counts beyond 2^24 would be rounded in float32
        wide = [values if values.device.type == "mps" else values.double() for values in found]
        if self.sums is not None:
            wide = [before + values for before, values in zip(self.sums, wide, strict=True)]
        self.sums = RouterSums(*wide)

    def metrics(self) -> dict[str, float]:
        """Return the metrics over all ranks, see `RouterSums.figures`, and start anew."""
        if self.sums is None:
            return {}
        sums = self.sums
        self.sums = None
        shapes = [values.shape for values in sums]
        whole = self.reduce(torch.cat([values.flatten() for values in sums]))
        parts = whole.split([shape.numel() for shape in shapes])
        return RouterSums(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True))).figures()
