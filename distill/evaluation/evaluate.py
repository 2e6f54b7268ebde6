"""Held-out metrics of a student against its teacher, before and after training.

    before = evaluate(student, teacher, splits.validation, batch_size=4)
    trainer.train()
    after = evaluate(student, teacher, splits.validation, batch_size=4)
    print(relative_reduction(before, after))

All metrics are means over the trained tokens of the whole set (natural logarithms, temperature 1), independent of the
batch size and the number of processes. They come from the fused loss's token statistics, so full logits never exist;
sums are kept in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from distill.core import console
from distill.core.eval_mode import eval_mode
from distill.core.labels import count_trained_tokens
from distill.data.collator import Collator, move_batch
from distill.objectives.losses import STATISTICS
from distill.objectives.measure import perplexity
from distill.teachers.base import Teacher
from distill.teachers.objective import DistillationObjective

NO_GAP = 1e-4  # nats; equal models in 16 bits differ by up to this much


class HeldOut(NamedTuple):
    """Metrics of one student against one teacher on one data set.

    Attributes:
        tokens: Number of trained tokens that the means are over.
        forward_kl: KL(teacher || student), nats per token.
        reverse_kl: KL(student || teacher), nats per token.
        agreement: Top-1 agreement, the fraction of tokens with the same argmax in both models; a tie at the top of
            either counts as no agreement.
        student_cross_entropy: -log p_student[label], nats per token.
        teacher_cross_entropy: -log p_teacher[label], nats per token.
        student_entropy, teacher_entropy: Entropy of the next-token distributions, nats.
    """

    tokens: int
    forward_kl: float
    reverse_kl: float
    agreement: float
    student_cross_entropy: float
    teacher_cross_entropy: float
    student_entropy: float
    teacher_entropy: float

    @property
    def student_perplexity(self) -> float:
        return perplexity(self.student_cross_entropy)

    @property
    def teacher_perplexity(self) -> float:
        return perplexity(self.teacher_cross_entropy)


def relative_reduction(before: HeldOut, after: HeldOut) -> float:
    """Return the relative KL reduction `(KL before - KL after) / KL before`, of the forward KL.

    1 is a perfect match with the teacher, 0 no progress, negative worse than before; NaN where the divergence was below
    `NO_GAP`, which may be rounding.
    """
    if before.forward_kl < NO_GAP:
        return math.nan
    return (before.forward_kl - after.forward_kl) / before.forward_kl


def describe_reduction(before: HeldOut, after: HeldOut) -> str:
    """Return the relative KL reduction as a percentage, or the reason why it is undefined."""
    from_to = f"{before.forward_kl:.4f} before and {after.forward_kl:.4f} after"
    if after.forward_kl > max(before.forward_kl, NO_GAP):
        return f"none, worse than before training ({from_to})"
    share = relative_reduction(before, after)
    return f"none, it was about 0 before training ({from_to})" if math.isnan(share) else f"{share:.1%}"


def evaluate(
    student: nn.Module,
    teacher: nn.Module | Teacher,
    rows: Sequence[Any],
    *,
    batch_size: int = 8,
    autocast: torch.dtype | None = None,
    objective: DistillationObjective | None = None,
) -> HeldOut:
    """Compare `student` with `teacher` on every trained token of `rows`. Neither is changed.

    With `torch.distributed` initialised, each process evaluates its share of the rows and all return the same result.

    Args:
        student: Bare, inside PEFT, or (with `objective`) wrapped by DDP or FSDP.
        teacher: Causal language model, or any other kind of teacher, on the student's device.
        rows: Data set of `input_ids`, `labels` (not shifted, -100 where masked), `position_ids`.
        batch_size: Rows per forward.
        autocast: Autocast dtype, as in training; None for the dtype of the weights.
        objective: Objective that trains this student, where it is wrapped; None for a temporary one.

    Raises:
        ValueError: There are no rows, or no trained tokens in them.
    """
    if len(rows) == 0:
        raise ValueError("data.validation: no held-out rows; hold out a larger fraction or give a source")
    device = next(student.parameters()).device
    borrowed = objective is not None
    objective = objective or DistillationObjective(teacher, student, "forward_kl")
    collator = Collator(0, columns=objective.teacher.columns)  # padding is masked, and a document of its own
    # an objective in training is only borrowed: it has its own loss back afterwards, also after an error
    loss = objective.loss
    objective.loss = objective.held_out_loss()
    try:
        compute = torch.autocast(device.type, autocast, enabled=autocast is not None)
        with torch.no_grad(), eval_mode(student), compute:
            sums = _sums(student, objective, rows, collator, batch_size, device)
        objective.teacher.flush()
    finally:
        objective.loss = loss
        if not borrowed:
            objective.detach()
    *statistics, tokens = sums.tolist()
    if tokens == 0:
        raise ValueError("data.validation: no trained tokens in the held-out rows (every label is masked)")
    return HeldOut(int(tokens), **metrics_from_statistics([value / tokens for value in statistics]))


def metrics_from_statistics(statistics: Sequence[float]) -> dict[str, float]:
    """Return the statistics of a `held_out_loss`, sums or means, under the names of `HeldOut`."""
    *of_tokens, reverse = statistics
    found = dict(zip(STATISTICS, of_tokens, strict=True))
    return {
        "forward_kl": found["divergence"],
        "reverse_kl": reverse,
        "agreement": found["agreement"],
        "student_cross_entropy": found["cross_entropy"],
        "teacher_cross_entropy": -found["teacher_label_logprob"],
        "student_entropy": found["student_entropy"],
        "teacher_entropy": found["teacher_entropy"],
    }


def _sums(
    student: nn.Module,
    objective: DistillationObjective,
    rows: Sequence[Any],
    collator: Collator,
    batch_size: int,
    device: torch.device,
) -> torch.Tensor:
    """Return the sums of the statistics and the number of trained tokens over all processes, float64."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed else (0, 1)
    starts = range(0, len(rows), batch_size)
    sums = torch.zeros(len(STATISTICS) + 2, dtype=torch.float64, device=device)
    # every process gets as many batches as the others, the last ones without rows of their own (below)
    own = [first + rank for first in range(0, len(starts), world)]

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for number in own:
            # wrapped models communicate in forward: a process without a batch repeats one with weight 0
            start = starts[number] if number < len(starts) else 0
            yield collator([rows[row] for row in range(start, min(start + batch_size, len(rows)))])

    for number, batch in zip(own, objective.prefetch(batches()), strict=True):
        inputs = move_batch(batch, device)
        output = student(**objective.student_inputs(inputs, num_items=1, weighted=False))
        counts = number < len(starts)
        sums += torch.cat([output["statistics"].double(), count_trained_tokens(inputs).double()[None]]) * counts
        console.advance(total=len(own))
    if distributed:
        torch.distributed.all_reduce(sums)
    return sums
