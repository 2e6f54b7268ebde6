"""`loss.schedule`: the loss of each optimizer step.

What changes are numbers that the host hands to the loss's kernels, which are launched outside of any CUDA graph; they
are no constants of a kernel, so that nothing is compiled anew. The number of the step alone decides, so that a run that
is resumed goes on as it would have.
"""

from __future__ import annotations

from collections.abc import Mapping

from distill.recipe import Loss
from distill.teachers.losses import LossSpec
from distill.teachers.objective import DistillationObjective


class LossSchedule:
    """Keeps an objective's loss as its recipe has it for the present step.

    Args:
        objective: whose loss is replaced where it changes.
        section: as the objective was given it; without a schedule nothing is done.

    Raises:
        ValueError: a scheduled loss that this teacher cannot give.
    """

    def __init__(self, objective: DistillationObjective, section: LossSpec) -> None:
        loss = Loss.model_validate(section) if isinstance(section, Mapping) else section
        self.objective = objective
        self.section = loss if isinstance(loss, Loss) and loss.schedule else None
        self.now: Loss | None = None
        if self.section is not None:
            teacher = objective.teacher
            asks_ahead = teacher.ahead and teacher.judges_new_rows  # what is only read ahead may be left unread
            if asks_ahead and self.section.leaves_the_teacher_out:
                raise ValueError(
                    "loss.schedule: this teacher is asked ahead; expected a divergence of weight above 0 in every step"
                )
            for step in {0, *(step for line in self.section.schedule for step in line.steps)}:
                objective.teacher.format.loss(self.section.at(step), objective.pairing)
        self.begin(0)

    def begin(self, step: int) -> None:
        """The optimizer step after `step` others comes next."""
        if self.section is None or (loss := self.section.at(step)) == self.now:
            return
        self.now = loss
        self.objective.loss = self.objective.teacher.format.loss(loss, self.objective.pairing)
        self.values = {line.setting: line.at(step) for line in self.section.schedule}

    @property
    def weight(self) -> float | None:
        """Of all divergences together in the present step, 0 where there is none; None without a schedule."""
        name, weight = self.objective.divergence if self.section else (None, 0.0)
        return None if self.section is None else weight if name else 0.0

    def figures(self) -> dict[str, float]:
        """The scheduled settings of the present step, for the log."""
        return {} if self.section is None else dict(self.values)
