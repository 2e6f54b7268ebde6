"""A teacher elsewhere is asked ahead of the steps that need it, and a step begins once all of its answers are there.

So a teacher that is gone is noticed between two steps, by all ranks alike: no gradient is half made, no random number
drawn, and the checkpoint that ends the run is one that it can be resumed from to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from distill.core.faults import TeacherGone
from distill.core.ranks import world_size
from distill.teachers.objective import DistillationObjective
from distill.training.checkpoints import CHECKPOINT


class Asking:
    """Asks the teacher of a trainer's micro-batches; does nothing where that takes no asking ahead.

    Args:
        objective: with the teacher.
        reduce: sums a tensor over the ranks.
        device: of the trainer.
    """

    def __init__(
        self, objective: DistillationObjective, reduce: Callable[[torch.Tensor], torch.Tensor], device: torch.device
    ) -> None:
        self.objective, self.reduce, self.device = objective, reduce, device
        self._epoch: tuple[Iterator[Any] | None, Iterator[Any] | None] = (None, None)

    def ahead(self, epoch: Iterator[Any], least: int) -> Iterator[Any]:
        """The micro-batches of an epoch in their order, asked of ahead of time.

        Args:
            epoch: the same object for all of an epoch's calls.
            least: micro-batches of an optimizer step.
        """
        if not self.objective.teacher.ahead:
            return epoch
        if self._epoch[0] is not epoch:
            self._epoch = epoch, self.objective.ahead(epoch, least)
        assert self._epoch[1] is not None
        return self._epoch[1]

    @property
    def early(self) -> bool:
        """Whether the teacher starts on what it is asked before it is needed, in the step to come."""
        teacher = self.objective.teacher
        return teacher.ahead > 0 and teacher.format.needs_targets(self.objective.loss)

    def submit(self, batches: Iterable[Any]) -> None:
        """Ask of micro-batches, where that has not been done, and go on."""
        for batch in batches:
            self.objective.teacher.submit(batch)

    def require(self, batches: Sequence[Any]) -> None:
        """Wait for the answers of a step's micro-batches, those of the student's own words asked only now.

        Raises:
            TeacherGone: on all ranks, where one has no answers.
        """
        if not self.early:
            return
        self.submit(batches)
        teacher = self.objective.teacher
        fault = teacher.fault_of(batches)
        anywhere = fault is not None
        if world_size() > 1:  # alone, the host goes on without waiting for the GPU
            anywhere = bool(self.reduce(torch.tensor(float(anywhere), device=self.device)) > 0)
        if anywhere:
            raise TeacherGone(fault or "the teacher's server does not answer another rank", agreed=True)


def ended_by(error: TeacherGone, trainer: Trainer) -> TeacherGone:
    """The fault that ends a run, after a checkpoint of its last whole step where one can be written."""
    step, folder = trainer.state.global_step, Path(trainer.args.output_dir or ".")
    if not step or not (error.agreed or trainer.accelerator.num_processes == 1):
        return error
    if not (folder / f"{CHECKPOINT}{step}").is_dir():
        trainer._save_checkpoint(trainer.model_wrapped, None)
    return TeacherGone(f"{error}; continue from step {step} with --resume")
