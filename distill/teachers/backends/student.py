"""The student's own checkpoint as a teacher: frozen, or as an exponential moving average (EMA) of the weights.

w <- share w + (1 - share) w_student        added up in float32 or wider

Of a student with adapters those are averaged, A and B each: the weights under them do not change, and teacher and
student hold one copy of these (models/load/shared_weights.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from distill_kernels.torch_internals import foreach_lerp_
from safetensors.torch import load_file
from torch import nn

from distill.core.tensor_files import write_tensors
from distill.models.dtypes import Precision
from distill.models.head import unwrap_peft
from distill.models.load.shared_weights import FrozenWeights
from distill.models.meta_models import meta_student
from distill.recipe import Lora
from distill.teachers.backends.local import LoadedTeacher, LocalPlan, truncated
from distill.teachers.footprint import Footprint, FootprintContext
from distill.teachers.load_context import LoadContext
from distill.teachers.vocabulary import Vocabulary

FILE = "teacher.safetensors"  # of a checkpoint


class AveragedTeacher(LoadedTeacher):
    """An EMA of the student: after each step, `share` times itself plus (1 - `share`) times the student.

    Args:
        model: the student's checkpoint, whose weights are changed in place; other arguments as of `LoadedTeacher`.
        share: decay of the average, above 0 and below 1.

    Attributes:
        average: The averaged weights by name: the model's own where they are wide, float32 copies of narrow ones; of
            a model with adapters the adapters' alone.
    """

    def __init__(self, model: nn.Module, share: float, *, field: str = "teacher", tokenizer: Any = None) -> None:
        super().__init__(model, field=field, tokenizer=tokenizer)
        self.share = share
        self.average: dict[str, torch.Tensor] = {}  # from the first step on: the model may be moved before

    def truncated_copy(self, layers: Sequence[int]) -> AveragedTeacher:
        return AveragedTeacher(truncated(self.model, layers), self.share, field=next(iter(self.models)))

    @property
    def follows_student(self) -> bool:
        return True

    def add_adapters(self, lora: Lora, seed: int | None = None) -> None:
        """Put adapters on the model, which start as the student's of the same seed do."""
        from distill.models.adapters import add_lora  # imports peft, a second

        # PEFT puts them into the model itself: its wrapper, for training and saving, is not needed
        add_lora(self.model, lora, seed=seed)
        self.model.eval().requires_grad_(False)

    @torch.no_grad()
    def update_ema(self, student: nn.Module) -> None:
        """Update the average by the weights of a student, or by its adapters where this teacher has adapters too.

        Raises:
            ValueError: They are not the same weights by name.
        """
        own = _averaged(self.model)
        theirs = _averaged(student)
        if own.keys() != theirs.keys():
            raise ValueError(f"teacher.ema: expected the student's weights, got {min(own.keys() ^ theirs.keys())}")
        self.average = self.average or {name: p.detach() if _is_wide(p) else p.float() for name, p in own.items()}
        new = [theirs[name].to(weight.dtype) for name, weight in self.average.items()]
        foreach_lerp_(list(self.average.values()), new, 1 - self.share)
        self._write_narrow()

    def save(self, checkpoint: Path) -> None:
        write_tensors(checkpoint / FILE, self.average)

    @torch.no_grad()
    def restore(self, checkpoint: Path) -> None:
        state = load_file(checkpoint / FILE)
        own = _averaged(self.model)
        self.average = {n: p.detach().copy_(state[n]) if _is_wide(p) else state[n].to(p.device) for n, p in own.items()}
        self._write_narrow()

    def _write_narrow(self) -> None:
        own = _averaged(self.model)
        for name, weight in self.average.items():
            if not _is_wide(own[name]):
                own[name].copy_(weight)


def _averaged(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that training changes: those of the adapters where there are any, else all."""
    weights: dict[str, torch.Tensor] = dict(unwrap_peft(model).named_parameters())
    return {name: p for name, p in weights.items() if "lora_" in name} or weights


def _is_wide(parameter: torch.Tensor) -> bool:
    return parameter.dtype.itemsize >= 4


class AveragePlan(LocalPlan):
    """The plan of an `AveragedTeacher`; arguments as of `LocalPlan`."""

    def frozen_weights(self, precision: Precision, *, sharded: bool) -> list[FrozenWeights]:
        """Return the weights under the adapters; none of an average of all weights, or where adapters change them."""
        lora = self.recipe.student.lora
        return super().frozen_weights(precision, sharded=sharded) if lora is not None and lora.init == "default" else []

    def footprint(self, context: FootprintContext) -> Footprint:
        """Return the model's footprint, with the average in float32 where its weights are narrower."""
        plain = super().footprint(context)
        student = self.recipe.student
        if student.lora is not None:  # adapters are in float32
            return plain._replace(weights=plain.weights + 4 * meta_student(student, self.meta().config).shape.trained)
        size = context.precision.teacher.itemsize
        return plain._replace(weights=plain.weights + (4 * self.meta().shape.parameters if size < 4 else 0))

    def open(self, context: LoadContext, vocabulary: Vocabulary) -> AveragedTeacher:
        if context.placement.student_sharded:
            raise ValueError(
                f"{self.field}.ema: expected a replicated student, got a sharded one; set parallel.strategy: ddp"
            )
        decay = self.section.ema_decay
        assert decay is not None
        tokenizer = vocabulary.teacher_tokenizer
        teacher = AveragedTeacher(self.load(context), decay, field=self.field, tokenizer=tokenizer)
        if self.recipe.student.lora is not None:
            teacher.add_adapters(self.recipe.student.lora, self.recipe.train.seed)
        return teacher
