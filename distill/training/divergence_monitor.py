"""Detection of diverging training from logged metrics: a warning, or the end of the run.

Steps with NaN or infinity are skipped (step_guard.py); a learning rate that is too high more often leads to finite but
useless values. Training diverges when one of two rules holds for `STEPS` logged steps in a row, in training or held-out
metrics:

    loss         above `TIMES` x its start + `MARGIN` nats; the start is the first logged loss
    perplexity   at or above the vocabulary size, the value of uniform probabilities, after it was lower

A loss whose weights or temperature follow a schedule changes by itself: there the first rule uses cross-entropy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerState

from distill.core.errors import RunError
from distill.core.ranks import is_main_process
from distill.recipe import Recipe

log = logging.getLogger(__name__)

STEPS = 3
TIMES = 3.0
MARGIN = 1.0
NEAR = 0.05  # nats below the logarithm of the vocabulary size that count as uniform
LOWER = 0.5  # nats below it that show learning; random weights begin nearer
ADVICE = "lower train.learning_rate or lengthen train.warmup"


class DivergenceMonitor(TrainerCallback):
    """Callback that watches logged metrics for divergence; equal on every rank, since the metrics are.

    Args:
        recipe: Sets `train.on_divergence` (warn or stop) and whether the loss follows a schedule.

    Attributes:
        since: Step at which divergence was first noticed; None where it was not.
    """

    def __init__(self, recipe: Recipe, vocabulary: int) -> None:
        self.stops = recipe.train.on_divergence == "stop"
        self.vocabulary = vocabulary
        self.limit = math.log(vocabulary)
        self.figure = "cross_entropy" if recipe.loss.schedule else "loss"
        self._restart()

    def _restart(self) -> None:
        self.since: int | None = None
        self._start: float | None = None
        self._was_lower = False
        self._in_a_row: dict[str, int] = {}

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Restore the state from the log history of a resumed run."""
        self._restart()
        # A resumed run counts on from what it had logged: start, lowest perplexity and rows of bad figures follow from
        # the log, so that no state of its own is saved.
        for entry in state.log_history:
            if list(self._look(entry)):
                self.since = self.since or int(entry["step"])

    def on_log(self, args: object, state: TrainerState, control: object, logs: Any = None, **kwargs: object) -> None:
        """Check the metrics of a logged step or an evaluation.

        Raises:
            RunError: Training has diverged and `train.on_divergence` is stop.
        """
        for what in self._look(logs or {}):
            if self.stops:
                raise RunError(
                    f"stopped at step {state.global_step}: training has diverged: {what}; {ADVICE}, and continue from "
                    "an earlier checkpoint with --resume, or start again (train.on_divergence: warn continues)"
                )
            if self.since is None and is_main_process():
                log.warning(
                    "step %d: training diverges: %s; %s (train.on_divergence: stop ends such a run)",
                    state.global_step,
                    what,
                    ADVICE,
                )
            self.since = self.since or state.global_step

    def _look(self, logs: Mapping[str, Any]) -> Iterator[str]:
        """Count the metrics of a log entry; yield in words those that were too high for `STEPS` entries."""
        present = logs.get(self.figure, math.nan)
        if self._start is None and math.isfinite(present):
            self._start = present
        # An entry is a training step's (it has `loss`) or an evaluation's, whose names begin with eval_.
        prefix, where = ("", "") if "loss" in logs else ("eval_", "held-out ")
        loss = logs.get(f"{prefix}{self.figure}")
        entropy = logs.get(f"{prefix}cross_entropy")
        if loss is not None and self._start is not None:
            # a start below 0 (a policy gradient's) does not lower the bound below the margin
            bound = TIMES * max(self._start, 0.0) + MARGIN
            if self._lasts(f"{prefix}{self.figure}", loss > bound):
                name = f"{where}{self.figure.replace('_', '-')}"
                yield f"{name} {loss:.4g}, above {TIMES:g} x its start of {self._start:.4g} + {MARGIN:g}"
        if entropy is not None:
            # Random weights start at the logarithm of the vocabulary: only a student that has been better can fall
            # back.
            self._was_lower = self._was_lower or entropy < self.limit - LOWER
            if self._lasts(f"{prefix}perplexity", self._was_lower and entropy >= self.limit - NEAR):
                yield (
                    f"{where}perplexity {math.exp(min(entropy, 700)):,.0f}, no better than guessing among "
                    f"{self.vocabulary:,} tokens"
                )

    def _lasts(self, figure: str, too_high: bool) -> bool:
        """Return whether a metric has been too high in `STEPS` entries in a row."""
        self._in_a_row[figure] = self._in_a_row.get(figure, 0) + 1 if too_high else 0
        return self._in_a_row[figure] >= STEPS
