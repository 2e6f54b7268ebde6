"""Reference losses from their definitions, on full logits in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from distill_kernels import LossTerm
from distill_kernels.losses.divergence import reference_terms
from distill_kernels.losses.terms import make_objective
from torch.nn import functional as F

from distill.core.labels import IGNORE_INDEX
from distill.recipe.layer_terms import LAYERED
from distill.recipe.loss import Clip, Loss, PolicyGradientTerm, TopKTerm

OF_KLS = ("forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl")
NO_DIVERGENCE = ("cross_entropy", "policy_gradient", "top_k_reverse_kl", *LAYERED)
Mixture = Sequence[tuple[float, torch.Tensor]]


class SampledTokens(NamedTuple):
    """Tokens of rollouts.

    Attributes:
        at: Positions [N], ascending; adjacent ones belong to one response.
        advantages: Advantages [N] by a reward; None without one.
    """

    at: torch.Tensor
    advantages: torch.Tensor | None = None


def shift_left(labels: torch.Tensor) -> torch.Tensor:
    """Return labels [..., S] shifted left by one, so that position i holds the next token; the last is masked."""
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]


def token_loss(
    student: torch.Tensor,
    teachers: Mixture,
    labels: torch.Tensor,
    loss: Loss,
    sampled: SampledTokens | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the recipe's loss, the mean over trained tokens, from logits [N, V] and labels [N], by definition.

    Computed in `dtype`. Teachers are pairs of a weight and logits; `sampled` describes the labels of rollouts.
    """
    z_s = student.to(dtype)
    log_s = F.log_softmax(z_s / loss.temperatures.student, dim=-1)
    log_t = mixed_log_probabilities(teachers, loss.temperatures.teacher, dtype)
    soft = sum(
        (term.weight * _divergence(term, log_s, log_t) for term in loss.terms if term.type not in NO_DIVERGENCE),
        start=z_s.new_zeros(len(z_s)),
    )
    for term in loss.terms:
        if isinstance(term, TopKTerm):
            own = log_s.detach().argsort(-1, descending=True)[:, : term.k]
            if term.tail == "sampled":
                soft = soft + term.weight * with_sampled_tail(z_s, log_s, log_t, own, labels, term.clip)
                continue
            p = _outcomes(log_s.exp().gather(-1, own), term.tail)
            q = _outcomes(log_t.exp().gather(-1, own), term.tail)
            soft = soft + term.weight * capped(torch.xlogy(p, p) - torch.xlogy(p, q) - p + q, term.clip)
        if isinstance(term, PolicyGradientTerm):  # the labels are on-policy samples at temperature 1
            p_s = z_s.to(dtype).softmax(-1).gather(-1, labels[:, None])[:, 0]
            p_t = teachers[0][1].to(dtype).softmax(-1).gather(-1, labels[:, None])[:, 0]
            scale = loss.scale
            gains = (p_t.log() - p_s.log()).tolist()
            for place in range(len(gains) - 2, -1, -1):
                if term.discount and sampled is not None and sampled.at[place + 1] == sampled.at[place] + 1:
                    gains[place] += term.discount * gains[place + 1]
            gain = term.teacher_weight * p_s.new_tensor(gains)
            if term.reward is not None and sampled is not None and sampled.advantages is not None:
                gain = gain + sampled.advantages.to(gain)
            soft = soft - term.weight / scale * gain * p_s / p_s.detach()
    return _mean(soft, z_s, labels, loss)


def capped(parts: torch.Tensor, clip: Any) -> torch.Tensor:
    """Return the sums of a divergence's entries [N, V], each entry and the sum clamped at a term's caps.

    `clip` is a recipe's or a loss's, or None.
    """
    if clip is None:
        return parts.sum(-1)
    if clip.entry is not None:
        parts = parts.clamp(max=clip.entry)
    total = parts.sum(-1)
    return total if clip.token is None else total.clamp(max=clip.token)


def with_sampled_tail(
    z: torch.Tensor,
    log_s: torch.Tensor,
    log_t: torch.Tensor,
    own: torch.Tensor,
    labels: torch.Tensor,
    clip: Clip | None = None,
) -> torch.Tensor:
    """Return the generalised KL over the tokens `own`, plus the label's, as it was drawn just now, where it is none."""
    p = log_s.exp()
    q = log_t.exp()
    each = torch.xlogy(p, p) - torch.xlogy(p, q) - p + q
    if clip is not None and clip.entry is not None:
        each = each.clamp(max=clip.entry)
    label = labels[:, None]
    weight = z.detach().softmax(-1).gather(-1, label).reciprocal() * (own != label).all(-1, keepdim=True)
    total = each.gather(-1, own).sum(-1) + (weight * each.gather(-1, label))[:, 0]
    return total if clip is None or clip.token is None else total.clamp(max=clip.token)


def mixed_log_probabilities(teachers: Mixture, temperature: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return log sum_k w_k softmax(z_k / T) in `dtype`, from weights w (normalised) and logits z [..., V]."""
    whole = sum(share for share, _ in teachers)
    parts = [F.log_softmax(z.to(dtype) / temperature, dim=-1) for _, z in teachers]
    if len(parts) == 1:
        return parts[0]
    return sum(share / whole * log_p.exp() for (share, _), log_p in zip(teachers, parts, strict=True)).log()  # type: ignore[union-attr]


def reference_top_k_loss(
    student: torch.Tensor,
    teacher: tuple[torch.Tensor, torch.Tensor],
    tail: str,
    labels: torch.Tensor,
    loss: Loss,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the recipe's loss against K tokens of a teacher: the mean over N trained tokens, in `dtype`.

    Args:
        student: Logits [N, V].
        teacher: Token ids, int64 [N, K], and their probabilities [N, K] at the loss's temperature (for `sampled` their
            weights).
        tail: `bucket` (all other tokens are one more outcome), `renormalize` (the K tokens are normalised) or `sampled`
            (sum of w log(w / p_s), minus sum w, plus 1).
        labels: Next tokens, int64 [N].
        loss: Loss with forward or reverse KL, and cross-entropy.
    """
    ids = teacher[0]
    q = teacher[1].to(dtype)
    z_s = student.to(dtype)
    p = F.softmax(z_s / loss.temperatures.student, dim=-1).gather(-1, ids)
    q = _outcomes(q, tail)
    p = _outcomes(p, tail)
    soft = z_s.new_zeros(len(z_s))
    for term in loss.terms:
        clip = getattr(term, "clip", None)
        if term.type == "forward_kl":
            parts = torch.xlogy(q, q) - torch.xlogy(q, p)
            if tail == "sampled":  # the mass that is missing on one side, spread over the K: only their sum has a cap
                parts = parts + (1 - q.sum(-1, keepdim=True)) / q.shape[-1]
            else:
                parts = parts - q + p
            soft = soft + term.weight * capped(parts, clip)
        elif term.type == "reverse_kl":
            soft = soft + term.weight * capped(torch.xlogy(p, p) - torch.xlogy(p, q) - p + q, clip)
    return _mean(soft, z_s, labels, loss)


def _outcomes(p: torch.Tensor, tail: str) -> torch.Tensor:
    """Return the outcome probabilities for a tail, from those of K tokens [N, K]."""
    if tail == "bucket":
        return torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1)
    return p / p.sum(-1, keepdim=True) if tail == "renormalize" else p


def _mean(soft: torch.Tensor, z_s: torch.Tensor, labels: torch.Tensor, loss: Loss) -> torch.Tensor:
    """Return the mean of the tokens' scaled divergences [N] plus their hard-label terms."""
    total = loss.scale * soft
    for term in loss.terms:
        if term.type == "cross_entropy":
            hard = F.cross_entropy(z_s, labels, label_smoothing=loss.label_smoothing, reduction="none")
            total = total + term.weight * (hard + loss.z_loss * torch.logsumexp(z_s, dim=-1) ** 2)
    return total.sum() / max(len(total), 1)


def _divergence(term: Any, log_s: torch.Tensor, log_t: torch.Tensor) -> torch.Tensor:
    def kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        # the difference of the probabilities adds up to 0, and makes each entry nonnegative
        return log_p.exp() * (log_p - log_q) - log_p.exp() + log_q.exp()

    if term.type == "tvd":
        return capped(0.5 * (log_t.exp() - log_s.exp()).abs(), term.clip)
    if term.type not in OF_KLS:
        return capped(as_specified(term, log_s, log_t), term.clip)
    parts = divergence_from_kl(
        term, kl, log_s, log_t, lambda share: (share * log_t.exp() + (1 - share) * log_s.exp()).log()
    )
    return capped(parts, term.clip)


def as_specified(term: Any, log_s: torch.Tensor, log_t: torch.Tensor) -> torch.Tensor:
    """Return the terms of a divergence that is defined nowhere in doctor, by the specification of the kernels."""
    plain = make_objective([LossTerm(term.type, 1.0, getattr(term, "beta", None), getattr(term, "alpha", None))])
    (kind,) = plain.kinds
    (parameter,) = plain.parameters
    return reference_terms(kind, parameter, log_s, log_t, log_s.exp(), log_t.exp())[0]


def divergence_from_kl(
    term: Any,
    kl: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    student: torch.Tensor,
    teacher: torch.Tensor,
    mixed: Callable[[float], torch.Tensor],
) -> torch.Tensor:
    """Return a term that is made of KLs; `mixed(share)` is the mixture with weight `share` of the teacher."""
    if term.type == "forward_kl" or (term.type == "jsd" and term.beta == 0):
        return kl(teacher, student)
    if term.type == "reverse_kl" or (term.type == "jsd" and term.beta == 1):
        return kl(student, teacher)
    if term.type == "jsd":
        return term.beta * kl(teacher, mixed(term.beta)) + (1 - term.beta) * kl(student, mixed(term.beta))
    if term.type == "skew_forward_kl":
        return kl(teacher, mixed(term.alpha))
    return kl(student, mixed(1 - term.alpha))
