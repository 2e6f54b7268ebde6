"""What fp8 costs a teacher: the divergence between it before and after, on one real batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from distill_kernels import FusedKLLoss
from distill_kernels.matmul.fp8 import swap_linears_for_fp8
from torch.nn import functional as F

from distill.models.head import bare, decoder_of, find_head, read_head
from distill.teachers.objective import IGNORE, DistillationObjective


class Quantised(NamedTuple):
    """What `quantise_teacher` did.

    Attributes:
        layers: linear layers now in fp8.
        teacher_kl: KL(teacher before || teacher after), nats a trained token of the batch.
        student_kl: KL(teacher before || student), the same.
    """

    layers: int
    teacher_kl: float
    student_kl: float

    def __str__(self) -> str:
        return (
            f"{self.layers} linear layers in fp8, the head as it was; on one batch KL(teacher, fp8 teacher) "
            f"{self.teacher_kl:.4f} beside KL(teacher, student) {self.student_kl:.4f}"
        )


@torch.no_grad()
def quantise_teacher(objective: DistillationObjective, batch: Mapping[str, Any]) -> Quantised:
    """Quantise the objective's teacher in place and measure by how much that moves it.

    Args:
        objective: Holds teacher and student; call this after patching and before sharding.
        batch: A collated batch on the models' device.

    Raises:
        ValueError: The teacher has no linear layer whose sizes divide by 16.
    """
    student = objective.student
    modes = [(module, module.training) for module in student.modules()]
    student.eval()
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "valid_rows")}
    labels = F.pad(batch["labels"], (0, 1), value=IGNORE)[..., 1:]
    before = objective.teacher_hidden(batch)
    student_hidden = decoder_of(student)(**inputs, use_cache=False).last_hidden_state
    for module, training in modes:
        module.training = training
    layers = swap_linears_for_fp8(bare(objective.teacher))
    after = objective.teacher_hidden(batch)

    teacher_head, student_head = read_head(find_head(objective.teacher)), read_head(find_head(student))
    reading = objective.reading

    def divergence(hidden: torch.Tensor, head: Any, shape: Any) -> float:
        loss = FusedKLLoss(
            student_logit_scale=shape.scale, student_softcap=shape.softcap,
            teacher_logit_scale=reading.teacher.scale, teacher_softcap=reading.teacher.softcap,
        )  # fmt: skip
        return float(
            loss(
                hidden.to(head.weight.dtype), head.weight, before.to(teacher_head.weight.dtype), teacher_head.weight,
                labels, student_bias=head.bias, teacher_bias=teacher_head.bias, student_lora=head.lora,
                valid_rows=batch.get("valid_rows"), vocab_size=reading.vocab_size,
            )
        )  # fmt: skip

    return Quantised(
        len(layers),
        divergence(after, teacher_head, reading.teacher),
        divergence(student_hidden, student_head, reading.student),
    )
