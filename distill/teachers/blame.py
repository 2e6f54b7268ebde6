"""Whose fault is a loss that is not finite? Asked once one was found, never in a step that went well.

    fault = teacher_fault(trainer.objective, batches)     # "the teacher's hidden states of 3 of 96 positions", or None

Without it a damaged teacher reads as a student that diverged, and no learning rate mends that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from distill.models.head import find_head


def teacher_fault(objective: Any, batches: Iterable[Mapping[str, Any]]) -> str | None:
    """What is NaN or infinite of the teacher: its head, else what it says of the batches; None where all is finite.

    The teacher runs once more over every batch, on every process alike, since the processes of a sharded one run
    together.

    Args:
        objective: the trainer's, of any kind of teacher.
        batches: of the step, on the device.
    """
    faults: list[str] = []
    for name, model in _teachers(objective):
        head: Any = find_head(model).linear
        if any(_broken(tensor) for tensor in (head.weight, getattr(head, "bias", None)) if tensor is not None):
            faults.append(f"the weights of the {name}'s head")
    stored = getattr(objective, "head", None)  # of a cache
    if stored is not None and _broken(stored.weight):
        faults.append("the head in the teacher's cache")
    for batch in batches:
        with torch.no_grad():
            said = list(_tensors(objective.signal(batch)))
        names = [name for name, _ in _teachers(objective)] if len(said) > 1 else ["teacher"]
        for number, value in enumerate(said):
            name = names[number] if len(names) == len(said) else "teacher"
            if count := _broken(value):
                positions = value.shape[:-1].numel() if value.dim() > 1 else value.numel()
                faults.append(f"what the {name} says of {count} of {positions} positions")
    return faults[0] if faults else None


def _teachers(objective: Any) -> list[tuple[str, nn.Module]]:
    """The loaded teachers, named as in the recipe."""
    if objective.teacher is None:
        return []
    members = getattr(objective.teacher, "members", None)
    if members is None:
        return [("teacher", objective.teacher)]
    return [(f"teachers.{number}", model) for number, model in enumerate(members)]


def _tensors(signal: Any) -> Iterator[torch.Tensor]:
    """The numbers in what a teacher says, whatever its kind."""
    if isinstance(signal, torch.Tensor):
        if signal.is_floating_point():
            yield signal
    elif isinstance(signal, tuple):
        for part in signal:
            yield from _tensors(part)


def _broken(value: torch.Tensor) -> int:
    """Rows of a tensor [..., n] (or numbers of a vector) that hold a NaN or +inf; -inf is a probability of 0."""
    value = getattr(value, "to_local", lambda: value)().detach()  # of a sharded one what this process has
    if not value.is_floating_point() or value.element_size() == 1:
        return 0
    bad = value.isnan() | (value == torch.inf)
    return int((bad.any(-1) if bad.dim() > 1 else bad).sum())
