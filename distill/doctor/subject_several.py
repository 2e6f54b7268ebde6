"""Several teachers, examined: the reference is the mixture of their own probabilities, by the recipe's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from distill_kernels import FusedDistillationLoss, TeacherHead

from distill.doctor.reference_loss import mixed_log_probabilities, shifted
from distill.doctor.subject import Subject, worst_of
from distill.models.head import find_head, whole
from distill.teachers.mixture import MixtureObjective, TeacherGroup
from distill.teachers.objective import IGNORE, last_hidden

COLUMNS = 512  # of the vocabulary, over which the mixture is compared with itself


@dataclass
class SeveralTeachers(Subject):
    """A `Subject` whose teacher is a `TeacherGroup`.

    Attributes:
        weights: of the teachers in the recipe; what the group made of them is not asked.
    """

    weights: list[float] = field(default_factory=list)

    @property
    def teachers(self) -> list[Any]:
        """The members of the group."""
        return list(self.teacher.members)

    @property
    def objective_type(self) -> Any:
        """Against the mixture."""
        return MixtureObjective

    def shares(self) -> list[tuple[float, Any]]:
        """The members with the recipe's weights."""
        return list(zip(self.weights, self.teachers, strict=True))

    def from_itself(self) -> tuple[str, float]:
        """The mixture against a student that says it: log-probabilities for hidden states, a head that is 1.

        The distributions are over the first columns of the vocabulary, since such a head has as many rows as columns.
        """
        batch, objective = self.batch(), self.objective()
        shapes = objective.shapes
        objective.detach()
        keep = (shifted(batch["labels"]) != IGNORE).flatten()
        heads, logits = [], []
        for (share, model), shape in zip(self.shares(), shapes, strict=True):
            hidden = last_hidden(model, batch).flatten(0, -2)[keep]
            with whole(find_head(model)) as head:
                weight = head.weight[:COLUMNS]
                bias = None if head.bias is None else head.bias[:COLUMNS]
            heads.append(TeacherHead(hidden, weight, share, bias, shape.scale, shape.softcap))
            z = shape.scale * torch.nn.functional.linear(hidden.double(), weight.double(), _wide(bias))
            logits.append((share, z if not shape.softcap else shape.softcap * torch.tanh(z / shape.softcap)))
        said = mixed_log_probabilities(logits, 1.0).to(heads[0].hidden.dtype)
        one = torch.eye(said.shape[-1], dtype=said.dtype, device=said.device)
        found = [FusedDistillationLoss([term])(said, one, teachers=heads) for term in self.divergences]
        return f"the mixture (over {said.shape[-1]} columns)", worst_of(found)

    def told(self) -> dict[str, Any]:
        """The weights."""
        return {"weights": list(self.weights)}

    @classmethod
    def retold(cls, told: Mapping[str, Any], teachers: list[Any]) -> tuple[Any, dict[str, Any]]:
        """The teachers as a group again."""
        return TeacherGroup(teachers, told["weights"]), {"weights": told["weights"]}


def _wide(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.double()
