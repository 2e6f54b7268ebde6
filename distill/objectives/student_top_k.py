"""The reverse KL over the student's own K most probable tokens, commonly used with teachers that give K tokens.

    y_1 ... y_K     the most probable tokens of p_s as it is now (stop-gradient)
    bucket          sum over y of p_s log(p_s / p_t), and the same of all other tokens as one outcome: at most the full
                    reverse KL, by the data processing inequality
    renormalize     the same sum of both distributions given that the token is one of the K, without the others
    sampled         all others, estimated from the student's sampled token: no bias, more noise (sampled_tail.py)

`fused_student_top_k_kl_loss` chooses the tokens from the logits that it computes anyway, and makes the gradient in the
same pass, through all probabilities of p_s. For `sampled`, tokens and the teacher's log-probabilities of them are
computed first, without a graph and chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from distill_kernels import fused_student_top_k_kl_loss
from distill_kernels.losses.chunked import raw_logits
from distill_kernels.losses.operands import Head
from distill_kernels.losses.terms import checked_temperatures

from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.losses import caps_of
from distill.objectives.sampled_tail import SampledTail, TailTargets
from distill.objectives.targets import HeadForward, VocabularyAlignment
from distill.objectives.term_loss import TermLoss
from distill.objectives.top_k import spread
from distill.objectives.top_k_encoding import log_probabilities, rows_at_once
from distill.recipe.loss import TopKTerm


class StudentTopKLoss(TermLoss):
    """The term `top_k_reverse_kl`; over all columns, where these are no more than K, it is the full reverse KL.

    It is inf where the teacher gives probability 0 to one of the K tokens. Arguments as of `TermLoss`.
    """

    term: TopKTerm
    at_temperature = True
    weighted_by_kernel = True

    def reduced(self, call: HeadForward, teacher: HeadWeights | None) -> torch.Tensor:
        assert teacher is not None
        student = self.alignment.student
        loss = fused_student_top_k_kl_loss(
            call.hidden,
            call.head.weight,
            call.inputs.targets,  # type: ignore[arg-type]
            teacher.weight,
            call.labels,
            teacher_bias=teacher.bias,
            k=min(self.term.k, self.alignment.columns),
            tail=self.term.tail,
            temperature=self.temperature,
            scale_by_temperature_squared=False,  # `weight` has the factor
            divergence_weight=self.weight,
            clip=caps_of(self.term),
            student_logit_scale=student.scale,
            student_softcap=student.softcap,
            teacher_logit_scale=self.transform.scale,
            teacher_softcap=self.transform.softcap,
            **self.kernel_settings(),
            **self.alignment.arguments(call),
        )
        assert isinstance(loss, torch.Tensor)
        return loss


class StudentTopKTailLoss(SampledTail):
    """The term `top_k_reverse_kl` with `tail: sampled`, from the teacher's hidden states and head."""

    def tail_targets(self, call: HeadForward, teacher: HeadWeights | None) -> TailTargets:
        assert teacher is not None
        k = min(self.term.k, self.alignment.columns)
        labels = call.labels.flatten().clamp_min(0)
        parts = []
        with torch.no_grad():
            of_teacher = checked_temperatures(self.temperature).teacher
            for rows, ids, log_p in top_k_chunks(call, teacher, self.transform, self.alignment, k, of_teacher):
                parts.append((rows, ids, log_p.gather(-1, ids), log_p.gather(-1, labels[rows, None])[:, 0]))
        rows, *values = (torch.cat(column) for column in zip(*parts, strict=True))
        return TailTargets(*(spread(value, rows, call.labels.shape) for value in values))


def student_top_k_loss(term: TopKTerm, *arguments: Any) -> TermLoss:
    """Return the loss of the term `top_k_reverse_kl`, by how it treats the tail; arguments as of `TermLoss`."""
    kind = StudentTopKTailLoss if term.tail == "sampled" else StudentTopKLoss
    return kind(term, *arguments)


def top_k_chunks(
    call: HeadForward,
    teacher: HeadWeights,
    transform: LogitTransform,
    alignment: VocabularyAlignment,
    k: int,
    temperature: float,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield the student's most probable tokens and the teacher's log-probabilities, chunk by chunk, without a graph.

    Args:
        call, teacher, transform, alignment: See the losses.
        temperature: Temperature of the teacher's probabilities.

    Yields:
        Flat rows int64 [n], tokens int64 [n, K] in no order, log-probabilities of all columns [n, columns].
    """
    hidden = call.hidden.flatten(0, 1)
    targets = call.inputs.targets
    kind = call.hidden.device.type
    assert isinstance(targets, torch.Tensor)
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else call.head.weight.dtype
    columns = alignment.columns
    targets = targets.flatten(0, 1)
    student = Head(hidden, call.head.weight, call.head.bias, *(call.head.lora or ())).cut(columns, dtype)
    rows = torch.arange(len(hidden), device=hidden.device) if call.valid_rows is None else call.valid_rows
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        for here in rows.split(rows_at_once(hidden.device, columns)):
            # scale and soft cap do not change the order
            ids = raw_logits(student, hidden[here].to(dtype)).topk(k, sorted=False).indices
            yield here, ids, log_probabilities(targets[here], teacher, transform, columns, temperature)[1]
