"""The loss of the sampled token alone, as policy gradients of reinforcement learning have it.

With y a token that the student drew, and sg holding constant:

    A = sg(log p_t[y] - log p_s[y])            advantage, with a discount those of later tokens of the answer too
    r = p_s[y] / p_drawn[y]                    importance ratio: 1 in value where the tokens were drawn from p_s itself
    loss = -min(r A, clip(r, 1 - c, 1 + c) A)

Its gradient at r = 1 is -A grad log p_s[y], which is in expectation that of the reverse KL (the recipe of Lu and
Thinking Machines Lab, 2025, "On-policy distillation"; the clipped form is of Schulman et al., 2017, arXiv 1707.06347).
Log-probabilities come from `distill_kernels.fused_log_probs`, without logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from distill_kernels import FusedDistillationLoss, LossTerm, fused_log_probs

from distill.core.labels import IGNORE_INDEX
from distill.models.head import HeadWeights, LogitTransform
from distill.recipe.loss import Loss, PlainTerm, PolicyGradientTerm
from distill.teachers.base import HeadCall, LossResult, Pairing
from distill.teachers.losses import TargetLoss, build_loss

TYPE = "policy_gradient"


def policy_gradient_loss(
    log_p: torch.Tensor, teacher_log_p: torch.Tensor, drawn_log_p: torch.Tensor | None = None, *,
    clip: float | None = None, discount: float = 0.0, learned: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Each token's loss.

    Args:
        log_p: of the drawn tokens under the student, [B, S], natural logarithms; gets a gradient.
        teacher_log_p: the same under the teacher; gets none.
        drawn_log_p: the same when they were drawn; None for the student as it is.
        clip: c above; None for no clipping.
        discount: share of a token's advantage that the one before it is given, 0 to 1.
        learned: bool [B, S], which tokens are the student's; between stretches of them nothing is handed back.

    Returns:
        Like `log_p`, 0 where not `learned`.
    """
    learned = torch.ones_like(log_p, dtype=torch.bool) if learned is None else learned
    advantage = (teacher_log_p - log_p).detach().masked_fill(~learned, 0.0)
    advantage = discounted(advantage, learned, discount) if discount else advantage
    ratio = (log_p - (log_p if drawn_log_p is None else drawn_log_p).detach()).exp()
    gain = ratio * advantage
    if clip is not None:
        gain = torch.minimum(gain, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -gain.masked_fill(~learned, 0.0)


def discounted(values: torch.Tensor, learned: torch.Tensor, discount: float) -> torch.Tensor:
    """sum_k discount^k values[t + k] over the rest of each stretch of `learned` tokens; [B, S], by doubling."""
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


class SampledTokenLoss(TargetLoss):
    """The policy-gradient term of a recipe's loss beside its fused terms; without any, forward KL for the figures.

    Args:
        section: the recipe's.
        transforms: scale and soft cap of both models.
    """

    def __init__(self, section: Loss, transforms: dict[str, object]) -> None:
        rest = [term for term in section.terms if term.type != TYPE and term.weight > 0]
        self.sampled = [term for term in section.terms if isinstance(term, PolicyGradientTerm) and term.weight > 0]
        self.is_alone = not rest
        plain = section.model_copy(update={"terms": rest or [PlainTerm(type="forward_kl")]})
        self.fused: FusedDistillationLoss = build_loss(plain, transforms)
        self.objective, self.reduction, self.workspace = self.fused.objective, "mean", None

    @property
    def terms(self) -> Sequence[LossTerm]:
        """Of the loss, this one last."""
        return [*([] if self.is_alone else self.fused.terms), LossTerm(TYPE, sum(term.weight for term in self.sampled))]

    def __call__(self, call: HeadCall, pairing: Pairing, teacher: HeadWeights, transform: LogitTransform) -> LossResult:
        """The loss inside the student head's own call, with the fused terms' statistics."""
        targets, inputs, learned = call.inputs.targets, call.inputs, call.labels != IGNORE_INDEX
        assert isinstance(targets, torch.Tensor)
        common = {"valid_rows": call.valid_rows, "vocab_size": pairing.vocab_size}
        with torch.no_grad():
            teacher_log_p = fused_log_probs(
                targets, teacher.weight, call.labels, bias=teacher.bias, logit_scale=transform.scale,
                softcap=transform.softcap, **common,
            )  # fmt: skip
        log_p = fused_log_probs(
            call.hidden, call.head.weight, call.labels, bias=call.head.bias, lora=call.head.lora,
            logit_scale=pairing.student.scale, softcap=pairing.student.softcap, **common,
        )  # fmt: skip
        drawn = inputs.drawn_log_p
        drawn = drawn if drawn is None else torch.where(learned, drawn.to(log_p.dtype), 0.0)
        loss = torch.stack([
            term.weight * policy_gradient_loss(
                log_p, teacher_log_p, drawn if term.importance else None, clip=term.clip, discount=term.discount,
                learned=learned,
            )
            for term in self.sampled
        ]).sum(0)  # fmt: skip
        items = learned.sum().clamp_min(1) if inputs.num_items is None else inputs.num_items
        loss = loss if self.reduction == "none" else loss.sum() / items
        if self.is_alone and not inputs.statistics:
            return loss
        self.fused.reduction, self.fused.workspace = self.reduction, self.workspace
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_alone):
            fused: LossResult = self.fused(
                call.hidden, call.head.weight, targets, teacher.weight, call.labels, teacher_bias=teacher.bias,
                **pairing.arguments(call),
            )  # fmt: skip
        value, statistics = fused if isinstance(fused, tuple) else (fused, None)
        loss = loss if self.is_alone else loss + value
        return loss if statistics is None else (loss, statistics)


def is_sampled(section: object) -> bool:
    """Whether a loss has the term."""
    return isinstance(section, Loss) and any(term.type == TYPE and term.weight > 0 for term in section.terms)
