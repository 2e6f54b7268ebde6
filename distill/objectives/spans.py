"""The divergence between two models whose tokens differ, at the places where both have read the same bytes.

Spans (rows/retokenised/alignment.py) begin where a token of each model ends. There both models have read the same
bytes, and their next-token distributions at temperature T, `p_s` over the student's vocabulary and `p_t` over the
teacher's, are compared as distributions over three kinds of outcomes:

    shared   a token of the same bytes in both vocabularies: p_s(v) against p_t(v);
    span     the text that follows up to the next common boundary, where the models cut it differently (else it is one
             shared token): S = prod p_s(token | before) against P = prod p_t(token | before), by the chain rule;
    rest     everything else, by size: the k-th most probable of the student's against the k-th of the teacher's
             (ULD, universal logit distillation: Boizard et al., 2024, arXiv 2402.12030).

Where the span is an outcome of its own, the tokens it begins with, u of the student and w of the teacher, are no shared
outcomes at this place: S and P are taken out of them, and `p_s(u) - S`, `p_t(w) - P` and what would have been their
partners belong to the rest. So no student is trained to begin "hello" by the "hel" that only the teacher's reading has.
Each model's probabilities of all outcomes still add up to 1. With `f` of the table in
`distill_kernels.losses.divergence`, whose terms are zero where equal and never negative, also for parts of
distributions, the loss of a span is

    sum over terms of weight * T^2 * (sum over shared v of f(p_s(v), p_t(v)) + f(S, P) + sum_k |rest_s[k] - rest_t[k]|)
    + cross_entropy weight * (-log S at T = 1)

It is exactly the terms' divergence where all tokens are shared, and zero where tokenizers and models are equal. Shared
tokens compared directly beside sorted ones are also what GOLD (Patino et al., 2025, in TRL) does; GOLD multiplies a
whole distribution by the probability of the tokens that follow, here only the outcome that continues with them.

The gradient, by `A = dL/dlog p` for each row of the student's: `g` of the table at shared tokens; `g(S, P)` at every
token of the span; `sign p_s` at the rest; then `dL/dz = (A - p_s sum(A)) / T` (span_loss.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from distill_kernels import TokenStats
from distill_kernels.losses.divergence import ClippedValue, cap_entries, reference_terms, unique_argmax
from distill_kernels.losses.terms import Objective
from torch import nn


class Side(NamedTuple):
    """One model's part of a chunk.

    Attributes:
        log_p: [n, V], log-probabilities of the rows that predict the chunk's tokens, spans one after the other.
        tokens: int64 [n], what each row predicts.
        first: int64 [m], each span's first row.
        span: int64 [n], which span a row belongs to.
    """

    log_p: torch.Tensor
    tokens: torch.Tensor
    first: torch.Tensor
    span: torch.Tensor

    def whole(self) -> torch.Tensor:
        """Log-probability of each span's tokens, [m]."""
        own = self.log_p.gather(-1, self.tokens[:, None])[:, 0]
        return own.new_zeros(len(self.first)).index_add_(0, self.span, own)


class SpanTokens(NamedTuple):
    """Constants of one vocabulary, on the device.

    Attributes:
        shared: int64 [C], ids of the shared tokens, in the order of both vocabularies' outcomes.
        rest: int64 [U], ids of the others.
        place: int64 [V], which shared outcome a token is, C where none.
    """

    shared: torch.Tensor
    rest: torch.Tensor
    place: torch.Tensor

    @staticmethod
    def of(shared: torch.Tensor, rows: int) -> SpanTokens:
        place = torch.full((rows,), len(shared), dtype=torch.int64, device=shared.device)
        place[shared] = torch.arange(len(shared), device=shared.device)
        return SpanTokens(shared, (place == len(shared)).nonzero()[:, 0], place)


class Outcomes(NamedTuple):
    """Constants of the two vocabularies, on the device.

    Attributes:
        partner: int64 [V_s], the teacher's id of each of the student's tokens, -1 where it has none.
    """

    student: SpanTokens
    teacher: SpanTokens
    partner: torch.Tensor

    @staticmethod
    def of(student: torch.Tensor, teacher: torch.Tensor, student_rows: int, teacher_rows: int) -> Outcomes:
        """Return the constants for the shared ids, [C] each, and both heads' rows; ids without a row are dropped."""
        known = (student < student_rows) & (teacher < teacher_rows)
        student = student[known]
        teacher = teacher[known]
        partner = torch.full((student_rows,), -1, dtype=torch.int64, device=student.device)
        partner[student] = teacher
        return Outcomes(SpanTokens.of(student, student_rows), SpanTokens.of(teacher, teacher_rows), partner)


class Beginning(NamedTuple):
    """First tokens of one side's spans.

    Attributes:
        log_p: [m, V], of the rows that predict the spans' first tokens.
        first: int64 [m], these tokens.
        place: int64 [m], which shared outcome each is.
        whole: [m], log-probability of the spans' texts.
    """

    log_p: torch.Tensor
    first: torch.Tensor
    place: torch.Tensor
    whole: torch.Tensor
    tokens: SpanTokens

    @staticmethod
    def of(side: Side, tokens: SpanTokens) -> Beginning:
        first = side.tokens[side.first]
        return Beginning(side.log_p[side.first], first, tokens.place[first], side.whole(), tokens)


class Rest(NamedTuple):
    """Outcomes of a side that are compared by size: its unshared tokens and, last, up to two shared ones set apart.

    Attributes:
        ids: int64 [m, U + 2].
        p: probabilities of the outcomes, 0 where one of the last two does not count.
        values: the same less what the span takes out of its first token.
        holds_span: bool, where it does.
    """

    ids: torch.Tensor
    p: torch.Tensor
    values: torch.Tensor
    holds_span: torch.Tensor

    @staticmethod
    def of(own: Beginning, other: Beginning, apart: torch.Tensor) -> Rest:
        """Return one side's rest; the shared tokens set apart are its first ones, and partners of the other side's."""
        tokens = own.tokens
        first = own.first
        count = len(own.tokens.shared)
        partner = tokens.shared[other.place.clamp_max(count - 1)] if count else torch.zeros_like(first)
        ids = torch.cat([tokens.rest.expand(len(first), -1), first[:, None], partner[:, None]], 1)
        # The unshared tokens always count. The last two columns hold the span's own first token and the one that is the
        # partner of the other side's first token: they count only where they were taken out of the shared outcomes, and
        # the partner not twice where both are one token.
        counts = torch.ones_like(ids, dtype=torch.bool)
        counts[:, -2] = apart & (own.place < count)
        counts[:, -1] = apart & (own.place != other.place) & (other.place < count)
        p = own.log_p.gather(1, ids).exp_() * counts
        holds_span = counts & apart[:, None] & (ids == first[:, None])
        # p(first token) contains the span's own continuation P; what remains of it is every other continuation of that
        # token. Rounding may bring the difference just below 0.
        values = torch.where(holds_span, p - own.whole.exp()[:, None], p).clamp_min_(0.0)
        return Rest(ids, p, values, holds_span)


def compare_spans(
    student: Side,
    teacher: Side,
    outcomes: Outcomes,
    objective: Objective,
    weights: Sequence[float],
    *,
    slope: bool,
    clipped: ClippedValue | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weighted divergences of a chunk's spans, by the formula above.

    Args:
        student, teacher: both models' rows, each at its temperature.
        objective: kinds, parameters and caps of the divergences. Each outcome is an entry, and each pair of the rest.
        weights: Weights of the divergences, T^2 included.
        clipped: Gets the divergences with and without caps, where there are caps.

    Returns:
        The losses of the spans, [m], and the gradient `A` of their sum for the student's log-probabilities, [n, V].
    """
    m = len(student.first)
    shared = len(outcomes.student.shared)
    s = Beginning.of(student, outcomes.student)
    t = Beginning.of(teacher, outcomes.teacher)
    # A span is one shared outcome only where each side reads it as a single token and the two tokens are partners.
    several = (torch.bincount(side.span, minlength=m) > 1 for side in (student, teacher))
    apart = next(several) | next(several) | (outcomes.partner[s.first] != t.first)  # the span is an outcome of its own
    # Shared outcomes that are taken out at each span: a scatter with the dump column `shared` for spans that take out
    # none avoids a selection whose size would be read by the host.
    hidden = torch.zeros(m, shared + 1, dtype=torch.bool, device=s.log_p.device)  # the last column is dropped below
    for place in (s.place, t.place):
        hidden.scatter_(1, torch.where(apart, place, shared)[:, None], True)
    hidden = hidden[:, :shared]
    rest_s = Rest.of(s, t, apart)
    rest_t = Rest.of(t, s, apart)
    width = max(rest_s.values.shape[1], rest_t.values.shape[1])
    own = rest_s.values.shape[1]
    # The k-th largest against the k-th largest, the shorter side padded by outcomes of probability 0. `order` brings
    # the signs back to the outcomes that they belong to.
    sorted_s, order = nn.functional.pad(rest_s.values, (0, width - own)).sort(-1, descending=True)
    sorted_t = nn.functional.pad(rest_t.values, (0, width - rest_t.values.shape[1])).sort(-1, descending=True).values
    difference = sorted_s - sorted_t
    rest = difference.abs()
    total = sum(weights)
    loss = total * rest.sum(-1)
    rest_weights: float | torch.Tensor = total  # of each pair in the gradient
    if objective.clips:  # each term caps the rest, too
        loss = torch.zeros_like(loss)
        rest_weights = torch.zeros_like(rest)

    a = s.log_p[:, s.tokens.shared]
    b = t.log_p[:, t.tokens.shared]
    p_a = a.exp()
    p_b = b.exp()
    # From here on A = dL / dlog p in three parts: at shared tokens, at the span's text, at the rest.
    at_shared = torch.zeros_like(a) if slope else None
    at_span = torch.zeros_like(s.whole)
    for weight, (kind, _, parameter, token_cap, entry_cap) in zip(weights, objective.divergences, strict=True):
        f, g = reference_terms(kind, parameter, a, b, p_a, p_b)
        f.masked_fill_(hidden, 0.0)
        g.masked_fill_(hidden, 0.0)
        f_span, g_span = reference_terms(kind, parameter, s.whole, t.whole, s.whole.exp(), t.whole.exp())
        if objective.clips:
            whole = f.sum(-1) + torch.where(apart, f_span, 0.0) + rest.sum(-1)
            f, g = cap_entries(f, g, entry_cap)
            f_span, g_span = cap_entries(f_span, g_span, entry_cap)
            of_rest, kept = cap_entries(rest, torch.ones_like(rest), entry_cap)
            value = f.sum(-1) + torch.where(apart, f_span, 0.0) + of_rest.sum(-1)
            capped = value > token_cap
            value = torch.where(capped, token_cap, value)
            g = torch.where(capped[:, None], 0.0, g)
            g_span = torch.where(capped, 0.0, g_span)
            rest_weights = rest_weights + weight * torch.where(capped[:, None], 0.0, kept)
            loss += weight * value
            if clipped is not None:
                clipped.add(weight, whole, value, capped)
        else:
            loss += weight * f.sum(-1)
            loss += torch.where(apart, weight * f_span, 0.0)
        if at_shared is not None:
            at_shared.add_(g, alpha=weight)
        at_span += torch.where(apart, weight * g_span, 0.0)
    if at_shared is None:
        return loss, None
    # d|s - t| / ds = sign, undone from sorted order; padded places are dropped
    signs = torch.empty_like(difference).scatter_(-1, order, difference.sign().mul_(rest_weights))[:, :own]
    rows = torch.zeros_like(s.log_p)
    rows[:, s.tokens.shared] = at_shared
    rows.scatter_add_(1, rest_s.ids, signs * rest_s.p)
    # The first token's value was p - S: its S part is paid back at all tokens of the span, by the chain rule.
    at_span -= (signs * rest_s.holds_span).sum(-1) * s.whole.exp()
    gradient = torch.zeros_like(student.log_p)
    # A span's first row has all three parts; its later rows only the chain rule's, at the token that they predict.
    gradient[student.first] = rows
    return loss, gradient.scatter_add_(1, student.tokens[:, None], at_span[student.span][:, None])


def span_figures(
    student: Side,
    teacher: Side,
    outcomes: Outcomes,
    objective: Objective,
    label_logprobs: tuple[torch.Tensor, ...],
    clipped: ClippedValue,
) -> TokenStats:
    """Return `TokenStats` of a chunk's spans, [m] each, at temperature 1: labels are the spans' texts.

    `clipped` holds the divergences with and without caps, at the loss's temperatures.
    """
    weights = objective.divergence_weights
    divergence, _ = compare_spans(student, teacher, outcomes, objective.unclipped, weights, slope=False)
    log_s = student.log_p[student.first]
    log_t = teacher.log_p[teacher.first]
    entropies = [-torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0).sum(-1) for log_p in (log_s, log_t)]
    own = unique_argmax(log_s)
    others = unique_argmax(log_t)
    agreement = (own >= 0) & (others >= 0) & (outcomes.partner[own] == others)
    own, others = label_logprobs
    capped, share = clipped.statistics()
    return TokenStats(
        divergence, -own, entropies[0], entropies[1], agreement.to(own.dtype), own, others, capped, share * divergence
    )
