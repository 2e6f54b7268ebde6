"""End of training once a held-out figure has not improved for a number of evaluations (`train.early_stopping`)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from distill.core import console
from distill.core.ranks import is_main_process
from distill.core.units import plural
from distill.recipe.held_out_figures import PREFIX


class StopWithoutImprovement(TrainerCallback):
    """Callback that ends training; equal on every rank, since the held-out figures are.

    Nothing is saved: how long the figure has not improved follows from the log, which a resumed run has.

    Args:
        figure: Name of the held-out figure, without the prefix `eval_`.
        higher_is_better: Direction of the figure.
        patience: Number of evaluations without an improvement after which training ends.
        min_delta: A value counts as an improvement where it is better than the best before it by more than this.
    """

    def __init__(self, figure: str, *, higher_is_better: bool, patience: int, min_delta: float) -> None:
        self.figure = figure
        self.higher_is_better = higher_is_better
        self.patience = patience
        self.min_delta = min_delta

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """End a run at once that is resumed from the checkpoint with which it had ended."""
        control.should_training_stop = self._waited(state)[0] >= self.patience

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        evaluations, best_step = self._waited(state)
        if evaluations < self.patience or control.should_training_stop:
            return
        control.should_training_stop = True
        # The last step has a checkpoint, as in a run that makes all of its steps: a resumed run ends there again, and
        # one that fails afterwards finds the weights of this step under its name.
        control.should_save = True
        if is_main_process():
            console.print_lines(
                f"stopped early after step {state.global_step} of {state.max_steps}: held-out {self.figure} was best "
                f"at step {best_step}, {plural(evaluations, 'evaluation')} ago (train.early_stopping)"
            )

    def _waited(self, state: TrainerState) -> tuple[int, int]:
        column = PREFIX + self.figure
        # by step: an evaluation that is repeated after a resume counts once
        values = {int(row["step"]): row[column] for row in state.log_history if column in row}
        sign = 1.0 if self.higher_is_better else -1.0
        return count_waited(((step, sign * value) for step, value in values.items()), self.min_delta)


def count_waited(values: Iterable[tuple[int, float]], min_delta: float) -> tuple[int, int]:
    """Count evaluations since the last improvement of a figure of which higher is better.

    Args:
        values: Step and value of each evaluation, in order; NaN is no improvement.

    Returns:
        Their number, and the step of the evaluation that improved last; 0 before there was any.
    """
    best = -math.inf
    best_step = 0
    evaluations = 0
    for step, value in values:
        if value > best + min_delta:
            best = value
            best_step = step
            evaluations = 0
        else:
            evaluations += 1
    return evaluations, best_step
