"""What fp8 costs a teacher: the divergence between it before and after, on one real batch.

`teacher.dtype: fp8` loads the teacher in bf16 and quantises its linear layers, but not its head, once the run's own
batches exist to measure the damage on. The figure is printed beside the student's own divergence: a teacher that moves
by a hundredth of what the student has to learn is worth its speed, one that moves by half of it is not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from distill_kernels import FusedKLLoss
from torch import nn

from distill.core.eval_mode import eval_mode
from distill.core.labels import shift_labels
from distill.models.fp8_teacher import quantise
from distill.models.head import HeadWeights, LogitTransform, decoder_of, find_head, last_hidden, read_head
from distill.teachers.base import Batch, Pairing
from distill.teachers.hidden import HiddenFormat
from distill.teachers.losses import LogitTransforms


class Fp8Cost(NamedTuple):
    """What quantising moved.

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
def quantise_and_measure(
    teacher: nn.Module, format: HiddenFormat, batch: Batch, student: nn.Module, pairing: Pairing
) -> Fp8Cost:
    """Quantise the teacher in place and measure by how much that moves it.

    Args:
        teacher: after patching and before sharding.
        format: its targets.
        batch: collated, on the models' device.
        student: as it stands.
        pairing: of both.

    Raises:
        ValueError: The teacher has no linear layer whose sizes divide by 16.
    """
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "valid_rows")}
    labels = shift_labels(batch["labels"])
    before = last_hidden(teacher, batch)
    with eval_mode(student):
        student_hidden = decoder_of(student)(**inputs, use_cache=False).last_hidden_state
    layers = quantise(teacher)
    after = last_hidden(teacher, batch)
    teacher_head, student_head = read_head(find_head(teacher)), read_head(find_head(student))

    def divergence(hidden: torch.Tensor, head: HeadWeights, transform: LogitTransform) -> float:
        loss = FusedKLLoss(**LogitTransforms(transform, format.transform))
        return float(
            loss(
                hidden.to(head.weight.dtype), head.weight, before.to(teacher_head.weight.dtype), teacher_head.weight,
                labels, student_bias=head.bias, teacher_bias=teacher_head.bias, student_lora=head.lora,
                valid_rows=batch.get("valid_rows"), vocab_size=pairing.vocab_size,
            )
        )  # fmt: skip

    return Fp8Cost(
        layers, divergence(after, teacher_head, format.transform),
        divergence(student_hidden, student_head, pairing.student),
    )  # fmt: skip
