"""The reverse KL over the student's own K likeliest tokens, as others train with where a teacher is read as K tokens.

    y_1 ... y_K     the likeliest tokens of p_s as it is now, held constant
    bucket          sum over y of p_s log(p_s / p_t), and the same of all other tokens as one outcome: at most the full
                    reverse KL, by the data processing inequality
    renormalize     the same sum of both distributions given that the token is one of the K, without the others

Which tokens, and what the teacher says of them, is made first, without a graph and chunk by chunk: a product of each
head. `FusedTopKKLLoss` makes the student's product once more and the gradient, through all probabilities of p_s.
"""

from __future__ import annotations

import math

import torch
from distill_kernels import FusedTopKKLLoss
from distill_kernels.losses.chunked import raw_logits
from distill_kernels.losses.operands import Head

from distill.core.labels import IGNORE_INDEX
from distill.models.head import HeadWeights, LogitTransform
from distill.recipe.loss import Loss, TopKTerm
from distill.teachers.base import HeadCall, Pairing
from distill.teachers.cache.encode import log_probabilities, rows_at_once
from distill.teachers.cache.top_k import spread

IMPOSSIBLE = -1e30  # stands for log 0, which the fused loss takes for a place that is not used


class OwnTopKLoss(FusedTopKKLLoss):
    """The term `top_k_reverse_kl`; over all columns, where these are no more than K, it is the full reverse KL.

    Args:
        term: its settings.
        section: the recipe's loss.
        pairing: how the student's logits meet the teacher's.
        transform: scale and soft cap of the teacher.
    """

    def __init__(self, term: TopKTerm, section: Loss, pairing: Pairing, transform: LogitTransform) -> None:
        student = pairing.student
        super().__init__(
            "reverse", term.tail, section.temperature, section.scale_by_temperature_squared, term.weight,
            student_logit_scale=student.scale, student_softcap=student.softcap,
        )  # fmt: skip
        self.k, self.pairing, self.transform = min(term.k, pairing.columns), pairing, transform

    def forward(self, call: HeadCall, teacher: HeadWeights) -> torch.Tensor:  # type: ignore[override]
        """The loss inside the student head's own call; inf where the teacher gives one of the K no probability."""
        ids, log_p = self.own_tokens(call, teacher)
        arguments = self.pairing.arguments(call) | {"return_stats": False}
        loss = super().forward(call.hidden, call.head.weight, ids, log_p, call.labels, **arguments)  # type: ignore[arg-type]
        assert isinstance(loss, torch.Tensor)
        infinite = (log_p == IMPOSSIBLE).any(-1) & (call.labels != IGNORE_INDEX)
        more = torch.where(infinite, torch.inf, 0.0)
        return loss + (more if self.reduction == "none" else more.sum())

    @torch.no_grad()
    def own_tokens(self, call: HeadCall, teacher: HeadWeights) -> tuple[torch.Tensor, torch.Tensor]:
        """The student's K likeliest tokens, int64 [B, S, K], and their log-probabilities under the teacher at the
        temperature, fp32 (fp64 of fp64); zeros in rows that are not computed.

        What the teacher leaves to all others counts as 1e-6 at least (8 eps): sums in fp32 tell no less from none.
        """
        hidden, targets, kind = call.hidden.flatten(0, 1), call.inputs.targets, call.hidden.device.type
        assert isinstance(targets, torch.Tensor)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else call.head.weight.dtype
        columns, targets = self.pairing.columns, targets.flatten(0, 1)
        student = Head(hidden, call.head.weight, call.head.bias, *(call.head.lora or ())).cut(columns, dtype)
        rows = torch.arange(len(hidden), device=hidden.device) if call.valid_rows is None else call.valid_rows
        parts = []
        with torch.autocast(kind, enabled=False):
            for here in rows.split(rows_at_once(hidden.device, columns)):
                # a scale and a soft cap leave the order as it is
                ids = raw_logits(student, hidden[here].to(dtype)).topk(self.k, sorted=False).indices
                at = self.objective.temperature
                log_p = log_probabilities(targets[here], teacher, self.transform, columns, at)[1].gather(-1, ids)
                most = math.log1p(-8 * torch.finfo(log_p.dtype).eps)
                log_p -= (log_p.logsumexp(-1, keepdim=True) - most).clamp_min(0)
                parts.append((ids, log_p.clamp_min(IMPOSSIBLE)))
        ids, log_p = (spread(torch.cat(each), rows, call.labels.shape) for each in zip(*parts, strict=True))
        return ids, log_p
