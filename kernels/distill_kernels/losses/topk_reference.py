"""Divergence from a teacher's top-K log-probabilities: outcomes, loss and gradient in plain PyTorch.

The specification of topk_kernel.py. `TAILS` are three interpretations of K tokens `i` and numbers `l_i`, with
`P = sum_i exp(l_i)`:

    bucket        l = log p_t; outcomes are the K tokens and "any other", of probability 1 - P on the teacher's side;
    renormalize   l = log p_t; outcomes are the K tokens, of probability p(i) / p(any of the K) on both sides;
    sampled       l = log w of target weights whose expectation is p_t (importance-weighted draws); the divergence is
                  sum_i w_i log(w_i / p_s(i)) - sum_i w_i + 1.

For bucket and renormalize, a divergence has `f` and `g` of the table in divergence.py per outcome. With
`s = g - p_s sum(g)` the gradient for the student's logits is `s_i / T` at token i and, in the bucket,
`s_rest q_v / T` at any other token v, where `q = softmax` over the other tokens. For sampled weights it is
`(W p_s(v) - w_v) / T` with `W = sum_i w_i`: linear in w, hence unbiased if w is.

A given log-probability of `IMPOSSIBLE` is that of a token of probability 0: the reverse KL is inf, its gradient finite.

The student's tail is summed over the other tokens, not taken as 1 - P, so a small tail keeps its digits.

Where the vocabulary is cut over ranks (shards.py), the K logits and the tail's normaliser are put together from those
that hold the columns; every rank then computes all outcomes, and the gradient of its own columns.

Source of the sampled interpretation: Anshumann et al. 2025 (Sparse Logit Sampling, arXiv 2503.16870).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from distill_kernels.losses import terms
from distill_kernels.losses.divergence import (
    RowResult,
    _row_maximum,
    _sum_over_ranks,
    log_softmax,
    reference_rows,
    reference_terms,
    transform_logits,
)
from distill_kernels.losses.shards import VocabShard
from distill_kernels.losses.terms import Objective

TAILS = ("bucket", "renormalize", "sampled")
LEAST_TAIL = 8  # times the epsilon: the least of the teacher's probability outside of the K, which sums resolve
IMPOSSIBLE = -1e30  # stands for log 0 of a token that is one of the K: its products are no NaN


class TopK(NamedTuple):
    """Teacher log-probabilities of K tokens at each position.

    Attributes:
        ids: integers [N, K], distinct within a row, below the number of columns that count.
        logprobs: floating [N, K], natural logarithms, at the loss's temperature.
        tail: one of `TAILS`.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    tail: str

    def rows(self, which: slice | torch.Tensor) -> TopK:
        """Return the rows `which`."""
        return TopK(self.ids[which], self.logprobs[which], self.tail)


class StudentTopK(NamedTuple):
    """The student's K most probable tokens as the outcomes of a divergence.

    Attributes:
        k: how many, at most the columns that count.
        tail: "bucket" or "renormalize", see `TAILS`.
    """

    k: int
    tail: str

    def allocate(self, n: int, device: torch.device) -> TopK:
        """Return uninitialised tokens and log-probabilities of `n` rows."""
        ids = torch.empty(n, self.k, dtype=torch.int32, device=device)
        return TopK(ids, torch.empty(n, self.k, dtype=torch.float32, device=device), self.tail)


class TopKColumns(NamedTuple):
    """Columns of the K tokens of each row among this rank's logits.

    Attributes:
        columns: int64 [n, K], columns of this rank; 0 where it has none.
        here: bool [n, K], whether this rank holds the token and the entry is used.
        used: bool [n, K]: log-probabilities of -inf mark entries without a token.
        shard: whose columns these are, or None.
    """

    columns: torch.Tensor
    here: torch.Tensor
    used: torch.Tensor
    shard: VocabShard | None

    def gather(self, z: torch.Tensor) -> torch.Tensor:
        """Return `z` [n, V] at each row's K columns, [n, K], from the ranks that hold them; -inf at unused entries."""
        values = z.gather(-1, self.columns) if z.shape[1] else z.new_zeros(self.columns.shape)
        values = values.masked_fill(~self.here, 0.0)
        if self.shard is not None:
            self.shard.ranks.all_reduce_(values)
        return values.masked_fill(~self.used, -torch.inf)

    def add_(self, z: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Add `values` [n, K], or one number, to `z` [n, V] at the K columns, in place."""
        values = torch.where(self.here, values, z.new_zeros(()))
        return z.scatter_add_(-1, self.columns, values) if z.shape[1] else z


def top_k_columns(ids: torch.Tensor, given: torch.Tensor, vocab: int, shard: VocabShard | None) -> TopKColumns:
    """Return the columns of `ids` [n, K] (of the whole vocabulary) among this rank's `vocab`; used ids are in range.

    Args:
        ids: integers [n, K].
        given: the teacher's log-probabilities, [n, K]; -inf marks unused entries.
        vocab: columns of this rank.
        shard: whose columns these are, or None.
    """
    used = given != -torch.inf
    own = ids.long() - (0 if shard is None else shard.start)
    here = used & (own >= 0) & (own < vocab)
    return TopKColumns(torch.where(here, own, 0), here, used, shard)


def outcome_log_probs(
    scaled: torch.Tensor, columns_of_k: TopKColumns, given: torch.Tensor, tail: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return both models' log-probabilities of the outcomes of tail "bucket" or "renormalize".

    Args:
        scaled: student logits over T, [n, V].
        columns_of_k: of the K tokens.
        given: the teacher's log-probabilities, [n, K], at temperature T.
        tail: which of the two.

    Returns:
        The student's and the teacher's, [n, K + 1] (the tail last) or [n, K]; and the student's distribution over the
        other tokens, [n, V], 0 at the K, or None without a tail.
    """
    top, shard = columns_of_k.gather(scaled), columns_of_k.shard
    if tail == "renormalize":
        return torch.log_softmax(top, -1), torch.log_softmax(given, -1), None
    others = columns_of_k.add_(scaled.clone(), scaled.new_full((), -torch.inf))
    lse_others = torch.logsumexp(others, -1, keepdim=True)
    if shard is not None:
        lse_others = torch.logsumexp(shard.ranks.all_gather(lse_others), 0)
    rest = torch.where(lse_others > -torch.inf, (others - lse_others).exp(), 0.0)
    log_s = torch.log_softmax(torch.cat([top, lse_others], -1), -1)
    missing = (1 - given.exp().sum(-1, keepdim=True)).clamp_min(0)
    columns = scaled.shape[1] if shard is None else shard.vocab
    missing = torch.where(
        columns_of_k.used.sum(-1, keepdim=True) < columns, missing, 0.0
    )  # else no token is left for it
    return log_s, torch.cat([given, missing.log()], -1), rest


def _over_outcomes(
    scaled: torch.Tensor, columns_of_k: TopKColumns, given: torch.Tensor, o: Objective, tail: str, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return divergences over the outcomes, [n], and their gradient for the scaled logits, [n, V]."""
    log_s, log_t, rest = outcome_log_probs(scaled, columns_of_k, given, tail)
    p_s, p_t = log_s.exp(), log_t.exp()
    loss, slope = scaled.new_zeros(scaled.shape[0]), torch.zeros_like(log_s)
    for kind, weight, parameter in zip(o.kinds, o.weights, o.parameters, strict=True):
        f, g = reference_terms(kind, parameter, log_s, log_t, p_s, p_t)
        loss += weight * f.sum(-1).clamp_min(0)
        slope += weight * (g - p_s * g.sum(-1, keepdim=True))
    if terms.REVERSE_KL in o.kinds:
        loss = torch.where((given == IMPOSSIBLE).any(-1), torch.inf, loss)
    if not with_gradient:
        return loss, None
    k = given.shape[1]
    gradient = torch.zeros_like(scaled) if rest is None else rest.mul_(slope[:, k:])  # 0 at the K
    return loss, columns_of_k.add_(gradient, slope[:, :k])


def _over_samples(
    scaled: torch.Tensor, columns_of_k: TopKColumns, given: torch.Tensor, o: Objective, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the forward KL from sampled weights, [n], and its gradient for the scaled logits, [n, V]."""
    (weight,) = o.weights
    log_p, w = log_softmax(scaled, columns_of_k.shard), given.exp()
    total = w.sum(-1, keepdim=True)
    f = torch.where(w > 0, w * (given - columns_of_k.gather(log_p)), 0.0)
    loss = weight * (f.sum(-1) + (1 - total.squeeze(-1))).clamp_min(0)
    if not with_gradient:
        return loss, None
    return loss, columns_of_k.add_(log_p.exp().mul_(total), -w).mul_(weight)


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
    """Return loss, gradient and statistics of rows whose teacher is K tokens each; `teacher_raw` is None.

    With `shard`, ids are those of the whole vocabulary.

    Statistics: `divergence` is that of the loss (without the factor T^2), at the loss's temperature; `agreement` is 1
    where the most probable of the K tokens is the student's most probable and neither shares its place with another
    token; what K tokens cannot tell (teacher_entropy, teacher_label_logprob) is 0.
    """
    assert teacher_raw is None
    o, counted_rows = objective, row_scale != 0
    hard = o._replace(kinds=(), weights=(), parameters=(), divergence_weights=())
    result = reference_rows(
        student_raw,
        None,
        hard,
        labels=labels,
        row_scale=row_scale,
        with_gradient=with_gradient,
        with_stats=with_stats,
        shard=shard,
    )
    if not o.kinds:
        return result
    given = top.logprobs.to(student_raw.dtype)
    columns_of_k = top_k_columns(top.ids, given, student_raw.shape[1], shard)
    z = transform_logits(student_raw, o.student_scale, o.student_softcap)
    scaled = z / o.temperature
    if top.tail == "sampled":
        soft, gradient = _over_samples(scaled, columns_of_k, given, o, with_gradient)
    else:
        soft, gradient = _over_outcomes(scaled, columns_of_k, given, o, top.tail, with_gradient)
    loss = result.loss + torch.where(counted_rows, soft * row_scale, 0.0)
    if gradient is not None:
        gradient.mul_((row_scale * (o.student_scale / o.temperature))[:, None])
        if o.student_softcap:
            gradient.mul_((z / o.student_softcap).square_().neg_().add_(1.0))
        gradient.masked_fill_(~counted_rows[:, None], 0.0)
        if result.gradient is not None:
            gradient.add_(result.gradient)
    stats = result.stats
    if stats is not None:
        divergence = torch.where(counted_rows, soft * (o.divergence_weights[0] / o.weights[0]), 0.0)
        highest, likeliest = _row_maximum(z, shard), given == given.amax(-1, keepdim=True)
        both = (columns_of_k.gather(z) == highest) & likeliest
        alone = (_sum_over_ranks((z == highest).sum(-1).to(z.dtype), shard) == 1) & (likeliest.sum(-1) == 1)
        agreement = (both.any(-1) & alone & counted_rows).float()
        stats = stats._replace(divergence=divergence.float(), agreement=agreement)
    return RowResult(loss, gradient, stats)


def reference_student_top_k_rows(
    student_raw: torch.Tensor,
    teacher_raw: torch.Tensor,
    objective: Objective,
    *,
    student_top: StudentTopK,
    **arguments: object,
) -> RowResult:
    """Return loss, gradient and statistics of rows, over the student's K most probable tokens.

    Arguments as of `divergence.reference_rows`; statistics as of `reference_top_k_rows`. The teacher's probability
    outside of the K counts as at least `LEAST_TAIL` epsilons. A teacher's probability of 0 makes the reverse KL inf.
    """
    o = objective
    ids = transform_logits(student_raw, o.student_scale, o.student_softcap).topk(student_top.k, sorted=False).indices
    log_t = log_softmax(transform_logits(teacher_raw, o.teacher_scale, o.teacher_softcap) / o.temperature)
    log_t = log_t.gather(-1, ids)
    most = math.log1p(-LEAST_TAIL * torch.finfo(log_t.dtype).eps)
    log_t = (log_t - (log_t.logsumexp(-1, keepdim=True) - most).clamp_min(0)).clamp_min(IMPOSSIBLE)
    return reference_top_k_rows(student_raw, None, o, top=TopK(ids, log_t, student_top.tail), **arguments)  # type: ignore[arg-type]
