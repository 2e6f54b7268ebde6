"""Rows of a teacher that is data: K tokens and what it says of them. Outcomes, loss and gradient in plain PyTorch.

Three readings (`TAILS`) of K tokens `i` and numbers `l_i`, with `P = sum_i exp(l_i)`:

    bucket        l = log p_t; outcomes are the K tokens and "any other", of probability 1 - P on the teacher's side;
    renormalize   l = log p_t; outcomes are the K tokens, of probability p(i) / p(any of the K) on both sides;
    sampled       l = log w of target weights whose expectation is p_t (importance-weighted draws); the divergence is
                  sum_i w_i log(w_i / p_s(i)) - sum_i w_i + 1.

For bucket and renormalize, a divergence has `f` and `g` of the table in divergence.py per outcome. With
`s = g - p_s sum(g)` the gradient for the student's logits is `s_i / T` at token i and, in the bucket,
`s_rest q_v / T` at any other token v, where `q = softmax` over the other tokens. For sampled weights it is
`(W p_s(v) - w_v) / T` with `W = sum_i w_i`: linear in w, hence unbiased if w is.

The student's tail is summed over the other tokens, not taken as 1 - P, so a small tail keeps its digits.

Where the vocabulary is cut over ranks (shards.py), the K logits and the tail's normaliser are put together from those
that hold the columns; every rank then computes all outcomes, and the gradient of its own columns.

Source of the sampled reading: Anshumann et al. 2025 (Sparse Logit Sampling, arXiv 2503.16870).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from distill_kernels.losses.divergence import (
    RowResult,
    _log_softmax,
    _maximum,
    reference_rows,
    reference_terms,
    transform_logits,
)
from distill_kernels.losses.shards import VocabShard
from distill_kernels.losses.terms import Objective

TAILS = ("bucket", "renormalize", "sampled")


class TopK(NamedTuple):
    """What a teacher says of each token.

    Attributes:
        ids: integers [N, K], distinct within a row, below the number of columns that count.
        logprobs: floating [N, K], natural logarithms, at the loss's temperature.
        tail: one of `TAILS`.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    tail: str

    def rows(self, which: slice | torch.Tensor) -> TopK:
        """Those of the rows `which`."""
        return TopK(self.ids[which], self.logprobs[which], self.tail)


def _at(z: torch.Tensor, ids: torch.Tensor, shard: VocabShard | None) -> torch.Tensor:
    """Each row's values at `ids`, [n, K], whichever rank holds them; -inf where none does."""
    if shard is None:
        return z.gather(-1, ids)
    found = F.pad(z, (0, 1)).gather(-1, shard.own_columns(ids))  # 0 where another rank's is added
    if shard.speaks:
        found = found.masked_fill((ids < 0) | (ids >= shard.vocab), -torch.inf)
    return shard.ranks.add_(found)


def _room(z: torch.Tensor, ids: torch.Tensor, shard: VocabShard | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What may be written to at `ids`: with a shard `z` has a last column more, for other ranks' tokens."""
    return (z, ids) if shard is None else (F.pad(z, (0, 1)), shard.own_columns(ids))


def outcomes(
    scaled: torch.Tensor, ids: torch.Tensor, given: torch.Tensor, tail: str, shard: VocabShard | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of the outcomes of "bucket" and "renormalize".

    Args:
        scaled: student logits over T, [n, V].
        ids: int64 [n, K].
        given: the teacher's log-probabilities, [n, K], at temperature T.
        tail: which of the two.
        shard: `scaled` are one rank's columns.

    Returns:
        The student's and the teacher's, [n, K + 1] (the tail last) or [n, K]; and the student's distribution over the
        other tokens, [n, V], 0 at the K, or None without a tail.
    """
    top, columns = _at(scaled, ids, shard), scaled.shape[1]
    if tail == "renormalize" or ids.shape[1] == (columns if shard is None else shard.vocab):  # nothing left for a tail
        return torch.log_softmax(top, -1), torch.log_softmax(given, -1), None
    room, places = _room(scaled, ids, shard)
    others = room.scatter(-1, places, -torch.inf)[:, :columns]
    lse_others = torch.logsumexp(others, -1, keepdim=True)
    if shard is not None:
        lse_others = torch.logsumexp(shard.ranks.gather(lse_others), 0)
    rest = torch.where(lse_others > -torch.inf, (others - lse_others).exp(), 0.0)
    log_s = torch.log_softmax(torch.cat([top, lse_others], -1), -1)
    missing = (1 - given.exp().sum(-1, keepdim=True)).clamp_min(0)
    return log_s, torch.cat([given, missing.log()], -1), rest


def _over_outcomes(
    scaled: torch.Tensor,
    ids: torch.Tensor,
    given: torch.Tensor,
    o: Objective,
    tail: str,
    with_gradient: bool,
    shard: VocabShard | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Divergences [n] and their gradient for the scaled logits, [n, V]."""
    log_s, log_t, rest = outcomes(scaled, ids, given, tail, shard)
    p_s, p_t = log_s.exp(), log_t.exp()
    loss, slope = scaled.new_zeros(scaled.shape[0]), torch.zeros_like(log_s)
    for kind, weight, parameter in zip(o.kinds, o.weights, o.parameters, strict=True):
        f, g = reference_terms(kind, parameter, log_s, log_t, p_s, p_t)
        loss += weight * f.sum(-1).clamp_min(0)
        slope += weight * (g - p_s * g.sum(-1, keepdim=True))
    if not with_gradient:
        return loss, None
    k = ids.shape[1]
    gradient = torch.zeros_like(scaled) if rest is None else rest.mul_(slope[:, k:])
    room, places = _room(gradient, ids, shard)
    return loss, room.scatter_(-1, places, slope[:, :k])[:, : scaled.shape[1]]


def _over_samples(
    scaled: torch.Tensor,
    ids: torch.Tensor,
    given: torch.Tensor,
    o: Objective,
    with_gradient: bool,
    shard: VocabShard | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same for sampled weights: forward KL only."""
    (weight,) = o.weights
    log_p, w = _log_softmax(scaled, shard), given.exp()
    total = w.sum(-1, keepdim=True)
    f = torch.where(w > 0, w * (given - _at(log_p, ids, shard)), 0.0)
    loss = weight * (f.sum(-1) + (1 - total.squeeze(-1))).clamp_min(0)
    if not with_gradient:
        return loss, None
    room, places = _room(log_p.exp().mul_(total), ids, shard)
    return loss, room.scatter_add_(-1, places, -w).mul_(weight)[:, : scaled.shape[1]]


def reference_top_k_rows(
    student_raw: torch.Tensor,
    teacher_raw: torch.Tensor | None,
    objective: Objective,
    *,
    labels: torch.Tensor | None,
    row_scale: torch.Tensor,
    with_gradient: bool = True,
    with_stats: bool = False,
    shard: VocabShard | None = None,
    top: TopK,
) -> RowResult:
    """`reference_rows` for a teacher of K tokens a row; `teacher_raw` is None. The kernel in topk_kernel.py follows it.

    With `shard`, ids are those of the whole vocabulary.

    Statistics: `divergence` is that of the loss (without the factor T^2), at the loss's temperature; `agreement` is 1
    where the most probable of the K tokens is the student's most probable; what K tokens cannot tell (teacher_entropy,
    teacher_label_logprob) is 0.
    """
    assert teacher_raw is None
    o, kept = objective, row_scale != 0
    hard = o._replace(kinds=(), weights=(), parameters=(), divergence_weights=())
    result = reference_rows(
        student_raw, None, hard, labels=labels, row_scale=row_scale, with_gradient=with_gradient,
        with_stats=with_stats, shard=shard,
    )  # fmt: skip
    if not o.kinds:
        return result
    ids = torch.where(kept[:, None], top.ids.long(), 0)
    given = top.logprobs.to(student_raw.dtype)
    z = transform_logits(student_raw, o.student_scale, o.student_softcap)
    scaled = z / o.temperature
    if top.tail == "sampled":
        soft, gradient = _over_samples(scaled, ids, given, o, with_gradient, shard)
    else:
        soft, gradient = _over_outcomes(scaled, ids, given, o, top.tail, with_gradient, shard)
    loss = result.loss + torch.where(kept, soft * row_scale, 0.0)
    if gradient is not None:
        gradient.mul_((row_scale * (o.student_scale / o.temperature))[:, None])
        if o.student_softcap:
            gradient.mul_((z / o.student_softcap).square_().neg_().add_(1.0))
        gradient.masked_fill_(~kept[:, None], 0.0)
        if result.gradient is not None:
            gradient.add_(result.gradient)
    stats = result.stats
    if stats is not None:
        divergence = torch.where(kept, soft * (o.divergence_weights[0] / o.weights[0]), 0.0)
        both = (_at(z, ids, shard) == _maximum(z, shard)) & (given == given.amax(-1, keepdim=True))
        agreement = (both.any(-1) & kept).float()
        stats = stats._replace(divergence=divergence.float(), agreement=agreement)
    return RowResult(loss, gradient, stats)
