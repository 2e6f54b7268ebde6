"""Loss schedules (`loss.schedule`): the loss of each optimizer step.

Scheduled values are scalar arguments of the loss kernels, which are launched outside of any CUDA graph; they are not
compile-time constants, so nothing is recompiled. They depend on the step number alone, so a resumed run continues as if
it had not been interrupted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distill.recipe import Loss
from distill.training.listeners import StepListener

if TYPE_CHECKING:
    from distill.teachers.objective import DistillationObjective


class LossSchedule(StepListener):
    """Listener that updates an objective's loss to the scheduled one of the present step.

    Args:
        objective: Objective whose loss is replaced where it changes.
        section: Loss section that the objective was made with, which has a schedule.

    Raises:
        ValueError: A scheduled loss that this teacher's outputs do not allow.
    """

    def __init__(self, objective: DistillationObjective, section: Loss) -> None:
        self.objective = objective
        self.section = section
        self.now: Loss | None = None
        teacher = objective.teacher
        # stored outputs may stay unread
        prefetches = teacher.prefetch_depth and teacher.rows.supports_new_rows
        if prefetches and section.leaves_the_teacher_out:
            raise ValueError(
                "loss.schedule: expected a divergence of weight above 0 in every step, since this teacher's outputs "
                "are prefetched; got steps without one"
            )
        for loss in section.at_points:
            teacher.format.loss(loss, objective.alignment)
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        loss = self.section.at(step)
        if loss == self.now:
            return
        self.now = loss
        self.objective.use(self.objective.teacher.format.loss(loss, self.objective.alignment))
        self.values = {line.setting: line.at(step) for line in self.section.schedule}

    def metrics(self) -> dict[str, float]:
        return dict(self.values)
