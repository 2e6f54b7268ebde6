"""Learning rate warm-up without a first step at rate 0: step k of W has (k + 1) / W of the peak, not k / W.

With transformers' warm-up, the first step changes no weight. After the warm-up the rates equal those of transformers. A
resumed run that began with transformers' warm-up keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers.trainer import SCHEDULER_NAME

FLAG = "first_step_learns"


class NonzeroWarmup:
    """Learning rate factor of a schedule, its warm-up shifted by one step.

    Args:
        factor: The schedule's factor, by step number.
        steps: Number of warm-up steps.
    """

    __slots__ = ("__dict__", "factor", "steps")  # the flag alone is in __dict__, which LambdaLR saves and restores

    def __init__(self, factor: Callable[[int], float], steps: int) -> None:
        self.factor, self.steps = factor, steps
        self.__dict__[FLAG] = True

    def __call__(self, step: int) -> float:
        """Return the factor of step `step` (from 0)."""
        return self.factor(step + (step < self.steps and self.__dict__[FLAG]))


def begin_above_zero(scheduler: LRScheduler, steps: int) -> None:
    """Shift the warm-up of a new schedule by one step, so that it begins with a rate above 0."""
    if not isinstance(scheduler, LambdaLR) or steps == 0:
        return
    scheduler.lr_lambdas = [NonzeroWarmup(factor, steps) for factor in scheduler.lr_lambdas]
    rates = [base * factor(0) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler._last_lr = rates
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def restore_warmup(scheduler: LRScheduler | None, checkpoint: Path) -> None:
    """Set the schedule's warm-up to that of the run that wrote `checkpoint`."""
    factors = [factor for factor in getattr(scheduler, "lr_lambdas", ()) if isinstance(factor, NonzeroWarmup)]
    if factors:
        saved = torch.load(checkpoint / SCHEDULER_NAME, weights_only=True).get("lr_lambdas", [])
        for factor in factors:
            factor.__dict__[FLAG] = any(state and state.get(FLAG) for state in saved)
