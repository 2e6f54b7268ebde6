"""Metrics of a student's routers: summed on the device, read once per logging step or evaluation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from distill.objectives.router_losses import RouterSums
from distill.objectives.targets import Batch, StepInputs
from distill.training.listeners import StepListener


class RouterMeter:
    """Sums of routers' figures over micro-batches.

    Args:
        reduce: Function that returns the sum of a tensor over the ranks; every rank calls it.
    """

    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.reduce = reduce
        self.sums: RouterSums | None = None

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

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics over all ranks, see `RouterSums.figures`, and start anew."""
        if self.sums is None:
            return {}
        sums = self.sums
        self.sums = None
        shapes = [values.shape for values in sums]
        whole = self.reduce(torch.cat([values.flatten() for values in sums]))
        parts = whole.split([shape.numel() for shape in shapes])
        return RouterSums(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True))).figures()


class RouterMetrics(StepListener):
    """Listener that logs figures of the student's routers.

    Args:
        reduce: See `RouterMeter`.
    """

    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.meter = RouterMeter(reduce)

    def forward_done(self, batch: Batch, inputs: StepInputs, output: dict[str, torch.Tensor]) -> None:
        self.meter.add(inputs)

    def metrics(self) -> dict[str, float]:
        return self.meter.pop_metrics()
