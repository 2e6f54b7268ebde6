"""The divergence between two models whose tokens differ, at the places where both have read the same bytes.

Spans (alignment.py) begin where a token of each model ends. There both models have read the same bytes, and their
next-token distributions at temperature T, `p_s` over the student's vocabulary and `p_t` over the teacher's, are
compared as distributions over three kinds of outcomes:

    shared   a token of the same bytes in both vocabularies: p_s(v) against p_t(v);
    span     the text that follows up to the next common boundary, where the models cut it differently (else it is one
             shared token): S = prod p_s(token | before) against P = prod p_t(token | before), by the chain rule;
    rest     everything else, by size: the k-th likeliest of the student's against the k-th likeliest of the teacher's
             (ULD, universal logit distillation: Boizard et al., 2024, arXiv 2402.12030).

Where the span is an outcome of its own, the tokens it begins with, u of the student and w of the teacher, are no shared
outcomes at this place: S and P are taken out of them, and `p_s(u) - S`, `p_t(w) - P` and what would have been their
partners belong to the rest. A student is not told to begin "hello" by the "hel" that only the teacher's reading has.
Each model's probabilities of all outcomes still add up to 1. With `f` of the table in
`distill_kernels.losses.divergence`, whose terms are zero where equal and never negative, also for parts of
distributions, the loss of a span is

    sum over terms of weight * T^2 * (sum over shared v of f(p_s(v), p_t(v)) + f(S, P) + sum_k |rest_s[k] - rest_t[k]|)
    + cross_entropy weight * (-log S at T = 1)

It is exactly the terms' divergence where all tokens are shared, and zero where tokenizers and models are equal. Shared
tokens compared directly beside sorted ones are also what GOLD (Patino et al., 2025, in TRL) does; GOLD multiplies a
whole distribution by the probability of the tokens that follow, here only the outcome that continues with them.

The gradient, by `A = dL/dlog p` for each row of the student's: `g` of the table at shared tokens; `g(S, P)` at every
token of the span; `sign p_s` at the rest; then `dL/dz = (A - p_s sum(A)) / T` (cross_loss.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from distill_kernels import TokenStats
from distill_kernels.losses.divergence import reference_terms
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


class Outcomes(NamedTuple):
    """What is fixed of the two vocabularies, on the device.

    Attributes:
        student, teacher: int64 [C], ids of the shared tokens.
        student_rest, teacher_rest: int64 [U], ids of the others.
        partner: int64 [V_s], the teacher's id of each of the student's tokens, -1 where it has none.
        student_place: int64 [V_s], which shared outcome a token is, C where none; likewise `teacher_place`.
    """

    student: torch.Tensor
    teacher: torch.Tensor
    student_rest: torch.Tensor
    teacher_rest: torch.Tensor
    partner: torch.Tensor
    student_place: torch.Tensor
    teacher_place: torch.Tensor

    @staticmethod
    def of(student: torch.Tensor, teacher: torch.Tensor, student_rows: int, teacher_rows: int) -> Outcomes:
        """From the shared ids, [C] each, and the rows of both heads; ids without a row are left out."""
        kept = (student < student_rows) & (teacher < teacher_rows)
        student, teacher = student[kept], teacher[kept]

        def places(ids: torch.Tensor, rows: int) -> torch.Tensor:
            place = torch.full((rows,), len(ids), dtype=torch.int64, device=ids.device)
            place[ids] = torch.arange(len(ids), device=ids.device)
            return place

        student_place, teacher_place = places(student, student_rows), places(teacher, teacher_rows)
        partner = torch.full((student_rows,), -1, dtype=torch.int64, device=student.device)
        partner[student] = teacher
        rest_s, rest_t = ((place == len(student)).nonzero()[:, 0] for place in (student_place, teacher_place))
        return Outcomes(student, teacher, rest_s, rest_t, partner, student_place, teacher_place)


class Rest(NamedTuple):
    """Outcomes of a side that are compared by size: its unshared tokens and, last, up to two shared ones set apart.

    Attributes:
        ids: int64 [m, U + 2].
        p: their probabilities, 0 where one of the last two does not count.
        values: the same less what the span takes out of its first token.
        holds_span: bool, where it does.
    """

    ids: torch.Tensor
    p: torch.Tensor
    values: torch.Tensor
    holds_span: torch.Tensor


def _rest(
    log_p: torch.Tensor, unshared: torch.Tensor, first: torch.Tensor, also: torch.Tensor, apart: torch.Tensor,
    first_is_shared: torch.Tensor, also_counts: torch.Tensor, whole: torch.Tensor,
) -> Rest:  # fmt: skip
    """The rest of rows [m, V]; `first` is each span's first token, `also` the partner of the other side's, [m]."""
    ids = torch.cat([unshared.expand(len(first), -1), first[:, None], also[:, None]], 1)
    counts = torch.ones_like(ids, dtype=torch.bool)
    counts[:, -2] = apart & first_is_shared
    counts[:, -1] = also_counts
    p = log_p.gather(1, ids).exp_() * counts
    holds_span = counts & apart[:, None] & (ids == first[:, None])
    values = torch.where(holds_span, p - whole.exp()[:, None], p).clamp_min_(0.0)
    return Rest(ids, p, values, holds_span)


def compare_spans(
    student: Side, teacher: Side, outcomes: Outcomes, objective: Objective, weights: Sequence[float], *, slope: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weighted divergences of a chunk's spans, by the formula above.

    Args:
        student, teacher: both models' rows, at one temperature.
        outcomes: the vocabularies.
        objective: kinds and parameters of the divergences.
        weights: of the divergences, T^2 included.
        slope: also make the gradient.

    Returns:
        The losses of the spans, [m], and the gradient `A` of their sum for the student's log-probabilities, [n, V].
    """
    m, shared = len(student.first), len(outcomes.student)
    log_s, log_t = student.log_p[student.first], teacher.log_p[teacher.first]
    u, w = student.tokens[student.first], teacher.tokens[teacher.first]
    at_u, at_w = outcomes.student_place[u], outcomes.teacher_place[w]
    several = (torch.bincount(side.span, minlength=m) > 1 for side in (student, teacher))
    apart = next(several) | next(several) | (outcomes.partner[u] != w)  # the span is an outcome of its own
    whole_s, whole_t = student.whole(), teacher.whole()
    hidden = torch.zeros(m, shared + 1, dtype=torch.bool, device=log_s.device)  # the last column is for nothing
    for place in (at_u, at_w):
        hidden.scatter_(1, torch.where(apart, place, shared)[:, None], True)
    hidden = hidden[:, :shared]

    def partner(ids: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return ids[place.clamp_max(max(shared - 1, 0))] if shared else torch.zeros_like(place)

    both = at_u != at_w
    rest_s = _rest(
        log_s, outcomes.student_rest, u, partner(outcomes.student, at_w), apart, at_u < shared,
        apart & both & (at_w < shared), whole_s,
    )  # fmt: skip
    rest_t = _rest(
        log_t, outcomes.teacher_rest, w, partner(outcomes.teacher, at_u), apart, at_w < shared,
        apart & both & (at_u < shared), whole_t,
    )  # fmt: skip
    width, own = max(rest_s.values.shape[1], rest_t.values.shape[1]), rest_s.values.shape[1]
    sorted_s, order = nn.functional.pad(rest_s.values, (0, width - own)).sort(-1, descending=True)
    sorted_t = nn.functional.pad(rest_t.values, (0, width - rest_t.values.shape[1])).sort(-1, descending=True).values
    difference = sorted_s - sorted_t
    total = sum(weights)
    loss = total * difference.abs().sum(-1)

    a, b = log_s[:, outcomes.student], log_t[:, outcomes.teacher]
    p_a, p_b = a.exp(), b.exp()
    at_shared, at_span = (torch.zeros_like(a) if slope else None), torch.zeros_like(whole_s)
    for kind, weight, parameter in zip(objective.kinds, weights, objective.parameters, strict=True):
        f, g = reference_terms(kind, parameter, a, b, p_a, p_b)
        loss += weight * f.masked_fill_(hidden, 0.0).sum(-1)
        if at_shared is not None:
            at_shared.add_(g.masked_fill_(hidden, 0.0), alpha=weight)
        f, g = reference_terms(kind, parameter, whole_s, whole_t, whole_s.exp(), whole_t.exp())
        loss += torch.where(apart, weight * f, 0.0)
        at_span += torch.where(apart, weight * g, 0.0)
    if at_shared is None:
        return loss, None
    signs = torch.empty_like(difference).scatter_(-1, order, difference.sign().mul_(total))[:, :own]
    rows = torch.zeros_like(log_s)
    rows[:, outcomes.student] = at_shared
    rows.scatter_add_(1, rest_s.ids, signs * rest_s.p)
    at_span -= (signs * rest_s.holds_span).sum(-1) * whole_s.exp()
    gradient = torch.zeros_like(student.log_p)
    gradient[student.first] = rows
    return loss, gradient.scatter_add_(1, student.tokens[:, None], at_span[student.span][:, None])


def span_figures(
    student: Side, teacher: Side, outcomes: Outcomes, objective: Objective, label_logprobs: tuple[torch.Tensor, ...]
) -> TokenStats:
    """`TokenStats` of a chunk's spans, [m] each, at temperature 1: labels are the spans' texts."""
    divergence, _ = compare_spans(
        student, teacher, outcomes, objective, objective.divergence_weights, slope=False
    )  # fmt: skip
    log_s, log_t = student.log_p[student.first], teacher.log_p[teacher.first]
    entropies = [-torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0).sum(-1) for log_p in (log_s, log_t)]
    agreement = outcomes.partner[log_s.argmax(-1)] == log_t.argmax(-1)
    own, others = label_logprobs
    return TokenStats(divergence, -own, entropies[0], entropies[1], agreement.to(own.dtype), own, others)
