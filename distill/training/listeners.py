"""Listeners of a step: callbacks with the moments that transformers' `TrainerCallback` lacks.

A trainer knows its listeners by their moments only. They stand among its callbacks, in one list; at each moment they
are called in its order. A moment that transformers has (`on_step_begin`, `on_pre_optimizer_step`, `on_step_end`,
`on_epoch_end`, `on_log`) is that of `TrainerCallback`.

    class Count(StepListener):
        def micro_batch_done(self, batch, loss, is_last):
            ...

    trainer.add_callback(Count())
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from distill.objectives.targets import Batch, LossResult, StepInputs

if TYPE_CHECKING:
    from distill.generation.rollout_steps import Collated

L = TypeVar("L", bound=TrainerCallback)
P = ParamSpec("P")
T = TypeVar("T")


class StepListener(TrainerCallback):
    """Callback with further moments of training; each does nothing unless it is overridden.

    Attributes:
        replaces_batches: Whether `replace` may return other batches than it is given.
        provides_rewards: Whether its batches carry rewards, which a loss with rewards needs.
    """

    replaces_batches: bool = False
    provides_rewards: bool = False

    def training(self) -> AbstractContextManager[object]:
        """Return the context in which the whole of `train` runs."""
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Return the context of a phase of a step: `teacher`, `student`, `loss`, or `PAUSED` outside of steps."""
        return nullcontext()

    def begin_step(self, step: int) -> None:
        """Prepare for the optimizer step with this number (from 0), before its batches are taken."""

    def epoch_batches(self, batches: Iterator[Collated], count: int, are_final: bool) -> Iterator[Collated]:
        """Return the iterator that a step's micro-batches are taken from.

        Args:
            batches: Iterator over the epoch; the same object in all calls of an epoch.
            count: Number of micro-batches of the step.
            are_final: Whether no listener replaces batches afterwards.
        """
        return batches

    def replace(self, batches: list[Collated], step: int, following: int) -> list[Collated]:
        """Return the micro-batches of a step in place of those that were taken.

        Args:
            batches: Micro-batches of the step; at least one.
            step: Number of the optimizer step (from 0).
            following: Number of steps after it.
        """
        return batches

    def upcoming(self) -> Iterable[Collated]:
        """Return micro-batches of later steps that are final already, each once."""
        return ()

    def batches_taken(self, batches: list[Collated], upcoming: Iterable[Collated]) -> None:
        """Take note of a step's final micro-batches, before the first forward.

        Args:
            upcoming: Micro-batches of later steps; computed as they are read.
        """

    def loss_computed(self, batch: Batch, result: LossResult) -> None:
        """Take note of a micro-batch's loss and statistics per token, inside the student's forward."""

    def forward_done(self, batch: Batch, inputs: StepInputs, output: dict[str, torch.Tensor]) -> None:
        """Take note of a training forward.

        Args:
            batch: Collated micro-batch, on the device.
            inputs: Inputs of its loss.
        """

    def micro_batch_done(self, batch: Batch, loss: torch.Tensor, is_last: bool) -> None:
        """Take note of a micro-batch's backward.

        Args:
            batch: Collated micro-batch, as it was taken.
            loss: Loss of the micro-batch, detached.
            is_last: Whether it is the last one of its optimizer step.
        """

    def gradient_norm_computed(self, norm: torch.Tensor) -> None:
        """Take note of the norm of a step's gradients before clipping."""

    def held_out(self) -> dict[str, float]:
        """Return figures of an evaluation beside those of the held-out rows, by name; every rank calls it."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Return metrics of the logging interval that ends, and begin another; every rank calls it."""
        return {}

    def save(self, checkpoint: Path) -> None:
        """Write state into a checkpoint's folder; every rank calls it."""

    def restore(self, checkpoint: Path) -> None:
        """Restore what `save` wrote; every rank calls it."""


class Listeners:
    """The listeners among a trainer's callbacks.

    Args:
        handler: Callbacks of the trainer; those added later count.
    """

    def __init__(self, handler: CallbackHandler) -> None:
        self.handler = handler

    def __iter__(self) -> Iterator[StepListener]:
        return (each for each in self.handler.callbacks if isinstance(each, StepListener))

    def find(self, kind: type[L]) -> L:
        """Return the first callback of a class.

        Raises:
            ValueError: There is none.
        """
        for each in self.handler.callbacks:
            if isinstance(each, kind):
                return each
        raise ValueError(f"trainer: expected a callback of {kind.__name__}, got none")

    def notify(self, moment: Callable[Concatenate[StepListener, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Call a method of all listeners, in their order, and return what they return.

        Args:
            moment: Method of `StepListener`, such as `StepListener.forward_done`.
            args, kwargs: Its arguments.
        """
        return [getattr(each, moment.__name__)(*args, **kwargs) for each in self]

    @contextmanager
    def inside(
        self,
        moment: Callable[Concatenate[StepListener, P], AbstractContextManager[object]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Iterator[None]:
        """Enter the contexts that a method of all listeners returns, the first one outermost."""
        with ExitStack() as stack:
            for each in self:
                stack.enter_context(getattr(each, moment.__name__)(*args, **kwargs))
            yield

    # --- of the objective, inside the student's forward

    def phase(self, name: str) -> AbstractContextManager[object]:
        return self.inside(StepListener.phase, name)

    def loss_computed(self, batch: Batch, result: LossResult) -> None:
        self.notify(StepListener.loss_computed, batch, result)
