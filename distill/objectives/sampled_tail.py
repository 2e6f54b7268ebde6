"""The reverse KL over K tokens, with an unbiased estimate of all others from the token that the student sampled.

    g(a, b) = a log(a / b) - a + b                     >= 0; its sum over all tokens is KL(p_s || p_t)
    loss    = sum of g(p_s, p_t) over the K tokens  +  g(p_s(y), p_t(y)) / q(y) where y is none of them

q(y) is the probability that y was sampled with, a constant. The expectation over y is the sum over all tokens, whatever
K and q, and so is that of the gradient, through all probabilities of p_s. The first sum alone is the generalised KL of
MOPD (arXiv 2606.30406, equation 5), which is blind to the teacher's other tokens; the second is an estimate by
importance sampling of what it leaves out.
"""

from __future__ import annotations

import torch
from distill_kernels import ChunkedLoss

from distill.core.labels import IGNORE_INDEX
from distill.objectives.targets import HeadForward, VocabularyAlignment
from distill.recipe.loss import Loss, TopKTerm

IMPOSSIBLE = -1e30  # stands for log 0: its products are no NaN


class TailTargets:
    """Log-probabilities of the teacher at the loss's temperature, flat.

    Args:
        ids: int64 [N, K], tokens of each position.
        log_p: [N, K], theirs.
        label_log_p: [N], of the sampled token.
    """

    def __init__(self, ids: torch.Tensor, log_p: torch.Tensor, label_log_p: torch.Tensor) -> None:
        self.ids = ids.flatten(0, -2).long()
        self.log_p = log_p.flatten(0, -2).clamp_min(IMPOSSIBLE)
        self.label_log_p = label_log_p.flatten().clamp_min(IMPOSSIBLE)


class SampledTail:
    """The weighted loss of a call in plain PyTorch, chunk by chunk, so that a batch's logits never exist together.

    Args:
        term: settings of the term.
        section: the recipe's loss.
        pairing: Alignment of the two vocabularies.

    Attributes:
        reduction: "mean" over the tokens of the step, or "none": each token's, without a gradient.
        workspace: not used.
    """

    def __init__(self, term: TopKTerm, section: Loss, pairing: VocabularyAlignment) -> None:
        self.pairing = pairing
        self.temperature = section.temperature
        squared = self.temperature**2 if section.scale_by_temperature_squared else 1.0
        self.weight = term.weight * squared
        self.reduction = "mean"
        self.workspace: int | None = None

    def of(self, call: HeadForward, targets: TailTargets) -> torch.Tensor:
        """Return the loss inside the student head's own call; inf where the teacher gives one of them probability 0."""
        labels = call.labels.flatten()
        drawn = call.inputs.sampled_log_p
        drawn = None if drawn is None else drawn.flatten()
        numbers = torch.arange(len(labels), device=labels.device).masked_fill(labels == IGNORE_INDEX, IGNORE_INDEX)
        wide = torch.promote_types(call.hidden.dtype, torch.float32)
        each = torch.zeros(len(labels), dtype=wide, device=labels.device)

        def tokens_loss(raw: torch.Tensor, _: object, rows: torch.Tensor | None) -> torch.Tensor:
            assert rows is not None
            at = rows.clamp_min(0)
            z = self.pairing.student.applied(raw)
            y = labels[at].clamp_min(0)[:, None]
            log_s = (z / self.temperature).log_softmax(-1)
            log_q = z.detach().log_softmax(-1).gather(-1, y)[:, 0] if drawn is None else drawn[at].to(log_s.dtype)
            ids = targets.ids[at]
            log_t = targets.log_p[at]
            label_log_t = targets.label_log_p[at]
            losses = generalised_kl(log_s.gather(-1, ids), log_t.to(log_s.dtype)).sum(-1)
            outside = (rows >= 0) & ~(ids == y).any(-1)
            tail = generalised_kl(log_s.gather(-1, y)[:, 0], label_log_t.to(log_s.dtype), log_q)
            losses = losses + torch.where(outside, tail, 0.0)
            ruled_out = (log_t == IMPOSSIBLE).any(-1) | (outside & (label_log_t == IMPOSSIBLE))
            losses = losses + torch.where(ruled_out, torch.inf, 0.0).to(losses.dtype)
            each[at[rows >= 0]] = losses.detach()[rows >= 0].to(wide)
            return losses

        arguments = self.pairing.arguments(call)
        del arguments["return_stats"]
        shape = call.labels.shape
        loss = ChunkedLoss(tokens_loss)(call.hidden, call.head.weight, labels=numbers.view(shape), **arguments)
        return self.weight * (each.view(shape) if self.reduction == "none" else loss)


def generalised_kl(log_a: torch.Tensor, log_b: torch.Tensor, log_q: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Return (a log(a / b) - a + b) / q of each element, from logarithms; gradients go to `log_a`."""
    a = (log_a - log_q).exp()
    b = (log_b - log_q).exp()
    return a * (log_a - log_b) - a + b
