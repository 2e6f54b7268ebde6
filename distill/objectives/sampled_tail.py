"""The reverse KL over K tokens, with an unbiased estimate of all others from the token that the student sampled.

    g(a, b) = a log(a / b) - a + b                     >= 0; its sum over all tokens is KL(p_s || p_t)
    loss    = sum of g(p_s, p_t) over the K tokens  +  g(p_s(y), p_t(y)) / q(y) where y is none of them

q(y) is the probability that y was sampled with, a constant. The expectation over y is the sum over all tokens, whatever
K and q, and so is that of the gradient, through all probabilities of p_s. The first sum alone is the generalised KL of
MOPD (arXiv 2606.30406, equation 5), which is blind to the teacher's other tokens; the second is an estimate by
importance sampling of what it leaves out.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from distill_kernels import Clip
from distill_kernels.losses.terms import checked_temperatures

from distill.core.labels import IGNORE_INDEX
from distill.models.head import HeadWeights
from distill.objectives.losses import caps_of
from distill.objectives.targets import HeadForward
from distill.objectives.term_loss import TermLoss
from distill.recipe.loss import TopKTerm

IMPOSSIBLE = -1e30  # stands for log 0: its products are no NaN


class TailTargets(NamedTuple):
    """Log-probabilities of the teacher at the loss's temperature, of all positions N of a batch.

    Attributes:
        ids: int64 [N, K], tokens of each position.
        log_p: [N, K], theirs.
        label_log_p: [N], of the sampled token.
    """

    ids: torch.Tensor
    log_p: torch.Tensor
    label_log_p: torch.Tensor

    def flattened(self) -> TailTargets:
        """Return targets [B, S, ...] with one dimension of positions; log 0 becomes `IMPOSSIBLE`."""
        return TailTargets(
            self.ids.flatten(0, -2).long(),
            self.log_p.flatten(0, -2).clamp_min(IMPOSSIBLE),
            self.label_log_p.flatten().clamp_min(IMPOSSIBLE),
        )


class SampledTail(TermLoss):
    """The term `top_k_reverse_kl` with `tail: sampled`, in plain PyTorch; arguments as of `TermLoss`.

    The loss is inf where the teacher gives probability 0 to one of the K tokens or to the sampled one.
    """

    term: TopKTerm
    at_temperature = True

    def tail_targets(self, call: HeadForward, teacher: HeadWeights | None) -> TailTargets:
        """Return the teacher's log-probabilities for a call, [B, S, ...]."""
        raise NotImplementedError

    def reduced(self, call: HeadForward, teacher: HeadWeights | None) -> torch.Tensor:
        targets = self.tail_targets(call, teacher).flattened()
        labels = call.labels.flatten()
        # the rows of a chunk know by these which positions they are
        positions = torch.arange(len(labels), device=labels.device).masked_fill(labels == IGNORE_INDEX, IGNORE_INDEX)
        row_losses = functools.partial(self._row_losses, targets, labels, call.inputs.sampled_log_p)
        return self.chunked(call, row_losses, positions.view(call.labels.shape))

    def _row_losses(
        self,
        targets: TailTargets,
        labels: torch.Tensor,
        sampled_log_p: torch.Tensor | None,
        raw: torch.Tensor,
        _: object,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Return the losses [n] of rows with raw logits [n, V] at these positions, `IGNORE_INDEX` for those to skip."""
        at = positions.clamp_min(0)
        z = self.alignment.student.applied(raw)
        y = labels[at].clamp_min(0)[:, None]
        log_s = (z / checked_temperatures(self.temperature).student).log_softmax(-1)
        clip = caps_of(self.term) or Clip()
        if sampled_log_p is None:  # the present student's own, at temperature 1, without a gradient
            log_q = z.detach().log_softmax(-1).gather(-1, y)[:, 0]
        else:
            log_q = sampled_log_p.flatten()[at].to(log_s.dtype)
        ids = targets.ids[at]
        log_t = targets.log_p[at]
        label_log_t = targets.label_log_p[at]
        losses = generalised_kl(log_s.gather(-1, ids), log_t.to(log_s.dtype), cap=clip.entry).sum(-1)
        outside = (positions >= 0) & ~(ids == y).any(-1)
        tail = generalised_kl(log_s.gather(-1, y)[:, 0], label_log_t.to(log_s.dtype), log_q, clip.entry)
        losses = losses + torch.where(outside, tail, 0.0)
        if clip.entry is None:
            ruled_out = (log_t == IMPOSSIBLE).any(-1) | (outside & (label_log_t == IMPOSSIBLE))
            losses = losses + torch.where(ruled_out, torch.inf, 0.0).to(losses.dtype)
        return losses if clip.token is None else losses.clamp(max=clip.token)


def generalised_kl(
    log_a: torch.Tensor,
    log_b: torch.Tensor,
    log_q: torch.Tensor | float = 0.0,
    cap: float | None = None,
) -> torch.Tensor:
    """Return (a log(a / b) - a + b) / q of each element, from logarithms; gradients go to `log_a`.

    A `cap` is on the element before its division by q, so that an estimate stays one of the capped sum.
    """
    a = (log_a - log_q).exp()
    b = (log_b - log_q).exp()
    each = a * (log_a - log_b) - a + b
    if cap is None:
        return each
    most = cap * (-torch.as_tensor(log_q)).exp()
    return torch.where(each > most, most.to(each), each)
