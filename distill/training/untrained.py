"""Weights of the untrained student in host memory, with which it is measured once training is over.

    untrained = UntrainedWeights(student)      # before a checkpoint is loaded and the first step is made
    trainer.train()
    with untrained.exchanged(student):
        ...

Loading the student a second time would give the same weights at a higher price: one that is cut from its teacher needs
the teacher again as it was before kernels were put into it, and one that starts from GPTQ needs its calibration.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from distill.core.ranks import broadcast_from_rank0, is_main_process, world_size
from distill.core.units import GIB
from distill.models.dtypes import quantised_weights
from distill.training.trainer import DistillationTrainer

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.25  # largest share of the host's free memory that the copies of all processes take


class UntrainedWeights:
    """Copy of what training changes in a student: trained weights, quantised weights under adapters, buffers."""

    def __init__(self, student: nn.Module) -> None:
        self._copies = [tensor.to("cpu", copy=True) for tensor in _changed_by_training(student)]

    @contextmanager
    def exchanged(self, student: nn.Module) -> Iterator[None]:
        """Give the student its untrained weights in the block; it has the trained ones back after it, and any error."""
        self._exchange(student)
        try:
            yield
        finally:
            self._exchange(student)

    @torch.no_grad()
    def _exchange(self, student: nn.Module) -> None:
        for tensor, copied in zip(_changed_by_training(student), self._copies, strict=True):
            # one tensor at a time: beside the copies the host holds no more than the largest tensor
            present = tensor.to("cpu", copy=True)
            tensor.copy_(copied)
            copied.copy_(present)


def _changed_by_training(student: nn.Module) -> list[torch.Tensor]:
    parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
    quantised: Any = quantised_weights(student)
    if quantised is not None:  # under an adapter, the frozen base weight holds the rounded merged one
        matrices = quantised.matrices.values()
        parameters += [matrix.parameter for matrix in matrices if not matrix.parameter.requires_grad]
    return [parameter.data for parameter in parameters] + list(student.buffers())


def must_measure_first(trainer: DistillationTrainer) -> bool:
    """Return whether the untrained student must be measured before the first step; every rank calls it.

    It must be where training changes the teacher, too, where the student will be sharded, and where a copy of its
    weights takes too much memory.
    """
    if trainer.is_fsdp_enabled or trainer.objective.teacher.follows_student:
        return True
    import psutil  # comes with accelerate

    size = world_size() * sum(tensor.nbytes for tensor in _changed_by_training(trainer.model))
    # The first process decides for all: each would find another amount of free memory, and the measurement has
    # collectives that all must enter.
    is_large = broadcast_from_rank0(lambda: size > MEMORY_SHARE * psutil.virtual_memory().available)
    if is_large and is_main_process():
        log.warning("the student is measured before the first step, since %.0f GiB for copies are not free", size / GIB)
    return is_large
