"""A warm-up whose first step learns: step k of W has (k + 1) / W of the peak, where transformers' has k / W.

With transformers' own a run of one step, or a resumed run's last test, moves nothing. Nothing else changes: after the
warm-up a step has the rate that its number has in transformers. A run that began otherwise goes on as it began.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers.trainer import SCHEDULER_NAME

FLAG = "first_step_learns"


class WarmUp:
    """A schedule's factor of the peak, its warm-up read one step ahead.

    Args:
        factor: Of a step's number, as the schedule has it.
        steps: Of the warm-up.
    """

    __slots__ = ("__dict__", "factor", "steps")  # the flag alone is in __dict__, which LambdaLR saves and restores

    def __init__(self, factor: Callable[[int], float], steps: int) -> None:
        self.factor, self.steps = factor, steps
        self.__dict__[FLAG] = True

    def __call__(self, step: int) -> float:
        """The factor of the step after `step` others."""
        return self.factor(step + (step < self.steps and self.__dict__[FLAG]))


def learn_from_first_step(scheduler: LRScheduler, steps: int) -> None:
    """Have a schedule that was made just now, with a warm-up of `steps`, begin with a rate above 0."""
    if not isinstance(scheduler, LambdaLR) or steps == 0:
        return
    scheduler.lr_lambdas = [WarmUp(factor, steps) for factor in scheduler.lr_lambdas]
    rates = [base * factor(0) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler._last_lr = rates
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def keep_warmup(scheduler: LRScheduler | None, checkpoint: Path) -> None:
    """Have a schedule warm up as the run of `checkpoint` began to."""
    factors = [factor for factor in getattr(scheduler, "lr_lambdas", ()) if isinstance(factor, WarmUp)]
    if factors:
        saved = torch.load(checkpoint / SCHEDULER_NAME, weights_only=True).get("lr_lambdas", [])
        for factor in factors:
            factor.__dict__[FLAG] = any(state and state.get(FLAG) for state in saved)
