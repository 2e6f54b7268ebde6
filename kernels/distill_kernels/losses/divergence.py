"""Divergences between two next-token distributions, row by row: values, gradients and statistics.

With `a = z_s / T`, `b = z_t / T`, `p_s = softmax(a)`, `p_t = softmax(b)`, every divergence here is a sum over the
vocabulary of a term `f(p_s, p_t) >= 0`. Let `g = p_s * df/dp_s`; then the gradient for the student's logits is

    dD/dz_s = (g - p_s * sum(g)) / T

| divergence | f | g |
|---|---|---|
| forward KL | p_t log(p_t/p_s) - p_t + p_s | p_s - p_t |
| reverse KL | p_s log(p_s/p_t) - p_s + p_t | p_s log(p_s/p_t) |
| JSD(beta), m = beta p_t + (1-beta) p_s | beta p_t log(p_t/m) + (1-beta) p_s log(p_s/m) | (1-beta) p_s log(p_s/m) |
| skewed forward KL, m = alpha p_t + (1-alpha) p_s | p_t log(p_t/m) - p_t + m | (1-alpha) p_s (1 - p_t/m) |
| skewed reverse KL, m = alpha p_s + (1-alpha) p_t | p_s log(p_s/m) - p_s + m | p_s (log(p_s/m) + alpha (1 - p_s/m)) |
| total variation | |p_t - p_s| / 2 | p_s sign(p_s - p_t) / 2 |

The added `p_s - p_t` sums to zero: it keeps each term nonnegative and makes small divergences exact to second order in
the rounding of the normalisers. A term with `p = 0` in front of its logarithm is 0; where `p_t > 0` meets `p_s = 0`
the forward KL is inf.

A cap x on entries (`terms.Clip`) replaces f by min(f, x) and, where f > x, g by 0: the gradient above, with `sum(g)`
over the other entries, is then that of `sum_v min(f_v, x)`. Since no f is negative, neither is the capped sum, and it
is 0 for equal distributions alone; of the bare products p log(p/q), which may be negative, capping only the positive
ones could make the sum negative. A cap y on the token's value makes it min(D, y), and the token's g 0 where D > y.

With a temperature for each model, a = z_s / T_s and b = z_t / T_t, and the T of the gradient, and of T^2, is T_s.

The hard-label term is `CE + z_loss * lse^2` at T = 1, with `CE = -(1-eps) log p[label] - eps mean_v(log p[v])`.

Sources: Hinton et al. 2015 (T^2), Gu et al. 2024 (MiniLLM, reverse KL), Agarwal et al. 2024 (GKD, generalised JSD),
Ko et al. 2024 (DistiLLM, skewed KL), Wen et al. 2023 (f-DISTILL, total variation).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from distill_kernels.losses import DIVERGENCES
from distill_kernels.losses.terms import Objective, TokenStats

MAX_LOG_RATIO = 80.0  # of the two probabilities in a mixture: beyond it the smaller one vanishes in fp32


class RowResult(NamedTuple):
    """Losses, gradient and statistics of the rows of one chunk.

    Attributes:
        loss: row losses times `row_scale`, [n].
        gradient: gradient of `loss.sum()` for the student's raw logits, [n, V], or None.
        stats: `TokenStats` of [n] tensors, or None.
    """

    loss: torch.Tensor
    gradient: torch.Tensor | None
    stats: TokenStats | None


class RowRequest(NamedTuple):
    """Arguments of the specifications besides logits and objective, for n rows.

    Attributes:
        labels: int64 [n] of vocabulary indices, or None. Rows of scale 0 may hold anything.
        row_scale: [n], factor of each row's loss; 0 skips the row.
        with_gradient: make the gradient for the student's raw logits.
        with_stats: make the statistics.
    """

    labels: torch.Tensor | None
    row_scale: torch.Tensor
    with_gradient: bool = True
    with_stats: bool = False

    @property
    def counted(self) -> torch.Tensor:
        """Bool [n]: the rows that are not skipped."""
        return self.row_scale != 0

    @property
    def targets(self) -> torch.Tensor | None:
        """Labels as int64, those of skipped rows replaced by any that can be looked up."""
        if self.labels is None:
            return None
        return torch.where(self.counted, self.labels.long(), 0)

    def finish_gradient_(
        self, gradient: torch.Tensor, z: torch.Tensor, objective: Objective, temperature: float = 1.0
    ) -> None:
        """Make the gradient for transformed logits `z` over `temperature` that for raw ones, 0 at skipped rows."""
        gradient.mul_((self.row_scale * (objective.student_scale / temperature))[:, None])
        if objective.student_softcap:
            gradient.mul_((z / objective.student_softcap).square_().neg_().add_(1.0))
        # by selection, since 0 times the NaN of a skipped row is NaN
        gradient.masked_fill_(~self.counted[:, None], 0.0)

    def stats(self, *statistics: torch.Tensor, clipped: tuple[torch.Tensor, torch.Tensor] | None = None) -> TokenStats:
        """Return the statistics in fp32, 0 at skipped rows.

        `clipped` are the last two: 1 at capped tokens, and the share of the value that the caps take (the drivers make
        it `TokenStats.clipped_value`); None for zeros.
        """
        if clipped is None:
            clipped = (torch.zeros_like(statistics[0]),) * 2
        every = (*statistics, *clipped)
        return TokenStats(*(torch.where(self.counted, statistic, 0.0).float() for statistic in every))


def transform_logits(raw: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    """`cap * tanh(scale * raw / cap)`, or `scale * raw` where the cap is 0."""
    if softcap:
        return torch.tanh(raw * (scale / softcap)) * softcap
    return raw * scale if scale != 1.0 else raw


def _log_ratio_product(p: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """`p * (log p - log q)` with 0 where p is 0."""
    return torch.where(p > 0, p * (log_p - log_q), 0.0)


def reference_terms(
    kind: str, parameter: float, log_s: torch.Tensor, log_t: torch.Tensor, p_s: torch.Tensor, p_t: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `f` and `g` of one divergence (table above), elementwise, from log-probabilities and probabilities.

    Args:
        kind: the divergence, one of `DIVERGENCES`.
        parameter: beta or alpha of the divergence; ignored by those without one.
        log_s, log_t: log-probabilities of student and teacher, [n, V].
        p_s, p_t: probabilities of student and teacher, [n, V].
    """
    if kind == "forward_kl":
        difference = p_s - p_t
        return _log_ratio_product(p_t, log_t, log_s) + difference, difference
    if kind == "reverse_kl":
        g = _log_ratio_product(p_s, log_s, log_t)
        return g - p_s + p_t, g
    if kind == "tvd":
        difference = p_s - p_t
        return difference.abs() * 0.5, p_s * difference.sign() * 0.5
    # with e = p_t / p_s, q = m / p_s = 1 + share (e - 1): exactly 1 where the distributions are equal
    share = 1 - parameter if kind == "skew_reverse_kl" else parameter  # the teacher's part of the mixture
    d = (log_t - log_s).nan_to_num_(0.0).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    e = d.exp()
    q = 1 + share * (e - 1)
    log_q = q.log()
    m = p_s + share * (p_t - p_s)
    if kind == "skew_reverse_kl":
        return m - p_s - p_s * log_q, p_s * (parameter * (1 - 1 / q) - log_q)
    if kind == "skew_forward_kl":
        return p_t * (d - log_q) - p_t + m, (1 - share) * p_s * (1 - e / q)
    assert kind == "jsd", kind
    g = (share - 1) * p_s * log_q
    return share * p_t * (d - log_q) + g, g


def cap_entries(f: torch.Tensor, g: torch.Tensor, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `f` and `g` with each entry's value capped: beyond the cap it is constant. NaN is not beyond."""
    beyond = f > cap
    return torch.where(beyond, cap, f), torch.where(beyond, 0.0, g)


class ClippedValue:
    """Sums of the divergences with and without caps, for the statistics of clipping."""

    def __init__(self, like: torch.Tensor) -> None:
        self.whole = torch.zeros_like(like)
        self.kept = torch.zeros_like(like)
        self.capped = torch.zeros_like(like, dtype=torch.bool)

    def add(self, weight: float, whole: torch.Tensor, kept: torch.Tensor, capped: torch.Tensor) -> None:
        """Add a divergence: its value without and with caps, and where the token's cap is reached."""
        self.whole += weight * whole
        self.kept += weight * kept
        self.capped |= capped

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return 1 at capped tokens, and the share of each token's value that the caps take."""
        share = torch.where(self.whole > 0, 1 - self.kept / self.whole, 0.0).clamp_min(0.0)
        return self.capped.to(share.dtype), share


def logit_gradient(g: torch.Tensor, p_s: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Return the gradient for the scaled logits, `g - p_s sum(g)` [n, V].

    Where p_s of a token is near 1, `g` there is nearly the whole sum and the difference cancels. Written
    as `g sum'(p_s) - p_s sum'(g)`, sums over the other tokens, it is exact. No row has two tokens of p_s > 1/2.
    """
    plain = g - p_s * g.sum(-1, keepdim=True)
    if not objective.stable_top:
        return plain
    top = p_s > 0.5
    g_without_top = g.masked_fill(top, 0.0).sum(-1, keepdim=True)
    rest_p = p_s.masked_fill(top, 0.0).sum(-1, keepdim=True)
    return torch.where(top, g * rest_p - p_s * g_without_top, plain)


def log_softmax(z: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities of logits [n, V].

    On a CPU PyTorch's float32 log_softmax adds up a row's exponentials in few long chains: over 49,152 columns its
    normaliser is off by up to 2e-5, with the same sign in every row, which a loss's mean and the gradients' sums keep.
    Here the probabilities are added up once more, in pairs, and what they lack of 1 is taken off.
    """
    log_p = torch.log_softmax(z, -1)
    if z.dtype == torch.float32 and not z.is_cuda:
        lacking = log_p.exp().sum(-1, keepdim=True).log()
        return log_p - lacking if log_p.requires_grad else log_p.sub_(lacking)
    return log_p


def unique_argmax(z: torch.Tensor) -> torch.Tensor:
    """Return each row's argmax, int64 [...] of [..., V]; -1 where several tokens tie."""
    highest, token = z.max(-1, keepdim=True)
    return torch.where((z == highest).sum(-1) == 1, token.squeeze(-1), -1)


def _at_labels(log_p: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return each row's log-probability of its label, [n]."""
    return log_p.gather(-1, targets[:, None]).squeeze(-1)


def _add_at_labels_(gradient: torch.Tensor, targets: torch.Tensor, value: torch.Tensor | float) -> None:
    """`gradient[i, targets[i]] += value`, a number or one a row."""
    values = value if isinstance(value, torch.Tensor) else gradient.new_full(targets.shape, value)
    gradient.scatter_add_(-1, targets[:, None], values[:, None])


def reference_rows(
    student_raw: torch.Tensor, teacher_raw: torch.Tensor | None, objective: Objective, request: RowRequest
) -> RowResult:
    """Return loss, gradient and statistics of rows of logits: the specification, and the path of CPU tensors.

    Args:
        student_raw: student logits before scale, soft cap and temperature, [n, V], fp32 or fp64. May be overwritten.
        teacher_raw: the teacher's, [n, V], or None where the objective has no divergence.
        objective: terms of the loss and its settings.
        request: labels and scales of the rows, and the outputs to compute.
    """
    with_gradient = request.with_gradient
    n, vocab = student_raw.shape
    z = transform_logits(student_raw, objective.student_scale, objective.student_softcap)
    z_teacher = None
    if teacher_raw is not None:
        z_teacher = transform_logits(teacher_raw, objective.teacher_scale, objective.teacher_softcap)
    targets = request.targets
    loss = z.new_zeros(n)
    gradient = None
    log_p1 = None  # the student at T = 1
    clipped = ClippedValue(loss)
    if objective.kinds:
        assert z_teacher is not None
        log_s = log_softmax(z / objective.temperature if objective.temperature != 1.0 else z)
        teacher_t = objective.teacher_temperature
        log_t = log_softmax(z_teacher / teacher_t if teacher_t != 1.0 else z_teacher)
        log_p1 = log_s if objective.temperature == 1.0 else None
        p_s = log_s.exp()
        p_t = log_t.exp()
        for kind, weight, parameter, token_cap, entry_cap in objective.divergences:
            f, g = reference_terms(kind, parameter, log_s, log_t, p_s, p_t)
            value = f.sum(-1).clamp_min(0)
            if token_cap < math.inf or entry_cap < math.inf:
                whole = value
                f, g = cap_entries(f, g, entry_cap)
                value = f.sum(-1).clamp_min(0)
                capped = value > token_cap
                value = torch.where(capped, token_cap, value)
                g = torch.where(capped[:, None], 0.0, g)
                clipped.add(weight, whole, value, capped)
            elif objective.clips:
                clipped.add(weight, value, value, torch.zeros_like(clipped.capped))
            loss += weight * value
            if with_gradient:
                # forward KL's g sums to 0 and is the gradient already
                if not DIVERGENCES[kind].g_sums_to_0 or entry_cap < math.inf:
                    g = logit_gradient(g, p_s, objective)
                g = g.mul_(weight / objective.temperature)
                gradient = g if gradient is None else gradient.add_(g)
    if objective.hard_weight:
        assert targets is not None
        log_p1 = log_softmax(z) if log_p1 is None else log_p1
        hard = -(1 - objective.label_smoothing) * _at_labels(log_p1, targets)
        if objective.label_smoothing:
            hard = hard - objective.label_smoothing / vocab * log_p1.sum(-1)
        lse = None
        if objective.z_loss:
            lse = torch.logsumexp(z, -1)
            hard = hard + objective.z_loss * lse.square()
        loss += objective.hard_weight * hard
        if with_gradient:
            factor = objective.hard_weight * (1 + 2 * objective.z_loss * lse[:, None] if lse is not None else 1.0)
            g = log_p1.exp().mul_(factor)
            if objective.label_smoothing:
                g.sub_(objective.hard_weight * objective.label_smoothing / vocab)
            _add_at_labels_(g, targets, -objective.hard_weight * (1 - objective.label_smoothing))
            gradient = g if gradient is None else gradient.add_(g)
    loss = torch.where(request.counted, loss * request.row_scale, 0.0)
    if gradient is not None:
        request.finish_gradient_(gradient, z, objective)
    if not request.with_stats:
        return RowResult(loss, gradient, None)
    of_caps = clipped.statistics() if objective.clips else None
    return RowResult(loss, gradient, reference_stats(z, z_teacher, objective, request, of_caps))


def reference_stats(
    z: torch.Tensor,
    z_teacher: torch.Tensor | None,
    objective: Objective,
    request: RowRequest,
    clipped: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> TokenStats:
    """Return `TokenStats` of rows of transformed logits [n, V] at T = 1; zeros at skipped rows.

    Args:
        z: the student's transformed logits, [n, V].
        z_teacher: the teacher's, or None.
        objective: the loss, whose divergences are reported.
        request: labels and scales.
        clipped: the last two statistics, see `RowRequest.stats`.
    """
    targets = request.targets
    zeros = z.new_zeros(z.shape[0])
    log_s = log_softmax(z)
    p_s = log_s.exp()
    student_label = zeros if targets is None else _at_labels(log_s, targets)
    student_entropy = -torch.where(p_s > 0, p_s * log_s, 0.0).sum(-1)
    divergence = teacher_entropy = agreement = teacher_label = zeros
    if z_teacher is not None:
        log_t = log_softmax(z_teacher)
        p_t = log_t.exp()
        terms = zip(objective.kinds, objective.divergence_weights, objective.parameters, strict=True)
        for kind, weight, parameter in terms:
            f = reference_terms(kind, parameter, log_s, log_t, p_s, p_t)[0]
            divergence = divergence + weight * f.sum(-1).clamp_min(0)
        teacher_entropy = -torch.where(p_t > 0, p_t * log_t, 0.0).sum(-1)
        student_top = z == z.amax(-1, keepdim=True)
        teacher_top = z_teacher == z_teacher.amax(-1, keepdim=True)
        # a top token of both models counts 1, of one model 2: the sum is 1 only for one shared, untied top token
        top_count = (student_top | teacher_top).sum(-1) + (student_top ^ teacher_top).sum(-1)
        agreement = top_count == 1
        teacher_label = zeros if targets is None else _at_labels(log_t, targets)
    return request.stats(
        divergence,
        -student_label,
        student_entropy,
        teacher_entropy,
        agreement,
        student_label,
        teacher_label,
        clipped=clipped,
    )
