"""Measurement of the untrained student after the first logged step, so that a run begins to train at once.

    untrained = MeasureUntrained(trainer, measure)
    trainer.add_callback(untrained)
    trainer.train()
    untrained.result()

Only an optimizer step changes the weights: a copy in host memory is made during the first step's forward and backward.
The student gets those weights back while it is measured, so that the figures are the same to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from transformers import TrainerControl, TrainerState

from distill.core.ranks import broadcast_from_rank0, is_main_process, world_size
from distill.core.units import GIB
from distill.training.listeners import StepListener
from distill.training.phases import PAUSED
from distill.training.trainer import DistillationTrainer

T = TypeVar("T")
log = logging.getLogger(__name__)

MEMORY_SHARE = 0.25  # largest share of the host's free memory that the copies of all processes take


class MeasureUntrained(StepListener, Generic[T]):
    """Listener that measures the untrained student: after the first logged step unless `first`.

    Args:
        trainer: Trainer of the student.
        measure: Function that measures the student with its present weights; every rank calls it.
        first: Measure now (`is_measured_first`).
    """

    def __init__(self, trainer: DistillationTrainer, measure: Callable[[], T], *, first: bool) -> None:
        self.trainer = trainer
        self.measure = measure
        self._result = measure() if first else None
        self._copying: Future[list[torch.Tensor]] | None = None
        self._buffers: list[torch.Tensor] = []

    def result(self) -> T:
        """Return what was measured; measures now if no step was logged."""
        if self._result is None:
            with self.trainer.listeners.phase(PAUSED), self._untrained_weights():
                self._result = self.measure()
        return self._result

    def on_train_begin(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Copy the buffers, which a forward may change, and begin to copy the weights."""
        if self._result is None:
            self._buffers = [each.to("cpu", copy=True) for each in self.trainer.model.buffers()]
            device = self.trainer.args.device
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(device))
            executor = ThreadPoolExecutor(1, thread_name_prefix="untrained")
            self._copying = executor.submit(self._copy, stream)
            executor.shutdown(wait=False)

    def on_pre_optimizer_step(self, args: object, state: TrainerState, control: object, **kwargs: object) -> None:
        """Wait for the copy before the weights change."""
        if self._copying is not None:
            self._copying.result()

    def on_log(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Measure the untrained student after the first logged step, unless a signal ends the run after it."""
        if self._copying is not None and not control.should_training_stop:
            self.result()

    def _weights(self) -> list[torch.Tensor]:
        return [each.data for each in self.trainer.model.parameters() if each.requires_grad]

    def _copy(self, stream: torch.cuda.Stream | None) -> list[torch.Tensor]:
        with torch.cuda.stream(stream):
            return [each.to("cpu", copy=True) for each in self._weights()]

    @contextmanager
    def _untrained_weights(self) -> Iterator[None]:
        """Give the student its untrained weights inside the block; drop the copy at its end."""
        copies = [] if self._copying is None else [*self._copying.result(), *self._buffers]
        tensors = [*self._weights(), *self.trainer.model.buffers()] if copies else []
        changed: list[tuple[torch.Tensor, torch.Tensor]] = []
        for own, saved in zip(tensors, copies, strict=True):
            trained = own.to("cpu", copy=True)
            if not torch.equal(trained, saved):
                own.copy_(saved)
                changed.append((own, trained))
        try:
            yield
        finally:
            for own, trained in changed:
                own.copy_(trained)
            self._copying = None
            self._buffers = []


def is_measured_first(trainer: DistillationTrainer, *, resumed: bool) -> bool:
    """Return whether the untrained student must be measured before the first step; every rank calls it.

    It must be where training changes the teacher, too, where loaded weights are replaced by a checkpoint's, and where
    its weights are sharded or a copy of them takes too much memory.
    """
    if resumed or trainer.is_fsdp_enabled or trainer.objective.teacher.follows_student:
        return True
    import psutil  # comes with accelerate

    size = world_size() * sum(each.nbytes for each in trainer.model.parameters() if each.requires_grad)
    is_large = broadcast_from_rank0(lambda: size > MEMORY_SHARE * psutil.virtual_memory().available)
    if is_large and is_main_process():
        log.warning("the student is measured before the first step, since %.0f GiB for copies are not free", size / GIB)
    return is_large
