"""Prefetch of a remote teacher's outputs, so that a step begins once all of its outputs have arrived.

A teacher that is unavailable is thus noticed between two steps, on all ranks alike: no gradient is half computed, no
random number drawn, and the run can be resumed bit-exactly from the checkpoint that ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distill.core.errors import TeacherUnavailableError
from distill.core.ranks import world_size
from distill.training.checkpoints import CHECKPOINT
from distill.training.transformers_compat import TransformersCompat

if TYPE_CHECKING:
    from distill.teachers.objective import DistillationObjective


class TeacherPrefetcher:
    """Submits a trainer's micro-batches to the teacher ahead of use; does nothing for teachers without prefetch.

    Args:
        objective: Objective that holds the teacher.
        reduce: Function that sums a tensor over the ranks.
        device: The trainer's device.
    """

    def __init__(
        self, objective: DistillationObjective, reduce: Callable[[torch.Tensor], torch.Tensor], device: torch.device
    ) -> None:
        self.objective, self.reduce, self.device = objective, reduce, device
        self._epoch: tuple[Iterator[Any] | None, Iterator[Any] | None] = (None, None)

    def prefetch(self, epoch: Iterator[Any], least: int) -> Iterator[Any]:
        """Return the micro-batches of an epoch in order, submitted to the teacher ahead of use.

        Args:
            epoch: Iterator over the epoch; the same object in all calls of an epoch.
            least: Number of micro-batches per optimizer step.
        """
        if not self.objective.teacher.ahead:
            return epoch
        if self._epoch[0] is not epoch:
            self._epoch = epoch, self.objective.ahead(epoch, least)
        assert self._epoch[1] is not None
        return self._epoch[1]

    @property
    def prefetch_enabled(self) -> bool:
        """Return whether the next step's targets are computed before they are needed."""
        return self.objective.teacher.ahead > 0 and self.objective.needs_targets

    def submit(self, batches: Iterable[Any]) -> None:
        """Submit micro-batches to the teacher, those that were not submitted before, without waiting."""
        for batch in batches:
            self.objective.teacher.submit(batch)

    def wait(self, batches: Sequence[Any]) -> None:
        """Wait for the teacher outputs of a step's micro-batches; on-policy rollouts are submitted only now.

        Raises:
            TeacherUnavailableError: On all ranks, where the outputs of one are missing.
        """
        if not self.prefetch_enabled:
            return
        self.submit(batches)
        teacher = self.objective.teacher
        fault = teacher.fault_of(batches)
        anywhere = fault is not None
        if world_size() > 1:  # a single process need not wait for the GPU here
            anywhere = bool(self.reduce(torch.tensor(float(anywhere), device=self.device)) > 0)
        if anywhere:
            raise TeacherUnavailableError(fault or "the teacher server does not respond to another rank", agreed=True)


def with_final_checkpoint(error: TeacherUnavailableError, trainer: TransformersCompat) -> TeacherUnavailableError:
    """Return the error that ends a run, after writing a checkpoint of its last complete step where possible."""
    step, folder = trainer.state.global_step, Path(trainer.args.output_dir or ".")
    if not step or not (error.agreed or trainer.accelerator.num_processes == 1):
        return error
    if not (folder / f"{CHECKPOINT}{step}").is_dir():
        trainer.save_checkpoint()
    return TeacherUnavailableError(f"{error}; continue from step {step} with --resume")
