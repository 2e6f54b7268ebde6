"""The reverse KL over the student's own K most probable tokens, commonly used with teachers that give K tokens.

    y_1 ... y_K     the most probable tokens of p_s as it is now (stop-gradient)
    bucket          sum over y of p_s log(p_s / p_t), and the same of all other tokens as one outcome: at most the full
                    reverse KL, by the data processing inequality
    renormalize     the same sum of both distributions given that the token is one of the K, without the others
    sampled         all others, estimated from the student's sampled token: no bias, more noise (sampled_tail.py)

`FusedStudentTopKKLLoss` chooses the tokens from the logits that it computes anyway, and makes the gradient in the same
pass, through all probabilities of p_s. For `sampled`, tokens and the teacher's log-probabilities of them are computed
first, without a graph and chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from distill_kernels import FusedStudentTopKKLLoss
from distill_kernels.losses.chunked import raw_logits
from distill_kernels.losses.operands import Head

from distill.models.head import HeadWeights, LogitTransform
from distill.objectives.sampled_tail import SampledTail, TailTargets
from distill.objectives.targets import HeadForward, VocabularyAlignment
from distill.objectives.top_k import spread
from distill.objectives.top_k_encoding import log_probabilities, rows_at_once
from distill.recipe.loss import Loss, TopKTerm


class StudentTopKLoss(FusedStudentTopKKLLoss):
    """The term `top_k_reverse_kl`; over all columns, where these are no more than K, it is the full reverse KL.

    Args:
        term: Settings of the term: `k`, `tail`, weight.
        section: The recipe's loss, for its temperature.
        pairing: Alignment of the two vocabularies.
        transform: Scale and soft cap of the teacher's logits.
    """

    def __init__(self, term: TopKTerm, section: Loss, pairing: VocabularyAlignment, transform: LogitTransform) -> None:
        student = pairing.student
        super().__init__(
            min(term.k, pairing.columns),
            "reverse",
            term.tail,
            section.temperature,
            section.scale_by_temperature_squared,
            term.weight,
            student_logit_scale=student.scale,
            student_softcap=student.softcap,
            teacher_logit_scale=transform.scale,
            teacher_softcap=transform.softcap,
        )
        self.pairing = pairing

    def forward(self, call: HeadForward, teacher: HeadWeights) -> torch.Tensor:  # type: ignore[override]
        """Return the loss inside the student head's own call; inf where one of the K has teacher probability 0."""
        targets = call.inputs.targets
        assert isinstance(targets, torch.Tensor)
        arguments = self.pairing.arguments(call) | {"return_stats": False, "teacher_bias": teacher.bias}
        heads = call.hidden, call.head.weight, targets, teacher.weight
        loss = super().forward(*heads, call.labels, **arguments)  # type: ignore[arg-type]
        assert isinstance(loss, torch.Tensor)
        return loss


class StudentTopKTailLoss(SampledTail):
    """The term `top_k_reverse_kl` with `tail: sampled`; takes the arguments of `StudentTopKLoss`."""

    def __init__(self, term: TopKTerm, section: Loss, pairing: VocabularyAlignment, transform: LogitTransform) -> None:
        super().__init__(term, section, pairing)
        self.k = min(term.k, pairing.columns)
        self.transform = transform

    def __call__(self, call: HeadForward, teacher: HeadWeights) -> torch.Tensor:
        parts = []
        labels = call.labels.flatten().clamp_min(0)
        with torch.no_grad():
            for here, ids, log_p in top_k_chunks(
                call, teacher, self.transform, self.pairing, (self.k, self.temperature)
            ):
                parts.append((here, ids, log_p.gather(-1, ids), log_p.gather(-1, labels[here, None])[:, 0]))
        rows, *values = (torch.cat(each) for each in zip(*parts, strict=True))
        return self.of(call, TailTargets(*(spread(each, rows, call.labels.shape) for each in values)))


def student_top_k_loss(
    term: TopKTerm, section: Loss, pairing: VocabularyAlignment, transform: LogitTransform
) -> StudentTopKLoss | StudentTopKTailLoss:
    """Return the loss of the term `top_k_reverse_kl`, by how it treats the tail."""
    kind = StudentTopKTailLoss if term.tail == "sampled" else StudentTopKLoss
    return kind(term, section, pairing, transform)


def top_k_chunks(
    call: HeadForward,
    teacher: HeadWeights,
    transform: LogitTransform,
    pairing: VocabularyAlignment,
    settings: tuple[int, float],
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield the student's most probable tokens and the teacher's log-probabilities, chunk by chunk, without a graph.

    Args:
        call, teacher, transform, pairing: See the losses.
        settings: Number of tokens, and temperature of the teacher's probabilities.

    Yields:
        Flat rows int64 [n], tokens int64 [n, K] in no order, log-probabilities of all columns [n, columns].
    """
    k, at = settings
    hidden = call.hidden.flatten(0, 1)
    targets = call.inputs.targets
    kind = call.hidden.device.type
    assert isinstance(targets, torch.Tensor)
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else call.head.weight.dtype
    columns = pairing.columns
    targets = targets.flatten(0, 1)
    student = Head(hidden, call.head.weight, call.head.bias, *(call.head.lora or ())).cut(columns, dtype)
    rows = torch.arange(len(hidden), device=hidden.device) if call.valid_rows is None else call.valid_rows
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        for here in rows.split(rows_at_once(hidden.device, columns)):
            # scale and soft cap do not change the order
            ids = raw_logits(student, hidden[here].to(dtype)).topk(k, sorted=False).indices
            yield here, ids, log_probabilities(targets[here], teacher, transform, columns, at)[1]
