"""Policy-gradient losses of the sampled tokens: terms, loss and gradient in plain PyTorch.

The specification of policy_kernel.py. With `l = log softmax(z / T)[y]` of the sampled token y, sg the stop-gradient,

    A    = advantage (+ beta sg(l_ref - l), the KL penalty as a reward)
    r    = exp(l - l_old)                          importance ratio; exp(l - sg(l)) = 1 without `l_old`
    loss = -min(r A, clip(r, 1 - c_low, 1 + c_high) A) + beta K(l, l_ref) - w H

where H is the entropy of `softmax(z / T)` and K estimates KL(p_s || p_ref) from the token: (l - l_ref)^2 / 2 (k2) or
exp(l_ref - l) - (l_ref - l) - 1 (k3). All but H depend on a row's logits through `l` alone, so with `s = dloss / dl`
the gradient for the logits is

    (s (onehot(y) - p) + w p (log p + H)) / T

and a row's is known as soon as its normaliser is: loss and gradients take one pass and three GEMMs.

Sources: Schulman et al. 2017 (PPO, arXiv 1707.06347), Shao et al. 2024 (GRPO, arXiv 2402.03300: k3 in the loss), Yu et
al. 2025 (DAPO, arXiv 2503.14476: two clipping ranges), Schulman 2020 ("Approximating KL divergence": k2 and k3).
"""

from __future__ import annotations

import json
from typing import NamedTuple

import torch

from distill_kernels.launch import constant_in_graphs
from distill_kernels.losses.divergence import (
    RowRequest,
    RowResult,
    _add_at_labels_,
    _at_labels,
    log_softmax,
    transform_logits,
)
from distill_kernels.losses.terms import Objective
from distill_kernels.operands import contiguous_rows

KL_ESTIMATORS = ("reward", "k2", "k3")
NO_CLIP = -1.0


class PolicySettings(NamedTuple):
    """Numbers of a policy-gradient loss.

    Attributes:
        clip_low, clip_high: the clipping ranges c_low and c_high; `NO_CLIP` for none.
        kl_weight: factor beta of the KL penalty.
        kl_estimator: estimator of the KL penalty, one of `KL_ESTIMATORS`.
        entropy_weight: factor w of the entropy bonus.
    """

    clip_low: float = NO_CLIP
    clip_high: float = NO_CLIP
    kl_weight: float = 0.0
    kl_estimator: str = "k3"
    entropy_weight: float = 0.0

    @constant_in_graphs
    def encode(self) -> str:
        """Return the settings as text, for operators whose arguments must be plain."""
        return json.dumps(tuple(self))

    @staticmethod
    def decode(text: str) -> PolicySettings:
        """Return the settings that `encode` made `text` of."""
        return PolicySettings(*json.loads(text))


class Policy(NamedTuple):
    """Per-token arguments of a policy-gradient loss, floating [N] each.

    Attributes:
        advantages: advantages of the tokens, or None for 0.
        old_logprobs: log-probabilities when the tokens were sampled, or None for the present ones (ratio 1).
        reference_logprobs: log-probabilities under the reference model, or None without one.
        settings: clipping ranges and factors of the loss.
    """

    advantages: torch.Tensor | None
    old_logprobs: torch.Tensor | None
    reference_logprobs: torch.Tensor | None
    settings: PolicySettings

    def rows(self, which: slice | torch.Tensor) -> Policy:
        advantages, old, reference = (None if each is None else each[which] for each in self[:3])
        return Policy(advantages, old, reference, self.settings)

    def contiguous(self) -> Policy:
        advantages, old, reference = (contiguous_rows(each) for each in self[:3])
        return Policy(advantages, old, reference, self.settings)


def reference_policy_terms(log_p: torch.Tensor, policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's loss without the entropy, and its derivative for `log_p`; all [n].

    Args:
        log_p: the tokens' log-probabilities, [n], fp32 or fp64.
        policy: arguments of the same n rows.
    """
    settings = policy.settings
    advantages, old, reference = (None if each is None else each.to(log_p.dtype) for each in policy[:3])
    advantage = torch.zeros_like(log_p) if advantages is None else advantages
    if reference is not None and settings.kl_weight and settings.kl_estimator == "reward":
        advantage = advantage + settings.kl_weight * (reference - log_p)
    ratio = torch.ones_like(log_p) if old is None else (log_p - old).exp()
    # d(ratio) / d(log p) is the ratio, so that value and slope are equal; the advantage is a constant.
    loss = slope = -ratio * advantage
    if settings.clip_low != NO_CLIP:
        # The larger of two losses. Clipping bites where the ratio has already moved the way that the advantage asks
        # for: above the range with A > 0, below it with A < 0. Moves the other way keep their slope.
        clipped = -ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantage
        slope = torch.where(clipped > loss, 0.0, slope)
        loss = torch.maximum(loss, clipped)
    if reference is not None and settings.kl_weight and settings.kl_estimator != "reward":
        d = reference - log_p
        if settings.kl_estimator == "k2":
            loss = loss + settings.kl_weight * 0.5 * d.square()
            slope = slope - settings.kl_weight * d
        else:
            # exp(d) - 1 by expm1, since log p and its reference are close in most tokens and the difference would
            # cancel.
            loss = loss + settings.kl_weight * (d.expm1() - d)
            slope = slope - settings.kl_weight * d.expm1()
    return loss, slope


def reference_policy_rows(
    student_raw: torch.Tensor,
    teacher_raw: torch.Tensor | None,
    objective: Objective,
    request: RowRequest,
    *,
    policy: Policy,
) -> RowResult:
    """Return loss, gradient and statistics of rows of sampled tokens; arguments as of `divergence.reference_rows`.

    The labels are the tokens and `teacher_raw` is None. Statistics are at the loss's temperature: cross_entropy,
    student_entropy and student_label_logprob; with a reference also teacher_label_logprob, and k3 as the divergence.
    """
    targets = request.targets
    assert teacher_raw is None and targets is not None
    settings = policy.settings
    z = transform_logits(student_raw, objective.student_scale, objective.student_softcap)
    all_log_p = log_softmax(z / objective.temperature if objective.temperature != 1.0 else z)
    log_p = _at_labels(all_log_p, targets)
    p = all_log_p.exp()
    loss, slope = reference_policy_terms(log_p, policy)
    entropy = log_p.new_zeros(log_p.shape)
    products = None
    if settings.entropy_weight or request.with_stats:
        # p log p is 0 at p = 0, where 0 times -inf would be NaN.
        products = torch.where(p > 0, p * all_log_p, 0.0)
        entropy = -products.sum(-1)
    loss = torch.where(request.counted, (loss - settings.entropy_weight * entropy) * request.row_scale, 0.0)
    gradient = None
    if request.with_gradient:
        # s (onehot - p) of the token, then w p (log p + H) of the bonus; the factor 1 / T comes with the row's scale
        # below.
        gradient = p * -slope[:, None]
        _add_at_labels_(gradient, targets, slope)
        if settings.entropy_weight and products is not None:
            gradient += settings.entropy_weight * (products + p * entropy[:, None])
        request.finish_gradient_(gradient, z, objective, objective.temperature)
    stats = None
    if request.with_stats:
        zeros = torch.zeros_like(log_p)
        reference = policy.reference_logprobs
        divergence = zeros
        reference = zeros if reference is None else reference.to(log_p.dtype)
        if policy.reference_logprobs is not None:
            divergence = (reference - log_p).expm1() - (reference - log_p)
        stats = request.stats(divergence, -log_p, entropy, zeros, zeros, log_p, reference)
    return RowResult(loss, gradient, stats)
