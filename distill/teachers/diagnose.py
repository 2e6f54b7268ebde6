"""Diagnosis of a loss that is not finite: the teacher's fault or the student's. It runs only once one is found.

    fault = diagnose_teacher(trainer.objective, batches)    # "outputs of the teacher at 3 of 96 positions", or None

Without it a damaged teacher looks like a diverged student, which no learning rate mends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from distill.objectives.targets import Batch
from distill.teachers.objective import DistillationObjective


def diagnose_teacher(objective: DistillationObjective, batches: Iterable[Batch]) -> str | None:
    """Return what is NaN or infinite: the teacher's head, else its outputs for the batches; None where all is finite.

    The teacher runs once more over every batch, on every process alike, since the processes of a sharded one run
    together.

    Args:
        objective: Objective of the trainer, with any kind of teacher.
        batches: Micro-batches of the step, on the device.
    """
    teacher = objective.teacher
    faults = [name for name, tensor in teacher.head_tensors() if _broken(tensor)]
    for batch in batches:
        with torch.no_grad():
            targets = list(_tensors(objective.targets(batch)))
        names = list(teacher.models) if len(targets) > 1 else ["teacher"]
        for number, value in enumerate(targets):
            name = names[number] if len(names) == len(targets) else "teacher"
            count = _broken(value)
            if count:
                positions = value.shape[:-1].numel() if value.dim() > 1 else value.numel()
                faults.append(f"outputs of the {name} at {count} of {positions} positions")
    return faults[0] if faults else None


def _tensors(targets: object) -> Iterator[torch.Tensor]:
    if isinstance(targets, torch.Tensor):
        if targets.is_floating_point():
            yield targets
    elif isinstance(targets, tuple):
        for part in targets:
            yield from _tensors(part)


def _broken(value: torch.Tensor) -> int:
    """Count the rows of a tensor [..., n] (or numbers of a vector) with a NaN or +inf; -inf is a probability of 0."""
    value = getattr(value, "to_local", lambda: value)().detach()  # of a sharded tensor this process's part
    if not value.is_floating_point() or value.element_size() == 1:
        return 0
    bad = value.isnan() | (value == torch.inf)
    return int((bad.any(-1) if bad.dim() > 1 else bad).sum())
