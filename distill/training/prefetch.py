"""Prefetch of a remote teacher's outputs, so that a step begins once all of its outputs have arrived.

A teacher that is unavailable is thus noticed between two steps, on all ranks alike: no gradient is half computed, no
random number drawn, and the run can be resumed bit-exactly from the checkpoint that ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from distill.core.errors import TeacherUnavailableError
from distill.core.ranks import world_size
from distill.training.checkpoints import CHECKPOINT
from distill.training.listeners import StepListener
from distill.training.transformers_compat import TransformersCompat

if TYPE_CHECKING:
    from distill.generation.rollout_steps import Collated
    from distill.teachers.objective import DistillationObjective


class TeacherPrefetcher(StepListener):
    """Listener that has the teacher prefetch a step's micro-batches, where it does."""

    def __init__(self, objective: DistillationObjective, trainer: TransformersCompat) -> None:
        self.objective = objective
        self.trainer = trainer
        self._epoch: tuple[Iterator[Collated] | None, Iterator[Collated] | None] = (None, None)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Write a checkpoint of the last complete step where the teacher becomes unavailable.

        Raises:
            TeacherUnavailableError: With the step that the run can be continued from.
        """
        try:
            yield
        except TeacherUnavailableError as error:
            raise self._with_final_checkpoint(error) from None

    def epoch_batches(self, batches: Iterator[Collated], count: int, are_final: bool) -> Iterator[Collated]:
        """Return the micro-batches of an epoch in order, submitted to the teacher ahead of use if they are final."""
        if not are_final or not self.objective.teacher.prefetch_depth:
            return batches
        # each step of an epoch hands over the same iterator, and gets the wrapper that is ahead of it
        if self._epoch[0] is not batches:
            self._epoch = batches, self.objective.prefetch(batches, count)
        assert self._epoch[1] is not None
        return self._epoch[1]

    @property
    def prefetch_enabled(self) -> bool:
        return self.objective.teacher.prefetch_depth > 0 and self.objective.needs_targets

    def batches_taken(self, batches: list[Collated], upcoming: Iterable[Collated]) -> None:
        """Wait for the teacher outputs of a step's micro-batches, and submit those of later steps.

        Raises:
            TeacherUnavailableError: On all ranks, where the outputs of one are missing.
        """
        if self.prefetch_enabled:
            self._wait(batches)
            self._submit(upcoming)

    def _submit(self, batches: Iterable[Collated]) -> None:
        """Submit micro-batches to the teacher, those that were not submitted before, without waiting."""
        for batch in batches:
            self.objective.teacher.prefetch(batch)

    def _wait(self, batches: Sequence[Collated]) -> None:
        self._submit(batches)  # rollouts are submitted only now
        fault = self.objective.teacher.prefetch_error(batches)
        anywhere = fault is not None
        if world_size() > 1:  # a single process need not wait for the GPU here
            here = torch.tensor(float(anywhere), device=self.trainer.args.device)
            anywhere = bool(self.trainer.sum_over_ranks(here) > 0)
        if anywhere:
            raise TeacherUnavailableError(fault or "the teacher server does not respond to another rank", agreed=True)

    def _with_final_checkpoint(self, error: TeacherUnavailableError) -> TeacherUnavailableError:
        """Return the error that ends a run, after writing a checkpoint of its last complete step where possible."""
        trainer = self.trainer
        step = trainer.state.global_step
        folder = Path(trainer.args.output_dir or ".")
        # all processes write a checkpoint together, so all must have agreed that they end here
        if not step or not (error.agreed or trainer.accelerator.num_processes == 1):
            return error
        # weights and optimizer are those of the last complete step: outputs were missing before the next one began
        if not (folder / f"{CHECKPOINT}{step}").is_dir():
            trainer.save_checkpoint()
        return TeacherUnavailableError(f"{error}; continue from step {step} with --resume")
