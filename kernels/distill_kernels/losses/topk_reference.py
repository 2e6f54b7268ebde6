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


Source of the sampled interpretation: Anshumann et al. 2025 (Sparse Logit Sampling, arXiv 2503.16870).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from distill_kernels.losses.divergence import (
    ClippedValue,
    RowRequest,
    RowResult,
    cap_entries,
    log_softmax,
    reference_rows,
    reference_terms,
    transform_logits,
)
from distill_kernels.losses.terms import Objective, TokenStats

TAILS = ("bucket", "renormalize", "sampled")
IMPOSSIBLE = -1e30  # stands for log 0 of a token that is one of the K: its products are no NaN


class TopK(NamedTuple):
    """Teacher log-probabilities of K tokens at each position.

    Attributes:
        ids: integers [N, K], distinct within a row, below the number of columns that count.
        logprobs: floating [N, K], natural logarithms, at the teacher's temperature of the loss.
        tail: treatment of all other tokens, one of `TAILS`.
        rest: floating [N], log-probability of all other tokens together; None: what the K lack of 1.
    """

    ids: torch.Tensor
    logprobs: torch.Tensor
    tail: str
    rest: torch.Tensor | None = None

    def rows(self, which: slice | torch.Tensor) -> TopK:
        """Return the rows `which`."""
        rest = None if self.rest is None else self.rest[which]
        return TopK(self.ids[which], self.logprobs[which], self.tail, rest)


class StudentTopK(NamedTuple):
    """The student's K most probable tokens as the outcomes of a divergence.

    Attributes:
        k: number of tokens, at most the columns that count.
        tail: "bucket" or "renormalize", see `TAILS`.
    """

    k: int
    tail: str

    def allocate(self, n: int, device: torch.device, *, with_rest: bool = False) -> TopK:
        """Return uninitialised tokens and log-probabilities of `n` rows, `with_rest` also of the other tokens."""
        ids = torch.empty(n, self.k, dtype=torch.int32, device=device)
        logprobs = torch.empty(n, self.k, dtype=torch.float32, device=device)
        return TopK(ids, logprobs, self.tail, logprobs.new_empty(n) if with_rest else None)


class TopKColumns(NamedTuple):
    """Columns of the K tokens of each row.

    Attributes:
        columns: int64 [n, K]; 0 where the entry is not used, or its id is no token.
        here: bool [n, K], whether the entry is used and its id is a token.
        used: bool [n, K]: log-probabilities of -inf mark entries without a token.
    """

    columns: torch.Tensor
    here: torch.Tensor
    used: torch.Tensor

    def gather(self, z: torch.Tensor) -> torch.Tensor:
        """Return `z` [n, V] at each row's K columns, [n, K]; -inf at unused entries."""
        # An id that is no token reads column 0, a valid place, and counts as a logit of 0.
        values = z.gather(-1, self.columns).masked_fill(~self.here, 0.0)
        return values.masked_fill(~self.used, -torch.inf)

    def add_(self, z: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Add `values` [n, K], or one number, to `z` [n, V] at the K columns, in place."""
        # Unused entries point to column 0 as well: they add 0 there, and do not overwrite.
        values = torch.where(self.here, values, z.new_zeros(()))
        return z.scatter_add_(-1, self.columns, values)


def top_k_columns(ids: torch.Tensor, given: torch.Tensor, vocab: int) -> TopKColumns:
    """Return the columns of `ids` [n, K]; used ids of rows that count are below `vocab`.

    Args:
        ids: integers [n, K].
        given: the teacher's log-probabilities, [n, K]; -inf marks unused entries.
        vocab: columns.
    """
    used = given != -torch.inf
    columns = ids.long()
    here = used & (columns >= 0) & (columns < vocab)
    return TopKColumns(torch.where(here, columns, 0), here, used)


def outcome_log_probs(
    scaled: torch.Tensor, columns_of_k: TopKColumns, given: torch.Tensor, top: TopK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return both models' log-probabilities of the outcomes of tail "bucket" or "renormalize".

    Args:
        scaled: student logits over T, [n, V].
        columns_of_k: columns of the K tokens, int64 [n, K].
        given: the teacher's log-probabilities, [n, K], at its temperature.
        top: whose they are: the tail, and the other tokens' log-probability if known.

    Returns:
        The student's and the teacher's, [n, K + 1] (the tail last) or [n, K]; and the student's distribution over the
        other tokens, [n, V], 0 at the K, or None without a tail.
    """
    z_top = columns_of_k.gather(scaled)
    if top.tail == "renormalize":
        return torch.log_softmax(z_top, -1), torch.log_softmax(given, -1), None
    # Adding -inf takes the K out of the sum. Subtracting their sum from 1 instead would lose a small tail's digits.
    others = columns_of_k.add_(scaled.clone(), scaled.new_full((), -torch.inf))
    lse_others = torch.logsumexp(others, -1, keepdim=True)
    # With no other token -inf less -inf would be NaN; each gets a share of 0.
    rest = torch.where(lse_others > -torch.inf, (others - lse_others).exp(), 0.0)
    log_s = torch.log_softmax(torch.cat([z_top, lse_others], -1), -1)
    if top.rest is None:
        # Rounding may put the sum of the K just above 1: then the teacher leaves nothing, log 0.
        log_rest = (1 - given.exp().sum(-1, keepdim=True)).clamp_min(0).log()
    else:
        log_rest = top.rest[:, None].to(given.dtype)
    some_left = columns_of_k.used.sum(-1, keepdim=True) < scaled.shape[1]
    return log_s, torch.cat([given, torch.where(some_left, log_rest, -torch.inf)], -1), rest


def _over_outcomes(
    scaled: torch.Tensor,
    columns_of_k: TopKColumns,
    given: torch.Tensor,
    objective: Objective,
    top: TopK,
    with_gradient: bool,
    clipped: ClippedValue,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return divergences over the outcomes, [n], and their gradient for the scaled logits, [n, V].

    `clipped` gets the divergences with and without caps. An outcome, the bucket's too, is one entry.
    """
    log_s, log_t, rest = outcome_log_probs(scaled, columns_of_k, given, top)
    p_s = log_s.exp()
    p_t = log_t.exp()
    loss = scaled.new_zeros(scaled.shape[0])
    slope = torch.zeros_like(log_s)
    impossible = (torch.cat([given, log_t[:, given.shape[1] :]], -1) == IMPOSSIBLE).any(-1)
    for kind, weight, parameter, token_cap, entry_cap in objective.divergences:
        f, g = reference_terms(kind, parameter, log_s, log_t, p_s, p_t)
        whole = f.sum(-1).clamp_min(0)
        if kind == "reverse_kl":
            whole = torch.where(impossible, torch.inf, whole)
        value = whole
        if entry_cap < math.inf:
            f, g = cap_entries(f, g, entry_cap)
            value = f.sum(-1).clamp_min(0)
        if token_cap < math.inf:
            capped = value > token_cap
            value = torch.where(capped, token_cap, value)
            g = torch.where(capped[:, None], 0.0, g)
            clipped.add(weight, whole, value, capped)
        elif objective.clips:
            clipped.add(weight, whole, value, torch.zeros_like(clipped.capped))
        loss += weight * value
        # The softmax over the outcomes, differentiated: as for a whole row, with K + 1 columns.
        slope += weight * (g - p_s * g.sum(-1, keepdim=True))
    if not with_gradient:
        return loss, None
    k = given.shape[1]
    # The bucket's slope is handed to its tokens by their shares of it, the derivative of its log sum of exponentials.
    gradient = torch.zeros_like(scaled) if rest is None else rest.mul_(slope[:, k:])  # 0 at the K
    return loss, columns_of_k.add_(gradient, slope[:, :k])


def _over_samples(
    scaled: torch.Tensor,
    columns_of_k: TopKColumns,
    given: torch.Tensor,
    objective: Objective,
    with_gradient: bool,
    clipped: ClippedValue,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the forward KL from sampled weights, [n], and its gradient for the scaled logits, [n, V].

    `clipped` gets the divergence with and without the cap of tokens; there is none of entries.
    """
    (weight,) = objective.weights
    log_p = log_softmax(scaled)
    w = given.exp()
    total = w.sum(-1, keepdim=True)
    # Unused entries have weight 0 and a logarithm of -inf, whose product would be NaN.
    f = torch.where(w > 0, w * (given - columns_of_k.gather(log_p)), 0.0)
    value = (f.sum(-1) + (1 - total.squeeze(-1))).clamp_min(0)
    capped = torch.zeros_like(clipped.capped)
    if objective.token_caps:
        (cap,) = objective.token_caps
        capped = value > cap
        clipped.add(weight, value, torch.where(capped, cap, value), capped)
        value = torch.where(capped, cap, value)
    loss = weight * value
    if not with_gradient:
        return loss, None
    gradient = columns_of_k.add_(log_p.exp().mul_(total), -w).mul_(weight)
    return loss, gradient.masked_fill_(capped[:, None], 0.0) if objective.token_caps else gradient


def reference_top_k_rows(
    student_raw: torch.Tensor,
    teacher_raw: torch.Tensor | None,
    objective: Objective,
    request: RowRequest,
    *,
    top: TopK,
) -> RowResult:
    """Return loss, gradient and statistics of rows whose teacher is K tokens each; `teacher_raw` is None.

    Statistics: `divergence` is that of the loss (without the factor T^2 and caps), at its temperature; `agreement` is 1
    where the most probable of the K tokens is the student's most probable and neither shares its place with another
    token; what K tokens cannot tell (teacher_entropy, teacher_label_logprob) is 0.
    """
    assert teacher_raw is None
    counted_rows = request.counted
    hard = objective.unclipped._replace(kinds=(), weights=(), parameters=(), divergence_weights=())
    # Hard labels alone, over all tokens; the soft part is added to their loss, gradient and statistics below.
    result = reference_rows(student_raw, None, hard, request)
    if not objective.kinds:
        return result
    given = top.logprobs.to(student_raw.dtype)
    columns_of_k = top_k_columns(top.ids, given, student_raw.shape[1])
    z = transform_logits(student_raw, objective.student_scale, objective.student_softcap)
    scaled = z / objective.temperature
    clipped = ClippedValue(scaled.new_zeros(len(scaled)))
    if top.tail == "sampled":
        soft, gradient = _over_samples(scaled, columns_of_k, given, objective, request.with_gradient, clipped)
    else:
        soft, gradient = _over_outcomes(scaled, columns_of_k, given, objective, top, request.with_gradient, clipped)
    loss = result.loss + torch.where(counted_rows, soft * request.row_scale, 0.0)
    if gradient is not None:
        request.finish_gradient_(gradient, z, objective, objective.temperature)
        if result.gradient is not None:
            gradient.add_(result.gradient)
    stats = result.stats
    if stats is not None:
        whole = clipped.whole if objective.clips else soft
        divergence = torch.where(counted_rows, whole * (objective.divergence_weights[0] / objective.weights[0]), 0.0)
        highest = z.amax(-1, keepdim=True)
        likeliest = given == given.amax(-1, keepdim=True)
        both = (columns_of_k.gather(z) == highest) & likeliest
        alone = ((z == highest).sum(-1) == 1) & (likeliest.sum(-1) == 1)
        agreement = (both.any(-1) & alone & counted_rows).float()
        stats = stats._replace(divergence=divergence.float(), agreement=agreement)
        if objective.clips:
            of_caps = (torch.where(counted_rows, each, 0.0).float() for each in clipped.statistics())
            stats = TokenStats(*stats[:-2], *of_caps)
    return RowResult(loss, gradient, stats)


def reference_student_top_k_rows(
    student_raw: torch.Tensor,
    teacher_raw: torch.Tensor,
    objective: Objective,
    request: RowRequest,
    *,
    student_top: StudentTopK,
) -> RowResult:
    """Return loss, gradient and statistics of rows, over the student's K most probable tokens.

    Arguments as of `divergence.reference_rows`; statistics as of `reference_top_k_rows`. A teacher's probability of 0
    makes the reverse KL inf.
    """
    z = transform_logits(student_raw, objective.student_scale, objective.student_softcap)
    z_teacher = transform_logits(teacher_raw, objective.teacher_scale, objective.teacher_softcap)
    # No gradient flows through the choice. At ties it may differ from the kernel's, which goes by position.
    ids = z.topk(student_top.k, sorted=False).indices
    log_t = log_softmax(z_teacher / objective.teacher_temperature)
    # The clamp keeps an excluded token a token: -inf would mean an unused entry.
    rest = log_t.scatter(-1, ids, -torch.inf).logsumexp(-1).clamp_min(IMPOSSIBLE)
    top = TopK(ids, log_t.gather(-1, ids).clamp_min(IMPOSSIBLE), student_top.tail, rest)
    return reference_top_k_rows(student_raw, None, objective, request, top=top)
