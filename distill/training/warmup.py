"""Learning rate warm-up without a first step at rate 0: step k of W has (k + 1) / W of the peak, not k / W.

With transformers' warm-up, the first step changes no weight. After the warm-up the rates equal those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.optim.lr_scheduler import LambdaLR, LRScheduler


def begin_above_zero(scheduler: LRScheduler, steps: int) -> None:
    """Shift the warm-up of a new schedule by one step, so that it begins with a rate above 0."""
    if not isinstance(scheduler, LambdaLR) or steps == 0:
        return
    scheduler.lr_lambdas = [_one_step_ahead(factor, steps) for factor in scheduler.lr_lambdas]
    rates = [base * factor(0) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    scheduler._last_lr = rates
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _one_step_ahead(factor: Callable[[int], float], steps: int) -> Callable[[int], float]:
    return lambda step: factor(step + (step < steps))
