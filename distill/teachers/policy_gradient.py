"""The loss of the sampled token alone, as in policy-gradient reinforcement learning.

With y a token that the student sampled, and sg the stop-gradient:

    A = sg(log p_t[y] - log p_s[y])            advantage; with a discount, plus those of the response's later tokens;
                                               times `teacher_weight`, plus the response's advantage by a reward
    r = p_s[y] / p_drawn[y]                    importance ratio: 1 where the tokens were sampled from p_s itself
    loss = -min(r A, clip(r, 1 - c, 1 + c) A)

Its gradient at r = 1 is -A grad log p_s[y], which is in expectation that of the reverse KL (the recipe of Lu and
Thinking Machines Lab, 2025, "On-policy distillation"; the clipped form is of Schulman et al., 2017, arXiv 1707.06347).
Log-probabilities come from `distill_kernels.fused_log_probs`, without logits.
"""

from __future__ import annotations

import torch
from distill_kernels import fused_log_probs

from distill.core.labels import IGNORE_INDEX
from distill.models.head import HeadWeights, LogitTransform
from distill.recipe.loss import Loss, PolicyGradientTerm
from distill.teachers.base import HeadForward, VocabularyAlignment


def policy_gradient_loss(
    log_p: torch.Tensor,
    teacher_log_p: torch.Tensor,
    sampled_log_p: torch.Tensor | None = None,
    *,
    clip: float | None = None,
    discount: float = 0.0,
    learned: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return each token's loss, by the teacher's advantage alone.

    Args:
        log_p: Log-probabilities of the sampled tokens under the student, [B, S], in nats; differentiable.
        teacher_log_p: Log-probabilities of the same tokens under the teacher, [B, S]; no gradient.
        sampled_log_p: Log-probabilities by the engine that sampled them, [B, S]; None for `log_p` (ratio 1).
        clip: The clipping range c; None for no clipping.
        discount: Factor per token of the later tokens' advantages, 0 to 1; 0 for none.
        learned: Mask of the student's own tokens, bool [B, S]; discounts do not cross gaps in it.

    Returns:
        Like `log_p`, 0 where not `learned`.
    """
    learned = torch.ones_like(log_p, dtype=torch.bool) if learned is None else learned
    advantage = teacher_advantage(log_p, teacher_log_p, learned, discount)
    return surrogate_loss(log_p, advantage, learned, sampled_log_p, clip)


def teacher_advantage(
    log_p: torch.Tensor, teacher_log_p: torch.Tensor, learned: torch.Tensor, discount: float = 0.0
) -> torch.Tensor:
    """Return log p_t - log p_s of each trained token, [B, S] without a graph, with discounted later ones of the answer.

    Arguments as of `policy_gradient_loss`; 0 where not `learned`.
    """
    advantage = (teacher_log_p - log_p).detach().masked_fill(~learned, 0.0)
    return discounted(advantage, learned, discount) if discount else advantage


def surrogate_loss(
    log_p: torch.Tensor,
    advantage: torch.Tensor,
    learned: torch.Tensor,
    sampled_log_p: torch.Tensor | None = None,
    clip: float | None = None,
) -> torch.Tensor:
    """Return -min(r A, clip(r) A) of each trained token, [B, S]; arguments as of `policy_gradient_loss`."""
    ratio = (log_p - (log_p if sampled_log_p is None else sampled_log_p).detach()).exp()
    gain = ratio * advantage
    if clip is not None:
        gain = torch.minimum(gain, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -gain.masked_fill(~learned, 0.0)


def discounted(values: torch.Tensor, learned: torch.Tensor, discount: float) -> torch.Tensor:
    """Return sum_k discount^k values[t + k] over the rest of each stretch of `learned` tokens; [B, S], by doubling."""
    total, reaches, step = values, learned, 1
    while step < values.shape[-1]:
        later, open_ = torch.zeros_like(total), torch.zeros_like(reaches)
        later[..., :-step], open_[..., :-step] = total[..., step:], reaches[..., step:]
        # `reaches`: the next `step` tokens, this one included, are of one stretch
        follows = torch.zeros_like(learned)
        follows[..., :-step] = learned[..., step:]
        total = total + discount**step * later * (reaches & follows)
        reaches, step = reaches & open_, 2 * step
    return total


class SampledTokenLoss:
    """The term `policy_gradient`, at temperature 1 whatever the loss's is.

    Args:
        term: Settings of the term.
        section: The recipe's loss section.
        pairing: Number of logits compared, and the student's scale and soft cap.
        transform: Scale and soft cap of the teacher's logits.

    Attributes:
        reduction: "mean", or "none" for the loss of each token.
        workspace: Unused; every loss has it (`SeparateTermsLoss` sets it on each of its losses).
    """

    def __init__(
        self, term: PolicyGradientTerm, section: Loss, pairing: VocabularyAlignment, transform: LogitTransform
    ) -> None:
        self.term, self.pairing, self.transform = term, pairing, transform
        self.reduction = "mean"
        self.workspace: int | None = None

    def __call__(self, call: HeadForward, teacher: HeadWeights) -> torch.Tensor:
        """Return the loss inside the student head's own call."""
        targets, inputs, learned = call.inputs.targets, call.inputs, call.labels != IGNORE_INDEX
        assert isinstance(targets, torch.Tensor)
        common, student = {"valid_rows": call.valid_rows, "vocab_size": self.pairing.vocab_size}, self.pairing.student
        with torch.no_grad():
            teacher_log_p = fused_log_probs(
                targets, teacher.weight, call.labels, bias=teacher.bias, logit_scale=self.transform.scale,
                softcap=self.transform.softcap, **common,
            )  # fmt: skip
        log_p = fused_log_probs(
            call.hidden, call.head.weight, call.labels, bias=call.head.bias, lora=call.head.lora,
            logit_scale=student.scale, softcap=student.softcap, **common,
        )  # fmt: skip
        term, drawn = self.term, inputs.sampled_log_p if self.term.importance else None
        drawn = drawn if drawn is None else torch.where(learned, drawn.to(log_p.dtype), 0.0)
        advantage = torch.zeros_like(log_p)
        if term.teacher_weight:  # at weight 0, a token of teacher probability 0 would give NaN
            advantage = term.teacher_weight * teacher_advantage(log_p, teacher_log_p, learned, term.discount)
        if term.reward is not None and inputs.advantages is not None:
            advantage = advantage + inputs.advantages.to(log_p.dtype)
        loss = term.weight * surrogate_loss(log_p, advantage.detach(), learned, drawn, term.clip)
        items = learned.sum().clamp_min(1) if inputs.num_items is None else inputs.num_items
        return loss if self.reduction == "none" else loss.sum() / items
