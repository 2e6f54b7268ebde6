"""The loss of the sampled token alone, as in policy-gradient reinforcement learning.

With y a token that the student sampled, and sg the stop-gradient:

    A = sg(log p_t[y] - log p_s[y])            advantage; with a discount, plus those of the response's later tokens;
                                               times `teacher_weight`, plus the response's advantage by a reward
    r = p_s[y] / p_drawn[y]                    importance ratio: 1 where the tokens were sampled from p_s itself
    loss = -min(r A, clip(r, 1 - c, 1 + c) A)

Its gradient at r = 1 is -A grad log p_s[y], which is in expectation that of the reverse KL (the recipe of Lu and
Thinking Machines Lab, 2025, "On-policy distillation"; the clipped form is of Schulman et al., 2017, arXiv 1707.06347).

Without a discount a token's advantage follows from its own log-probability, so loss and gradients take one pass and
three GEMMs of the student's head (`distill_kernels.fused_policy_gradient_loss`). With one it depends on later tokens:
log-probabilities come first (`fused_log_probs`), and the gradients take the logits a second time.
"""

from __future__ import annotations

import torch
from distill_kernels import fused_log_probs, fused_policy_gradient_loss

from distill.core.labels import IGNORE_INDEX
from distill.models.head import HeadWeights
from distill.objectives.targets import HeadForward
from distill.objectives.term_loss import TermLoss
from distill.recipe.loss import PolicyGradientTerm


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
    # after n rounds `total` sums the next 2^n tokens of the stretch, so that log2(S) rounds reach its end
    total = values
    reaches = learned
    step = 1
    while step < values.shape[-1]:
        later = torch.zeros_like(total)
        open_ = torch.zeros_like(reaches)
        later[..., :-step] = total[..., step:]
        open_[..., :-step] = reaches[..., step:]
        # `reaches`: the next `step` tokens, this one included, are of one stretch
        follows = torch.zeros_like(learned)
        follows[..., :-step] = learned[..., step:]
        total = total + discount**step * later * (reaches & follows)
        reaches = reaches & open_
        step = 2 * step
    return total


class SampledTokenLoss(TermLoss):
    """The term `policy_gradient`, at temperature 1 whatever the loss's is; arguments as of `TermLoss`."""

    term: PolicyGradientTerm

    def reduced(self, call: HeadForward, teacher: HeadWeights | None) -> torch.Tensor:
        teacher_log_p = self._teacher_log_p(call, teacher) if self.term.teacher_weight else None
        sampled = call.inputs.sampled_log_p if self.term.importance else None
        rewards = call.inputs.advantages if self.term.reward is not None else None
        if self.term.discount and teacher_log_p is not None:
            rows = call.trained_rows()
            values = self._discounted_losses(call, teacher_log_p, sampled, rewards)
            return self.reduce(values.flatten()[rows], rows, call)
        if rewards is None and teacher_log_p is None:  # no reward was given, and it alone counts
            rewards = torch.zeros(call.labels.shape, device=call.labels.device)
        loss = fused_policy_gradient_loss(
            call.hidden,
            call.head.weight,
            call.labels,
            rewards,
            sampled,
            teacher_log_p,
            clip=self.term.clip if sampled is not None else None,
            kl_weight=self.term.teacher_weight,
            kl_estimator="reward",
            student_logit_scale=self.alignment.student.scale,
            student_softcap=self.alignment.student.softcap,
            **self.kernel_settings(),
            **self.alignment.arguments(call),
        )
        assert isinstance(loss, torch.Tensor)
        return loss

    def _teacher_log_p(self, call: HeadForward, teacher: HeadWeights | None) -> torch.Tensor:
        """Return the labels' log-probabilities under the teacher, [B, S] without a graph."""
        targets = call.inputs.targets
        assert isinstance(targets, torch.Tensor) and teacher is not None
        with torch.no_grad():
            return fused_log_probs(
                targets,
                teacher.weight,
                call.labels,
                bias=teacher.bias,
                logit_scale=self.transform.scale,
                softcap=self.transform.softcap,
                valid_rows=call.valid_rows,
                vocab_size=self.alignment.vocab_size,
            )

    def _discounted_losses(
        self, call: HeadForward, teacher_log_p: torch.Tensor, sampled: torch.Tensor | None, rewards: torch.Tensor | None
    ) -> torch.Tensor:
        """Return each token's loss [B, S] with advantages that depend on later tokens of the response."""
        term = self.term
        student = self.alignment.student
        learned = call.labels != IGNORE_INDEX
        log_p = fused_log_probs(
            call.hidden,
            call.head.weight,
            call.labels,
            bias=call.head.bias,
            lora=call.head.lora,
            logit_scale=student.scale,
            softcap=student.softcap,
            valid_rows=call.valid_rows,
            vocab_size=self.alignment.vocab_size,
        )
        if sampled is not None:
            sampled = torch.where(learned, sampled.to(log_p.dtype), 0.0)
        advantage = term.teacher_weight * teacher_advantage(log_p, teacher_log_p, learned, term.discount)
        if rewards is not None:
            advantage = advantage + rewards.to(log_p.dtype)
        return surrogate_loss(log_p, advantage.detach(), learned, sampled, term.clip)
